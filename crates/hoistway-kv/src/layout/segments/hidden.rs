//! Copies of blocks that are found elsewhere: two processes may store one key. When the copy that is found goes, another one
//! takes its place.
//!
//! What is found and what is hidden change together, under one lock: else a copy whose owner removes it in between would stay, and
//! be found where another block is by then.
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
    /// Takes in a block of another owner. If there is another copy, that one stays the one that is found.
    pub(super) fn keep(&self, index: &Index, fingerprint: Fingerprint, entry: &Entry) {
        let mut hidden = lock(&self.0);
        match index.insert(fingerprint, entry, Existing::Keep) {
            Inserted::Kept(known) if known.owner != entry.owner => hide(&mut hidden, fingerprint, *entry),
            _ => {}
        }
    }

    /// Adds a block of this process, which is the copy that is found from now on.
    pub(super) fn replace(&self, index: &Index, fingerprint: Fingerprint, entry: &Entry) -> Inserted {
        let mut hidden = lock(&self.0);
        let inserted = index.insert(fingerprint, entry, Existing::Replace);
        if let Inserted::Replaced(other) = &inserted
            && !other.entry.is_own()
        {
            hide(&mut hidden, other.fingerprint, other.entry);
        }
        inserted
    }

    /// Forgets an owner's copy of a block, up to this write of it. Returns what is not found any more.
    pub(super) fn remove(
        &self,
        index: &Index,
        fingerprint: &Fingerprint,
        owner: u16,
        sequence: u64,
    ) -> Option<Removed> {
        let mut hidden = lock(&self.0);
        let key = (*fingerprint, owner);
        if hidden.get(&key).is_some_and(|entry| entry.sequence <= sequence) {
            hidden.remove(&key);
        }
        index.remove_if(fingerprint, |entry, _| entry.owner == owner && entry.sequence <= sequence)
    }

    /// Forgets copies for which `is_it`.
    pub(super) fn forget_all(&self, is_it: impl Fn(&Entry) -> bool) {
        lock(&self.0).retain(|_, entry| !is_it(entry));
    }

    /// Has other copies found in place of those that are gone.
    pub(super) fn reveal(&self, index: &Index, gone: &[Removed]) {
        for gone in gone {
            let mut hidden = lock(&self.0);
            let mut copies = hidden.range((gone.fingerprint, 0)..=(gone.fingerprint, u16::MAX));
            let Some((key, entry)) = copies.next().map(|(key, entry)| (*key, *entry)) else { continue };
            if index.insert(key.0, &entry, Existing::Keep) == Inserted::New {
                hidden.remove(&key);
            }
        }
    }
}

fn hide(hidden: &mut BTreeMap<(Fingerprint, u16), Entry>, fingerprint: Fingerprint, entry: Entry) {
    if hidden.len() < MOST {
        hidden.insert((fingerprint, entry.owner), entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{IndexOptions, Slot};
    use std::sync::Barrier;

    fn entry(owner: u16, sequence: u64) -> Entry {
        Entry {
            owner,
            namespace: 0,
            class: 0,
            flags: 0,
            slot: Slot { segment: 1, slot: 0 },
            slot_bytes: 8192,
            payload_len: 4096,
            sequence,
            expires: 0,
        }
    }

    /// Another owner stores and removes a copy while this process does too: once both are removed, nothing is found.
    #[test]
    fn a_copy_that_its_owner_has_removed_is_never_found_again() {
        let block = Fingerprint([7; 16]);
        for sequence in 0..2000 {
            let (index, hidden) = (Index::new(IndexOptions::default()), Hidden::default());
            let barrier = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    barrier.wait();
                    hidden.keep(&index, block, &entry(1, sequence));
                    let gone = hidden.remove(&index, &block, 1, sequence);
                    hidden.reveal(&index, gone.as_slice());
                });
                barrier.wait();
                hidden.replace(&index, block, &entry(0, sequence));
                let gone = index.remove_if(&block, |entry, _| entry.is_own());
                hidden.reveal(&index, gone.as_slice());
            });
            assert_eq!(index.peek(&block), None, "{sequence}");
            assert!(lock(&hidden.0).is_empty(), "{sequence}");
        }
    }
}
