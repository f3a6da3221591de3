//! What every lane owes: each operation comes back once, with the bytes of its file in its memory.
#![allow(unsafe_code, clippy::unwrap_used)]

use hoistway_io::lane::{BlockingLane, CachedCopy, Done, FileRead, Lane, Pread, ReadsFile};
#[cfg(target_os = "linux")]
use requirements::{Requirement, skip};
use std::{fs::File, io, io::Write};

const FILE_BYTES: usize = 3 << 20;

/// A read that owns its memory.
struct Read {
    file: File,
    offset: u64,
    memory: Vec<u8>,
}

// SAFETY: the operation owns the file and the memory, and the heap keeps the memory where it is.
unsafe impl ReadsFile for Read {
    fn next_read(&mut self) -> io::Result<FileRead<'_>> {
        if self.memory.is_empty() {
            return Err(io::Error::other("there is no memory"));
        }
        Ok(FileRead { file: &self.file, offset: self.offset, target: &mut self.memory })
    }
}

fn content() -> Vec<u8> {
    (0..FILE_BYTES).map(|at| (at / 7 % 251) as u8).collect()
}

/// Reads ranges of a file that the page cache holds, one of which ends past the file, and one that cannot be begun.
fn check(mut lane: impl Lane<Read>) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&content()).unwrap();
    let ranges = [(0, 4096), (5, 100), (1 << 20, 2 << 20), (FILE_BYTES as u64 - 10, 100), (0, 0)];
    let read = |&(offset, len): &(u64, usize)| Read {
        file: file.reopen().unwrap(),
        offset,
        memory: vec![0xEE; len],
    };
    let mut waiting: Vec<Read> = ranges.iter().map(read).collect();
    let mut done = Vec::new();
    while !waiting.is_empty() || lane.in_flight() > 0 {
        while lane.in_flight() < lane.capacity()
            && let Some(op) = waiting.pop()
        {
            lane.push(op);
        }
        lane.submit_and_wait(&mut done).unwrap();
    }
    assert_eq!(done.len(), ranges.len());
    for Done { op, result } in done {
        if op.memory.is_empty() {
            assert!(result.unwrap_err().to_string().contains("no memory"));
            continue;
        }
        let expected = &content()[op.offset as usize..];
        let expected = &expected[..op.memory.len().min(expected.len())];
        assert_eq!(result.unwrap(), expected.len(), "at {}", op.offset);
        assert!(op.memory[..expected.len()] == *expected, "at {}", op.offset);
        assert!(op.memory[expected.len()..].iter().all(|&byte| byte == 0xEE));
    }
    lane.submit_and_wait(&mut Vec::new()).unwrap();
}

#[test]
fn a_blocking_lane_reads_what_it_is_given() {
    check(BlockingLane::new(Pread));
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "no system but Linux tells what its page cache holds")]
fn a_cached_file_is_copied() {
    check(BlockingLane::new(CachedCopy));
}

#[test]
#[cfg(target_os = "linux")]
fn a_ring_reads_what_it_is_given() {
    for depth in [1, 3, 8] {
        match hoistway_io::lane::UringLane::new(depth) {
            Ok(lane) => check(lane),
            Err(why) => skip(Requirement::IoUring, why),
        }
    }
}

/// The kernel writes to their memory: a lane that is dropped must wait for it.
#[test]
#[cfg(target_os = "linux")]
fn a_ring_that_is_dropped_waits_for_its_reads() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&content()).unwrap();
    let mut lane = match hoistway_io::lane::UringLane::new(4) {
        Ok(lane) => lane,
        Err(why) => return skip(Requirement::IoUring, why),
    };
    let (dropped, ended) = std::sync::mpsc::channel();
    for offset in 0..4 {
        let read = Read { file: file.reopen().unwrap(), offset, memory: vec![0; 1 << 20] };
        lane.push(Counted { read, _dropped: dropped.clone() });
    }
    drop(dropped);
    drop(lane);
    assert!(ended.recv().is_err(), "an operation is left");
}

