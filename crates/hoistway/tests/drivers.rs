//! What devices of drivers have: pools, kernels, contexts, devices without memory of their own, and each function of the
//! driver that can fail. On the stand-in, as the driver of each vendor.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    Footprint, TestTensor, assert_is_file, assert_nothing_left, in_memory, make_cold, make_warm, mixed_model,
    on_device::{chunky, disk},
    reading::{LONG, until},
    stand_in::{STAND_IN, Turn, Vendor},
    tensor, write_model,
};
use hoistway::{
    Checkpoint, DeviceAllocator, DeviceId, DirectIo, Dtype, Error, LoadOptions, Route, TensorMemory,
    memory::LentMemory,
    plan::{Layout, Selection, TensorSlice},
    route::fault::{Fault, FaultScript},
    save::{SaveOptions, TensorData, save as save_file},
};
use hoistway_device::{CopyStream, Device, DeviceMemory, Fence};
use std::{
    collections::{BTreeMap, HashSet},
    ffi::c_void,
    fs,
    ops::ControlFlow,
    path::Path,
    ptr,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// Loads to the vendor's first device, by whichever route.
fn to(vendor: Vendor) -> LoadOptions {
    LoadOptions::default().device(vendor.device(0))
}

fn staged(vendor: Vendor) -> LoadOptions {
    to(vendor).route(Route::Staged)
}

#[test]
fn conversions_do_with_fewer_slots_where_the_device_has_little_memory() {
    let stand_in = Turn::take();
    let directory = disk();
    let path = directory.path().join("halves.safetensors");
    let tensors: Vec<TestTensor> =
        (0..4).map(|i| tensor(&format!("t{i}"), Dtype::Bf16, &[4 << 20])).collect();
    write_model(&path, &tensors, 0, 3);
    for vendor in Vendor::ALL {
        for route in [Route::Staged, Route::Auto] {
            for warm in [false, true] {
                if warm {
                    make_warm(&path)
                } else {
                    make_cold(&path)
                }
                let options = to(vendor).dtype(Dtype::F32).chunk_bytes(1 << 20).route(route);
                // 64 MiB of tensors, and 33 reads of 1 MiB.
                stand_in.set("MEMORY_MIB=72");
                let few = hoistway::load(&[&path], &options);
                stand_in.reset();
                let few = few.unwrap_or_else(|error| panic!("{vendor:?} {route} {warm}: {error}"));
                if route == Route::Staged {
                    let report = few.report().to_string();
                    assert!(report.contains("slots: the device has no memory for more"), "{report}");
                }
                let all = hoistway::load(&[&path], &options).unwrap();
                for tensor in all.tensors() {
                    let other = few.get(tensor.name()).unwrap();
                    assert!(*other.bytes().unwrap() == *tensor.bytes().unwrap(), "{}", tensor.name());
                }
            }
        }
    }
    stand_in.assert_nothing_left("loads that convert");
}

#[test]
fn tensors_outlive_everything_and_give_their_memory_back() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    for vendor in Vendor::ALL {
        for pools in [0, 1] {
            stand_in.set(&format!("POOLS={pools}"));
            let selection = Selection::all().select("large");
            let options = staged(vendor).device(vendor.device(1)).dtype(Dtype::F32).selection(selection);
            let ordered = stand_in.count(&format!("calls.{}", vendor.symbol("cuMemAllocAsync")));
            drop(hoistway::load(&[&path], &options).unwrap());
            assert_eq!(
                stand_in.count(&format!("calls.{}", vendor.symbol("cuMemAllocAsync"))) > ordered,
                pools == 1
            );
            hoistway_device::release_devices();
            let contexts = stand_in.count("contexts");
            let checkpoint = Checkpoint::open(&[&path]).unwrap();
            let loaded = checkpoint.load(&staged(vendor).device(vendor.device(1))).unwrap();
            drop(checkpoint);
            assert_is_file(&loaded, &file);
            let kept = loaded.get("large").unwrap().clone();
            let expected = kept.bytes().unwrap().into_owned();
            drop(loaded);
            assert_eq!(kept.device(), vendor.device(1));
            assert_eq!(*kept.bytes().unwrap(), *expected);
            assert!(stand_in.count("device_bytes") > 0);
            hoistway_device::release_devices();
            assert_eq!(
                stand_in.count("pinned_bytes"),
                0,
                "no staging is kept for a device that was released"
            );
            drop(kept);
            assert_eq!(stand_in.leftovers(), []);
            assert_eq!(stand_in.count("contexts"), contexts, "the context is released too");
        }
    }
}

/// Some platforms pin no memory. Copies go by way of the driver's own then, which the report says.
#[test]
fn a_platform_that_pins_no_memory_is_served_from_pageable_slots() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    for vendor in Vendor::ALL {
        stand_in.set(&vendor.faults("cuMemHostRegister_v2:*=801"));
        let loaded = hoistway::load(&[&path], &staged(vendor)).unwrap();
        assert_eq!(stand_in.count("pinned_bytes"), 0);
        assert_is_file(&loaded, &file);
        let notes = &loaded.report().notes;
        assert!(notes.iter().any(|note| note.contains("not pinned")), "{notes:?}");
        drop(loaded);
        stand_in.reset();
    }
    assert_eq!(stand_in.leftovers(), []);
}

/// A save does without pinned memory, and its report says so.
#[test]
fn a_save_whose_staging_cannot_be_pinned_says_so() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, _) = chunky(directory.path());
    let copy = directory.path().join("copy.safetensors");
    for vendor in Vendor::ALL {
        let loaded = hoistway::load(&[&path], &staged(vendor)).unwrap();
        let tensors: Vec<_> = loaded.tensors().iter().map(TensorData::from).collect();
        let save = |fault: &str| {
            stand_in.set(&vendor.faults(fault));
            let options = SaveOptions::default();
            let go_on = |_| ControlFlow::Continue(());
            let saved = save_file(&copy, &tensors, None, &options, go_on);
            stand_in.reset();
            assert_is_file(&loaded, &fs::read(&copy).unwrap());
            saved.unwrap().notes.join("; ")
        };
        assert_eq!(save("cuMemHostRegister_v2:9=2"), "");
        for (fault, says) in [
            ("cuMemHostRegister_v2:*=801", "pinning host memory"),
            ("cuMemHostRegister_v2:*=2", "of pinned memory"),
        ] {
            let notes = save(fault);
            assert!(notes.contains("staging is not pinned"), "{vendor:?}: {notes}");
            assert!(notes.contains(says), "{vendor:?}: {notes}");
        }
    }
}

