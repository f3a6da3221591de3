//! What is moved first, what is not moved any more, and what an engine leaves behind.

use super::*;
use crate::fault::{Fault, FaultScript, Gate};
use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

/// An engine with one worker, whose first operations hang: `hanging` of them.
fn stopped(root: &Path, route: crate::Route, hanging: u64) -> Option<(IoEngine, Gate)> {
    let gate = Gate::new();
    let script = {
        let gate = gate.clone();
        FaultScript::new(move |operation| (operation.number < hanging).then(|| Fault::Hang(gate.clone())))
    };
    let options = IoOptions { threads: Some(1), faults: Some(script), ..options(root, route) };
    Some((start(options)?, gate))
}

/// Fills a worker up, so that further jobs wait. Returns where these will end.
fn fill(engine: &IoEngine, gate: &Gate, file: &Arc<DataFile>, jobs: usize) -> Vec<mpsc::Receiver<Outcome>> {
    let mut outcomes = Vec::new();
    for number in 0..jobs {
        let (done, receiver) = outcome();
        let bytes: Arc<Mutex<Memory>> = Arc::new(Mutex::new(Memory::new(16 << 20, 0, 1)));
        let parts = vec![part((number as u64) << 24, &mut bytes.lock().unwrap())];
        let keep = KeepAlive::new(bytes);
        engine.submit(vec![Job { keep, ..job(Direction::Write, file, parts, done) }]);
        outcomes.push(receiver);
    }
    wait_until(|| gate.came() > 0);
    outcomes
}

fn wait_until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "it never came to that");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A small write that keeps its memory.
fn small(file: &Arc<DataFile>, offset: u64, done: Done) -> Job {
    let bytes = Arc::new(Mutex::new(Memory::new(4096, 0, 2)));
    let parts = vec![part(offset, &mut bytes.lock().unwrap())];
    Job { keep: KeepAlive::new(bytes), ..job(Direction::Write, file, parts, done) }
}

#[test]
fn jobs_that_have_not_begun_are_cancelled_by_tag() {
    let directory = disk();
    for route in ROUTES {
        let Some((engine, gate)) = stopped(directory.path(), route, u64::MAX) else { continue };
        let file = new_file(directory.path(), route.name());
        let first = fill(&engine, &gate, &file, 1);
        let waiting: Vec<_> = (0..4u64)
            .map(|number| {
                let (done, receiver) = outcome();
                let job = small(&file, (1 << 30) + number * 4096, done);
                engine.submit(vec![Job { tag: 1 + number % 2, ..job }]);
                receiver
            })
            .collect();
        assert_eq!(engine.cancel(1), 2);
        assert_eq!(engine.cancel(1), 0);
        assert_eq!(engine.cancel(0), 0, "what has begun is not cancelled");
        for (number, receiver) in waiting.iter().enumerate() {
            match number % 2 {
                0 => {
                    let outcome = receiver.recv_timeout(PATIENCE).unwrap();
                    assert!(matches!(outcome.result, Err(Failure::Cancelled)));
                    assert!(outcome.started.is_none());
                }
                _ => assert!(receiver.try_recv().is_err()),
            }
        }
        gate.open();
        for receiver in first.iter().chain([&waiting[1], &waiting[3]]) {
            receiver.recv_timeout(PATIENCE).unwrap().result.unwrap();
        }
    }
}

#[test]
fn what_comes_too_late_does_not_begin() {
    let directory = disk();
    for route in ROUTES {
        let Some((engine, gate)) = stopped(directory.path(), route, u64::MAX) else { continue };
        let file = new_file(directory.path(), route.name());
        let first = fill(&engine, &gate, &file, 1);
        let deadlines = [Some(Instant::now()), None];
        let receivers = deadlines.map(|deadline| {
            let (done, receiver) = outcome();
            engine.submit(vec![Job { deadline, ..small(&file, 1 << 30, done) }]);
            receiver
        });
        gate.open();
        let late = receivers[0].recv_timeout(PATIENCE).unwrap();
        assert!(matches!(late.result, Err(Failure::TimedOut)) && late.started.is_none(), "{late:?}");
        receivers[1].recv_timeout(PATIENCE).unwrap().result.unwrap();
        first[0].recv_timeout(PATIENCE).unwrap().result.unwrap();
    }
}

