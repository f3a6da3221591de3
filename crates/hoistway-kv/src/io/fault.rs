//! Reads and writes that fail on purpose: the test bench of everything above them.
//!
//! Only with the feature `fault-injection`. A read whose bytes are withheld leaves other bytes in the memory, so that
//! a reader that believes a failed read delivers wrong bytes, not right ones by luck.
#![allow(unsafe_code)]

use super::{Direction, operation::Operation as Op};
use crate::format::BLOCK_LEN;
use hoistway_io::{
    executor::Carried,
    file::Access,
    lane::{Done, Lane},
    parallel::lock,
};
use std::{
    fmt, io,
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Wake, Waker},
    thread,
    time::Duration,
};

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
    wakers: Vec<Waker>,
}

impl Gate {
    /// A closed one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets all operations pass, now and later.
    pub fn open(&self) {
        let wakers = {
            let mut waiting = self.lock();
            waiting.is_open = true;
            std::mem::take(&mut waiting.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// How many operations have come to it.
    pub fn came(&self) -> u64 {
        self.lock().came
    }

    fn is_open(&self) -> bool {
        self.lock().is_open
    }

    fn come(&self, waker: Waker) {
        let mut waiting = self.lock();
        waiting.came += 1;
        if waiting.is_open {
            waker.wake();
        } else {
            waiting.wakers.push(waker);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.0)
    }
}

/// Ends the wait of a lane's thread.
struct Signal {
    is_given: Mutex<bool>,
    given: Condvar,
    /// Of the lane below.
    waker: Option<Waker>,
}

impl Signal {
    fn take(&self) -> bool {
        std::mem::take(&mut *lock(&self.is_given))
    }

    fn wait(&self) {
        let is_given = lock(&self.is_given);
        let wait = self.given.wait_while(is_given, |is_given| !*is_given);
        *wait.unwrap_or_else(PoisonError::into_inner) = false;
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        *lock(&self.is_given) = true;
        self.given.notify_all();
        self.waker.iter().for_each(Waker::wake_by_ref);
    }
}

/// A lane whose operations fail by a script.
pub(super) struct FaultyLane<L> {
    lane: L,
    script: FaultScript,
    signal: Arc<Signal>,
    held: Vec<(Gate, Carried<Op>)>,
    /// Operations that ended here.
    ended: Vec<Done<Carried<Op>>>,
    /// What has to be done to operations that the lane carries, by the address of their transfer and their offset.
    flips: Vec<(usize, u64, u64)>,
}

impl<L: Lane<Carried<Op>>> FaultyLane<L> {
    pub(super) fn new(lane: L, script: FaultScript) -> Self {
        let (is_given, given) = (Mutex::default(), Condvar::new());
        let signal = Arc::new(Signal { is_given, given, waker: lane.waker() });
        Self { lane, script, signal, held: Vec::new(), ended: Vec::new(), flips: Vec::new() }
    }

    fn hold(&mut self, gate: Gate, op: Carried<Op>) {
        gate.come(self.signal.clone().into());
        self.held.push((gate, op));
    }

    /// Lets operations go on whose gates are open. Returns whether there were any.
    fn release(&mut self) -> bool {
        let released: Vec<_> = self.held.extract_if(.., |(gate, _)| gate.is_open()).collect();
        let is_any = !released.is_empty();
        released.into_iter().for_each(|(_, op)| self.lane.push(op));
        is_any
    }

    /// Does to operations that the lane has carried what was decided.
    fn finish(&mut self, done: &mut Done<Carried<Op>>) {
        let Done { op: Carried { content: op, .. }, result } = done;
        let id = id_of(op);
        let Some(place) = self.flips.iter().position(|(transfer, offset, _)| (*transfer, *offset) == id)
        else {
            return;
        };
        let (_, _, at) = self.flips.swap_remove(place);
        let Ok(count) = *result else { return };
        if at >= count as u64 {
            return;
        }
        let direction = op.transfer.direction;
        let Some((file, _, offset, segments)) = op.attempt_mut() else { return };
        match direction {
            Direction::Read => flip_in_memory(segments, at),
            Direction::Write => {
                let mut byte = [0];
                let (file, offset) = (file.buffered(), offset + at);
                let read = file.read_exact_at(&mut byte, offset);
                let written = read.and_then(|()| file.write_all_at(&[byte[0] ^ 1], offset));
                *result = written.map(|()| count);
            }
        }
    }
}

/// What tells operations that are in flight apart.
fn id_of(op: &mut Op) -> (usize, u64) {
    let transfer = Arc::as_ptr(&op.transfer).addr();
    (transfer, op.attempt_mut().map_or(0, |(_, _, offset, _)| offset))
}

impl<L: Lane<Carried<Op>>> Lane<Carried<Op>> for FaultyLane<L> {
    fn capacity(&self) -> usize {
        self.lane.capacity()
    }

    fn in_flight(&self) -> usize {
        self.lane.in_flight() + self.held.len() + self.ended.len()
    }

    fn push(&mut self, mut carried: Carried<Op>) {
        let number = self.script.operations.fetch_add(1, Ordering::Relaxed);
        let id = id_of(&mut carried.content);
        let is_write = carried.content.transfer.direction == Direction::Write;
        let Some((file, access, offset, segments)) = carried.content.attempt_mut() else {
            return self.lane.push(carried);
        };
        let len = segments.iter().map(|segment| segment.iov_len as u64).sum();
        let decided = (self.script.decide)(&Operation { number, path: file.path(), is_write, offset, len });
        let result = match decided {
            None => return self.lane.push(carried),
            Some(Fault::Errno(errno)) => {
                spoil(is_write, segments);
                Err(io::Error::from_raw_os_error(errno))
            }
            Some(Fault::Short(most)) => {
                spoil(is_write, segments);
                // Direct transfers are of whole blocks, however short.
                let unit = if access == Access::Direct { BLOCK_LEN } else { 1 };
                let most = most / unit * unit;
                if most > 0 {
                    shorten(segments, most);
                    return self.lane.push(carried);
                }
                Ok(0)
            }
            Some(Fault::Delay(time)) => {
                let gate = Gate::new();
                self.hold(gate.clone(), carried);
                thread::spawn(move || {
                    thread::sleep(time);
                    gate.open();
                });
                return;
            }
            Some(Fault::Hang(gate)) => return self.hold(gate, carried),
            Some(Fault::Flip(at)) => {
                self.flips.push((id.0, id.1, at));
                return self.lane.push(carried);
            }
            Some(Fault::Lost) => Ok(if is_write { len as usize } else { 0 }),
        };
        self.ended.push(Done { op: carried, result });
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<Carried<Op>>>) -> io::Result<()> {
        let (before, mut is_woken) = (done.len(), false);
        loop {
            // A gate that opens wakes the thread too: the wake-up may be for that alone.
            is_woken &= !self.release();
            done.append(&mut self.ended);
            if done.len() > before || self.in_flight() == 0 {
                return Ok(());
            }
            if self.lane.in_flight() > 0 {
                self.lane.submit_and_wait(done)?;
                done[before..].iter_mut().for_each(|done| self.finish(done));
                is_woken |= self.signal.take();
                if done.len() > before {
                    return Ok(());
                }
            } else if !is_woken {
                self.signal.wait();
                is_woken = true;
                continue;
            }
            // The wake-up is not for a gate, or the lane has the operations that passed the gate.
            if is_woken && !self.held.iter().any(|(gate, _)| gate.is_open()) {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Option<Waker> {
        Some(self.signal.clone().into())
    }
}

/// Leaves only the first `most` bytes to be moved.
fn shorten(segments: &mut Vec<libc::iovec>, most: u64) {
    let mut left = most as usize;
    for segment in segments.iter_mut() {
        segment.iov_len = segment.iov_len.min(left);
        left -= segment.iov_len;
    }
    segments.retain(|segment| segment.iov_len > 0);
}

/// Overwrites what a read would fill.
fn spoil(is_write: bool, segments: &[libc::iovec]) {
    if !is_write {
        for segment in segments {
            // SAFETY: what the read may write to, and does not yet.
            unsafe { segment.iov_base.cast::<u8>().write_bytes(0xA5, segment.iov_len) };
        }
    }
}

fn flip_in_memory(segments: &[libc::iovec], at: u64) {
    let mut left = at as usize;
    for segment in segments {
        if left < segment.iov_len {
            // SAFETY: inside what the read has written to, and nothing else uses until it has ended.
            unsafe {
                let byte = segment.iov_base.cast::<u8>().add(left);
                byte.write(byte.read() ^ 1);
            }
            return;
        }
        left -= segment.iov_len;
    }
}
