//! Streams to a device with a bound: memory of tensors that were dropped is used for tensors to come, once nothing reads it any more.
//! On the stand-in, as the driver of each vendor.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    TestTensor, expected, make_warm,
    on_device::disk,
    reading::{LONG, until},
    stand_in::{STAND_IN, Turn, Vendor},
    tensor, write_model,
};
use hoistway::{
    Arrival, Checkpoint, Dtype, Error, LoadOptions, Loading, Order, Route, StreamOptions, Tensor,
    plan::Layout,
};
use hoistway_device::{CopyStream, Device, DeviceBlock, DeviceMemory, ReusedMemory};
use std::{
    collections::HashSet,
    ffi::c_void,
    path::{Path, PathBuf},
    ptr,
    sync::{Arc, Condvar, Mutex},
};

const TENSORS: usize = 48;
/// Bytes of a tensor, which is alone in its memory.
const LEN: u64 = 1 << 20;
/// Tensors that are in flight.
const IN_FLIGHT: u64 = 8;
/// Pieces of memory that are kept.
const KEPT: u64 = 2;

/// Tensors of one length, and long ones before others that would not fill their memory.
fn lens_of_models() -> [Vec<u64>; 2] {
    [vec![LEN; TENSORS], [vec![LEN / 16 * 17; 24], vec![LEN; 40]].concat()]
}

fn model(directory: &Path) -> (PathBuf, Vec<u8>) {
    model_of(directory, &[LEN; TENSORS])
}

fn model_of(directory: &Path, lens: &[u64]) -> (PathBuf, Vec<u8>) {
    let path = directory.join("model.safetensors");
    let tensors: Vec<TestTensor> =
        lens.iter().enumerate().map(|(at, &len)| tensor(&format!("t{at:02}"), Dtype::U8, &[len])).collect();
    let file = write_model(&path, &tensors, 0, 3);
    make_warm(&path);
    (path, file)
}

fn stream(path: &Path, vendor: Vendor) -> Loading {
    let options = LoadOptions::default().device(vendor.device(0)).route(Route::Staged);
    let options = options.layout(Layout::Tensor).chunk_bytes(256 << 10);
    let bound = StreamOptions::default().order(Order::File).max_in_flight_bytes(IN_FLIGHT * LEN);
    Checkpoint::open(&[path]).unwrap().stream(&options, &bound).unwrap()
}

fn next(loading: &mut Loading) -> Result<Option<Tensor>, Error> {
    loop {
        match loading.next_within(LONG)? {
            Arrival::Tensor(tensor) => return Ok(Some(tensor)),
            Arrival::Finished => return Ok(None),
            _ => {}
        }
    }
}

fn assert_is(tensor: &Tensor, file: &[u8]) {
    assert!(*tensor.bytes().unwrap() == expected(file, tensor.name())[..], "{}", tensor.name());
}

/// Streams the file, and drops each tensor before the next.
fn go_through(path: &Path, vendor: Vendor, file: &[u8], mut each: impl FnMut(u64)) {
    let mut loading = stream(path, vendor);
    let mut count = 0;
    while let Some(tensor) = next(&mut loading).unwrap() {
        assert_is(&tensor, file);
        let address = tensor.address();
        drop(tensor);
        each(address);
        count += 1;
    }
    assert_eq!(count, loading.progress().tensors_total);
}

#[test]
fn memory_is_used_again_and_little_of_it_is_kept() {
    let turn = Turn::take();
    let directory = disk();
    for (vendor, lens) in
        Vendor::ALL.into_iter().flat_map(|vendor| lens_of_models().map(|lens| (vendor, lens)))
    {
        let (path, file) = model_of(directory.path(), &lens);
        // What the device keeps for itself is there before.
        let device = Device::open(vendor.device(0)).unwrap();
        let before = vendor.count("device_bytes");
        // The stand-in gives an address to no other memory for long after it was freed.
        until("eight tensors are in memory that was used before", || {
            let mut addresses = HashSet::new();
            go_through(&path, vendor, &file, |address| {
                let held = vendor.count("device_bytes") - before;
                assert!(held <= IN_FLIGHT * LEN + KEPT * lens[0], "{vendor:?}: {held} are held");
                addresses.insert(address);
            });
            addresses.len() + 8 <= lens.len()
        });
        drop(device);
        turn.assert_nothing_left(&format!("{vendor:?}"));
    }
}

