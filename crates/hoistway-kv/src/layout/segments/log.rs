//! The index log of this process: records that are appended, and synced in groups.
//!
//! A record that could not be written or synced is not made good by a later call: what the disk has is not known. The
//! log is then in doubt, takes no more records, and a checkpoint with a new log replaces it.
#![forbid(unsafe_code)]

use super::{failed, lock, names};
use crate::{
    Error, Result,
    disk::{Disk, DiskFile, Extend, create_over, write_full},
    format::record::{Begin, Change, ProvenFrom, RECORD_LEN, Record},
};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};
use uuid::Uuid;

/// Records that are written at a time; far fewer than [`Record::before`] can tell.
const GROUP: usize = 1 << 14;
/// The jump of record numbers after a log in doubt or damage, which makes followers start again.
const JUMP: u64 = 1 << 20;

/// Whether records are on the disk before an append returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sync {
    Now,
    Later,
}

/// The log.
#[derive(Debug)]
pub(super) struct Log {
    disk: Arc<dyn Disk>,
    directory: PathBuf,
    owner: Mutex<Owner>,
    /// Bytes of room that are asked for at a time: a full disk is met before anything is written.
    ahead: u64,
    state: Mutex<State>,
    /// Held while the disk syncs. A thread that waits for it finds most of the work done.
    pub(super) syncing: Mutex<()>,
}

/// The part of each log's head that describes the directory and its opening.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner {
    pub(super) writer: Uuid,
    pub(super) epoch: u32,
    pub(super) proven_from: ProvenFrom,
}

#[derive(Debug)]
struct State {
    next_log: u32,
    path: PathBuf,
    file: Arc<dyn DiskFile>,
    offset: u64,
    allocated: u64,
    next_record: u64,
    /// All records before this one are on the disk.
    synced: u64,
    is_in_doubt: bool,
}

/// Where a log begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) log: u32,
    pub(super) record: u64,
    pub(super) begin: Begin,
}

impl Start {
    /// A log that begins with this number, or after it if the log before it is not certain.
    pub(super) fn new(log: u32, record: u64, begin: Begin) -> Self {
        let jump = if begin == Begin::Anew { JUMP } else { 0 };
        Self { log, record: record.saturating_add(jump), begin }
    }
}

impl Log {
    /// A new log in a writer's directory; on the disk when this returns.
    pub(super) fn create(
        disk: Arc<dyn Disk>,
        directory: &Path,
        owner: Owner,
        ahead: u64,
        start: Start,
    ) -> Result<Self> {
        let file = create(&*disk, directory, start.log)?;
        let state = begin(&*disk, directory, owner, start, file)?;
        let directory = directory.to_owned();
        Ok(Self {
            disk,
            directory,
            owner: Mutex::new(owner),
            ahead,
            state: Mutex::new(state),
            syncing: Mutex::default(),
        })
    }

    /// Sets the blocks that are synced, as logs and checkpoints record them from now on.
    pub(super) fn set_proven_from(&self, proven_from: ProvenFrom) {
        lock(&self.owner).proven_from = proven_from;
    }

    /// Which blocks were synced.
    pub(super) fn proven_from(&self) -> ProvenFrom {
        lock(&self.owner).proven_from
    }

    /// Appends records. An error leaves it open which of them are on the disk; then [`Log::is_in_doubt`].
    pub(super) fn append(&self, changes: &[Change], sync: Sync) -> Result<()> {
        for group in changes.chunks(GROUP) {
            let end = self.write(group)?;
            if sync == Sync::Now {
                self.sync(end)?;
            }
        }
        Ok(())
    }

    /// Writes a group; the number of the record after it.
    fn write(&self, changes: &[Change]) -> Result<u64> {
        let mut state = lock(&self.state);
        state.check()?;
        let mut bytes = Vec::with_capacity(changes.len() * RECORD_LEN);
        for (number, change) in (state.next_record..).zip(changes) {
            // More than can be told: the record then says nothing of those before it.
            let before = u16::try_from(number - state.synced).unwrap_or(u16::MAX);
            bytes.extend_from_slice(&Record { number, before, change: *change }.to_bytes());
        }
        let end = state.offset + bytes.len() as u64;
        if end > state.allocated {
            let room = end.next_multiple_of(self.ahead);
            // Nothing has been written: the log stays as it is, and good.
            state.file.allocate(room, Extend::No).map_err(failed("making room for", &state.path))?;
            state.allocated = room;
        }
        if let Err(error) = write_full(&*state.file, &bytes, state.offset) {
            state.is_in_doubt = true;
            return Err(failed("writing to", &state.path)(error));
        }
        state.offset = end;
        state.next_record += changes.len() as u64;
        Ok(state.next_record)
    }

