//! Streams of devices that are kept for the next load, on the stand-in driver.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    Footprint, assert_is_file, assert_nothing_left, make_warm,
    on_device::{chunky, disk},
    reading::until,
    stand_in::{Turn, Vendor},
    tensor, write_model,
};
use hoistway::{DeviceId, Dtype, Error, LoadOptions, Route};
use hoistway_device::{CopyStream, Device, DeviceMemory};
use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

type Handle = *mut c_void;

/// What is not used for so long is let go.
const IDLE_TIME: Duration = Duration::from_secs(5);

/// Streams that were made and destroyed so far.
fn calls(turn: &Turn, vendor: Vendor) -> [u64; 2] {
    ["cuStreamCreate", "cuStreamDestroy_v2"]
        .map(|function| turn.count(&format!("calls.{}", vendor.symbol(function))))
}

/// Says whether `work` ended before what it begins with may have been given back. A busy machine may let more time pass now and then.
fn in_time(mut work: impl FnMut() -> Result<(), String>) -> bool {
    (0..10).any(|_| {
        hoistway_device::release_devices();
        let begun = Instant::now();
        let told = work();
        let is_in_time = begun.elapsed() < IDLE_TIME;
        assert!(told.is_ok() || !is_in_time, "{told:?}");
        is_in_time
    })
}

#[test]
fn a_load_uses_the_stream_of_the_one_before_it() {
    let turn = Turn::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    make_warm(&path);
    for route in [Route::Auto, Route::Staged] {
        let options = LoadOptions::default().device(Vendor::Cuda.device(0)).route(route);
        let is_shown = in_time(|| {
            let first = hoistway::load(&[&path], &options).unwrap();
            let before = calls(&turn, Vendor::Cuda);
            // Its memory is the same whether tensors of the first are left or not.
            let second = hoistway::load(&[&path], &options).unwrap();
            let after = calls(&turn, Vendor::Cuda);
            assert_is_file(&first, &file);
            assert_is_file(&second, &file);
            (before == after).then_some(()).ok_or_else(|| format!("{before:?} became {after:?}"))
        });
        assert!(is_shown, "loads take too long");
    }
    turn.assert_nothing_left("loads one after the other");
}

/// HIP's has work to wait for. A driver that refuses a call once does not keep it for good.
#[test]
fn a_stream_is_given_back_although_an_entry_was_refused() {
    let turn = Turn::take();
    for function in ["hipGetDevice", "hipSetDevice"] {
        for nth in 1..=4 {
            let device = Device::open(Vendor::Rocm.device(0)).unwrap();
            let stream = CopyStream::new(&device).unwrap();
            turn.configure(&format!("FAULTS={function}:{nth}=999"));
            drop(stream);
            turn.reset();
            drop(device);
            turn.assert_nothing_left(&format!("{function}:{nth}"));
        }
    }
}

/// A stream may be the program's once it has reset the device, and then only the number of its context tells.
#[test]
fn no_stream_is_kept_where_the_driver_does_not_number_contexts() {
    let turn = Turn::take();
    for (vendor, faults) in [(Vendor::Cuda, "FAULTS=cuCtxGetId:*=801"), (Vendor::Rocm, "FAULTS=")] {
        turn.configure(faults);
        let device = Device::open(vendor.device(0)).unwrap();
        let [made, destroyed] = calls(&turn, vendor);
        for number in 1..=3 {
            drop(CopyStream::new(&device).unwrap());
            assert_eq!(calls(&turn, vendor), [made + number, destroyed + number], "{vendor:?}");
        }
    }
    turn.assert_nothing_left("streams that were not kept");
}

