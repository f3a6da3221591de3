//! What this process writes: its own directory, of which nobody else changes anything.
//!
//! The order in which things reach the disk:
//! 1. A slot is written only after its last block's tombstone is there.
//! 2. A commit is written only after the block is there.
//! 3. A block is found, and a slot given out, only after its commit or tombstone is there.
//!
//! With [`Durability::None`] nothing is waited for, and checksums tell what a power cut left; but blocks that have none
//! keep the order.
#![forbid(unsafe_code)]

use super::{
    Shared, failed, lock,
    log::{Log, Sync},
    root::Limits,
    segment::Segment,
    slots::{ClaimEnd, Slots, Waiting, slot_bytes},
};
use crate::{
    DropReason, Durability, Error, Fingerprint, NamespaceId, Result,
    disk::DiskFile,
    format::{
        self,
        header::{BlockHeader, MAX_SHARD_LEN},
        record::{BlockRecord, Change, MAX_PAYLOAD_LEN, Sums},
    },
    index::{Candidates, Enough, Entry, Existing, Inserted, MAX_SLOT_BYTES, Removed, Reuse, Slot, Want},
    layout::{
        BLOCK_LEN, Claim, HEADER_LEN, MAX_SHARDS, NewBlock, Place, Reservation, ShardTable, Written,
        departed::Departed,
    },
};
use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use uuid::Uuid;

/// Bits of a sequence that count the blocks since the directory was opened; those above count the openings.
pub(super) const COUNT_BITS: u32 = 40;

/// Our own directory.
pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    pub(super) id: Uuid,
    pub(super) directory: PathBuf,
    pub(super) epoch: u32,
    pub(super) lease: Box<dyn DiskFile>,
    pub(super) limits: Limits,
    /// What others are told of the capacity.
    pub(super) said_capacity: u64,
    pub(super) segment_bytes: u64,
    /// The largest slot that gets a segment of its own.
    pub(super) largest_slot: u64,
    pub(super) durability: Durability,
    pub(super) next_sequence: AtomicU64,
    pub(super) next_segment: AtomicU64,
    pub(super) log: Log,
    pub(super) slots: Mutex<Slots>,
    pub(super) pending: Mutex<Pending>,
    /// Namespaces that the log or the checkpoint before it has.
    pub(super) logged: Mutex<HashSet<u16>>,
    /// Blocks that are gone, but not for the disk.
    pub(super) unburied: Mutex<Vec<Unburied>>,
    /// Held by many from writing records to showing what they say, and by one who changes logs.
    pub(super) publishing: RwLock<()>,
    pub(super) checkpoints: Mutex<super::checkpoint::Checkpoints>,
    pub(super) making_room: Mutex<()>,
    /// Whether a block without checksums was ever here.
    pub(super) has_blocks_without_sums: AtomicBool,
    /// Whether there was no room for another segment when this was last looked at.
    pub(super) is_full: AtomicBool,
    /// Bytes that we would allocate if others gave them up.
    pub(super) wanted: AtomicU64,
    /// What our lease says: when, and what is wanted.
    pub(super) said: Mutex<Option<(u64, u64)>>,
    pub(super) is_closed: AtomicBool,
    pub(super) counts: Counts,
    pub(super) departed: Departed,
}

/// What was done since the opening.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) evicted: AtomicU64,
    pub(super) expired: AtomicU64,
}

/// Blocks that are being written.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) blocks: HashSet<Fingerprint>,
    /// Bytes of each namespace.
    pub(super) bytes: HashMap<u16, u64>,
}

/// A block that is gone, but not for the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unburied {
    pub(super) fingerprint: Fingerprint,
    pub(super) sequence: u64,
    pub(super) slot: Slot,
}

/// What we know of a claim.
struct Token {
    writer: Arc<Writer>,
    segment: Arc<Segment>,
    /// Syncs of the segment that had failed before anything was written to the slot.
    failures: u64,
    slot: Slot,
    class: u8,
    namespace: u16,
    fingerprint: Fingerprint,
    sequence: u64,
    stride: u64,
    shards: u16,
    expires: u32,
    end: ClaimEnd,
}

