//! Reads by the runtime: by the stand-in, or by Microsoft's own if `HOISTWAY_DIRECTSTORAGE_DIR` names its folder.
//!
//! What Microsoft's runtime was seen to do that can hurt a caller, and the test that fails for a caller that does not know it:
//!
//! | the runtime | test |
//! |---|---|
//! | serves nothing unless `dstoragecore.dll` is loaded before it | each: the stand-in does the same |
//! | takes no configuration once there is a factory | `the_runtime_is_configured_before_its_factory_and_without_telemetry` |
//! | keeps the size of its staging buffer while a queue exists, and does not tell it | `a_staging_buffer_that_another_has_locked_is_an_error`, `a_second_copy_of_hoistway_in_the_process_is_refused` |
//! | makes no queue of fewer or more entries than its bounds | each: the stand-in does the same |
//! | refuses a request longer than the staging buffer, and signals its end at once | `a_read_longer_than_a_request_is_cut`, `a_failure_at_each_of_ten_requests_is_that_reads_own` |
//! | fails a request past the end of the file, and signals its end | `reads_of_any_offset_and_length_bring_the_bytes_of_the_file`, `a_failure_at_each_of_ten_requests_is_that_reads_own` |
//! | signals before a result that was enqueued after the signal is there | `an_event_that_comes_early_and_requests_in_another_order_change_no_bytes` |
//! | ends the process for a request of no bytes, or of two lengths | `reads_of_any_offset_and_length_bring_the_bytes_of_the_file` |
//! | takes a request past the end of its buffer of D3D12, and says that it succeeded | `a_read_that_does_not_fit_its_buffer_is_refused` |
//! | has a caller wait that enqueues into a full queue | `reads_that_the_queue_has_no_entries_for_are_kept_back` |
//! | ends requests as aborted when their queue is closed | `a_queue_that_is_dropped_waits_for_its_reads` |
//! | fails requests to a file that was closed | `memory_that_may_still_be_written_is_leaked`: a read keeps its file |
//!
//! Requests are not cancelled, come from files alone, and do not wait for a fence, so what the runtime does there is not tested.
#![cfg(windows)]
#![allow(missing_docs, unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use fake_dstorage::stand_in::{self, Turn};
use hoistway_directstorage::{
    DIRECTORY_VARIABLE, Ended, Failure, GraphicsDevice, Queue, REQUEST_BYTES, Read, Runtime, Sharing,
    StorageFile, Target, abi,
};
use std::{
    env, fs, mem,
    os::windows::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);
/// Of queues whose reads never end.
const SHORT: Duration = Duration::from_millis(50);

/// Whether tests run on Microsoft's libraries, which have no controls.
fn is_real() -> bool {
    env::var_os("HOISTWAY_TEST_DIRECTSTORAGE").is_some()
}

/// Memory that counts when it is freed.
struct Memory {
    bytes: Box<[u8]>,
    offset: u64,
    freed: Arc<AtomicUsize>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
    }
}

struct Bench {
    _folder: tempfile::TempDir,
    path: PathBuf,
    content: Vec<u8>,
    file: Arc<StorageFile>,
    freed: Arc<AtomicUsize>,
}

impl Bench {
    fn new(len: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let content: Vec<u8> = (0..len).map(|at| (at / 3 % 251) as u8 ^ (at >> 13) as u8).collect();
        fs::write(&path, &content).unwrap();
        let file = Arc::new(Runtime::get().unwrap().open_file(&path).unwrap());
        Self { _folder: folder, path, content, file, freed: Arc::default() }
    }

    fn push(&self, queue: &mut Queue<Memory>, offset: u64, len: usize) {
        let mut memory = Memory { bytes: vec![0xEE; len].into(), offset, freed: self.freed.clone() };
        let target = Target::Memory(memory.bytes.as_mut_ptr());
        let read = Read { file: self.file.clone(), offset, target, len };
        // SAFETY: the owner keeps the memory until it is dropped.
        unsafe { queue.push(memory, read) };
    }

    fn check(&self, Ended { owner, result, .. }: &Ended<Memory>) {
        let start = usize::try_from(owner.offset).unwrap().min(self.content.len());
        let expected = &self.content[start..(start + owner.bytes.len()).min(self.content.len())];
        assert_eq!(*result, Ok(expected.len()), "at {}", owner.offset);
        assert!(owner.bytes[..expected.len()] == *expected, "at {}", owner.offset);
        assert!(owner.bytes[expected.len()..].iter().all(|&byte| byte == 0xEE), "at {}", owner.offset);
    }
}

fn queue(depth: usize, patience: Duration) -> Queue<Memory> {
    Runtime::get().unwrap().queue(depth, patience, mem::forget).unwrap()
}

/// A turn with the stand-in, and nothing on Microsoft's libraries, which tests share as they are.
fn turn() -> Option<Turn> {
    (!is_real()).then(Turn::take)
}

