//! Policies of eviction: a file each. They decide; the lists that they decide about are the index's.
#![forbid(unsafe_code)]

mod lru;
mod s3fifo;

use crate::Eviction;

/// A block is in one of two queues. Each has the order in which blocks came to its back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    /// On probation: not proven to be used again.
    Probation = 0,
    /// Proven.
    Protected = 1,
}

/// Uses that are counted; more are not told apart.
pub(super) const MAX_USES: u8 = 3;

/// What a use changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnUse {
    /// The count of uses, which this is from now on.
    Count(u8),
    /// The block goes to the back of its queue.
    MoveToBack,
}

/// What becomes of the block at the front of a queue when room is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Evict,
    /// It is evicted, and if it comes again soon, that is known.
    EvictAndRemember,
    /// It goes to the back of a queue.
    Keep {
        queue: Queue,
        uses: u8,
    },
}

/// A policy. It has no state of its own.
pub(super) trait Policy: Send + Sync {
    /// The queue of a new block, which may be one that was evicted lately, and remembered.
    fn enter(&self, remembered: bool) -> Queue;

    /// What a use changes for a block that was used so many times.
    fn used(&self, uses: u8) -> OnUse;

    /// The queue whose front is looked at next, by the bytes that are in each.
    fn next(&self, probation_bytes: u64, protected_bytes: u64) -> Queue;

    /// What becomes of a block at the front of its queue.
    fn decide(&self, queue: Queue, uses: u8) -> Fate;

    /// Whether a block should stay if its place is needed.
    fn is_hot(&self, queue: Queue, uses: u8, recency: u64) -> bool;

    /// The queue and the uses of a block that stayed when its place was needed.
    fn carried(&self, queue: Queue, uses: u8) -> (Queue, u8);

    /// What a block is worth to be kept, where `recency` is 0 for what has been in its queue for the longest time, and
    /// 1000 for what has just come.
    fn worth(&self, queue: Queue, uses: u8, recency: u64) -> u64;
}

/// The policy of an option.
pub(super) fn policy(eviction: Eviction) -> &'static dyn Policy {
    match eviction {
        Eviction::S3Fifo => &s3fifo::S3Fifo,
        Eviction::Lru => &lru::Lru,
    }
}