type Handle = *mut c_void;
type Gate = (Mutex<bool>, Condvar);

/// A stream of the program's, in no order with others, which a gate holds up.
struct Work {
    context: Handle,
    stream: Handle,
    gate: Arc<Gate>,
}

impl Work {
    fn new() -> Self {
        let retain: unsafe extern "C" fn(*mut Handle, i32) -> i32 =
            STAND_IN.function("cuDevicePrimaryCtxRetain");
        let create: unsafe extern "C" fn(*mut Handle, u32) -> i32 = STAND_IN.function("cuStreamCreate");
        let launch: unsafe extern "C" fn(Handle, unsafe extern "C" fn(Handle), Handle) -> i32 =
            STAND_IN.function("cuLaunchHostFunc");
        unsafe extern "C" fn wait(gate: Handle) {
            // SAFETY: given away below, once.
            let gate = unsafe { Arc::from_raw(gate.cast::<Gate>().cast_const()) };
            drop(gate.1.wait_while(gate.0.lock().unwrap(), |is_open| !*is_open).unwrap());
        }
        let mut work = Self { context: ptr::null_mut(), stream: ptr::null_mut(), gate: Arc::default() };
        // SAFETY: of these signatures in the driver.
        unsafe { assert_eq!(retain(&mut work.context, 0), 0) };
        let (mut stream, argument) = (ptr::null_mut(), Arc::into_raw(work.gate.clone()));
        work.with(|| {
            // SAFETY: as above; the function has its argument.
            unsafe {
                assert_eq!(create(&mut stream, 1), 0);
                assert_eq!(launch(stream, wait, argument.cast_mut().cast()), 0);
            }
        });
        work.stream = stream;
        work
    }

    /// Calls the driver with the context current.
    fn with(&self, call: impl FnOnce()) {
        let push: unsafe extern "C" fn(Handle) -> i32 = STAND_IN.function("cuCtxPushCurrent_v2");
        let pop: unsafe extern "C" fn(*mut Handle) -> i32 = STAND_IN.function("cuCtxPopCurrent_v2");
        // SAFETY: of these signatures in the driver.
        unsafe { assert_eq!(push(self.context), 0) };
        call();
        // SAFETY: as above.
        unsafe { assert_eq!(pop(&mut ptr::null_mut()), 0) };
    }

    /// Queues a copy on the device.
    fn copy(&self, to: u64, of: u64, len: u64) {
        let copy: unsafe extern "C" fn(u64, u64, usize, Handle) -> i32 =
            STAND_IN.function("cuMemcpyDtoDAsync_v2");
        // SAFETY: of this signature in the driver; what it copies to outlives it.
        self.with(|| unsafe { assert_eq!(copy(to, of, len as usize, self.stream), 0) });
    }

    fn open(&self) {
        *self.gate.0.lock().unwrap() = true;
        self.gate.1.notify_all();
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // Also after a panic.
        self.open();
        let release: unsafe extern "C" fn(i32) -> i32 = STAND_IN.function("cuDevicePrimaryCtxRelease_v2");
        let destroy: unsafe extern "C" fn(Handle) -> i32 = STAND_IN.function("cuStreamDestroy_v2");
        // SAFETY: of these signatures in the driver; made once, given back once.
        self.with(|| unsafe { assert_eq!(destroy(self.stream), 0) });
        // SAFETY: as above.
        unsafe { assert_eq!(release(0), 0) };
    }
}