/// The program goes on with the device, whose context has the same handle then. What hoistway had there may be the program's.
#[test]
fn a_device_that_the_program_has_reset_and_uses_again_is_opened_anew() {
    let turn = Turn::take();
    let reset: unsafe extern "C" fn(i32) -> i32 = turn.function("cuDevicePrimaryCtxReset_v2");
    let directory = disk();
    let path = directory.path().join("halves.safetensors");
    let tensors: Vec<_> = (0..4).map(|i| tensor(&format!("t{i}"), Dtype::Bf16, &[1 << 20])).collect();
    let file = write_model(&path, &tensors, 0, 3);
    // No thread unpins what it has pinned after it.
    let options = LoadOptions::default().device(Vendor::Cuda.device(0)).route(Route::Staged);
    let converting = options.clone().dtype(Dtype::F32);
    let changing = [
        "cuMemFree_v2",
        "cuMemHostUnregister",
        "cuStreamDestroy_v2",
        "cuEventRecord",
        "cuEventDestroy_v2",
        "cuModuleUnload",
        "cuLaunchKernel",
    ];
    let changes = || changing.map(|function| (function, turn.count(&format!("calls.{function}"))));
    // What meets it first: a wait for all of its work, a load, or its release. The driver may also fail to say which context it is:
    // 709 and 201 say that the old one is gone, 999 says nothing.
    let faults = ["", "cuCtxGetId:*=709", "cuCtxGetId:*=201", "cuCtxGetId:*=999"];
    let cases = ["wait", "load", "release"].map(|meets| faults.map(|fault| (meets, fault)));
    for (meets, fault) in cases.into_iter().flatten() {
        let device = Device::open(Vendor::Cuda.device(0)).unwrap();
        // Leaves fences, events, kernels, streams and pinned memory for the next.
        drop(hoistway::load(&[&path], &converting).unwrap());
        let event = CopyStream::new(&device).unwrap().mark().unwrap();
        // SAFETY: a function of the driver, of this type; nothing is under way.
        assert_eq!(unsafe { reset(0) }, 0);
        in_context(&turn, || {
            let before = changes();
            turn.configure(&format!("FAULTS={fault}"));
            match meets {
                "wait" => assert_eq!(device.settle().is_err(), fault.ends_with("999"), "{fault}"),
                "load" => _ = hoistway::load(&[&path], &converting).unwrap_err(),
                _ => hoistway_device::release_devices(),
            }
            drop(event);
            drop(device);
            if fault.ends_with("999") {
                hoistway_device::release_devices();
            }
            assert_eq!(changes(), before, "{meets} {fault}");
            turn.configure("FAULTS=");
            // The stand-in then does the same to the context that is current.
            if fault.ends_with("709") {
                return;
            }
            // Threads of an earlier load may hold it for a moment.
            until("the device to be opened anew", || match hoistway::load(&[&path], &options) {
                Ok(loaded) => {
                    assert_is_file(&loaded, &file);
                    true
                }
                Err(error) => {
                    assert!(matches!(error, Error::Device { .. }), "{error:?}");
                    false
                }
            });
        });
        hoistway_device::release_devices();
    }
    turn.assert_nothing_left("a device that was reset");
}

/// Else nothing would tell its context from a later one as long as it is open.
#[test]
fn a_device_whose_context_is_not_told_is_not_opened() {
    let turn = Turn::take();
    for code in [46, 999] {
        // Threads of an earlier load may hold it for a moment.
        until("the device is closed", || {
            hoistway_device::release_devices();
            turn.count("contexts") == 0
        });
        turn.configure(&format!("FAULTS=cuCtxGetId:1={code}"));
        let error = Device::open(Vendor::Cuda.device(0)).unwrap_err();
        assert!(matches!(error, hoistway_device::Error::Device { .. }), "{error:?}");
        turn.assert_nothing_left("a device that was not opened");
        drop(Device::open(Vendor::Cuda.device(0)).unwrap());
    }
}

/// What is pinned next would lie at an address that is pinned already.
#[test]
fn memory_that_the_driver_does_not_unpin_keeps_its_address() {
    let turn = Turn::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let options = LoadOptions::default().device(Vendor::Cuda.device(0)).route(Route::Staged);
    let load = || assert_is_file(&hoistway::load(&[&path], &options).unwrap(), &file);
    // Neither code says that the context is gone.
    for fault in ["cuCtxPushCurrent_v2:*=999", "cuMemHostUnregister:*=999", "cuCtxPushCurrent_v2:*=46"] {
        let device = Device::open(Vendor::Cuda.device(0)).unwrap();
        let memory = DeviceMemory::new(&device, 1 << 20).unwrap();
        let read_back = || {
            let stream = CopyStream::new(&device).unwrap();
            stream.read_back(memory.address(), &mut vec![0; 1 << 20]).unwrap();
            stream
        };
        let stream = read_back();
        load();
        turn.configure(&format!("FAULTS={fault}"));
        // The device stays open, as something uses it.
        drop(stream);
        hoistway_device::release_devices();
        turn.configure("FAULTS=");
        assert!(turn.count("pinned_bytes") > 0, "{fault}");
        for _ in 0..3 {
            drop(read_back());
            load();
            hoistway_device::release_devices();
        }
    }
    // Where something else of the process keeps the context, what was not given back is there still.
    let reset: unsafe extern "C" fn(i32) -> i32 = turn.function("cuDevicePrimaryCtxReset_v2");
    // SAFETY: a function of the driver, of this type; nothing is under way.
    assert_eq!(unsafe { reset(0) }, 0);
    turn.assert_nothing_left("contexts whose memory was not unpinned");
}

