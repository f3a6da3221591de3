//! Reads a writer's directory: its newest good checkpoint, and the logs after it.
//!
//! A record is taken if its checksum is right and it is where its number says: whatever it tells was on the disk before
//! it. Records of the last group that was written may be missing, as their commits were not acknowledged. One that is
//! missing although a later one says that all before it were synced is damage, and counted.
#![forbid(unsafe_code)]

use super::{
    failed,
    names::{self, WriterFile},
};
use crate::{
    Error, Fingerprint, NamespaceId, Result,
    disk::{Disk, DiskFile, FileAccess, read_full},
    format::{
        Invalid, VERSION,
        checkpoint::{CheckpointHead, HEAD_LEN},
        record::{Begin, BlockRecord, Change, ProvenFrom, RECORD_LEN, Record, Sums},
    },
};
use hashbrown::HashMap;
use hoistway_io::parallel;
use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    path::{Path, PathBuf},
};
use uuid::Uuid;

/// Records of a checkpoint that are read at a time, by one of several threads.
const RANGE: u64 = 1 << 16;
/// Bytes of a log that are read at a time.
pub(super) const CHUNK: usize = RECORD_LEN << 14;
/// Records in a row that cannot be read, after which a file has no more, however long it is. A group has far fewer.
const MOST_BAD: u64 = 1 << 16;

/// The position from which a log is read on.
#[derive(Debug)]
pub(super) struct Position {
    pub(super) log: u32,
    pub(super) file: Box<dyn DiskFile>,
    pub(super) offset: u64,
    /// The number of the record there.
    pub(super) next_record: u64,
}

/// The blocks and namespaces that a directory describes.
#[derive(Debug, Default)]
pub(super) struct Replayed {
    /// One for each fingerprint.
    pub(super) blocks: Vec<BlockRecord>,
    /// What logs say of blocks, until all are read.
    changes: Vec<Change>,
    pub(super) namespaces: BTreeMap<u16, NamespaceId>,
    /// The number of times that it was opened for writing.
    pub(super) epoch: u32,
    /// Which blocks were synced.
    pub(super) proven_from: ProvenFrom,
    /// Of the checkpoint; 0 if there is none.
    pub(super) generation: u64,
    /// The log that the checkpoint is followed by.
    pub(super) first_log: u32,
    /// Logs before this one are of no use, whichever checkpoint is taken.
    pub(super) oldest_log: u32,
    /// Bytes of the logs since then.
    pub(super) log_bytes: u64,
    /// One more than the last record's.
    pub(super) next_record: u64,
    /// No log has this number, or a higher one.
    pub(super) next_log: u32,
    pub(super) next_segment: u32,
    /// Records that were there once, and cannot be read any more.
    pub(super) lost: u64,
    /// The end of the last log; `None` if there is none.
    pub(super) end: Option<Position>,
    /// Records that no sync is known to cover: a process that died may have left them in memory only.
    pub(super) unproven: Vec<LogRange>,
}

/// Bytes of a log.
#[derive(Debug)]
pub(super) struct LogRange {
    pub(super) log: u32,
    pub(super) bytes: Range<u64>,
}

