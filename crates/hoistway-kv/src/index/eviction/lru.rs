//! The block that was not used for the longest time goes first.
#![forbid(unsafe_code)]

use super::{Fate, OnUse, Policy, Queue};

pub(super) struct Lru;

impl Policy for Lru {
    fn enter(&self, _remembered: bool) -> Queue {
        Queue::Protected
    }

    fn used(&self, _uses: u8) -> OnUse {
        OnUse::MoveToBack
    }

    fn next(&self, _probation_bytes: u64, _protected_bytes: u64) -> Queue {
        Queue::Protected
    }

    fn decide(&self, _queue: Queue, _uses: u8) -> Fate {
        Fate::Evict
    }

    fn is_hot(&self, _queue: Queue, _uses: u8, recency: u64) -> bool {
        recency >= 500
    }

    fn carried(&self, queue: Queue, uses: u8) -> (Queue, u8) {
        (queue, uses)
    }

    fn worth(&self, _queue: Queue, _uses: u8, recency: u64) -> u64 {
        recency
    }
}