/// Slots are pinned before the tables of conversions.
#[test]
fn conversions_do_without_pinned_tables_and_the_report_says_so() {
    let stand_in = Turn::take();
    let directory = disk();
    let path = directory.path().join("floats.safetensors");
    write_model(&path, &[tensor("t", Dtype::Bf16, &[1 << 20])], 0, 2);
    for vendor in Vendor::ALL {
        let load = |faults: &str| {
            stand_in.set(&vendor.faults(faults));
            let options = staged(vendor).dtype(Dtype::F32).chunk_bytes(256 << 10);
            let loaded = hoistway::load(&[&path], &options).unwrap();
            stand_in.reset();
            let notes = loaded.report().notes.join("; ");
            (loaded.get("t").unwrap().bytes().unwrap().into_owned(), notes)
        };
        let (bytes, notes) = load("cuMemHostRegister_v2:99=2");
        assert!(!notes.contains("pinned"), "{notes}");
        let (same, notes) = load("cuMemHostRegister_v2:2=2,cuMemHostRegister_v2:3=2");
        assert!(bytes == same);
        assert!(notes.contains("only a part of staging is pinned"), "{vendor:?}: {notes}");
        let (same, notes) = load("cuMemHostRegister_v2:2=2");
        assert!(bytes == same);
        assert!(notes.contains("of staging memory were pinned, in pieces of one slot"), "{notes}");
    }
}

/// What is kept for later loads counts against what may be pinned, and is given back for what needs it now.
#[test]
fn memory_that_is_kept_pinned_makes_room_for_what_has_to_be_pinned() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    for vendor in Vendor::ALL {
        let other = staged(vendor).device(vendor.device(1));
        let since = Instant::now();
        drop(hoistway::load(&[&path], &other).unwrap());
        let kept = vendor.count("pinned_bytes");
        stand_in.configure(&vendor.faults("cuMemHostRegister_v2:1=2"));
        let loaded = hoistway::load(&[&path], &staged(vendor)).unwrap();
        stand_in.configure("FAULTS=");
        assert_is_file(&loaded, &file);
        if since.elapsed() >= Duration::from_secs(5) {
            // It may have been given back before it was needed.
            continue;
        }
        assert!(kept > 0 && vendor.count("pinned_bytes") <= kept, "what was kept is let go");
        let notes = &loaded.report().notes;
        assert!(!notes.iter().any(|note| note.contains("staging memory")), "{notes:?}");
    }
}

/// One call of the driver pins what a load needs, and none what it finds pinned.
#[test]
fn staging_is_pinned_once_and_kept_for_the_next_load() {
    /// What is not used for so long is let go.
    const IDLE_TIME: Duration = Duration::from_secs(5);
    let stand_in = Turn::take();
    let directory = disk();
    let path = directory.path().join("one.safetensors");
    let file = write_model(&path, &[tensor("t", Dtype::U8, &[16 << 20])], 0, 4);
    // What was just written must reach the drive first.
    make_cold(&path);
    for vendor in Vendor::ALL {
        let calls = || stand_in.count(&format!("calls.{}", vendor.symbol("cuMemHostRegister_v2")));
        let load = |(chunk_bytes, warm)| {
            if warm {
                make_warm(&path)
            } else {
                make_cold(&path)
            }
            let before = calls();
            let loaded = hoistway::load(&[&path], &staged(vendor).chunk_bytes(chunk_bytes)).unwrap();
            let pinned = calls() - before;
            assert_is_file(&loaded, &file);
            pinned
        };
        // A busy machine may let more time pass now and then.
        let is_shown = (0..10).any(|_| {
            hoistway_device::release_devices();
            let begun = Instant::now();
            let pinned = [(4 << 20, true), (4 << 20, false), (256 << 10, true), (1 << 20, true)].map(load);
            let kept = vendor.count("pinned_bytes");
            let is_in_time = begun.elapsed() < IDLE_TIME;
            let is_right = pinned == [1, 0, 0, 0] && (16 << 20..=128 << 20).contains(&kept);
            assert!(is_right || !is_in_time, "{vendor:?}: {pinned:?}, {kept}");
            is_in_time
        });
        assert!(is_shown, "{vendor:?}: loads take too long");
        hoistway_device::release_devices();
        assert_eq!(vendor.count("pinned_bytes"), 0);
    }
    stand_in.assert_nothing_left("loads one after the other");
}

/// What a load gives back once its device was released would keep the device open.
#[test]
fn no_staging_is_kept_for_a_device_that_was_released_meanwhile() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    make_warm(&path);
    for vendor in Vendor::ALL {
        let contexts = stand_in.count("contexts");
        stand_in.set("COPY_LATENCY_US=60000000");
        let loading = Checkpoint::open(&[&path]).unwrap().start(&staged(vendor)).unwrap();
        until("staging is pinned", || vendor.count("pinned_bytes") > 0);
        hoistway_device::release_devices();
        stand_in.reset();
        let loaded = loading.wait().unwrap();
        assert_is_file(&loaded, &file);
        drop(loaded);
        assert_eq!((vendor.count("pinned_bytes"), stand_in.count("contexts")), (0, contexts));
    }
    stand_in.assert_nothing_left("loads whose devices were released");
}

/// Each fault of the driver, at each place where it can happen: a typed error, and nothing left.
#[test]
fn faults_of_the_driver_are_typed_errors_and_leave_nothing() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    // Its conversion makes kernels run, and its pieces scratch memory necessary.
    let floats = directory.path().join("floats.safetensors");
    write_model(&floats, &[tensor("f", Dtype::F16, &[3 << 20])], 0, 3);
    // The memory of a device of the stand-in has a file, which stays.
    for vendor in Vendor::ALL {
        drop(hoistway::load(&[&path], &staged(vendor)).unwrap());
    }
    let before = Footprint::now();
    let faults = [
        ("cuDevicePrimaryCtxRetain:1=2", false),
        // After what a device allocates for itself.
        ("cuMemAlloc_v2:6=2", false),
        ("cuMemAlloc_v2:1=999", false),
        ("cuMemAllocAsync:*=2", true),
        ("cuStreamCreate:1=2", false),
        ("cuMemHostRegister_v2:*=2", false),
        ("cuMemHostRegister_v2:*=999", false),
        ("cuEventRecord:3=2", false),
        ("cuEventRecord:2=700", false),
        ("cuMemcpyHtoDAsync_v2:1=1", false),
        ("cuEventSynchronize:2=719", false),
        ("cuCtxPushCurrent_v2:9=201", false),
        ("copy:1=700", false),
        ("copy:4=719", false),
        ("kernel:1=700", true),
        ("cuModuleLoadData:*=218", true),
        ("cuModuleGetFunction:*=500", true),
        ("cuLaunchKernel:1=701", true),
    ];
    for vendor in Vendor::ALL {
        let name = vendor.device(0).to_string();
        // Codes and functions that the other does not have.
        let of_vendor = match vendor {
            // The second time that copies are queued, alone or several by one call.
            Vendor::Cuda => &[
                ("copy:*=714", false),
                ("cuMemcpyHtoDAsync_v2:2=719,cuMemcpyBatchAsync:1=719", false),
                ("cuMemcpyHtoDAsync_v2:2=1,cuMemcpyBatchAsync:1=1", false),
            ][..],
            Vendor::Rocm => &[
                ("hipMemcpyHtoDAsync:3=719", false),
                ("copy:*=710", false),
                ("hipSetDevice:1=101", false),
                ("hipSetDevice:*=999", false),
                ("hipHostRegister:*=1", false),
            ],
        };
        for (fault, converts) in faults.into_iter().chain(of_vendor.iter().copied()) {
            for warm in [false, true] {
                let (path, dtype) = if converts { (&floats, Some(Dtype::F32)) } else { (&path, None) };
                if warm {
                    make_warm(path)
                } else {
                    make_cold(path)
                }
                stand_in.reset();
                stand_in.set("JITTER_US=200");
                stand_in.set(&vendor.faults(fault));
                let mut options = staged(vendor).layout(Layout::Tensor);
                options.dtype = dtype;
                let error = hoistway::load(&[path], &options).expect_err(fault);
                match &error {
                    Error::Device { device, source, .. } => {
                        assert_eq!(*device, name);
                        assert!(error.to_string().contains(&name) && source.code > 0, "{error}");
                    }
                    Error::MemoryBudget { limit_name, .. } => {
                        assert!(
                            fault.starts_with("cuMemAlloc") && limit_name.contains(&name),
                            "{fault}: {error}"
                        );
                    }
                    Error::Allocation { kind: "pinned memory", .. } => {
                        assert!(fault.contains("HostRegister"), "{fault}");
                    }
                    other => panic!("{fault}: {other:?}"),
                }
                assert_nothing_left(&before);
            }
        }
        stand_in.reset();
        assert_is_file(&hoistway::load(&[&path], &staged(vendor)).unwrap(), &file);
    }
}

