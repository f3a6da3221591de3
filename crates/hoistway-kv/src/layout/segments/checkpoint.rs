//! Checkpoints of the blocks of this process, so that logs do not grow without limit.
//!
//! A checkpoint is written while other threads go on: blocks that are added or removed meanwhile are in it or not. The log
//! that begins before the checkpoint has them in any case.
#![forbid(unsafe_code)]

use super::{
    failed, lock,
    log::{Prepared, Start},
    names::{self, WriterFile},
    replay::list,
    writer::{WITHOUT_SUMS, Writer, stride_of},
};
use crate::{
    Fingerprint, NamespaceId, Result,
    disk::{Disk, FileAccess, create_over, temporary_name, write_full},
    format::{
        BLOCK_LEN,
        checkpoint::{CheckpointHead, HEAD_LEN},
        record::{BlockRecord, Change, RECORD_LEN, Record, Sums},
    },
    index::Entry,
};
use std::{
    io,
    path::Path,
    sync::{PoisonError, atomic::Ordering},
};

/// Bytes that are written at a time.
const CHUNK: usize = 1 << 20;

/// The state of the checkpoints on the disk.
#[derive(Debug)]
pub(super) struct Checkpoints {
    /// The state of the newest.
    pub(super) generation: u64,
    /// The log that follows it.
    pub(super) log: u32,
    /// Bytes of the logs since then, without the one that is written to.
    pub(super) bytes_before: u64,
    /// Where the log begins that is written to, if the checkpoint before it has not been written yet.
    begun: Option<Start>,
    /// A log for one in doubt, which waits for its checkpoint.
    prepared: Option<Prepared>,
}

impl Checkpoints {
    /// The state after an opening, or a checkpoint.
    pub(super) fn new(generation: u64, log: u32, bytes_before: u64) -> Self {
        Self { generation, log, bytes_before, begun: None, prepared: None }
    }

    /// Says that the log that is written to begins here, and that a checkpoint has to be written for it.
    pub(super) fn begin(&mut self, start: Start) {
        self.begun = Some(start);
    }
}

impl Writer {
    /// Writes a checkpoint if the log has become long, or follows another that has blocks.
    pub(super) fn checkpoint_if_due(&self) -> Result<()> {
        let (before, is_begun) = {
            let known = lock(&self.checkpoints);
            (known.bytes_before, known.begun.is_some())
        };
        let blocks = self.shared.index.totals(None).own_blocks;
        let enough = self.limits.least_log().max(blocks.saturating_mul(RECORD_LEN as u64));
        let is_long = before.saturating_add(self.log.len()) > enough;
        if is_begun || is_long { self.checkpoint() } else { Ok(()) }
    }

    /// Writes a checkpoint that is followed by a log without blocks, so that the next opening has no log to read.
    pub(super) fn checkpoint_at_end(&self) -> Result<()> {
        lock(&self.checkpoints).begun = None;
        self.checkpoint()
    }

    /// Writes a checkpoint, and goes on in a new log.
    pub(super) fn checkpoint(&self) -> Result<()> {
        let mut known = lock(&self.checkpoints);
        // The index has none of its blocks any more: its log does, and is read again if its directory comes back.
        if self.is_gone.load(Ordering::Acquire) {
            return Ok(());
        }
        let start = {
            let _alone = self.publishing.write().unwrap_or_else(PoisonError::into_inner);
            if self.log.is_in_doubt() {
                return self.replace_log(&mut known);
            }
            match known.begun {
                // A checkpoint that fails again and again leaves no more than one log.
                Some(start) => start,
                None => {
                    let prepared = self.log.prepare()?;
                    let start = prepared.start;
                    known.bytes_before = known.bytes_before.saturating_add(self.log.len());
                    self.log.switch(prepared);
                    known.begun = Some(start);
                    start
                }
            }
        };
        let generation = known.generation + 1;
        self.write_checkpoint(generation, start)?;
        let keep_from = known.log;
        *known = Checkpoints::new(generation, start.log, 0);
        self.remove_logs(keep_from)
    }

    /// Replaces a log that takes no more records.
    pub(super) fn replace_log_in_doubt(&self) -> Result<()> {
        let mut known = lock(&self.checkpoints);
        let _alone = self.publishing.write().unwrap_or_else(PoisonError::into_inner);
        if self.log.is_in_doubt() && !self.is_gone.load(Ordering::Acquire) {
            self.replace_log(&mut known)
        } else {
            Ok(())
        }
    }