/// Gives a claim up, but not its slot back.
pub(super) fn lose(mut claim: Claim) {
    if let Some(token) = claim.token.downcast_mut::<Token>() {
        token.end = ClaimEnd::Lost;
    }
}

impl Token {
    /// Bytes that it takes.
    fn bytes(&self) -> u64 {
        HEADER_LEN as u64 + self.stride * u64::from(self.shards)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        lock(&self.writer.slots).end_claim(self.slot, self.end);
        let mut pending = lock(&self.writer.pending);
        pending.blocks.remove(&self.fingerprint);
        if let Some(bytes) = pending.bytes.get_mut(&self.namespace) {
            *bytes = bytes.saturating_sub(self.bytes());
        }
    }
}

impl Writer {
    /// A place for a block.
    pub(super) fn reserve(self: &Arc<Self>, block: NewBlock) -> Result<Reservation> {
        self.check_open()?;
        let shape = Shape::of(&block)?;
        let slot_bytes = match slot_bytes(shape.payload) {
            Some(bytes) if bytes <= self.largest_slot.min(MAX_SLOT_BYTES) => bytes,
            _ => return Ok(Reservation::Dropped(DropReason::TooLarge)),
        };
        let namespace = self.shared.namespaces.number(block.namespace)?;
        let now = self.shared.now();
        let mut turn = Turn::of(self, block.fingerprint);
        if !turn.is_first {
            return Ok(Reservation::InFlight);
        }
        if self.shared.index.contains(&block.fingerprint, now) {
            return Ok(Reservation::Exists);
        }
        if !self.shared.index.admit(&block.fingerprint, now) {
            return Ok(Reservation::Dropped(DropReason::NotAdmitted));
        }
        if self.log.is_in_doubt() {
            // Nothing could be committed; and places of blocks whose commit failed may not be used again yet.
            return Ok(Reservation::Dropped(DropReason::NoRoom));
        }
        let bytes = HEADER_LEN as u64 + shape.payload;
        if !self.make_quota(namespace, bytes)? {
            return Ok(Reservation::Dropped(DropReason::Quota));
        }
        let Some((segment, slot, class)) = self.take_slot(slot_bytes)? else {
            return Ok(Reservation::Dropped(DropReason::NoRoom));
        };
        let Some(offset) = segment.head.offset(slot.slot) else {
            return Err(Error::Internal(format!("{slot:?} is not in its segment")));
        };
        turn.hand_over();
        *lock(&self.pending).bytes.entry(namespace).or_default() += bytes;
        let token = Token {
            writer: Arc::clone(self),
            failures: segment.failures(),
            slot,
            class,
            namespace,
            fingerprint: block.fingerprint,
            sequence: self.next_sequence.fetch_add(1, Ordering::Relaxed),
            stride: shape.stride,
            shards: shape.shards,
            expires: self.expiry(&block, now),
            end: ClaimEnd::Unused,
            segment,
        };
        let place = Place {
            file: Arc::clone(&token.segment.data).into(),
            header: Some(offset),
            payload: offset + HEADER_LEN as u64,
            stride: shape.stride,
        };
        Ok(Reservation::Claimed(Claim { block, place, token: Box::new(token) }))
    }

    /// When a block ends: by its own time, or by that of its namespace.
    fn expiry(&self, block: &NewBlock, now: u32) -> u32 {
        let own = format::expiry_seconds(block.expires);
        let seconds = |ttl: Duration| u32::try_from(ttl.as_secs()).unwrap_or(u32::MAX).max(1);
        let ttl = self.shared.namespaces.options(block.namespace).ttl;
        let of_namespace = ttl.map_or(0, |ttl| now.saturating_add(seconds(ttl)));
        [own, of_namespace].into_iter().filter(|seconds| *seconds != 0).min().unwrap_or(0)
    }

