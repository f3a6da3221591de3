//! Blocks of other writers: their directories are read as ours is at its opening, and their logs are read on as they
//! grow.
#![forbid(unsafe_code)]

use super::{
    SegmentsShared, WriterDirectory, failed, lock,
    names::{self, WriterFile},
    replay::{Position, list, replay},
    segment::Segment,
    writer::{WITHOUT_SUMS, entry_of},
};
use crate::{
    Error, Fingerprint, NamespaceId, Result,
    disk::{Disk, DiskFile, FileAccess, read_full},
    format::record::{BlockRecord, Change, ProvenFrom, RECORD_LEN, Record},
    index::Entry,
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard},
};
use uuid::Uuid;

/// Records that are read at a time.
const CHUNK: usize = RECORD_LEN << 12;
/// Reads of a directory before missing files count as damage.
const MOST_ATTEMPTS: u32 = 3;
/// Rounds after which a record that cannot be read is passed over, if others follow it. It may be being written.
const HOLE_ROUNDS: u32 = 8;
/// Most rounds between two attempts to open what could not be opened: a minute or so.
const LONGEST_PAUSE: u32 = 512;

/// All writers but ourselves.
#[derive(Debug, Default)]
pub(super) struct Followed {
    writers: RwLock<Vec<Known>>,
    /// Held by the thread that changes the list.
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
    /// The namespaces of that writer, by the numbers that its log gives them.
    namespaces: BTreeMap<u16, NamespaceId>,
    position: Option<Position>,
    /// The gap in its log at which following stopped.
    hole: Option<Hole>,
    /// Records of its log that are known to be damaged since the directory was last read.
    damaged: u64,
    /// The time of the next attempt to read the directory, after one failed.
    retry: Retry,
    /// Segments that were removed before we came to them, or are damaged.
    absent: HashSet<u32>,
    /// Segments that are there and could not be opened.
    unopened: HashMap<u32, Retry>,
    /// Their blocks, as the log tells of them.
    waiting: HashMap<Fingerprint, BlockRecord>,
    /// Whether it has left the list.
    has_ended: bool,
}

/// Records at the position in the log that cannot be read.
#[derive(Debug)]
struct Hole {
    /// Rounds since it was met.
    rounds: u32,
    /// No record lies between the hole and this offset.
    searched: u64,
}

/// The first record behind a hole.
struct Beyond {
    offset: u64,
    record: Record,
}

/// Rounds until something that failed is tried again: one at first, twice as many after each failure.
#[derive(Debug, Default)]
struct Retry {
    pause: u32,
    left: u32,
}

impl Retry {
    fn failed(&mut self) {
        self.pause = self.pause.saturating_mul(2).clamp(1, LONGEST_PAUSE);
        self.left = self.pause;
    }

    fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Counts a round.
    fn round(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    fn is_due(&self) -> bool {
        self.left == 0
    }
}

/// Whether a log goes on where it was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It has been read to its end.
    End,
    /// It has a successor, which has more.
    Next,
    /// The part that was read does not lead to the present contents.
    Astray,
}

