//! Blocks in large files. Each process that writes has a directory to itself: segments with blocks of all sizes, a log of
//! what is in them, and checkpoints of that. The index in memory knows where each block is; the disk is read only for the
//! blocks themselves.
//!
//! ```text
//! <root>/STORE                        superblock; its lock is held to make segments and to take over directories
//! <root>/ns/<namespace>/NAMESPACE.json
//! <root>/w-<writer>/LEASE             its lock is held by the process that writes this directory
//! <root>/w-<writer>/seg-NNNNNN.kvs    blocks, each a header and its shards
//! <root>/w-<writer>/idx-NNNNNN.log    records of what came and went
//! <root>/w-<writer>/CKPT-a, CKPT-b    what was there when a log began
//! <root>/w-<writer>/HEAT              blocks of others that this process uses
//! ```
#![forbid(unsafe_code)]

mod allocate;
mod checkpoint;
mod claim;
mod commit;
#[cfg(test)]
mod conformance_tests;
mod follow;
mod give_up;
mod heat;
mod hidden;
mod log;
#[cfg(test)]
mod model_tests;
mod names;
mod namespaces;
mod recover;
mod replay;
mod room;
mod root;
mod segment;
mod shares;
mod slots;
mod sweep;
#[cfg(test)]
mod tests;
mod tombstone;
mod writer;

use super::steady::Steady;
use super::{Administration, Observed, Sharing, Usage, Verdict, Written};
use super::{
    BlockPlace, Claim, Found, Layout, Listed, Lookup, NewBlock, Reservation, RoomWait,
    directory::{self, WriterDirectory, failed},
    list_blocks,
};
use crate::{
    Error, EventKind, Fingerprint, Key, NamespaceId, NamespaceOptions, Result, StoreAccess, StoreOptions,
    WriterStats,
    disk::{Disk, RealDisk, read_full},
    format::{self, HEADER_LEN, header::BlockHeader, record::ProvenFrom},
    index::{self, Candidates, Entry, Index, IndexOptions, ReadHold, Want},
    options::Creation,
};
use follow::{Followed, SegmentTable};
use heat::Heat;
use hidden::Hidden;
use hoistway_io::{parallel::lock, sys};
use namespaces::Namespaces;
use recover::WriterOptions;
use root::{Limits, Monotonic, Root};
use segment::Segment;
use slots::ClaimEnd;
use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError, RwLock, TryLockError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use uuid::Uuid;
use writer::{COUNT_BITS, Writer, stride_of};

/// Part of the capacity that descriptions of namespaces may take.
const NAMESPACES_PART: u64 = 4;
/// Blocks that take no time to look through.
const FEW_BLOCKS: u64 = 1 << 18;
/// Blocks that are counted at a time.
const PAGE_OF_BLOCKS: usize = 4096;

/// The layout.
#[derive(Debug)]
pub(crate) struct Segments {
    shared: Arc<SegmentsShared>,
    /// The writer of this process and its options; `None` if the store was opened for reading only.
    access: Option<WriteAccess>,
    followed: Followed,
    lost_on_recovery: u64,
    recovery: Duration,
}

/// The state of a process that may write.
#[derive(Debug)]
struct WriteAccess {
    options: WriterOptions,
    creation: Creation,
    /// Another one takes its place when the store's directory is emptied or replaced.
    writer: RwLock<Arc<Writer>>,
    /// Held by the thread that looks whether that has happened.
    healing: Mutex<()>,
}

/// The parts of the environment that tests replace.
struct Surroundings {
    /// The wall clock, in seconds since 1970. Only times of expiry are compared with it.
    clock: Box<dyn Fn() -> u32 + Send + Sync>,
    /// The monotonic clock.
    monotonic: Monotonic,
    /// Names of new writers.
    new_id: Box<dyn Fn() -> Uuid + Send + Sync>,
    /// Most blocks that are looked through while a store waits.
    few_blocks: u64,
}