/// Reads the directory of `writer`.
pub(super) fn replay(disk: &dyn Disk, directory: &Path, writer: Uuid) -> Result<Replayed> {
    let mut replayed = Replayed { next_log: 1, first_log: 1, next_segment: 1, ..Replayed::default() };
    let mut checkpoints = Vec::new();
    let mut has_bad_checkpoint = false;
    for name in names::CHECKPOINTS {
        match Checkpoint::open(disk, &directory.join(name), writer)? {
            Opened::Good(checkpoint) => checkpoints.push(checkpoint),
            Opened::Bad => has_bad_checkpoint = true,
            Opened::Missing => {}
        }
    }
    checkpoints.sort_by_key(|checkpoint| checkpoint.head.generation);
    replayed.oldest_log = checkpoints.iter().map(|checkpoint| checkpoint.head.log).min().unwrap_or(1);
    let mut is_damaged = false;
    if let Some(newest) = checkpoints.pop() {
        let lost = newest.read_into(&mut replayed)?;
        is_damaged = lost > 0;
        replayed.lost += lost;
    }
    // That of the other one has been read, or is older and stays as it was.
    replayed.lost += u64::from(has_bad_checkpoint);

    let mut logs: Vec<u32> = list(disk, directory)?
        .into_iter()
        .filter_map(|file| match file {
            WriterFile::Log(number) if number >= replayed.first_log => Some(number),
            _ => None,
        })
        .collect();
    logs.sort_unstable();
    // The log that a checkpoint names was there before it, and goes before those after it.
    let is_new = logs.is_empty() && replayed.generation == 0;
    if !is_new && logs.first() != Some(&replayed.first_log) {
        is_damaged = true;
        replayed.lost += 1;
    }
    for (place, &number) in logs.iter().enumerate() {
        let path = directory.join(names::log(number));
        let file = match disk.open(&path, FileAccess::Read) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                is_damaged = true;
                replayed.lost += 1;
                continue;
            }
            Err(error) => return Err(failed("opening", &path)(error)),
        };
        replayed.next_log = number.saturating_add(1);
        let is_last = place + 1 == logs.len();
        let read = read_log(&*file, &path, writer, number, &mut replayed)?;
        is_damaged |= read.lost > 0;
        replayed.lost += read.lost;
        replayed.log_bytes = replayed.log_bytes.saturating_add(read.len);
        replayed.unproven.push(LogRange { log: number, bytes: read.unproven });
        if is_last {
            let (offset, next_record) = read.first_bad;
            replayed.end = Some(Position { log: number, file, offset, next_record });
        }
    }
    replayed.settle();
    if is_damaged {
        // Places may have been used again without our knowing. Checksums would tell; blocks that have none cannot stay.
        let before = replayed.blocks.len();
        replayed.blocks.retain(|block| block.sums == Sums::All);
        replayed.lost += (before - replayed.blocks.len()) as u64;
    }
    Ok(replayed)
}

/// The files of a writer.
pub(super) fn list(disk: &dyn Disk, directory: &Path) -> Result<Vec<WriterFile>> {
    let listing = disk.list(directory).map_err(failed("listing", directory))?;
    Ok(listing.into_iter().map(|file| WriterFile::parse(&file.name)).collect())
}

impl Replayed {
    /// Takes in what a record of a log says. It may have been taken in before.
    fn apply(&mut self, change: &Change) {
        match change {
            Change::Head { epoch, proven_from, .. } => {
                self.epoch = self.epoch.max(*epoch);
                self.proven_from = *proven_from;
            }
            Change::Namespace { number, id } => drop(self.namespaces.insert(*number, *id)),
            Change::Commit(block) => {
                self.next_segment = self.next_segment.max(block.segment.saturating_add(1));
                self.changes.push(*change);
            }
            Change::Tombstone { .. } => self.changes.push(*change),
        }
    }

    /// Applies what the logs say to the blocks of the checkpoint. Only those that logs tell of are looked up.
    fn settle(&mut self) {
        let changes = std::mem::take(&mut self.changes);
        if changes.is_empty() {
            return;
        }
        // Blocks that logs tell of, in the order in which they first do.
        let mut changed: Vec<Option<BlockRecord>> = Vec::with_capacity(changes.len());
        let mut places: HashMap<Fingerprint, usize> = HashMap::with_capacity(changes.len());
        let mut placed: Vec<(&Change, usize)> = Vec::with_capacity(changes.len());
        for change in &changes {
            let fingerprint = match change {
                Change::Commit(block) => block.fingerprint,
                Change::Tombstone { fingerprint, .. } => *fingerprint,
                _ => continue,
            };
            let place = *places.entry(fingerprint).or_insert(changed.len());
            if place == changed.len() {
                changed.push(None);
            }
            placed.push((change, place));
        }
        // The log knows more of the same block than a checkpoint that was written meanwhile.
        let commit = |known: &mut Option<BlockRecord>, block: &BlockRecord| {
            if known.is_none_or(|known| known.sequence <= block.sequence) {
                *known = Some(*block);
            }
        };
        self.blocks.retain(|block| match places.get(&block.fingerprint) {
            Some(place) => {
                commit(&mut changed[*place], block);
                false
            }
            None => true,
        });
        for (change, place) in placed {
            let known = &mut changed[place];
            match change {
                Change::Commit(block) => commit(known, block),
                Change::Tombstone { sequence, .. } => {
                    known.take_if(|block| block.sequence <= *sequence);
                }
                _ => {}
            }
        }
        self.blocks.extend(changed.into_iter().flatten());
    }
}

