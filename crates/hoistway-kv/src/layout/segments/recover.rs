//! Takes over a writer's directory: a new one, or that of a process that is gone, in any state that a crash left.
//!
//! No sync is known to cover the end of its log, so that end is written again. The next checkpoint is left to upkeep.
#![forbid(unsafe_code)]

use super::{
    SegmentsShared, WriterDirectory,
    checkpoint::{Checkpoints, remove_logs},
    claim::Pending,
    failed,
    log::{Log, Owner, Start},
    names::{self, WriterFile},
    replay::{CHUNK, LogRange, Replayed, list, replay},
    room::is_full,
    root::Limits,
    segment::Segment,
    slots::{Slots, UsedSlots, Waiting},
    writer::{COUNT_BITS, Writer, own_entry},
};
use crate::{
    Durability, Error, Result,
    disk::{DiskFile, Extend, FileAccess, read_full, write_full},
    format::{
        BLOCK_LEN, Invalid,
        lease::{Account, Lease, LockDomain},
        record::{Begin, BlockRecord, ProvenFrom, RECORD_LEN, Sums},
        segment::{HEAD_LEN, SegmentHead},
    },
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashSet},
    io,
    sync::{
        Arc, Condvar, Mutex, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use uuid::Uuid;

/// The options of a writer.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriterOptions {
    pub(super) limits: Limits,
    pub(super) durability: Durability,
    /// Bytes of a segment; by default, so many that a store has some.
    pub(super) segment_bytes: Option<u64>,
    /// Whether the store is only tended.
    pub(super) for_upkeep: bool,
}

impl WriterOptions {
    /// Bytes of a segment.
    fn segment_bytes(&self) -> u64 {
        let usual = (self.limits.capacity / 32).clamp(64 << 10, USUAL_SEGMENT) / BLOCK_LEN * BLOCK_LEN;
        self.segment_bytes.unwrap_or(usual)
    }

    /// An error if the capacity is too small for a segment.
    pub(super) fn check(&self) -> Result<()> {
        let capacity = self.limits.capacity;
        let needed = self.segment_bytes().saturating_add(self.limits.writer_bytes());
        if self.for_upkeep || needed <= capacity {
            return Ok(());
        }
        let segment = self.segment_bytes();
        if self.segment_bytes.is_some() && segment > capacity {
            return Err(Error::InvalidOption {
                option: "segment_bytes",
                value: segment.to_string(),
                reason: format!(
                    "it is more than the capacity of {capacity} bytes, so nothing could be stored"
                ),
            });
        }
        Err(Error::InvalidOption {
            option: "capacity_bytes",
            value: capacity.to_string(),
            reason: format!(
                "nothing could be stored: a segment takes {segment} bytes, and logs {} bytes",
                self.limits.writer_bytes()
            ),
        })
    }
}

/// Directories that are made, one after the other, where other processes take them over at once.
const MOST_DIRECTORIES: usize = 16;
/// Bytes of a segment where the options do not say.
const USUAL_SEGMENT: u64 = 1 << 30;
/// Part of that which is worth a segment where there is no more room, or no larger share of it.
pub(super) const LEAST_PART: u64 = 8;

