//! Blocks of other writers: their directories are read as ours is at its opening, and their logs are read on as they
//! grow.
#![forbid(unsafe_code)]

use super::{
    Shared, failed, lock,
    names::{self, WriterFile},
    replay::{Position, list, replay},
    root::WriterDirectory,
    segment::Segment,
    writer::flags_of,
};
use crate::{
    Error, Fingerprint, NamespaceId, Result,
    disk::{Disk, DiskFile, read_full},
    format::record::{BlockRecord, Change, ProvenFrom, RECORD_LEN, Record},
    index::{Entry, Existing, Slot},
    io::FileAccess,
    layout::{BLOCK_LEN, HEADER_LEN},
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard},
};
use uuid::Uuid;

/// Records that are read at a time.
const CHUNK: usize = RECORD_LEN << 12;
/// How often a directory is read before what is missing there counts as damage.
const MOST_ATTEMPTS: u32 = 3;

/// All writers but ourselves.
#[derive(Debug, Default)]
pub(super) struct Followed {
    writers: RwLock<Vec<Known>>,
    /// Held by who changes the list.
    changing: Mutex<()>,
}

/// A writer in the list. Who waits for one does not wait for the others.
#[derive(Debug)]
struct Known {
    id: Uuid,
    owner: u16,
    follower: Arc<Mutex<Follower>>,
}

/// Another writer.
#[derive(Debug)]
struct Follower {
    directory: WriterDirectory,
    /// Its number in the index.
    owner: u16,
    /// By its own numbers.
    namespaces: BTreeMap<u16, NamespaceId>,
    position: Option<Position>,
    /// Segments that could not be opened: they were removed before we came to them, or are damaged.
    absent: HashSet<u32>,
    /// Whether it has left the list.
    has_ended: bool,
}

/// Whether a log goes on where it was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It has been read to its end.
    End,
    /// It has a successor, which has more.
    Next,
    /// What was read does not lead to what is there now.
    Astray,
}

impl Followed {
    /// Looks for writers that came or went, and reads what all of them have written.
    pub(super) fn follow(&self, shared: &Shared, own: Option<Uuid>) -> Result<()> {
        let _changing = lock(&self.changing);
        let mut directories = shared.root.writers()?;
        directories.retain(|directory| Some(directory.id) != own);
        let is_gone = |known: &mut Known| !directories.iter().any(|directory| directory.id == known.id);
        let gone: Vec<Known> = self.change().extract_if(.., is_gone).collect();
        for known in gone {
            lock(&known.follower).end(shared);
        }
        for directory in directories {
            let mut writers = self.change();
            if writers.iter().any(|known| known.id == directory.id) {
                continue;
            }
            let is_used = |owner: &u16| writers.iter().any(|known| known.owner == *owner);
            let Some(owner) = (1..=u16::MAX).find(|owner| !is_used(owner)) else { break };
            let id = directory.id;
            let follower = Arc::new(Mutex::new(Follower::new(directory, owner)));
            writers.push(Known { id, owner, follower });
        }
        // One whose files cannot be read is in nobody's way.
        let mut followed = Ok(());
        for follower in self.all() {
            let mut follower = lock(&follower);
            let caught_up = follower.catch_up(shared);
            followed = followed.and(caught_up).and(follower.forget_removed(shared));
        }
        followed
    }

    /// Their numbers in the index.
    pub(super) fn owners(&self) -> HashMap<Uuid, u16> {
        let writers = self.writers.read().unwrap_or_else(PoisonError::into_inner);
        writers.iter().map(|known| (known.id, known.owner)).collect()
    }

    /// Whether a writer still has a block, after its log was read to its end. It writes a tombstone before it uses a slot
    /// again. One that has left the list may have done so unread.
    pub(super) fn still_has(
        &self,
        shared: &Shared,
        writer: Uuid,
        fingerprint: &Fingerprint,
        sequence: u64,
    ) -> Result<bool> {
        let follower = {
            let writers = self.writers.read().unwrap_or_else(PoisonError::into_inner);
            writers.iter().find(|known| known.id == writer).map(|known| Arc::clone(&known.follower))
        };
        let Some(follower) = follower else { return Ok(false) };
        let mut follower = lock(&follower);
        follower.catch_up(shared)?;
        let known = shared.index.peek(fingerprint);
        // The number of one that has ended may be another's by now.
        Ok(!follower.has_ended
            && known.is_some_and(|known| known.owner == follower.owner && known.sequence == sequence))
    }

    fn change(&self) -> RwLockWriteGuard<'_, Vec<Known>> {
        self.writers.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<Arc<Mutex<Follower>>> {
        let writers = self.writers.read().unwrap_or_else(PoisonError::into_inner);
        writers.iter().map(|known| Arc::clone(&known.follower)).collect()
    }
}

impl Follower {
    fn new(directory: WriterDirectory, owner: u16) -> Self {
        let (namespaces, absent) = (BTreeMap::new(), HashSet::new());
        Self { directory, owner, namespaces, position: None, absent, has_ended: false }
    }

