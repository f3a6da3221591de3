//! Transfers from and to devices, on the stand-in driver and its cuFile.

#[path = "../../../../hoistway/tests/common/stand_in.rs"]
#[allow(unreachable_pub, dead_code, unused_qualifications, missing_docs)]
mod stand_in;

#[path = "../../../tests/store/device_memory.rs"]
#[allow(unreachable_pub, unused_qualifications, missing_docs)]
mod device_memory;

use super::*;
use crate::{DirectPath, Route};
use device_memory::{Code, DeviceMemory, in_context};
use hoistway_device::{CopyDirection, Device, DeviceId};
use stand_in::{STAND_IN, Turn, Vendor};
use std::ffi::c_void;

fn parts_of(pieces: Vec<Piece>) -> Vec<Part> {
    let len = pieces.iter().map(|piece| piece.len).sum();
    vec![Part { offset: 4096, pieces, len }]
}

fn direct(root: &Path, route: Route, direct: DirectPath) -> IoOptions {
    IoOptions { direct, ..options(root, route) }
}

fn carried(outcome: &Outcome, carrier: Carrier) -> u64 {
    outcome.carried.iter().filter(|(other, _)| *other == carrier).map(|(_, bytes)| bytes).sum()
}

#[test]
fn bytes_of_devices_pass_through_pinned_memory() {
    let stand_in = Turn::take();
    let directory = disk();
    for vendor in Vendor::ALL {
        for route in ROUTES {
            let Some(engine) = start(direct(directory.path(), route, DirectPath::Off)) else { continue };
            let file = new_file(directory.path(), &format!("{vendor:?} {}", route.name()));
            // Pieces at one distance, as of a paged cache; neighbours; any length; of two devices; of the host.
            let content = pattern(30 << 20, 5);
            let (first, second) =
                (DeviceMemory::of(vendor, 0, &content), DeviceMemory::of(vendor, 1, &content[..100_000]));
            let mut host = Memory::of(&content[..5000], 3);
            let rows = (0..64).map(|row| (row * 100_000, 3000));
            let shapes: Vec<(usize, usize)> = rows
                .chain([(0, 4096), (4096, 4096), (77, 1), (10_000, 9 << 20), (1 << 20, 20 << 20)])
                .collect();
            let pieces = |first: &DeviceMemory, second: &DeviceMemory, host: &mut Memory| {
                let mut pieces: Vec<Piece> =
                    shapes.iter().map(|&(start, len)| first.piece(start, len)).collect();
                pieces.insert(3, second.piece(100, 50_000));
                pieces.insert(66, host.piece());
                pieces
            };
            let mut expected: Vec<Vec<u8>> =
                shapes.iter().map(|&(start, len)| content[start..start + len].to_vec()).collect();
            expected.insert(3, content[100..50_100].to_vec());
            expected.insert(66, content[..5000].to_vec());
            let expected = expected.concat();

            let parts = parts_of(pieces(&first, &second, &mut host));
            let written = run(&engine, |done| job(Direction::Write, &file, parts, done));
            written.result.unwrap();
            assert_eq!(written.checksums, [Some(crc_fast::crc32_iscsi(&expected))]);
            assert!(std::fs::read(file.path()).unwrap()[4096..][..expected.len()] == expected);

            // To places that do not overlap.
            let target = DeviceMemory::of(vendor, 0, &vec![0xEE; expected.len() + 64]);
            let mut start = 64;
            let pieces: Vec<Piece> = [1usize, 4095, 70_000, 1 << 20]
                .into_iter()
                .chain([expected.len() - 1 - 4095 - 70_000 - (1 << 20)])
                .map(|len| {
                    start += len;
                    target.piece(start - len, len)
                })
                .collect();
            let read = run(&engine, |done| job(Direction::Read, &file, parts_of(pieces), done));
            read.result.unwrap();
            assert_eq!(read.checksums, written.checksums);
            assert_eq!(read.bounced_bytes, expected.len() as u64);
            let bytes = target.bytes();
            assert!(bytes[64..] == expected && bytes[..64] == [0xEE; 64]);
            drop((engine, first, second, target));
            stand_in.assert_nothing_left(route.name());
        }
    }
}

/// Memory is pinned for one driver: what another's devices copy from and to is pinned for them, too.
#[test]
fn memory_that_bytes_pass_through_is_pinned_for_each_vendor() {
    let stand_in = Turn::take();
    let directory = disk();
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
    let file = new_file(directory.path(), "both");
    let content = pattern(2 << 20, 5);
    let memory = Vendor::ALL.map(|vendor| DeviceMemory::of(vendor, 0, &content));
    let pieces = memory.each_ref().map(|memory| memory.piece(0, content.len()));
    let written = run(&engine, |done| job(Direction::Write, &file, parts_of(pieces.to_vec()), done));
    written.result.unwrap();
    assert!(std::fs::read(file.path()).unwrap()[4096..] == content.repeat(2));
    for vendor in Vendor::ALL {
        assert!(vendor.count("pinned_bytes") > 0, "{vendor:?}");
    }
    drop((engine, memory));
    stand_in.assert_nothing_left("both");
}

