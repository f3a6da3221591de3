//! One object in the cache: its bytes, and the checksums of the blocks that are there.
#![forbid(unsafe_code)]

use super::{
    aligned::{AlignedBytes, is_aligned},
    is_read_only, private_folders,
    room::Room,
    unique,
};
use crate::{Cancel, parallel::lock, sys::files};
use crc_fast::{CrcAlgorithm, checksum};
use hoistway_io::{
    Alignment,
    file::{
        FileIdentity, FileUse, is_refusal_of_direct, is_transient, open_direct, read_at, read_exact_at,
        try_lock, try_lock_shared, unlock, write_all_at,
    },
};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, IoSlice},
    ops::Range,
    path::{Path, PathBuf},
    process,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Bytes of a block.
pub(super) const BLOCK_BYTES: u64 = 256 << 10;
/// Bytes of the record of a block in the map: its checksum and its state.
const RECORD_BYTES: u64 = 16;
/// The state of a block that is there. Any other is 0, or when the claim of a process that reads the block ends, in
/// milliseconds of the system's clock.
const PRESENT: u64 = u64::MAX;
/// How long a claim lasts, in milliseconds: other processes wait so long for one that was killed. Tests change it.
static CLAIM_MS: AtomicU64 = AtomicU64::new(10_000);
/// How often a read looks whether another process has brought a block.
const TICK: Duration = Duration::from_millis(10);
/// Records that are read or written at once where it is about all blocks.
const RECORDS_AT_ONCE: u64 = 4096;
/// How often the lock of a map is tried, a millisecond each. It is held for two calls of the system.
const LOCK_ATTEMPTS: u32 = 100;
/// How long an entry that is opened waits for its lock. A process that evicts holds it only while it looks or removes.
const OPEN_PATIENCE: Duration = Duration::from_secs(1);

/// An object gets no entry if it is more than so many times as long as the drive.
const MOST_DRIVES: u64 = 16;

/// The names of an entry's files.
pub(super) const DATA: &str = "data";
const MAP: &str = "map";
pub(super) const META: &str = "meta.json";
/// The mark of an entry that a load has compared with the store's checksum: the digest of the map that it had then.
const PROVEN: &str = "proven";

/// An entry's description of its object.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Meta {
    pub(super) url: String,
    pub(super) len: u64,
}

/// An object in the cache. It stays readable as long as it is open, also if it is evicted.
#[derive(Debug)]
pub(crate) struct Entry {
    len: u64,
    folder: PathBuf,
    data: File,
    direct: Option<File>,
    /// Whether direct reads were refused after all.
    is_buffered: AtomicBool,
    map: File,
    /// A child of `fork` claims nothing: a thread of its parent may hold the lock.
    process: u32,
    /// The blocks that this process has claimed, by this entry. Held while the map is locked.
    claimed: Mutex<HashMap<u64, Owner>>,
    next_owner: AtomicU64,
    /// Why nothing is written.
    refused: OnceLock<String>,
    /// Whether its blocks are not those of the object.
    is_discarded: AtomicBool,
    damaged_blocks: AtomicU64,
    kept_bytes: AtomicU64,
    left_out_bytes: AtomicU64,
}

/// What an entry holds of its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    Nothing,
    Part,
    /// All blocks, and no load has compared them with the store's checksum. The digest is of their checksums.
    Unproven(blake3::Hash),
    /// All blocks, as a load has compared them.
    Proven,
}

/// The owner of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The read with this number.
    Read(u64),
    /// The thread that writes behind loads: the bytes have come.
    Writer,
}

/// The claims of one read. Dropping them gives back what the writer has not taken over.
#[derive(Debug)]
pub(crate) struct Claims {
    entry: Arc<Entry>,
    owner: Owner,
    blocks: Range<u64>,
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.entry.release_of(self.owner, self.blocks.clone());
    }
}

/// The outcome for a range with missing blocks.
enum Missing {
    /// The caller has to read the rest, and may have claimed its blocks.
    Mine(Option<Range<u64>>),
    /// The first block that was missing has come in the meantime.
    Came,
    /// Another process is about to bring the first block that is missing.
    Pending,
}