#[test]
fn reads_of_any_offset_and_length_bring_the_bytes_of_the_file() {
    let turn = turn();
    let bench = Bench::new(300_000);
    let reads = [
        (0, 1),
        (1, 3),
        (4095, 4097),
        (12_345, 100_001),
        (299_999, 1),
        // Past the end: in part, and wholly. Neither is asked for.
        (299_000, 4096),
        (300_000, 4096),
        (1 << 40, 1),
        (5, 0),
        (0, 300_000),
    ];
    for depth in [1, 3, 10] {
        let mut queue = queue(depth, LONG);
        let (mut rest, mut ended, mut count) = (reads.iter(), Vec::new(), 0);
        while count < reads.len() {
            while queue.in_flight() < depth
                && let Some(&(offset, len)) = rest.next()
            {
                bench.push(&mut queue, offset, len);
            }
            queue.wait(&mut ended, LONG).unwrap();
            count += ended.len();
            ended.drain(..).for_each(|own| bench.check(&own));
        }
        assert_eq!(queue.in_flight(), 0);
    }
    assert_eq!(bench.freed.load(Ordering::Relaxed), 3 * reads.len());
    assert!(turn.is_none_or(|turn| turn.count("violations") == 0));
}

#[test]
fn a_read_longer_than_a_request_is_cut() {
    let turn = turn();
    let len = REQUEST_BYTES as usize + 4097;
    let bench = Bench::new(len + 7);
    let (mut queue, mut ended) = (queue(2, LONG), Vec::new());
    bench.push(&mut queue, 3, len);
    queue.wait(&mut ended, LONG).unwrap();
    ended.iter().for_each(|own| bench.check(own));
    assert_eq!(ended.len(), 1);
    assert!(turn.is_none_or(|turn| turn.count("requests") == 2 && turn.count("violations") == 0));
}

#[test]
fn a_result_is_taken_back_as_its_slot_is_used_again() {
    let _turn = turn();
    let bench = Bench::new(1 << 20);
    let (mut queue, mut ended) = (queue(1, LONG), Vec::new());
    // With one slot, a result of the read before would be taken for that of the next.
    for round in 0..200 {
        bench.push(&mut queue, round * 4096, 4096);
        queue.wait(&mut ended, LONG).unwrap();
        assert_eq!(ended.len(), 1);
        ended.drain(..).for_each(|own| bench.check(&own));
    }
}

#[test]
fn reads_pushed_together_are_submitted_together() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    let (mut queue, mut ended) = (queue(10, LONG), Vec::new());
    (0..10).for_each(|at| bench.push(&mut queue, at * 10_000, 10_000));
    assert_eq!(turn.count("submits"), 0);
    while queue.in_flight() > 0 {
        queue.wait(&mut ended, LONG).unwrap();
    }
    assert_eq!((ended.len(), turn.count("submits"), turn.count("requests")), (10, 1, 10));
    ended.iter().for_each(|own| bench.check(own));
}

#[test]
fn more_reads_than_the_depth_are_refused() {
    let _turn = turn();
    let bench = Bench::new(10_000);
    let (mut queue, mut ended) = (queue(1, LONG), Vec::new());
    bench.push(&mut queue, 0, 10);
    bench.push(&mut queue, 10, 10);
    while queue.in_flight() > 0 {
        queue.wait(&mut ended, LONG).unwrap();
    }
    let refused = ended.iter().filter(|own| own.result.is_err()).count();
    assert_eq!((ended.len(), refused), (2, 1));
}

#[test]
fn a_failure_at_each_of_ten_requests_is_that_reads_own() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    let before = turn.objects();
    for (code, words) in [
        (0, "past the end of the file (0x89240007)"),
        (0x8924_0008_u32, "larger than the staging buffer"),
        (0x8924_0016, "did not answer in time"),
        (0x8007_0017, "error 23 of Windows"),
        (0x887A_0005, "was removed"),
    ] {
        for failing in 1..=10 {
            turn.reset();
            turn.set(&format!("fail_at={failing}"));
            turn.set(&format!("code={code}"));
            turn.set("spoil=1");
            let (mut queue, mut ended) = (queue(10, LONG), Vec::new());
            (0..10).for_each(|at| bench.push(&mut queue, at * 10_000, 10_000));
            while queue.in_flight() > 0 {
                queue.wait(&mut ended, LONG).unwrap();
            }
            assert_eq!(ended.len(), 10);
            for own in &ended {
                if own.owner.offset == (failing - 1) * 10_000 {
                    let failure = own.result.clone().unwrap_err();
                    assert!(failure.to_string().contains(words), "{failure}");
                } else {
                    bench.check(own);
                }
            }
        }
    }
    assert_eq!((turn.objects(), turn.count("violations")), (before, 0));
}

#[test]
fn a_device_that_is_removed_fails_all_reads_from_then_on() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    for removed in 1..=10 {
        turn.reset();
        turn.set(&format!("remove_at={removed}"));
        let (mut queue, mut ended) = (queue(10, LONG), Vec::new());
        (0..10).for_each(|at| bench.push(&mut queue, at * 10_000, 10_000));
        while queue.in_flight() > 0 {
            queue.wait(&mut ended, LONG).unwrap();
        }
        let failed: Vec<_> = ended.iter().filter_map(|own| own.result.as_ref().err()).collect();
        assert_eq!(failed.len(), 11 - removed);
        assert!(failed.iter().all(|own| own.code() == abi::DXGI_ERROR_DEVICE_REMOVED));
    }
}

