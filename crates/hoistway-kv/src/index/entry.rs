//! What the index says of a block, and what it answers.
#![forbid(unsafe_code)]

use super::ReadHold;
use crate::{Fingerprint, format::BLOCK_LEN};

/// A place of fixed length in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot {
    pub(crate) segment: u32,
    /// Counted from the segment's first.
    pub(crate) slot: u32,
}

/// Longest payload that an entry can tell of.
pub(crate) const MAX_PAYLOAD_LEN: u64 = (1 << 48) - 1;
/// Longest slot that an entry can tell of.
pub(crate) const MAX_SLOT_BYTES: u64 = u32::MAX as u64 * BLOCK_LEN;

/// What the index knows of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Who wrote it, as the layout counts writers. 0: this process.
    pub(crate) owner: u16,
    /// Its namespace, as the layout counts them.
    pub(crate) namespace: u16,
    /// What the layout tells kinds of blocks apart by: few, as blocks of each are in lists of their own.
    pub(crate) class: u8,
    /// Anything that the layout wants to know.
    pub(crate) flags: u8,
    /// Where it is.
    pub(crate) slot: Slot,
    /// Bytes of storage that it takes, a multiple of 4096, at most [`MAX_SLOT_BYTES`].
    pub(crate) slot_bytes: u64,
    /// Bytes of its shards, at most [`MAX_PAYLOAD_LEN`].
    pub(crate) payload_len: u64,
    /// Which of its writer's writes it was.
    pub(crate) sequence: u64,
    /// When it ends, in seconds since 1970; 0: never.
    pub(crate) expires: u32,
}

impl Entry {
    /// Whether this process wrote it, and may evict it.
    pub(crate) fn is_own(&self) -> bool {
        self.owner == 0
    }

    /// Whether its time is over.
    pub(crate) fn is_expired(&self, now: u32) -> bool {
        self.expires != 0 && self.expires <= now
    }
}

/// The answer to [`Index::get`](super::Index::get).
#[derive(Debug)]
pub(crate) enum Lookup {
    /// It is there; an own block's slot is not given to another while the hold lives.
    Found(Entry, ReadHold),
    Miss,
    /// It is there, but its time is over.
    Expired,
}

/// What an insertion does where the block is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// The new one takes its place.
    Replace,
    /// It stays.
    Keep,
}

/// The answer to [`Index::insert`](super::Index::insert).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// It was not there.
    New,
    /// It took the place of this one.
    Replaced(Removed),
    /// It was there, and stays as it was.
    Kept(Entry),
    /// The index has no room for one more combination of owner, namespace and class.
    Refused,
}

/// When the slot of a block that is not found any more can be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// At once: the block has no readers.
    Now,
    /// When the last reader is done: [`Index::freed`](super::Index::freed) tells.
    Later,
}

/// A block that is not found any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Removed {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) entry: Entry,
    pub(crate) reuse: Reuse,
}

/// Which blocks may be evicted. All are own ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Candidates {
    Anywhere,
    /// Of a namespace.
    Namespace(u16),
}

/// What [`Index::evict`](super::Index::evict) is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Want {
    pub(crate) from: Candidates,
    /// Bytes of slots that have to go.
    pub(crate) bytes: u64,
}

/// How much a namespace, or the whole index, has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) own_blocks: u64,
    /// Bytes of the slots of own blocks.
    pub(crate) own_slot_bytes: u64,
    pub(crate) own_payload_bytes: u64,
    pub(crate) foreign_blocks: u64,
    pub(crate) foreign_payload_bytes: u64,
}

/// A segment, and what would be lost with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentWorth {
    pub(crate) segment: u32,
    /// What its blocks are worth, by their bytes.
    pub(crate) worth: u64,
    /// Whether it has blocks that are pinned or read.
    pub(crate) is_in_use: bool,
}

/// An own block, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedBlock {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) sequence: u64,
    pub(crate) slot: Slot,
    pub(crate) slot_bytes: u64,
}

/// Whether a block should stay if its place is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heat {
    Pinned,
    /// It is being read, and not pinned.
    Read,
    /// The policy would keep it.
    Hot,
    Cold,
}
