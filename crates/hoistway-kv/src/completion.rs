//! Outcomes of loads and stores.
#![forbid(unsafe_code)]

use crate::Carrier;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, time::Duration};

/// The outcome of one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Status {
    /// Loaded, and its checksum compared; or stored: its block is found once all its shards are there.
    Ok,
    /// A store of a block that is there already, or that another request is storing; nothing was written.
    Exists,
    /// A load of a block that is not there.
    Miss,
    /// A load of a block that had expired.
    Expired,
    /// A load of a block that is not what was stored. It is a miss from now on; the memory holds anything.
    Corrupt,
    /// It does not fit the block: the memory has another length than the shard, or the block has other shards. The
    /// block stays; the memory holds anything.
    Mismatch,
    /// A store that was refused: no room, too many bytes under way, not admitted.
    Dropped(DropReason),
    /// It timed out. The memory may still be read or written until the ticket is released.
    TimedOut,
    /// The caller cancelled it, or the store was closed.
    Cancelled,
    /// The system's error (`errno`). It does not concern the block: the block stays, and can be requested again.
    Io(i32),
}

impl Status {
    /// Whether bytes were delivered, or are in the store.
    pub fn is_ok(self) -> bool {
        matches!(self, Self::Ok | Self::Exists)
    }

    /// Whether a load has not found the block.
    pub(crate) fn is_absent(self) -> bool {
        matches!(self, Self::Miss | Self::Expired)
    }
}

/// Writes the name that reports and other languages use: `ok`, `dropped:no_room`, `io:5`.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Exists => "exists",
            Self::Miss => "miss",
            Self::Expired => "expired",
            Self::Corrupt => "corrupt",
            Self::Mismatch => "mismatch",
            Self::Dropped(DropReason::NoRoom) => "dropped:no_room",
            Self::Dropped(DropReason::Quota) => "dropped:quota",
            Self::Dropped(DropReason::Busy) => "dropped:busy",
            Self::Dropped(DropReason::NotAdmitted) => "dropped:not_admitted",
            Self::Dropped(DropReason::TooLarge) => "dropped:too_large",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Io(errno) => return write!(f, "io:{errno}"),
        })
    }
}

/// Why a store was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DropReason {
    /// All blocks that could be evicted are pinned or in use, or the file system is full.
    NoRoom,
    /// The namespace has used up its quota with blocks that cannot be evicted.
    Quota,
    /// Too much is in flight: stores, by `max_in_flight_bytes`, or 65,536 loads that have not ended.
    Busy,
    /// It was not asked for before (`admission`).
    NotAdmitted,
    /// It is larger than a segment.
    TooLarge,
}

/// The outcome of a ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The number of the ticket.
    pub ticket: u64,
    /// The outcome of each item, in the order of the request.
    pub items: Vec<Status>,
    /// Bytes that were delivered or stored.
    pub bytes: u64,
    /// Bytes that its transfers moved, by route: with headers and padding, and also of items that failed afterwards.
    pub carried: BTreeMap<Carrier, u64>,
    /// Bytes of the caller's that passed through the store's memory, because they were not aligned, or on a device.
    pub bounced_bytes: u64,
    /// The part of `bytes` that a load read from the far tier.
    pub far_bytes: u64,
    /// Blocks that a store with [`FarPolicy::WriteThrough`](crate::FarPolicy::WriteThrough) has not written to the far tier.
    pub far_missing: u64,
    /// Time before the first byte moved.
    pub queued: Duration,
    /// Time from then on.
    pub moving: Duration,
}

impl Completion {
    /// Whether every item is [`Status::is_ok`].
    pub fn is_ok(&self) -> bool {
        self.items.iter().all(|status| status.is_ok())
    }
}
