//! Where it is unknown whether a copy has ended, its memory is leaked, never used for something else. A program of its
//! own, since what is leaked here stays.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    on_device::{Devices, Fault, Played},
    reading::{Kind, LONG, Place, TestFile, assert_all_hold, range, submit},
    stand_in::{STAND_IN, Vendor},
    tensor, write_model,
};
use hoistway::{
    Dtype, Error, LoadOptions, Route,
    read::{Priority, Reader, ReaderOptions},
};
use hoistway_device::Device;
use std::time::{Duration, Instant};

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
        }
    }

    for vendor in Vendor::ALL {
        let options = LoadOptions::default().device(vendor.device(0)).route(Route::Staged);
        let loaded = hoistway::load(&[&path], &options).unwrap();
        let with_tensors = STAND_IN.count("device_bytes");
        STAND_IN.set(&vendor.faults("cuMemFree_v2:*=999"));
        drop(loaded);
        assert_eq!(STAND_IN.count("device_bytes"), with_tensors, "kernels may still read it");
        STAND_IN.reset();
    }
}

/// A reader stays: it does without the slots that are in doubt, and when none is left says so rather than wait for one.
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
        for lost in 1..=3 {
            played.fail(Fault::Doubt, None);
            let mut places = [on_device(0), Kind::Memory].map(|kind| Place::new(kind, range(0, 1000)));
            let batch = submit(&reader, &open, &mut places, Priority::Demand);
            let error = batch.wait_read(0, LONG).error().unwrap().to_string();
            assert!(error.contains("copying to it"), "{error}");
            assert!(batch.wait_read(1, LONG).error().is_none());
            played.reset();
            let mut places = [0, 300_000].map(|start| Place::new(on_device(1), range(start, 200_000)));
            let batch = submit(&reader, &open, &mut places, Priority::Demand);
            match batch.wait_within(LONG).expect("a read waits for a slot that never comes back") {
                Ok(()) => {
                    assert!(lost < 3);
                    assert_all_hold(&file, &places, &batch);
                }
                Err(Error::DeviceUnavailable { device, why }) => {
                    let is_named = *device == played.device(0).to_string();
                    assert!(lost == 3 && is_named && why.fix.contains("new reader"), "{why}");
                    assert_eq!(batch.report().failed, 2);
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        drop(reader);
        assert!(played.pinned_bytes() >= before + 3 * chunk_bytes, "slots of copies in doubt stay");
        let mut place = [Place::new(on_device(0), range(5, 1000))];
        let reader = Reader::new(&options).unwrap();
        let batch = submit(&reader, &open, &mut place, Priority::Demand);
        batch.wait().unwrap_or_else(|error| panic!("{error}"));
        assert_all_hold(&file, &place, &batch);
    }
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
        assert!(Device::open(played.device(0)).unwrap().wait_for_all());

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
            assert_eq!(streams() > before, stays, "{fault}");
            STAND_IN.reset();
        }
    }
}