/// Others keep the context of a device, and what is in it: here an allocation.
#[test]
fn what_one_refusal_meets_is_given_back_all_the_same() {
    let stand_in = Turn::take();
    for vendor in Vendor::ALL {
        let device = Device::open(vendor.device(0)).unwrap();
        let _others = DeviceMemory::new(&device, 16).unwrap();
        // SAFETY: the default stream lives as long as the device, which keeps the event for the next one.
        drop(unsafe { Fence::of_stream(&device, 0) }.unwrap());
        let before = stand_in.leftovers();
        let made: [(_, &dyn Fn() -> Box<dyn std::any::Any>); 2] = [
            ("a stream", &|| Box::new(CopyStream::new(&device).unwrap())),
            // SAFETY: the default stream lives as long as the device.
            ("an event", &|| Box::new(unsafe { Fence::of_stream(&device, 0) }.unwrap())),
        ];
        for (name, make) in made {
            let it = make();
            stand_in.configure(&vendor.faults("cuCtxPushCurrent_v2:1=201"));
            drop(it);
            assert_eq!(stand_in.leftovers(), before, "{vendor:?}: {name}");
            stand_in.reset();
        }
    }
}

#[test]
fn slow_and_reordered_streams_deliver_the_same_bytes() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    for vendor in Vendor::ALL {
        for settings in
            [&["COPY_LATENCY_US=2000"][..], &["JITTER_US=2000"], &["COPY_MIB_S=500", "JITTER_US=500"]]
        {
            stand_in.reset();
            for setting in settings {
                stand_in.set(setting);
            }
            for (route, warm) in [(Route::Staged, false), (Route::Staged, true), (Route::Auto, false)] {
                if warm {
                    make_warm(&path)
                } else {
                    make_cold(&path)
                }
                let options = to(vendor).route(route).chunk_bytes(512 << 10);
                let loaded = hoistway::load(&[&path], &options).unwrap();
                assert_is_file(&loaded, &file);
                if route == Route::Staged {
                    assert!(loaded.report().device.as_ref().unwrap().copy_wait_seconds > 0.0);
                }
            }
        }
    }
}

/// Threads that copy are added while the device waits for them, and no more than were asked for.
#[test]
fn a_device_that_waits_for_bytes_gets_more_threads() {
    for directory in [disk()].into_iter().chain(in_memory()) {
        gets_more_threads(directory.path());
    }
}

fn gets_more_threads(directory: &Path) {
    let _stand_in = Turn::take();
    let (path, file) = chunky(directory);
    make_warm(&path);
    for most in [2, 6] {
        let seen = Arc::new(Mutex::new(HashSet::new()));
        let noted = seen.clone();
        let script = FaultScript::new(move |_, _| {
            let mut seen = noted.lock().unwrap();
            if thread::current().name() == Some("hoistway-copy") {
                seen.insert(thread::current().id());
            }
            // So long that the device waits, however late its stream's thread gets a processor.
            let delay = Duration::from_millis(if most > 2 { 20 } else { 1 });
            (seen.len() <= 2).then_some(Fault::Delay(delay))
        });
        let options = staged(Vendor::Cuda).chunk_bytes(16 << 10).threads(most).faults(script);
        assert_is_file(&hoistway::load(&[&path], &options).unwrap(), &file);
        let copied = seen.lock().unwrap().len();
        match most {
            2 => assert!(copied <= 2, "{copied}"),
            _ => assert!((3..=most).contains(&copied), "{copied}"),
        }
    }
}

/// Copies begin while files are still being read: the trace of the stand-in says when each ran.
#[test]
fn copies_overlap_with_reads() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    for vendor in Vendor::ALL {
        let trace = directory.path().join(format!("{vendor:?}.jsonl"));
        stand_in.set(&format!("TRACE={}", trace.display()));
        stand_in.set("COPY_LATENCY_US=500");
        let (last_read, before) = (Arc::new(AtomicU64::new(0)), STAND_IN.count("copies"));
        let noted = last_read.clone();
        let script = FaultScript::new(move |number, _| {
            if number >= 16 {
                // However late the stream's thread gets a processor.
                until("earlier reads are copied", || STAND_IN.count("copies") >= before + 12);
            }
            noted.fetch_max(monotonic_ns(), Ordering::Relaxed);
            Some(Fault::Delay(Duration::from_millis(2)))
        });
        make_warm(&path);
        let options = to(vendor)
            .route(Route::Threads)
            .direct(DirectIo::Never)
            .threads(1)
            .chunk_bytes(1 << 20)
            .faults(script);
        assert_is_file(&hoistway::load(&[&path], &options).unwrap(), &file);
        stand_in.reset();
        let last_read = last_read.load(Ordering::Relaxed);
        let lines = fs::read_to_string(&trace).unwrap();
        let copies: Vec<serde_json::Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .filter(|line: &serde_json::Value| line["op"] == "h2d")
            .collect();
        let during = copies.iter().filter(|copy| copy["end_ns"].as_u64().unwrap() < last_read).count();
        assert!(copies.len() >= 24 && during * 4 >= copies.len(), "{during} of {} copies", copies.len());
    }
}

