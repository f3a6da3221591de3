//! Blocks that go: each has a tombstone in the log before its slot is used again.
#![forbid(unsafe_code)]

use super::{lock, log::Sync, slots::Waiting, writer::Writer};
use crate::{
    Fingerprint, NamespaceId, Result,
    format::record::Change,
    index::{Entry, Removed, Reuse, Slot, Want},
};
use std::sync::PoisonError;
use tracing::debug_span;

/// A block that is gone, but not for the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct MissingTombstone {
    pub(super) fingerprint: Fingerprint,
    pub(super) sequence: u64,
    pub(super) slot: Slot,
}

impl Writer {
    /// Evicts blocks; how many went.
    pub(super) fn evict(&self, want: &Want) -> Result<Vec<Removed>> {
        let _evicting = debug_span!("kv.evict", bytes = want.bytes).entered();
        self.tombstone(|| {
            let evicted = self.shared.index.evict(want, self.shared.steady_now());
            self.shared.observed.evicted(&evicted);
            evicted
        })
    }

    /// Removes blocks of this process for which `is_it` holds, unless they are pinned. Returns how many.
    pub(super) fn delete(&self, namespace: NamespaceId, blocks: &[(&[u8], Fingerprint)]) -> Result<usize> {
        self.check_open()?;
        let Some(namespace) = self.shared.namespaces.known(namespace) else { return Ok(0) };
        let is_it =
            |entry: &Entry, is_pinned: bool| entry.is_own() && entry.namespace == namespace && !is_pinned;
        let removed = self.tombstone(|| {
            let index = &self.shared.index;
            blocks.iter().filter_map(|(_, fingerprint)| index.remove_if(fingerprint, is_it)).collect()
        })?;
        if removed.len() < blocks.len() {
            self.tombstone_all()?;
        }
        self.sync_tombstones()?;
        Ok(removed.len())
    }

    /// Removes all blocks of this process in a namespace that are not pinned. Returns how many.
    pub(super) fn clear(&self, namespace: NamespaceId) -> Result<usize> {
        self.check_open()?;
        let Some(namespace) = self.shared.namespaces.known(namespace) else { return Ok(0) };
        let removed = self.tombstone(|| {
            let index = &self.shared.index;
            index.remove_all(|_, entry, is_pinned| {
                entry.is_own() && entry.namespace == namespace && !is_pinned
            })
        })?;
        self.tombstone_all()?;
        self.sync_tombstones()?;
        Ok(removed.len())
    }

    /// Makes a damaged block of this process a miss.
    pub(super) fn invalidate(&self, fingerprint: &Fingerprint, sequence: u64) {
        let is_it = |entry: &Entry, _| entry.is_own() && entry.sequence == sequence;
        // Held all the while: who writes missing tombstones finds it there. The disk is not waited for under it.
        let mut missing = lock(&self.missing_tombstones);
        if let Some(gone) = self.shared.index.remove_if(fingerprint, is_it) {
            self.retire_without_tombstone(&gone.entry, gone.reuse);
            missing.push(MissingTombstone { fingerprint: *fingerprint, sequence, slot: gone.entry.slot });
            self.shared.gone(&[gone]);
        }
    }

    /// Removes blocks, and writes down that they are gone, which frees their slots. If that fails, it is tried again later.
    pub(super) fn tombstone(&self, remove: impl FnOnce() -> Vec<Removed>) -> Result<Vec<Removed>> {
        // Until those are noted whose tombstones are missing: a thread that waits for publishers knows that what is not
        // found any more stays away.
        let _publishing = self.publishing.read().unwrap_or_else(PoisonError::into_inner);
        let removed = remove();
        if removed.is_empty() {
            return Ok(removed);
        }
        self.shared.gone(&removed);
        let tombstone = |gone: &Removed| Change::Tombstone {
            fingerprint: gone.fingerprint,
            sequence: gone.entry.sequence,
        };
        let tombstones: Vec<Change> = removed.iter().map(tombstone).collect();
        let written = self.append_tombstones(&tombstones);
        match written {
            Ok(()) => {
                let mut slots = lock(&self.slots);
                for gone in &removed {
                    let for_readers = gone.reuse == Reuse::Later;
                    let waiting = Waiting { for_tombstone: false, for_readers };
                    slots.retire(gone.entry.slot, gone.entry.slot_bytes, waiting);
                }
                Ok(removed)
            }
            Err(error) => {
                removed
                    .iter()
                    .for_each(|gone| self.tombstone_later(gone.fingerprint, &gone.entry, gone.reuse));
                Err(error)
            }
        }
    }

    fn append_tombstones(&self, tombstones: &[Change]) -> Result<()> {
        let sync = self.sync_mode();
        if sync == Sync::Now {
            return self.log.append(tombstones, sync);
        }
        self.append_unsynced(tombstones).map(drop)
    }

    /// Writes tombstones, and does not wait for the disk. Returns the number of a record after them.
    fn append_unsynced(&self, tombstones: &[Change]) -> Result<u64> {
        let note = |end: u64| {
            lock(&self.unsynced_tombstones).extend(tombstones.iter().filter_map(
                |tombstone| match tombstone {
                    Change::Tombstone { fingerprint, .. } => Some((*fingerprint, end)),
                    _ => None,
                },
            ));
        };
        // Before they are written: a commit of the same block must not overtake the note.
        note(u64::MAX);
        self.log.append(tombstones, Sync::Later)?;
        let end = self.log.next_record();
        note(end);
        Ok(end)
    }