#[test]
#[cfg(windows)]
fn a_port_reads_what_it_is_given() {
    for depth in [1, 3, 8] {
        check(hoistway_io::lane::PortLane::new(depth).unwrap());
    }
}

/// The system writes to their memory: a lane that is dropped must wait for it.
#[test]
#[cfg(windows)]
fn a_port_that_is_dropped_waits_for_its_reads() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&content()).unwrap();
    let mut lane = hoistway_io::lane::PortLane::new(4).unwrap();
    let (dropped, ended) = std::sync::mpsc::channel();
    for offset in 0..4 {
        let read = Read { file: file.reopen().unwrap(), offset, memory: vec![0; 1 << 20] };
        lane.push(Counted { read, _dropped: dropped.clone() });
    }
    drop(dropped);
    drop(lane);
    assert!(ended.recv().is_err(), "an operation is left");
}

/// A handle's number is given to another file once it was closed: the port must not read the old one.
#[test]
#[cfg(windows)]
fn a_port_is_not_deceived_by_handles_of_equal_numbers() {
    use std::os::windows::io::AsRawHandle;
    let folder = tempfile::tempdir().unwrap();
    let mut lane = hoistway_io::lane::PortLane::new(1).unwrap();
    let (mut done, mut numbers) = (Vec::new(), std::collections::HashSet::new());
    // More files than a port keeps open.
    for number in 0..100u8 {
        let path = folder.path().join(number.to_string());
        std::fs::write(&path, [number; 100]).unwrap();
        let file = File::open(&path).unwrap();
        numbers.insert(file.as_raw_handle().addr());
        lane.push(Read { file, offset: 0, memory: vec![0xEE; 100] });
        lane.submit_and_wait(&mut done).unwrap();
        let Done { op, result } = done.pop().unwrap();
        assert_eq!(result.unwrap(), 100);
        assert!(op.memory.iter().all(|&byte| byte == number), "{number}");
    }
    assert!(numbers.len() < 100, "no number came twice");
}

/// A read that hangs up when it is dropped.
#[cfg(any(target_os = "linux", windows))]
struct Counted {
    read: Read,
    _dropped: std::sync::mpsc::Sender<()>,
}

// SAFETY: as for `Read`.
#[cfg(any(target_os = "linux", windows))]
unsafe impl ReadsFile for Counted {
    fn next_read(&mut self) -> io::Result<FileRead<'_>> {
        self.read.next_read()
    }
}

#[cfg(target_os = "linux")]
mod pieces {
    use super::*;
    use hoistway_io::lane::{Attempt, Direction, MovesPieces, VectoredCall, VectoredRing};
    use std::{
        thread,
        time::{Duration, Instant},
    };

    /// A transfer that owns two pieces of memory.
    struct Transfer {
        file: File,
        direction: Direction,
        offset: u64,
        memory: [Vec<u8>; 2],
        pieces: Vec<libc::iovec>,
    }