/// The bus carries the bytes of a slot while a kernel works on those of the one before: they are on different streams. Copies alone
/// share one.
#[test]
fn conversions_take_two_streams_in_turn() {
    let stand_in = Turn::take();
    let directory = disk();
    let path = directory.path().join("halves.safetensors");
    write_model(&path, &[tensor("t", Dtype::F16, &[8 << 20])], 0, 3);
    for vendor in Vendor::ALL {
        for dtype in [None, Some(Dtype::F32)] {
            let trace = directory.path().join(format!("{vendor:?} {dtype:?}.jsonl"));
            stand_in.set(&format!("TRACE={}", trace.display()));
            let mut options = staged(vendor).chunk_bytes(1 << 20);
            options.dtype = dtype;
            drop(hoistway::load(&[&path], &options).unwrap());
            stand_in.reset();
            let lines = fs::read_to_string(&trace).unwrap();
            let mut slots: BTreeMap<u64, usize> = BTreeMap::new();
            for line in lines.lines() {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                if line["op"] == "h2d" && line["bytes"].as_u64().unwrap() > 64 << 10 {
                    *slots.entry(line["stream"].as_u64().unwrap()).or_default() += 1;
                }
            }
            let counts: Vec<usize> = slots.into_values().collect();
            match dtype {
                None => assert_eq!(counts.len(), 1, "{vendor:?}: {counts:?}"),
                // The last extent is a few bytes long, and took one of 17 turns.
                Some(_) => {
                    let is_in_turn = matches!(counts[..], [7..=9, 7..=9]) && counts[0] + counts[1] == 16;
                    assert!(is_in_turn, "{vendor:?}: {counts:?}");
                }
            }
        }
    }
    stand_in.assert_nothing_left("conversions");
}

/// Both streams come after the work that may still use memory which an allocator lends.
#[test]
fn conversions_wait_for_what_still_uses_memory_that_is_lent() {
    static GATE: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());
    unsafe extern "C" fn wait(_: *mut c_void) {
        drop(GATE.1.wait_while(GATE.0.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
    /// Also after a panic, so that the load ends.
    struct Opens;
    impl Drop for Opens {
        fn drop(&mut self) {
            *GATE.0.lock().unwrap() = true;
            GATE.1.notify_all();
        }
    }
    type Handle = *mut c_void;
    let stand_in = Turn::take();
    let directory = disk();
    let path = directory.path().join("halves.safetensors");
    write_model(&path, &[tensor("t", Dtype::F16, &[8 << 20])], 0, 3);
    let options = staged(Vendor::Cuda).chunk_bytes(1 << 20).dtype(Dtype::F32);
    let plain = hoistway::load(&[&path], &options).unwrap();
    let expected = plain.get("t").unwrap().bytes().unwrap().into_owned();
    drop(plain);

    let push: unsafe extern "C" fn(Handle) -> i32 = stand_in.function("cuCtxPushCurrent_v2");
    let pop: unsafe extern "C" fn(*mut Handle) -> i32 = stand_in.function("cuCtxPopCurrent_v2");
    let retain: unsafe extern "C" fn(*mut Handle, i32) -> i32 = stand_in.function("cuDevicePrimaryCtxRetain");
    let release: unsafe extern "C" fn(i32) -> i32 = stand_in.function("cuDevicePrimaryCtxRelease_v2");
    let make: unsafe extern "C" fn(*mut Handle, u32) -> i32 = stand_in.function("cuStreamCreate");
    let destroy: unsafe extern "C" fn(Handle) -> i32 = stand_in.function("cuStreamDestroy_v2");
    let launch: unsafe extern "C" fn(Handle, unsafe extern "C" fn(Handle), Handle) -> i32 =
        stand_in.function("cuLaunchHostFunc");
    let fill: unsafe extern "C" fn(u64, u8, usize, usize) -> i32 = stand_in.function("cuMemsetD8Async");
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let [mut context, mut stream]: [Handle; 2] = [ptr::null_mut(); 2];
    // SAFETY: functions of the driver, of these types; all handles live until they are destroyed.
    unsafe {
        assert_eq!((retain(&mut context, 0), push(context)), (0, 0));
        assert_eq!((make(&mut stream, 1), launch(stream, wait, ptr::null_mut())), (0, 0));
        assert_eq!(pop(&mut context), 0);
    }
    let (of_context, of_stream) = (context.expose_provenance(), stream.expose_provenance());
    let allocate = move |bytes| {
        let memory = DeviceMemory::new(&device, bytes)?;
        let address = memory.address();
        // SAFETY: as above.
        unsafe {
            assert_eq!(push(ptr::with_exposed_provenance_mut(of_context)), 0);
            assert_eq!(fill(address, 0xEE, bytes as usize, of_stream), 0);
            assert_eq!(pop(&mut ptr::null_mut()), 0);
        }
        Ok(LentMemory::new(address, of_stream, Box::new(memory)))
    };
    // SAFETY: the memory lies on the device, nothing but the fill uses it, and `LentMemory` owns it.
    let options = options.allocator(unsafe { DeviceAllocator::new(allocate) });
    let (launched, run) = (STAND_IN.count("calls.cuLaunchKernel"), STAND_IN.count("kernels"));
    let loaded = thread::scope(|scope| {
        let opens = Opens;
        let load = scope.spawn(|| hoistway::load(&[&path], &options).unwrap());
        until("kernels on both streams", || STAND_IN.count("calls.cuLaunchKernel") >= launched + 4);
        // Time for kernels to run that do not wait.
        let end = Instant::now() + Duration::from_millis(200);
        while Instant::now() < end && STAND_IN.count("kernels") == run {
            thread::sleep(Duration::from_millis(1));
        }
        drop(opens);
        load.join().unwrap()
    });
    assert!(*loaded.get("t").unwrap().bytes().unwrap() == expected[..], "the fill came after the conversion");
    drop((loaded, options));
    // SAFETY: as above.
    unsafe {
        assert_eq!((push(context), destroy(stream), pop(&mut context), release(0)), (0, 0, 0, 0));
    }
    stand_in.assert_nothing_left("memory that was lent");
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The next load looks how much memory is free.
#[test]
fn memory_for_kernels_is_free_again_when_a_load_has_ended() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, _) = mixed_model(directory.path());
    for vendor in Vendor::ALL {
        let options = staged(vendor).dtype(Dtype::F32).selection(Selection::all().select("large"));
        // What the device keeps for itself is there before.
        let open = Device::open(vendor.device(0)).unwrap();
        let before = vendor.count("device_bytes");
        // What a stream is told to free is freed this much later.
        stand_in.set("JITTER_US=100000");
        let loaded = hoistway::load(&[&path], &options).unwrap();
        let report = loaded.report();
        let device = report.device.as_ref().unwrap();
        assert!(device.scratch_bytes > 0, "{report}");
        assert_eq!(vendor.count("device_bytes") - before, device.memory_bytes, "{report}");
        stand_in.reset();
        drop((loaded, open));
        stand_in.assert_nothing_left(&format!("{vendor:?}"));
    }
}

#[test]
fn floats_are_converted_on_the_way_and_other_types_are_not() {
    let _stand_in = Turn::take();
    let directory = disk();
    let path = directory.path().join("floats.safetensors");
    for vendor in Vendor::ALL {
        // An odd header puts elements at odd addresses, across the ends of chunks.
        for padding in [0, 1] {
            let file = write_model(
                &path,
                &[
                    tensor("b", Dtype::Bf16, &[700, 300]),
                    tensor("e", Dtype::F8E5M2, &[100_001]),
                    tensor("f", Dtype::F32, &[5000]),
                    tensor("i", Dtype::I16, &[77]),
                    tensor("none", Dtype::F16, &[0]),
                ],
                padding,
                11,
            );
            for chunk_bytes in [4096, 4 << 20] {
                make_cold(&path);
                let options = to(vendor).dtype(Dtype::F32).chunk_bytes(chunk_bytes);
                let loaded = hoistway::load(&[&path], &options).unwrap();
                let floats = |name: &str| -> Vec<u32> {
                    let tensor = loaded.get(name).unwrap();
                    assert_eq!(tensor.dtype(), Dtype::F32);
                    let bytes = tensor.bytes().unwrap();
                    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
                };
                let wide: Vec<u32> = common::expected(&file, "b")
                    .chunks_exact(2)
                    .map(|b| u32::from(u16::from_le_bytes(b.try_into().unwrap())) << 16)
                    .collect();
                assert_same_floats(&floats("b"), &wide);
                // e5m2 is the upper half of f16.
                let narrow: Vec<u32> = common::expected(&file, "e")
                    .iter()
                    .map(|&byte| half_to_single(u16::from(byte) << 8).to_bits())
                    .collect();
                assert_same_floats(&floats("e"), &narrow);
                assert_eq!(loaded.get("f").unwrap().bytes().unwrap(), common::expected(&file, "f"));
                assert_eq!(loaded.get("i").unwrap().dtype(), Dtype::I16);
                assert_eq!(loaded.get("i").unwrap().bytes().unwrap(), common::expected(&file, "i"));
                assert_eq!(loaded.get("none").unwrap().dtype(), Dtype::F32);
                let report = loaded.report();
                let moved: u64 = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
                assert_eq!(moved, report.tensor_bytes);
            }
        }
        for (device, dtype) in [(DeviceId::Cpu, Dtype::F32), (vendor.device(0), Dtype::I8)] {
            let options = LoadOptions::default().device(device).dtype(dtype);
            let error = hoistway::load(&[&path], &options).unwrap_err();
            assert!(matches!(error, Error::InvalidOption { option: "dtype", .. }), "{error:?}");
        }
        write_model(&path, &[tensor("double", Dtype::F64, &[3])], 0, 1);
        let error = hoistway::load(&[&path], &to(vendor).dtype(Dtype::Bf16)).unwrap_err();
        assert!(error.to_string().contains("'double'") && error.to_string().contains("F64"), "{error}");
    }
}

fn assert_same_floats(found: &[u32], expected: &[u32]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let (a, b) = (f32::from_bits(*found), f32::from_bits(*expected));
        assert!(found == expected || (a.is_nan() && b.is_nan()), "{found:#x} is not {expected:#x}");
    }
}