impl Writer {
    /// Takes over the directory of a writer that is gone, or makes one. Also says how many blocks were lost.
    pub(super) fn open(shared: Arc<SegmentsShared>, options: &WriterOptions) -> Result<(Arc<Self>, u64)> {
        let limits = options.limits;
        let mut unusable = HashSet::new();
        let recovered = loop {
            let Some((directory, lease)) = adopt(&shared, &limits, &mut unusable)? else {
                let (directory, lease) = make_directory(&shared)?;
                break Recovered::read(&shared, options, directory, lease)?;
            };
            let (id, path) = (directory.id, directory.path.clone());
            match Recovered::read(&shared, options, directory, lease) {
                Ok(recovered) => break recovered,
                // Another directory would have no more room.
                Err(error) if is_full(&error) => return Err(error),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a writer's directory is not taken over");
                    unusable.insert(id);
                }
            }
        };
        let (writer, lost) = Self::of(shared, options, recovered)?;
        Ok((writer, lost + unusable.len() as u64))
    }

    /// The state from which a process goes on whose directory is gone. Its numbers go on, so that none of the blocks
    /// that are still read, or come to be committed, is taken for another one.
    pub(super) fn restart(
        shared: Arc<SegmentsShared>,
        options: &WriterOptions,
        before: &Self,
    ) -> Result<Arc<Self>> {
        let (directory, lease) = make_directory(&shared)?;
        let mut recovered = Recovered::read(&shared, options, directory, lease)?;
        let next_segment = before.next_segment.load(Ordering::Acquire);
        recovered.replayed.next_segment = u32::try_from(next_segment).unwrap_or(u32::MAX);
        let (writer, _) = Self::of(shared, options, recovered)?;
        let count = before.next_sequence.load(Ordering::Relaxed) & ((1 << COUNT_BITS) - 1);
        writer.next_sequence.fetch_add(count, Ordering::Relaxed);
        Ok(writer)
    }

    fn of(
        shared: Arc<SegmentsShared>,
        options: &WriterOptions,
        recovered: Recovered,
    ) -> Result<(Arc<Self>, u64)> {
        let Recovered { directory, lease, epoch, proven_from, replayed, segments, order, lost, start, log } =
            recovered;
        let limits = options.limits;
        shared.set_proven_from(0, proven_from);
        let next_segment = replayed.next_segment.max(segments.highest.saturating_add(1));
        replayed.namespaces.iter().for_each(|(number, id)| shared.namespaces.adopt(*number, *id));
        // Upkeep leaves what was said before.
        let before = directory.lease(&*shared.disk).filter(|_| options.for_upkeep);
        let (said_capacity, said_durability) = match (options.for_upkeep, before) {
            (true, lease) => {
                (lease.map_or(0, |lease| lease.capacity), lease.and_then(|lease| lease.durability))
            }
            (false, _) => (limits.capacity, Some(options.durability)),
        };
        let segment_bytes = options.segment_bytes();
        let largest = options.segment_bytes.unwrap_or(segment_bytes.max(limits.capacity / 4));
        let least_segment = options.segment_bytes.unwrap_or(segment_bytes / LEAST_PART);
        let mut checkpoints = Checkpoints::new(replayed.generation, replayed.first_log, replayed.log_bytes);
        // A log that was closed has its head only.
        if replayed.log_bytes > RECORD_LEN as u64 {
            checkpoints.begin(start);
        }
        let mut slots = Slots::default();
        let has_blocks_without_sums = take_in(&shared, &mut slots, segments, &replayed.blocks, &order);
        let writer = Self {
            id: directory.id,
            directory: directory.path,
            epoch,
            proven_from,
            lease,
            limits,
            said_capacity,
            said_durability,
            segment_bytes,
            least_segment,
            largest_block: largest.saturating_sub(HEAD_LEN),
            durability: options.durability,
            next_sequence: AtomicU64::new(u64::from(epoch) << COUNT_BITS),
            next_segment: AtomicU64::new(next_segment.into()),
            log,
            slots: Mutex::new(slots),
            pending: Mutex::new(Pending::default()),
            room_changed: Condvar::new(),
            logged: Mutex::new(replayed.namespaces.keys().copied().collect()),
            is_gone: AtomicBool::new(false),
            missing_tombstones: Mutex::default(),
            unsynced_tombstones: Mutex::default(),
            releasing: Mutex::default(),
            publishing: RwLock::default(),
            checkpoints: Mutex::new(checkpoints),
            making_room: Mutex::default(),
            sweep: Mutex::default(),
            has_blocks_without_sums: AtomicBool::new(has_blocks_without_sums),
            has_stretches_to_come: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
            was_full: AtomicBool::new(false),
            spare: Mutex::default(),
            has_told_of_room: AtomicBool::new(false),
            is_refused: AtomicBool::new(false),
            is_locked_out: AtomicBool::new(false),
            removed: AtomicU64::new(0),
            synced_names: Mutex::default(),
            wanted: AtomicU64::new(0),
            asked: Mutex::default(),
            said: Mutex::default(),
            is_closed: AtomicBool::new(false),
            shared,
        };
        if lost > 0 || replayed.unproven.len() > 1 {
            // Else the next opening would find the same damage, and take newer blocks for its victims. And of processes
            // that are killed before their first checkpoint, each would leave a log.
            let mut known = super::lock(&writer.checkpoints);
            match writer.forget_before(&mut known, start) {
                // It is tried again; nothing is stored until then.
                Err(error) if is_full(&error) => {
                    tracing::warn!(%error, "no room for a checkpoint");
                    writer.log.doubt();
                }
                forgotten => forgotten?,
            }
        }
        writer.say_alive()?;
        Ok((Arc::new(writer), lost))
    }

    /// Writes down that this process lives, and what it would like.
    pub(super) fn say_alive(&self) -> Result<()> {
        let (now, wanted_bytes) = (u64::from(self.shared.now()), self.wanted.load(Ordering::Acquire));
        let mut said = super::lock(&self.said);
        if *said == Some((now, wanted_bytes)) {
            return Ok(());
        }
        self.write_lease(now, wanted_bytes)?;
        *said = Some((now, wanted_bytes));
        Ok(())
    }

    fn write_lease(&self, heartbeat: u64, wanted_bytes: u64) -> Result<()> {
        let lease = Lease {
            writer: self.id,
            epoch: self.epoch,
            process: std::process::id(),
            heartbeat,
            wanted_bytes,
            capacity: self.said_capacity,
            durability: self.said_durability,
            account: Account::default(),
            lock_domain: LockDomain::default(),
        };
        let path = self.directory.join(names::LEASE);
        write_full(&*self.lease, &lease.to_bytes(), 0).map_err(failed("writing to", &path))
    }

    /// Writes down what is only in memory, and ends.
    pub(super) fn close(&self) -> Result<()> {
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        if self.durability == Durability::None {
            let segments: Vec<_> = super::lock(&self.slots).all().cloned().collect();
            let mut is_proven = true;
            for segment in segments {
                segment.sync().map_err(failed("syncing", segment.data.path()))?;
                // What was to be written before a sync that failed may be lost.
                is_proven &= segment.failures() == 0;
            }
            if is_proven {
                self.log.set_proven_from(self.proven_from);
            }
        }
        if !self.is_gone.load(Ordering::Acquire) {
            self.replace_log_in_doubt()?;
            self.collect()?;
            self.checkpoint_at_end()?;
            self.write_lease(0, 0)?;
        }
        self.lease.unlock().map_err(failed("unlocking", &self.directory.join(names::LEASE)))
    }
}

