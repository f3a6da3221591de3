//! Statistics of a store: counts, and changes of residency.
#![forbid(unsafe_code)]

use crate::{backing::HostLevelStats, catalog::UnitId, pack::Packing};
use serde::Serialize;
use std::{collections::VecDeque, time::Duration};

/// Whether a unit became resident or was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// All of its bytes are in memory.
    Resident,
    /// Its memory was given back.
    Evicted,
}

/// A change of residency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ResidencyEvent {
    /// The expert or tensor.
    pub unit: UnitId,
    /// The change.
    pub change: Change,
}

/// Changes that no caller has asked for yet.
#[derive(Debug)]
pub(super) struct Events {
    events: VecDeque<(usize, Change)>,
    capacity: usize,
    lost: u64,
}

impl Events {
    pub(super) fn new(capacity: usize) -> Self {
        Self { events: VecDeque::new(), capacity, lost: 0 }
    }

    /// Notes a change. The oldest is lost if there are too many.
    pub(super) fn push(&mut self, unit: usize, change: Change) {
        if self.capacity == 0 {
            return;
        }
        if self.events.len() == self.capacity {
            self.events.pop_front();
            self.lost += 1;
        }
        self.events.push_back((unit, change));
    }

    /// Takes all, oldest first, and the number of those that were lost before them.
    pub(super) fn take(&mut self) -> (Vec<(usize, Change)>, u64) {
        (self.events.drain(..).collect(), std::mem::take(&mut self.lost))
    }
}

/// Counts of the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) evictions: u64,
    pub(super) bytes_read: u64,
    pub(super) largest_batch_bytes: u64,
    pub(super) peak_bytes: u64,
    pub(super) prefetches: u64,
    pub(super) refused_prefetches: u64,
    pub(super) failed_prefetches: u64,
    pub(super) dropped_prefetches: u64,
    pub(super) useful_prefetches: u64,
    pub(super) wasted_prefetches: u64,
    pub(super) tokens: u64,
    pub(super) stall: Duration,
}

/// Counts since a store was opened, and its contents.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StoreStats {
    /// The backing.
    pub backing: &'static str,
    /// The policy.
    pub policy: &'static str,
    /// Whether experts are read from a file of packed experts, and why not if there is one.
    pub packing: Packing,
    /// Experts and tensors of requests that were resident, or being read already.
    pub hits: u64,
    /// Experts and tensors of requests that had to be read, or copied from a second level.
    pub misses: u64,
    /// Experts and tensors that were evicted.
    pub evictions: u64,
    /// Bytes of experts and tensors that were read.
    pub bytes_read: u64,
    /// Passes through the layers: one begins when a visit is not of a later layer than the one before. A visit is an
    /// observation, or a request for a layer that was never observed.
    pub tokens: u64,
    /// How long requests waited, all together.
    pub stall: Duration,
    /// Bytes of the largest request, resident or not.
    pub largest_batch_bytes: u64,
    /// Bytes that were resident or being read at most.
    pub peak_bytes: u64,
    /// Bytes that are resident or being read.
    pub used_bytes: u64,
    /// Bytes of memory that the backing holds, also of free slots: the budget and one request's demand at most. The second level is
    /// beside that.
    pub held_bytes: u64,
    /// The second level in host memory, if there is one.
    pub host_level: Option<HostLevelStats>,
    /// Experts and tensors that are resident.
    pub resident: usize,
    /// The budget.
    pub budget_bytes: u64,
    /// Memory that the experts of one token occupy, with what alignment adds, if it is known how many these are.
    pub token_cycle_bytes: Option<u64>,
    /// Whether the budget is smaller than that. Then a policy such as LRU finds nothing resident.
    pub is_below_token_cycle: bool,
    /// Prefetches that were begun.
    pub prefetches: u64,
    /// Prefetches for which there was no room.
    pub refused_prefetches: u64,
    /// Prefetches that could not be read, or got no memory.
    pub failed_prefetches: u64,
    /// Prefetches that demand, a deadline or the caller ended before they were read.
    pub dropped_prefetches: u64,
    /// Prefetched experts and tensors that a request used.
    pub useful_prefetches: u64,
    /// Prefetched experts and tensors that were evicted before a request used them.
    pub wasted_prefetches: u64,
}

impl StoreStats {
    /// The share of what was requested that was resident, between 0 and 1.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hits as f64, self.hits + self.misses)
    }

    /// Experts and dense tensors that had to be read, for each token.
    pub fn faults_per_token(&self) -> f64 {
        ratio(self.misses as f64, self.tokens)
    }

    /// Bytes that were read, for each token.
    pub fn bytes_per_token(&self) -> f64 {
        ratio(self.bytes_read as f64, self.tokens)
    }
}

fn ratio(part: f64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part / whole as f64 }
}