/// The state that all parts of the layout share.
struct SegmentsShared {
    disk: Arc<dyn Disk>,
    root: Root,
    index: Index,
    namespaces: Namespaces,
    /// Held, shared, from taking a namespace's number to having a block of it; held alone to give numbers back.
    numbering: RwLock<()>,
    segments: RwLock<SegmentTable>,
    /// For each writer, the blocks that a sync covers.
    proven_from: RwLock<HashMap<u16, ProvenFrom>>,
    observed: Observed,
    /// Copies of blocks that are found elsewhere.
    hidden: Hidden,
    /// Use of blocks across processes.
    heat: Heat,
    /// The time by which expired blocks are deleted.
    steady: Steady,
    /// Bytes of the files of all processes, when that was last looked at.
    taken: AtomicU64,
    surroundings: Surroundings,
}

/// The layout's state of a block that was found.
#[derive(Debug)]
struct FoundToken {
    fingerprint: Fingerprint,
    entry: Entry,
    /// Whose it is: numbers in the index are given to others in time.
    writer: Uuid,
    _hold: ReadHold,
}

impl Segments {
    /// Opens a store at the root that the options name.
    pub(crate) fn open(options: &StoreOptions) -> Result<Self> {
        let start = Instant::now();
        let surroundings = Surroundings {
            clock: Box::new(format::now_seconds),
            monotonic: Arc::new(move || start.elapsed()),
            new_id: Box::new(Uuid::new_v4),
            few_blocks: FEW_BLOCKS,
        };
        // Segments of all writers are kept open.
        sys::machine::raise_open_files();
        Self::open_on(Arc::new(RealDisk), options, surroundings)
    }

    fn open_on(disk: Arc<dyn Disk>, options: &StoreOptions, surroundings: Surroundings) -> Result<Self> {
        let start = Instant::now();
        let writes = options.access == StoreAccess::ReadWrite;
        let writer_options = match (writes, options.capacity_bytes) {
            (true, None) => {
                return Err(Error::InvalidOption {
                    option: "capacity_bytes",
                    value: "none".into(),
                    reason: "a store that is written to needs a limit".into(),
                });
            }
            (true, Some(capacity)) => Some(WriterOptions {
                limits: Limits { capacity, min_free: options.min_free_bytes },
                durability: options.durability,
                segment_bytes: options.segment_bytes,
                for_upkeep: options.for_upkeep,
            }),
            (false, _) => None,
        };
        writer_options.as_ref().map_or(Ok(()), WriterOptions::check)?;
        let creation = if writes { options.creation } else { Creation::Nothing };
        let root = Root::open(Arc::clone(&disk), &options.root, creation, surroundings.monotonic.clone())?;
        let (eviction, admission) = (options.eviction, options.admission);
        let shared = Arc::new(SegmentsShared {
            disk,
            root,
            index: Index::new(IndexOptions { eviction, admission }),
            namespaces: Namespaces::default(),
            numbering: RwLock::default(),
            segments: RwLock::default(),
            proven_from: RwLock::default(),
            observed: Observed::default(),
            hidden: Hidden::default(),
            heat: Heat::default(),
            steady: Steady::default(),
            taken: AtomicU64::new(0),
            surroundings,
        });
        shared.steady_now();
        // The blocks of this process first: their namespaces keep the numbers that its logs give them.
        let open = |options: WriterOptions| -> Result<_> {
            let (writer, lost) = Writer::open(Arc::clone(&shared), &options)?;
            Ok((
                WriteAccess { options, creation, writer: RwLock::new(writer), healing: Mutex::default() },
                lost,
            ))
        };
        let opened = writer_options.map(open).transpose()?;
        let (access, lost_on_recovery) = opened.map_or((None, 0), |(access, lost)| (Some(access), lost));
        if lost_on_recovery > 0 {
            let root = shared.root.path.display();
            shared.observed.damage(
                0,
                format!("{lost_on_recovery} blocks or records in {root} were damaged and are lost"),
            );
        }
        let followed = Followed::default();
        if let Err(error) = followed.follow(&shared, access.as_ref().map(|access| access.writer().id)) {
            tracing::warn!(%error, "not all blocks of other writers are found");
        }
        if access.is_none()
            && let Err(error) = shared.count_taken()
        {
            tracing::warn!(%error, "it is not known how much room is taken");
        }
        if let Some(access) = &access {
            // Numbers that no block needs any more are for others.
            for (number, id) in shared.namespaces.all() {
                let totals = shared.index.totals(Some(number));
                if totals.own_blocks + totals.foreign_blocks == 0 {
                    shared.namespaces.forget(id);
                    lock(&access.writer().logged).remove(&number);
                }
            }
        }
        Ok(Self { shared, access, followed, lost_on_recovery, recovery: start.elapsed() })
    }

