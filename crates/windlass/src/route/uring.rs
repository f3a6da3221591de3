//! `io_uring`: several reads in flight from one thread, straight into their final places.
#![allow(unsafe_code)]

use super::{Access, Done, Lane, ReadOp, Unavailable, open_ring};
use io_uring::{IoUring, opcode, types};
use std::{io, os::fd::AsRawFd, time::Duration};

/// Pause after the kernel could not take reads on.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(1);

/// One ring and the reads that are in it.
pub(crate) struct UringLane {
    // Dropped in this order by `Drop for UringLane`, not by the fields': the kernel may write to the buffers of
    // `in_flight` until their completions were seen.
    ring: IoUring,
    /// The reads that the kernel has, by the number that their completions carry.
    in_flight: Vec<Option<ReadOp>>,
    free: Vec<usize>,
    /// Reads that failed before the kernel saw them.
    rejected: Vec<Done>,
}

impl UringLane {
    /// A ring for up to `depth` reads. Must be used by the thread that made it.
    pub(crate) fn new(depth: usize) -> Result<Self, Unavailable> {
        let entries = u32::try_from(depth.next_power_of_two()).unwrap_or(u32::MAX);
        let ring = open_ring(entries, &[opcode::Read::CODE])?;
        Ok(Self {
            ring,
            in_flight: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            rejected: Vec::new(),
        })
    }

    fn enqueue(&mut self, slot: usize, mut op: ReadOp) -> Result<(), (ReadOp, io::Error)> {
        let file = match op.access {
            Access::Direct => op.source.direct_file().map(AsRawFd::as_raw_fd),
            Access::Buffered => Ok(op.source.buffered_file().as_raw_fd()),
        };
        let offset = op.offset;
        let target =
            file.and_then(|file| op.target().map(|target| (file, target.as_mut_ptr(), target.len())));
        let (file, pointer, len) = match target {
            Ok(target) => target,
            Err(error) => return Err((op, error)),
        };
        let Ok(len) = u32::try_from(len) else {
            return Err((op, io::Error::other("a read of 4 GiB or more")));
        };
        let entry =
            opcode::Read::new(types::Fd(file), pointer, len).offset(offset).build().user_data(slot as u64);
        self.in_flight[slot] = Some(op);
        // SAFETY: the descriptor and the memory belong to `op`, which stays in `in_flight` until the completion
        // of this entry was seen, also when the lane is dropped.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // The queue has an entry for each slot, so it is never full.
        if pushed.is_err()
            && let Some(op) = self.in_flight[slot].take()
        {
            return Err((op, io::Error::other("the submission queue is full")));
        }
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        for completion in self.ring.completion() {
            let slot = completion.user_data() as usize;
            let Some(op) = self.in_flight.get_mut(slot).and_then(Option::take) else {
                continue;
            };
            self.free.push(slot);
            let result = match usize::try_from(completion.result()) {
                Ok(count) => Ok(count),
                Err(_) => Err(io::Error::from_raw_os_error(-completion.result())),
            };
            done.push(Done { op, result });
        }
    }
}

impl Lane for UringLane {
    fn capacity(&self) -> usize {
        self.in_flight.len()
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len() - self.free.len() + self.rejected.len()
    }

    fn push(&mut self, op: ReadOp) {
        match self.free.pop() {
            Some(slot) => {
                if let Err((op, error)) = self.enqueue(slot, op) {
                    self.free.push(slot);
                    self.rejected.push(Done { op, result: Err(error) });
                }
            }
            None => {
                let result = Err(io::Error::other("more reads were pushed than the ring holds"));
                self.rejected.push(Done { op, result });
            }
        }
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        if !self.rejected.is_empty() {
            done.append(&mut self.rejected);
            return Ok(());
        }
        while self.in_flight() > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Completions must be taken first, or the kernel is short of memory.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                    std::thread::sleep(SHORTAGE_PAUSE);
                }
                Err(error) => return Err(error),
            }
            let before = done.len();
            self.reap(done);
            if done.len() > before {
                break;
            }
        }
        Ok(())
    }
}

impl Drop for UringLane {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight() > 0 {
            if self.submit_and_wait(&mut done).is_err() {
                // Nothing more can be learnt of these reads: the kernel may still write to their memory, so it
                // is never freed.
                for op in self.in_flight.drain(..) {
                    std::mem::forget(op);
                }
                return;
            }
            done.clear();
        }
    }
}
