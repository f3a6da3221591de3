//! Damage to logs that is met, until it is told.
#![forbid(unsafe_code)]

use super::lock;
use std::{
    collections::VecDeque,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

/// Reasons that are kept; older ones are forgotten.
const MOST_REASONS: usize = 64;

/// Damage that was met.
#[derive(Debug, Default)]
pub(super) struct Damage {
    reasons: Mutex<VecDeque<String>>,
    records: AtomicU64,
}

impl Damage {
    /// Notes damage: how many records of other writers it hit, and a sentence about it.
    pub(super) fn note(&self, records: u64, reason: String) {
        self.records.fetch_add(records, Ordering::Relaxed);
        let mut reasons = lock(&self.reasons);
        if reasons.len() == MOST_REASONS {
            reasons.pop_front();
        }
        reasons.push_back(reason);
    }

    /// The sentences since the last call.
    pub(super) fn take(&self) -> Vec<String> {
        lock(&self.reasons).drain(..).collect()
    }

    /// Records of other writers that were damaged.
    pub(super) fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }
}
