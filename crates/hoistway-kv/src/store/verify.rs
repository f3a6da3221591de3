//! Reads blocks for their own sake: to see what they are made of, and whether they are what was stored.
#![forbid(unsafe_code)]

use super::{Core, gate::Waiting};
use crate::{
    BlockInfo, Error, EventKind, Fingerprint, KeepAlive, Key, NamespaceId, Piece, Priority, Result,
    ShardInfo, Verified,
    format::{BLOCK_LEN, Shard, ShardTable, expiry_time, header::BlockHeader, joined_checksum},
    io::{Checksums, Direction, Failure, Header, Job, Outcome, Part, Withdrawn},
    layout::{Found, Listed, Lookup, Verdict},
};
use std::{
    io,
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

/// Blocks that are listed together.
pub(super) const PAGE: usize = 256;
/// Time that the system gets to read a block.
pub(super) const LONGEST_READ: Duration = Duration::from_secs(60);

/// Host memory that a block is read to. A larger one is read part by part.
const MOST_BYTES: u64 = if cfg!(test) { 64 << 10 } else { 64 << 20 };

/// What one block turned out to be.
enum Seen {
    Good {
        table: ShardTable,
        expires: Option<SystemTime>,
        /// CRC-32C of the spans that were read.
        sums: Vec<Option<u32>>,
    },
    Gone,
    Corrupt(String),
    Failed(io::Error),
}

/// Bytes of a shard.
struct Span {
    shard: usize,
    start: u64,
    len: u64,
}

/// What a block is made of.
pub(crate) fn block(
    core: &Arc<Core>,
    namespace: NamespaceId,
    key: &Key,
    longest: Duration,
) -> Result<Option<BlockInfo>> {
    let found = match core.layout.find(namespace, key, Fingerprint::of(namespace, key.as_bytes())) {
        Lookup::Found(found) => found,
        Lookup::Miss | Lookup::Expired => return Ok(None),
        Lookup::Failed(source) => {
            return Err(Error::Io {
                operation: "looking for a block in",
                path: core.root.to_path_buf(),
                source,
            });
        }
    };
    let reading = Reading { core, namespace, key, found: &found, priority: Priority::Demand, longest };
    match reading.read(&[]) {
        Seen::Good { table, expires, .. } => {
            let shard = |shard: &Shard| ShardInfo { len: shard.len, checksum: shard.checksum };
            Ok(Some(BlockInfo { shards: table.0.iter().map(shard).collect(), expires }))
        }
        Seen::Gone => Ok(None),
        Seen::Corrupt(reason) => {
            Err(Error::DamagedBlock { fingerprint: Fingerprint::of(namespace, key.as_bytes()), reason })
        }
        Seen::Failed(source) => {
            Err(Error::Io { operation: "reading", path: found.place.file.path().to_owned(), source })
        }
    }
}

/// The key of a block, which may have to be read.
pub(crate) fn key_of(core: &Arc<Core>, block: Fingerprint) -> Result<Option<Key>> {
    let key = core.layout.key_of(block);
    if let Err(error @ Error::DamagedBlock { .. }) = &key {
        core.events.note(EventKind::CorruptBlock, None, error.to_string());
    }
    key
}

/// Reads every block, until `progress` says otherwise.
pub(crate) fn verify(
    core: &Arc<Core>,
    mut progress: impl FnMut(&Verified) -> ControlFlow<()>,
) -> Result<Verified> {
    let mut verified = Verified::default();
    let mut next = Some(0);
    while let Some(cursor) = next {
        let mut listed = Vec::new();
        next = core.layout.list(cursor, PAGE, &mut listed);
        for block in &listed {
            core.check_open()?;
            verify_one(core, block, Priority::Background, &mut verified);
            if progress(&verified).is_break() {
                return Ok(verified);
            }
        }
    }
    Ok(verified)
}

pub(super) fn verify_one(core: &Arc<Core>, block: &Listed, priority: Priority, verified: &mut Verified) {
    let key = match key_of(core, block.fingerprint) {
        Ok(Some(key)) => key,
        Ok(None) => {
            verified.gone += 1;
            return;
        }
        Err(Error::DamagedBlock { .. }) => {
            verified.blocks += 1;
            verified.corrupt += 1;
            verified.corrupt_of_others += u64::from(!block.is_own);
            return;
        }
        Err(error) => {
            core.events.note(EventKind::LoadFailed, None, error.to_string());
            verified.failed += 1;
            return;
        }
    };
    let found = match core.layout.find(block.namespace, &key, block.fingerprint) {
        Lookup::Found(found) => found,
        Lookup::Miss | Lookup::Expired => {
            verified.gone += 1;
            return;
        }
        Lookup::Failed(error) => {
            core.note_block(EventKind::LoadFailed, block.namespace, &key, error.to_string());
            verified.failed += 1;
            return;
        }
    };
    let namespace = block.namespace;
    let reading = Reading { core, namespace, key: &key, found: &found, priority, longest: LONGEST_READ };
    match reading.verify() {
        Seen::Good { table, .. } => {
            verified.blocks += 1;
            verified.bytes = table.0.iter().fold(verified.bytes, |sum, shard| sum.saturating_add(shard.len));
            verified.without_checksum +=
                table.0.iter().filter(|shard| shard.checksum.is_none()).count() as u64;
        }
        Seen::Gone => verified.gone += 1,
        Seen::Corrupt(_) => {
            verified.blocks += 1;
            verified.corrupt += 1;
            verified.corrupt_of_others += u64::from(!block.is_own);
        }
        Seen::Failed(error) => {
            let path = found.place.file.path().display();
            core.note_block(EventKind::LoadFailed, block.namespace, &key, format!("reading {path}: {error}"));
            verified.failed += 1;
        }
    }
}

/// A block that is being read.
struct Reading<'a> {
    core: &'a Arc<Core>,
    namespace: NamespaceId,
    key: &'a Key,
    found: &'a Found,
    priority: Priority,
    /// Time of each read.
    longest: Duration,
}

