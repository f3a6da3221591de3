//! `io_uring`: many reads and writes in flight from one thread.
#![allow(unsafe_code)]

use super::{
    Direction,
    lane::{Done, Op},
    wake::Wake,
};
use io_uring::{IoUring, opcode, types};
use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    time::Duration,
};
use windlass_device::Unavailable;
use windlass_io::lane::open_ring;

/// What completions of the wait for a [`Wake`] carry.
const WAKE: u64 = u64::MAX;
/// Pause after the kernel could not take operations on.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(1);

/// One ring, and the operations that are in it.
pub(super) struct RingLane {
    // The kernel may use the memory of `in_flight` until completions were seen: `Drop` waits for these.
    ring: IoUring,
    /// The operations that the kernel has, by the number that their completions carry.
    in_flight: Vec<Option<Op>>,
    free: Vec<usize>,
    /// Operations that failed before the kernel saw them.
    rejected: Vec<Done>,
    /// Whether the ring waits for the wake.
    is_armed: bool,
}

impl RingLane {
    /// A ring for up to `depth` operations. Must be used by the thread that made it.
    pub(super) fn new(depth: usize) -> Result<Self, Unavailable> {
        // One more for the wait for the wake.
        let entries = u32::try_from((depth + 1).next_power_of_two()).unwrap_or(u32::MAX);
        let operations = [opcode::Readv::CODE, opcode::Writev::CODE, opcode::PollAdd::CODE];
        let ring = open_ring(entries, &operations)?;
        Ok(Self {
            ring,
            in_flight: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            rejected: Vec::new(),
            is_armed: false,
        })
    }

    pub(super) fn capacity(&self) -> usize {
        self.in_flight.len()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len() - self.free.len() + self.rejected.len()
    }

    pub(super) fn push(&mut self, op: Op) {
        let full = || io::Error::other("more operations were pushed than the ring holds");
        let Some(slot) = self.free.pop() else {
            self.rejected.push(Done { op, result: Err(full()) });
            return;
        };
        let file = types::Fd(op.file.descriptor(op.access).as_raw_fd());
        let (segments, offset) = (op.segments.as_ptr(), op.offset());
        let count = u32::try_from(op.segments.len()).unwrap_or(u32::MAX);
        let entry = match op.direction {
            Direction::Read => opcode::Readv::new(file, segments, count).offset(offset).build(),
            Direction::Write => opcode::Writev::new(file, segments, count).offset(offset).build(),
        }
        .user_data(slot as u64);
        // Before the kernel can see the entry: it points to the operation's segments, whose place on the heap stays.
        self.in_flight[slot] = Some(op);
        // SAFETY: descriptor, segments and our memory belong to the operation, which stays in `in_flight` until its
        // completion was seen, also when the lane is dropped; the caller's memory is left alone until then by the
        // contract of `Job`.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // The queue has an entry for each slot, so it is never full.
        if pushed.is_err()
            && let Some(op) = self.in_flight[slot].take()
        {
            self.free.push(slot);
            self.rejected.push(Done { op, result: Err(full()) });
        }
    }

    /// Waits until an operation has ended, or until `wake` is notified.
    ///
    /// # Errors
    /// If the ring cannot be waited for: its operations are leaked.
    pub(super) fn wait(&mut self, wake: &Wake, done: &mut Vec<Done>) -> io::Result<()> {
        if !self.rejected.is_empty() {
            done.append(&mut self.rejected);
            return Ok(());
        }
        self.arm(wake.descriptor().as_raw_fd());
        loop {
            self.enter().inspect_err(|_| self.leak())?;
            let before = done.len();
            if self.reap(done) {
                wake.clear();
                return Ok(());
            }
            if done.len() > before {
                return Ok(());
            }
        }
    }

    /// Has the ring wait for the wake, if it does not.
    fn arm(&mut self, wake: RawFd) {
        if !self.is_armed {
            let entry = opcode::PollAdd::new(types::Fd(wake), libc::POLLIN as u32).build().user_data(WAKE);
            // SAFETY: refers to no memory. The descriptor is open: the caller has it, and the kernel holds its file.
            self.is_armed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        }
    }

    /// Hands operations to the kernel, and waits for a completion.
    fn enter(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            // Completions must be taken first, or the kernel is short of memory.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                std::thread::sleep(SHORTAGE_PAUSE);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Takes completions, and says whether the wake was notified.
    fn reap(&mut self, done: &mut Vec<Done>) -> bool {
        let mut is_woken = false;
        for completion in self.ring.completion() {
            if completion.user_data() == WAKE {
                self.is_armed = false;
                is_woken = true;
                continue;
            }
            let slot = completion.user_data() as usize;
            let Some(op) = self.in_flight.get_mut(slot).and_then(Option::take) else {
                continue;
            };
            self.free.push(slot);
            let result = usize::try_from(completion.result())
                .map_err(|_| io::Error::from_raw_os_error(completion.result().wrapping_neg()));
            done.push(Done { op, result });
        }
        is_woken
    }

    /// Nothing more can be learnt of the operations: the kernel may go on using their memory, so it is never freed.
    fn leak(&mut self) {
        self.in_flight.drain(..).flatten().for_each(Op::lose);
        self.free.clear();
    }
}

impl Drop for RingLane {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight() > self.rejected.len() {
            if self.enter().is_err() {
                self.leak();
                return;
            }
            self.reap(&mut done);
            done.clear();
        }
    }
}
