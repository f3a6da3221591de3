//! Jobs of one request that are neighbours in a file: one read or write, and an end for each.

use super::*;
use crate::io::fault::{Fault, FaultScript, Operation};
use proptest::prelude::*;
use std::sync::Mutex;

const BLOCK: u64 = 64 << 10;
/// Bytes from one block to the next: a header before each.
const SLOT: u64 = BLOCK + 4096;

/// What a script has seen: for each read or write whether it writes, where it begins and its length.
type Seen = Arc<Mutex<Vec<(bool, u64, u64)>>>;

fn watched(
    root: &Path,
    route: crate::Route,
    decide: impl Fn(&Operation<'_>) -> Option<Fault> + Send + Sync + 'static,
) -> Option<(IoEngine, Seen)> {
    let seen = Seen::default();
    let script = {
        let seen = seen.clone();
        FaultScript::new(move |operation| {
            seen.lock().unwrap().push((operation.is_write, operation.offset, operation.len));
            decide(operation)
        })
    };
    Some((start(IoOptions { faults: Some(script), ..options(root, route) })?, seen))
}

fn header_of(number: u64, sums: &[Option<u32>]) -> Vec<u8> {
    format!("header {number} {sums:?}").into_bytes()
}

/// A job for the block in slot `slot`, whose header is just before it.
fn block(direction: Direction, file: &Arc<DataFile>, slot: u64, memory: &mut Memory, done: Done) -> Job {
    let offset = slot * SLOT;
    let header = match direction {
        Direction::Read => Header::Read { offset },
        Direction::Write => Header::Write { offset, make: Box::new(move |sums| header_of(slot, sums)) },
    };
    Job { header, ..job(direction, file, vec![part(offset + 4096, memory)], done) }
}

/// Submits jobs for the blocks in these slots together, and returns how each ended.
fn submit(
    engine: &IoEngine,
    direction: Direction,
    file: &Arc<DataFile>,
    slots: &[u64],
    memory: &mut [Memory],
) -> Vec<Outcome> {
    let (mut jobs, mut ends) = (Vec::new(), Vec::new());
    for (slot, memory) in slots.iter().zip(memory) {
        let (done, end) = outcome();
        jobs.push(block(direction, file, *slot, memory, done));
        ends.push(end);
    }
    engine.submit(jobs);
    ends.iter().map(|end| end.recv_timeout(PATIENCE).unwrap()).collect()
}

fn contents(slots: &[u64]) -> Vec<Memory> {
    slots.iter().map(|slot| Memory::of(&pattern(BLOCK as usize, *slot), 0)).collect()
}

fn empty(slots: &[u64]) -> Vec<Memory> {
    slots.iter().map(|_| Memory::new(BLOCK as usize, 0, 0)).collect()
}

/// Whether a block was read as it was written, with its header and checksum.
#[track_caller]
fn check(slot: u64, outcome: &Outcome, memory: &Memory) {
    assert!(outcome.result.is_ok(), "{slot}: {outcome:?}");
    let expected = pattern(BLOCK as usize, slot);
    let sums = [Some(crc_fast::crc32_iscsi(&expected))];
    assert!(memory.as_slice() == expected, "bytes of {slot}");
    assert_eq!(outcome.checksums, sums, "{slot}");
    let header = header_of(slot, &sums);
    assert_eq!(outcome.header[..header.len()], header, "{slot}");
    assert_eq!(outcome.header.len(), 4096);
}

#[test]
fn neighbours_are_one_write_and_one_read() {
    for route in ROUTES {
        let disk = disk();
        let Some((engine, seen)) = watched(disk.path(), route, |_| None) else { continue };
        let file = new_file(disk.path(), "data");
        let slots: Vec<u64> = (0..15).collect();
        let written = submit(&engine, Direction::Write, &file, &slots, &mut contents(&slots));
        assert!(written.iter().all(|outcome| outcome.result.is_ok()), "{written:?}");
        let mut memory = empty(&slots);
        // In any order.
        let turned: Vec<u64> = slots.iter().map(|slot| slot * 7 % 15).collect();
        let read = submit(&engine, Direction::Read, &file, &turned, &mut memory);
        for ((slot, outcome), memory) in turned.iter().zip(&read).zip(&memory) {
            check(*slot, outcome, memory);
        }
        assert_eq!(*seen.lock().unwrap(), [(true, 0, 15 * SLOT), (false, 0, 15 * SLOT)], "{route}");
        let carried: u64 = read.iter().flat_map(|outcome| &outcome.carried).map(|(_, bytes)| bytes).sum();
        assert_eq!(carried, 15 * SLOT, "each byte is counted once");
    }
}

#[test]
fn what_is_far_apart_or_too_long_is_read_apart() {
    for route in ROUTES {
        let disk = disk();
        let Some((engine, seen)) = watched(disk.path(), route, |_| None) else { continue };
        let file = new_file(disk.path(), "data");
        let all: Vec<u64> = (0..40).collect();
        submit(&engine, Direction::Write, &file, &all, &mut contents(&all));
        let longest = seen.lock().unwrap().iter().map(|(_, _, len)| *len).max();
        assert_eq!(longest, Some(15 * SLOT), "at most 1 MiB");
        seen.lock().unwrap().clear();
        // A gap of a slot is longer than 64 KiB.
        let apart = [0, 1, 3, 4, 30];
        let mut memory = empty(&apart);
        let read = submit(&engine, Direction::Read, &file, &apart, &mut memory);
        for ((slot, outcome), memory) in apart.iter().zip(&read).zip(&memory) {
            check(*slot, outcome, memory);
        }
        let mut seen = seen.lock().unwrap().clone();
        seen.sort_unstable();
        assert_eq!(seen, [(false, 0, 2 * SLOT), (false, 3 * SLOT, 2 * SLOT), (false, 30 * SLOT, SLOT)]);
    }
}

#[test]
fn a_small_gap_is_read_and_never_written() {
    for route in ROUTES {
        let disk = disk();
        let Some((engine, seen)) = watched(disk.path(), route, |_| None) else { continue };
        let file = new_file(disk.path(), "data");
        let whole = Memory::of(&pattern(1 << 20, 1), 0);
        std::fs::write(disk.path().join("data"), whole.as_slice()).unwrap();
        let places = [0u64, 8 << 10, 100 << 10];
        for direction in [Direction::Write, Direction::Read] {
            let mut memory: Vec<Memory> = places
                .iter()
                .map(|place| match direction {
                    Direction::Write => Memory::of(&pattern(4096, *place), 0),
                    Direction::Read => Memory::new(4096, 0, 0),
                })
                .collect();
            let (mut jobs, mut ends) = (Vec::new(), Vec::new());
            for (place, memory) in places.iter().zip(&mut memory) {
                let (done, end) = outcome();
                jobs.push(job(direction, &file, vec![part(*place, memory)], done));
                ends.push(end);
            }
            engine.submit(jobs);
            for ((place, memory), end) in places.iter().zip(&memory).zip(ends) {
                assert!(end.recv_timeout(PATIENCE).unwrap().result.is_ok());
                assert!(memory.as_slice() == pattern(4096, *place), "{direction:?} at {place}");
            }
        }
        let mut seen = seen.lock().unwrap().clone();
        seen.sort_unstable();
        let reads = [(false, 0, 12 << 10), (false, 100 << 10, 4096)];
        let writes = places.map(|place| (true, place, 4096));
        assert_eq!(seen, [&reads[..], &writes].concat());
        let mut expected = whole.as_slice().to_vec();
        for place in places {
            expected[place as usize..][..4096].copy_from_slice(&pattern(4096, place));
        }
        assert!(std::fs::read(disk.path().join("data")).unwrap() == expected, "bytes between");
    }
}

#[test]
fn a_block_that_fails_does_not_fail_its_neighbours() {
    for route in ROUTES {
        for direction in [Direction::Write, Direction::Read] {
            let disk = disk();
            // What touches the block in slot 3 fails.
            let is_bad = move |operation: &Operation<'_>| {
                let is_touched = operation.offset < 4 * SLOT && operation.offset + operation.len > 3 * SLOT;
                let is_direction = operation.is_write == (direction == Direction::Write);
                (is_touched && is_direction).then_some(Fault::Errno(libc::EIO))
            };
            let Some((engine, seen)) = watched(disk.path(), route, is_bad) else { continue };
            let file = new_file(disk.path(), "data");
            let slots: Vec<u64> = (0..8).collect();
            let written = submit(&engine, Direction::Write, &file, &slots, &mut contents(&slots));
            let mut memory = empty(&slots);
            let read = submit(&engine, Direction::Read, &file, &slots, &mut memory);
            for (slot, ((written, read), memory)) in (0..).zip(written.iter().zip(&read).zip(&memory)) {
                let failed = if direction == Direction::Write { written } else { read };
                if slot == 3 {
                    assert!(
                        matches!(&failed.result, Err(Failure::Io(error)) if error.raw_os_error() == Some(libc::EIO))
                    );
                } else {
                    assert!(written.result.is_ok(), "{written:?}");
                    check(slot, read, memory);
                }
            }
            // One together, then each alone, and one the other way.
            assert_eq!(seen.lock().unwrap().len(), 1 + 8 + 1, "{route}, {direction:?}");
        }
    }
}