    /// Writes a checkpoint of what is certain, and forgets all logs and checkpoints before it: one of them is in doubt.
    fn replace_log(&self, known: &mut Checkpoints) -> Result<()> {
        let prepared = match known.prepared.take() {
            Some(prepared) => prepared,
            None => self.log.prepare()?,
        };
        match self.forget_before(known, prepared.start) {
            Ok(()) => self.log.switch(prepared),
            Err(error) => {
                known.prepared = Some(prepared);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Writes a checkpoint of what is certain, to be followed by this log, and forgets all that was before.
    pub(super) fn forget_before(&self, known: &mut Checkpoints, start: Start) -> Result<()> {
        let generation = known.generation + 1;
        self.write_checkpoint(generation, start)?;
        let older = self.directory.join(names::checkpoint(generation + 1));
        match self.shared.disk.remove(&older) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing", &older)(error));
            }
            _ => {}
        }
        *known = Checkpoints::new(generation, start.log, 0);
        self.remove_logs(start.log)?;
        let directory = &self.directory;
        self.shared.disk.sync_directory(directory).map_err(failed("syncing", directory))
    }

    /// Whether the newest checkpoint is where it was written to, if there is one.
    pub(super) fn has_checkpoint(&self) -> Result<bool> {
        let generation = lock(&self.checkpoints).generation;
        let path = self.directory.join(names::checkpoint(generation));
        match self.shared.disk.open(&path, FileAccess::Read) {
            _ if generation == 0 => Ok(true),
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(failed("opening", &path)(error)),
        }
    }

    fn write_checkpoint(&self, generation: u64, start: Start) -> Result<()> {
        let path = self.directory.join(names::checkpoint(generation));
        let temporary = temporary_name(&path);
        let namespaces = self.shared.namespaces.all();
        let written = self.write_records(generation, start, &namespaces, &temporary).and_then(|()| {
            self.shared.disk.rename(&temporary, &path).map_err(failed("renaming", &temporary))?;
            let directory = &self.directory;
            self.shared.disk.sync_directory(directory).map_err(failed("syncing", directory))
        });
        if written.is_err() {
            // If it cannot be removed, the next one replaces it.
            let _ = self.shared.disk.remove(&temporary);
        }
        written?;
        lock(&self.logged).extend(namespaces.iter().map(|(number, _)| *number));
        Ok(())
    }

    fn write_records(
        &self,
        generation: u64,
        start: Start,
        namespaces: &[(u16, NamespaceId)],
        path: &Path,
    ) -> Result<()> {
        let file = create_over(&*self.shared.disk, path).map_err(failed("making", path))?;
        let mut bytes = Vec::with_capacity(CHUNK);
        let (mut records, mut offset) = (0, HEAD_LEN as u64);
        let mut write = |change: Option<Change>| -> Result<u64> {
            if let Some(change) = change {
                bytes.extend_from_slice(&Record { number: records, before: 0, change }.to_bytes());
                records += 1;
            }
            if bytes.len() >= CHUNK || change.is_none() {
                write_full(&*file, &bytes, offset).map_err(failed("writing to", path))?;
                offset += bytes.len() as u64;
                bytes.clear();
            }
            Ok(records)
        };
        for (number, id) in namespaces {
            write(Some(Change::Namespace { number: *number, id: *id }))?;
        }
        let (mut cursor, mut some) = (Some(0), Vec::new());
        while let Some(from) = cursor {
            cursor = self.shared.index.list(from, 4096, &mut some);
            some.retain(|(_, entry)| entry.is_own());
            for (fingerprint, entry) in some.drain(..) {
                write(Some(Change::Commit(record_of(fingerprint, &entry))))?;
            }
        }
        let records = write(None)?;
        let head = CheckpointHead {
            writer: self.id,
            generation,
            epoch: self.epoch,
            log: start.log,
            next_record: start.record,
            // Segments are made meanwhile; commits in them are in the log.
            next_segment: u32::try_from(self.next_segment.load(Ordering::Acquire)).unwrap_or(u32::MAX),
            records,
            proven_from: self.log.proven_from(),
        };
        write_full(&*file, &head.to_bytes(), 0).map_err(failed("writing to", path))?;
        file.sync_data().map_err(failed("syncing", path))?;
        Ok(())
    }

    /// Removes logs before this one. What is left of them says nothing.
    fn remove_logs(&self, before: u32) -> Result<()> {
        let files = list(&*self.shared.disk, &self.directory)?;
        remove_logs(&*self.shared.disk, &self.directory, files, before)
    }
}

/// Removes logs before this one, the oldest first: as long as a log is there, so are all after it, and those who follow
/// miss none.
pub(super) fn remove_logs(
    disk: &dyn Disk,
    directory: &Path,
    files: impl IntoIterator<Item = WriterFile>,
    before: u32,
) -> Result<()> {
    let mut logs: Vec<u32> = files
        .into_iter()
        .filter_map(|file| match file {
            WriterFile::Log(number) if number < before => Some(number),
            _ => None,
        })
        .collect();
    logs.sort_unstable();
    for number in logs {
        let path = directory.join(names::log(number));
        disk.remove(&path).map_err(failed("removing", &path))?;
    }
    Ok(())
}

pub(super) fn record_of(fingerprint: Fingerprint, entry: &Entry) -> BlockRecord {
    BlockRecord {
        fingerprint,
        namespace: entry.namespace,
        segment: entry.slot.segment,
        slot: entry.slot.slot,
        sequence: entry.sequence,
        payload_len: entry.payload_len,
        // Slots of the index are shorter than what 32 bits can count.
        stride_blocks: u32::try_from(stride_of(entry) / BLOCK_LEN).unwrap_or(u32::MAX),
        shards: u16::from(entry.flags) + 1,
        expires: entry.expires,
        sums: if entry.class == WITHOUT_SUMS { Sums::Some } else { Sums::All },
    }
}