/// A driver must not be asked about another's event.
#[test]
fn an_event_of_an_unknown_kind_fails_the_job_that_waits_for_it() {
    let stand_in = Turn::take();
    let directory = disk();
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
    let file = new_file(directory.path(), "data");
    let content = pattern(4096, 3);
    let memory = Vendor::ALL.map(|vendor| DeviceMemory::of(vendor, 0, &content));
    let event = Event::after(Vendor::Rocm, &memory[1], &content, Duration::ZERO);
    let mut host = Memory::of(&content, 3);
    let of_both = memory.each_ref().map(|memory| memory.piece(0, 4096)).to_vec();
    // The stand-in is the driver of both kinds in this process.
    for pieces in [of_both, vec![host.piece()]] {
        let wait_event = Some(event.handle());
        let parts = parts_of(pieces);
        let failed = run(&engine, |done| Job { wait_event, ..job(Direction::Write, &file, parts, done) });
        match failed.result {
            Err(Failure::Device(error)) => assert!(error.to_string().contains("several kinds"), "{error}"),
            other => panic!("{other:?}"),
        }
    }
    drop((event, engine, memory));
    stand_in.assert_nothing_left("events");
}

/// An event of device 0, and the stream that reaches it.
struct Event {
    vendor: Vendor,
    stream: *mut c_void,
    event: *mut c_void,
}

impl Event {
    /// One that is reached once `content` has been copied to `memory`, which takes so long. Both must live until then.
    fn after(vendor: Vendor, memory: &DeviceMemory, content: &[u8], time: Duration) -> Self {
        let copy: unsafe extern "C" fn(u64, *const c_void, usize, *mut c_void) -> Code =
            STAND_IN.function(vendor.symbol("cuMemcpyHtoDAsync_v2"));
        STAND_IN.set(&format!("COPY_LATENCY_US={}", time.as_micros()));
        Self::behind(vendor, |stream| {
            // SAFETY: of this signature in the driver. The caller waits for the copy.
            let code = unsafe { copy(memory.address, content.as_ptr().cast(), content.len(), stream) };
            assert_eq!(code, 0);
        })
    }

    /// One of CUDA's that is reached once the sender is dropped.
    fn held_up() -> (Self, mpsc::Sender<()>) {
        extern "C" fn wait(end: *mut c_void) {
            // SAFETY: the receiver that is given away below, once.
            let end = unsafe { Box::from_raw(end.cast::<mpsc::Receiver<()>>()) };
            // The error is the signal: the sender is gone.
            let _ = end.recv();
        }
        type Wait = extern "C" fn(*mut c_void);
        let launch: unsafe extern "C" fn(*mut c_void, Wait, *mut c_void) -> Code =
            STAND_IN.function("cuLaunchHostFunc");
        let (sender, receiver) = mpsc::channel();
        let event = Self::behind(Vendor::Cuda, |stream| {
            // SAFETY: of this signature in the driver, which calls the function once.
            let code = unsafe { launch(stream, wait, Box::into_raw(Box::new(receiver)).cast()) };
            assert_eq!(code, 0);
        });
        (event, sender)
    }

    /// One that is reached once its stream has done what `work` gives it to do.
    fn behind(vendor: Vendor, work: impl FnOnce(*mut c_void)) -> Self {
        let create_stream: unsafe extern "C" fn(*mut *mut c_void, u32) -> Code =
            STAND_IN.function(vendor.symbol("cuStreamCreate"));
        let create_event: unsafe extern "C" fn(*mut *mut c_void, u32) -> Code =
            STAND_IN.function(vendor.symbol("cuEventCreate"));
        let record: unsafe extern "C" fn(*mut c_void, *mut c_void) -> Code =
            STAND_IN.function(vendor.symbol("cuEventRecord"));
        let (mut stream, mut event) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: of these signatures in the driver.
        in_context(vendor, 0, || unsafe {
            assert_eq!(create_stream(&mut stream, 1), 0);
            assert_eq!(create_event(&mut event, 2), 0);
            work(stream);
            assert_eq!(record(event, stream), 0);
        });
        Self { vendor, stream, event }
    }

    fn handle(&self) -> u64 {
        self.event.expose_provenance() as u64
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy_stream: unsafe extern "C" fn(*mut c_void) -> Code =
            STAND_IN.function(self.vendor.symbol("cuStreamDestroy_v2"));
        let destroy_event: unsafe extern "C" fn(*mut c_void) -> Code =
            STAND_IN.function(self.vendor.symbol("cuEventDestroy_v2"));
        // SAFETY: made by `behind`, destroyed once.
        in_context(self.vendor, 0, || unsafe { (destroy_event(self.event), destroy_stream(self.stream)) });
    }
}

