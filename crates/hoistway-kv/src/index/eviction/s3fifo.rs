//! S3-FIFO (Yang et al., SOSP 2023): new blocks are on probation in a tenth of the room; those that are used there, or
//! come again soon after they went, are protected, and stay as long as they are used once a round.
#![forbid(unsafe_code)]

use super::{Fate, MAX_USES, OnUse, Policy, Queue};

/// Part of the room that blocks on probation may take: one in so many bytes.
const PROBATION_SHARE: u64 = 10;

pub(super) struct S3Fifo;

impl Policy for S3Fifo {
    fn enter(&self, remembered: bool) -> Queue {
        if remembered { Queue::Protected } else { Queue::Probation }
    }

    fn used(&self, uses: u8) -> OnUse {
        OnUse::Count((uses + 1).min(MAX_USES))
    }

    fn next(&self, probation_bytes: u64, protected_bytes: u64) -> Queue {
        let all = probation_bytes.saturating_add(protected_bytes);
        if probation_bytes > all / PROBATION_SHARE { Queue::Probation } else { Queue::Protected }
    }

    fn decide(&self, queue: Queue, uses: u8) -> Fate {
        match (queue, uses) {
            (Queue::Probation, 0) => Fate::EvictAndRemember,
            (Queue::Probation, _) => Fate::Keep { queue: Queue::Protected, uses: 0 },
            (Queue::Protected, 0) => Fate::Evict,
            (Queue::Protected, uses) => Fate::Keep { queue: Queue::Protected, uses: uses - 1 },
        }
    }

    fn is_hot(&self, _queue: Queue, uses: u8, _recency: u64) -> bool {
        uses > 0
    }

    fn carried(&self, _queue: Queue, uses: u8) -> (Queue, u8) {
        (Queue::Protected, uses.saturating_sub(1))
    }

    fn worth(&self, queue: Queue, uses: u8, recency: u64) -> u64 {
        let rounds = u64::from(uses) + u64::from(queue == Queue::Protected);
        rounds * 1000 + recency
    }
}