    /// All records before `end` are on the disk.
    fn sync(&self, end: u64) -> Result<()> {
        let _syncing = lock(&self.syncing);
        let (file, path, written) = {
            let state = lock(&self.state);
            state.check()?;
            if state.synced >= end {
                return Ok(());
            }
            (Arc::clone(&state.file), state.path.clone(), state.next_record)
        };
        let synced = file.sync_data();
        let mut state = lock(&self.state);
        match synced {
            Ok(()) => state.synced = state.synced.max(written),
            Err(error) => {
                state.is_in_doubt = true;
                return Err(failed("syncing", &path)(error));
            }
        }
        Ok(())
    }

    /// The number of the next record.
    pub(super) fn next_record(&self) -> u64 {
        lock(&self.state).next_record
    }

    /// All records before this one are on the disk.
    pub(super) fn synced(&self) -> u64 {
        lock(&self.state).synced
    }

    /// Syncs all records that were appended. Returns the number of the record after them.
    pub(super) fn sync_all(&self) -> Result<u64> {
        let end = self.next_record();
        self.sync(end)?;
        Ok(end)
    }

    /// The path of its file, if that names it no more. It is then in doubt.
    pub(super) fn missing(&self) -> Result<Option<PathBuf>> {
        let (file, path) = {
            let state = lock(&self.state);
            (Arc::clone(&state.file), state.path.clone())
        };
        if file.is_named(&path).map_err(failed("asking for", &path))? {
            return Ok(None);
        }
        let mut state = lock(&self.state);
        // Another log may have taken its place in the meantime.
        if state.path != path {
            return Ok(None);
        }
        state.is_in_doubt = true;
        Ok(Some(path))
    }

    /// Takes no more records until it is replaced.
    pub(super) fn doubt(&self) {
        lock(&self.state).is_in_doubt = true;
    }

    /// Whether it takes no more records.
    pub(super) fn is_in_doubt(&self) -> bool {
        lock(&self.state).is_in_doubt
    }

    /// Its bytes.
    pub(super) fn len(&self) -> u64 {
        lock(&self.state).offset
    }

    /// A new log, to be taken by [`Log::switch`].
    pub(super) fn prepare(&self) -> Result<Prepared> {
        let mut state = lock(&self.state);
        let log = state.next_log;
        let next_log = log.checked_add(1).ok_or_else(|| Error::Internal("there are no more logs".into()))?;
        if !state.is_in_doubt && state.synced < state.next_record {
            // What is missing at the end of a log that is not the last one would be taken for damage.
            if let Err(error) = state.file.sync_data() {
                state.is_in_doubt = true;
                return Err(failed("syncing", &state.path)(error));
            }
            state.synced = state.next_record;
        }
        let how = if state.is_in_doubt { Begin::Anew } else { Begin::Next };
        let start = Start::new(log, state.next_record, how);
        // Without a file, the number is not used: those who follow look for one after the other.
        let file = create(&*self.disk, &self.directory, log)?;
        // Even if this fails, the number is not used again, so that followers never see two logs with one number.
        state.next_log = next_log;
        match begin(&*self.disk, &self.directory, *lock(&self.owner), start, file) {
            Ok(state) => Ok(Prepared { state, start }),
            Err(error) => {
                // Those who follow may have gone on to the new one.
                state.is_in_doubt = true;
                Err(error)
            }
        }
    }

    /// Replaces the log by a prepared one. The caller prevents appends between [`Log::prepare`] and this.
    pub(super) fn switch(&self, prepared: Prepared) {
        *lock(&self.state) = prepared.state;
    }
}

/// A log that is not used yet.
#[derive(Debug)]
pub(super) struct Prepared {
    state: State,
    pub(super) start: Start,
}

impl State {
    fn check(&self) -> Result<()> {
        if !self.is_in_doubt {
            return Ok(());
        }
        let doubt = std::io::Error::other("an earlier write to it failed, and it has not been replaced yet");
        Err(failed("writing to", &self.path)(doubt))
    }
}

/// Makes the file of a log.
fn create(disk: &dyn Disk, directory: &Path, log: u32) -> Result<Box<dyn DiskFile>> {
    let path = directory.join(names::log(log));
    create_over(disk, &path).map_err(failed("making", &path))
}

/// Writes the head of a log to its file.
fn begin(
    disk: &dyn Disk,
    directory: &Path,
    Owner { writer, epoch, proven_from }: Owner,
    start: Start,
    file: Box<dyn DiskFile>,
) -> Result<State> {
    let path = directory.join(names::log(start.log));
    let head = Record {
        number: start.record,
        before: 0,
        change: Change::Head { writer, log: start.log, epoch, begin: start.begin, proven_from },
    };
    write_full(&*file, &head.to_bytes(), 0).map_err(failed("writing to", &path))?;
    file.sync_data().map_err(failed("syncing", &path))?;
    disk.sync_directory(directory).map_err(failed("syncing", directory))?;
    Ok(State {
        next_log: start.log.saturating_add(1),
        path,
        file: Arc::from(file),
        offset: RECORD_LEN as u64,
        allocated: RECORD_LEN as u64,
        next_record: start.record + 1,
        synced: start.record + 1,
        is_in_doubt: false,
    })
}