#[test]
fn an_event_is_waited_for_before_memory_is_read() {
    let stand_in = Turn::take();
    let directory = disk();
    for vendor in Vendor::ALL {
        for registered in [false, true] {
            let engine = start(direct(directory.path(), Route::Auto, DirectPath::Prefer)).unwrap();
            let file = new_file(directory.path(), &format!("{vendor:?} {registered}"));
            let memory = DeviceMemory::of(vendor, 0, &vec![1; 1 << 20]);
            let region = registered.then(|| {
                // SAFETY: the memory outlives the region.
                unsafe { engine.register_device(vendor.device(0), memory.address, 1 << 20) }.unwrap()
            });
            let content = pattern(1 << 20, 3);
            let event = Event::after(vendor, &memory, &content, Duration::from_millis(100));
            let parts = parts_of(vec![memory.piece(0, 1 << 20)]);
            let wait_event = Some(event.handle());
            let written =
                run(&engine, |done| Job { wait_event, ..job(Direction::Write, &file, parts, done) });
            written.result.unwrap();
            stand_in.set("COPY_LATENCY_US=0");
            assert!(std::fs::read(file.path()).unwrap()[4096..] == content, "registered: {registered}");
            drop((event, region, engine));
        }
    }
}

/// Calls of a function of the driver that do not begin as long as this lives.
struct Blocked(&'static str);

impl Blocked {
    fn new(function: &'static str) -> Self {
        STAND_IN.configure(&format!("BLOCKS={function}"));
        Self(function)
    }

    fn calls(&self) -> u64 {
        STAND_IN.count(&format!("calls.{}", self.0))
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        STAND_IN.configure("BLOCKS=");
    }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// To pin memory takes long.
#[test]
fn events_are_asked_after_while_memory_is_pinned() {
    let stand_in = Turn::take();
    let directory = disk();
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
    let file = new_file(directory.path(), "data");
    let content = pattern(1 << 20, 3);
    let memory = DeviceMemory::of(Vendor::Cuda, 0, &content);
    let (event, gate) = Event::held_up();
    let submit = |offset, wait_event| {
        let (done, receiver) = outcome();
        let parts = vec![Part { offset, pieces: vec![memory.piece(0, 4096)], len: 4096 }];
        engine.submit(vec![Job { wait_event, ..job(Direction::Write, &file, parts, done) }]);
        receiver
    };
    let pins = Blocked::new("cuMemHostRegister_v2");
    let before = pins.calls();
    let pinning = submit(4096, None);
    until("memory to be pinned", || pins.calls() > before);
    let queries = || STAND_IN.count("calls.cuEventQuery");
    let before = queries();
    let waiting = submit(8192, Some(event.handle()));
    until("the event to be asked after", || queries() > before);
    drop(gate);
    drop(pins);
    for receiver in [pinning, waiting] {
        receiver.recv_timeout(PATIENCE).unwrap().result.unwrap();
    }
    drop((engine, event, memory));
    stand_in.assert_nothing_left("pinning");
}

/// Memory that a program has on the first device without hoistway, which does not keep the device from being opened anew.
struct Programs {
    allocated: u64,
    address: u64,
}

impl Programs {
    const ID: DeviceId = DeviceId::Cuda(0);

    fn new() -> Self {
        let allocate: unsafe extern "C" fn(*mut u64, usize) -> Code = STAND_IN.function("cuMemAlloc_v2");
        let retain: unsafe extern "C" fn(*mut *mut c_void, i32) -> Code =
            STAND_IN.function("cuDevicePrimaryCtxRetain");
        Device::open(Self::ID).unwrap();
        let mut allocated = 0;
        // SAFETY: of this signature in the driver. The context lives as long as this.
        unsafe { assert_eq!(retain(&mut std::ptr::null_mut(), 0), 0) };
        // SAFETY: of this signature in the driver.
        in_context(Vendor::Cuda, 0, || unsafe { assert_eq!(allocate(&mut allocated, 8192), 0) });
        Self { allocated, address: allocated.next_multiple_of(4096) }
    }

    fn write(&self, engine: &IoEngine, file: &Arc<DataFile>) -> Result<(), Failure> {
        let parts = parts_of(vec![Piece::new(Self::ID, self.address, 4096)]);
        run(engine, |done| job(Direction::Write, file, parts, done)).result
    }

    /// What becomes of a device that the program resets. The driver is as it was after that.
    fn lose() {
        STAND_IN.configure("FAULTS=cuCtxPushCurrent_v2:*=201");
        assert!(Device::open(Self::ID).unwrap().memory().is_err());
        STAND_IN.reset();
        assert!(Self::is_lost(), "the engine uses it");
    }

    fn is_lost() -> bool {
        Device::get(Self::ID).is_some_and(|device| device.is_lost())
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let free: unsafe extern "C" fn(u64) -> Code = STAND_IN.function("cuMemFree_v2");
        let release: unsafe extern "C" fn(i32) -> Code = STAND_IN.function("cuDevicePrimaryCtxRelease_v2");
        // SAFETY: allocated once, freed once.
        in_context(Vendor::Cuda, 0, || unsafe { assert_eq!(free(self.allocated), 0) });
        // SAFETY: retained by `new`.
        unsafe { assert_eq!(release(0), 0) };
    }
}

/// A device that the program has reset, with memory parked, is opened anew once the engine lets it go.
#[test]
fn a_device_that_was_lost_is_opened_anew() {
    let stand_in = Turn::take();
    let directory = disk();
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
    let file = new_file(directory.path(), "data");
    let memory = Programs::new();
    memory.write(&engine, &file).unwrap();
    Device::open(Programs::ID).unwrap().set_aside(());
    STAND_IN.configure("FAULTS=cuCtxPushCurrent_v2:*=201");
    assert!(matches!(memory.write(&engine, &file), Err(Failure::Device(_))));
    STAND_IN.reset();
    assert!(Programs::is_lost(), "the engine uses it");
    // Each worker lets it go when it is used again.
    until("the device to be opened anew", || memory.write(&engine, &file).is_ok() && !Programs::is_lost());
    drop((memory, engine));
    stand_in.assert_nothing_left("the device that was lost");
}

/// Callers, and those that cancel, do not wait for it.
#[test]
fn a_device_is_opened_by_the_threads_that_use_it() {
    let stand_in = Turn::take();
    let directory = disk();
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
    let file = new_file(directory.path(), "data");
    let programs = Programs::new();
    hoistway_device::release_devices();
    let opens = Blocked::new("cuDevicePrimaryCtxRetain");
    let before = opens.calls();
    let (done, ended) = outcome();
    let parts = parts_of(vec![Piece::new(Programs::ID, programs.address, 4096)]);
    engine.submit(vec![Job { tag: 7, ..job(Direction::Write, &file, parts, done) }]);
    until("the device to be opened", || opens.calls() > before);
    engine.cancel(7);
    engine.report();
    assert!(ended.try_recv().is_err());
    drop(opens);
    ended.recv_timeout(PATIENCE).unwrap();
    drop((engine, programs));
    stand_in.assert_nothing_left("a device that is opened");
}

/// What was registered with it is not known to the one that is opened anew.
#[test]
fn a_device_that_was_lost_with_registered_memory_is_opened_anew() {
    let stand_in = Turn::take();
    let directory = disk();
    for way in [DirectPath::Prefer, DirectPath::Require] {
        let engine = start(direct(directory.path(), Route::Auto, way)).unwrap();
        let file = new_file(directory.path(), way.name());
        if let Err(refused) = file.direct() {
            skip(Requirement::Direct, refused);
            return;
        }
        let memory = Programs::new();
        // SAFETY: the memory outlives the region.
        let register = || unsafe { engine.register_device(Programs::ID, memory.address, 4096) }.unwrap();
        let region = register();
        assert!(region.is_direct());
        memory.write(&engine, &file).unwrap();
        Programs::lose();
        if way == DirectPath::Prefer {
            until("the device to be opened anew", || {
                memory.write(&engine, &file).is_ok() && !Programs::is_lost()
            });
            assert!(!region.is_direct() && engine.report().proofs.is_empty());
        } else {
            assert!(matches!(memory.write(&engine, &file), Err(Failure::Io(_))));
        }
        let again = register();
        assert!(!Programs::is_lost() && again.is_direct() && !region.is_direct());
        memory.write(&engine, &file).unwrap();
        drop((region, again, memory, engine, file));
        stand_in.assert_nothing_left(way.name());
    }
}

/// One device has it pinned for all of its kind.
#[test]
fn memory_that_bytes_pass_through_is_pinned_anew_when_the_device_that_pinned_it_is_lost() {
    let stand_in = Turn::take();
    let directory = disk();
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
    let file = new_file(directory.path(), "data");
    let (lost, content) = (Programs::new(), pattern(1 << 20, 3));
    let other = DeviceMemory::of(Vendor::Cuda, 1, &content);
    let write = || {
        let parts = parts_of(vec![other.piece(0, other.len)]);
        run(&engine, |done| job(Direction::Write, &file, parts, done)).result
    };
    let pinned = || STAND_IN.count("pinned_bytes");
    lost.write(&engine, &file).unwrap();
    // By each worker.
    (0..8).for_each(|_| write().unwrap());
    assert!(pinned() > 0);
    Programs::lose();
    STAND_IN.configure("FAULTS=cuMemHostRegister_v2:1=2");
    assert!(matches!(lost.write(&engine, &file), Err(Failure::Device(_))));
    assert_eq!(pinned(), 0);
    STAND_IN.reset();
    write().unwrap();
    assert!(pinned() > 0);
    drop((lost, other, engine));
    stand_in.assert_nothing_left("pinned memory");
}

#[test]
fn events_that_are_not_reached_delay_no_other_job() {
    let stand_in = Turn::take();
    let directory = disk();
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
    let file = new_file(directory.path(), "data");
    let content = pattern(1 << 20, 3);
    let memory = DeviceMemory::of(Vendor::Cuda, 0, &content);
    let (event, gate) = Event::held_up();
    let submit = |tag, priority| {
        let (done, receiver) = outcome();
        let parts = parts_of(vec![memory.piece(0, 4096)]);
        let wait_event = Some(event.handle());
        engine.submit(vec![Job { tag, priority, wait_event, ..job(Direction::Write, &file, parts, done) }]);
        receiver
    };
    let loads: Vec<_> = (0..16).map(|_| submit(1, Priority::Demand)).collect();
    let stores: Vec<_> = (0..16).map(|_| submit(2, Priority::Background)).collect();
    let other = DeviceMemory::of(Vendor::Cuda, 0, &content);
    let parts = vec![Part { offset: 1 << 20, pieces: vec![other.piece(0, 4096)], len: 4096 }];
    run(&engine, |done| job(Direction::Write, &file, parts, done)).result.unwrap();
    assert_eq!(engine.cancel(1), 16);
    for receiver in loads {
        assert!(matches!(receiver.recv_timeout(PATIENCE).unwrap().result, Err(Failure::Cancelled)));
    }
    assert!(stores.iter().all(|receiver| receiver.try_recv().is_err()));
    drop(gate);
    stores.iter().for_each(|receiver| receiver.recv_timeout(PATIENCE).unwrap().result.unwrap());
    drop((event, engine, memory, other));
    stand_in.assert_nothing_left("events");
}

#[test]
fn an_event_that_cannot_be_asked_after_fails_the_job_that_waits_for_it() {
    let stand_in = Turn::take();
    let directory = disk();
    for vendor in Vendor::ALL {
        let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
        let file = new_file(directory.path(), &format!("{vendor:?}"));
        let content = pattern(4096, 3);
        let memory = DeviceMemory::of(vendor, 0, &content);
        let event = Event::after(vendor, &memory, &content, Duration::ZERO);
        let write = || {
            let parts = parts_of(vec![memory.piece(0, 4096)]);
            let wait_event = Some(event.handle());
            run(&engine, |done| Job { wait_event, ..job(Direction::Write, &file, parts, done) })
        };
        stand_in.set(&vendor.faults("cuEventQuery:1=1"));
        let failed = write();
        assert!(matches!(failed.result, Err(Failure::Device(_))) && failed.started.is_none(), "{failed:?}");
        write().result.unwrap();
        stand_in.reset();
        drop((event, engine, memory));
        stand_in.assert_nothing_left("events");
    }
}

#[test]
fn registered_memory_goes_past_the_host() {
    let stand_in = Turn::take();
    let directory = disk();
    for route in ROUTES {
        let Some(engine) = start(direct(directory.path(), route, DirectPath::Require)) else { continue };
        let file = new_file(directory.path(), route.name());
        if let Err(refused) = file.direct() {
            skip(Requirement::Direct, refused);
            return;
        }
        let content = pattern(12 << 20, 9);
        let memory = DeviceMemory::of(Vendor::Cuda, 1, &content);
        // SAFETY: the memory outlives the region.
        let region =
            unsafe { engine.register_device(DeviceId::Cuda(1), memory.address, memory.len as u64) }.unwrap();
        assert!(region.is_direct());
        assert!(engine.report().proofs[0].starts_with("cuda:1: cuFile counted a trial write"));
        let sizes = [10 << 20, 5000, 100];
        let mut parts = Vec::new();
        let (mut offset, mut start) = (4096, 0);
        for len in sizes {
            parts.push(Part { offset, pieces: vec![memory.piece(start, len)], len: len as u64 });
            offset += (len as u64).next_multiple_of(4096);
            start += len.next_multiple_of(4096);
        }
        let header = Header::Write { offset: 0, make: Box::new(|_| vec![7; 4096]) };
        let written =
            run(&engine, |done| Job { header, ..job(Direction::Write, &file, parts.clone(), done) });
        written.result.as_ref().unwrap();
        // What is less than a block does not.
        assert_eq!(carried(&written, Carrier::Gds), (10 << 20) + 4096);
        assert_eq!(
            written.checksums,
            [None, None, Some(crc_fast::crc32_iscsi(&content[(10 << 20) + 8192..][..100]))]
        );
        let on_disk = std::fs::read(file.path()).unwrap();
        assert!(on_disk[..4096] == [7; 4096] && on_disk[4096..][..10 << 20] == content[..10 << 20]);

        memory.copy(CopyDirection::ToDevice, vec![0u8; 12 << 20].as_ptr().expose_provenance());
        let header = Header::Read { offset: 0 };
        let read = run(&engine, |done| Job { header, ..job(Direction::Read, &file, parts, done) });
        read.result.as_ref().unwrap();
        assert_eq!(read.header, [7; 4096]);
        assert_eq!(carried(&read, Carrier::Gds), (10 << 20) + 4096);
        let bytes = memory.bytes();
        let mut start = 0;
        for len in sizes {
            assert!(bytes[start..start + len] == content[start..start + len]);
            start += len.next_multiple_of(4096);
        }
        let names: Vec<_> =
            std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(names.iter().all(|name| !name.to_string_lossy().contains("trial")), "{names:?}");
        drop((region, engine, file, memory));
        stand_in.assert_nothing_left(route.name());
    }
}

#[test]
fn what_is_not_proven_direct_is_staged_or_refused() {
    let stand_in = Turn::take();
    let directory = disk();
    let content = pattern(1 << 20, 2);
    stand_in.set("CUFILE_THROUGH_HOST=1");
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Prefer)).unwrap();
    let file = new_file(directory.path(), "data");
    let memory = DeviceMemory::of(Vendor::Cuda, 0, &content);
    // SAFETY: the memory outlives the region.
    let region = unsafe { engine.register_device(DeviceId::Cuda(0), memory.address, 1 << 20) }.unwrap();
    assert!(!region.is_direct());
    let parts = parts_of(vec![memory.piece(0, 1 << 20)]);
    let written = run(&engine, |done| job(Direction::Write, &file, parts.clone(), done));
    written.result.as_ref().unwrap();
    assert_eq!(carried(&written, Carrier::Gds), 0);
    assert_eq!(written.checksums, [Some(crc_fast::crc32_iscsi(&content))]);
    let refused = engine.report().refused;
    match file.direct() {
        Ok(_) => assert!(
            refused
                .iter()
                .any(|refusal| refusal.what == "gds" && refusal.why.reason.contains("through host")),
            "{refused:?}"
        ),
        Err(refused) => skip(Requirement::Direct, refused),
    }
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Require)).unwrap();
    // SAFETY: as above.
    let error = unsafe { engine.register_device(DeviceId::Cuda(0), memory.address, 1 << 20) }.unwrap_err();
    assert!(matches!(error, crate::Error::RouteUnavailable { .. }), "{error}");
    let outcome = run(&engine, |done| job(Direction::Write, &file, parts, done));
    assert!(matches!(outcome.result, Err(Failure::Io(_))), "memory that is not registered: {outcome:?}");
}

