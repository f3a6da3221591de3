//! The writer of this process, and its directory, in which no other process changes a file.
//!
//! The order in which things reach the disk:
//! 1. A page is written only after the tombstone of the block that it had is there.
//! 2. A commit is written only after the block is there.
//! 3. A block is found, and room given out, only after its commit or tombstone is there.
//!
//! With [`Durability::None`] nothing is waited for, and checksums tell what a power cut left; but blocks that have none
//! keep the order, and a block that is deleted, or is stored again after it was evicted, waits for its tombstone: an older
//! block of the same key never comes back. Logs and checkpoints say which blocks no sync covers ([`ProvenFrom`]): loads compare the checksums of
//! those, whatever the options say.
#![forbid(unsafe_code)]

use super::{
    SegmentsShared,
    checkpoint::Checkpoints,
    claim::Pending,
    failed, lock,
    log::{Log, Sync},
    names,
    root::Limits,
    segment::Segment,
    slots::Slots,
    sweep::Sweep,
    tombstone::MissingTombstone,
};
use crate::{
    Durability, Error, EventKind, Fingerprint, Result,
    disk::DiskFile,
    format::{
        BLOCK_LEN, HEADER_LEN,
        record::{BlockRecord, ProvenFrom, Sums},
    },
    index::{Entry, Removed, Slot},
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use uuid::Uuid;

/// Bits of a sequence that count the blocks since the directory was opened; those above count the openings.
pub(super) const COUNT_BITS: u32 = 40;

/// The directory of this process.
pub(super) struct Writer {
    pub(super) shared: Arc<SegmentsShared>,
    pub(super) id: Uuid,
    pub(super) directory: PathBuf,
    pub(super) epoch: u32,
    /// Which blocks were synced, those of this opening included: no power cut came between.
    pub(super) proven_from: ProvenFrom,
    pub(super) lease: Box<dyn DiskFile>,
    pub(super) limits: Limits,
    /// The capacity that its lease tells others.
    pub(super) said_capacity: u64,
    /// The durability that its lease tells others.
    pub(super) said_durability: Option<Durability>,
    pub(super) segment_bytes: u64,
    /// The least that a segment is made with where there is no room for a usual one.
    pub(super) least_segment: u64,
    /// Bytes of the largest block that gets a place, with its header.
    pub(super) largest_block: u64,
    pub(super) durability: Durability,
    pub(super) next_sequence: AtomicU64,
    pub(super) next_segment: AtomicU64,
    pub(super) log: Log,
    pub(super) slots: Mutex<Slots>,
    pub(super) pending: Mutex<Pending>,
    /// Told when there may be more room. With `pending`.
    pub(super) room_changed: Condvar,
    /// Namespaces that the log or the checkpoint before it has.
    pub(super) logged: Mutex<HashSet<u16>>,
    /// Whether its directory has moved away, so that blocks written there are lost.
    pub(super) is_gone: AtomicBool,
    /// Blocks that are gone, but not for the disk.
    pub(super) missing_tombstones: Mutex<Vec<MissingTombstone>>,
    /// Blocks that are gone, but whose tombstones may not be on the disk. None is stored again before that. With the number
    /// of a record after the tombstone; `u64::MAX` until it is written.
    pub(super) unsynced_tombstones: Mutex<HashMap<Fingerprint, u64>>,
    /// Places of blocks that were evicted ahead, each with the number of a record after its tombstone: it is free once that is
    /// on the disk. In the order of the records.
    pub(super) releasing: Mutex<VecDeque<(u64, Slot)>>,
    /// Held, shared, from writing records until their blocks are visible; held alone to change logs.
    pub(super) publishing: RwLock<()>,
    pub(super) checkpoints: Mutex<Checkpoints>,
    pub(super) making_room: Mutex<()>,
    pub(super) sweep: Mutex<Sweep>,
    /// Whether stretches for a block that got no room are about to be looked up. Changes with `sweep` locked.
    pub(super) has_stretches_to_come: AtomicBool,
    /// Whether a block without checksums was ever here.
    pub(super) has_blocks_without_sums: AtomicBool,
    /// Whether there was no room for another segment when this was last looked at.
    pub(super) is_full: AtomicBool,
    /// Whether there was no room when a segment was last needed.
    pub(super) was_full: AtomicBool,
    /// When a segment is made ahead at the earliest, and the blocks that had places when that was last looked at.
    pub(super) spare: Mutex<(Duration, u64)>,
    /// Whether it has been told that there is no room for a first segment.
    pub(super) has_told_of_room: AtomicBool,
    /// Whether the disk refused a segment although others had been given up for it. Until room is looked after again, no
    /// more are.
    pub(super) is_refused: AtomicBool,
    /// Whether another process kept the lock of the store when a segment was last needed.
    pub(super) is_locked_out: AtomicBool,
    /// Segments that were removed, and those of them whose names are not on the disk any more.
    pub(super) removed: AtomicU64,
    pub(super) synced_names: Mutex<u64>,
    /// Bytes that we would allocate if others gave them up.
    pub(super) wanted: AtomicU64,
    /// When these were last lacking.
    pub(super) asked: Mutex<Duration>,
    /// The contents of our lease: the time, and the room that is wanted.
    pub(super) said: Mutex<Option<(u64, u64)>>,
    pub(super) is_closed: AtomicBool,
}

impl Writer {
    /// Whether records have to be on the disk before anything goes on.
    pub(super) fn sync_mode(&self) -> Sync {
        let is_needed =
            self.durability != Durability::None || self.has_blocks_without_sums.load(Ordering::Acquire);
        if is_needed { Sync::Now } else { Sync::Later }
    }

    /// Whether its directory is where it was.
    pub(super) fn is_there(&self) -> Result<bool> {
        let path = self.directory.join(names::LEASE);
        let has_lease = self.lease.is_named(&path).map_err(failed("asking for", &path))?;
        Ok(has_lease && self.shared.root.is_there()?)
    }

    /// An error once its directory is not where it was: none of its blocks would be found.
    pub(super) fn check_here(&self) -> Result<()> {
        match self.is_gone.load(Ordering::Acquire) {
            true => Err(failed("looking for", &self.directory)(io::ErrorKind::NotFound.into())),
            false => Ok(()),
        }
    }

    /// Checks, after a group was written, that it is where it is looked for: an error if its directory or its log is not.
    /// Returns segments that are not.
    pub(super) fn check_there<'a>(
        &self,
        segments: impl IntoIterator<Item = &'a Arc<Segment>>,
    ) -> Result<HashSet<u32>> {
        let gone = |path: &Path| failed("looking for", path)(io::ErrorKind::NotFound.into());
        let path = self.directory.join(names::LEASE);
        if !self.lease.is_named(&path).map_err(failed("asking for", &path))? {
            self.is_gone.store(true, Ordering::Release);
            return Err(gone(&path));
        }
        if let Some(path) = self.log.missing()? {
            return Err(gone(&path));
        }
        let mut missing = HashSet::new();
        for segment in segments {
            let path = segment.data.path();
            if !segment.file.is_named(path).map_err(failed("asking for", path))? {
                missing.insert(segment.head.number);
            }
        }
        Ok(missing)
    }

    /// Sees to what was removed of its directory: blocks go with their segments, a log or checkpoint is written anew.
    pub(super) fn heal(&self) -> Result<()> {
        let segments: Vec<_> = lock(&self.slots).all().cloned().collect();
        let missing = match self.check_there(&segments) {
            // The log is in doubt, and is replaced.
            Err(error) if !self.log.is_in_doubt() => return Err(error),
            missing => missing.unwrap_or_default(),
        };
        if !missing.is_empty() {
            let is_it = |entry: &Entry| entry.is_own() && missing.contains(&entry.slot.segment);
            // A commit that has found its segment shows its block first.
            let _alone = self.publishing.write().unwrap_or_else(PoisonError::into_inner);
            let gone = self.shared.index.remove_all(|_, entry, _| is_it(entry));
            self.shared.observed.evicted(&gone);
            self.shared.gone(&gone);
            for number in &missing {
                lock(&self.slots).remove(*number);
                self.shared.forget_segment(0, *number);
            }
            lock(&self.missing_tombstones).retain(|gone| !missing.contains(&gone.slot.segment));
            let directory = self.directory.display();
            let (count, blocks) = (missing.len(), gone.len());
            let reason =
                format!("{count} segments in {directory} were removed, and {blocks} blocks with them");
            self.shared.observed.note(EventKind::DamagedLog, reason);
        }
        if !self.has_checkpoint()? && !self.log.is_in_doubt() {
            self.checkpoint()?;
        }
        Ok(())
    }

    /// Writes no more, since its directory is not where it was, and removes its blocks from the index. Returns them.
    pub(super) fn leave(&self) -> Vec<Removed> {
        // A checkpoint that has begun has all blocks. A commit that has begun shows its blocks first; later ones fail.
        let _checkpoints = lock(&self.checkpoints);
        let _alone = self.publishing.write().unwrap_or_else(PoisonError::into_inner);
        self.is_gone.store(true, Ordering::Release);
        let gone = self.shared.index.remove_all(|_, entry, _| entry.is_own());
        self.shared.observed.evicted(&gone);
        self.shared.gone(&gone);
        gone
    }

    pub(super) fn check_open(&self) -> Result<()> {
        match self.is_closed.load(Ordering::Acquire) {
            true => Err(Error::Closed { path: self.shared.root.path.clone() }),
            false => Ok(()),
        }
    }
}