#[test]
fn an_event_that_comes_early_and_requests_in_another_order_change_no_bytes() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    for setting in ["early=1", "reverse=1"] {
        turn.reset();
        turn.set(setting);
        turn.set("delay_ms=2");
        let (mut queue, mut ended) = (queue(10, LONG), Vec::new());
        (0..10).for_each(|at| bench.push(&mut queue, at * 10_000, 10_000));
        while queue.in_flight() > 0 {
            queue.wait(&mut ended, LONG).unwrap();
        }
        assert_eq!(ended.len(), 10);
        ended.iter().for_each(|own| bench.check(own));
    }
}

#[test]
fn reads_that_never_end_are_an_error_and_their_memory_is_kept() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    for stalled in 1..=10 {
        turn.reset();
        bench.freed.store(0, Ordering::Relaxed);
        let (mut queue, mut ended) = (queue(10, SHORT), Vec::new());
        turn.set(&format!("stall_at={stalled}"));
        (0..10).for_each(|at| bench.push(&mut queue, at * 10_000, 10_000));
        let failure = loop {
            match queue.wait(&mut ended, LONG) {
                Ok(()) => {}
                Err(failure) => break failure,
            }
        };
        let left = 10 - ended.len();
        assert!(left > 10 - stalled, "{left}");
        ended.drain(..).for_each(|own| bench.check(&own));
        assert!(failure.to_string().contains(&format!("none of {left} reads")), "{failure}");
        // Those that have not ended may still write to their memory.
        drop(queue);
        assert_eq!(bench.freed.load(Ordering::Relaxed), 10 - left);
    }
}

#[test]
fn a_fence_that_never_comes_is_an_error_and_what_it_tells_of_is_kept() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    let adapters = hoistway_directstorage::adapters().unwrap();
    assert_eq!(adapters.len(), 3);
    let graphics = GraphicsDevice::open(adapters[2].luid, "it").unwrap();
    let runtime = Runtime::get().unwrap();
    let mut queue = runtime.queue_to(&graphics, 2, SHORT, mem::forget).unwrap();
    let buffer = Arc::new(graphics.buffer(Sharing::Heap, 100_000).unwrap());
    let push = |queue: &mut Queue<Arc<()>>, owner: &Arc<()>, offset: u64, len: usize| {
        let target = Target::Buffer { buffer: buffer.clone(), offset };
        // SAFETY: nothing else uses the buffer.
        unsafe { queue.push(owner.clone(), Read { file: bench.file.clone(), offset, target, len }) };
    };
    let (owner, mut ended) = (Arc::new(()), Vec::new());
    turn.set("d3d12_deaf_at=1");
    push(&mut queue, &owner, 0, 1000);
    let failure = loop {
        if let Err(failure) = queue.wait(&mut ended, LONG) {
            break failure;
        }
    };
    assert!(failure.to_string().contains("none of 1 reads"), "{failure}");
    drop(queue);
    assert_eq!((ended.len(), Arc::strong_count(&owner), Arc::strong_count(&buffer)), (0, 2, 2));
    turn.reset();
    // A fence that does not tell events is none to wait for.
    let mut queue = runtime.queue_to(&graphics, 2, LONG, mem::forget).unwrap();
    turn.set("d3d12_refuse_event=0x80004005");
    push(&mut queue, &owner, 0, 1000);
    let failure = queue.wait(&mut ended, LONG).unwrap_err();
    assert!(failure.to_string().contains("D3D12's SetEventOnCompletion failed"), "{failure}");
    drop(queue);
    assert_eq!((Arc::strong_count(&owner), Arc::strong_count(&buffer)), (2, 2));
    assert_eq!((turn.count("violations"), turn.count_graphics("violations")), (0, 0));
}

#[test]
fn a_fence_that_stops_at_any_of_ten_reads_is_an_error_and_what_it_tells_of_is_kept() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    let graphics = GraphicsDevice::open(hoistway_directstorage::adapters().unwrap()[2].luid, "it").unwrap();
    for stopped in 1..=10 {
        turn.reset();
        let mut queue = Runtime::get().unwrap().queue_to(&graphics, 10, SHORT, mem::forget).unwrap();
        let buffer = Arc::new(graphics.buffer(Sharing::Heap, 100_000).unwrap());
        let owner = Arc::new(());
        turn.set(&format!("d3d12_deaf_at={stopped}"));
        for at in 0..10 {
            let target = Target::Buffer { buffer: buffer.clone(), offset: at * 10_000 };
            let read = Read { file: bench.file.clone(), offset: at * 10_000, target, len: 10_000 };
            // SAFETY: nothing else uses this part of the buffer.
            unsafe { queue.push(owner.clone(), read) };
        }
        let mut ended = Vec::new();
        let failure = loop {
            if let Err(failure) = queue.wait(&mut ended, LONG) {
                break failure;
            }
        };
        let left = 10 - ended.len();
        assert!(left > 10 - stopped, "{left}");
        assert!(ended.iter().all(|own| own.result == Ok(10_000)));
        assert!(failure.to_string().contains(&format!("none of {left} reads")), "{failure}");
        ended.clear();
        drop(queue);
        assert_eq!((Arc::strong_count(&owner), Arc::strong_count(&buffer)), (1 + left, 1 + left));
    }
    assert_eq!((turn.count("violations"), turn.count_graphics("violations")), (0, 0));
}