fn half_to_single(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 10 & 0x1f), f32::from(bits & 0x3ff));
    match exponent {
        0 => sign * mantissa * 2f32.powi(-24),
        31 if mantissa == 0.0 => sign * f32::INFINITY,
        31 => f32::NAN,
        _ => sign * (1.0 + mantissa / 1024.0) * 2f32.powi(exponent - 15),
    }
}

#[test]
fn many_small_tensors_of_odd_sizes_take_few_copies() {
    let stand_in = Turn::take();
    let directory = disk();
    let path = directory.path().join("small.safetensors");
    let tensors: Vec<TestTensor> =
        (0..2000).map(|i| tensor(&format!("t{i}"), Dtype::U8, &[1 + i % 97])).collect();
    let file = write_model(&path, &tensors, 0, 1);
    for vendor in Vendor::ALL {
        let before = stand_in.count("kernels");
        let loaded = hoistway::load(&[&path], &staged(vendor)).unwrap();
        let kernels = stand_in.count("kernels") - before;
        assert_is_file(&loaded, &file);
        for tensor in loaded.tensors() {
            assert_eq!(tensor.address() % 16, 0, "{} is misaligned", tensor.name());
        }
        assert!((1..10).contains(&kernels), "{kernels} kernels for 2000 tensors");
    }
}

/// A strided slice with a conversion makes a segment of each run: its tables count as staging.
#[test]
fn tables_of_many_segments_are_part_of_the_budget() {
    let stand_in = Turn::take();
    stand_in.set("POISON=0");
    let directory = disk();
    let path = directory.path().join("strided.safetensors");
    let file = write_model(&path, &[tensor("m", Dtype::F8E5M2, &[1 << 19, 2])], 0, 5);
    for vendor in Vendor::ALL {
        let selection = Selection::all().slice("m", TensorSlice::new(vec![0..1 << 19, 0..1]));
        let options = staged(vendor).selection(selection).dtype(Dtype::F16).chunk_bytes(128 << 10);
        let loaded = hoistway::load(&[&path], &options).unwrap();
        let report = loaded.report();
        assert!(report.memory.staging_bytes <= 128 << 20, "{report}");
        let halves: Vec<u8> =
            common::expected(&file, "m").chunks_exact(2).flat_map(|pair| [0, pair[0]]).collect();
        let found = loaded.get("m").unwrap().bytes().unwrap().into_owned();
        let is_nan = |half: &[u8]| half[1] & 0x7c == 0x7c && (half[1] & 3 != 0 || half[0] != 0);
        for (found, expected) in found.chunks_exact(2).zip(halves.chunks_exact(2)) {
            assert!(found == expected || (is_nan(found) && is_nan(expected)), "{found:?} {expected:?}");
        }
    }
}

#[test]
fn devices_that_are_not_there_are_errors() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, _) = mixed_model(directory.path());
    for vendor in Vendor::ALL {
        let options = LoadOptions::default().device(vendor.device(9));
        match hoistway::load(&[&path], &options).unwrap_err() {
            Error::DeviceUnavailable { device, why } => {
                assert_eq!(device, vendor.device(9).to_string());
                let variable = match vendor {
                    Vendor::Cuda => "CUDA_VISIBLE_DEVICES",
                    Vendor::Rocm => "HIP_VISIBLE_DEVICES",
                };
                assert!(why.reason.contains("2 devices") && why.fix.contains(variable), "{why}");
            }
            other => panic!("{other:?}"),
        }
        for route in [Route::Staged, Route::Gds, Route::GdsCompat] {
            let on_host = LoadOptions::default().route(route);
            let error = hoistway::load(&[&path], &on_host).unwrap_err();
            assert!(matches!(error, Error::InvalidOption { option: "route", .. }), "{error:?}");
        }
        let mapped = to(vendor).route(Route::Mapped);
        assert!(matches!(
            hoistway::load(&[&path], &mapped),
            Err(Error::InvalidOption { option: "route", .. })
        ));
        assert_eq!(stand_in.leftovers(), []);
    }
}

