//! Commits: blocks that have been written are made visible.
#![forbid(unsafe_code)]

use super::{
    claim::Token,
    failed, lock,
    log::Sync,
    segment::Segment,
    slots::{ClaimEnd, Waiting},
    writer::{Writer, own_entry},
};
use crate::{
    Durability, Error, Result,
    format::{
        BLOCK_LEN,
        record::{BlockRecord, Change, Sums},
    },
    index::{Inserted, Reuse},
    layout::Written,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, PoisonError, atomic::Ordering},
};

impl Writer {
    /// Makes blocks visible; one answer each.
    pub(super) fn commit(&self, mut blocks: Vec<Written>) -> Vec<Result<()>> {
        let mut results = self.prepare(&mut blocks);
        let mut good: Vec<Ready> = Vec::with_capacity(blocks.len());
        for (number, written) in blocks.into_iter().enumerate() {
            if results[number].is_err() {
                continue;
            }
            match self.check_open().and_then(|()| Ready::new(self, written, number)) {
                Ok(block) => good.push(block),
                Err(error) => results[number] = Err(error),
            }
        }
        if good.is_empty() {
            return results;
        }
        let _publishing = self.publishing.read().unwrap_or_else(PoisonError::into_inner);
        let mut changes = self.unlogged(&good);
        let namespaces: Vec<u16> = changes.iter().map(|(number, _)| *number).collect();
        let mut changes: Vec<Change> = changes.drain(..).map(|(_, change)| change).collect();
        changes.extend(good.iter().map(|block| Change::Commit(block.record)));
        if good.iter().any(|block| block.record.sums == Sums::Some) {
            self.has_blocks_without_sums.store(true, Ordering::Release);
        }
        // A power cut must not leave the older block of a key that was stored again.
        let is_again = {
            let unsynced = lock(&self.unsynced_tombstones);
            good.iter().any(|block| unsynced.contains_key(&block.record.fingerprint))
        };
        let sync = if is_again { Sync::Now } else { self.sync_mode() };
        let there = self.check_here().and_then(|()| self.log.append(&changes, sync)).and_then(|()| {
            let segments: BTreeMap<_, _> =
                good.iter().map(|block| (block.record.segment, &block.token.segment)).collect();
            self.check_there(segments.into_values())
        });
        let missing = match there {
            Ok(missing) => missing,
            Err(error) => {
                for block in good {
                    results[block.number] = Err(again(&error));
                    self.withdraw(block);
                }
                return results;
            }
        };
        lock(&self.logged).extend(namespaces);
        self.release_synced();
        // Backwards: what comes first in a prefix is to go last.
        for block in good.into_iter().rev() {
            let number = block.number;
            if missing.contains(&block.record.segment) {
                let path = block.token.segment.data.path();
                results[number] = Err(failed("looking for", path)(std::io::ErrorKind::NotFound.into()));
                self.withdraw(block);
            } else if let Err(error) = self.publish(block) {
                results[number] = Err(error);
            }
        }
        results
    }

    /// Gives up a block whose record may be on the disk: until a tombstone is there, the slot stays as it is.
    fn withdraw(&self, mut block: Ready) {
        block.token.end = ClaimEnd::Used;
        self.tombstone_later(block.record.fingerprint, &own_entry(&block.record), Reuse::Now);
    }

    /// Waits until the data of blocks is on the disk, where it has to be before they are committed; one answer each.
    pub(super) fn prepare(&self, blocks: &mut [Written]) -> Vec<Result<()>> {
        let mut tokens: Vec<Option<(&mut Token, bool)>> = blocks
            .iter_mut()
            .map(|block| {
                let has_sums = block.table.0.iter().all(|shard| shard.checksum.is_some());
                block.claim.token.downcast_mut().map(|token| (token, has_sums))
            })
            .collect();
        let is_needed = |has_sums: bool| self.durability != Durability::None || !has_sums;
        let segments: BTreeMap<u32, Arc<Segment>> = tokens
            .iter()
            .flatten()
            .filter(|(token, has_sums)| is_needed(*has_sums) && !token.is_synced)
            .map(|(token, _)| (token.slot.segment, Arc::clone(&token.segment)))
            .collect();
        let mut failures = HashMap::new();
        for (number, segment) in &segments {
            if let Err(error) = segment.sync() {
                failures.insert(*number, failed("syncing", segment.data.path())(error));
            }
        }
        let answer = |token: &mut Option<(&mut Token, bool)>| {
            let Some((token, _)) = token.as_mut().filter(|(token, _)| !token.is_synced) else {
                return Ok(());
            };
            if let Some(error) = failures.get(&token.slot.segment) {
                return Err(again(error));
            }
            if token.segment.failures() != token.failures {
                let lost = std::io::Error::other("an earlier sync failed, and may have lost this block");
                return Err(failed("syncing", token.segment.data.path())(lost));
            }
            token.is_synced = segments.contains_key(&token.slot.segment);
            Ok(())
        };
        tokens.iter_mut().map(answer).collect()
    }