impl Entry {
    /// Opens the entry of an object, which is made if there is none or it makes no sense.
    pub(super) fn open(room: &Room, key: &str, url: &str, len: u64) -> io::Result<Self> {
        let folder = room.objects().join(key);
        for _ in 0..3 {
            match Self::at(&folder) {
                Ok(entry) if entry.len == len => {
                    entry.note_use(&folder);
                    return Ok(entry);
                }
                Ok(_) => room.remove(&folder)?,
                Err(error) if error.kind() == ErrorKind::NotFound => Self::create(room, &folder, url, len)?,
                Err(error) if error.kind() == ErrorKind::InvalidData => room.remove(&folder)?,
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other(
            "another process removes it as soon as it is made; run no hoistway cache gc at the same time",
        ))
    }

    /// The entry in a folder.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::InvalidData`] if its files make no sense.
    pub(super) fn at(folder: &Path) -> io::Result<Self> {
        let invalid = || io::Error::from(ErrorKind::InvalidData);
        let Meta { len, .. } =
            serde_json::from_slice(&fs::read(folder.join(META))?).map_err(|_| invalid())?;
        let open = |name: &str| -> io::Result<(File, Option<String>)> {
            let path = folder.join(name);
            match OpenOptions::new().read(true).write(true).open(&path) {
                Err(error) if is_read_only(&error) => Ok((File::open(&path)?, Some(error.to_string()))),
                opened => Ok((opened?, None)),
            }
        };
        // Of a folder that was there a moment ago, a file that is missing was never there.
        let part = |name: &str| match open(name) {
            Err(error) if error.kind() == ErrorKind::NotFound && folder.is_dir() => Err(invalid()),
            opened => opened,
        };
        let ((data, data_refusal), (map, map_refusal)) = (part(DATA)?, part(MAP)?);
        let read_only = data_refusal.or(map_refusal);
        let lens = [data.metadata()?.len(), map.metadata()?.len()];
        if lens != [padded(len), blocks(len) * RECORD_BYTES] || is_too_long(len, folder) {
            return Err(invalid());
        }
        let lock_refusal = lock_in_use(&data, folder)?;
        let file_use = if read_only.is_some() { FileUse::Read } else { FileUse::ReadWrite };
        let direct = open_direct(&data, file_use).ok().map(|opened| opened.file);
        let refused = OnceLock::new();
        if let Some(reason) = read_only.or(lock_refusal) {
            refused.get_or_init(|| reason);
        }
        Ok(Self {
            len,
            folder: folder.to_owned(),
            data,
            direct,
            is_buffered: AtomicBool::new(false),
            map,
            process: process::id(),
            claimed: Mutex::default(),
            next_owner: AtomicU64::new(0),
            refused,
            is_discarded: AtomicBool::new(false),
            damaged_blocks: AtomicU64::new(0),
            kept_bytes: AtomicU64::new(0),
            left_out_bytes: AtomicU64::new(0),
        })
    }

    /// Makes an entry with no block. Another process may make it at the same time.
    fn create(room: &Room, folder: &Path, url: &str, len: u64) -> io::Result<()> {
        if is_too_long(len, &room.objects()) {
            return Err(io::Error::other(format!("it is longer than {MOST_DRIVES} times the drive")));
        }
        let new = unique(&room.temporary());
        let make = || -> io::Result<()> {
            private_folders().create(&new)?;
            let meta = Meta { url: url.to_owned(), len };
            fs::write(new.join(META), serde_json::to_vec(&meta)?)?;
            File::create_new(new.join(DATA))?.set_len(padded(len))?;
            File::create_new(new.join(MAP))?.set_len(blocks(len) * RECORD_BYTES)
        };
        let made = make().and_then(|()| match fs::rename(&new, folder) {
            Err(error) if folder.is_dir() => {
                tracing::debug!(%error, "another process has made the entry");
                Ok(false)
            }
            renamed => renamed.map(|()| true),
        });
        if !matches!(made, Ok(true)) {
            let _ = fs::remove_dir_all(&new);
        }
        made.map(drop)
    }

    /// Entries are evicted in the order of their last use.
    fn note_use(&self, folder: &Path) {
        // Where that is not allowed, nothing is evicted either.
        let meta: PathBuf = folder.join(META);
        let _ =
            OpenOptions::new().write(true).open(meta).and_then(|file| file.set_modified(SystemTime::now()));
    }

    /// The reason for which this entry is not written to; `None` while it is.
    pub(crate) fn refusal(&self) -> Option<&str> {
        self.refused.get().map(String::as_str)
    }

    /// Writes nothing from now on.
    pub(super) fn refuse(&self, why: impl Into<String>) {
        self.refused.get_or_init(|| why.into());
    }

    /// Whether blocks are read past the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.is_some() && !self.is_buffered.load(Ordering::Relaxed)
    }