/// An entry that finds the queue full has its caller wait, however long the entries before it take.
#[test]
fn reads_that_the_queue_has_no_entries_for_are_kept_back() {
    let turn = turn();
    let bench = Bench::new(100_000);
    let reads = usize::from(abi::QUEUE_CAPACITY.1);
    let (mut queue, mut ended) = (queue(reads, LONG), Vec::new());
    if let Some(turn) = &turn {
        turn.set("stall_at=1");
    }
    (0..reads).for_each(|at| bench.push(&mut queue, at as u64, 4));
    if let Some(turn) = &turn {
        queue.wait(&mut ended, Duration::from_millis(1)).unwrap();
        assert_eq!((ended.len(), queue.in_flight()), (0, reads));
        turn.set("stall_at=0");
    }
    while queue.in_flight() > 0 {
        queue.wait(&mut ended, LONG).unwrap();
    }
    assert_eq!(ended.len(), reads);
    ended.iter().for_each(|own| bench.check(own));
    assert!(turn.is_none_or(|turn| (turn.count("blocked"), turn.count("violations")) == (0, 0)));
}

/// Also one that waited for entries of the queue, which the wait enqueues.
#[test]
fn a_queue_whose_fence_refuses_an_event_stays_broken() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    let graphics = GraphicsDevice::open(hoistway_directstorage::adapters().unwrap()[2].luid, "it").unwrap();
    // A request, its result and its signal each: one read more than the queue leaves entries to.
    let reads = (usize::from(abi::QUEUE_CAPACITY.1) - 64) / 3 + 1;
    let mut queue = Runtime::get().unwrap().queue_to(&graphics, reads, LONG, mem::forget).unwrap();
    let buffer = Arc::new(graphics.buffer(Sharing::Heap, 4 * reads as u64).unwrap());
    turn.set("stall_at=1");
    for at in 0..reads {
        let target = Target::Buffer { buffer: buffer.clone(), offset: 4 * at as u64 };
        // SAFETY: nothing else uses this part of the buffer.
        unsafe { queue.push((), Read { file: bench.file.clone(), offset: 0, target, len: 4 }) };
    }
    let mut ended = Vec::new();
    queue.wait(&mut ended, Duration::from_millis(1)).unwrap();
    assert_eq!((ended.len(), queue.in_flight()), (0, reads));
    turn.set("d3d12_refuse_event=0x80004005");
    turn.set("stall_at=0");
    let failure = loop {
        if let Err(failure) = queue.wait(&mut ended, LONG) {
            break failure;
        }
    };
    assert!(failure.to_string().contains("D3D12's SetEventOnCompletion failed"), "{failure}");
    assert_eq!(queue.wait(&mut ended, LONG), Err(failure));
    drop(queue);
    assert_eq!((turn.count("violations"), turn.count_graphics("violations")), (0, 0));
}

/// What the fence of a removed device tells is no word of the runtime's that it has let go of file and memory.
#[test]
fn what_a_removed_device_leaves_with_a_silent_runtime_is_kept() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    let graphics = GraphicsDevice::open(hoistway_directstorage::adapters().unwrap()[2].luid, "it").unwrap();
    let mut queue = Runtime::get().unwrap().queue_to(&graphics, 2, SHORT, mem::forget).unwrap();
    let buffer = Arc::new(graphics.buffer(Sharing::Heap, 100_000).unwrap());
    let owner = Arc::new(());
    turn.set("stall_at=1");
    turn.set("deaf=1");
    let target = Target::Buffer { buffer: buffer.clone(), offset: 0 };
    // SAFETY: nothing else uses the buffer.
    unsafe { queue.push(owner.clone(), Read { file: bench.file.clone(), offset: 0, target, len: 1000 }) };
    turn.set("d3d12_remove=1");
    let mut ended = Vec::new();
    let failure = loop {
        match queue.wait(&mut ended, LONG) {
            Ok(()) => assert!(ended.is_empty(), "a read has ended that the runtime may still carry out"),
            Err(failure) => break failure,
        }
    };
    assert!(failure.to_string().contains("none of 1 reads"), "{failure}");
    let kept = || (Arc::strong_count(&owner), Arc::strong_count(&buffer), Arc::strong_count(&bench.file));
    assert_eq!((ended.len(), kept()), (0, (2, 2, 2)));
    drop(queue);
    assert_eq!(kept(), (2, 2, 2));
    // The runtime goes on, and writes to a buffer that is still there.
    ["stall_at=0", "deaf=0", "d3d12_remove=0"].iter().for_each(|setting| turn.set(setting));
    while turn.count("pending") > 0 {
        std::thread::yield_now();
    }
    assert_eq!((turn.count("violations"), turn.count_graphics("violations")), (0, 0));
}