    /// Namespaces of blocks that the log does not know yet.
    fn unlogged(&self, blocks: &[Ready]) -> Vec<(u16, Change)> {
        let mut numbers: BTreeSet<u16> = blocks.iter().map(|block| block.record.namespace).collect();
        let logged = lock(&self.logged);
        numbers.retain(|number| !logged.contains(number));
        let named = numbers.into_iter();
        named
            .filter_map(|number| {
                let id = self.shared.namespaces.id(number)?;
                Some((number, Change::Namespace { number, id }))
            })
            .collect()
    }

    /// Shows a block that the log has.
    fn publish(&self, mut block: Ready) -> Result<()> {
        let token = &mut block.token;
        let record = &block.record;
        let entry = own_entry(record);
        token.end = ClaimEnd::Used;
        match self.shared.hidden.replace(&self.shared.index, record.fingerprint, &entry) {
            Inserted::Replaced(removed) if removed.entry.is_own() => {
                // Its tombstone is the record of the block that replaced it.
                let for_readers = removed.reuse == Reuse::Later;
                let waiting = Waiting { for_tombstone: false, for_readers };
                lock(&self.slots).retire(removed.entry.slot, removed.entry.slot_bytes, waiting);
            }
            Inserted::Replaced(_) | Inserted::New | Inserted::Kept(_) => {}
            Inserted::Refused => {
                self.tombstone_later(record.fingerprint, &entry, Reuse::Now);
                return Err(Error::InvalidRequest("there are too many namespaces for the index".into()));
            }
        }
        Ok(())
    }
}

/// An error that several callers are told.
fn again(error: &Error) -> Error {
    match error {
        Error::Io { operation, path, source } => Error::Io {
            operation,
            path: path.clone(),
            source: match source.raw_os_error() {
                Some(errno) => std::io::Error::from_raw_os_error(errno),
                None => std::io::Error::new(source.kind(), source.to_string()),
            },
        },
        other => Error::Internal(other.to_string()),
    }
}

/// A block whose record can be written.
struct Ready {
    number: usize,
    token: Box<Token>,
    record: BlockRecord,
}

impl Ready {
    fn new(writer: &Writer, written: Written, number: usize) -> Result<Self> {
        let token: Box<Token> = written
            .claim
            .token
            .downcast()
            .map_err(|_| Error::Internal("a claim of another layout".into()))?;
        if !std::ptr::eq(&*token.writer, writer) {
            let path = &token.writer.directory;
            return Err(failed("looking for", path)(std::io::ErrorKind::NotFound.into()));
        }
        let shards = &written.table.0;
        if shards.len() != usize::from(token.shards) || shards.iter().any(|shard| shard.len > token.stride) {
            return Err(Error::Internal("a block has other shards than were claimed".into()));
        }
        let sums = if shards.iter().all(|shard| shard.checksum.is_some()) { Sums::All } else { Sums::Some };
        let stride_blocks = u32::try_from(token.stride / BLOCK_LEN)
            .map_err(|_| Error::Internal("a shard is longer than a slot".into()))?;
        let record = BlockRecord {
            fingerprint: token.fingerprint,
            namespace: token.namespace,
            segment: token.slot.segment,
            slot: token.slot.slot,
            sequence: token.sequence,
            payload_len: shards.iter().map(|shard| shard.len).sum(),
            stride_blocks,
            shards: token.shards,
            expires: token.expires,
            sums,
        };
        Ok(Self { number, token, record })
    }
}
