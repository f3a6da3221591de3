//! Copies of blocks that are found elsewhere: two processes may store one key. When the copy that is found goes, another one
//! takes its place.
#![forbid(unsafe_code)]

use super::lock;
use crate::{
    Fingerprint,
    index::{Entry, Existing, Index, Inserted, Removed},
};
use std::{collections::BTreeMap, sync::Mutex};

/// Copies that are remembered.
const MOST: usize = 1 << 20;

/// Copies of others, by their blocks and owners.
#[derive(Debug, Default)]
pub(super) struct Hidden(Mutex<BTreeMap<(Fingerprint, u16), Entry>>);

impl Hidden {
    /// Remembers a copy of another owner that is not found.
    pub(super) fn hide(&self, fingerprint: Fingerprint, entry: Entry) {
        let mut hidden = lock(&self.0);
        if hidden.len() < MOST {
            hidden.insert((fingerprint, entry.owner), entry);
        }
    }

    /// Forgets an owner's copy of a block, up to this write of it.
    pub(super) fn forget(&self, fingerprint: &Fingerprint, owner: u16, sequence: u64) {
        let mut hidden = lock(&self.0);
        let key = (*fingerprint, owner);
        if hidden.get(&key).is_some_and(|entry| entry.sequence <= sequence) {
            hidden.remove(&key);
        }
    }

    /// Forgets copies for which `is_it`.
    pub(super) fn forget_all(&self, is_it: impl Fn(&Entry) -> bool) {
        lock(&self.0).retain(|_, entry| !is_it(entry));
    }

    /// Has other copies found in place of those that are gone.
    pub(super) fn reveal(&self, index: &Index, gone: &[Removed]) {
        for gone in gone {
            let key = {
                let hidden = lock(&self.0);
                let mut copies = hidden.range((gone.fingerprint, 0)..=(gone.fingerprint, u16::MAX));
                copies.next().map(|(key, entry)| (*key, *entry))
            };
            let Some((key, entry)) = key else { continue };
            if index.insert(key.0, &entry, Existing::Keep) == Inserted::New {
                lock(&self.0).remove(&key);
            }
        }
    }
}