/// The part of a log that was read.
struct LogRead {
    len: u64,
    lost: u64,
    /// Offset and number of the first record that may still be written: it is not there, or not whole.
    first_bad: (u64, u64),
    /// From the first record that no later one says was synced, to the last.
    unproven: Range<u64>,
}

fn read_log(
    file: &dyn DiskFile,
    path: &Path,
    writer: Uuid,
    log: u32,
    replayed: &mut Replayed,
) -> Result<LogRead> {
    let expected = replayed.next_record;
    // The log's head says. If it is damaged, nothing does.
    replayed.proven_from = ProvenFrom::UNKNOWN;
    let len = file.len().map_err(failed("reading", path))?;
    let mut chunk = vec![0; CHUNK.min(usize::try_from(len).unwrap_or(CHUNK)).max(RECORD_LEN)];
    // The first record says which number the log begins with; should it be damaged, any other one does.
    let mut base = None;
    let mut begin = Begin::Next;
    let mut bad: Vec<u64> = Vec::new();
    let mut lost = 0;
    let mut offset = 0_u64;
    let mut bad_in_a_row = 0;
    // Numbers of the first record that is not known to be synced, and of the one after the last.
    let (mut unproven, mut behind) = (0, 0);
    'file: loop {
        let read = read_full(file, &mut chunk, offset).map_err(failed("reading", path))?;
        let whole = read / RECORD_LEN * RECORD_LEN;
        for (place, bytes) in chunk[..whole].chunks_exact(RECORD_LEN).enumerate() {
            let position = offset / RECORD_LEN as u64 + place as u64;
            let record = Record::parse(bytes).ok().filter(|record| {
                let is_ours = match record.change {
                    Change::Head { writer: whose, log: number, .. } => {
                        position == 0 && whose == writer && number == log
                    }
                    _ => position > 0,
                };
                let begins = record.number.checked_sub(position);
                is_ours && begins.is_some() && (base.is_none() || base == begins)
            });
            let Some(record) = record else {
                bad.push(position);
                bad_in_a_row += 1;
                if bad_in_a_row >= MOST_BAD {
                    break 'file;
                }
                continue;
            };
            bad_in_a_row = 0;
            let begins = record.number - position;
            base = Some(begins);
            if let Change::Head { begin: how, .. } = record.change {
                begin = how;
            }
            // Those were synced before this one was written.
            let proven = record.first_unsynced();
            unproven = unproven.max(proven);
            behind = record.number.saturating_add(1);
            if !bad.is_empty() {
                let count = bad.len();
                bad.retain(|position| begins.saturating_add(*position) >= proven);
                lost += (count - bad.len()) as u64;
            }
            replayed.apply(&record.change);
            replayed.next_record = replayed.next_record.max(record.number.saturating_add(1));
        }
        offset += whole as u64;
        if read < chunk.len() || whole == 0 {
            break;
        }
    }
    let begins = base.unwrap_or(expected);
    // Records at the end of the log before this one that went with the file's end.
    if base.is_some() && begins > expected && begin == Begin::Next {
        lost += 1;
    }
    // Those that are known to be damaged are passed over.
    let first_bad = bad.first().copied().unwrap_or(offset / RECORD_LEN as u64);
    let first_bad = (first_bad * RECORD_LEN as u64, begins.saturating_add(first_bad));
    let place_of = |number: u64| number.saturating_sub(begins).saturating_mul(RECORD_LEN as u64);
    Ok(LogRead { len, lost, first_bad, unproven: place_of(unproven)..place_of(behind) })
}