/// The program's next stream may have the handle of one that was kept.
#[test]
fn a_stream_of_the_program_after_a_reset_is_neither_used_nor_destroyed() {
    let turn = Turn::take();
    let make: unsafe extern "C" fn(*mut Handle, u32) -> i32 = turn.function("cuStreamCreate");
    let destroy: unsafe extern "C" fn(Handle) -> i32 = turn.function("cuStreamDestroy_v2");
    let query: unsafe extern "C" fn(Handle) -> i32 = turn.function("cuStreamQuery");
    let reset: unsafe extern "C" fn(i32) -> i32 = turn.function("cuDevicePrimaryCtxReset_v2");
    // What meets the stream first: the next use, the release of the device, its own end, or the thread that gives back.
    for meets in ["use", "release", "end", "time"] {
        hoistway_device::release_devices();
        let device = Device::open(Vendor::Cuda.device(0)).unwrap();
        let stream = CopyStream::new(&device).unwrap();
        let handle = turn.count("newest_stream");
        let stream = (meets == "end").then_some(stream);
        // SAFETY: a function of the driver, of this type; nothing is under way.
        assert_eq!(unsafe { reset(0) }, 0);
        let mut programs = ptr::null_mut();
        in_context(&turn, || {
            // SAFETY: functions of the driver, of these types.
            assert_eq!(unsafe { make(&mut programs, 1) }, 0);
            assert_eq!(programs.expose_provenance() as u64, handle, "the stand-in gives it out again");
            let [made, destroyed] = calls(&turn, Vendor::Cuda);
            let asked = || turn.count("calls.cuCtxGetId");
            let before = asked();
            match meets {
                "use" => {
                    CopyStream::new(&device).unwrap_err();
                    assert!(device.is_lost());
                    assert_eq!(calls(&turn, Vendor::Cuda), [made, destroyed]);
                }
                "release" => hoistway_device::release_devices(),
                "end" => drop(stream),
                _ => until("the thread asks for the context", || asked() > before),
            }
            hoistway_device::release_devices();
            // SAFETY: as above, destroyed once.
            assert_eq!(unsafe { [query(programs), destroy(programs)] }, [0, 0], "{meets}");
        });
    }
    turn.assert_nothing_left("a device that was reset");
}

/// Also where tensors keep the device.
#[test]
fn what_is_kept_is_given_back_on_request_and_when_it_is_idle() {
    let turn = Turn::take();
    let directory = disk();
    let (path, _) = chunky(directory.path());
    make_warm(&path);
    let options = LoadOptions::default().device(Vendor::Cuda.device(0));
    let before = Footprint::now();
    let streams = turn.count("streams");
    let loaded = hoistway::load(&[&path], &options).unwrap();
    hoistway_device::release_devices();
    assert_eq!(turn.count("streams"), streams);
    drop(hoistway::load(&[&path], &options).unwrap());
    until("the stream is destroyed", || turn.count("streams") == streams);
    drop(loaded);
    assert_nothing_left(&before);
    turn.assert_nothing_left("streams that were kept");
}

#[test]
fn no_more_are_kept_than_are_of_use() {
    let turn = Turn::take();
    for vendor in Vendor::ALL {
        let device = Device::open(vendor.device(0)).unwrap();
        let streams = turn.count("streams");
        let many: Vec<_> = (0..16).map(|_| CopyStream::new(&device).unwrap()).collect();
        assert_eq!(turn.count("streams"), streams + 16);
        drop(many);
        assert!(turn.count("streams") <= streams + 4, "{vendor:?}");
        hoistway_device::release_devices();
        assert_eq!(turn.count("streams"), streams);
    }
    turn.assert_nothing_left("many streams");
}

/// Work of the program on a stream: it waits for a signal.
unsafe extern "C" fn wait(signal: *mut c_void) {
    // SAFETY: tests leak it.
    let signal = unsafe { &*signal.cast::<Mutex<mpsc::Receiver<()>>>() };
    signal.lock().unwrap().recv().ok();
}