/// A read is several requests, and its memory is given back once its one result is there.
#[test]
fn a_result_comes_after_all_requests_before_it_also_if_one_of_them_fails() {
    let _turn = turn();
    let bench = Bench::new(REQUEST_BYTES as usize);
    let raw = Raw::new(&bench.path);
    for bad in [(1_u64 << 40, 4096), (0, hoistway_directstorage::STAGING_BYTES + 4096)] {
        for failing in 0..3 {
            let ranges: Vec<_> =
                (0..3).map(|at| if at == failing { bad } else { (0, REQUEST_BYTES) }).collect();
            let mut memories: Vec<Vec<u8>> =
                ranges.iter().map(|&(_, len)| vec![0xEE; len as usize]).collect();
            // SAFETY: the memory lives until all requests are over, or the test has failed.
            let result = unsafe { raw.read(&ranges, &mut memories) };
            // The end first: what is still written is written there last.
            let (mut whole, mut good) = (true, Vec::new());
            for (at, memory) in memories.iter().enumerate().filter(|(at, _)| *at != failing) {
                whole &= memory.last() == bench.content.last();
                good.push(at);
            }
            assert!(result < 0, "request {failing} of 3 should fail");
            assert!(whole, "with request {failing} failed, others were not over");
            assert!(good.iter().all(|&at| memories[at] == bench.content), "{failing}");
        }
    }
}

/// A queue without what `Queue` does around it.
struct Raw {
    objects: [abi::Object; 3],
}

impl Raw {
    fn new(path: &Path) -> Self {
        let description = abi::QueueDescription {
            source_type: 0,
            capacity: abi::QUEUE_CAPACITY.0,
            priority: 0,
            name: std::ptr::null(),
            device: std::ptr::null_mut(),
        };
        let path: Vec<u16> = path.as_os_str().encode_wide().chain([0]).collect();
        let mut objects: [abi::Object; 3] = [std::ptr::null_mut(); 3];
        let [queue, statuses, file] = &mut objects;
        // SAFETY: the library is loaded and stays so, the function has this signature, and its factory this table.
        unsafe {
            let library = libloading::Library::new(Runtime::get().unwrap().path()).unwrap();
            let get: libloading::Symbol<'_, abi::GetFactory> = library.get(b"DStorageGetFactory\0").unwrap();
            let mut factory: abi::Object = std::ptr::null_mut();
            assert_eq!(get(&abi::IID_FACTORY, &raw mut factory), 0);
            let table = &**factory.cast::<*const abi::FactoryTable>();
            assert_eq!((table.create_queue)(factory, &raw const description, &abi::IID_QUEUE_1, queue), 0);
            assert_eq!(
                (table.create_status_array)(factory, 1, std::ptr::null(), &abi::IID_STATUS_ARRAY, statuses),
                0
            );
            assert_eq!((table.open_file)(factory, path.as_ptr(), &abi::IID_FILE, file), 0);
            (table.unknown.release)(factory);
        }
        Self { objects }
    }

    /// Reads ranges as requests before one result, waits for that, and returns it.
    ///
    /// # Safety
    /// Each memory is as long as its range, and lives until its request is over.
    unsafe fn read(&self, ranges: &[(u64, u32)], memories: &mut [Vec<u8>]) -> abi::HResult {
        let [queue, statuses, file] = self.objects;
        // SAFETY: living objects with these tables.
        unsafe {
            let table = &**queue.cast::<*const abi::QueueTable>();
            let results = &**statuses.cast::<*const abi::StatusArrayTable>();
            for (&(offset, bytes), memory) in ranges.iter().zip(memories) {
                let memory = abi::MemoryDestination { memory: memory.as_mut_ptr().cast(), bytes };
                let mut destination = abi::Destination { words: [0; 5] };
                destination.memory = memory;
                let request = abi::Request {
                    compression: 0,
                    kinds: abi::KINDS_MEMORY,
                    source: abi::Source { file, offset, bytes },
                    destination,
                    uncompressed_bytes: bytes,
                    cancellation_tag: 0,
                    name: std::ptr::null(),
                };
                (table.enqueue_request)(queue, &raw const request);
            }
            (table.enqueue_status)(queue, statuses, 0);
            (table.submit)(queue);
            while (results.is_complete)(statuses, 0) == 0 {
                std::hint::spin_loop();
            }
            (results.result)(statuses, 0)
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        for object in self.objects {
            // SAFETY: a living object, whose table begins so.
            unsafe {
                let table = &**object.cast::<*const abi::UnknownTable>();
                (table.release)(object);
            }
        }
    }
}

#[test]
fn a_read_that_does_not_fit_its_buffer_is_refused() {
    let Some(turn) = turn() else { return };
    let (bench, before) = (Bench::new(100_000), turn.graphics());
    let graphics = GraphicsDevice::open(hoistway_directstorage::adapters().unwrap()[2].luid, "it").unwrap();
    let buffer = Arc::new(graphics.buffer(Sharing::Heap, 64 << 10).unwrap());
    let (mut queue, mut ended) =
        (Runtime::get().unwrap().queue_to(&graphics, 1, LONG, mem::forget).unwrap(), Vec::new());
    for (offset, len) in [(buffer.len(), 1), (buffer.len() - 1, 2), (1, 64 << 10), (u64::MAX, 2)] {
        let target = Target::Buffer { buffer: buffer.clone(), offset };
        // SAFETY: nothing else uses the buffer.
        unsafe { queue.push((), Read { file: bench.file.clone(), offset: 0, target, len }) };
        queue.wait(&mut ended, LONG).unwrap();
        let refused = ended.pop().unwrap().result.unwrap_err();
        assert!(refused.to_string().contains("does not fit its buffer"), "{refused}");
    }
    drop((queue, buffer, graphics));
    assert_eq!((turn.graphics(), turn.count("requests"), turn.count("violations")), (before, 0, 0));
}

#[test]
fn a_buffer_is_read_into_only_by_a_queue_of_its_device() {
    let Some(turn) = turn() else { return };
    let (bench, before) = (Bench::new(1000), turn.graphics());
    let graphics = GraphicsDevice::open(hoistway_directstorage::adapters().unwrap()[1].luid, "it").unwrap();
    let target =
        Target::Buffer { buffer: Arc::new(graphics.buffer(Sharing::Resource, 1).unwrap()), offset: 0 };
    let (mut queue, mut ended) = (Runtime::get().unwrap().queue(1, LONG, mem::forget).unwrap(), Vec::new());
    // SAFETY: nothing else uses the buffer.
    unsafe { queue.push((), Read { file: bench.file.clone(), offset: 0, target, len: 1000 }) };
    queue.wait(&mut ended, LONG).unwrap();
    let refused = ended.pop().unwrap().result.unwrap_err();
    assert!(refused.to_string().contains("the queue has no device"), "{refused}");
    drop((queue, graphics));
    assert_eq!((turn.graphics(), turn.count("violations")), (before, 0));
}

#[test]
fn a_wait_may_end_without_a_read() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    let (mut queue, mut ended) = (queue(2, LONG), Vec::new());
    turn.set("stall_at=1");
    bench.push(&mut queue, 0, 10_000);
    queue.wait(&mut ended, Duration::from_millis(1)).unwrap();
    assert_eq!((ended.len(), queue.in_flight()), (0, 1));
    turn.reset();
    while queue.in_flight() > 0 {
        queue.wait(&mut ended, LONG).unwrap();
    }
    ended.iter().for_each(|own| bench.check(own));
    assert_eq!(ended.len(), 1);
}

