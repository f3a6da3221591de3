//! Notices and removals of a layout: counts, and entries that the store has not fetched yet.
#![forbid(unsafe_code)]

use super::Usage;
use crate::{EventKind, Evicted, Fingerprint, index::Removed};
use hoistway_io::parallel::lock;
use std::{
    collections::VecDeque,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

/// Notices that are kept; older ones are forgotten.
const MOST_NOTICES: usize = 1024;
/// Blocks that are kept; older ones are forgotten, and counted.
const MOST_GONE: usize = 1 << 16;

/// An event of the store, rather than of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    pub(crate) kind: EventKind,
    /// The details, as a sentence.
    pub(crate) reason: String,
}

/// Counts since the opening, and what has not been fetched.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    /// Oldest first.
    notices: Mutex<VecDeque<Notice>>,
    gone: Mutex<Gone>,
    corrupt: AtomicU64,
    damaged_records: AtomicU64,
}

/// Blocks of this process that were evicted or have expired.
#[derive(Debug, Default)]
struct Gone {
    blocks: VecDeque<Fingerprint>,
    forgotten: u64,
    evicted: u64,
    expired: u64,
}

impl Gone {
    fn add(&mut self, blocks: &[Removed]) {
        for block in blocks {
            if self.blocks.len() == MOST_GONE {
                self.blocks.pop_front();
                self.forgotten += 1;
            }
            self.blocks.push_back(block.fingerprint);
        }
    }
}

impl Observed {
    pub(super) fn note(&self, kind: EventKind, reason: String) {
        let mut notices = lock(&self.notices);
        if notices.len() == MOST_NOTICES {
            notices.pop_front();
        }
        notices.push_back(Notice { kind, reason });
    }

    /// Notes damage of a log, and how many records of other writers it hit.
    pub(super) fn damage(&self, records: u64, reason: String) {
        self.damaged_records.fetch_add(records, Ordering::Relaxed);
        self.note(EventKind::DamagedLog, reason);
    }

    /// A block was found damaged.
    pub(super) fn corrupt(&self) {
        self.corrupt.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn evicted(&self, blocks: &[Removed]) {
        let mut gone = lock(&self.gone);
        gone.evicted += blocks.len() as u64;
        gone.add(blocks);
    }

    pub(super) fn expired(&self, blocks: &[Removed]) {
        let mut gone = lock(&self.gone);
        gone.expired += blocks.len() as u64;
        gone.add(blocks);
    }

    /// The notices since the last call.
    pub(crate) fn take_notices(&self) -> Vec<Notice> {
        lock(&self.notices).drain(..).collect()
    }

    /// Blocks of this process that were evicted or have expired since the last call.
    pub(crate) fn take_evicted(&self) -> Evicted {
        let mut gone = lock(&self.gone);
        let (blocks, forgotten) = (std::mem::take(&mut gone.blocks), std::mem::take(&mut gone.forgotten));
        Evicted { blocks: blocks.into(), forgotten }
    }

    /// The counts, and nothing else.
    pub(super) fn usage(&self) -> Usage {
        let gone = lock(&self.gone);
        Usage {
            evicted_blocks: gone.evicted,
            expired_blocks: gone.expired,
            corrupt_blocks: self.corrupt.load(Ordering::Relaxed),
            damaged_records: self.damaged_records.load(Ordering::Relaxed),
            ..Usage::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Entry, Reuse, Slot};

    #[test]
    fn blocks_that_are_not_fetched_are_forgotten_and_counted() {
        let observed = Observed::default();
        let block = |number: u32| {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            Fingerprint(bytes)
        };
        let slot = Slot { segment: 0, slot: 0 };
        let entry = Entry {
            owner: 0,
            namespace: 0,
            class: 0,
            flags: 0,
            slot,
            slot_bytes: 0,
            payload_len: 0,
            sequence: 0,
            expires: 0,
        };
        let removed = |number| Removed { fingerprint: block(number), entry, reuse: Reuse::Now };
        let all: Vec<_> = (0..MOST_GONE as u32 + 2).map(removed).collect();
        observed.evicted(&all[..1]);
        observed.expired(&all[1..]);
        let evicted = observed.take_evicted();
        assert_eq!((evicted.blocks.len(), evicted.forgotten), (MOST_GONE, 2));
        assert_eq!(evicted.blocks[0], block(2));
        assert_eq!(observed.take_evicted(), Evicted::default());
        let usage = observed.usage();
        assert_eq!((usage.evicted_blocks, usage.expired_blocks), (1, MOST_GONE as u64 + 1));
    }
}