    /// Forgets all that it had. Its number may be another's from now on.
    fn end(&mut self, shared: &Shared) {
        self.has_ended = true;
        shared.forget_owner(self.owner);
    }

    fn catch_up(&mut self, shared: &Shared) -> Result<()> {
        if self.has_ended {
            return Ok(());
        }
        let caught_up = self.read_all(shared);
        if caught_up.is_err() {
            // What was passed over comes again with all the rest.
            self.position = None;
        }
        caught_up
    }

    fn read_all(&mut self, shared: &Shared) -> Result<()> {
        if self.position.is_none() {
            return self.start_over(shared);
        }
        loop {
            match self.read_on(shared)? {
                Step::End => return Ok(()),
                Step::Next => {}
                Step::Astray => {
                    tracing::debug!(writer = %self.directory.id, "its log is read anew");
                    return self.start_over(shared);
                }
            }
        }
    }

    /// Reads all that the directory says.
    fn start_over(&mut self, shared: &Shared) -> Result<()> {
        let replay = || replay(&*shared.disk, &self.directory.path, self.directory.id);
        let mut replayed = replay();
        for _ in 1..MOST_ATTEMPTS {
            if replayed.as_ref().is_ok_and(|replayed| replayed.lost == 0) {
                break;
            }
            // What is missing may have been removed for a newer checkpoint while this was read.
            replayed = replay();
        }
        let replayed = match replayed {
            // It is being removed.
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                shared.forget_owner(self.owner);
                return Ok(());
            }
            replayed => replayed?,
        };
        // What is there still is found all the while.
        let is_there = |fingerprint: &Fingerprint, sequence| {
            replayed.blocks.get(fingerprint).is_some_and(|block| block.sequence == sequence)
        };
        shared.index.remove_all(|fingerprint, entry, _| {
            entry.owner == self.owner && !is_there(fingerprint, entry.sequence)
        });
        self.absent.clear();
        self.namespaces = replayed.namespaces;
        self.position = replayed.end;
        shared.set_proven_from(self.owner, replayed.proven_from);
        let mut blocks: Vec<BlockRecord> = replayed.blocks.into_values().collect();
        blocks.sort_unstable_by_key(|block| block.sequence);
        // One that cannot be taken in is in no other's way.
        first_error(blocks.iter().map(|block| self.take_in(shared, block)))
    }

    /// Reads the log that it is at to its end.
    fn read_on(&mut self, shared: &Shared) -> Result<Step> {
        let Some(position) = &mut self.position else { return Ok(Step::Astray) };
        let path = self.directory.path.join(names::log(position.log));
        // Looked for first: whatever is written to this log is written before there is another.
        let next = successor(&*shared.disk, &self.directory, position.log)?;
        let mut chunk = vec![0; CHUNK];
        let mut changes = Vec::new();
        loop {
            let read =
                read_full(&*position.file, &mut chunk, position.offset).map_err(failed("reading", &path))?;
            let before = changes.len();
            for bytes in chunk[..read].chunks_exact(RECORD_LEN) {
                let record = Record::parse(bytes).ok();
                let Some(record) = record.filter(|record| record.number == position.next_record) else {
                    break;
                };
                changes.push(record.change);
                position.offset += RECORD_LEN as u64;
                position.next_record += 1;
            }
            if (changes.len() - before) * RECORD_LEN < chunk.len() {
                break;
            }
        }
        let step = match next {
            Successor::None => Step::End,
            Successor::Unknown => Step::Astray,
            Successor::Log { number, .. } if number != position.next_record => Step::Astray,
            Successor::Log { log, file, number, proven_from } => {
                shared.set_proven_from(self.owner, proven_from);
                *position = Position { log, file, offset: RECORD_LEN as u64, next_record: number + 1 };
                Step::Next
            }
        };
        // Tombstones that follow a block that cannot be taken in count all the same.
        first_error(changes.iter().map(|change| self.apply(shared, change)))?;
        Ok(step)
    }

    fn apply(&mut self, shared: &Shared, change: &Change) -> Result<()> {
        match change {
            Change::Head { .. } => {}
            Change::Namespace { number, id } => drop(self.namespaces.insert(*number, *id)),
            Change::Commit(block) => self.take_in(shared, block)?,
            Change::Tombstone { fingerprint, sequence } => {
                let owner = self.owner;
                let is_it = |entry: &Entry, _| entry.owner == owner && entry.sequence <= *sequence;
                shared.index.remove_if(fingerprint, is_it);
            }
        }
        Ok(())
    }

    /// Takes in a block, unless we have it, or cannot make sense of it.
    fn take_in(&mut self, shared: &Shared, block: &BlockRecord) -> Result<()> {
        let owner = self.owner;
        // Whatever becomes of this one, those before it are gone.
        let is_older = |known: &Entry, _| known.owner == owner && known.sequence < block.sequence;
        shared.index.remove_if(&block.fingerprint, is_older);
        let Some(namespace) = self.namespaces.get(&block.namespace).copied() else { return Ok(()) };
        if !self.knows_segment(shared, block.segment)? {
            return Ok(());
        }
        let payload = u64::from(block.stride_blocks) * BLOCK_LEN * u64::from(block.shards);
        let entry = Entry {
            owner: self.owner,
            namespace: shared.namespaces.number(namespace)?,
            class: 0,
            flags: flags_of(block.shards),
            slot: Slot { segment: block.segment, slot: block.slot },
            slot_bytes: HEADER_LEN as u64 + payload,
            payload_len: block.payload_len,
            sequence: block.sequence,
            expires: block.expires,
        };
        let fits = shared.segment(self.owner, block.segment).is_some_and(|segment| {
            segment.head.offset(block.slot).is_some()
                && entry.slot_bytes <= segment.head.slot_bytes
                && entry.payload_len <= payload
        });
        if !fits {
            return Ok(());
        }
        shared.index.insert(block.fingerprint, &entry, Existing::Keep);
        Ok(())
    }

    /// Opens a segment, if it has not been opened before.
    fn knows_segment(&mut self, shared: &Shared, number: u32) -> Result<bool> {
        if shared.segment(self.owner, number).is_some() {
            return Ok(true);
        }
        if self.absent.contains(&number) {
            return Ok(false);
        }
        let path = self.directory.path.join(names::segment(number));
        let opened = Segment::open(&*shared.disk, &path, FileAccess::Read, self.directory.id, number);
        match opened {
            Ok(Ok(segment)) => {
                shared.know_segment(self.owner, &segment);
                Ok(true)
            }
            Ok(Err(why)) => {
                tracing::warn!(path = %path.display(), %why, "a segment of another writer is not read");
                self.absent.insert(number);
                Ok(false)
            }
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                self.absent.insert(number);
                Ok(false)
            }
            Err(error) => {
                // Once is enough, until its directory is read anew.
                self.absent.insert(number);
                Err(error)
            }
        }
    }

    /// Forgets segments that were given up: as long as they are open, the disk keeps them.
    fn forget_removed(&mut self, shared: &Shared) -> Result<()> {
        let files = match list(&*shared.disk, &self.directory.path) {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Vec::new(),
            files => files?,
        };
        let there: HashSet<u32> = files
            .into_iter()
            .filter_map(|file| match file {
                WriterFile::Segment(number) => Some(number),
                _ => None,
            })
            .collect();
        let gone: HashSet<u32> =
            shared.segments_of(self.owner).into_iter().filter(|number| !there.contains(number)).collect();
        self.absent.retain(|number| there.contains(number));
        if gone.is_empty() {
            return Ok(());
        }
        let owner = self.owner;
        shared.index.remove_all(|_, entry, _| entry.owner == owner && gone.contains(&entry.slot.segment));
        gone.iter().for_each(|number| shared.forget_segment(owner, *number));
        Ok(())
    }
}