#[test]
fn memory_that_may_still_be_written_is_leaked() {
    let Some(turn) = turn() else { return };
    let bench = Bench::new(100_000);
    let mut queue = queue(10, SHORT);
    turn.set("stall_at=1");
    (0..3).for_each(|at| bench.push(&mut queue, at * 10_000, 10_000));
    assert!(queue.wait(&mut Vec::new(), LONG).is_err());
    drop(queue);
    assert_eq!(bench.freed.load(Ordering::Relaxed), 0);
    // The file is kept, too.
    assert_eq!(Arc::strong_count(&bench.file), 4);
}

/// The rest of an owner may hold much more, such as all memory of a load.
#[test]
fn a_lost_queue_keeps_no_more_of_an_owner_than_what_may_be_written() {
    struct Owner {
        memory: Memory,
        _rest: Arc<()>,
    }

    let Some(turn) = turn() else { return };
    let (bench, rest) = (Bench::new(100_000), Arc::new(()));
    let abandon = |own: Owner| mem::forget(own.memory);
    let mut queue = Runtime::get().unwrap().queue(10, SHORT, abandon).unwrap();
    turn.set("stall_at=1");
    for at in 0..3 {
        let offset = at * 10_000;
        let mut memory = Memory { bytes: vec![0xEE; 10_000].into(), offset, freed: bench.freed.clone() };
        let target = Target::Memory(memory.bytes.as_mut_ptr());
        let read = Read { file: bench.file.clone(), offset, target, len: 10_000 };
        // SAFETY: the owner keeps the memory until it is dropped, and leaks it if it is abandoned.
        unsafe { queue.push(Owner { memory, _rest: rest.clone() }, read) };
    }
    assert!(queue.wait(&mut Vec::new(), LONG).is_err());
    drop(queue);
    assert_eq!((bench.freed.load(Ordering::Relaxed), Arc::strong_count(&rest)), (0, 1));
    assert_eq!(Arc::strong_count(&bench.file), 4);
}

#[test]
fn a_queue_that_is_dropped_waits_for_its_reads() {
    let turn = turn();
    let bench = Bench::new(40 << 20);
    let before = turn.as_ref().map(Turn::objects);
    if let Some(turn) = &turn {
        turn.set("delay_ms=5");
    }
    for _ in 0..3 {
        bench.freed.store(0, Ordering::Relaxed);
        let mut queue = queue(10, LONG);
        (0..10).for_each(|at| bench.push(&mut queue, at << 22, 4 << 20));
        let mut ended = Vec::new();
        queue.wait(&mut ended, LONG).unwrap();
        drop(ended);
        drop(queue);
        assert_eq!(bench.freed.load(Ordering::Relaxed), 10);
        assert_eq!(Arc::strong_count(&bench.file), 1);
    }
    assert_eq!(turn.as_ref().map(Turn::objects), before);
}

#[test]
fn handles_return_to_where_they_were() {
    let _turn = turn();
    let bench = Bench::new(100_000);
    let run = || {
        let file = Runtime::get().unwrap().open_file(&bench.path).unwrap();
        assert_eq!(file.len(), 100_000);
        let (mut queue, mut ended) = (queue(4, LONG), Vec::new());
        (0..4).for_each(|at| bench.push(&mut queue, at * 10_000, 10_000));
        while queue.in_flight() > 0 {
            queue.wait(&mut ended, LONG).unwrap();
        }
    };
    // What a runtime makes once.
    (0..3).for_each(|_| run());
    let before = stand_in::handles();
    (0..20).for_each(|_| run());
    let deadline = std::time::Instant::now() + LONG;
    // Threads of queues that are gone may end later.
    while stand_in::handles() > before + 8 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(stand_in::handles() <= before + 8, "{before} handles became {}", stand_in::handles());
}