/// An engine with memory that is registered, and a file that was written from it.
fn on_the_direct_path(
    root: &Path,
    way: DirectPath,
    content: &[u8],
    check: impl FnOnce(&IoEngine, &DeviceMemory, &Arc<DataFile>),
) {
    let engine = start(direct(root, Route::Auto, way)).unwrap();
    let file = new_file(root, way.name());
    if let Err(refused) = file.direct() {
        skip(Requirement::Direct, refused);
        return;
    }
    let memory = DeviceMemory::of(Vendor::Cuda, 0, content);
    // SAFETY: the memory outlives the region.
    let region =
        unsafe { engine.register_device(DeviceId::Cuda(0), memory.address, memory.len as u64) }.unwrap();
    let parts = parts_of(vec![memory.piece(0, memory.len)]);
    run(&engine, |done| job(Direction::Write, &file, parts, done)).result.unwrap();
    memory.copy(CopyDirection::ToDevice, vec![0u8; content.len()].as_ptr().expose_provenance());
    check(&engine, &memory, &file);
    drop(region);
}

#[test]
fn what_turns_out_to_go_through_the_host_is_not_called_direct() {
    let stand_in = Turn::take();
    let directory = disk();
    let content = pattern(1 << 20, 2);
    for way in [DirectPath::Prefer, DirectPath::Require] {
        on_the_direct_path(directory.path(), way, &content, |engine, memory, file| {
            stand_in.set("CUFILE_THROUGH_HOST=1");
            let parts = parts_of(vec![memory.piece(0, memory.len)]);
            let read = run(engine, |done| job(Direction::Read, file, parts.clone(), done));
            assert_eq!(carried(&read, Carrier::Gds), 0);
            if way == DirectPath::Require {
                assert!(matches!(read.result, Err(Failure::Io(_))), "{read:?}");
            } else {
                read.result.as_ref().unwrap();
                assert_eq!(carried(&read, Carrier::GdsCompat), 1 << 20);
                assert!(memory.bytes() == content);
                assert!(engine.report().refused.iter().any(|refusal| refusal.what == "gds"));
                let read = run(engine, |done| job(Direction::Read, file, parts, done));
                assert_eq!(carried(&read, Carrier::GdsCompat), 0, "it is given up");
                assert_eq!(read.checksums, [Some(crc_fast::crc32_iscsi(&content))]);
            }
            stand_in.set("CUFILE_THROUGH_HOST=0");
        });
    }
}