#[test]
fn who_waits_does_not_wait_for_a_large_store() {
    let directory = disk();
    for route in ROUTES {
        let gate = Gate::new();
        let order = Arc::new(Mutex::new(Vec::new()));
        let script = {
            let (gate, order) = (gate.clone(), order.clone());
            FaultScript::new(move |operation| {
                order.lock().unwrap().push(operation.is_write);
                operation.is_write.then(|| Fault::Hang(gate.clone()))
            })
        };
        let options =
            IoOptions { threads: Some(1), faults: Some(script), ..options(directory.path(), route) };
        let Some(engine) = start(options) else { continue };
        let file = new_file(directory.path(), route.name());
        let bytes = Arc::new(Mutex::new(Memory::new(64 << 20, 0, 1)));
        let parts = vec![part(0, &mut bytes.lock().unwrap())];
        let (done, stored) = outcome();
        let store = Job {
            priority: Priority::Background,
            keep: KeepAlive::new(bytes),
            ..job(Direction::Write, &file, parts, done)
        };
        file.buffered().set_len(8192).unwrap();
        engine.submit(vec![store]);
        wait_until(|| gate.came() > 0);
        let mut memory = Memory::new(4096, 0, 0);
        let parts = vec![part(4096, &mut memory)];
        let (done, loaded) = outcome();
        engine.submit(vec![job(Direction::Read, &file, parts, done)]);
        if route == crate::Route::IoUring {
            // A ring has room for it beside the store, whose steps all hang.
            loaded.recv_timeout(PATIENCE).unwrap().result.unwrap();
            gate.open();
        } else {
            gate.open();
            loaded.recv_timeout(PATIENCE).unwrap().result.unwrap();
            let order = order.lock().unwrap();
            let place = order.iter().position(|is_write| !is_write).unwrap();
            assert!(place < 3, "{order:?}");
        }
        stored.recv_timeout(PATIENCE).unwrap().result.unwrap();
    }
}

#[test]
fn what_is_waited_for_goes_first_but_nothing_waits_for_ever() {
    let directory = disk();
    let Some((engine, gate)) = stopped(directory.path(), crate::Route::Threads, 1) else { return };
    let file = new_file(directory.path(), "data");
    fill(&engine, &gate, &file, 1);
    let (sender, order) = mpsc::channel();
    let lines = [(Priority::Background, 2), (Priority::Prefetch, 3), (Priority::Demand, 20)];
    for (priority, count) in lines {
        for number in 0..count {
            let sender = sender.clone();
            let done: Done = Box::new(move |_| _ = sender.send(priority));
            engine.submit(vec![Job { priority, ..small(&file, (1 << 30) + number * 4096, done) }]);
        }
    }
    gate.open();
    let order: Vec<Priority> = (0..25).map(|_| order.recv_timeout(PATIENCE).unwrap()).collect();
    let position = |priority| order.iter().position(|other| *other == priority).unwrap();
    assert_eq!(position(Priority::Demand), 0);
    assert!(position(Priority::Prefetch) < 10, "{order:?}");
    assert!(order[23..].iter().all(|other| *other == Priority::Background), "{order:?}");
}

#[test]
fn what_is_done_waits_for_no_help() {
    let directory = disk();
    let Some((engine, gate)) = stopped(directory.path(), crate::Route::Threads, 1) else { return };
    let file = new_file(directory.path(), "data");
    fill(&engine, &gate, &file, 1);
    let (sender, order) = mpsc::channel();
    // Its help with the second step comes behind the small one.
    let bytes = Arc::new(Mutex::new(Memory::new(16 << 20, 0, 1)));
    let parts = vec![part(1 << 30, &mut bytes.lock().unwrap())];
    let (small_sender, keep) = (sender.clone(), KeepAlive::new(bytes));
    let large = job(Direction::Write, &file, parts, Box::new(move |_| _ = sender.send("large")));
    engine.submit(vec![Job { keep, ..large }]);
    engine.submit(vec![small(&file, 2 << 30, Box::new(move |_| _ = small_sender.send("small")))]);
    gate.open();
    let ends = [(); 2].map(|()| order.recv_timeout(PATIENCE).unwrap());
    assert_eq!(ends, ["large", "small"]);
}

#[test]
fn what_was_withdrawn_before_it_came_does_not_begin() {
    let directory = disk();
    let engine = start(options(directory.path(), crate::Route::Threads)).unwrap();
    let file = new_file(directory.path(), "data");
    let withdrawn = Withdrawn::default();
    withdrawn.set();
    let outcome = run(&engine, |done| Job { withdrawn, ..small(&file, 0, done) });
    assert!(matches!(outcome.result, Err(Failure::Cancelled)) && outcome.started.is_none(), "{outcome:?}");
    assert_eq!(file.buffered().metadata().unwrap().len(), 0);
}