    /// Blocks so far whose checksum was wrong, bytes that were kept, and bytes that were not, for want of memory or because the
    /// drive was slow.
    pub(crate) fn counts(&self) -> (u64, u64, u64) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (count(&self.damaged_blocks), count(&self.kept_bytes), count(&self.left_out_bytes))
    }

    pub(crate) fn note_left_out(&self, bytes: u64) {
        self.left_out_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The bytes of the block that has the byte at `offset`.
    pub(crate) fn block_at(&self, offset: u64) -> Range<u64> {
        let start = offset / BLOCK_BYTES * BLOCK_BYTES;
        start..self.len.min(start.saturating_add(BLOCK_BYTES))
    }

    /// The end of the last whole block before `end`.
    pub(crate) fn whole_end(&self, end: u64) -> u64 {
        if end >= self.len { self.len } else { end / BLOCK_BYTES * BLOCK_BYTES }
    }

    /// All blocks of the object, some at a time.
    fn pieces(&self) -> impl Iterator<Item = Range<u64>> {
        let count = blocks(self.len);
        (0..count).step_by(RECORDS_AT_ONCE as usize).map(move |at| at..count.min(at + RECORDS_AT_ONCE))
    }

    /// The blocks that are there.
    pub(super) fn present_blocks(&self) -> impl Iterator<Item = u64> {
        self.pieces().flat_map(|piece| {
            let present = piece.clone().zip(self.records(piece)).filter(|(_, record)| record.1 == PRESENT);
            present.map(|(block, _)| block)
        })
    }

    /// Whether a block is not there and would be kept.
    pub(crate) fn lacks(&self, offset: u64) -> bool {
        self.refusal().is_none() && !self.is_present(offset / BLOCK_BYTES)
    }

    /// What it holds now.
    pub(crate) fn holds(&self) -> Holds {
        let (mut digest, mut is_whole, mut is_empty) = (blake3::Hasher::new(), true, true);
        for piece in self.pieces() {
            for (sum, state) in self.records(piece) {
                (is_whole, is_empty) = (is_whole && state == PRESENT, is_empty && state != PRESENT);
                digest.update(&sum.to_le_bytes());
            }
        }
        let digest = digest.finalize();
        match (is_whole, is_empty) {
            // An object of no block.
            (true, true) | (false, true) => Holds::Nothing,
            (false, false) => Holds::Part,
            (true, false) => match fs::read(self.folder.join(PROVEN)) {
                Ok(mark) if mark == digest.as_bytes() => Holds::Proven,
                _ => Holds::Unproven(digest),
            },
        }
    }

    /// All of it has the checksum that the store says, if it still holds what had `digest` then. A block that is written later is
    /// covered by the mark if it has the same bytes.
    pub(crate) fn prove(&self, digest: blake3::Hash) {
        if self.process == process::id()
            && matches!(self.holds(), Holds::Unproven(own) if own == digest)
            && let Err(error) = fs::write(self.folder.join(PROVEN), digest.as_bytes())
        {
            tracing::debug!(%error, "an entry of the node's cache cannot be marked as compared");
        }
    }

    pub(super) fn is_present(&self, block: u64) -> bool {
        self.records(block..block + 1).first().is_some_and(|record| record.1 == PRESENT)
    }

    /// Whether it was evicted or replaced: what is written to it from then on takes room that no process accounts for.
    pub(super) fn is_removed(&self) -> bool {
        FileIdentity::of(&self.data).is_ok_and(|identity| identity.links() == 0)
    }

    /// Fills `target` with the bytes from `offset` on, and returns how many are there. What another process is about to bring
    /// is waited for, until `cancel` ends that or its claim ends. What is missing then is for the caller to bring, who keeps the
    /// claims until the read has ended. Calls `came` with the bytes in their order, and with the checksum of those that are a whole
    /// block.
    pub(crate) fn read_or_claim(
        self: &Arc<Self>,
        offset: u64,
        target: &mut [u8],
        cancel: &Cancel,
        mut came: impl FnMut(&[u8], Option<u64>),
    ) -> (usize, Option<Claims>) {
        let owner = Owner::Read(self.next_owner.fetch_add(1, Ordering::Relaxed));
        let (mut filled, mut came_at) = (0, None);
        loop {
            filled += self.read_checked(offset + filled as u64, &mut target[filled..], &mut came);
            let rest = offset + filled as u64..self.len.min(offset + target.len() as u64);
            if rest.is_empty() || self.refusal().is_some() {
                return (filled, None);
            }
            match self.claim(rest, owner) {
                Missing::Mine(blocks) => {
                    let claims = blocks.map(|blocks| Claims { entry: self.clone(), owner, blocks });
                    return (filled, claims);
                }
                Missing::Pending if !cancel.is_cancelled() => thread::sleep(TICK),
                // One that is said to be there and cannot be read is for the store to bring.
                Missing::Came if came_at != Some(filled) => came_at = Some(filled),
                Missing::Pending | Missing::Came => return (filled, None),
            }
        }
    }

    /// Fills `target` with the bytes from `offset` on, as far as their blocks are there and have the right checksums.
    pub(crate) fn read(&self, offset: u64, target: &mut [u8]) -> usize {
        self.read_checked(offset, target, &mut |_, _| ())
    }

    /// The same, with what [`Entry::read_or_claim`] calls.
    fn read_checked(
        &self,
        offset: u64,
        target: &mut [u8],
        came: &mut impl FnMut(&[u8], Option<u64>),
    ) -> usize {
        let end = self.len.min(offset.saturating_add(target.len() as u64));
        if offset >= end {
            return 0;
        }
        let first = offset / BLOCK_BYTES;
        let records = self.records(first..end.div_ceil(BLOCK_BYTES));
        let there = records.iter().take_while(|record| record.1 == PRESENT).count() as u64;
        let reach = end.min((first + there) * BLOCK_BYTES);
        let mut at = offset;
        while at < reach {
            let block = self.block_at(at);
            let place = &mut target[(at - offset) as usize..(reach - offset) as usize];
            let whole = reach / BLOCK_BYTES * BLOCK_BYTES;
            let (count, asked) = if at == block.start && whole > at {
                let place = &mut place[..(whole - at) as usize];
                let records = &records[(at / BLOCK_BYTES - first) as usize..];
                let count = self.read_blocks(at, place, records);
                let blocks = place[..count].chunks(BLOCK_BYTES as usize);
                blocks.zip(records).for_each(|(block, record)| came(block, Some(record.0)));
                (count, place.len())
            } else {
                let record = &records[(at / BLOCK_BYTES - first) as usize..][..1];
                let mut bytes = AlignedBytes::new(padded(block.end - block.start) as usize);
                let right = self.read_blocks(block.start, bytes.as_mut_slice(), record) as u64;
                let wanted = at..block.start.saturating_add(right).min(block.end).min(reach);
                let part = bytes.as_slice().get((at - block.start) as usize..).unwrap_or_default();
                let len = wanted.end.saturating_sub(wanted.start) as usize;
                place[..len].copy_from_slice(&part[..len]);
                came(
                    &place[..len],
                    (at == block.start && len as u64 == block.end - at).then_some(record[0].0),
                );
                (len, (block.end.min(reach) - at) as usize)
            };
            at += count as u64;
            // The next one is damaged, and was counted.
            if count < asked {
                break;
            }
        }
        (at - offset) as usize
    }

    /// Reads blocks from `offset` on, and returns the bytes of those that are right. The last one of an object is followed by
    /// zeros.
    fn read_blocks(&self, offset: u64, place: &mut [u8], records: &[Record]) -> usize {
        let read = match &self.direct {
            Some(direct) if self.is_direct() && is_aligned(place) => match read_all(direct, place, offset) {
                Err(error) if is_refusal_of_direct(&error) => {
                    self.is_buffered.store(true, Ordering::Relaxed);
                    read_all(&self.data, place, offset)
                }
                read => read,
            },
            _ => read_all(&self.data, place, offset),
        };
        let came = read.unwrap_or_else(|error| {
            tracing::debug!(%error, "the cache cannot be read");
            0
        });
        let mut at = 0;
        for (block, record) in place.chunks(BLOCK_BYTES as usize).zip(records) {
            let number = (offset + at as u64) / BLOCK_BYTES;
            let len = (self.len - number * BLOCK_BYTES).min(block.len() as u64) as usize;
            if at + len > came || checksum_of(&block[..len]) != record.0 {
                self.damaged_blocks.fetch_add(1, Ordering::Relaxed);
                self.invalidate(number);
                break;
            }
            at += len;
        }
        at
    }

    /// Writes whole blocks, the first of which is `first`. `bytes` is padded with zeros to a multiple of a sector's bytes.
    pub(super) fn write(&self, first: u64, bytes: &[u8]) -> io::Result<()> {
        let (start, mut at) = (first * BLOCK_BYTES, first * BLOCK_BYTES);
        let file = self.direct.as_ref().filter(|_| self.is_direct() && is_aligned(bytes));
        let mut write = |file: &File| {
            at = start;
            write_all_at(file, &mut [IoSlice::new(bytes)], &mut at, Alignment::BLOCK)
        };
        match file.map(&mut write) {
            Some(Err(error)) if is_refusal_of_direct(&error) => {
                self.is_buffered.store(true, Ordering::Relaxed);
                write(&self.data)?;
            }
            Some(written) => written?,
            None => write(&self.data)?,
        }
        let len = (self.len - start).min(bytes.len() as u64) as usize;
        let mut records = Vec::new();
        for block in bytes[..len].chunks(BLOCK_BYTES as usize) {
            records.extend_from_slice(&record(checksum_of(block), PRESENT));
        }
        // After the bytes: a process that is killed in between leaves a block that is not there.
        self.put(first, &records)?;
        if self.is_discarded.load(Ordering::SeqCst) {
            records.fill(0);
            self.put(first, &records)?;
        }
        let count = records.len() as u64 / RECORD_BYTES;
        let mut claimed = lock(&self.claimed);
        claimed.retain(|block, _| !(first..first + count).contains(block));
        self.kept_bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(())
    }

    /// The bytes of claimed blocks have come: their claims last until they are written.
    pub(super) fn hand_to_writer(&self, blocks: Range<u64>) {
        let mut claimed = lock(&self.claimed);
        for block in blocks {
            if let Some(owner) = claimed.get_mut(&block) {
                *owner = Owner::Writer;
            }
        }
    }

    /// Gives up claims of blocks that are not kept after all.
    pub(super) fn release(&self, blocks: Range<u64>) {
        self.release_if(blocks, |_| true);
    }

    /// Gives up those claims of blocks that still belong to `owner`.
    fn release_of(&self, owner: Owner, blocks: Range<u64>) {
        self.release_if(blocks, |claim| claim == owner);
    }

    fn release_if(&self, blocks: Range<u64>, is_given_up: impl Fn(Owner) -> bool) {
        let is_given_up = |claimed: &HashMap<u64, Owner>, block: u64| {
            claimed.get(&block).is_some_and(|owner| is_given_up(*owner))
        };
        if self.process != process::id()
            || !blocks.clone().any(|block| is_given_up(&lock(&self.claimed), block))
        {
            return;
        }
        self.locked(|claimed| {
            for block in blocks {
                if is_given_up(claimed, block) {
                    claimed.remove(&block);
                    if !self.is_present(block) {
                        let _ = self.put(block, &record(0, 0));
                    }
                }
            }
        });
    }

    /// Claims the blocks of a range that are missing, unless another process is about to bring the first of them.
    fn claim(&self, range: Range<u64>, owner: Owner) -> Missing {
        let first = range.start / BLOCK_BYTES;
        let last = range.end.div_ceil(BLOCK_BYTES);
        let claimed = self.locked(|claims| {
            let now = now_ms();
            let ends = now + CLAIM_MS.load(Ordering::Relaxed);
            // A claim that ends later than one can is of a clock that was set since.
            let is_pending =
                |block: u64, state: u64| state > now && state <= ends && !claims.contains_key(&block);
            let records = self.records(first..last);
            match records.first() {
                Some(&(_, PRESENT)) => return Missing::Came,
                Some(&(_, state)) if is_pending(first, state) => return Missing::Pending,
                _ => {}
            }
            let free: Vec<u64> = (first..)
                .zip(&records)
                .filter(|(block, record)| record.1 != PRESENT && !is_pending(*block, record.1))
                .map(|(block, _)| block)
                .collect();
            for block in free {
                if self.put(block, &record(0, ends)).is_ok() {
                    claims.insert(block, owner);
                }
            }
            Missing::Mine(Some(first..last))
        });
        claimed.unwrap_or(Missing::Mine(None))
    }

    /// Does something while no other process and no other thread claims blocks. `None` if the lock cannot be had.
    fn locked<T>(&self, work: impl FnOnce(&mut HashMap<u64, Owner>) -> T) -> Option<T> {
        if self.process != process::id() {
            return None;
        }
        let mut claimed = lock(&self.claimed);
        for _ in 0..LOCK_ATTEMPTS {
            match try_lock(&self.map) {
                Ok(()) => {
                    let done = work(&mut claimed);
                    unlock(&self.map);
                    return Some(done);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_millis(1))
                }
                Err(_) => return None,
            }
        }
        None
    }

    /// Has no block from now on, and is not written to: some of its bytes are not those of the object.
    pub(crate) fn discard(&self, why: &str) {
        self.refuse(why);
        if self.process != process::id() {
            return;
        }
        // Before the records: what is being written is discarded by the writer then.
        self.is_discarded.store(true, Ordering::SeqCst);
        self.lose_blocks();
    }

    /// Has no block now.
    pub(crate) fn lose_blocks(&self) {
        for piece in self.pieces() {
            let Range { start, end } = piece.clone();
            if self.records(piece).iter().all(|record| *record == (0, 0)) {
                continue;
            }
            if let Err(error) = self.put(start, &vec![0; ((end - start) * RECORD_BYTES) as usize]) {
                tracing::warn!(%error, "damaged blocks of the node's cache cannot be removed");
            }
        }
    }

    /// A block is not there any more.
    fn invalidate(&self, block: u64) {
        if self.refusal().is_none() {
            let _ = self.put(block, &record(0, 0));
        }
    }

    /// The records of blocks. What cannot be read is not there.
    fn records(&self, blocks: Range<u64>) -> Vec<Record> {
        let mut bytes = vec![0; ((blocks.end - blocks.start) * RECORD_BYTES) as usize];
        if read_exact_at(&self.map, &mut bytes, blocks.start * RECORD_BYTES).is_err() {
            bytes.fill(0);
        }
        let (records, _) = bytes.as_chunks::<{ RECORD_BYTES as usize }>();
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        records.iter().map(|record| (word(&record[..8]), word(&record[8..]))).collect()
    }

    fn put(&self, block: u64, records: &[u8]) -> io::Result<()> {
        let mut at = block * RECORD_BYTES;
        write_all_at(&self.map, &mut [IoSlice::new(records)], &mut at, Alignment::BYTE)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.process != process::id() {
            return;
        }
        // What was claimed and did not come: no other process need wait for it.
        let left: Vec<u64> = lock(&self.claimed).keys().copied().collect();
        left.into_iter().for_each(|block| self.release(block..block + 1));
    }
}

