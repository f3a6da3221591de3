//! What users should know of the layout, until it is told: damage to logs, and a lack of room.
#![forbid(unsafe_code)]

use super::lock;
use crate::EventKind;
use std::{
    collections::VecDeque,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

/// Notices that are kept; older ones are forgotten.
const MOST_NOTICES: usize = 64;

/// What has not been told yet, and the damage that was met.
#[derive(Debug, Default)]
pub(super) struct Notices {
    kept: Mutex<VecDeque<(EventKind, String)>>,
    damaged_records: AtomicU64,
}

impl Notices {
    /// Notes damage: how many records of other writers it hit, and a sentence about it.
    pub(super) fn damage(&self, records: u64, reason: String) {
        self.damaged_records.fetch_add(records, Ordering::Relaxed);
        self.note(EventKind::DamagedLog, reason);
    }

    /// Notes what a sentence says.
    pub(super) fn note(&self, kind: EventKind, reason: String) {
        let mut kept = lock(&self.kept);
        if kept.len() == MOST_NOTICES {
            kept.pop_front();
        }
        kept.push_back((kind, reason));
    }

    /// What was noted since the last call.
    pub(super) fn take(&self) -> Vec<(EventKind, String)> {
        lock(&self.kept).drain(..).collect()
    }

    /// Records of other writers that were damaged.
    pub(super) fn damaged_records(&self) -> u64 {
        self.damaged_records.load(Ordering::Relaxed)
    }
}