/// What a stream waits for may be of the program, and a load that failed or was cancelled does not wait for it.
#[test]
fn a_stream_that_has_work_left_is_not_used() {
    let turn = Turn::take();
    let vendor = Vendor::Cuda;
    let device = Device::open(vendor.device(0)).unwrap();
    let memory = DeviceMemory::new(&device, 4).unwrap();
    let made: unsafe extern "C" fn(*mut Handle, u32) -> i32 = turn.function("cuStreamCreate");
    let call: unsafe extern "C" fn(Handle, unsafe extern "C" fn(*mut c_void), *mut c_void) -> i32 =
        turn.function("cuLaunchHostFunc");
    let destroy: unsafe extern "C" fn(Handle) -> i32 = turn.function("cuStreamDestroy_v2");
    let (go, signal) = mpsc::channel();
    let signal = Box::leak(Box::new(Mutex::new(signal)));
    let mut programs = ptr::null_mut();
    in_context(&turn, || {
        // SAFETY: functions of the driver, of these types.
        unsafe {
            assert_eq!(made(&mut programs, 1), 0);
            assert_eq!(call(programs, wait, ptr::from_mut(signal).cast()), 0);
        }
    });
    let late = CopyStream::new(&device).unwrap();
    // SAFETY: the stream lives.
    unsafe { late.wait_for(programs.expose_provenance()).unwrap() };
    drop(late);
    let [before, _] = calls(&turn, vendor);
    let other = CopyStream::new(&device).unwrap();
    assert_eq!(calls(&turn, vendor)[0], before + 1, "the one that waits is not used");
    // It would wait too.
    // SAFETY: nothing else uses the memory.
    unsafe { other.write(memory.address(), b"copy").unwrap() };
    go.send(()).unwrap();
    // SAFETY: destroyed once.
    in_context(&turn, || assert_eq!(unsafe { destroy(programs) }, 0));
    drop((other, memory, device));
    turn.assert_nothing_left("a stream that waited");
}

/// Streams that wait for the program are passed over, and are no more than are kept in all.
#[test]
fn streams_that_have_work_left_are_no_more_than_are_kept() {
    let turn = Turn::take();
    let device = Device::open(Vendor::Cuda.device(0)).unwrap();
    let make: unsafe extern "C" fn(*mut Handle, u32) -> i32 = turn.function("cuStreamCreate");
    let call: unsafe extern "C" fn(Handle, unsafe extern "C" fn(*mut c_void), *mut c_void) -> i32 =
        turn.function("cuLaunchHostFunc");
    let destroy: unsafe extern "C" fn(Handle) -> i32 = turn.function("cuStreamDestroy_v2");
    let (go, signal) = mpsc::channel();
    let signal = Box::leak(Box::new(Mutex::new(signal)));
    let mut programs = ptr::null_mut();
    in_context(&turn, || {
        // SAFETY: functions of the driver, of these types.
        unsafe {
            assert_eq!(make(&mut programs, 1), 0);
            assert_eq!(call(programs, wait, ptr::from_mut(signal).cast()), 0);
        }
    });
    let streams = turn.count("streams");
    let programs_stream = programs.expose_provenance();
    let mut waiting: Vec<_> = (0..5).map(|_| CopyStream::new(&device).unwrap()).collect();
    for own in &waiting {
        // SAFETY: the stream lives.
        unsafe { own.wait_for(programs_stream).unwrap() };
    }
    let last = waiting.pop();
    drop(waiting);
    let asked = || turn.count("calls.cuStreamQuery");
    let before = asked();
    turn.configure("BLOCKS=cuStreamQuery");
    thread::scope(|scope| {
        let new = scope.spawn(|| CopyStream::new(&device).unwrap());
        until("one is out to be asked", || asked() > before);
        // In its place.
        drop(last);
        turn.configure("BLOCKS=");
        let _new = new.join().unwrap();
        assert!(turn.count("streams") <= streams + 5, "{} streams", turn.count("streams"));
    });
    go.send(()).unwrap();
    // SAFETY: destroyed once.
    in_context(&turn, || assert_eq!(unsafe { destroy(programs) }, 0));
    drop(device);
    turn.assert_nothing_left("streams that waited");
}