/// The state of a directory before this process takes it over.
struct Recovered {
    directory: WriterDirectory,
    lease: Box<dyn DiskFile>,
    epoch: u32,
    /// Which blocks were synced, those of this opening included.
    proven_from: ProvenFrom,
    replayed: Replayed,
    segments: OwnSegments,
    /// Places in `replayed` of the blocks that are there, oldest first.
    order: Vec<usize>,
    lost: u64,
    /// Of the new log.
    start: Start,
    log: Log,
}

impl Recovered {
    fn read(
        shared: &SegmentsShared,
        options: &WriterOptions,
        directory: WriterDirectory,
        lease: Box<dyn DiskFile>,
    ) -> Result<Self> {
        let limits = &options.limits;
        let replayed = replay(&*shared.disk, &directory.path, directory.id)?;
        let epoch = replayed.epoch.checked_add(1).filter(|epoch| *epoch < 1 << (u64::BITS - COUNT_BITS));
        let epoch = epoch.ok_or_else(|| {
            Error::Internal(format!("{} has been opened too often", directory.path.display()))
        })?;
        for range in &replayed.unproven {
            write_again(shared, &directory, range)?;
        }
        let mut segments = OwnSegments::open(shared, limits, &directory)?;
        remove_leftovers(shared, &directory, &replayed)?;
        let (order, lost) = sift(&replayed, &mut segments);
        let lost = lost + replayed.lost;
        segments.remove_unused(shared, &directory)?;
        // What is lost to us without a tombstone is lost to those who follow, too.
        let begin = if lost > 0 { Begin::Anew } else { Begin::Next };
        let start = Start::new(replayed.next_log, replayed.next_record, begin);
        let ahead = limits.least_log().min(1 << 20);
        let disk = Arc::clone(&shared.disk);
        let proven_from = match replayed.proven_from {
            ProvenFrom::UNKNOWN => ProvenFrom(epoch),
            known => known,
        };
        let said = match options.durability {
            // Until it is closed, or for ever if it never is.
            Durability::None => ProvenFrom(epoch + 1),
            Durability::Batched | Durability::Sync => proven_from,
        };
        let owner = Owner { writer: directory.id, epoch, proven_from: said };
        let log = Log::create(disk, &directory.path, owner, ahead, start)?;
        Ok(Self { directory, lease, epoch, proven_from, replayed, segments, order, lost, start, log })
    }
}