/// What comes after a log.
enum Successor {
    /// Nothing yet.
    None,
    /// The log that follows it, and the number of its first record.
    Log { log: u32, file: Box<dyn DiskFile>, number: u64, proven_from: ProvenFrom },
    /// The log has been removed, and what followed it perhaps, too.
    Unknown,
}

/// Looks for the log after this one. There is one file after the other; those that could not be begun have no head.
fn successor(disk: &dyn Disk, directory: &WriterDirectory, current: u32) -> Result<Successor> {
    let open = |log: u32| {
        let path = directory.path.join(names::log(log));
        match disk.open(&path, FileAccess::Read) {
            Ok(file) => Ok(Some((file, path))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("opening", &path)(error)),
        }
    };
    for log in current.saturating_add(1)..=u32::MAX {
        let Some((file, path)) = open(log)? else { break };
        if let Some((number, proven_from)) =
            head_of(&*file, directory.id).map_err(failed("reading", &path))?
        {
            return Ok(Successor::Log { log, file, number, proven_from });
        }
    }
    // The oldest go first: as long as this one is there, nothing after it has gone.
    Ok(if open(current)?.is_some() { Successor::None } else { Successor::Unknown })
}

/// The number of a log's first record, if that is there already, and which blocks were synced.
fn head_of(file: &dyn DiskFile, writer: Uuid) -> io::Result<Option<(u64, ProvenFrom)>> {
    let mut bytes = [0; RECORD_LEN];
    let read = read_full(file, &mut bytes, 0)?;
    let Ok(record) = Record::parse(&bytes[..read]) else { return Ok(None) };
    Ok(match record.change {
        Change::Head { writer: whose, proven_from, .. } if whose == writer => {
            Some((record.number, proven_from))
        }
        _ => None,
    })
}

/// What is known of the segments of all writers.
pub(super) type SegmentTable = HashMap<(u16, u32), Arc<Segment>>;

/// The first error of steps that are all taken, whatever becomes of the others.
fn first_error(steps: impl Iterator<Item = Result<()>>) -> Result<()> {
    let mut found = Ok(());
    for step in steps {
        found = found.and(step);
    }
    found
}