    /// Whether a namespace may have so many bytes more, after as much has gone as can.
    fn make_quota(&self, namespace: u16, bytes: u64) -> Result<bool> {
        let excess = || {
            let pending = lock(&self.pending).bytes.get(&namespace).copied().unwrap_or(0);
            self.shared.index.quota_excess(namespace, bytes.saturating_add(pending))
        };
        let too_many = excess();
        if too_many == 0 {
            return Ok(true);
        }
        let want = Want { from: Candidates::Namespace(namespace), enough: Enough::Bytes(too_many) };
        self.evict(&want)?;
        Ok(excess() == 0)
    }

    /// Evicts blocks; how many went.
    pub(super) fn evict(&self, want: &Want) -> Result<Vec<Removed>> {
        self.bury(|| {
            let evicted = self.shared.index.evict(want, self.shared.now());
            self.counts.evicted.fetch_add(evicted.len() as u64, Ordering::Relaxed);
            self.departed.note(evicted.iter().map(|gone| gone.fingerprint));
            evicted
        })
    }

    /// The header of a block.
    pub(super) fn header(&self, claim: &Claim, table: &ShardTable) -> Result<Vec<u8>> {
        let token = token_of(&claim.token)?;
        let header = BlockHeader {
            fingerprint: claim.block.fingerprint,
            namespace: claim.block.namespace,
            key: claim.block.key.clone(),
            writer: self.id,
            sequence: token.sequence,
            created: self.shared.now().into(),
            expires: token.expires,
            stride: token.stride,
            table: table.clone(),
        };
        header.to_bytes().map_err(|why| Error::InvalidRequest(why.to_string()))
    }

    /// Makes blocks visible; one answer each.
    pub(super) fn commit(&self, blocks: Vec<Written>) -> Vec<Result<()>> {
        let mut results: Vec<Result<()>> = Vec::with_capacity(blocks.len());
        let mut good: Vec<Ready> = Vec::with_capacity(blocks.len());
        for (number, written) in blocks.into_iter().enumerate() {
            match self.check_open().and_then(|()| Ready::new(written, number)) {
                Ok(block) => {
                    good.push(block);
                    results.push(Ok(()));
                }
                Err(error) => results.push(Err(error)),
            }
        }
        self.sync_data(&mut good, &mut results);
        if good.is_empty() {
            return results;
        }
        let _publishing = self.publishing.read().unwrap_or_else(PoisonError::into_inner);
        let mut changes = self.unlogged(&good);
        let namespaces: Vec<u16> = changes.iter().map(|(number, _)| *number).collect();
        let mut changes: Vec<Change> = changes.drain(..).map(|(_, change)| change).collect();
        changes.extend(good.iter().map(|block| Change::Commit(block.record)));
        let without_sums: Vec<Slot> = good
            .iter()
            .filter(|block| block.record.sums == Sums::Some)
            .map(|block| block.token.slot)
            .collect();
        if !without_sums.is_empty() {
            self.has_blocks_without_sums.store(true, Ordering::Release);
            let mut slots = lock(&self.slots);
            without_sums.iter().for_each(|slot| slots.note_without_sums(*slot));
        }
        if let Err(error) = self.log.append(&changes, self.sync_mode()) {
            for mut block in good {
                results[block.number] = Err(again(&error));
                // Its record may be on the disk: until a tombstone is there, the slot stays as it is.
                block.token.end = ClaimEnd::Used;
                let (fingerprint, sequence) = (block.record.fingerprint, block.record.sequence);
                let slot = block.token.slot;
                self.bury_later(Unburied { fingerprint, sequence, slot }, Reuse::Now);
            }
            return results;
        }
        lock(&self.logged).extend(namespaces);
        // Backwards: what comes first in a prefix is to go last.
        for block in good.into_iter().rev() {
            let number = block.number;
            if let Err(error) = self.publish(block) {
                results[number] = Err(error);
            }
        }
        results
    }