    fn writer(&self) -> Result<Arc<Writer>> {
        self.own_writer().ok_or_else(|| Error::ReadOnly { path: self.shared.root.path.clone() })
    }

    /// The writer of this process, if it may write.
    fn own_writer(&self) -> Option<Arc<Writer>> {
        self.access.as_ref().map(WriteAccess::writer)
    }

    /// Goes on in a new directory if the one of this process was removed, or the store's was replaced. All its blocks are
    /// gone with it, or found as another's if it comes back. Fails, and is tried again, where no store may be made. Does
    /// nothing while another thread does this.
    fn heal(&self, access: &WriteAccess) -> Result<()> {
        let _alone = match access.healing.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(()),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Ok(alone) => alone,
        };
        let writer = access.writer();
        // Once it was gone, its blocks are not in the index any more: it may not go on where it was.
        if writer.is_there()? && !writer.is_gone.load(Ordering::Acquire) {
            return writer.heal();
        }
        let shared = &self.shared;
        let gone = writer.leave();
        shared.segments_of(0).into_iter().for_each(|number| shared.forget_segment(0, number));
        if !shared.root.is_there()? {
            shared.root.open_again(access.creation)?;
        }
        let restarted = Writer::restart(Arc::clone(shared), &access.options, &writer)?;
        let reason = format!(
            "{} was removed or replaced, and {} blocks with it; this process goes on in {}",
            writer.directory.display(),
            gone.len(),
            restarted.directory.display()
        );
        *access.writer.write().unwrap_or_else(PoisonError::into_inner) = restarted;
        shared.observed.note(EventKind::WriterRestarted, reason);
        shared.namespaces.opened().into_iter().try_for_each(|(id, description)| {
            namespaces::describe(&*shared.disk, &shared.root, id, &description)
        })
    }

    /// Whether a block of another writer is still where it was found.
    fn is_still_there(&self, token: &FoundToken) -> bool {
        let (writer, sequence) = (token.writer, token.entry.sequence);
        let has = self.followed.still_has(&self.shared, writer, &token.fingerprint, sequence);
        has.unwrap_or_else(|error| {
            tracing::warn!(%error, "the log of another writer cannot be read");
            false
        })
    }

    /// An error if one more description would leave too little of the capacity to blocks.
    fn expect_room_for(&self, id: NamespaceId, description: &str) -> Result<()> {
        let Some(access) = &self.access else { return Ok(()) };
        let limits = access.options.limits;
        if access.options.for_upkeep || self.shared.root.is_described(id) {
            return Ok(());
        }
        let taken = self.shared.root.charges(&limits)?.namespaces;
        let most = limits.capacity / NAMESPACES_PART;
        if self.shared.root.is_described(id) || taken.saturating_add(description.len() as u64) <= most {
            return Ok(());
        }
        Err(Error::InvalidRequest(format!(
            "the descriptions of the namespaces of {} take {taken} bytes, and may take {most}: those of namespaces without \
             blocks go once no process has them open",
            self.shared.root.path.display()
        )))
    }

    /// Describes open namespaces again whose descriptions were removed by a process that did not have them open.
    fn describe_again(&self) -> Result<()> {
        let shared = &self.shared;
        let mut gone =
            shared.namespaces.opened().into_iter().filter(|(id, _)| !shared.root.is_described(*id));
        gone.try_for_each(|(id, text)| namespaces::describe(&*shared.disk, &shared.root, id, &text))
    }

    /// Notes which processes have ended, as far as quotas depend on that.
    fn note_ended(&self) -> Result<()> {
        let shared = &self.shared;
        if !shared.index.have_quota() {
            return Ok(());
        }
        let owners = self.followed.owners();
        let writers = shared.root.writers()?;
        let ended = writers.iter().filter(|writer| !writer.says_it_lives(&*shared.disk, shared.now()));
        shared.index.set_ended(ended.filter_map(|writer| owners.get(&writer.id).copied()).collect());
        Ok(())
    }

    fn invalidate_token(&self, token: &FoundToken) {
        if token.entry.is_own() {
            if let Some(writer) = self.own_writer() {
                writer.invalidate(&token.fingerprint, token.entry.sequence);
            }
        } else {
            let is_it =
                |entry: &Entry, _| entry.owner == token.entry.owner && entry.sequence == token.entry.sequence;
            let gone = self.shared.index.remove_if(&token.fingerprint, is_it);
            self.shared.gone(gone.as_slice());
        }
        self.shared.observed.corrupt();
    }
}