/// Locks an entry as one in use, so that it is not evicted. Returns a reason if the entry may be read but not written.
///
/// # Errors
/// [`ErrorKind::NotFound`] if it was evicted in the meantime.
fn lock_in_use(data: &File, folder: &Path) -> io::Result<Option<String>> {
    let identity = FileIdentity::of(data)?;
    let end = Instant::now() + OPEN_PATIENCE;
    loop {
        let locked = try_lock_shared(data);
        // A process that evicts it renames it before it lets the lock go.
        let named = FileIdentity::of(&File::open(folder.join(DATA))?)?;
        if (named.device(), named.inode()) != (identity.device(), identity.inode()) {
            return Err(ErrorKind::NotFound.into());
        }
        match locked {
            Ok(()) => return Ok(None),
            // Without locks it may be evicted while it is used, which loses no bytes.
            Err(error) if error.kind() != ErrorKind::WouldBlock => return Ok(None),
            Err(_) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
            Err(_) => return Ok(Some("another process holds the lock of its entry".to_owned())),
        }
    }
}

/// Checksum and state of a block.
type Record = (u64, u64);

fn record(sum: u64, state: u64) -> [u8; RECORD_BYTES as usize] {
    let mut bytes = [0; RECORD_BYTES as usize];
    bytes[..8].copy_from_slice(&sum.to_le_bytes());
    bytes[8..].copy_from_slice(&state.to_le_bytes());
    bytes
}