/// The class, in the index, of blocks of which some shards have no checksums.
pub(super) const WITHOUT_SUMS: u8 = 1;

/// The index entry of a block of this process.
pub(super) fn own_entry(record: &BlockRecord) -> Entry {
    entry_of(record, 0, record.namespace)
}

/// The index entry of a block whose writer and namespace have these numbers.
pub(super) fn entry_of(record: &BlockRecord, owner: u16, namespace: u16) -> Entry {
    Entry {
        owner,
        namespace,
        class: if record.sums == Sums::Some { WITHOUT_SUMS } else { 0 },
        flags: flags_of(record.shards),
        slot: Slot { segment: record.segment, slot: record.slot },
        slot_bytes: HEADER_LEN as u64
            + u64::from(record.shards) * u64::from(record.stride_blocks) * BLOCK_LEN,
        payload_len: record.payload_len,
        sequence: record.sequence,
        expires: record.expires,
    }
}

/// Flags of entries are one less than the number of shards.
fn flags_of(shards: u16) -> u8 {
    shards.saturating_sub(1).min(u8::MAX.into()) as u8
}

/// Bytes between the starts of an entry's shards.
pub(super) fn stride_of(entry: &Entry) -> u64 {
    entry.slot_bytes.saturating_sub(HEADER_LEN as u64) / (u64::from(entry.flags) + 1)
}