/// Brings a part of a log to the disk that may be in memory only. Where a sync failed before, another one alone would
/// not: the system may take for clean what the disk never got.
fn write_again(shared: &SegmentsShared, directory: &WriterDirectory, range: &LogRange) -> Result<()> {
    let path = directory.path.join(names::log(range.log));
    let file = shared.disk.open(&path, FileAccess::ReadWrite).map_err(failed("opening", &path))?;
    let mut chunk = vec![0; CHUNK];
    let mut offset = range.bytes.start;
    while offset < range.bytes.end {
        let most = usize::try_from(range.bytes.end - offset).map_or(CHUNK, |left| left.min(CHUNK));
        let read = read_full(&*file, &mut chunk[..most], offset).map_err(failed("reading", &path))?;
        if read == 0 {
            break;
        }
        write_full(&*file, &chunk[..read], offset).map_err(failed("writing to", &path))?;
        offset += read as u64;
    }
    file.sync_data().map_err(failed("syncing", &path))
}

/// The directory of a writer that is gone, the one with most, and its lease. Those that cannot be leased are `unusable`, too.
fn adopt(
    shared: &SegmentsShared,
    limits: &Limits,
    unusable: &mut HashSet<Uuid>,
) -> Result<Option<(WriterDirectory, Box<dyn DiskFile>)>> {
    // Where it is not to be had, what others have left is followed instead of adopted.
    let locked = match shared.root.lock() {
        Err(Error::TimedOut { .. }) => return Ok(None),
        locked => locked?,
    };
    shared.root.sweep(&locked)?;
    // What the others have left goes, where room is needed.
    let charges = shared.root.charges(limits)?.of_writers;
    let mut directories = shared.root.writers()?;
    directories.sort_by_key(|directory| Reverse(charges.get(&directory.id).copied()));
    for directory in directories {
        if unusable.contains(&directory.id) {
            continue;
        }
        match shared.root.try_lease(&directory.path, &locked) {
            Ok(Some(lease)) => return Ok(Some((directory, lease))),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "a writer's directory is not taken over");
                unusable.insert(directory.id);
            }
        }
    }
    Ok(None)
}

/// A new directory, and its lease.
fn make_directory(shared: &SegmentsShared) -> Result<(WriterDirectory, Box<dyn DiskFile>)> {
    // Another process may hold it for long.
    let locked = match shared.root.lock() {
        Err(Error::TimedOut { .. }) => None,
        locked => Some(locked?),
    };
    for _ in 1..MOST_DIRECTORIES {
        if let Some(made) = try_make_directory(shared)? {
            // Its lease keeps others away. They do not wait for the disk.
            drop(locked);
            for path in [&made.0.path, &shared.root.path] {
                shared.disk.sync_directory(path).map_err(failed("syncing", path))?;
            }
            return Ok(made);
        }
    }
    drop(locked);
    let root = shared.root.path.display();
    Err(Error::Internal(format!("other processes take over each directory that is made in {root}")))
}