#[test]
fn some_threads_are_kept_for_who_waits() {
    let directory = disk();
    let gate = Gate::new();
    let script = {
        let gate = gate.clone();
        FaultScript::new(move |operation| operation.is_write.then(|| Fault::Hang(gate.clone())))
    };
    let options = IoOptions {
        threads: Some(4),
        faults: Some(script),
        ..options(directory.path(), crate::Route::Threads)
    };
    let engine = start(options).unwrap();
    let file = new_file(directory.path(), "data");
    file.buffered().set_len(8192).unwrap();
    let stores: Vec<_> = (0..8)
        .map(|number| {
            let (done, receiver) = outcome();
            let job = small(&file, 4096 * number, done);
            engine.submit(vec![Job { priority: Priority::Background, ..job }]);
            receiver
        })
        .collect();
    wait_until(|| gate.came() == 3);
    let mut memory = Memory::new(4096, 0, 0);
    let parts = vec![part(4096, &mut memory)];
    run(&engine, |done| job(Direction::Read, &file, parts, done)).result.unwrap();
    assert_eq!(gate.came(), 3);
    gate.open();
    stores.iter().for_each(|receiver| receiver.recv_timeout(PATIENCE).unwrap().result.unwrap());
}

/// Whether memory of a job is still held.
struct Held(Arc<AtomicUsize>, #[expect(dead_code, reason = "owns the memory")] Mutex<Memory>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn dropping_an_engine_waits_for_what_has_begun_and_cancels_the_rest() {
    let directory = disk();
    for route in ROUTES {
        let Some((engine, gate)) = stopped(directory.path(), route, u64::MAX) else { continue };
        let file = new_file(directory.path(), route.name());
        let held = Arc::new(AtomicUsize::new(0));
        let receivers: Vec<_> = (0..80u64)
            .map(|number| {
                let (done, receiver) = outcome();
                let mut memory = Memory::new(1 << 20, 0, 3);
                let parts = vec![part(number << 20, &mut memory)];
                held.fetch_add(1, Ordering::SeqCst);
                let keep = KeepAlive::new(Arc::new(Held(held.clone(), Mutex::new(memory))));
                let count = held.clone();
                let done: Done = Box::new(move |outcome| {
                    assert!(count.load(Ordering::SeqCst) < 80, "memory is let go before the end is told");
                    done(outcome);
                });
                engine.submit(vec![Job { keep, ..job(Direction::Write, &file, parts, done) }]);
                receiver
            })
            .collect();
        wait_until(|| gate.came() > 0);
        let dropping = std::thread::spawn(move || drop(engine));
        let last = receivers.last().unwrap().recv_timeout(PATIENCE).unwrap();
        assert!(matches!(last.result, Err(Failure::Cancelled)));
        assert!(held.load(Ordering::SeqCst) > 0 && !dropping.is_finished());
        gate.open();
        dropping.join().unwrap();
        assert_eq!(held.load(Ordering::SeqCst), 0);
        let ended: Vec<bool> =
            receivers[..79].iter().map(|receiver| receiver.try_recv().unwrap().result.is_ok()).collect();
        assert!(ended[0]);
    }
}

/// Opens a gate when a test ends, however that is.
struct OpenAtEnd(Gate);