    /// Waits until the data of blocks is on the disk, where it has to be. Those where that fails are answered.
    fn sync_data(&self, good: &mut Vec<Ready>, results: &mut [Result<()>]) {
        let mut segments = BTreeMap::new();
        for block in good.iter() {
            if self.durability != Durability::None || block.record.sums == Sums::Some {
                segments.entry(block.record.segment).or_insert_with(|| Arc::clone(&block.token.segment));
            }
        }
        let mut failures = HashMap::new();
        for (number, segment) in segments {
            if let Err(error) = segment.sync() {
                failures.insert(number, failed("syncing", segment.data.path())(error));
            }
        }
        good.retain(|block| {
            let segment = &block.token.segment;
            if let Some(error) = failures.get(&block.record.segment) {
                results[block.number] = Err(again(error));
            } else if segment.failures() != block.token.failures {
                let lost = std::io::Error::other("an earlier sync failed, and may have lost this block");
                results[block.number] = Err(failed("syncing", segment.data.path())(lost));
            }
            results[block.number].is_ok()
        });
    }

    /// Namespaces of blocks that the log does not know yet.
    fn unlogged(&self, blocks: &[Ready]) -> Vec<(u16, Change)> {
        let mut numbers: BTreeSet<u16> = blocks.iter().map(|block| block.record.namespace).collect();
        let logged = lock(&self.logged);
        numbers.retain(|number| !logged.contains(number));
        let named = numbers.into_iter();
        named
            .filter_map(|number| {
                let id = self.shared.namespaces.id(number)?;
                Some((number, Change::Namespace { number, id }))
            })
            .collect()
    }

    /// Shows a block that the log has.
    fn publish(&self, mut block: Ready) -> Result<()> {
        let token = &mut block.token;
        let record = &block.record;
        let entry = own_entry(record, token.class);
        token.end = ClaimEnd::Used;
        match self.shared.index.insert(record.fingerprint, &entry, Existing::Replace) {
            Inserted::Replaced(removed) if removed.entry.is_own() => {
                // Its tombstone is the record of the block that replaced it.
                let for_readers = removed.reuse == Reuse::Later;
                let waiting = Waiting { for_tombstone: false, for_readers };
                lock(&self.slots).retire(removed.entry.slot, waiting);
            }
            Inserted::New | Inserted::Replaced(_) | Inserted::Kept(_) => {}
            Inserted::Refused => {
                let (fingerprint, sequence, slot) = (record.fingerprint, record.sequence, token.slot);
                self.bury_later(Unburied { fingerprint, sequence, slot }, Reuse::Now);
                return Err(Error::InvalidRequest("there are too many namespaces for the index".into()));
            }
        }
        Ok(())
    }

    /// Whether records have to be on the disk before anything goes on.
    pub(super) fn sync_mode(&self) -> Sync {
        let is_needed =
            self.durability != Durability::None || self.has_blocks_without_sums.load(Ordering::Acquire);
        if is_needed { Sync::Now } else { Sync::Later }
    }

    /// Removes blocks, and writes down that they are gone, which frees their slots. If that fails, it is tried again later.
    pub(super) fn bury(&self, remove: impl FnOnce() -> Vec<Removed>) -> Result<Vec<Removed>> {
        let (removed, buried) = {
            // Who waits for those that publish knows that what is not found any more stays away.
            let _publishing = self.publishing.read().unwrap_or_else(PoisonError::into_inner);
            let removed = remove();
            if removed.is_empty() {
                return Ok(removed);
            }
            let tombstone = |gone: &Removed| Change::Tombstone {
                fingerprint: gone.fingerprint,
                sequence: gone.entry.sequence,
            };
            let tombstones: Vec<Change> = removed.iter().map(tombstone).collect();
            let buried = self.log.append(&tombstones, self.sync_mode());
            (removed, buried)
        };
        match buried {
            Ok(()) => {
                let mut slots = lock(&self.slots);
                for gone in &removed {
                    let for_readers = gone.reuse == Reuse::Later;
                    slots.retire(gone.entry.slot, Waiting { for_tombstone: false, for_readers });
                }
                Ok(removed)
            }
            Err(error) => {
                for gone in &removed {
                    let (fingerprint, sequence) = (gone.fingerprint, gone.entry.sequence);
                    let unburied = Unburied { fingerprint, sequence, slot: gone.entry.slot };
                    self.bury_later(unburied, gone.reuse);
                }
                Err(error)
            }
        }
    }