/// A new directory, and its lease; `None` if a process that has the lock of the root, and takes directories over, was faster
/// to make that lease, to lock it, or to remove the directory.
fn try_make_directory(shared: &SegmentsShared) -> Result<Option<(WriterDirectory, Box<dyn DiskFile>)>> {
    let id = (shared.surroundings.new_id)();
    let directory = WriterDirectory::new(&shared.root.path, id);
    let path = &directory.path;
    shared.disk.create_directory(path).map_err(failed("making", path))?;
    let lease_path = path.join(names::LEASE);
    let lease = match shared.disk.open(&lease_path, FileAccess::CreateNew) {
        Err(error) if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) => {
            return Ok(None);
        }
        lease => lease.map_err(failed("making", &lease_path))?,
    };
    let is_ours = lease.try_lock().map_err(failed("locking", &lease_path))?
        && lease.is_named(&lease_path).map_err(failed("asking for", &lease_path))?;
    if !is_ours {
        return Ok(None);
    }
    Ok(Some((directory, lease)))
}

/// A segment of ours.
struct OwnSegment {
    segment: Arc<Segment>,
    /// Bytes that its file had.
    len: u64,
    /// The slots that have blocks.
    taken: UsedSlots,
    blocks: u32,
}

impl OwnSegment {
    /// Whether a block may be where its record says, in a file of this length.
    fn has(&self, block: &BlockRecord) -> bool {
        let bytes = own_entry(block).slot_bytes;
        self.segment.may_have(block)
            && self.segment.head.extent(block.slot, bytes).is_some_and(|extent| extent.end <= self.len)
    }

    /// Gives a block its place, unless another one has a part of that; whether it does.
    fn take(&mut self, block: &BlockRecord) -> bool {
        let len = self.segment.head.slots_of(own_entry(block).slot_bytes);
        let is_free = self.taken.take(block.slot, len);
        self.blocks += u32::from(is_free);
        is_free
    }
}

/// The segments of a directory that is ours.
struct OwnSegments {
    /// By number.
    whole: BTreeMap<u32, OwnSegment>,
    /// Those whose heads were damaged. They are removed: nothing in them is known.
    damaged: HashSet<u32>,
    /// The highest number of any.
    highest: u32,
}

impl OwnSegments {
    fn open(shared: &SegmentsShared, limits: &Limits, directory: &WriterDirectory) -> Result<Self> {
        let mut segments = Self { whole: BTreeMap::new(), damaged: HashSet::new(), highest: 0 };
        for file in list(&*shared.disk, &directory.path)? {
            let WriterFile::Segment(number) = file else { continue };
            segments.highest = segments.highest.max(number);
            let path = directory.path.join(names::segment(number));
            let access = FileAccess::ReadWrite;
            let opened = Segment::open(&*shared.disk, &path, access, directory.id, number)?;
            let opened = match opened {
                Ok(segment) => {
                    let len = segment.file.len().map_err(failed("reading", &path))?;
                    let whole = segment.head.file_len().unwrap_or(u64::MAX);
                    // Its head is believed as far as there is a file, or a file may be.
                    let is_possible =
                        whole <= len.max(limits.capacity) && segment.head.slots <= SegmentHead::MOST_SLOTS;
                    is_possible.then_some((segment, len, whole)).ok_or(Invalid::Value("it is cut short"))
                }
                Err(why) => Err(why),
            };
            match opened {
                Ok((segment, len, whole)) => {
                    if len < whole {
                        // What was cut off is lost, but its room is not.
                        segment
                            .file
                            .allocate(whole, Extend::Yes)
                            .map_err(failed("making room for", &path))?;
                        segment.sync().map_err(failed("syncing", &path))?;
                    }
                    let taken = UsedSlots::none(segment.head.slots);
                    segments.whole.insert(number, OwnSegment { segment, len, taken, blocks: 0 });
                }
                Err(why) => {
                    tracing::warn!(path = %path.display(), %why, "a segment is lost");
                    shared.disk.remove(&path).map_err(failed("removing", &path))?;
                    segments.damaged.insert(number);
                }
            }
        }
        Ok(segments)
    }

