//! Reads and writes that fail on purpose: the test bench of everything above them.
//!
//! Only with the feature `fault-injection`. A read whose bytes are withheld leaves other bytes in the memory, so that
//! whoever believes a failed read delivers wrong bytes, not right ones by luck.
#![allow(unsafe_code)]

use super::{
    Direction,
    lane::{Done, Op},
    wake::Wake,
};
use crate::layout::BLOCK_LEN;
use std::{
    fmt, io,
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use windlass_io::{file::Access, parallel::lock};

/// What happens to one read or write.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It fails with this `errno`; nothing is moved.
    Errno(i32),
    /// Only this many bytes are moved; 0 looks like the end of the file.
    Short(u64),
    /// It begins this much later.
    Delay(Duration),
    /// It begins when the gate is opened.
    Hang(Gate),
    /// One bit of this byte, counted from where it begins, is another: of a read in memory, of a write in the file.
    Flip(u64),
    /// A write that is said to be done, and is not.
    Lost,
}

/// One read or write, for a script to decide about.
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    /// Its number among all of the script, from 0.
    pub number: u64,
    /// The file.
    pub path: &'a Path,
    /// Whether it writes.
    pub is_write: bool,
    /// Where it begins.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
}

type Decide = dyn Fn(&Operation<'_>) -> Option<Fault> + Send + Sync;

/// Decides what happens to each read and write.
#[derive(Clone)]
pub struct FaultScript {
    decide: Arc<Decide>,
    operations: Arc<AtomicU64>,
}

impl FaultScript {
    /// A script that asks `decide`.
    pub fn new(decide: impl Fn(&Operation<'_>) -> Option<Fault> + Send + Sync + 'static) -> Self {
        Self { decide: Arc::new(decide), operations: Arc::default() }
    }

    /// Reads and writes that it has decided about.
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for FaultScript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultScript").field("operations", &self.operations()).finish_non_exhaustive()
    }
}

/// What operations hang at until it is opened.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<Mutex<Waiting>>);

#[derive(Debug, Default)]
struct Waiting {
    is_open: bool,
    /// How many came so far.
    came: u64,
    wakes: Vec<Arc<Wake>>,
}

impl Gate {
    /// A closed one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets all operations pass, now and later.
    pub fn open(&self) {
        let wakes = {
            let mut waiting = self.lock();
            waiting.is_open = true;
            std::mem::take(&mut waiting.wakes)
        };
        wakes.iter().for_each(|wake| wake.notify());
    }

    /// How many operations have come to it.
    pub fn came(&self) -> u64 {
        self.lock().came
    }

    fn is_open(&self) -> bool {
        self.lock().is_open
    }

    fn come(&self, wake: &Arc<Wake>) {
        let mut waiting = self.lock();
        waiting.came += 1;
        waiting.wakes.push(wake.clone());
        if waiting.is_open {
            wake.notify();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.0)
    }
}

/// What stands before the lane of one worker.
pub(super) struct Filter {
    script: FaultScript,
    wake: Arc<Wake>,
    held: Vec<(Gate, Op)>,
    /// Operations that ended here.
    ended: Vec<Done>,
    /// What has to be done to operations that the lane carries, by transfer and offset.
    flips: Vec<(usize, u64, u64)>,
}

impl Filter {
    pub(super) fn new(script: FaultScript, wake: Arc<Wake>) -> Self {
        Self { script, wake, held: Vec::new(), ended: Vec::new(), flips: Vec::new() }
    }

    /// Operations that are not with the lane.
    pub(super) fn held(&self) -> usize {
        self.held.len() + self.ended.len()
    }

    /// Decides about an operation; what it gives back is the lane's.
    pub(super) fn admit(&mut self, mut op: Op) -> Option<Op> {
        let number = self.script.operations.fetch_add(1, Ordering::Relaxed);
        let len = op.segments.iter().map(|segment| segment.iov_len as u64).sum();
        let operation = Operation {
            number,
            path: op.file.path(),
            is_write: op.direction == Direction::Write,
            offset: op.offset(),
            len,
        };
        match (self.script.decide)(&operation) {
            None => return Some(op),
            Some(Fault::Errno(errno)) => {
                spoil(&op);
                self.ended.push(Done { op, result: Err(io::Error::from_raw_os_error(errno)) });
            }
            Some(Fault::Short(most)) => {
                spoil(&op);
                // Direct transfers are of whole blocks, however short.
                let unit = if op.access == Access::Direct { BLOCK_LEN } else { 1 };
                let most = most / unit * unit;
                if most > 0 {
                    shorten(&mut op, most);
                    return Some(op);
                }
                self.ended.push(Done { op, result: Ok(0) });
            }
            Some(Fault::Delay(time)) => {
                let gate = Gate::new();
                self.hold(gate.clone(), op);
                thread::spawn(move || {
                    thread::sleep(time);
                    gate.open();
                });
            }
            Some(Fault::Hang(gate)) => self.hold(gate, op),
            Some(Fault::Flip(at)) => {
                self.flips.push((op.transfer, op.offset(), at));
                return Some(op);
            }
            Some(Fault::Lost) => {
                let result = if operation.is_write { Ok(len as usize) } else { Ok(0) };
                self.ended.push(Done { op, result });
            }
        }
        if !self.ended.is_empty() {
            self.wake.notify();
        }
        None
    }

    fn hold(&mut self, gate: Gate, op: Op) {
        gate.come(&self.wake);
        self.held.push((gate, op));
    }

    /// Operations whose gates are open, for the lane; those that ended here go to `done`.
    pub(super) fn released(&mut self, done: &mut Vec<Done>) -> Vec<Op> {
        done.append(&mut self.ended);
        self.held.extract_if(.., |(gate, _)| gate.is_open()).map(|(_, op)| op).collect()
    }

    /// Does to an operation that the lane has carried what was decided.
    pub(super) fn finish(&mut self, done: &mut Done) {
        let Done { op, result } = done;
        let own =
            |(transfer, offset, _): &(usize, u64, u64)| (*transfer, *offset) == (op.transfer, op.offset());
        let Some(place) = self.flips.iter().position(own) else { return };
        let (_, _, at) = self.flips.swap_remove(place);
        let Ok(count) = *result else { return };
        if at >= count as u64 {
            return;
        }
        match op.direction {
            Direction::Read => flip_in_memory(op, at),
            Direction::Write => {
                let mut byte = [0];
                let (file, offset) = (op.file.buffered(), op.offset() + at);
                let read = file.read_exact_at(&mut byte, offset);
                let written = read.and_then(|()| file.write_all_at(&[byte[0] ^ 1], offset));
                *result = written.map(|()| count);
            }
        }
    }
}

/// Leaves only the first `most` bytes to be moved.
fn shorten(op: &mut Op, most: u64) {
    let mut left = most as usize;
    for segment in &mut op.segments {
        segment.iov_len = segment.iov_len.min(left);
        left -= segment.iov_len;
    }
    op.segments.retain(|segment| segment.iov_len > 0);
}

/// Overwrites what a read would fill.
fn spoil(op: &Op) {
    if op.direction == Direction::Read {
        for segment in &op.segments {
            // SAFETY: what the read may write to, and does not yet.
            unsafe { segment.iov_base.cast::<u8>().write_bytes(0xA5, segment.iov_len) };
        }
    }
}

fn flip_in_memory(op: &Op, at: u64) {
    let mut left = at as usize;
    for segment in &op.segments {
        if left < segment.iov_len {
            // SAFETY: inside what the read has written to, and nobody else uses until it has ended.
            unsafe {
                let byte = segment.iov_base.cast::<u8>().add(left);
                byte.write(byte.read() ^ 1);
            }
            return;
        }
        left -= segment.iov_len;
    }
}