#[test]
fn a_gap_that_cannot_be_read_fails_no_job() {
    for route in ROUTES {
        let disk = disk();
        // The slot between two blocks is broken.
        let is_bad = |operation: &Operation<'_>| {
            let is_touched = operation.offset < 12 << 10 && operation.offset + operation.len > 8 << 10;
            (!operation.is_write && is_touched).then_some(Fault::Errno(libc::EIO))
        };
        let Some((engine, _)) = watched(disk.path(), route, is_bad) else { continue };
        let file = new_file(disk.path(), "data");
        let whole = pattern(64 << 10, 1);
        std::fs::write(disk.path().join("data"), &whole).unwrap();
        let places = [4096u64, 12 << 10];
        let mut memory: Vec<Memory> = places.iter().map(|_| Memory::new(4096, 0, 0)).collect();
        let (mut jobs, mut ends) = (Vec::new(), Vec::new());
        for (place, memory) in places.iter().zip(&mut memory) {
            let (done, end) = outcome();
            jobs.push(job(Direction::Read, &file, vec![part(*place, memory)], done));
            ends.push(end);
        }
        engine.submit(jobs);
        for ((place, memory), end) in places.iter().zip(&memory).zip(ends) {
            assert!(end.recv_timeout(PATIENCE).unwrap().result.is_ok(), "{route}");
            assert!(memory.as_slice() == &whole[*place as usize..][..4096], "{route}");
        }
    }
}