fn checksum_of(block: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, block)
}

fn blocks(len: u64) -> u64 {
    len.div_ceil(BLOCK_BYTES)
}

/// Whether an object is too long for a drive. Its parts may be kept where the whole has no room, but a server may say any length, and
/// many file systems take sparse files of any length. A file system that says no length has any.
fn is_too_long(len: u64, folder: &Path) -> bool {
    let is_less = |bytes: u64| bytes > 0 && len / MOST_DRIVES > bytes;
    files::space(folder).is_ok_and(|space| is_less(space.total_bytes))
}

/// The length of the file with the bytes: direct transfers take whole sectors.
pub(super) fn padded(len: u64) -> u64 {
    Alignment::BLOCK.up(len).unwrap_or(len)
}

/// Sets how long claims of this process last.
#[cfg(feature = "fault-injection")]
pub(super) fn set_claim_time(time: Duration) {
    CLAIM_MS.store(time.as_millis() as u64, Ordering::Relaxed);
}

fn now_ms() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64)
}

/// Reads until `place` is full or the file ends.
fn read_all(file: &File, place: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < place.len() {
        match read_at(file, &mut place[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(directory: &Path) -> Room {
        let room = Room::new(directory, None);
        [room.objects(), room.temporary()].iter().for_each(|folder| fs::create_dir(folder).unwrap());
        room
    }

    #[test]
    fn an_object_much_longer_than_the_drive_has_no_entry() {
        let directory = tempfile::tempdir().unwrap();
        let room = room(directory.path());
        let more = (files::space(directory.path()).unwrap().total_bytes + 1).saturating_mul(MOST_DRIVES);
        for len in [more, 9_000_000_000_000_000_000, u64::MAX] {
            let error = Entry::open(&room, "entry", "https://example.org/entry", len).unwrap_err();
            assert!(error.to_string().contains("times the drive"), "{error}");
        }
        let is_empty = |folder: PathBuf| fs::read_dir(folder).unwrap().next().is_none();
        assert!(is_empty(room.objects()) && is_empty(room.temporary()));
    }

    #[test]
    fn a_damaged_block_is_counted_once_wherever_a_read_begins() {
        let directory = tempfile::tempdir().unwrap();
        let room = room(directory.path());
        for (number, offset) in
            [0, 9, BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 9].into_iter().enumerate()
        {
            let bytes = vec![7; 4 * BLOCK_BYTES as usize];
            let key = number.to_string();
            let entry = Entry::open(&room, &key, "https://example.org/entry", bytes.len() as u64).unwrap();
            entry.write(0, &bytes).unwrap();
            let data = File::options().write(true).open(room.objects().join(&key).join(DATA)).unwrap();
            let mut at = 2 * BLOCK_BYTES + 100;
            write_all_at(&data, &mut [IoSlice::new(b"damage")], &mut at, Alignment::BYTE).unwrap();
            let mut found = vec![0; bytes.len() - offset as usize];
            let count = entry.read(offset, &mut found) as u64;
            assert_eq!((offset + count, entry.counts().0), (offset.max(2 * BLOCK_BYTES), 1), "{offset}");
        }
    }

    #[test]
    fn a_read_tells_the_checksums_of_whole_blocks_and_its_bytes_in_their_order() {
        let directory = tempfile::tempdir().unwrap();
        let room = room(directory.path());
        let len = 3 * BLOCK_BYTES + 99;
        let entry = Arc::new(Entry::open(&room, "entry", "https://example.org/entry", len).unwrap());
        let mut bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        bytes.resize(padded(len) as usize, 0);
        entry.write(0, &bytes).unwrap();
        for (start, end) in [(0, len), (9, len), (BLOCK_BYTES, 2 * BLOCK_BYTES + 9), (9, 99), (len - 9, len)]
        {
            let (mut target, mut found, mut whole) = (vec![0; (end - start) as usize], Vec::new(), 0);
            let (count, claims) = entry.read_or_claim(start, &mut target, &Cancel::default(), |came, sum| {
                assert!(sum.is_none_or(|sum| sum == checksum_of(came)));
                whole += u64::from(sum.is_some());
                found.extend_from_slice(came);
            });
            let expected = &bytes[start as usize..end as usize];
            assert!(count == expected.len() && claims.is_none() && found == expected && target == expected);
            let blocks = (0..4).filter(|block| (start..=end).contains(&(block * BLOCK_BYTES)));
            let blocks = blocks.filter(|block| end >= len.min((block + 1) * BLOCK_BYTES));
            assert_eq!(whole, blocks.count() as u64, "{start}..{end}");
        }
    }

    #[test]
    fn a_mark_is_of_the_bytes_that_were_compared() {
        let directory = tempfile::tempdir().unwrap();
        let room = room(directory.path());
        let open = || Entry::open(&room, "entry", "https://example.org/entry", 3 * BLOCK_BYTES).unwrap();
        let entry = open();
        let bytes = vec![7; 3 * BLOCK_BYTES as usize];
        let unproven = || match entry.holds() {
            Holds::Unproven(digest) => digest,
            other => panic!("{other:?}"),
        };
        entry.write(0, &bytes).unwrap();
        let first = unproven();
        let other = vec![8; BLOCK_BYTES as usize];
        entry.write(1, &other).unwrap();
        // It is of other bytes by now.
        entry.prove(first);
        let second = unproven();
        entry.prove(second);
        assert_eq!((entry.holds(), open().holds()), (Holds::Proven, Holds::Proven));
        // A block that was lost and is written again as it was.
        entry.invalidate(1);
        assert_eq!(entry.holds(), Holds::Part);
        entry.write(1, &other).unwrap();
        assert_eq!(entry.holds(), Holds::Proven);
        entry.write(2, &other).unwrap();
        assert!(unproven() != second);
        entry.discard("for the test");
        assert_eq!(entry.holds(), Holds::Nothing);
    }

    #[test]
    fn an_entry_is_whole_once_the_last_of_its_blocks_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let room = room(directory.path());
        // A sparse file, with records that are looked at in more than one piece.
        let count = RECORDS_AT_ONCE + 3;
        let entry =
            Entry::open(&room, "entry", "https://example.org/entry", count * BLOCK_BYTES - 9).unwrap();
        for block in (0..count).rev() {
            assert!(!entry.is_present(block));
            let expected = if block == count - 1 { Holds::Nothing } else { Holds::Part };
            assert_eq!(entry.holds(), expected);
            entry.put(block, &record(0, PRESENT)).unwrap();
        }
        assert!(matches!(entry.holds(), Holds::Unproven(_)) && entry.present_blocks().eq(0..count));
        entry.discard("for the test");
        assert_eq!(entry.present_blocks().count(), 0);
    }
}