#[test]
fn what_cufile_fails_goes_by_way_of_the_host_if_it_may() {
    let stand_in = Turn::take();
    let content = pattern(1 << 20, 2);
    for fault in ["*=-5", "*=-5011", "*=short:0"] {
        for way in [DirectPath::Prefer, DirectPath::Require] {
            let directory = disk();
            on_the_direct_path(directory.path(), way, &content, |engine, memory, file| {
                stand_in.set(&format!("CUFILE_READ_FAULTS={fault}"));
                let parts = parts_of(vec![memory.piece(0, memory.len)]);
                let read = run(engine, |done| job(Direction::Read, file, parts, done));
                if way == DirectPath::Require {
                    assert!(matches!(read.result, Err(Failure::Io(_))), "{fault}: {read:?}");
                } else {
                    read.result.unwrap();
                    assert!(memory.bytes() == content, "{fault}");
                }
                stand_in.set("CUFILE_READ_FAULTS=");
            });
        }
    }
    // What comes short is gone on with.
    let directory = disk();
    on_the_direct_path(directory.path(), DirectPath::Require, &content, |engine, memory, file| {
        stand_in.set("CUFILE_READ_FAULTS=1=short:4096,2=short:8192");
        let parts = parts_of(vec![memory.piece(0, memory.len)]);
        let read = run(engine, |done| job(Direction::Read, file, parts, done));
        read.result.unwrap();
        assert!(memory.bytes() == content);
    });
}