    /// Removes segments without blocks. One that was left behind when it could not be synced may be in memory only, and
    /// nothing tells which those are.
    fn remove_unused(&mut self, shared: &SegmentsShared, directory: &WriterDirectory) -> Result<()> {
        for (number, _) in self.whole.extract_if(.., |_, segment| segment.blocks == 0) {
            let path = directory.path.join(names::segment(number));
            shared.disk.remove(&path).map_err(failed("removing", &path))?;
        }
        Ok(())
    }
}

/// Removes files that never were whole, and logs that no checkpoint needs.
fn remove_leftovers(shared: &SegmentsShared, directory: &WriterDirectory, replayed: &Replayed) -> Result<()> {
    let listing = shared.disk.list(&directory.path).map_err(failed("listing", &directory.path))?;
    let files: Vec<WriterFile> = listing.iter().map(|file| WriterFile::parse(&file.name)).collect();
    for (file, _) in listing.iter().zip(&files).filter(|(_, kind)| **kind == WriterFile::Temporary) {
        let path = directory.path.join(&file.name);
        shared.disk.remove(&path).map_err(failed("removing", &path))?;
    }
    remove_logs(&*shared.disk, &directory.path, files, replayed.oldest_log)
}

/// The blocks that are where they say, by their places in `replayed`, oldest first; and how many are not there. Of two in
/// one place, the newer is there.
fn sift(replayed: &Replayed, segments: &mut OwnSegments) -> (Vec<usize>, u64) {
    let blocks = &replayed.blocks;
    let mut sorted: Vec<(u64, usize)> =
        blocks.iter().enumerate().map(|(place, block)| (block.sequence, place)).collect();
    // Stable, as checkpoints have blocks in runs, of which that makes use.
    sorted.sort_by_key(|(sequence, _)| *sequence);
    let (mut order, mut lost) = (Vec::with_capacity(sorted.len()), 0);
    // Blocks that were written one after the other lie in one segment.
    let mut last: Option<(u32, Option<&mut OwnSegment>)> = None;
    for (_, place) in sorted.into_iter().rev() {
        let block = &blocks[place];
        if !replayed.namespaces.contains_key(&block.namespace) {
            // Its namespace was written before it. Where that was proven to have been there, it has been counted.
            continue;
        }
        if last.as_ref().is_none_or(|(number, _)| *number != block.segment) {
            last = Some((block.segment, segments.whole.get_mut(&block.segment)));
        }
        let segment = last.as_mut().and_then(|(_, segment)| segment.as_deref_mut());
        // Segments that were given up are not there any more, with all their blocks.
        let is_known = segment.is_some() || segments.damaged.contains(&block.segment);
        match segment.filter(|segment| segment.has(block)) {
            Some(segment) => {
                if segment.take(block) {
                    order.push(place);
                }
            }
            None => lost += u64::from(is_known),
        }
    }
    order.reverse();
    (order, lost)
}

/// Fills the index and the slots; whether there are blocks without checksums.
fn take_in(
    shared: &SegmentsShared,
    slots: &mut Slots,
    segments: OwnSegments,
    blocks: &[BlockRecord],
    order: &[usize],
) -> bool {
    for OwnSegment { segment, taken, blocks, .. } in segments.whole.into_values() {
        shared.know_segment(0, &segment);
        slots.add(segment, &taken, blocks);
    }
    let entry = |place: &usize| (blocks[*place].fingerprint, own_entry(&blocks[*place]));
    for removed in shared.index.fill(order, entry) {
        let waiting = Waiting { for_tombstone: false, for_readers: false };
        slots.retire(removed.entry.slot, removed.entry.slot_bytes, waiting);
    }
    order.iter().any(|place| blocks[*place].sums == Sums::Some)
}
