//! What the layout notices on its own, until the store makes events of it, and how much damage that was.
#![forbid(unsafe_code)]

use crate::{
    EventKind,
    layout::{self, Notice},
};
use std::sync::atomic::{AtomicU64, Ordering};

/// Notices, and the damage that was met.
#[derive(Debug, Default)]
pub(super) struct Notices {
    kept: layout::Notices,
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
        self.kept.note(kind, reason);
    }

    /// The notices since the last call.
    pub(super) fn take(&self) -> Vec<Notice> {
        self.kept.take()
    }

    /// Records of other writers that were damaged.
    pub(super) fn damaged_records(&self) -> u64 {
        self.damaged_records.load(Ordering::Relaxed)
    }
}