#[test]
fn faults_of_the_driver_fail_the_transfer_and_leave_nothing() {
    let stand_in = Turn::take();
    let directory = disk();
    let content = pattern(3 << 20, 2);
    let faults = [
        "cuMemHostRegister_v2:1=2",
        "cuStreamCreate:1=2",
        "cuMemcpyDtoHAsync_v2:1=1",
        "cuEventRecord:1=2",
        "cuEventSynchronize:1=1",
        "copy:1=700",
    ];
    let cases = Vendor::ALL.into_iter().flat_map(|vendor| faults.map(|fault| (vendor, fault)));
    for (number, (vendor, fault)) in cases.enumerate() {
        let memory = DeviceMemory::of(vendor, 0, &content);
        let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
        let file = new_file(directory.path(), &number.to_string());
        let parts = parts_of(vec![memory.piece(0, memory.len)]);
        stand_in.set(&vendor.faults(fault));
        let written = run(&engine, |done| job(Direction::Write, &file, parts.clone(), done));
        stand_in.reset();
        // An event that cannot be made or waited for is no error: the stream can be waited for too.
        if fault.starts_with("cuEvent") {
            written.result.unwrap();
        } else {
            assert!(matches!(written.result, Err(Failure::Device(_))), "{vendor:?} {fault}: {written:?}");
        }
        run(&engine, |done| job(Direction::Write, &file, parts, done)).result.unwrap();
        assert!(std::fs::read(file.path()).unwrap()[4096..] == content);
        drop((engine, file, memory));
        stand_in.assert_nothing_left(fault);
    }
}