    impl Transfer {
        fn new(file: &File, direction: Direction, offset: u64, mut memory: [Vec<u8>; 2]) -> Self {
            let piece = |bytes: &mut Vec<u8>| libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            };
            let pieces = memory.iter_mut().map(piece).collect();
            Self { file: file.try_clone().unwrap(), direction, offset, memory, pieces }
        }
    }

    // SAFETY: the operation owns all of it, and the heap keeps it where it is.
    unsafe impl MovesPieces for Transfer {
        fn next_attempt(&mut self) -> io::Result<Attempt<'_>> {
            let Self { file, direction, offset, pieces, .. } = self;
            Ok(Attempt { file, direction: *direction, offset: *offset, pieces })
        }
    }

    fn run(lane: &mut impl Lane<Transfer>, op: Transfer) -> (Transfer, usize) {
        let mut done = Vec::new();
        lane.push(op);
        while done.is_empty() {
            lane.submit_and_wait(&mut done).unwrap();
        }
        let Done { op, result } = done.remove(0);
        (op, result.unwrap())
    }

    fn check(mut lane: impl Lane<Transfer>) {
        let file = tempfile::tempfile().unwrap();
        let (first, second) = (content()[..5000].to_vec(), content()[5000..5007].to_vec());
        let write = Transfer::new(&file, Direction::Write, 100, [first.clone(), second.clone()]);
        assert_eq!(run(&mut lane, write).1, 5007);
        let empty = [vec![0; 4999], vec![0; 100]];
        let (read, count) = run(&mut lane, Transfer::new(&file, Direction::Read, 100, empty));
        assert_eq!(count, 5007, "the file ends there");
        assert!(read.memory.concat()[..5007] == [first, second].concat());
    }

    #[test]
    fn threads_move_pieces_both_ways() {
        check(BlockingLane::new(VectoredCall));
    }

    #[test]
    fn rings_move_pieces_both_ways() {
        match VectoredRing::new(2) {
            Ok(ring) => check(ring),
            Err(why) => skip(Requirement::IoUring, why),
        }
    }

    #[test]
    fn a_ring_is_woken_and_keeps_what_it_has() {
        let mut ring = match VectoredRing::new(2) {
            Ok(ring) => ring,
            Err(why) => return skip(Requirement::IoUring, why),
        };
        let (reader, mut writer) = io::pipe().unwrap();
        let reader = File::from(std::os::fd::OwnedFd::from(reader));
        let mut done = Vec::new();
        // Nothing comes from a pipe until something is written to it.
        ring.push(Transfer::new(&reader, Direction::Read, u64::MAX, [vec![0; 2], vec![0; 2]]));
        for _ in 0..3 {
            let waker = ring.waker().unwrap();
            let begin = Instant::now();
            let thread = thread::spawn(move || {
                thread::sleep(Duration::from_millis(20));
                waker.wake();
            });
            ring.submit_and_wait(&mut done).unwrap();
            assert!(done.is_empty() && begin.elapsed() >= Duration::from_millis(20));
            thread.join().unwrap();
        }
        writer.write_all(b"abcd").unwrap();
        ring.submit_and_wait(&mut done).unwrap();
        assert_eq!(done[0].op.memory.concat(), b"abcd");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_ring_waits_on_after_signals() {
    use std::{
        os::fd::OwnedFd,
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
        thread,
        time::Duration,
    };
    static SIGNALS: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn count(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::SeqCst);
    }
    // SAFETY: all fields are numbers or sets of bits.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // Without SA_RESTART: the system call ends.
    action.sa_sigaction = count as *const () as usize;
    // SAFETY: the action is valid, and its handler only counts.
    assert_eq!(unsafe { libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()) }, 0);
    let (reader, mut writer) = io::pipe().unwrap();
    let (tell, told) = mpsc::channel();
    let waiting = thread::spawn(move || {
        let mut lane = match hoistway_io::lane::UringLane::new(1) {
            Ok(lane) => lane,
            Err(why) => {
                tell.send(None).unwrap();
                skip(Requirement::IoUring, why);
                return None;
            }
        };
        // SAFETY: the calling thread always has a number.
        tell.send(Some(unsafe { libc::pthread_self() })).unwrap();
        lane.push(Read { file: OwnedFd::from(reader).into(), offset: 0, memory: vec![0; 5] });
        let mut done = Vec::new();
        lane.submit_and_wait(&mut done).unwrap();
        done.pop().map(|done| (done.result.unwrap(), done.op.memory))
    });
    let Some(thread) = told.recv().unwrap() else { return };
    while SIGNALS.load(Ordering::SeqCst) < 50 && !waiting.is_finished() {
        // SAFETY: the thread was not joined.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        thread::sleep(Duration::from_millis(1));
    }
    writer.write_all(b"bytes").unwrap();
    assert_eq!(waiting.join().unwrap(), Some((5, b"bytes".to_vec())));
}