    /// Evicts blocks before their room is needed.
    pub(super) fn evict_before_need(&self, want: &Want) -> Result<()> {
        self.tombstone_unsynced(|| {
            let evicted = self.shared.index.evict(want, self.shared.steady_now());
            self.shared.observed.evicted(&evicted);
            evicted
        })
    }

    /// As [`Writer::tombstone`], but waits for no sync. Places are free once a sync of the log, such as that of the next commit,
    /// covers the tombstones of their blocks.
    pub(super) fn tombstone_unsynced(&self, remove: impl FnOnce() -> Vec<Removed>) -> Result<()> {
        let _publishing = self.publishing.read().unwrap_or_else(PoisonError::into_inner);
        let removed = remove();
        if removed.is_empty() {
            return Ok(());
        }
        self.shared.gone(&removed);
        let tombstone = |gone: &Removed| Change::Tombstone {
            fingerprint: gone.fingerprint,
            sequence: gone.entry.sequence,
        };
        let tombstones: Vec<Change> = removed.iter().map(tombstone).collect();
        match self.append_unsynced(&tombstones) {
            Ok(end) => {
                // Before they wait for the sync, which may have ended by then.
                removed.iter().for_each(|gone| self.retire_without_tombstone(&gone.entry, gone.reuse));
                lock(&self.releasing).extend(removed.iter().map(|gone| (end, gone.entry.slot)));
                Ok(())
            }
            Err(error) => {
                removed
                    .iter()
                    .for_each(|gone| self.tombstone_later(gone.fingerprint, &gone.entry, gone.reuse));
                Err(error)
            }
        }
    }

    /// Frees the places of blocks that were evicted ahead, as far as a sync covers their tombstones.
    pub(super) fn release_synced(&self) {
        let synced = self.log.synced();
        let mut releasing = lock(&self.releasing);
        let count = releasing.partition_point(|(end, _)| *end <= synced);
        let free: Vec<Slot> = releasing.drain(..count).map(|(_, slot)| slot).collect();
        drop(releasing);
        let mut slots = lock(&self.slots);
        free.into_iter().for_each(|slot| slots.tombstone_written(slot));
    }

    /// Waits until tombstones are on the disk, if any may not be.
    pub(super) fn sync_tombstones(&self) -> Result<()> {
        if lock(&self.unsynced_tombstones).is_empty() {
            return Ok(());
        }
        // They stay noted while the disk is waited for: others rely on them meanwhile.
        let end = self.log.sync_all()?;
        lock(&self.unsynced_tombstones).retain(|_, record| *record > end);
        self.release_synced();
        Ok(())
    }

    /// Keeps the place of a block that is gone until the disk knows.
    pub(super) fn tombstone_later(&self, fingerprint: Fingerprint, gone: &Entry, reuse: Reuse) {
        self.retire_without_tombstone(gone, reuse);
        lock(&self.missing_tombstones).push(MissingTombstone {
            fingerprint,
            sequence: gone.sequence,
            slot: gone.slot,
        });
    }

    fn retire_without_tombstone(&self, gone: &Entry, reuse: Reuse) {
        let waiting = Waiting { for_tombstone: true, for_readers: reuse == Reuse::Later };
        lock(&self.slots).retire(gone.slot, gone.slot_bytes, waiting);
    }

    /// Frees what can be freed by now: slots that are not read any more, and those whose tombstones were missing.
    pub(super) fn collect(&self) -> Result<()> {
        self.release_synced();
        for slot in self.shared.index.freed() {
            lock(&self.slots).unread(slot);
        }
        if lock(&self.missing_tombstones).is_empty() {
            return Ok(());
        }
        let _publishing = self.publishing.read().unwrap_or_else(PoisonError::into_inner);
        self.write_missing_tombstones()
    }

    /// Sees to it that no block that is not found any more comes back after a crash.
    fn tombstone_all(&self) -> Result<()> {
        // With this lock held, no other thread is about to write a tombstone.
        let _alone = self.publishing.write().unwrap_or_else(PoisonError::into_inner);
        self.write_missing_tombstones()?;
        self.sync_removed()
    }

    /// Writes tombstones that could not be written before.
    fn write_missing_tombstones(&self) -> Result<()> {
        let missing = std::mem::take(&mut *lock(&self.missing_tombstones));
        if missing.is_empty() {
            return Ok(());
        }
        let tombstone = |gone: &MissingTombstone| Change::Tombstone {
            fingerprint: gone.fingerprint,
            sequence: gone.sequence,
        };
        let tombstones: Vec<Change> = missing.iter().map(tombstone).collect();
        let written = self.append_tombstones(&tombstones);
        match written {
            Ok(()) => {
                let mut slots = lock(&self.slots);
                missing.iter().for_each(|gone| slots.tombstone_written(gone.slot));
            }
            Err(_) => lock(&self.missing_tombstones).extend(missing),
        }
        written
    }
}
