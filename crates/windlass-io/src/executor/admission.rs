//! How much may be in flight: bytes and operations, of which some room is for demand only.
#![forbid(unsafe_code)]

use super::operation::Priority;

/// A bound on bytes and operations. An operation larger than the bound runs alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Bytes of all.
    pub bytes: u64,
    /// Operations of all.
    pub operations: usize,
    /// Bytes of what is not in demand, of these.
    pub rest_bytes: u64,
    /// Operations of what is not in demand, of these.
    pub rest_operations: usize,
}

impl Bound {
    /// No bound.
    pub const NONE: Self =
        Self { bytes: u64::MAX, operations: usize::MAX, rest_bytes: u64::MAX, rest_operations: usize::MAX };

    /// A quarter of the room is for demand only, but one operation of the rest may always be there.
    pub const fn new(bytes: u64, operations: usize) -> Self {
        let rest_operations = operations - operations / 4;
        Self {
            bytes,
            operations: if operations == 0 { 1 } else { operations },
            rest_bytes: bytes - bytes / 4,
            rest_operations: if rest_operations == 0 { 1 } else { rest_operations },
        }
    }
}

/// The bounds of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Operations that were submitted and whose groups have not ended. What would exceed it is refused.
    pub accepted: Bound,
    /// Operations that have begun and not ended. What would exceed it waits.
    pub in_flight: Bound,
}

impl Limits {
    /// No limits: lanes and slots bound what is in flight.
    pub const NONE: Self = Self { accepted: Bound::NONE, in_flight: Bound::NONE };
}

/// Whether something fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Fits,
    /// Only demand would.
    RestIsFull,
    Full,
}

/// What a bound has left.
#[derive(Debug)]
pub(super) struct Room {
    bound: Bound,
    bytes: u64,
    operations: usize,
    rest_bytes: u64,
    rest_operations: usize,
}

impl Room {
    pub(super) fn new(bound: Bound) -> Self {
        Self { bound, bytes: 0, operations: 0, rest_bytes: 0, rest_operations: 0 }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn operations(&self) -> usize {
        self.operations
    }

    pub(super) fn verdict(&self, priority: Priority, bytes: u64, operations: usize) -> Verdict {
        let bound = &self.bound;
        let fits = |used: (u64, usize), most: (u64, usize)| {
            // What exceeds the bound by itself goes alone.
            used.1 == 0
                || used.0.saturating_add(bytes) <= most.0 && used.1.saturating_add(operations) <= most.1
        };
        let rest = (self.rest_bytes, self.rest_operations);
        if priority != Priority::Demand && !fits(rest, (bound.rest_bytes, bound.rest_operations)) {
            Verdict::RestIsFull
        } else if !fits((self.bytes, self.operations), (bound.bytes, bound.operations)) {
            Verdict::Full
        } else {
            Verdict::Fits
        }
    }

    pub(super) fn take(&mut self, priority: Priority, bytes: u64, operations: usize) {
        // Wraps rather than saturates, so that giving back is exact.
        self.bytes = self.bytes.wrapping_add(bytes);
        self.operations += operations;
        if priority != Priority::Demand {
            self.rest_bytes = self.rest_bytes.wrapping_add(bytes);
            self.rest_operations += operations;
        }
    }

    /// With the priority and the numbers that it was taken with.
    pub(super) fn give(&mut self, priority: Priority, bytes: u64, operations: usize) {
        self.bytes = self.bytes.wrapping_sub(bytes);
        self.operations -= operations;
        if priority != Priority::Demand {
            self.rest_bytes = self.rest_bytes.wrapping_sub(bytes);
            self.rest_operations -= operations;
        }
    }
}