/// A framework's context stays current on its thread, and what it set is not changed.
#[test]
fn the_context_of_others_stays_as_it_was() {
    type Handle = *mut c_void;
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    let create: unsafe extern "C" fn(*mut Handle, u32, i32) -> i32 = stand_in.function("cuCtxCreate_v2");
    let current: unsafe extern "C" fn(*mut Handle) -> i32 = stand_in.function("cuCtxGetCurrent");
    let destroy: unsafe extern "C" fn(Handle) -> i32 = stand_in.function("cuCtxDestroy_v2");
    let init: unsafe extern "C" fn(u32) -> i32 = stand_in.function("cuInit");
    let (mut created, mut after): (Handle, Handle) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: functions of the driver, of these types.
    unsafe {
        assert_eq!(init(0), 0);
        assert_eq!(create(&mut created, 0, 1), 0);
    }
    let small = Selection::all().select("odd");
    // The second is small enough to run on this very thread.
    for selection in [Selection::all(), small] {
        let loaded = hoistway::load(&[&path], &to(Vendor::Cuda).selection(selection)).unwrap();
        drop(loaded);
        // SAFETY: as above.
        unsafe { assert_eq!(current(&mut after), 0) };
        assert_eq!(after, created);
        assert_eq!(stand_in.count("context_depth"), 1);
    }
    assert_is_file(&hoistway::load(&[&path], &to(Vendor::Cuda)).unwrap(), &file);
    // SAFETY: as above; made by this test.
    unsafe { assert_eq!(destroy(created), 0) };
}

/// What shows that all work has ended needs no memory of the device.
#[test]
fn a_device_that_is_full_is_waited_for() {
    let stand_in = Turn::take();
    for vendor in Vendor::ALL {
        let device = Device::open(vendor.device(0)).unwrap();
        let (free, _) = device.memory().unwrap();
        stand_in.set("POISON=0");
        let all = DeviceMemory::new(&device, free).unwrap();
        for _ in 0..10 {
            device.settle().unwrap();
        }
        // Others are faster to take the memory that a wait has freed.
        stand_in.set(&vendor.faults("cuMemAlloc_v2:*=2"));
        device.settle().unwrap();
        stand_in.set(&vendor.faults("cuMemAlloc_v2:1=2"));
        device.settle().unwrap();
        stand_in.reset();
        device.settle().unwrap();
        drop((all, device));
        stand_in.assert_nothing_left(&format!("{vendor:?}"));
    }
}

#[test]
fn to_release_devices_starts_no_driver() {
    // Not a turn, which releases devices itself.
    let starts = |vendor: Vendor| STAND_IN.count(&format!("calls.{}", vendor.symbol("cuInit")));
    let before = Vendor::ALL.map(starts);
    hoistway_device::release_devices();
    assert_eq!(Vendor::ALL.map(starts), before);
}

/// To wait for such an event would make copies a part of the capture. To find that out invalidates it.
#[test]
fn an_event_that_was_captured_is_refused() {
    type Handle = *mut c_void;
    let stand_in = Turn::take();
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let copies = CopyStream::new(&device).unwrap();
    let memory = DeviceMemory::new(&device, 4).unwrap();
    let push: unsafe extern "C" fn(Handle) -> i32 = stand_in.function("cuCtxPushCurrent_v2");
    let pop: unsafe extern "C" fn(*mut Handle) -> i32 = stand_in.function("cuCtxPopCurrent_v2");
    let retain: unsafe extern "C" fn(*mut Handle, i32) -> i32 = stand_in.function("cuDevicePrimaryCtxRetain");
    let release: unsafe extern "C" fn(i32) -> i32 = stand_in.function("cuDevicePrimaryCtxRelease_v2");
    let make_stream: unsafe extern "C" fn(*mut Handle, u32) -> i32 = stand_in.function("cuStreamCreate");
    let make_event: unsafe extern "C" fn(*mut Handle, u32) -> i32 = stand_in.function("cuEventCreate");
    let record: unsafe extern "C" fn(Handle, Handle) -> i32 = stand_in.function("cuEventRecord");
    let begin: unsafe extern "C" fn(Handle, i32) -> i32 = stand_in.function("cuStreamBeginCapture_v2");
    let end: unsafe extern "C" fn(Handle, *mut Handle) -> i32 = stand_in.function("cuStreamEndCapture");
    let destroy_stream: unsafe extern "C" fn(Handle) -> i32 = stand_in.function("cuStreamDestroy_v2");
    let destroy_event: unsafe extern "C" fn(Handle) -> i32 = stand_in.function("cuEventDestroy_v2");
    let [mut context, mut stream, mut event, mut graph]: [Handle; 4] = [ptr::null_mut(); 4];
    // SAFETY: functions of the driver, of these types; all handles live until they are destroyed.
    unsafe {
        assert_eq!((retain(&mut context, 0), push(context)), (0, 0));
        assert_eq!((make_stream(&mut stream, 1), make_event(&mut event, 2)), (0, 0));
        assert_eq!((begin(stream, 0), record(event, stream)), (0, 0));
        let fence = Fence::of_event(event.expose_provenance() as u64);
        let refused = |result| match result {
            Err(hoistway_device::Error::Device { source, .. }) => source.code == 907,
            _ => false,
        };
        assert!(refused(fence.order(&copies)));
        assert_eq!(
            end(stream, &mut graph),
            901,
            "the driver invalidates the capture of an event that it is asked after"
        );
        assert!(refused(fence.order(&copies)), "and so it stays until it is recorded again");
        assert_eq!(record(event, stream), 0);
        fence.order(&copies).unwrap();
        copies.write(memory.address(), b"copy").unwrap();
        assert_eq!((destroy_event(event), destroy_stream(stream)), (0, 0));
        assert_eq!((pop(&mut context), release(0)), (0, 0));
    }
    let mut bytes = [0; 4];
    copies.read_back(memory.address(), &mut bytes).unwrap();
    assert_eq!(bytes, *b"copy");
    drop((copies, memory, device));
    stand_in.assert_nothing_left("captures");
}