#[test]
fn a_child_of_fork_leaves_registered_memory_alone() {
    let stand_in = Turn::take();
    let directory = disk();
    let engine = start(direct(directory.path(), Route::Auto, DirectPath::Prefer)).unwrap();
    let memory = DeviceMemory::of(Vendor::Cuda, 0, &pattern(1 << 20, 2));
    // SAFETY: the memory outlives the region.
    let region = unsafe { engine.register_device(DeviceId::Cuda(0), memory.address, 1 << 20) }.unwrap();
    let is_direct = region.is_direct();
    let held = region.hold();
    // SAFETY: the child touches no lock, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: a deadlock ends this process too.
        unsafe { libc::alarm(20) };
        let leaves = !region.is_direct();
        // SAFETY: as if it was dropped; its borrow by `held` means nothing here.
        drop(unsafe { std::ptr::read(&region) });
        // SAFETY: ends this process.
        unsafe { libc::_exit(if leaves { 0 } else { 1 }) };
    }
    drop(held);
    let mut status = 0;
    // SAFETY: `status` is written.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(region.is_direct(), is_direct);
    drop((region, engine, memory));
    stand_in.assert_nothing_left("fork");
}

/// If it is unknown whether copies have ended, nothing uses their memory until the device tells.
#[test]
fn memory_in_doubt_comes_back_once_the_device_tells() {
    let stand_in = Turn::take();
    let directory = disk();
    for vendor in Vendor::ALL {
        let memory = DeviceMemory::of(vendor, 0, &pattern(3 << 20, 2));
        let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
        let file = new_file(directory.path(), &format!("{vendor:?}"));
        let parts = parts_of(vec![memory.piece(0, memory.len)]);
        let owner: Arc<dyn std::any::Any + Send + Sync> = Arc::new(());
        let held = Arc::downgrade(&owner);
        let in_doubt = "cuEventSynchronize:*=1,cuStreamSynchronize:*=1,cuEventQuery:*=1,cuMemFree_v2:*=1";
        stand_in.set(&vendor.faults(in_doubt));
        let keep = KeepAlive::new(owner);
        let written = run(&engine, |done| Job { keep, ..job(Direction::Write, &file, parts.clone(), done) });
        assert!(matches!(written.result, Err(Failure::Lost(_))), "{written:?}");
        let again = run(&engine, |done| job(Direction::Write, &file, parts.clone(), done));
        assert!(matches!(again.result, Err(Failure::Device(_))), "nothing more is copied: {again:?}");
        assert!(held.upgrade().is_some(), "the caller's memory is not let go");
        stand_in.reset();
        let again = run(&engine, |done| job(Direction::Write, &file, parts, done));
        again.result.expect("the device has ended its work: it is used again");
        assert!(held.upgrade().is_none(), "memory comes back");
        let other = DeviceMemory::of(vendor, 1, &pattern(16 << 20, 3));
        let parts = parts_of(vec![other.piece(0, other.len)]);
        run(&engine, |done| job(Direction::Write, &file, parts, done)).result.unwrap();
        drop((engine, memory, other, file));
        stand_in.assert_nothing_left(&format!("{vendor:?}"));
    }
}