    /// Keeps the slot of a block that is gone until the disk knows.
    pub(super) fn bury_later(&self, gone: Unburied, reuse: Reuse) {
        let waiting = Waiting { for_tombstone: true, for_readers: reuse == Reuse::Later };
        lock(&self.slots).retire(gone.slot, waiting);
        lock(&self.unburied).push(gone);
    }

    /// Frees what can be freed by now: slots that are not read any more, and those whose tombstones were missing.
    pub(super) fn collect(&self) -> Result<()> {
        for slot in self.shared.index.freed() {
            lock(&self.slots).unread(slot);
        }
        if lock(&self.unburied).is_empty() {
            return Ok(());
        }
        let _publishing = self.publishing.read().unwrap_or_else(PoisonError::into_inner);
        self.bury_rest()
    }

    /// Sees to it that no block that is not found any more comes back after a crash.
    fn bury_all(&self) -> Result<()> {
        // Nobody is about to write a tombstone.
        let _alone = self.publishing.write().unwrap_or_else(PoisonError::into_inner);
        self.bury_rest()
    }

    /// Writes tombstones that could not be written before.
    fn bury_rest(&self) -> Result<()> {
        let unburied = std::mem::take(&mut *lock(&self.unburied));
        if unburied.is_empty() {
            return Ok(());
        }
        let tombstone =
            |gone: &Unburied| Change::Tombstone { fingerprint: gone.fingerprint, sequence: gone.sequence };
        let tombstones: Vec<Change> = unburied.iter().map(tombstone).collect();
        let buried = self.log.append(&tombstones, self.sync_mode());
        match buried {
            Ok(()) => {
                let mut slots = lock(&self.slots);
                unburied.iter().for_each(|gone| slots.buried(gone.slot));
            }
            Err(_) => lock(&self.unburied).extend(unburied),
        }
        buried
    }

    /// Removes own blocks for which `is_it`, unless they are pinned; how many.
    pub(super) fn delete(&self, namespace: NamespaceId, blocks: &[(&[u8], Fingerprint)]) -> Result<usize> {
        self.check_open()?;
        let Some(namespace) = self.shared.namespaces.known(namespace) else { return Ok(0) };
        let is_it =
            |entry: &Entry, is_pinned: bool| entry.is_own() && entry.namespace == namespace && !is_pinned;
        let removed = self.bury(|| {
            let index = &self.shared.index;
            blocks.iter().filter_map(|(_, fingerprint)| index.remove_if(fingerprint, is_it)).collect()
        })?;
        if removed.len() < blocks.len() {
            self.bury_all()?;
        }
        Ok(removed.len())
    }

    /// Removes all own blocks of a namespace that are not pinned; how many.
    pub(super) fn clear(&self, namespace: NamespaceId) -> Result<usize> {
        self.check_open()?;
        let Some(namespace) = self.shared.namespaces.known(namespace) else { return Ok(0) };
        let removed = self.bury(|| {
            let index = &self.shared.index;
            index.remove_all(|_, entry, is_pinned| {
                entry.is_own() && entry.namespace == namespace && !is_pinned
            })
        })?;
        self.bury_all()?;
        Ok(removed.len())
    }

    /// Makes a damaged block of our own a miss.
    pub(super) fn condemn(&self, fingerprint: &Fingerprint, sequence: u64) {
        let _publishing = self.publishing.read().unwrap_or_else(PoisonError::into_inner);
        let is_it = |entry: &Entry, _| entry.is_own() && entry.sequence == sequence;
        if let Some(gone) = self.shared.index.remove_if(fingerprint, is_it) {
            let unburied = Unburied { fingerprint: *fingerprint, sequence, slot: gone.entry.slot };
            self.bury_later(unburied, gone.reuse);
        }
    }

    pub(super) fn check_open(&self) -> Result<()> {
        match self.is_closed.load(Ordering::Acquire) {
            true => Err(Error::Closed { path: self.shared.root.path.clone() }),
            false => Ok(()),
        }
    }
}