#[test]
fn a_device_without_memory_of_its_own_uses_host_memory_as_it_is() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    for vendor in Vendor::ALL {
        stand_in.reset();
        // To free memory waits for all work.
        let synchronized = format!("calls.{}", vendor.symbol("cuMemFree_v2"));
        let unified = to(vendor).route(Route::Unified);
        let error = hoistway::load(&[&path], &unified).unwrap_err();
        assert!(error.to_string().contains("memory of its own"), "{error}");
        stand_in.set("INTEGRATED=1");
        let loaded = hoistway::load(&[&path], &unified).unwrap();
        assert_is_file(&loaded, &file);
        let report = loaded.report();
        let device = report.device.as_ref().unwrap();
        assert!(device.unified && device.copies == 0 && device.memory_bytes == 0, "{report}");
        assert!(report.carriers.iter().all(|carrier| carrier.via == Some(Route::Unified)), "{report}");
        for tensor in loaded.tensors() {
            assert!(matches!(tensor.memory(), TensorMemory::Host(_)) && tensor.device() == vendor.device(0));
        }
        let waits = stand_in.count(&synchronized);
        drop(loaded);
        assert!(stand_in.count(&synchronized) > waits, "kernels may still read what is dropped");
        // Others get copies, and `auto` says so.
        let loaded = hoistway::load(&[&path], &to(vendor)).unwrap();
        assert!(!loaded.report().device.as_ref().unwrap().unified);
        assert!(
            loaded.report().refused.iter().any(|refusal| refusal.what == "unified"),
            "{}",
            loaded.report()
        );
        let converted = unified.dtype(Dtype::F32);
        assert!(matches!(
            hoistway::load(&[&path], &converted),
            Err(Error::InvalidOption { option: "route", .. })
        ));
    }
}

/// A thread's device stays as it was, and so does its last error: programs look at it after they have started kernels.
#[test]
fn a_threads_device_and_last_error_of_hip_stay_as_they_were() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    let init: unsafe extern "C" fn(u32) -> i32 = stand_in.function("hipInit");
    let set: unsafe extern "C" fn(i32) -> i32 = stand_in.function("hipSetDevice");
    let current: unsafe extern "C" fn(*mut i32) -> i32 = stand_in.function("hipGetDevice");
    let last_error: unsafe extern "C" fn() -> i32 = stand_in.function("hipGetLastError");
    // SAFETY: functions of the runtime, of these types.
    unsafe {
        assert_eq!(init(0), 0);
        assert_eq!(set(1), 0);
    }
    let small = || to(Vendor::Rocm).selection(Selection::all().select("odd"));
    let fails = ["hipMalloc:*=2", "hipMalloc:1=999", "hipHostRegister:*=2", "hipEventCreateWithFlags:1=1"];
    for fault in [None].into_iter().chain(fails.map(Some)) {
        stand_in.set(&format!("FAULTS={}", fault.unwrap_or_default()));
        let loaded = hoistway::load(&[&path], &small());
        assert_eq!(loaded.is_err(), fault.is_some(), "{fault:?}: {loaded:?}");
        drop(loaded);
        // An address of no device.
        assert_eq!(
            hoistway::device::device_of(path.as_os_str().as_encoded_bytes().as_ptr() as u64).unwrap(),
            DeviceId::Cpu
        );
        let mut after = -1;
        // SAFETY: as above.
        unsafe { assert_eq!((current(&mut after), after, last_error()), (0, 1, 0), "{fault:?}") };
    }
    stand_in.reset();
    assert_is_file(&hoistway::load(&[&path], &to(Vendor::Rocm)).unwrap(), &file);
    // SAFETY: as above.
    unsafe { assert_eq!(set(0), 0) };
}

/// A failure to set a thread's device back is no failure of the call, but other calls of the thread go to that device.
#[test]
fn a_threads_device_of_hip_that_cannot_be_set_back_is_warned_of() {
    let stand_in = Turn::take();
    let set: unsafe extern "C" fn(i32) -> i32 = stand_in.function("hipSetDevice");
    let current: unsafe extern "C" fn(*mut i32) -> i32 = stand_in.function("hipGetDevice");
    let device = Device::open(Vendor::Rocm.device(1)).unwrap();
    // SAFETY: a function of the runtime, of this type.
    unsafe { assert_eq!(set(0), 0) };
    for (fault, warned, expected) in [("", false, 0), ("hipSetDevice:2=999", true, 1)] {
        stand_in.set(&format!("FAULTS={fault}"));
        let warnings = Warnings::default();
        tracing::subscriber::with_default(warnings.clone(), || device.memory().unwrap());
        assert_eq!(warnings.0.load(Ordering::Relaxed) > 0, warned);
        stand_in.reset();
        let mut after = -1;
        // SAFETY: as above.
        unsafe { assert_eq!((current(&mut after), after, set(0)), (0, expected, 0)) };
    }
}