/// A program that captures streams while others wait for its events may take one in.
#[test]
fn a_stream_that_is_captured_is_not_used_and_its_capture_goes_on() {
    let turn = Turn::take();
    let vendor = Vendor::Cuda;
    let device = Device::open(vendor.device(0)).unwrap();
    let make: unsafe extern "C" fn(*mut Handle, u32) -> i32 = turn.function("cuStreamCreate");
    let begin: unsafe extern "C" fn(Handle, i32) -> i32 = turn.function("cuStreamBeginCapture_v2");
    let end: unsafe extern "C" fn(Handle, *mut Handle) -> i32 = turn.function("cuStreamEndCapture");
    let end_graph: unsafe extern "C" fn(Handle) -> i32 = turn.function("cuGraphDestroy");
    let destroy: unsafe extern "C" fn(Handle) -> i32 = turn.function("cuStreamDestroy_v2");
    let (mut programs, mut graph): (Handle, Handle) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: functions of the driver, of these types.
    in_context(&turn, || assert_eq!(unsafe { make(&mut programs, 1) }, 0));
    let taken = CopyStream::new(&device).unwrap();
    let begun = Instant::now();
    let handle = ptr::with_exposed_provenance_mut(turn.count("newest_stream") as usize);
    // SAFETY: as above; the stream lives.
    in_context(&turn, || assert_eq!(unsafe { begin(handle, 2) }, 0));
    drop(taken);
    let [before, _] = calls(&turn, vendor);
    let other = CopyStream::new(&device).unwrap();
    assert_eq!(calls(&turn, vendor)[0], before + 1, "the one that is captured is not used");
    drop(other);
    // The device stays, and the stream with it.
    hoistway_device::release_devices();
    in_context(&turn, || {
        // SAFETY: as above; the stream is kept.
        unsafe {
            assert_eq!(end(handle, &mut graph), 0, "the capture is valid");
            assert_eq!((end_graph(graph), destroy(programs)), (0, 0));
        }
    });
    let again = CopyStream::new(&device).unwrap();
    let is_same = calls(&turn, vendor)[0] == before + 1;
    assert!(is_same || begun.elapsed() >= IDLE_TIME, "the stream stayed for later");
    drop((again, device));
    turn.assert_nothing_left("a capture");
}

/// A stream that does not say whether it has work is destroyed, and another serves.
#[test]
fn a_stream_that_does_not_answer_is_replaced() {
    let turn = Turn::take();
    let vendor = Vendor::Cuda;
    // What it says of one that it does not know, and of one that has failed.
    for fault in ["cuStreamQuery:1=400", "cuStreamQuery:1=999", "cuStreamIsCapturing:1=1"] {
        let is_shown = in_time(|| {
            let device = Device::open(vendor.device(0)).unwrap();
            drop(CopyStream::new(&device).unwrap());
            let before = calls(&turn, vendor);
            turn.configure(&vendor.faults(fault));
            let stream = CopyStream::new(&device);
            turn.configure("FAULTS=");
            let after = calls(&turn, vendor);
            stream.map_err(|error| error.to_string())?;
            let is_new = after == before.map(|count| count + 1);
            is_new.then_some(()).ok_or_else(|| format!("{before:?} became {after:?}"))
        });
        assert!(is_shown, "{fault}");
    }
    turn.assert_nothing_left("streams that were replaced");
}

/// Some threads at once find streams that no other has.
#[test]
fn no_two_users_have_one_stream() {
    let turn = Turn::take();
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let memory = Arc::new(DeviceMemory::new(&device, 8).unwrap());
    thread::scope(|scope| {
        for number in 0..8_u8 {
            let (device, memory) = (device.clone(), memory.clone());
            scope.spawn(move || {
                for _ in 0..50 {
                    let stream = CopyStream::new(&device).unwrap();
                    let place = memory.address() + u64::from(number);
                    let mut byte = [0];
                    // SAFETY: each thread has a byte of its own.
                    unsafe { stream.write(place, &[number]).unwrap() };
                    stream.read_back(place, &mut byte).unwrap();
                    assert_eq!(byte, [number]);
                }
            });
        }
    });
    drop((memory, device));
    turn.assert_nothing_left("threads with streams");
}

/// Does something with the device's context current, as the program does.
fn in_context(turn: &Turn, work: impl FnOnce()) {
    let retain: unsafe extern "C" fn(*mut Handle, i32) -> i32 = turn.function("cuDevicePrimaryCtxRetain");
    let release: unsafe extern "C" fn(i32) -> i32 = turn.function("cuDevicePrimaryCtxRelease_v2");
    let push: unsafe extern "C" fn(Handle) -> i32 = turn.function("cuCtxPushCurrent_v2");
    let pop: unsafe extern "C" fn(*mut Handle) -> i32 = turn.function("cuCtxPopCurrent_v2");
    let mut context = ptr::null_mut();
    // SAFETY: functions of the driver, of these types.
    unsafe {
        assert_eq!((retain(&mut context, 0), push(context)), (0, 0));
        work();
        assert_eq!((pop(&mut context), release(0)), (0, 0));
    }
}