/// A checkpoint whose head is good.
struct Checkpoint {
    head: CheckpointHead,
    file: Box<dyn DiskFile>,
    path: PathBuf,
}

enum Opened {
    Good(Checkpoint),
    Bad,
    Missing,
}

/// A stretch of a checkpoint's records.
#[derive(Default)]
struct Part {
    blocks: Vec<BlockRecord>,
    others: Vec<Change>,
    /// One more than the number of the last segment of these blocks.
    next_segment: u32,
}

impl Checkpoint {
    fn open(disk: &dyn Disk, path: &Path, writer: Uuid) -> Result<Opened> {
        let file = match disk.open(path, FileAccess::Read) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Opened::Missing),
            Err(error) => return Err(failed("opening", path)(error)),
        };
        let mut head = vec![0; HEAD_LEN];
        let read = read_full(&*file, &mut head, 0).map_err(failed("reading", path))?;
        match CheckpointHead::parse(&head[..read]) {
            Ok(head) if head.writer == writer => Ok(Opened::Good(Self { head, file, path: path.to_owned() })),
            Err(Invalid::Version { found }) => {
                Err(Error::UnknownFormat { path: path.to_owned(), found, known: VERSION })
            }
            Ok(_) | Err(_) => Ok(Opened::Bad),
        }
    }

    /// The number of damaged records.
    fn read_into(self, replayed: &mut Replayed) -> Result<u64> {
        replayed.generation = self.head.generation;
        replayed.epoch = self.head.epoch;
        replayed.proven_from = self.head.proven_from;
        replayed.first_log = self.head.log;
        replayed.next_log = self.head.log;
        replayed.next_record = self.head.next_record;
        replayed.next_segment = self.head.next_segment;
        let len = self.file.len().map_err(failed("reading", &self.path))?;
        let there = len.saturating_sub(HEAD_LEN as u64) / RECORD_LEN as u64;
        let records = self.head.records.min(there);
        let (mut first, mut good) = (0, 0);
        let threads = parallel::cores();
        while first < records {
            let end = records.min(first.saturating_add(RANGE * threads as u64));
            let starts: Vec<u64> = (first..end).step_by(RANGE as usize).collect();
            let read = |start: &u64| self.read_range(*start, end.min(start + RANGE));
            for part in parallel::map(&starts, threads, read) {
                let part = part.map_err(failed("reading", &self.path))?;
                if part.blocks.is_empty() && part.others.is_empty() {
                    // It has no more, however long it is.
                    return Ok(self.head.records.saturating_sub(good));
                }
                good += (part.blocks.len() + part.others.len()) as u64;
                replayed.next_segment = replayed.next_segment.max(part.next_segment);
                // A block of which it tells twice came anew while it was written, and is in the log.
                replayed.blocks.extend_from_slice(&part.blocks);
                part.others.iter().for_each(|change| replayed.apply(change));
            }
            first = end;
        }
        Ok(self.head.records.saturating_sub(good))
    }

    /// The contents of the records that are not damaged.
    fn read_range(&self, start: u64, end: u64) -> io::Result<Part> {
        let count = (end - start) as usize;
        let mut bytes = vec![0; count * RECORD_LEN];
        let read = read_full(&*self.file, &mut bytes, HEAD_LEN as u64 + start * RECORD_LEN as u64)?;
        let records = (start..).zip(bytes[..read].chunks_exact(RECORD_LEN));
        let good = records.filter_map(|(place, bytes)| {
            Record::parse(bytes).ok().filter(|record| record.number == place).map(|record| record.change)
        });
        let mut part = Part { blocks: Vec::with_capacity(count), ..Part::default() };
        for change in good {
            match change {
                Change::Commit(block) => {
                    part.next_segment = part.next_segment.max(block.segment.saturating_add(1));
                    part.blocks.push(block);
                }
                other => part.others.push(other),
            }
        }
        Ok(part)
    }
}