impl Followed {
    /// Looks for writers that came or went, and reads what all of them have written.
    pub(super) fn follow(&self, shared: &SegmentsShared, own_id: Option<Uuid>) -> Result<()> {
        let _changing = lock(&self.changing);
        let mut directories = match shared.root.writers() {
            // The store's directory was removed, and theirs with it.
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Vec::new(),
            writers => writers?,
        };
        directories.retain(|directory| Some(directory.id) != own_id);
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
        // A writer whose files cannot be read does not stop the rounds of the others.
        let mut followed = Ok(());
        for follower in self.all() {
            let mut follower = lock(&follower);
            let round = follower.round(shared);
            followed = followed.and(round);
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
        shared: &SegmentsShared,
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
            && follower.is_current()
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
        Self {
            directory,
            owner,
            namespaces: BTreeMap::new(),
            position: None,
            hole: None,
            damaged: 0,
            retry: Retry::default(),
            absent: HashSet::new(),
            unopened: HashMap::new(),
            waiting: HashMap::new(),
            has_ended: false,
        }
    }

    /// Does what is done a few times a second.
    fn round(&mut self, shared: &SegmentsShared) -> Result<()> {
        self.retry.round();
        if let Some(hole) = &mut self.hole {
            hole.rounds = hole.rounds.saturating_add(1);
        }
        let caught_up = self.catch_up(shared);
        let retried = self.retry_unopened(shared);
        caught_up.and(retried).and(self.forget_removed(shared))
    }

    /// Forgets all that it had. Its number may be another's from now on.
    fn end(&mut self, shared: &SegmentsShared) {
        self.has_ended = true;
        shared.forget_owner(self.owner);
    }

    /// Whether its log was read to its end when that was last tried.
    fn is_current(&self) -> bool {
        self.position.is_some() && self.hole.is_none()
    }

    fn catch_up(&mut self, shared: &SegmentsShared) -> Result<()> {
        if self.has_ended {
            return Ok(());
        }
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

    /// Reads all that the directory says, unless that has failed too often just now.
    fn start_over(&mut self, shared: &SegmentsShared) -> Result<()> {
        // Until it has been read, nothing says what its log is read on from.
        self.position = None;
        if !self.retry.is_due() {
            return Ok(());
        }
        let read = self.read_directory(shared);
        // Blocks that could not be taken in are tried again by themselves.
        if read.is_err() && self.position.is_none() {
            self.retry.failed();
        } else {
            self.retry.succeeded();
        }
        read
    }

    fn read_directory(&mut self, shared: &SegmentsShared) -> Result<()> {
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
        let mut blocks = replayed.blocks;
        blocks.sort_unstable_by_key(|block| block.sequence);
        let is_there = |fingerprint: &Fingerprint, sequence| {
            let place = blocks.binary_search_by_key(&sequence, |block| block.sequence);
            place.is_ok_and(|place| blocks[place].fingerprint == *fingerprint)
        };
        let owner = self.owner;
        shared.forget_all(
            |fingerprint, entry| entry.owner == owner && !is_there(fingerprint, entry.sequence),
            |entry| entry.owner == owner,
        );
        self.absent.clear();
        self.waiting.clear();
        self.hole = None;
        let damaged = std::mem::replace(&mut self.damaged, replayed.lost);
        self.note_damage(shared, replayed.lost.saturating_sub(damaged));
        self.namespaces = replayed.namespaces;
        self.position = replayed.end;
        shared.set_proven_from(self.owner, replayed.proven_from);
        // One that cannot be taken in is in no other's way.
        first_error(blocks.iter().map(|block| self.take_in(shared, block)))
    }

    /// Reads the log that it is at to its end.
    fn read_on(&mut self, shared: &SegmentsShared) -> Result<Step> {
        let Some(position) = &mut self.position else { return Ok(Step::Astray) };
        let path = self.directory.path.join(names::log(position.log));
        // Looked for first: whatever is written to this log is written before there is another.
        let next = successor(&*shared.disk, &self.directory, position.log)?;
        let mut chunk = vec![0; CHUNK];
        let mut changes = Vec::new();
        let mut all_read = Ok(());
        let mut damaged = 0_u64;
        loop {
            let read = match read_full(&*position.file, &mut chunk, position.offset) {
                Ok(read) => read,
                Err(error) => {
                    all_read = Err(failed("reading", &path)(error));
                    break;
                }
            };
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
            let good = (changes.len() - before) * RECORD_LEN;
            if good > 0 {
                self.hole = None;
            }
            if good == chunk.len() {
                continue;
            }
            if read - good < RECORD_LEN {
                break;
            }
            match pass_over(position, &mut self.hole) {
                Ok(Some(skipped)) => damaged = damaged.saturating_add(skipped),
                Ok(None) => break,
                Err(error) => {
                    all_read = Err(failed("reading", &path)(error));
                    break;
                }
            }
        }
        if damaged > 0 {
            self.damaged = self.damaged.saturating_add(damaged);
            self.note_damage(shared, damaged);
        }
        let Some(position) = &mut self.position else { return Ok(Step::Astray) };
        let step = match next {
            // It is read on from where that failed.
            _ if all_read.is_err() => Step::End,
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
        first_error(changes.iter().map(|change| self.apply(shared, change))).and(all_read)?;
        Ok(step)
    }

    /// Says that records of its log cannot be read.
    fn note_damage(&mut self, shared: &SegmentsShared, records: u64) {
        if records == 0 {
            return;
        }
        // A record that is missing may have said that the place of one of these has another block.
        let owner = self.owner;
        let is_it = |entry: &Entry| entry.owner == owner && entry.class == WITHOUT_SUMS;
        shared.forget_all(|_, entry| is_it(entry), is_it);
        let path = self.directory.path.display();
        shared.observed.damage(
            records,
            format!(
                "{records} records of the index log in {path} are damaged; blocks that they tell of may not be found"
            ),
        );
    }

    fn apply(&mut self, shared: &SegmentsShared, change: &Change) -> Result<()> {
        match change {
            Change::Head { .. } => {}
            Change::Namespace { number, id } => drop(self.namespaces.insert(*number, *id)),
            Change::Commit(block) => self.take_in(shared, block)?,
            Change::Tombstone { fingerprint, sequence } => {
                let owner = self.owner;
                let gone = shared.hidden.remove(&shared.index, fingerprint, owner, *sequence);
                shared.gone(gone.as_slice());
                if self.waiting.get(fingerprint).is_some_and(|known| known.sequence <= *sequence) {
                    self.waiting.remove(fingerprint);
                }
            }
        }
        Ok(())
    }

    /// Takes in a block, unless we have it, or cannot make sense of it.
    fn take_in(&mut self, shared: &SegmentsShared, block: &BlockRecord) -> Result<()> {
        let owner = self.owner;
        // Whatever becomes of this one, those before it are gone.
        if let Some(before) = block.sequence.checked_sub(1) {
            shared.hidden.remove(&shared.index, &block.fingerprint, owner, before);
        }
        if self.waiting.get(&block.fingerprint).is_some_and(|known| known.sequence < block.sequence) {
            self.waiting.remove(&block.fingerprint);
        }
        let Some(namespace) = self.namespaces.get(&block.namespace).copied() else { return Ok(()) };
        if self.unopened.contains_key(&block.segment) {
            self.waiting.insert(block.fingerprint, *block);
            return Ok(());
        }
        match self.knows_segment(shared, block.segment) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => {
                self.unopened.entry(block.segment).or_default().failed();
                self.waiting.insert(block.fingerprint, *block);
                return Err(error);
            }
        }
        if shared.segment(self.owner, block.segment).is_some_and(|segment| segment.may_have(block)) {
            let _numbering = shared.numbering.read().unwrap_or_else(PoisonError::into_inner);
            let entry = entry_of(block, self.owner, shared.namespaces.number(namespace)?);
            shared.hidden.keep(&shared.index, block.fingerprint, &entry);
        }
        Ok(())
    }

    /// Opens a segment, if it has not been opened before.
    fn knows_segment(&mut self, shared: &SegmentsShared, number: u32) -> Result<bool> {
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
            Err(error) => Err(error),
        }
    }

    /// Tries again to open segments that could not be opened, and takes in their blocks.
    fn retry_unopened(&mut self, shared: &SegmentsShared) -> Result<()> {
        self.unopened.values_mut().for_each(Retry::round);
        let due = |(number, retry): (&u32, &Retry)| retry.is_due().then_some(*number);
        let due: Vec<u32> = self.unopened.iter().filter_map(due).collect();
        first_error(due.into_iter().map(|number| match self.knows_segment(shared, number) {
            Ok(_) => {
                self.unopened.remove(&number);
                let is_in = |_: &Fingerprint, block: &mut BlockRecord| block.segment == number;
                let blocks: Vec<_> = self.waiting.extract_if(is_in).map(|(_, block)| block).collect();
                first_error(blocks.iter().map(|block| self.take_in(shared, block)))
            }
            Err(error) => {
                self.unopened.entry(number).or_default().failed();
                Err(error)
            }
        }))
    }

    /// Forgets segments that were given up: as long as they are open, the disk keeps them.
    fn forget_removed(&mut self, shared: &SegmentsShared) -> Result<()> {
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
        self.unopened.retain(|number, _| there.contains(number));
        self.waiting.retain(|_, block| there.contains(&block.segment));
        if gone.is_empty() {
            return Ok(());
        }
        let owner = self.owner;
        let is_it = |entry: &Entry| entry.owner == owner && gone.contains(&entry.slot.segment);
        shared.forget_all(|_, entry| is_it(entry), is_it);
        gone.iter().for_each(|number| shared.forget_segment(owner, *number));
        Ok(())
    }
}

/// Goes on behind records that cannot be read, if they are damaged rather than being written; says how many these are.
fn pass_over(position: &mut Position, hole: &mut Option<Hole>) -> io::Result<Option<u64>> {
    let hole_now = hole.get_or_insert(Hole { rounds: 0, searched: position.offset + RECORD_LEN as u64 });
    let Some(beyond) = beyond(position, hole_now)? else { return Ok(None) };
    let is_proven = beyond.record.first_unsynced() > position.next_record;
    if !is_proven && hole_now.rounds < HOLE_ROUNDS {
        return Ok(None);
    }
    let skipped = beyond.record.number - position.next_record;
    (position.offset, position.next_record) = (beyond.offset, beyond.record.number);
    *hole = None;
    Ok(Some(skipped))
}

/// Looks for a record behind a hole. Bytes that were searched without success are not read again.
fn beyond(position: &Position, hole: &mut Hole) -> io::Result<Option<Beyond>> {
    let mut chunk = vec![0; CHUNK];
    let read = read_full(&*position.file, &mut chunk, hole.searched)?;
    for bytes in chunk[..read].chunks_exact(RECORD_LEN) {
        let offset = hole.searched;
        let number = position.next_record + (offset - position.offset) / RECORD_LEN as u64;
        match Record::parse(bytes) {
            Ok(record) if record.number == number => return Ok(Some(Beyond { offset, record })),
            _ => hole.searched += RECORD_LEN as u64,
        }
    }
    Ok(None)
}

/// The state at the end of a log.
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

/// The known segments of all writers.
pub(super) type SegmentTable = HashMap<(u16, u32), Arc<Segment>>;

/// The first error of steps that are all taken, whatever becomes of the others.
fn first_error(steps: impl Iterator<Item = Result<()>>) -> Result<()> {
    let mut found = Ok(());
    for step in steps {
        found = found.and(step);
    }
    found
}