#[test]
fn a_file_is_known_by_what_it_is() {
    let _turn = turn();
    let bench = Bench::new(1000);
    let other = Bench::new(1000);
    assert!(bench.file.is_same(&fs::File::open(&bench.path).unwrap()).unwrap());
    assert!(!bench.file.is_same(&fs::File::open(&other.path).unwrap()).unwrap());
    let missing = Runtime::get().unwrap().open_file(&bench.path.with_file_name("missing")).unwrap_err();
    assert_eq!(missing.windows_code(), Some(2), "{missing}");
    let folder = Runtime::get().unwrap().open_file(bench.path.parent().unwrap()).unwrap_err();
    assert_eq!(folder.windows_code(), Some(5), "{folder}");
}

#[test]
fn a_file_that_shrinks_ends_the_read_with_the_end_of_the_file() {
    let Some(_turn) = turn() else { return };
    let bench = Bench::new(100_000);
    let longer = Bench::new(200_000);
    // Windows lets nobody cut an open file; what a server's file does is played by a longer file's length.
    let (mut queue, mut ended) = (queue(1, LONG), Vec::new());
    longer.push(&mut queue, 150_000, 50_000);
    queue.wait(&mut ended, LONG).unwrap();
    ended.drain(..).for_each(|own| longer.check(&own));
    bench.push(&mut queue, 150_000, 50_000);
    queue.wait(&mut ended, LONG).unwrap();
    assert_eq!(ended[0].result, Ok(0));
}

/// Runs a test of those below in a process of its own.
fn child(test: &str, variables: &[(&str, &Path)], settings: &str) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).env("FAKE_DSTORAGE", settings);
    command.env_remove(DIRECTORY_VARIABLE);
    command.envs(variables.iter().copied());
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
#[ignore = "others run it in a process of its own"]
fn tell_why_not() {
    match Runtime::get() {
        Ok(runtime) => println!("loaded {}", runtime.path().display()),
        Err(why) => println!("refused: {why}"),
    }
}

#[test]
fn what_is_missing_is_named_with_what_to_install() {
    if is_real() {
        return;
    }
    let whole = stand_in::folder("whole");
    let output = child("tell_why_not", &[(DIRECTORY_VARIABLE, &whole)], "");
    assert!(said(&output).contains("loaded "), "{}", said(&output));

    // Neither beside the program, nor in a folder that is named.
    let output = child("tell_why_not", &[], "");
    assert!(said(&output).contains("refused: dstorage.dll is not in "), "{}", said(&output));
    let empty = tempfile::tempdir().unwrap();
    let output = child("tell_why_not", &[(DIRECTORY_VARIABLE, empty.path())], "");
    for part in [
        "dstorage.dll is not in ",
        "which HOISTWAY_DIRECTSTORAGE_DIR names",
        "Microsoft.Direct3D.DirectStorage",
    ] {
        assert!(said(&output).contains(part), "{}", said(&output));
    }

    // The core is missing, or is no library.
    fs::copy(whole.join("dstorage.dll"), empty.path().join("dstorage.dll")).unwrap();
    let output = child("tell_why_not", &[(DIRECTORY_VARIABLE, empty.path())], "");
    assert!(said(&output).contains("dstoragecore.dll is not beside dstorage.dll"), "{}", said(&output));
    fs::write(empty.path().join("dstoragecore.dll"), "no library").unwrap();
    let output = child("tell_why_not", &[(DIRECTORY_VARIABLE, empty.path())], "");
    assert!(said(&output).contains("dstoragecore.dll cannot be loaded"), "{}", said(&output));
}

#[test]
fn libraries_of_two_versions_are_refused() {
    if is_real() {
        return;
    }
    // Libraries of Windows play them: the first that has another version than the core.
    let windows = PathBuf::from(env::var_os("SystemRoot").unwrap()).join("system32");
    let folder = tempfile::tempdir().unwrap();
    fs::copy(windows.join("kernel32.dll"), folder.path().join("dstoragecore.dll")).unwrap();
    let refusal = ["msvcrt.dll", "dbghelp.dll", "comctl32.dll", "dxgi.dll"].iter().find_map(|name| {
        fs::copy(windows.join(name), folder.path().join("dstorage.dll")).ok()?;
        let said = said(&child("tell_why_not", &[(DIRECTORY_VARIABLE, folder.path())], ""));
        said.contains("and dstoragecore.dll beside it version ").then_some(said)
    });
    let refusal = refusal.expect("all libraries of Windows have one version");
    assert!(refusal.contains("refused: ") && refusal.contains("dstorage.dll has version "), "{refusal}");
}

#[test]
fn the_library_of_versions_is_not_imported() {
    let program = fs::read(env::current_exe().unwrap()).unwrap();
    for name in ["version", "VERSION"] {
        let name = format!("\0{name}.dll\0");
        assert!(!program.windows(name.len()).any(|part| part == name.as_bytes()), "{name:?}");
    }
}

