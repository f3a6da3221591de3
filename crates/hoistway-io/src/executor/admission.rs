//! How much may be in flight: bytes and operations, of which some room is for demand only.
#![forbid(unsafe_code)]

use super::operation::Priority;

/// Operations that are not demand end this many times before demand that has ended is forgotten.
const DEMAND_IS_REMEMBERED: u32 = 16;

/// A bound on bytes and operations. An operation larger than the bound runs alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Limits the bytes of all operations.
    pub bytes: u64,
    /// Limits the number of operations.
    pub operations: usize,
    /// Limits the bytes of operations that are not demand.
    pub rest_bytes: u64,
    /// Limits the number of operations that are not demand.
    pub rest_operations: usize,
    /// Limits the bytes of operations that are not demand while there is demand, or was a moment ago: the device serves
    /// what came first, so that the next demand waits for all of it.
    pub rest_bytes_beside_demand: u64,
}

impl Bound {
    /// No bound.
    pub const NONE: Self = Self {
        bytes: u64::MAX,
        operations: usize::MAX,
        rest_bytes: u64::MAX,
        rest_operations: usize::MAX,
        rest_bytes_beside_demand: u64::MAX,
    };

    /// Keeps a quarter of the room for demand. One other operation is always allowed.
    pub const fn new(bytes: u64, operations: usize) -> Self {
        let rest_operations = operations - operations / 4;
        Self {
            bytes,
            operations: if operations == 0 { 1 } else { operations },
            rest_bytes: bytes - bytes / 4,
            rest_operations: if rest_operations == 0 { 1 } else { rest_operations },
            rest_bytes_beside_demand: u64::MAX,
        }
    }
}

/// The bounds of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Limits the operations of groups that have not ended. A group that would exceed it is refused.
    pub accepted: Bound,
    /// Limits the operations that have begun and not ended. An operation that would exceed it waits.
    pub in_flight: Bound,
}

impl Limits {
    /// No limits: lanes and slots bound what is in flight.
    pub const NONE: Self = Self { accepted: Bound::NONE, in_flight: Bound::NONE };
}

/// Whether operations fit into a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Fits,
    /// Only demand would fit.
    RestIsFull,
    Full,
}

/// How much of a bound is in use.
#[derive(Debug)]
pub(super) struct Room {
    bound: Bound,
    bytes: u64,
    operations: usize,
    rest_bytes: u64,
    rest_operations: usize,
    /// Operations that are not demand, and are to end before demand is forgotten.
    until_demand_is_forgotten: u32,
}

impl Room {
    pub(super) fn new(bound: Bound) -> Self {
        Self {
            bound,
            bytes: 0,
            operations: 0,
            rest_bytes: 0,
            rest_operations: 0,
            until_demand_is_forgotten: 0,
        }
    }

    /// Whether there is demand, or was a moment ago.
    pub(super) fn has_demand(&self) -> bool {
        self.until_demand_is_forgotten > 0
    }

    /// Limits the bytes of operations that are not demand.
    fn most_rest_bytes(&self) -> u64 {
        let most = if self.has_demand() { self.bound.rest_bytes_beside_demand } else { u64::MAX };
        most.min(self.bound.rest_bytes)
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
            // An operation that is larger than the bound runs alone.
            used.1 == 0
                || used.0.saturating_add(bytes) <= most.0 && used.1.saturating_add(operations) <= most.1
        };
        let rest = (self.rest_bytes, self.rest_operations);
        if priority != Priority::Demand && !fits(rest, (self.most_rest_bytes(), bound.rest_operations)) {
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
        if priority == Priority::Demand {
            self.until_demand_is_forgotten = DEMAND_IS_REMEMBERED;
        } else {
            self.rest_bytes = self.rest_bytes.wrapping_add(bytes);
            self.rest_operations += operations;
        }
    }

    /// Reverses [`Room::take`], with the same priority and numbers.
    pub(super) fn give(&mut self, priority: Priority, bytes: u64, operations: usize) {
        self.bytes = self.bytes.wrapping_sub(bytes);
        self.operations -= operations;
        if priority != Priority::Demand {
            self.rest_bytes = self.rest_bytes.wrapping_sub(bytes);
            self.rest_operations -= operations;
        }
    }

    /// Notes that an operation has ended, whose room is given back. One that only waits again has not.
    pub(super) fn note_end(&mut self, priority: Priority) {
        // While demand is in flight, it is not a moment ago.
        if priority != Priority::Demand && self.operations == self.rest_operations {
            self.until_demand_is_forgotten = self.until_demand_is_forgotten.saturating_sub(1);
        }
    }
}