impl Drop for OpenAtEnd {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// The longest write of what moves in short steps: with the header of a block.
const SHORT: u64 = (256 << 10) + 4096;

#[test]
fn what_was_queued_before_there_was_demand_moves_in_short_steps_too() {
    let directory = disk();
    let (gate, written) = (Gate::new(), Arc::new(Mutex::new(Vec::new())));
    let script = {
        let (gate, written) = (gate.clone(), written.clone());
        FaultScript::new(move |operation| {
            if operation.number == 0 {
                return Some(Fault::Hang(gate.clone()));
            }
            if operation.is_write {
                written.lock().unwrap().push(operation.len);
            }
            None
        })
    };
    let options = IoOptions {
        threads: Some(1),
        faults: Some(script),
        ..options(directory.path(), crate::Route::Threads)
    };
    let (mut bytes, mut demanded) = (Memory::new(8 << 20, 0, 1), Memory::new(4096, 0, 0));
    let engine = start(options).expect("threads serve every file system");
    let _open = OpenAtEnd(gate.clone());
    let file = new_file(directory.path(), "data");
    file.buffered().set_len((1 << 30) + 4096).unwrap();
    let (done, hanging) = outcome();
    engine.submit(vec![Job { priority: Priority::Background, ..small(&file, 1 << 29, done) }]);
    wait_until(|| gate.came() == 1);
    let (done, background) = outcome();
    let parts = vec![part(0, &mut bytes)];
    engine.submit(vec![Job { priority: Priority::Background, ..job(Direction::Write, &file, parts, done) }]);
    let (done, demand) = outcome();
    engine.submit(vec![job(Direction::Read, &file, vec![part(1 << 30, &mut demanded)], done)]);
    gate.open();
    for end in [hanging, demand, background] {
        end.recv_timeout(PATIENCE).unwrap().result.unwrap();
    }
    let written = written.lock().unwrap();
    assert!(written.iter().all(|len| *len <= SHORT), "{written:?}");
    assert_eq!(written.iter().sum::<u64>(), 8 << 20);
}

#[test]
fn what_is_not_demand_moves_in_short_steps_while_there_is_demand() {
    let directory = disk();
    for route in ROUTES {
        let gate = Gate::new();
        let written = Arc::new(Mutex::new(Vec::new()));
        let script = {
            let (gate, written) = (gate.clone(), written.clone());
            FaultScript::new(move |operation| {
                if operation.is_write {
                    written.lock().unwrap().push(operation.len);
                }
                (!operation.is_write && operation.offset == 1 << 30).then(|| Fault::Hang(gate.clone()))
            })
        };
        let options =
            IoOptions { threads: Some(4), faults: Some(script), ..options(directory.path(), route) };
        let mut memory = Memory::new(4096, 0, 0);
        let Some(engine) = start(options) else { continue };
        // Before the engine is dropped, which waits for what it has begun.
        let _open = OpenAtEnd(gate.clone());
        let file = new_file(directory.path(), route.name());
        file.buffered().set_len((1 << 30) + 4096).unwrap();
        let (done, demand) = outcome();
        engine.submit(vec![job(Direction::Read, &file, vec![part(1 << 30, &mut memory)], done)]);
        wait_until(|| gate.came() == 1);
        // Blocks with a header each: one that is long, and neighbours, of which some are longer than a step.
        let lens = [(8 << 20) - 5000, 64 << 10, 300 << 10, 70_000, 128 << 10, 128 << 10, 4096];
        let mut offset = 0;
        let mut blocks: Vec<(u64, Vec<u8>, Memory)> = Vec::new();
        for (number, len) in lens.into_iter().enumerate() {
            let content = pattern(len, number as u64);
            blocks.push((offset, content.clone(), Memory::of(&content, 0)));
            offset += 4096 + (len as u64).next_multiple_of(4096);
        }
        let end = offset;
        let background = |direction, blocks: &mut [(u64, Vec<u8>, Memory)]| {
            let (mut jobs, mut ends) = (Vec::new(), Vec::new());
            for (number, (offset, _, memory)) in blocks.iter_mut().enumerate() {
                let (done, end) = outcome();
                let offset = *offset;
                let header = match direction {
                    Direction::Read => Header::Read { offset },
                    Direction::Write => {
                        let make = move |sums: &[Option<u32>]| format!("{number} {sums:?}").into_bytes();
                        Header::Write { offset, make: Box::new(make) }
                    }
                };
                let parts = vec![part(offset + 4096, memory)];
                let priority = Priority::Background;
                jobs.push(Job { header, priority, ..job(direction, &file, parts, done) });
                ends.push(end);
            }
            engine.submit(jobs);
            ends.iter().map(|end| end.recv_timeout(PATIENCE).unwrap()).collect::<Vec<_>>()
        };
        let outcomes = background(Direction::Write, &mut blocks);
        for ((_, content, _), outcome) in blocks.iter().zip(&outcomes) {
            assert!(outcome.result.is_ok(), "{outcome:?}");
            assert_eq!(outcome.checksums, [Some(crc_fast::crc32_iscsi(content))]);
        }
        let longest = written.lock().unwrap().iter().copied().max();
        assert!(longest.is_some_and(|len| len <= SHORT), "{route}: {longest:?}");
        assert!(written.lock().unwrap().iter().sum::<u64>() == end, "{route}: each byte once");
        for (_, content, memory) in &mut blocks {
            *memory = Memory::new(content.len(), 0, 0);
        }
        let outcomes = background(Direction::Read, &mut blocks);
        for (number, ((_, content, memory), outcome)) in blocks.iter().zip(&outcomes).enumerate() {
            assert!(outcome.result.is_ok(), "{outcome:?}");
            assert!(memory.as_slice() == content, "{route}: {number}");
            let expected = format!("{number} {:?}", [Some(crc_fast::crc32_iscsi(content))]);
            assert_eq!(outcome.header[..expected.len()], *expected.as_bytes(), "{route}: {number}");
        }
        gate.open();
        demand.recv_timeout(PATIENCE).unwrap().result.unwrap();
        // After some others have ended, demand is forgotten.
        for _ in 0..32 {
            run(&engine, |done| Job { priority: Priority::Background, ..small(&file, 1 << 29, done) });
        }
        written.lock().unwrap().clear();
        background(Direction::Write, &mut blocks);
        let longest = written.lock().unwrap().iter().copied().max();
        assert!(longest.is_some_and(|len| len > 4 << 20), "{route}: {longest:?}");
    }
}