impl WriteAccess {
    fn writer(&self) -> Arc<Writer> {
        Arc::clone(&self.writer.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Layout for Segments {
    fn contains(&self, _: NamespaceId, blocks: &[(&[u8], Fingerprint)], found: &mut [bool]) {
        self.shared.index.contains_many(blocks, |(_, fingerprint)| fingerprint, self.shared.now(), found);
    }

    fn reserve(&self, block: NewBlock) -> Result<Reservation> {
        self.writer()?.reserve(block)
    }

    fn room_stamp(&self) -> u64 {
        self.own_writer().map_or(0, |writer| writer.room_stamp())
    }

    fn wait_for_room(&self, stamp: u64, until: Instant) -> RoomWait {
        self.own_writer().map_or(RoomWait::Nothing, |writer| writer.wait_for_room(stamp, until))
    }

    fn prepare(&self, blocks: &mut [Written]) -> Vec<Result<()>> {
        match self.own_writer() {
            Some(writer) => writer.prepare(blocks),
            None => blocks.iter().map(|_| Ok(())).collect(),
        }
    }

    fn commit(&self, blocks: Vec<Written>) -> Vec<Result<()>> {
        match self.writer() {
            Ok(writer) => writer.commit(blocks),
            Err(_) => blocks.iter().map(|_| self.writer().map(|_| ())).collect(),
        }
    }

    fn fail(&self, claim: Claim) {
        claim::give_up(claim, ClaimEnd::Failed);
    }

    fn lose(&self, claim: Claim) {
        claim::give_up(claim, ClaimEnd::Lost);
    }

    fn find(&self, _: NamespaceId, _: &Key, fingerprint: Fingerprint) -> Lookup {
        let (entry, hold) = match self.shared.index.get(&fingerprint, self.shared.now()) {
            index::Lookup::Found(entry, hold) => (entry, hold),
            index::Lookup::Miss => return Lookup::Miss,
            index::Lookup::Expired => return Lookup::Expired,
        };
        let Some(segment) = self.shared.segment(entry.owner, entry.slot.segment) else { return Lookup::Miss };
        let Some(offset) = segment.head.offset(entry.slot.slot) else { return Lookup::Miss };
        let place = BlockPlace {
            file: Arc::clone(&segment.data).into(),
            header: Some(offset),
            payload: offset + HEADER_LEN as u64,
            stride: stride_of(&entry),
            shards: u32::from(entry.flags) + 1,
        };
        let (is_held, writer) = (entry.is_own(), segment.head.writer);
        let is_proven = self.shared.is_proven(&entry);
        let token = Box::new(FoundToken { fingerprint, entry, writer, _hold: hold });
        Lookup::Found(Found { place, is_held, is_proven, token })
    }

    fn check(&self, found: &Found, key: &Key, header: &[u8]) -> Verdict {
        let Some(token) = found.token.downcast_ref::<FoundToken>() else {
            return Verdict::Corrupt("it was found by another layout".into());
        };
        let is_own = token.entry.is_own();
        let header = match BlockHeader::parse(header) {
            Ok(header) => header,
            // Another process may be writing it just now.
            Err(_) if !is_own && !self.is_still_there(token) => return Verdict::Moved,
            Err(why) => return Verdict::Corrupt(format!("its header is damaged: {why}")),
        };
        if header.fingerprint != token.fingerprint || header.sequence != token.entry.sequence {
            // A held place of this writer is not given to another block, so this block was never written.
            let lost = || Verdict::Corrupt("its place still has another block".into());
            return if is_own { lost() } else { Verdict::Moved };
        }
        if header.key != *key {
            return Verdict::Moved;
        }
        if header.stride != found.place.stride || header.table.0.len() != usize::from(token.entry.flags) + 1 {
            return Verdict::Corrupt("its header and the index log disagree about its shards".into());
        }
        Verdict::Good(header.table)
    }

    fn invalidate(&self, found: &Found) {
        if let Some(token) = found.token.downcast_ref::<FoundToken>() {
            self.invalidate_token(token);
        }
    }

    fn touch(&self, blocks: &[Fingerprint]) {
        let foreign = self.shared.index.touch(blocks);
        if self.access.is_some() {
            self.shared.heat.used(foreign);
        }
    }

    fn pin(&self, block: Fingerprint) -> bool {
        self.shared.index.pin(&block)
    }

    fn unpin(&self, block: Fingerprint) {
        self.shared.index.unpin(&block);
    }
}

impl Administration for Segments {
    fn open_namespace(&self, id: NamespaceId, description: &str, options: NamespaceOptions) -> Result<()> {
        let number = self.shared.namespaces.number(id)?;
        self.shared.namespaces.set_options(id, options);
        self.shared.index.set_quota(number, options.quota_bytes);
        if self.access.is_none() {
            return Ok(());
        }
        self.expect_room_for(id, description)?;
        namespaces::describe(&*self.shared.disk, &self.shared.root, id, description)?;
        self.shared.namespaces.set_description(id, description);
        Ok(())
    }

    fn close_namespace(&self, id: NamespaceId) -> Result<bool> {
        let shared = &self.shared;
        let (Some(writer), Some(number)) = (self.own_writer(), shared.namespaces.known(id)) else {
            return Ok(false);
        };
        // Those who have got its number rely on it until they have a block of it.
        let Ok(_alone) = shared.numbering.try_write() else { return Ok(false) };
        let totals = shared.index.totals(Some(number));
        if totals.own_blocks + totals.foreign_blocks > 0 || writer.has_pending(number) {
            return Ok(false);
        }
        shared.namespaces.forget(id);
        shared.index.set_quota(number, None);
        lock(&writer.logged).remove(&number);
        directory::remove_description(&*shared.disk, &shared.root.path, id)?;
        Ok(true)
    }

    fn namespaces(&self) -> Result<Vec<(NamespaceId, String)>> {
        namespaces::described(&*self.shared.disk, &self.shared.root)
    }

    fn delete(&self, namespace: NamespaceId, blocks: &[(&[u8], Fingerprint)]) -> Result<usize> {
        self.writer()?.delete(namespace, blocks)
    }

    fn clear(&self, namespace: NamespaceId) -> Result<usize> {
        self.writer()?.clear(namespace)
    }

    fn evict(&self, bytes: u64) -> Result<u64> {
        let want = Want { from: Candidates::Anywhere, bytes };
        let evicted = self.writer()?.evict(&want)?;
        Ok(evicted.iter().map(|gone| gone.entry.slot_bytes).sum())
    }

    fn list(&self, cursor: u64, most: usize, into: &mut Vec<Listed>) -> Option<u64> {
        let namespace = |number| self.shared.namespaces.id(number);
        list_blocks(&self.shared.index, cursor, most, into, namespace)
    }

    fn key_of(&self, block: Fingerprint) -> Result<Option<Key>> {
        let index::Lookup::Found(entry, hold) = self.shared.index.get(&block, self.shared.now()) else {
            return Ok(None);
        };
        let Some(segment) = self.shared.segment(entry.owner, entry.slot.segment) else { return Ok(None) };
        let Some(offset) = segment.head.offset(entry.slot.slot) else { return Ok(None) };
        let mut header = vec![0; HEADER_LEN];
        let read =
            read_full(&*segment.file, &mut header, offset).map_err(failed("reading", segment.data.path()))?;
        let reason = match BlockHeader::parse(&header[..read]) {
            Ok(header) if header.fingerprint == block => return Ok(Some(header.key)),
            Ok(_) => "its place has another block".into(),
            Err(why) => format!("its header is damaged: {why}"),
        };
        let token = FoundToken { fingerprint: block, entry, writer: segment.head.writer, _hold: hold };
        // Another process may have given the place to another block, or may be writing it just now.
        if !entry.is_own() && !self.is_still_there(&token) {
            return Ok(None);
        }
        self.invalidate_token(&token);
        Err(Error::DamagedBlock { fingerprint: block, reason })
    }

    fn maintain(&self) -> Result<()> {
        let Some(access) = &self.access else { return self.follow().and(self.shared.count_taken()) };
        access.writer().check_open()?;
        self.heal(access)?;
        let followed = self.follow();
        let writer = access.writer();
        if writer.is_gone.load(Ordering::Acquire) {
            // Another thread is about to go on elsewhere.
            return followed;
        }
        let alive = writer.say_alive();
        // Before room is looked for: a log in doubt takes no tombstones.
        let checkpoint = writer.replace_log_in_doubt().and_then(|()| writer.checkpoint_if_due());
        let heat = writer.share_heat();
        let ended = self.note_ended();
        // Stores do not wait for the syncs.
        let room = writer.maintain_room().and_then(|()| writer.make_spare());
        let removed = writer.sync_removed();
        writer.prepare_sweep();
        // Those who wait find what has been looked up.
        writer.note_room();
        let described = self.describe_again();
        // Those who store such blocks again need not wait.
        let tombstones = if writer.log.is_in_doubt() { Ok(()) } else { writer.sync_tombstones() };
        let all = followed.and(alive).and(checkpoint).and(heat).and(ended);
        all.and(room).and(removed).and(described).and(tombstones)
    }

    fn usage(&self) -> Usage {
        let totals = self.shared.index.totals(None);
        let slots_of = |writer: Arc<Writer>| {
            let slots = lock(&writer.slots);
            let segments = slots.all().filter_map(|segment| segment.head.file_len());
            segments.sum::<u64>() + writer.log.len()
        };
        let allocated_bytes = self.own_writer().map_or(0, slots_of);
        Usage {
            blocks: totals.own_blocks + totals.foreign_blocks,
            payload_bytes: totals.own_payload_bytes + totals.foreign_payload_bytes,
            allocated_bytes,
            // Counted now and then; ours may have grown since.
            root_bytes: self.shared.taken.load(Ordering::Relaxed).max(allocated_bytes),
            lost_on_recovery: self.lost_on_recovery,
            recovery: self.recovery,
            index_bytes: self.shared.index.heap_bytes(),
            ..self.shared.observed.usage()
        }
    }

    fn observed(&self) -> &Observed {
        &self.shared.observed
    }

    fn close(&self) -> Result<()> {
        self.own_writer().map_or(Ok(()), |writer| writer.close())
    }
}

impl Sharing for Segments {
    fn is_still_there(&self, found: &Found) -> bool {
        let token = found.token.downcast_ref::<FoundToken>();
        token.is_some_and(|token| token.entry.is_own() || self.is_still_there(token))
    }

    fn follow(&self) -> Result<()> {
        self.followed.follow(&self.shared, self.own_writer().map(|writer| writer.id))
    }

    fn writers(&self) -> Result<Vec<WriterStats>> {
        let mut owners = self.followed.owners();
        owners.extend(self.own_writer().map(|writer| (writer.id, 0)));
        let mut blocks = HashMap::<u16, u64>::new();
        let (mut cursor, mut some) = (Some(0), Vec::new());
        while let Some(from) = cursor {
            cursor = self.shared.index.list(from, PAGE_OF_BLOCKS, &mut some);
            for (_, entry) in some.drain(..) {
                *blocks.entry(entry.owner).or_default() += 1;
            }
        }
        let charges = self.shared.root.charges(&Limits { capacity: 0, min_free: 0 })?;
        // Without it, a writer that opens its directory just now might find it in use. It is not waited for.
        let locked = self.shared.root.try_lock().ok().flatten();
        let described = |directory: &WriterDirectory| {
            let is_leased =
                locked.as_ref().and_then(|locked| self.shared.root.is_leased(&directory.path, locked));
            let known = directory.describe(&*self.shared.disk, self.shared.now());
            let owner = owners.get(&directory.id);
            WriterStats {
                allocated_bytes: charges.taken_by.get(&directory.id).copied(),
                blocks: owner.map(|owner| blocks.get(owner).copied().unwrap_or(0)),
                // A writer that was killed may have said a moment ago that it lives.
                is_alive: known.is_alive && is_leased != Some(false),
                ..known
            }
        };
        Ok(self.shared.root.writers()?.iter().map(described).collect())
    }
}

impl SegmentsShared {
    /// Counts the bytes that all files take, for a process that has no limits to keep.
    fn count_taken(&self) -> Result<()> {
        let charges = self.root.charges(&Limits { capacity: 0, min_free: 0 })?;
        self.taken.store(charges.taken, Ordering::Relaxed);
        Ok(())
    }

    fn now(&self) -> u32 {
        (self.surroundings.clock)()
    }

    /// The time by which expired blocks are deleted.
    fn steady_now(&self) -> u32 {
        self.steady.now(self.now(), (self.surroundings.monotonic)())
    }

    fn segment(&self, owner: u16, number: u32) -> Option<Arc<Segment>> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        segments.get(&(owner, number)).cloned()
    }

    /// Whether a sync covers a block, so that a power cut took none of its bytes.
    fn is_proven(&self, entry: &Entry) -> bool {
        let proven_from = self.proven_from.read().unwrap_or_else(PoisonError::into_inner);
        let of_writer = proven_from.get(&entry.owner).copied().unwrap_or_default();
        of_writer.covers(entry.sequence >> COUNT_BITS)
    }

    fn set_proven_from(&self, owner: u16, proven_from: ProvenFrom) {
        let mut of_writers = self.proven_from.write().unwrap_or_else(PoisonError::into_inner);
        of_writers.insert(owner, proven_from);
    }

    fn segments_of(&self, owner: u16) -> Vec<u32> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        segments.keys().filter(|(whose, _)| *whose == owner).map(|(_, number)| *number).collect()
    }

    fn know_segment(&self, owner: u16, segment: &Arc<Segment>) {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        segments.insert((owner, segment.head.number), Arc::clone(segment));
    }

    fn forget_segment(&self, owner: u16, number: u32) {
        self.segments.write().unwrap_or_else(PoisonError::into_inner).remove(&(owner, number));
    }

    /// Blocks are not found any more where they were: other copies of them may be.
    fn gone(&self, gone: &[index::Removed]) {
        self.hidden.reveal(&self.index, gone);
    }

    /// Forgets blocks of other writers for which `is_it`, and copies for which `is_hidden_it`.
    fn forget_all(
        &self,
        is_it: impl Fn(&Fingerprint, &Entry) -> bool,
        is_hidden_it: impl Fn(&Entry) -> bool,
    ) {
        self.hidden.forget_all(&is_hidden_it);
        let gone = self.index.remove_all(|fingerprint, entry, _| is_it(fingerprint, entry));
        // One that was found may have been replaced, and hidden, in between.
        self.hidden.forget_all(is_hidden_it);
        self.gone(&gone);
    }

    /// Forgets all that another writer had.
    fn forget_owner(&self, owner: u16) {
        self.forget_all(|_, entry| entry.owner == owner, |entry| entry.owner == owner);
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        segments.retain(|(whose, _), _| *whose != owner);
        self.proven_from.write().unwrap_or_else(PoisonError::into_inner).remove(&owner);
    }
}

impl fmt::Debug for SegmentsShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentsShared").field("root", &self.root.path).field("index", &self.index).finish()
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").field("directory", &self.directory).field("epoch", &self.epoch).finish()
    }
}