impl Reading<'_> {
    fn is_gone(&self) -> bool {
        !self.found.is_held && !self.core.layout.is_still_there(self.found)
    }

    fn corrupt(&self, reason: String) -> Seen {
        if self.is_gone() {
            return Seen::Gone;
        }
        self.core.layout.invalidate(self.found);
        let file = self.found.place.file.path();
        self.core.events.note_damage(file, self.namespace, self.key, reason.clone());
        Seen::Corrupt(reason)
    }

    /// Reads the header and all shards, and compares their checksums.
    fn verify(&self) -> Seen {
        let (table, expires) = match self.read(&[]) {
            Seen::Good { table, expires, .. } => (table, expires),
            other => return other,
        };
        let mut sums = vec![Some(0); table.0.len()];
        let mut next = (0, 0);
        loop {
            let spans = next_spans(&table.0, &mut next);
            if spans.is_empty() {
                break;
            }
            let read = match self.read(&spans) {
                Seen::Good { table: now, sums, .. } if now == table => sums,
                Seen::Good { .. } => return Seen::Gone,
                other => return other,
            };
            for (span, sum) in spans.iter().zip(read) {
                let joined = sums[span.shard].zip(sum);
                sums[span.shard] = joined.map(|(before, sum)| joined_checksum(before, sum, span.len));
            }
        }
        let differs = |(shard, sum): (&Shard, &Option<u32>)| matches!((shard.checksum, sum), (Some(stored), Some(sum)) if stored != *sum);
        if let Some(number) = table.0.iter().zip(&sums).position(differs) {
            return self.corrupt(format!("shard {number} has another checksum than the one stored"));
        }
        // Nothing else vouches for bytes without a checksum.
        if table.0.iter().any(|shard| shard.checksum.is_none()) && self.is_gone() {
            return Seen::Gone;
        }
        Seen::Good { table, expires, sums }
    }

    /// Reads the header, and these bytes of the shards.
    fn read(&self, spans: &[Span]) -> Seen {
        let place = &self.found.place;
        let mut parts = Vec::with_capacity(spans.len());
        let mut memory = Vec::with_capacity(spans.len());
        for span in spans {
            let Ok(mut buffer) = buffer(span.len) else {
                return Seen::Failed(io::ErrorKind::OutOfMemory.into());
            };
            parts.push(Part {
                offset: place.payload + place.stride * span.shard as u64 + span.start,
                pieces: vec![Piece::host(buffer.as_mut_ptr(), buffer.len())],
                len: span.len,
            });
            memory.push(buffer);
        }
        let outcome = self.transfer(parts, memory);
        match outcome.result {
            Ok(()) => {}
            Err(failure @ Failure::Short { .. }) => return self.corrupt(failure.to_string()),
            Err(Failure::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Seen::Gone,
            Err(Failure::Io(error)) => return Seen::Failed(error),
            Err(failure) => return Seen::Failed(io::Error::from_raw_os_error(failure.errno())),
        }
        match self.core.layout.check(self.found, self.key, &outcome.header) {
            Verdict::Good(table) => {
                let header = BlockHeader::parse(&outcome.header).ok();
                let expires = header.and_then(|header| expiry_time(header.expires));
                Seen::Good { table, expires, sums: outcome.checksums }
            }
            Verdict::Moved => Seen::Gone,
            Verdict::Corrupt(reason) => self.corrupt(reason),
        }
    }

    /// Reads, and waits for it.
    fn transfer(&self, parts: Vec<Part>, memory: Vec<Vec<u8>>) -> Outcome {
        let place = &self.found.place;
        let (send, receive) = crossbeam_channel::bounded(1);
        let job = Job {
            tag: 0,
            direction: Direction::Read,
            priority: self.priority,
            file: place.file.clone(),
            header: place.header.map_or(Header::None, |offset| Header::Read { offset }),
            parts,
            checksums: Checksums::Compute,
            deadline: Some(Instant::now() + self.longest),
            withdrawn: Withdrawn::default(),
            wait_event: None,
            keep: KeepAlive::new(Arc::new(memory)),
            done: Box::new(move |outcome| {
                // The caller waits no more if it took too long.
                let _ = send.send(outcome);
            }),
        };
        self.core.submit(vec![Waiting::Job(Box::new(job))]);
        let outcome =
            receive.recv_timeout(self.longest).unwrap_or_else(|_| Outcome::failed(Failure::TimedOut));
        self.core.note_outcome(Direction::Read, &outcome);
        outcome
    }
}

/// Bytes of shards that are read together, from a shard and a place in it on, which it moves. None at the end.
fn next_spans(shards: &[Shard], (shard, start): &mut (usize, u64)) -> Vec<Span> {
    let (mut spans, mut room) = (Vec::new(), MOST_BYTES);
    while let Some(len) = shards.get(*shard).map(|shard| shard.len.saturating_sub(*start)) {
        if len == 0 {
            (*shard, *start) = (*shard + 1, 0);
            continue;
        }
        let len = len.min(room / BLOCK_LEN * BLOCK_LEN);
        if len == 0 {
            break;
        }
        spans.push(Span { shard: *shard, start: *start, len });
        (*start, room) = (*start + len, room - len);
    }
    spans
}

fn buffer(len: u64) -> Result<Vec<u8>, ()> {
    let len = usize::try_from(len).map_err(|_| ())?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len).map_err(|_| ())?;
    buffer.resize(len, 0);
    Ok(buffer)
}
