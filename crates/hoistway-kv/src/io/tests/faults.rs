//! Reads and writes that go wrong.

use super::*;
use crate::fault::{Fault, FaultScript, Gate, Operation};

/// Both routes, each operation under a script; with an empty file of 4 MiB.
fn on_each_route(
    decide: impl Fn(&Operation<'_>) -> Option<Fault> + Clone + Send + Sync + 'static,
    check: impl Fn(&IoEngine, &Arc<DataFile>),
) {
    for route in ROUTES {
        let directory = disk();
        let script = FaultScript::new(decide.clone());
        let Some(engine) = start(IoOptions { faults: Some(script), ..options(directory.path(), route) })
        else {
            continue;
        };
        let file = new_file(directory.path(), "data");
        file.buffered().set_len(4 << 20).unwrap();
        check(&engine, &file);
    }
}

fn write(engine: &IoEngine, file: &Arc<DataFile>, content: &[u8], skew: usize) -> Outcome {
    let mut memory = Memory::of(content, skew);
    let parts = vec![part(4096, &mut memory)];
    run(engine, |done| job(Direction::Write, file, parts, done))
}

fn read(engine: &IoEngine, file: &Arc<DataFile>, len: usize, skew: usize) -> (Outcome, Memory) {
    let mut memory = Memory::new(len, skew, 0);
    let parts = vec![part(4096, &mut memory)];
    let outcome = run(engine, |done| job(Direction::Read, file, parts, done));
    (outcome, memory)
}

fn errno(outcome: &Outcome) -> Option<i32> {
    match &outcome.result {
        Err(Failure::Io(error)) => error.raw_os_error(),
        _ => None,
    }
}

#[test]
fn short_reads_and_writes_are_continued() {
    for most in [0, 1, 100, 4096, 5000, 100_000] {
        // The first attempts at each place; later ones go well.
        let fault =
            move |operation: &Operation<'_>| (operation.number % 3 != 2).then_some(Fault::Short(most));
        on_each_route(fault, |engine, file| {
            for (len, skew) in [(1 << 20, 0), (300_001, 0), (300_001, 7)] {
                let content = pattern(len, most + 1);
                let written = write(engine, file, &content, skew);
                written.result.unwrap();
                let (outcome, memory) = read(engine, file, len, 512);
                outcome.result.unwrap();
                assert!(memory.as_slice() == content, "{most} {len}");
                assert_eq!(outcome.checksums, written.checksums);
            }
        });
    }
}

#[test]
fn files_that_take_nothing_more_are_errors() {
    on_each_route(
        |_| Some(Fault::Short(0)),
        |engine, file| {
            let outcome = write(engine, file, &pattern(8192, 1), 0);
            assert!(
                matches!(&outcome.result, Err(Failure::Io(error)) if error.kind() == io::ErrorKind::WriteZero),
                "{outcome:?}"
            );
            let (outcome, _) = read(engine, file, 8192, 0);
            assert!(
                matches!(&outcome.result, Err(Failure::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof),
                "{outcome:?}"
            );
        },
    );
}

#[test]
fn errors_of_the_system_are_told() {
    for code in [libc::EIO, libc::ENOSPC, libc::EROFS, libc::EDQUOT] {
        on_each_route(
            move |operation| (operation.number < 2).then_some(Fault::Errno(code)),
            |engine, file| {
                assert_eq!(errno(&write(engine, file, &pattern(10_000, 1), 0)), Some(code));
                let (outcome, _) = read(engine, file, 10_000, 0);
                assert_eq!(errno(&outcome), Some(code));
                assert_eq!(outcome.checksums, [None]);
                write(engine, file, &pattern(10_000, 1), 0).result.unwrap();
                assert_eq!(read(engine, file, 10_000, 0).1.as_slice(), pattern(10_000, 1));
            },
        );
    }
}

#[test]
fn interruptions_are_not_errors_unless_they_never_end() {
    for code in [libc::EINTR, libc::EAGAIN] {
        on_each_route(
            move |operation| (operation.number % 5 != 4).then_some(Fault::Errno(code)),
            |engine, file| {
                write(engine, file, &pattern(10_000, 1), 0).result.unwrap();
                let (outcome, memory) = read(engine, file, 10_000, 3);
                outcome.result.unwrap();
                assert_eq!(memory.as_slice(), pattern(10_000, 1));
            },
        );
        on_each_route(
            move |_| Some(Fault::Errno(code)),
            |engine, file| assert_eq!(errno(&write(engine, file, &pattern(10_000, 1), 0)), Some(code)),
        );
    }
}

#[test]
fn a_file_that_refuses_direct_transfers_goes_through_the_cache_and_the_report_says_so() {
    on_each_route(
        |operation| (operation.number == 0).then_some(Fault::Errno(libc::EINVAL)),
        |engine, file| {
            if let Err(refused) = file.direct() {
                skip(Requirement::Direct, refused);
                return;
            }
            let written = write(engine, file, &pattern(300_000, 1), 0);
            written.result.unwrap();
            assert!(file.direct().is_err());
            let (outcome, memory) = read(engine, file, 300_000, 0);
            outcome.result.unwrap();
            assert_eq!(memory.as_slice(), pattern(300_000, 1));
            for (carrier, _) in written.carried.iter().chain(&outcome.carried) {
                assert!(
                    matches!(carrier, Carrier::IoUringBuffered | Carrier::ThreadsBuffered),
                    "{carrier:?}"
                );
            }
            let refused = engine.report().refused;
            let [refusal] = &refused[..] else { panic!("{refused:?}") };
            assert_eq!(
                (refusal.what.as_str(), refusal.path.as_deref()),
                ("direct transfers", Some(file.path()))
            );
        },
    );
}

#[test]
fn a_failed_step_fails_its_job_once_all_its_steps_have_ended() {
    on_each_route(
        |operation| (operation.offset == 4096 + (8 << 20)).then_some(Fault::Errno(libc::EIO)),
        |engine, file| {
            let content = pattern(40 << 20, 1);
            let outcome = write(engine, file, &content, 0);
            assert_eq!(errno(&outcome), Some(libc::EIO));
            assert_eq!(outcome.checksums, [None]);
        },
    );
}

#[test]
fn flipped_bits_show_in_the_checksum() {
    on_each_route(
        |operation| (operation.number % 2 == 1).then_some(Fault::Flip(5000)),
        |engine, file| {
            let content = pattern(16_384, 1);
            let written = write(engine, file, &content, 0);
            for skew in [0, 9] {
                let (outcome, memory) = read(engine, file, 16_384, skew);
                outcome.result.unwrap();
                let is_same = outcome.checksums == written.checksums;
                assert_eq!(is_same, memory.as_slice() == content);
            }
            // A write whose bytes are not what was given: the next reads find that.
            let written = write(engine, file, &content, 0);
            let sums: Vec<_> = (0..2).map(|_| read(engine, file, 16_384, 0).0.checksums).collect();
            assert!(sums.iter().any(|sum| *sum != written.checksums));
        },
    );
}

#[test]
fn a_hanging_job_delays_no_other() {
    for route in ROUTES {
        let directory = disk();
        let gate = Gate::new();
        let script = {
            let gate = gate.clone();
            FaultScript::new(move |operation| (operation.offset == 4096).then(|| Fault::Hang(gate.clone())))
        };
        let defaults = options(directory.path(), route);
        let Some(engine) = start(IoOptions { faults: Some(script), threads: Some(2), ..defaults }) else {
            continue;
        };
        let file = new_file(directory.path(), "data");
        let mut memory = Memory::of(&pattern(4096, 1), 0);
        let (done, hanging) = outcome();
        let parts = vec![part(4096, &mut memory)];
        engine.submit(vec![job(Direction::Write, &file, parts, done)]);
        for number in 2..20 {
            let mut memory = Memory::of(&pattern(4096, number), 1);
            let parts = vec![part(number * 4096, &mut memory)];
            run(&engine, |done| job(Direction::Write, &file, parts, done)).result.unwrap();
        }
        assert!(hanging.try_recv().is_err());
        gate.open();
        hanging.recv_timeout(PATIENCE).unwrap().result.unwrap();
    }
}

#[test]
fn jobs_wait_for_memory_without_deadlock() {
    for route in ROUTES {
        let directory = disk();
        let defaults = options(directory.path(), route);
        let Some(engine) = start(IoOptions { staging_bytes: Some(256 << 10), threads: Some(3), ..defaults })
        else {
            continue;
        };
        let file = new_file(directory.path(), "data");
        let mut ends = Vec::new();
        let mut memories = Vec::new();
        for number in 0..60u64 {
            // Each needs more than there is, or nearly all, or little.
            let len = [1 << 20, 200 << 10, 5000][number as usize % 3];
            let mut memory = Memory::of(&pattern(len, number), 5);
            let (done, end) = outcome();
            let parts = vec![part(number << 20, &mut memory)];
            engine.submit(vec![job(Direction::Write, &file, parts, done)]);
            memories.push(memory);
            ends.push(end);
        }
        for (number, (end, memory)) in ends.iter().zip(&memories).enumerate() {
            let outcome = end.recv_timeout(PATIENCE).unwrap();
            outcome.result.unwrap();
            let mut parts = Memory::new(memory.len, 77, 0);
            let part = vec![part((number as u64) << 20, &mut parts)];
            run(&engine, |done| job(Direction::Read, &file, part, done)).result.unwrap();
            assert!(parts.as_slice() == memory.as_slice(), "{number}");
        }
    }
}

#[test]
fn a_child_of_fork_is_told_so() {
    let directory = disk();
    for route in ROUTES {
        let Some(engine) = start(options(directory.path(), route)) else { continue };
        let file = new_file(directory.path(), route.name());
        let mut memory = Memory::of(&pattern(4096, 1), 0);
        let (done, receiver) = outcome();
        let write = job(Direction::Write, &file, vec![part(0, &mut memory)], done);
        // SAFETY: the child uses what the test has made beforehand, and leaves at once.
        match unsafe { libc::fork() } {
            0 => {
                engine.submit(vec![write]);
                let is_told = matches!(receiver.try_recv(), Ok(Outcome { result: Err(Failure::Io(_)), .. }));
                let cancelled = engine.cancel(0);
                drop(engine);
                // SAFETY: ends the child without running anything of the parent's.
                unsafe { libc::_exit(if is_told && cancelled == 0 { 0 } else { 1 }) }
            }
            child => {
                let mut status = 0;
                // SAFETY: waits for the child made above.
                let ended = unsafe { libc::waitpid(child, &mut status, 0) };
                assert_eq!((ended, status), (child, 0));
                run(&engine, |done| Job { done, ..write }).result.unwrap();
            }
        }
    }
}