/// What a block of our own is to the index.
pub(super) fn own_entry(record: &BlockRecord, class: u8) -> Entry {
    Entry {
        owner: 0,
        namespace: record.namespace,
        class,
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
pub(super) fn flags_of(shards: u16) -> u8 {
    shards.saturating_sub(1).min(u8::MAX.into()) as u8
}

/// Bytes between the starts of an entry's shards.
pub(super) fn stride_of(entry: &Entry) -> u64 {
    entry.slot_bytes.saturating_sub(HEADER_LEN as u64) / (u64::from(entry.flags) + 1)
}

/// An error that several callers are told.
fn again(error: &Error) -> Error {
    match error {
        Error::Io { doing, path, source } => Error::Io {
            doing,
            path: path.clone(),
            source: match source.raw_os_error() {
                Some(errno) => std::io::Error::from_raw_os_error(errno),
                None => std::io::Error::new(source.kind(), source.to_string()),
            },
        },
        other => Error::Internal(other.to_string()),
    }
}

fn token_of(token: &Box<dyn Any + Send + std::marker::Sync>) -> Result<&Token> {
    let foreign = || Error::Internal("a claim of another layout".into());
    (**token).downcast_ref().ok_or_else(foreign)
}

/// How much room a block needs.
struct Shape {
    stride: u64,
    shards: u16,
    payload: u64,
}

impl Shape {
    fn of(block: &NewBlock) -> Result<Self> {
        let shards = u16::try_from(block.shards).ok().filter(|_| (1..=MAX_SHARDS).contains(&block.shards));
        let shards = shards.ok_or_else(|| {
            Error::InvalidRequest(format!("a block of {} shards: it has 1 to {MAX_SHARDS}", block.shards))
        })?;
        let stride = block.stride().filter(|_| block.shard_len <= MAX_SHARD_LEN);
        let payload = stride.and_then(|stride| stride.checked_mul(shards.into()));
        match (stride, payload) {
            (Some(stride), Some(payload)) if payload <= MAX_PAYLOAD_LEN => {
                Ok(Self { stride, shards, payload })
            }
            _ => Err(Error::InvalidRequest(format!("a shard of {} bytes is too long", block.shard_len))),
        }
    }
}

/// The right to write a block, until a claim has it.
struct Turn<'a> {
    writer: &'a Writer,
    fingerprint: Fingerprint,
    is_first: bool,
}

impl<'a> Turn<'a> {
    fn of(writer: &'a Writer, fingerprint: Fingerprint) -> Self {
        let is_first = lock(&writer.pending).blocks.insert(fingerprint);
        Self { writer, fingerprint, is_first }
    }

    fn hand_over(&mut self) {
        self.is_first = false;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.is_first {
            lock(&self.writer.pending).blocks.remove(&self.fingerprint);
        }
    }
}

/// A block whose record can be written.
struct Ready {
    number: usize,
    token: Box<Token>,
    record: BlockRecord,
}

impl Ready {
    fn new(written: Written, number: usize) -> Result<Self> {
        let token: Box<Token> = written
            .claim
            .token
            .downcast()
            .map_err(|_| Error::Internal("a claim of another layout".into()))?;
        let shards = &written.table.0;
        if shards.len() != usize::from(token.shards) || shards.iter().any(|shard| shard.len > token.stride) {
            return Err(Error::Internal("a block has other shards than were claimed".into()));
        }
        let sums = if shards.iter().all(|shard| shard.checksum.is_some()) { Sums::All } else { Sums::Some };
        let stride_blocks = u32::try_from(token.stride / BLOCK_LEN)
            .map_err(|_| Error::Internal("a shard is longer than a slot".into()))?;
        let record = BlockRecord {
            fingerprint: token.fingerprint,
            namespace: token.namespace,
            segment: token.slot.segment,
            slot: token.slot.slot,
            sequence: token.sequence,
            payload_len: shards.iter().map(|shard| shard.len).sum(),
            stride_blocks,
            shards: token.shards,
            expires: token.expires,
            sums,
        };
        Ok(Self { number, token, record })
    }
}