#[test]
fn a_file_that_ends_early_fails_only_what_it_lacks() {
    for route in ROUTES {
        let disk = disk();
        let Some((engine, _)) = watched(disk.path(), route, |_| None) else { continue };
        let file = new_file(disk.path(), "data");
        let slots: Vec<u64> = (0..8).collect();
        submit(&engine, Direction::Write, &file, &slots, &mut contents(&slots));
        file.buffered().set_len(6 * SLOT).unwrap();
        let mut memory = empty(&slots);
        let read = submit(&engine, Direction::Read, &file, &slots, &mut memory);
        for (slot, (outcome, memory)) in (0..).zip(read.iter().zip(&memory)) {
            if slot < 6 {
                check(slot, outcome, memory);
            } else {
                let expected = 6 * SLOT;
                assert!(matches!(outcome.result, Err(Failure::Short { file_len }) if file_len == expected));
            }
        }
    }
}

#[test]
fn other_requests_and_priorities_are_apart() {
    let disk = disk();
    let Some((engine, seen)) = watched(disk.path(), crate::Route::Threads, |_| None) else { return };
    let file = new_file(disk.path(), "data");
    let slots: Vec<u64> = (0..4).collect();
    submit(&engine, Direction::Write, &file, &slots, &mut contents(&slots));
    seen.lock().unwrap().clear();
    let mut memory = empty(&slots);
    let (mut jobs, mut ends) = (Vec::new(), Vec::new());
    for (slot, memory) in slots.iter().zip(&mut memory) {
        let (done, end) = outcome();
        let mut job = block(Direction::Read, &file, *slot, memory, done);
        (job.tag, job.priority) =
            (slot / 2, if *slot == 3 { Priority::Background } else { Priority::Demand });
        jobs.push(job);
        ends.push(end);
    }
    engine.submit(jobs);
    for (slot, (end, memory)) in (0..).zip(ends.iter().zip(&memory)) {
        check(slot, &end.recv_timeout(PATIENCE).unwrap(), memory);
    }
    let mut seen = seen.lock().unwrap().clone();
    seen.sort_unstable();
    assert_eq!(seen, [(false, 0, 2 * SLOT), (false, 2 * SLOT, SLOT), (false, 3 * SLOT, SLOT)]);
}

#[test]
fn what_is_withdrawn_ends_once_each() {
    let disk = disk();
    let Some((engine, seen)) = watched(disk.path(), crate::Route::Threads, |_| None) else { return };
    let file = new_file(disk.path(), "data");
    let slots: Vec<u64> = (0..4).collect();
    let mut memory = empty(&slots);
    let (mut jobs, mut ends) = (Vec::new(), Vec::new());
    let withdrawn = Withdrawn::default();
    for (slot, memory) in slots.iter().zip(&mut memory) {
        let (done, end) = outcome();
        jobs.push(Job { withdrawn: withdrawn.clone(), ..block(Direction::Read, &file, *slot, memory, done) });
        ends.push(end);
    }
    withdrawn.set();
    engine.submit(jobs);
    for end in ends {
        assert!(matches!(end.recv_timeout(PATIENCE).unwrap().result, Err(Failure::Cancelled)));
        assert!(end.recv().is_err(), "it ends once");
    }
    assert!(seen.lock().unwrap().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn blocks_anywhere_are_read_as_they_were_written(
        slots in prop::collection::vec(0u64..24, 1..16),
        skew in prop_oneof![Just(0usize), 1usize..4096],
        bad in prop::option::of(0u64..24),
    ) {
        let disk = disk();
        let is_bad = move |operation: &Operation<'_>| {
            let bad = bad? * SLOT;
            (!operation.is_write && operation.offset < bad + SLOT && operation.offset + operation.len > bad)
                .then_some(Fault::Errno(libc::EIO))
        };
        let Some((engine, _)) = watched(disk.path(), crate::Route::Threads, is_bad) else { return Ok(()) };
        let file = new_file(disk.path(), "data");
        let all: Vec<u64> = (0..24).collect();
        submit(&engine, Direction::Write, &file, &all, &mut contents(&all));
        let mut memory: Vec<Memory> = slots.iter().map(|_| Memory::new(BLOCK as usize, skew, 0)).collect();
        let read = submit(&engine, Direction::Read, &file, &slots, &mut memory);
        for ((slot, outcome), memory) in slots.iter().zip(&read).zip(&memory) {
            if Some(*slot) == bad {
                prop_assert!(outcome.result.is_err());
            } else {
                check(*slot, outcome, memory);
            }
        }
    }
}
