//! Reads blocks for their own sake: to see what they are made of, and whether they are what was stored.
#![forbid(unsafe_code)]

use super::{Core, gate::Waiting};
use crate::{
    BlockInfo, Error, EventKind, Fingerprint, KeepAlive, Key, NamespaceId, Piece, Priority, Result,
    ShardInfo, Verified,
    format::{Shard, ShardTable, expiry_time, header::BlockHeader},
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

/// What one block turned out to be.
enum Seen {
    Good(ShardTable, Option<SystemTime>),
    Gone,
    Corrupt(String),
    Failed(io::Error),
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
    match read(core, namespace, key, &found, (Priority::Demand, longest), &[]) {
        Seen::Good(table, expires) => {
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
    let header_only = read(core, block.namespace, &key, &found, (priority, LONGEST_READ), &[]);
    let seen = match header_only {
        Seen::Good(table, _) => read(core, block.namespace, &key, &found, (priority, LONGEST_READ), &table.0),
        other => other,
    };
    match seen {
        Seen::Good(table, _) => {
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

/// Reads the header, and these shards of the block with their checksums.
fn read(
    core: &Arc<Core>,
    namespace: NamespaceId,
    key: &Key,
    found: &Found,
    (priority, longest): (Priority, Duration),
    shards: &[Shard],
) -> Seen {
    let is_gone = || !found.is_held && !core.layout.is_still_there(found);
    let corrupt = |reason: String| {
        if is_gone() {
            return Seen::Gone;
        }
        core.layout.invalidate(found);
        core.note_block(EventKind::CorruptBlock, namespace, key, reason.clone());
        Seen::Corrupt(reason)
    };
    let mut parts = Vec::with_capacity(shards.len());
    let mut memory = Vec::with_capacity(shards.len());
    for (number, shard) in shards.iter().enumerate() {
        let Ok(mut buffer) = buffer(shard.len) else {
            return Seen::Failed(io::ErrorKind::OutOfMemory.into());
        };
        parts.push(Part {
            offset: found.place.payload + found.place.stride * number as u64,
            pieces: vec![Piece::host(buffer.as_mut_ptr(), buffer.len())],
            len: shard.len,
        });
        memory.push(buffer);
    }
    let outcome = transfer(core, found, (priority, longest), parts, memory);
    match outcome.result {
        Ok(()) => {}
        Err(failure @ Failure::Short { .. }) => return corrupt(failure.to_string()),
        Err(Failure::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Seen::Gone,
        Err(Failure::Io(error)) => return Seen::Failed(error),
        Err(failure) => return Seen::Failed(io::Error::from_raw_os_error(failure.errno())),
    }
    let differs = |(number, shard): (usize, &Shard)| {
        let computed = outcome.checksums.get(number).copied().flatten();
        matches!((shard.checksum, computed), (Some(stored), Some(computed)) if stored != computed)
    };
    match core.layout.check(found, key, &outcome.header) {
        Verdict::Good(table) if !shards.is_empty() && table.0 != shards => Seen::Gone,
        Verdict::Good(table) => match shards.iter().enumerate().position(differs) {
            // Nothing else vouches for bytes without a checksum.
            None if shards.iter().any(|shard| shard.checksum.is_none()) && is_gone() => Seen::Gone,
            None => {
                let header = BlockHeader::parse(&outcome.header).ok();
                Seen::Good(table, header.and_then(|header| expiry_time(header.expires)))
            }
            Some(number) => corrupt(format!("shard {number} has another checksum than the one stored")),
        },
        Verdict::Moved => Seen::Gone,
        Verdict::Corrupt(reason) => corrupt(reason),
    }
}

fn buffer(len: u64) -> Result<Vec<u8>, ()> {
    let len = usize::try_from(len).map_err(|_| ())?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len).map_err(|_| ())?;
    buffer.resize(len, 0);
    Ok(buffer)
}

/// Reads, and waits for it.
fn transfer(
    core: &Arc<Core>,
    found: &Found,
    (priority, longest): (Priority, Duration),
    parts: Vec<Part>,
    memory: Vec<Vec<u8>>,
) -> Outcome {
    let (send, receive) = crossbeam_channel::bounded(1);
    let job = Job {
        tag: 0,
        direction: Direction::Read,
        priority,
        file: found.place.file.clone(),
        header: found.place.header.map_or(Header::None, |offset| Header::Read { offset }),
        parts,
        checksums: Checksums::Compute,
        deadline: Some(Instant::now() + longest),
        withdrawn: Withdrawn::default(),
        wait_event: None,
        keep: KeepAlive::new(Arc::new(memory)),
        done: Box::new(move |outcome| {
            // Nobody waits any more if it took too long.
            let _ = send.send(outcome);
        }),
    };
    core.submit(vec![Waiting::Job(Box::new(job))]);
    let outcome = receive.recv_timeout(longest).unwrap_or_else(|_| Outcome::failed(Failure::TimedOut));
    core.note_outcome(Direction::Read, &outcome);
    outcome
}
