//! Reads and writes on their way, and what carries them: a ring, or the thread itself. All of a worker's alone.
#![forbid(unsafe_code)]

#[cfg(feature = "fault-injection")]
use super::fault::Filter;
use super::{
    Direction, blocking::BlockingLane, bounce::Lease, file::DataFile, memory, plan::Step, ring::RingLane,
    wake::Wake,
};
use std::{io, mem, sync::Arc};
use windlass_io::file::Access;

/// One read or write. It holds the memory of ours that it uses; that of the caller is held by its transfer.
#[derive(Debug)]
pub(super) struct Op {
    /// The transfer that it is part of, as its worker counts them.
    pub(super) transfer: usize,
    pub(super) file: Arc<DataFile>,
    pub(super) direction: Direction,
    pub(super) access: Access,
    pub(super) step: Step,
    pub(super) lease: Lease,
    /// Bytes from the step's start that have been moved.
    pub(super) filled: u64,
    /// Attempts in a row without progress.
    pub(super) stalls: u32,
    /// The memory that the next attempt fills or writes.
    pub(super) segments: Vec<libc::iovec>,
}

impl Op {
    /// Where the next attempt begins in the file.
    pub(super) fn offset(&self) -> u64 {
        self.step.offset + self.filled
    }

    /// Bytes from the step's start that an attempt is to reach.
    fn end(&self) -> u64 {
        match (self.direction, self.access) {
            // Direct reads take whole blocks.
            (Direction::Read, Access::Buffered) => self.step.wanted(),
            _ => self.step.len,
        }
    }

    /// Points the next attempt at what is missing.
    pub(super) fn aim(&mut self) {
        self.segments = memory::segments(&self.step, &self.lease, self.filled..self.end());
    }

    /// Nobody knows whether it has ended: what it uses is never freed.
    pub(super) fn lose(self) {
        let Self { file, lease, segments, .. } = self;
        mem::forget((file, segments));
        lease.lose();
    }
}

/// An attempt that ended: how many bytes were moved, or why none were.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) op: Op,
    pub(super) result: io::Result<usize>,
}

/// What carries the reads and writes of one worker.
pub(super) struct Lane {
    kind: Kind,
    #[cfg(feature = "fault-injection")]
    faults: Option<Filter>,
}

enum Kind {
    Ring(Box<RingLane>),
    Blocking(BlockingLane),
}

impl Lane {
    pub(super) fn ring(ring: RingLane) -> Self {
        Self::new(Kind::Ring(Box::new(ring)))
    }

    pub(super) fn blocking() -> Self {
        Self::new(Kind::Blocking(BlockingLane::default()))
    }

    fn new(kind: Kind) -> Self {
        Self {
            kind,
            #[cfg(feature = "fault-injection")]
            faults: None,
        }
    }

    /// Has a script decide about each attempt.
    #[cfg(feature = "fault-injection")]
    pub(super) fn with_faults(mut self, faults: Option<Filter>) -> Self {
        self.faults = faults;
        self
    }

    pub(super) fn is_ring(&self) -> bool {
        matches!(self.kind, Kind::Ring(_))
    }

    pub(super) fn has_room(&self) -> bool {
        self.in_flight() < self.capacity()
    }

    /// Most operations at a time.
    pub(super) fn capacity(&self) -> usize {
        match &self.kind {
            Kind::Ring(ring) => ring.capacity(),
            Kind::Blocking(_) => 1,
        }
    }

    /// Operations that were pushed and have not come back.
    pub(super) fn in_flight(&self) -> usize {
        let carried = match &self.kind {
            Kind::Ring(ring) => ring.in_flight(),
            Kind::Blocking(lane) => lane.in_flight(),
        };
        #[cfg(feature = "fault-injection")]
        let carried = carried + self.faults.as_ref().map_or(0, Filter::held);
        carried
    }

    /// Takes an operation on. Only while it has room.
    pub(super) fn push(&mut self, op: Op) {
        #[cfg(feature = "fault-injection")]
        let Some(op) = (match &mut self.faults {
            Some(faults) => faults.admit(op),
            None => Some(op),
        }) else {
            return;
        };
        self.carry(op);
    }

    fn carry(&mut self, op: Op) {
        match &mut self.kind {
            Kind::Ring(ring) => ring.push(op),
            Kind::Blocking(lane) => lane.push(op),
        }
    }

    /// Waits until an operation has ended, or until `wake` is notified; appends those that have ended.
    ///
    /// # Errors
    /// If nobody can know any more what becomes of the operations: they, and what they hold, are never freed.
    pub(super) fn wait(&mut self, wake: &Wake, done: &mut Vec<Done>) -> io::Result<()> {
        #[cfg(feature = "fault-injection")]
        if let Some(faults) = &mut self.faults {
            let released = faults.released(done);
            released.into_iter().for_each(|op| self.carry(op));
            if !done.is_empty() {
                return Ok(());
            }
        }
        #[cfg(feature = "fault-injection")]
        let before = done.len();
        match &mut self.kind {
            Kind::Ring(ring) => ring.wait(wake, done)?,
            Kind::Blocking(lane) => lane.wait(wake, done),
        }
        #[cfg(feature = "fault-injection")]
        if let Some(faults) = &mut self.faults {
            done[before..].iter_mut().for_each(|done| faults.finish(done));
        }
        Ok(())
    }
}
