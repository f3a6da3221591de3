//! Where it is unknown whether a copy has ended, its memory is set aside until the device tells. A program of its own, since
//! what is set aside counts as used.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    assert_is_file,
    on_device::{Devices, Fault, Played},
    reading::{Kind, LONG, Place, TestFile, assert_all_hold, range, submit, until},
    stand_in::{STAND_IN, Vendor},
    tensor, write_model,
};
use hoistway::{
    Checkpoint, Dtype, Error, FillTarget, Filled, LoadOptions, Order, Route,
    plan::Selection,
    read::{Priority, ReadRequest, Reader, ReaderOptions, Target},
};
use hoistway_device::{Device, DeviceMemory};
use std::{
    ffi::c_void,
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

/// A driver that does not tell whether work has ended.
const IN_DOUBT: &str =
    "cuEventSynchronize:*=999,cuStreamSynchronize:*=999,cuEventQuery:*=999,cuMemFree_v2:*=999";

#[test]
fn memory_that_may_still_be_copied_is_not_freed() {
    let devices = Devices::take();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("m.safetensors");
    write_model(&path, &[tensor("t", Dtype::U8, &[24 << 20])], 0, 3);
    for played in devices.each() {
        // The context may live, and so may the copy: a busy device, an unknown error.
        let codes = match played {
            Played::Cuda => &[46, 999][..],
            // 709 is what HIP says of a stream that it does not know.
            Played::Rocm => &[1, 709, 999],
            Played::Toy => &[1],
        };
        for &code in codes {
            let before = played.pinned_bytes();
            played.delay(Duration::from_millis(2));
            match played.vendor() {
                Some(vendor) => STAND_IN.set(&vendor.faults(&format!("cuEventSynchronize:*={code}"))),
                None => played.fail(Fault::Doubt, None),
            }
            let error = hoistway::load(&[&path], &played.staged()).unwrap_err();
            assert!(matches!(&error, Error::Device { source, .. } if source.code == code), "{error:?}");
            assert!(played.pinned_bytes() > before, "slots of copies in doubt stay ({code})");
            played.reset();
            hoistway_device::release_devices();
            assert_eq!(played.pinned_bytes(), before, "and come back ({code})");
        }
    }
    devices.assert_nothing_left("all copies have ended");

    for vendor in Vendor::ALL {
        let options = LoadOptions::default().device(vendor.device(0)).route(Route::Staged);
        let loaded = hoistway::load(&[&path], &options).unwrap();
        let with_tensors = STAND_IN.count("device_bytes");
        STAND_IN.set(&vendor.faults("cuMemFree_v2:*=999"));
        drop(loaded);
        assert_eq!(STAND_IN.count("device_bytes"), with_tensors, "kernels may still read it");
        STAND_IN.reset();
        Device::open(vendor.device(0)).unwrap().regain().unwrap();
        devices.assert_nothing_left("the device has told");
    }
}

/// A reader stays: it does without the slots that are in doubt, and when none is left says so rather than wait for one. When the
/// device tells, it has them again.
#[test]
fn memory_that_may_still_be_copied_is_not_freed_by_a_reader_which_goes_on_without_it() {
    let devices = Devices::take();
    let file = TestFile::new(1 << 20);
    let chunk_bytes = 64 << 10;
    let options = ReaderOptions::default().chunk_bytes(chunk_bytes).memory_budget_bytes(3 * chunk_bytes);
    for played in devices.each() {
        let on_device = |start| Kind::Device(played.device(0), start);
        let reader = Reader::new(&options).unwrap();
        let (open, before) = (file.open(), played.pinned_bytes());
        let in_doubt = || match played.vendor() {
            Some(vendor) => STAND_IN.set(&vendor.faults(IN_DOUBT)),
            None => played.fail(Fault::Doubt, None),
        };
        in_doubt();
        for lost in 1..=4 {
            let mut places = [on_device(0), Kind::Memory].map(|kind| Place::new(kind, range(0, 1000)));
            let batch = submit(&reader, &open, &mut places, Priority::Demand);
            match batch.wait_read(0, LONG).error().unwrap() {
                Error::Device { operation, .. } => assert!(lost < 4 && *operation == "waiting for copies"),
                Error::DeviceUnavailable { device, why } => {
                    let is_named = *device == played.device(0).to_string();
                    assert!(lost == 4 && is_named && why.fix.contains("try again"), "{why}");
                }
                other => panic!("{other:?}"),
            }
            assert!(batch.wait_read(1, LONG).error().is_none());
        }
        assert!(played.pinned_bytes() >= before + 3 * chunk_bytes, "slots of copies in doubt stay");
        played.reset();
        let mut places = [0, 300_000].map(|start| Place::new(on_device(1), range(start, 200_000)));
        let batch = submit(&reader, &open, &mut places, Priority::Demand);
        batch.wait_within(LONG).expect("a read waits for a slot").unwrap_or_else(|error| panic!("{error}"));
        assert_all_hold(&file, &places, &batch);
        drop((batch, places, reader));
        hoistway_device::release_devices();
        assert_eq!(played.pinned_bytes(), before);
        let mut place = [Place::new(on_device(0), range(5, 1000))];
        let before = played.pinned_bytes();
        in_doubt();
        let reader = Reader::new(&options).unwrap();
        let batch = submit(&reader, &open, &mut place, Priority::Demand);
        assert!(batch.wait().is_err());
        drop((batch, reader));
        assert!(played.pinned_bytes() >= before + chunk_bytes, "a slot in doubt outlives its reader");
        played.reset();
        let reader = Reader::new(&options).unwrap();
        let batch = submit(&reader, &open, &mut place, Priority::Demand);
        batch.wait().unwrap_or_else(|error| panic!("{error}"));
        assert_all_hold(&file, &place, &batch);
    }
}

/// A program that resets a device ends its work, and frees its memory.
#[test]
fn nothing_of_a_device_that_the_program_has_reset_is_in_doubt() {
    let devices = Devices::take();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("m.safetensors");
    let file = write_model(&path, &[tensor("t", Dtype::U8, &[1 << 20])], 0, 3);
    let device = Device::open(Vendor::Cuda.device(0)).unwrap();
    let memory = Arc::new(());
    let held = Arc::downgrade(&memory);
    device.set_aside(memory);
    STAND_IN.configure("FAULTS=cuMemFree_v2:*=999");
    device.regain().unwrap_err();
    assert!(device.is_in_doubt() && held.strong_count() == 1);
    STAND_IN.configure("FAULTS=cuCtxPushCurrent_v2:*=201");
    device.regain().unwrap();
    assert!(!device.is_in_doubt() && held.strong_count() == 0);
    STAND_IN.reset();
    // It is lost as long as something uses it.
    let options = LoadOptions::default().device(device.id()).route(Route::Staged);
    let same = Device::open(device.id()).unwrap();
    assert!(Arc::ptr_eq(&device, &same));
    drop((device, same));
    assert_is_file(&hoistway::load(&[&path], &options).unwrap(), &file);
    devices.assert_nothing_left("the device was opened anew");
}

/// Others may keep the context of a device that seems lost, as cuFile does.
#[test]
fn nothing_of_a_lost_device_stays_in_a_context_that_others_keep() {
    let devices = Devices::take();
    let retain: unsafe extern "C" fn(*mut *mut c_void, i32) -> i32 =
        STAND_IN.function("cuDevicePrimaryCtxRetain");
    let release: unsafe extern "C" fn(i32) -> i32 = STAND_IN.function("cuDevicePrimaryCtxRelease_v2");
    let device = Device::open(Vendor::Cuda.device(0)).unwrap();
    // SAFETY: of this signature in the driver, which the device has started.
    #[allow(unsafe_code)]
    unsafe {
        assert_eq!(retain(&mut std::ptr::null_mut(), 0), 0);
    }
    device.set_aside(());
    STAND_IN.configure("FAULTS=cuCtxPushCurrent_v2:*=201");
    device.regain().unwrap();
    assert!(device.is_lost());
    STAND_IN.reset();
    drop(device);
    devices.assert_nothing_left("the device was let go");
    // SAFETY: of this signature in the driver; it was retained above.
    #[allow(unsafe_code)]
    unsafe {
        assert_eq!(release(0), 0);
    }
}

/// A device with parked memory that the program has reset is opened anew by whatever uses it next, also by a reader that has used
/// it before.
#[test]
fn a_device_that_was_lost_is_opened_anew() {
    let devices = Devices::take();
    let file = TestFile::new(1 << 20);
    let id = Vendor::Cuda.device(0);
    let open = file.open();
    let lose = || {
        let device = Device::open(id).unwrap();
        device.set_aside(());
        STAND_IN.configure("FAULTS=cuCtxPushCurrent_v2:*=201");
        assert!(device.memory().is_err() && device.is_lost() && device.is_in_doubt());
        STAND_IN.reset();
    };
    lose();
    let device = Device::open(id).unwrap();
    assert!(!device.is_lost() && !device.is_in_doubt());
    drop(device);
    let reader = Reader::new(&ReaderOptions::default()).unwrap();
    let read = || {
        let request = ReadRequest::new(&open, range(5, 1000), Target::scratch(id));
        let batch = reader.submit([request], Priority::Demand).unwrap();
        batch.wait().unwrap_or_else(|error| panic!("{error}"));
    };
    read();
    lose();
    assert!(Device::open(id).unwrap().is_lost(), "the reader uses it");
    // A thread that carried the first read may be about to let it go.
    until("the device to be opened anew", || {
        read();
        !Device::open(id).unwrap().is_lost()
    });
    drop((reader, open));
    devices.assert_nothing_left("the device was opened anew");
}

/// Memory of the caller's is its own again once it is known that no copy writes to it.
#[test]
fn a_fill_is_cancelled_once_it_is_known_that_its_copies_have_ended() {
    let _devices = Devices::take();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("m.safetensors");
    write_model(&path, &[tensor("t", Dtype::U8, &[1 << 20])], 0, 3);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let request = Selection::all().resolve(checkpoint.catalog()).unwrap().remove(0);
    for vendor in Vendor::ALL {
        let device = Device::open(vendor.device(0)).unwrap();
        let memory = DeviceMemory::new(&device, 1 << 20).unwrap();
        let target = FillTarget::new(request.clone(), device.id(), memory.address(), memory.len());
        let options = LoadOptions::default().route(Route::Threads);
        STAND_IN.set(&vendor.faults("cuEventSynchronize:*=999,cuStreamSynchronize:*=999,cuEventQuery:*=999"));
        // SAFETY: `memory` outlives the load, and nothing else uses it before that is cancelled.
        #[allow(unsafe_code)]
        let mut filling = unsafe { checkpoint.fill(&[target], &options, Order::File) }.unwrap();
        loop {
            match filling.next_within(LONG) {
                Ok(Filled::Pending) => {}
                other => break assert!(other.is_err(), "{other:?}"),
            }
        }
        STAND_IN.configure(&vendor.faults(IN_DOUBT));
        for _ in 0..2 {
            let error = filling.cancel().unwrap_err();
            assert!(matches!(&error, Error::DeviceUnavailable { .. }), "{error:?}");
        }
        STAND_IN.reset();
        filling.cancel().unwrap();
    }
}

/// Also if the owner was not told to cancel it: whatever copies it has queued are waited for first.
#[test]
fn what_owns_the_targets_of_a_fill_is_kept_until_its_copies_have_ended() {
    let devices = Devices::take();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("m.safetensors");
    write_model(&path, &[tensor("t", Dtype::U8, &[1 << 20])], 0, 3);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let request = Selection::all().resolve(checkpoint.catalog()).unwrap().remove(0);
    let device = Device::open(Vendor::Cuda.device(0)).unwrap();
    let memory = DeviceMemory::new(&device, 1 << 20).unwrap();
    let target = FillTarget::new(request, device.id(), memory.address(), memory.len());
    STAND_IN.configure("FAULTS=cuEventSynchronize:*=999,cuStreamSynchronize:*=999,cuEventQuery:*=999");
    STAND_IN.configure("BLOCKS=cuEventSynchronize");
    let waits = || STAND_IN.count("calls.cuEventSynchronize");
    let before = waits();
    let options = LoadOptions::default().route(Route::Threads);
    // SAFETY: `memory` outlives the load, and nothing else uses it before that is cancelled.
    #[allow(unsafe_code)]
    let mut filling = unsafe { checkpoint.fill(&[target], &options, Order::File) }.unwrap();
    until("the copy to be waited for", || waits() > before);
    STAND_IN.configure(&format!("FAULTS={IN_DOUBT}"));
    let (owner, held) = counted();
    let sets_aside = thread::spawn(move || {
        filling.set_aside(owner);
        filling
    });
    // Time for an owner that is let go too early: that is no error of a slow machine.
    let mut was_held = true;
    for _ in 0..100 {
        device.ask_again();
        was_held &= held.strong_count() == 1;
        thread::sleep(Duration::from_millis(1));
    }
    STAND_IN.configure("BLOCKS=");
    let mut filling = sets_aside.join().unwrap();
    assert!(was_held, "a copy is under way");
    device.ask_again();
    assert_eq!(held.strong_count(), 1, "it is not known whether the copy has ended");
    STAND_IN.reset();
    filling.cancel().unwrap();
    assert_eq!(held.strong_count(), 0);
    drop((filling, memory, device));
    devices.assert_nothing_left("the copy has ended");
}

/// Memory, and what tells whether it was dropped.
fn counted() -> (Arc<()>, Weak<()>) {
    let memory = Arc::new(());
    let held = Arc::downgrade(&memory);
    (memory, held)
}

/// A stream of HIP's that is destroyed forgets its work, so it is waited for first; not without limit where that is in vain.
#[test]
fn a_stream_whose_work_may_be_in_flight_stays_and_is_not_waited_for() {
    let devices = Devices::take();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("m.safetensors");
    write_model(&path, &[tensor("t", Dtype::U8, &[1 << 20])], 0, 3);
    let streams = || STAND_IN.count("streams");
    for played in devices.each().filter(|played| *played == Played::Rocm) {
        // Waits that fail: of an event of a long copy; and of the stream itself, where the copies have ended.
        const LATENCY: Duration = Duration::from_secs(600);
        let (before, begin) = (streams(), Instant::now());
        STAND_IN.set(&format!("COPY_LATENCY_US={}", LATENCY.as_micros()));
        STAND_IN.set("FAULTS=hipEventSynchronize:*=999");
        assert!(hoistway::load(&[&path], &played.staged()).is_err());
        assert!(begin.elapsed() < LATENCY / 2, "it took {:?}", begin.elapsed());
        assert!(streams() > before);
        // The copy ends.
        STAND_IN.reset();
        Device::open(played.device(0)).unwrap().settle().unwrap();

        for (fault, stays) in [
            ("hipStreamSynchronize:*=999", true),
            ("hipStreamSynchronize:*=719", false),
            ("hipStreamDestroy:*=1", true),
            ("", false),
        ] {
            let before = streams();
            STAND_IN.set(&format!("FAULTS={fault}"));
            drop(
                hoistway::load(&[&path], &played.staged()).unwrap_or_else(|error| panic!("{fault}: {error}")),
            );
            // The next load would use it.
            hoistway_device::release_devices();
            assert_eq!(streams() > before, stays, "{fault}");
            STAND_IN.reset();
        }
    }
}