/// Counts warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicU64>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// To close a device waits for its work, and those who open devices do not wait for that.
#[test]
fn devices_are_opened_while_one_is_closed_that_has_work() {
    static GATE: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());
    unsafe extern "C" fn wait(_: *mut c_void) {
        drop(GATE.1.wait_while(GATE.0.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
    type Handle = *mut c_void;
    let stand_in = Turn::take();
    let retain: unsafe extern "C" fn(*mut Handle, i32) -> i32 = stand_in.function("cuDevicePrimaryCtxRetain");
    let release: unsafe extern "C" fn(i32) -> i32 = stand_in.function("cuDevicePrimaryCtxRelease_v2");
    let push: unsafe extern "C" fn(Handle) -> i32 = stand_in.function("cuCtxPushCurrent_v2");
    let pop: unsafe extern "C" fn(*mut Handle) -> i32 = stand_in.function("cuCtxPopCurrent_v2");
    let launch: unsafe extern "C" fn(Handle, unsafe extern "C" fn(Handle), Handle) -> i32 =
        stand_in.function("cuLaunchHostFunc");
    drop(Device::open(DeviceId::Cuda(0)).unwrap());
    let mut context = ptr::null_mut();
    // SAFETY: of these signatures in the driver. The default stream waits until the gate is opened.
    unsafe {
        assert_eq!((retain(&mut context, 0), push(context)), (0, 0));
        assert_eq!(launch(ptr::null_mut(), wait, ptr::null_mut()), 0);
        assert_eq!(pop(&mut context), 0);
    }
    let frees = || STAND_IN.count("calls.cuMemFree_v2");
    let before = frees();
    let closing = thread::spawn(hoistway_device::release_devices);
    until("the device to be closed", || frees() > before);
    let (sender, opened) = mpsc::channel();
    let opening = thread::spawn(move || {
        for ordinal in [1, 0] {
            sender.send(Device::open(DeviceId::Cuda(ordinal)).unwrap().id()).unwrap();
        }
    });
    let found = [(); 2].map(|()| opened.recv_timeout(LONG));
    *GATE.0.lock().unwrap() = true;
    GATE.1.notify_all();
    assert_eq!(found, [1, 0].map(|ordinal| Ok(DeviceId::Cuda(ordinal))));
    closing.join().unwrap();
    opening.join().unwrap();
    // SAFETY: as above.
    unsafe { assert_eq!(release(0), 0) };
    stand_in.assert_nothing_left("both devices");
}

#[test]
fn an_owner_that_hip_does_not_tell_is_the_host() {
    let stand_in = Turn::take();
    let last_error: unsafe extern "C" fn() -> i32 = stand_in.function("hipGetLastError");
    let device = Device::open(Vendor::Rocm.device(0)).unwrap();
    let memory = DeviceMemory::new(&device, 1000).unwrap();
    stand_in.set("FAULTS=hipPointerGetAttributes:1=1");
    let found = || hoistway::device::device_of(memory.address()).unwrap();
    assert_eq!((found(), found()), (DeviceId::Cpu, Vendor::Rocm.device(0)));
    // SAFETY: a function of the runtime, of this type.
    unsafe { assert_eq!(last_error(), 0) };
}

#[test]
fn the_owner_of_memory_is_found_among_the_devices_of_both_vendors() {
    let stand_in = Turn::take();
    for id in [0, 1].into_iter().flat_map(|ordinal| Vendor::ALL.map(|vendor| vendor.device(ordinal))) {
        let device = Device::open(id).unwrap();
        let memory = DeviceMemory::new(&device, 1000).unwrap();
        assert_eq!(hoistway::device::device_of(memory.address() + 999).unwrap(), id);
    }
    assert_eq!(stand_in.leftovers(), []);
}

/// Kernels are compiled for some architectures: on others a device only copies, and says that it does not convert.
#[test]
fn a_rocm_device_that_no_kernels_are_compiled_for_copies_and_refuses_to_convert() {
    let stand_in = Turn::take();
    stand_in.set("HIP_ARCHITECTURE=gfx803");
    let directory = disk();
    let path = directory.path().join("small.safetensors");
    let tensors: Vec<TestTensor> =
        (0..100).map(|i| tensor(&format!("t{i}"), Dtype::F16, &[1 + i % 7])).collect();
    let file = write_model(&path, &tensors, 0, 1);
    let before = stand_in.count("kernels");
    assert_is_file(&hoistway::load(&[&path], &staged(Vendor::Rocm)).unwrap(), &file);
    assert_eq!(stand_in.count("kernels"), before);
    match hoistway::load(&[&path], &staged(Vendor::Rocm).dtype(Dtype::F32)).unwrap_err() {
        Error::DeviceUnavailable { device, why } => {
            assert!(device == "rocm:0" && why.reason.contains("converts no elements"), "{why}");
        }
        other => panic!("{other:?}"),
    }
}

/// AMD's library for direct reads is not used: the routes say so, and `auto` goes by way of the host.
#[test]
fn a_rocm_device_has_no_direct_path() {
    let _stand_in = Turn::take();
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    for route in [Route::Gds, Route::GdsCompat] {
        match hoistway::load(&[&path], &to(Vendor::Rocm).route(route)).unwrap_err() {
            Error::RouteUnavailable { why, .. } => assert!(why.reason.contains("hipFile"), "{why}"),
            other => panic!("{other:?}"),
        }
    }
    let loaded = hoistway::load(&[&path], &to(Vendor::Rocm)).unwrap();
    assert_is_file(&loaded, &file);
    assert!(
        loaded.report().carriers.iter().all(|carrier| carrier.via == Some(Route::Staged)),
        "{}",
        loaded.report()
    );
}

/// Kernels that a load needs are loaded while it prepares, so that no copy waits for them. Here the copies before the first of them
/// never begin.
#[test]
fn kernels_are_loaded_before_the_first_copy() {
    let stand_in = Turn::take();
    let directory = disk();
    let path = directory.path().join("floats.safetensors");
    write_model(&path, &[tensor("f", Dtype::F16, &[3000])], 0, 3);
    for vendor in Vendor::ALL {
        hoistway_device::release_devices();
        let options = staged(vendor).dtype(Dtype::F32);
        let first_copy = match vendor {
            Vendor::Cuda => "cuMemcpyBatchAsync",
            Vendor::Rocm => "hipMemcpyHtoDAsync",
        };
        stand_in.configure(&format!("BLOCKS={first_copy}"));
        thread::scope(|scope| {
            let load = scope.spawn(|| hoistway::load(&[&path], &options).map(drop));
            until("the kernels to be loaded", || stand_in.count("modules") == 1);
            stand_in.configure("BLOCKS=");
            load.join().unwrap().unwrap();
        });
        assert_eq!(stand_in.count("modules"), 1, "once");
    }
    assert_eq!(stand_in.leftovers(), []);
}

/// A load that needs no kernel loads none.
#[test]
fn kernels_that_no_load_needs_are_not_loaded() {
    let stand_in = Turn::take();
    let directory = disk();
    let (path, _) = chunky(directory.path());
    for vendor in Vendor::ALL {
        drop(hoistway::load(&[&path], &staged(vendor)).unwrap());
        assert_eq!(stand_in.count("modules"), 0, "{vendor:?}");
    }
}

#[test]
fn a_report_says_that_the_driver_refused_machine_code_and_compiled_kernels_itself() {
    let stand_in = Turn::take();
    let directory = disk();
    let floats = directory.path().join("floats.safetensors");
    let file = write_model(&floats, &[tensor("f", Dtype::F16, &[3000])], 0, 3);
    let options = to(Vendor::Cuda).dtype(Dtype::F32);
    let load = || {
        let loaded = hoistway::load(&[&floats], &options).unwrap();
        let notes = loaded.report().notes.join("; ");
        (loaded.get("f").unwrap().bytes().unwrap().into_owned(), notes)
    };
    let (expected, notes) = load();
    assert!(expected.len() == 12_000 && !notes.contains("kernels"), "{notes}");
    for (fault, refused) in [("cuModuleLoadData:1=209", "sm_90"), ("cuModuleGetFunction:2=500", "sm_90")] {
        stand_in.set(&format!("FAULTS={fault}"));
        let (bytes, notes) = load();
        assert_eq!(bytes, expected);
        assert!(notes.contains("kernels") && notes.contains(refused), "{fault}: {notes}");
    }
    // The context is of no use after the first, and any call may be the one that says so.
    for (fault, says) in [
        ("cuModuleLoadData:*=700", "ILLEGAL_ADDRESS"),
        ("cuModuleLoadData:*=2", "OUT_OF_MEMORY"),
        ("cuModuleLoadData:*=222", "cuModuleLoadData"),
    ] {
        stand_in.set(&format!("FAULTS={fault}"));
        let error = hoistway::load(&[&floats], &options).unwrap_err();
        assert!(
            matches!(error, Error::Device { .. }) && error.to_string().contains(says),
            "{fault}: {error}"
        );
        stand_in.reset();
    }
    drop(file);
}