/// Jobs for `count` blocks of 64 KiB in a row, as of a paged cache, and where they will end.
fn blocks_of(
    direction: Direction,
    file: &Arc<DataFile>,
    memory: &DeviceMemory,
    count: usize,
) -> (Vec<Job>, Vec<mpsc::Receiver<Outcome>>) {
    let block = |number: usize| {
        let (done, end) = outcome();
        let offset = (number * SLOT) as u64;
        let make: MakeHeader = Box::new(move |sums| format!("{number} {sums:?}").into_bytes());
        let header = match direction {
            Direction::Read => Header::Read { offset },
            Direction::Write => Header::Write { offset, make },
        };
        let pieces = vec![memory.piece(number * BLOCK, BLOCK)];
        let parts = vec![Part { offset: offset + 4096, pieces, len: BLOCK as u64 }];
        (Job { header, ..job(direction, file, parts, done) }, end)
    };
    (0..count).map(block).unzip()
}

const BLOCK: usize = 64 << 10;
/// From one block to the next: a header before each.
const SLOT: usize = BLOCK + 4096;

/// A copy and an event for each MiB, whichever way they go.
#[test]
fn blocks_of_a_device_are_joined_as_those_of_the_host_are() {
    const BLOCKS: usize = 128;
    let stand_in = Turn::take();
    let directory = disk();
    for vendor in Vendor::ALL {
        for route in ROUTES {
            let Some(engine) = start(direct(directory.path(), route, DirectPath::Prefer)) else { continue };
            let file = new_file(directory.path(), &format!("{vendor:?} {}", route.name()));
            let content = pattern(BLOCKS * BLOCK, 5);
            let calls = |function: &str| STAND_IN.count(&format!("calls.{}", vendor.symbol(function)));
            let copies = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpy2DAsync_v2"];
            let counts = || [copies.map(calls).iter().sum(), calls("cuEventRecord")];
            for direction in [Direction::Write, Direction::Read] {
                let bytes = if direction == Direction::Write { &content } else { &vec![0; content.len()] };
                let memory = DeviceMemory::of(vendor, 0, bytes);
                let before = counts();
                let (jobs, ends) = blocks_of(direction, &file, &memory, BLOCKS);
                engine.submit(jobs);
                for (number, end) in ends.iter().enumerate() {
                    let outcome = end.recv_timeout(PATIENCE).unwrap();
                    outcome.result.unwrap();
                    let sums = [Some(crc_fast::crc32_iscsi(&content[number * BLOCK..][..BLOCK]))];
                    assert_eq!(outcome.checksums, sums, "{number}");
                    if direction == Direction::Read {
                        let expected = format!("{number} {sums:?}").into_bytes();
                        assert_eq!(outcome.header[..expected.len()], expected, "{number}");
                    }
                }
                let most = (BLOCKS * BLOCK) as u64 >> 20;
                for (before, after) in before.iter().zip(counts()) {
                    let count = after - before;
                    assert!((1..=most).contains(&count), "{vendor:?} {direction:?}: {count} for {most} MiB");
                }
                assert!(memory.bytes() == content, "{vendor:?} {direction:?}");
            }
            drop((engine, file));
            stand_in.assert_nothing_left(route.name());
        }
    }
}

/// The blocks that were joined with it are moved again, each alone.
#[test]
fn a_copy_that_fails_fails_no_other_block() {
    let stand_in = Turn::take();
    let directory = disk();
    for vendor in Vendor::ALL {
        let engine = start(direct(directory.path(), Route::Auto, DirectPath::Off)).unwrap();
        let file = new_file(directory.path(), &format!("{vendor:?}"));
        let content = pattern(8 * BLOCK, 5);
        let memory = DeviceMemory::of(vendor, 0, &content);
        let (jobs, ends) = blocks_of(Direction::Write, &file, &memory, 8);
        stand_in.set(&vendor.faults("cuMemcpy2DAsync_v2:1=1"));
        engine.submit(jobs);
        ends.iter().for_each(|end| end.recv_timeout(PATIENCE).unwrap().result.unwrap());
        stand_in.reset();
        let written = std::fs::read(file.path()).unwrap();
        for number in 0..8 {
            assert!(
                written[number * SLOT + 4096..][..BLOCK] == content[number * BLOCK..][..BLOCK],
                "{number}"
            );
        }
        drop((engine, file, memory));
        stand_in.assert_nothing_left("a copy");
    }
}