/// The program queues work with a tensor, drops it, and goes on.
#[test]
fn memory_that_the_program_still_reads_is_not_written() {
    let turn = Turn::take();
    let directory = disk();
    let (path, file) = model(directory.path());
    let device = Device::open(Vendor::Cuda.device(0)).unwrap();
    let copied = DeviceMemory::new(&device, LEN).unwrap();
    let mut loading = stream(&path, Vendor::Cuda);
    let first = next(&mut loading).unwrap().unwrap();
    let (name, address) = (first.name().to_owned(), first.address());
    // These stay, so that nothing waits for the device. After a panic they go once the gate is open.
    let mut held = Vec::new();
    let work = Work::new();
    work.copy(copied.address(), address, LEN);
    drop(first);
    while held.len() < TENSORS / 2 {
        held.push(next(&mut loading).unwrap().unwrap());
    }
    assert!(held.iter().all(|tensor| tensor.address() != address), "the memory is in use");
    work.open();
    while let Some(tensor) = next(&mut loading).unwrap() {
        held.push(tensor);
    }
    assert_eq!(held.len(), TENSORS - 1);
    held.iter().for_each(|tensor| assert_is(tensor, &file));
    drop(work);
    let mut found = vec![0; LEN as usize];
    CopyStream::new(&device).unwrap().read_back(copied.address(), &mut found).unwrap();
    assert!(found == expected(&file, &name), "{name} was overwritten");
    drop((held, loading, copied, device));
    turn.assert_nothing_left("the stream");
}

/// The waits for the device are no part of what the program captures.
#[test]
fn a_capture_stays_valid_while_memory_is_used_again() {
    let turn = Turn::take();
    let directory = disk();
    let (path, file) = model(directory.path());
    let begin: unsafe extern "C" fn(Handle, i32) -> i32 = STAND_IN.function("cuStreamBeginCapture_v2");
    let end: unsafe extern "C" fn(Handle, *mut Handle) -> i32 = STAND_IN.function("cuStreamEndCapture");
    let destroy: unsafe extern "C" fn(Handle) -> i32 = STAND_IN.function("cuGraphDestroy");
    // What lasts is made before.
    go_through(&path, Vendor::Cuda, &file, |_| ());
    let work = Work::new();
    work.open();
    // In the mode that refuses most calls of all threads.
    // SAFETY: of these signatures in the driver; the stream lives.
    work.with(|| unsafe { assert_eq!(begin(work.stream, 0), 0) });
    go_through(&path, Vendor::Cuda, &file, |_| ());
    let mut graph = ptr::null_mut();
    work.with(|| {
        // SAFETY: as above; the graph is destroyed once.
        unsafe {
            assert_eq!(end(work.stream, &mut graph), 0, "the capture was invalidated");
            assert_eq!(destroy(graph), 0);
        }
    });
    drop(work);
    turn.assert_nothing_left("the capture");
}

/// What is kept is freed with the stream. Tensors that live stay as they are.
#[test]
fn a_stream_that_is_dropped_keeps_nothing() {
    let turn = Turn::take();
    let directory = disk();
    let (path, file) = model(directory.path());
    for vendor in Vendor::ALL {
        let device = Device::open(vendor.device(0)).unwrap();
        let before = vendor.count("device_bytes");
        let mut loading = stream(&path, vendor);
        drop(next(&mut loading).unwrap());
        let kept = next(&mut loading).unwrap().unwrap();
        drop(next(&mut loading).unwrap());
        drop(loading);
        assert_eq!(vendor.count("device_bytes") - before, LEN, "{vendor:?}");
        assert_is(&kept, &file);
        drop((kept, device));
        turn.assert_nothing_left(&format!("{vendor:?}"));
    }
}