#[test]
fn a_staging_buffer_that_another_has_locked_is_an_error() {
    if is_real() {
        return;
    }
    let folder = stand_in::folder("locked");
    let output = child("tell_why_not", &[(DIRECTORY_VARIABLE, &folder)], "staging_locked=1");
    for part in ["refused: ", "SetStagingBufferSize", "(0x8924001f)", "before that library"] {
        assert!(said(&output).contains(part), "{}", said(&output));
    }
}

#[test]
fn a_second_copy_of_hoistway_in_the_process_is_refused() {
    if is_real() {
        return;
    }
    let folder = stand_in::folder("twice");
    let output = child("load_after_another_copy", &[("OTHER", &folder), (DIRECTORY_VARIABLE, &folder)], "");
    for part in ["refused: ", "another copy of hoistway", "(0x8924001f)", "before that library"] {
        assert!(said(&output).contains(part), "{}", said(&output));
    }
}

/// Does what the first copy has done by then: the size of the staging buffer is set, and a queue keeps it.
#[test]
#[ignore = "another runs it in a process of its own"]
fn load_after_another_copy() {
    let (libraries, factory) = other_factory();
    let description = abi::QueueDescription {
        source_type: 0,
        capacity: abi::QUEUE_CAPACITY.0,
        priority: 0,
        name: std::ptr::null(),
        device: std::ptr::null_mut(),
    };
    let mut queue: abi::Object = std::ptr::null_mut();
    // SAFETY: the stand-in's factory has this table.
    let results = unsafe {
        let table = &**factory.cast::<*const abi::FactoryTable>();
        [
            (table.set_staging_buffer_size)(factory, hoistway_directstorage::STAGING_BYTES),
            (table.create_queue)(factory, &raw const description, &abi::IID_QUEUE_1, &raw mut queue),
        ]
    };
    assert_eq!(results, [0, 0]);
    match Runtime::get() {
        Ok(runtime) => println!("loaded {}", runtime.path().display()),
        Err(why) => println!("refused: {why}"),
    }
    drop(libraries);
}

/// The factory of the libraries in the folder that `OTHER` names, as another library of this process makes it.
fn other_factory() -> ([libloading::Library; 2], abi::Object) {
    let named = PathBuf::from(env::var_os("OTHER").unwrap());
    // SAFETY: the stand-in.
    let core = unsafe { libloading::Library::new(named.join("dstoragecore.dll")) }.unwrap();
    // SAFETY: the stand-in.
    let other = unsafe { libloading::Library::new(named.join("dstorage.dll")) }.unwrap();
    let mut factory: abi::Object = std::ptr::null_mut();
    // SAFETY: the function has this signature.
    let result = unsafe {
        let get: libloading::Symbol<'_, abi::GetFactory> = other.get(b"DStorageGetFactory\0").unwrap();
        get(&abi::IID_FACTORY, &raw mut factory)
    };
    assert_eq!(Failure::check("DStorageGetFactory", result), Ok(()));
    ([core, other], factory)
}

#[test]
#[ignore = "another runs it in a process of its own"]
fn load_after_another_library() {
    let (libraries, _) = other_factory();
    match Runtime::get() {
        Ok(runtime) => {
            println!("loaded {} {:?}", runtime.path().display(), runtime.not_configured().map(Failure::code));
        }
        Err(why) => println!("refused: {why}"),
    }
    drop(libraries);
}

#[test]
fn a_library_that_another_has_loaded_first_is_used_or_named() {
    if is_real() {
        return;
    }
    let (first, second) = (stand_in::folder("first"), stand_in::folder("second"));
    // It cannot be configured any more, and that is known.
    let output = child("load_after_another_library", &[("OTHER", &first)], "");
    let expected = format!("dstorage-first\\dstorage.dll Some({})", abi::E_FAIL);
    assert!(said(&output).contains(&expected), "{}", said(&output));
    let both = [("OTHER", first.as_path()), (DIRECTORY_VARIABLE, second.as_path())];
    let output = child("load_after_another_library", &both, "");
    assert!(
        said(&output).contains("refused: another library of this process has loaded"),
        "{}",
        said(&output)
    );
    let both = [("OTHER", first.as_path()), (DIRECTORY_VARIABLE, first.as_path())];
    let output = child("load_after_another_library", &both, "");
    assert!(said(&output).contains(&expected), "{}", said(&output));
}

#[test]
fn the_runtime_is_configured_before_its_factory_and_without_telemetry() {
    if is_real() {
        return;
    }
    let folder = stand_in::folder("configured");
    let output = child("tell_configuration", &[(DIRECTORY_VARIABLE, &folder)], "");
    assert!(said(&output).contains("configurations 1 telemetry 0 None"), "{}", said(&output));
}

#[test]
#[ignore = "another runs it in a process of its own"]
fn tell_configuration() {
    let runtime = Runtime::get().unwrap();
    // SAFETY: the stand-in.
    let library = unsafe { libloading::Library::new(runtime.path()) }.unwrap();
    let count = |name: &std::ffi::CStr| {
        // SAFETY: the function has this signature.
        unsafe {
            let count: libloading::Symbol<'_, unsafe extern "C" fn(*const std::ffi::c_char) -> u64> =
                library.get(b"fake_dstorage_count\0").unwrap();
            count(name.as_ptr())
        }
    };
    println!(
        "configurations {} telemetry {} {:?}",
        count(c"configurations"),
        count(c"telemetry"),
        runtime.not_configured()
    );
}