#[test]
fn a_wait_that_does_not_tell_and_a_device_that_is_lost_leave_nothing() {
    let turn = Turn::take();
    let directory = disk();
    let (path, file) = model(directory.path());
    for vendor in Vendor::ALL {
        // What HIP refuses to free stays, as its context is never destroyed.
        let lost = (vendor == Vendor::Cuda).then_some(("cuMemFree_v2:1=719", true));
        for (fault, is_lost) in [("cuMemFree_v2:*=999", false)].into_iter().chain(lost) {
            let mut loading = stream(&path, vendor);
            drop(next(&mut loading).unwrap());
            STAND_IN.configure(&vendor.faults(fault));
            let outcome = loop {
                match next(&mut loading) {
                    // Its bytes are asked for with calls that a lost device refuses, too.
                    Ok(Some(tensor)) => drop(tensor),
                    Ok(None) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            match outcome {
                Ok(()) => {}
                Err(Error::Device { .. }) => assert!(is_lost, "{vendor:?}, {fault}"),
                Err(other) => panic!("{vendor:?}, {fault}: {other:?}"),
            }
            drop(loading);
            STAND_IN.reset();
            turn.assert_nothing_left(&format!("{vendor:?}, {fault}"));
            go_through(&path, vendor, &file, |_| ());
        }
        turn.assert_nothing_left(&format!("{vendor:?}"));
    }
}

/// What is kept makes room for what is allocated.
#[test]
fn what_is_kept_is_no_reason_to_have_too_little_memory() {
    let turn = Turn::take();
    let directory = disk();
    for (vendor, lens) in
        Vendor::ALL.into_iter().flat_map(|vendor| lens_of_models().map(|lens| (vendor, lens)))
    {
        let (path, file) = model_of(directory.path(), &lens);
        // As much as the stream needs without what it keeps, and what the device keeps for itself.
        turn.set(&format!("MEMORY_MIB={}", IN_FLIGHT + 1));
        go_through(&path, vendor, &file, |_| ());
        turn.reset();
        turn.assert_nothing_left(&format!("{vendor:?}"));
    }
}

#[test]
fn what_is_kept_makes_room_for_memory_of_every_kind() {
    const MIB: u64 = 1 << 20;
    let turn = Turn::take();
    let device = Device::open(Vendor::Cuda.device(0)).unwrap();
    let stream = CopyStream::new(&device).unwrap();
    let reused = ReusedMemory::new(&device, u64::MAX);
    turn.set("MEMORY_MIB=8");
    let keep = || reused.give_back(DeviceMemory::new(&device, 6 * MIB).unwrap());
    keep();
    drop(DeviceMemory::new(&device, 4 * MIB).unwrap());
    keep();
    drop(stream.allocate_scratch(4 * MIB).unwrap());
    keep();
    drop(DeviceBlock::new(&device, 4 * MIB).unwrap());
    keep();
    let free = device.free_bytes_for(4 * MIB).unwrap();
    assert!(free >= 4 * MIB, "{free} are free");
    turn.reset();
    drop((reused, stream, device));
    turn.assert_nothing_left("what was kept");
}

/// What is kept of the memory of a stream waits for the program, the end of the stream does not.
#[test]
fn a_stream_ends_while_the_program_reads_a_tensor_that_it_dropped() {
    let turn = Turn::take();
    let directory = disk();
    let (path, _) = model(directory.path());
    let mut loading = stream(&path, Vendor::Cuda);
    // These stay, so that nothing waits for the device. After a panic they go once the gate is open.
    let mut held = Vec::new();
    let work = Work::new();
    drop(next(&mut loading).unwrap());
    while let Some(tensor) = next(&mut loading).unwrap() {
        held.push(tensor);
    }
    assert_eq!(held.len(), TENSORS - 1);
    work.open();
    drop((work, held, loading));
    turn.assert_nothing_left("the stream");
}

/// A child of `fork` has copies of what its parent keeps.
#[cfg(unix)]
#[test]
fn a_forked_child_drops_tensors_and_the_stream_of_its_parent() {
    let turn = Turn::take();
    let directory = disk();
    let (path, _) = model(directory.path());
    for vendor in Vendor::ALL {
        let mut loading = Some(stream(&path, vendor));
        drop(next(loading.as_mut().unwrap()).unwrap());
        let mut tensor = next(loading.as_mut().unwrap()).unwrap();
        // SAFETY: the child drops what it has, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(tensor.take());
            drop(loading.take());
            // SAFETY: ends the child without running what belongs to the parent.
            unsafe { libc::_exit(0) };
        }
        let mut status = -1;
        until("the child ends", || {
            // SAFETY: a child of this test, and a place for its status.
            unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) == child }
        });
        assert_eq!(status, 0, "{vendor:?}");
        drop((tensor, loading));
        turn.assert_nothing_left(&format!("{vendor:?}"));
    }
}
