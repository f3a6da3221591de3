//! Statistics, reports and events of a store.
#![forbid(unsafe_code)]

use crate::{
    Carrier, DirectPath, Durability, FarPolicy, Fingerprint, Key, LayoutKind, NamespaceId, Route, StoreAccess,
};
use hoistway_io::Refusal;
use serde::{Serialize, Serializer};
use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// What a store holds, and what it has done since it was opened. Counters only grow.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Blocks that are found.
    pub blocks: u64,
    /// Bytes of their shards.
    pub payload_bytes: u64,
    /// Bytes that this process's files take, with headers, logs and room that is not used.
    pub allocated_bytes: u64,
    /// Bytes that the files of all processes take.
    pub root_bytes: u64,
    /// Most bytes that these may take, as this process was told.
    pub capacity_bytes: Option<u64>,
    /// Bytes of host memory that the index takes.
    pub index_bytes: u64,
    /// Time that it took to open.
    #[serde(serialize_with = "seconds")]
    pub recovery: Duration,
    /// Blocks that were known when the store was opened, but were not whole.
    pub lost_on_recovery: u64,
    /// Records of other processes' logs that cannot be read although others follow them. Their blocks may not be found.
    pub damaged_records: u64,
    /// Blocks that were evicted to make room.
    pub evicted_blocks: u64,
    /// Blocks that expired.
    pub expired_blocks: u64,
    /// Blocks that were found damaged, and are missing now.
    pub corrupt_blocks: u64,
    /// Namespaces that are there, but cannot be used: an event says why.
    pub unusable_namespaces: u64,
    /// What was asked of each namespace.
    pub namespaces: Vec<NamespaceStats>,
    /// Stores that were refused, by reason.
    pub dropped: Dropped,
    /// Loaded items whose checksums are compared even if `verify` is off: no sync covers their blocks, so a power cut may
    /// have changed them.
    pub unsynced_loads: u64,
    /// Requests that timed out.
    pub timed_out: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
    /// Transfers that ended with an error of the system or of a device.
    pub io_errors: u64,
    /// Groups of blocks that were committed together.
    pub commits: u64,
    /// Blocks that were begun, but never got all their shards.
    pub abandoned: u64,
    /// Requests that have not ended.
    pub open_requests: u64,
    /// Bytes in flight.
    pub in_flight_bytes: u64,
    /// Loads that wait for others to end, because too many bytes are in flight.
    pub queued_loads: u64,
    /// Blocks that have some of their shards.
    pub partial_blocks: u64,
    /// Requests that have ended, but whose memory may still be read or written.
    pub leased_requests: u64,
    /// Events that were not fetched in time, and were dropped.
    pub forgotten_events: u64,
    /// What the far tier holds and did.
    pub far: Option<FarStats>,
}

/// What the far tier of a store holds and did. Counters only grow.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FarStats {
    /// Whether it can be used now.
    pub is_up: bool,
    /// How often it became unusable: after failures, or because it was not there.
    pub outages: u64,
    /// Items that were loaded from it.
    pub hits: u64,
    /// Items that neither tier had.
    pub misses: u64,
    /// Bytes that were loaded from it.
    pub loaded_bytes: u64,
    /// Blocks that were written to it.
    pub written_blocks: u64,
    /// Bytes of these.
    pub written_bytes: u64,
    /// Blocks that were not written to it: it failed, refused them, or the backlog was full.
    pub unwritten_blocks: u64,
    /// Blocks that were stored in the near tier after a load from the far one.
    pub promoted_blocks: u64,
    /// Blocks that were to be promoted, but were not.
    pub unpromoted_blocks: u64,
    /// Operations that failed or took too long.
    pub failures: u64,
    /// Lookups that were answered by the near tier alone, because the far one did not answer in time.
    pub lookup_timeouts: u64,
    /// Blocks that wait to be written to it.
    pub backlog_blocks: u64,
    /// Bytes that these take in the near tier, with headers and padding.
    pub backlog_bytes: u64,
    /// Statistics of the far store itself; `None` while it cannot be used, or does not answer.
    pub store: Option<Box<Stats>>,
}

/// A process that writes, or wrote, to a store, and whose files are there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct WriterStats {
    /// Its directory is called after it.
    pub id: String,
    /// Its number on its host.
    pub process: u32,
    /// Whether it lives: its lease was renewed within the last minute, and does not show that it was killed since.
    pub is_alive: bool,
    /// Limit of the bytes of the files of all processes, by its options; `None` if its lease does not say.
    pub capacity_bytes: Option<u64>,
    /// What its acknowledgements mean; `None` if its lease does not say.
    pub durability: Option<Durability>,
    /// Bytes that its files take; `None` where files have no owner.
    pub allocated_bytes: Option<u64>,
    /// Blocks that are found and its own; `None` where blocks have no owner.
    pub blocks: Option<u64>,
}

/// What was asked of a namespace.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct NamespaceStats {
    /// Which one.
    pub namespace: NamespaceId,
    /// Keys that were looked up.
    pub lookups: u64,
    /// Of these, keys that were there.
    pub found: u64,
    /// Items that were loaded.
    pub hits: u64,
    /// Items that were to be loaded, but were not there.
    pub misses: u64,
    /// Items that were to be loaded, but had expired.
    pub expired: u64,
    /// Items that were to be loaded, but were damaged.
    pub corrupt: u64,
    /// Bytes that were loaded.
    pub loaded_bytes: u64,
    /// Blocks that were stored.
    pub stored_blocks: u64,
    /// Bytes that were stored.
    pub stored_bytes: u64,
    /// Items that were to be stored, but were there already.
    pub exists: u64,
}

/// Items that were to be stored, or loaded, but were refused: see [`DropReason`](crate::DropReason).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Dropped {
    /// No room.
    pub no_room: u64,
    /// Quota of the namespace.
    pub quota: u64,
    /// Too many bytes in flight.
    pub busy: u64,
    /// Not asked for before.
    pub not_admitted: u64,
    /// Larger than a segment.
    pub too_large: u64,
}

/// How a store works: its options, the route that bytes took, and why not a better one.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StoreReport {
    /// Version of hoistway.
    pub version: String,
    /// Directory of the store.
    pub root: PathBuf,
    /// What this process may do.
    pub access: StoreAccess,
    /// How blocks lie in files.
    pub layout: LayoutKind,
    /// What an acknowledgement means.
    pub durability: Durability,
    /// How bytes move between host memory and files: what was chosen.
    pub route: Route,
    /// Whether devices are read from and written to directly: what was asked for.
    pub direct: DirectPath,
    /// Threads that move bytes.
    pub threads: usize,
    /// Bytes of host memory for what is not aligned. The pinned memory that bytes of devices pass through, once one is used,
    /// comes on top: no more than that.
    pub bounce_bytes: u64,
    /// The bytes of each route.
    pub carriers: Vec<CarrierShare>,
    /// Bytes that passed through the store's own memory, because they were not aligned, or on a device.
    pub bounced_bytes: u64,
    /// What shows, for each device, that bytes go past the host's memory.
    pub proofs: Vec<String>,
    /// Better routes, and why they were not used.
    pub refused: Vec<Refusal>,
    /// The NUMA node that the pinned memory was asked for on which bytes of devices pass through; the threads that move these stay on
    /// its processors, unless a note says why not. `None` before a request needs that memory, where the system does not say, and where the
    /// first such request had no memory of a device, of which a note tells once a device is used.
    pub numa_node: Option<u32>,
    /// What is slower than it could be for where memory is and threads run.
    pub notes: Vec<String>,
    /// What the store warned of on its own, such as a directory that other users can change: the first 64 warnings.
    pub warnings: Vec<String>,
    /// How the far tier works.
    pub far: Option<FarReport>,
}

/// How the far tier of a store works.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FarReport {
    /// Its directory.
    pub root: PathBuf,
    /// When blocks are written to it.
    pub policy: FarPolicy,
    /// Whether what is loaded from it is stored in the near tier.
    pub promote: bool,
    /// Why it cannot be used now.
    pub failure: Option<String>,
    /// The report of the far store itself; `None` while it cannot be used.
    pub store: Option<Box<StoreReport>>,
}

/// The bytes of one route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CarrierShare {
    /// The route.
    #[serde(flatten)]
    pub carrier: Carrier,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
}

/// An event that an operator may want to look into.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Event {
    /// When it happened.
    #[serde(serialize_with = "since_1970")]
    pub at: SystemTime,
    /// What kind of event it is.
    pub kind: EventKind,
    /// The namespace of the block, if it is about one.
    pub namespace: Option<NamespaceId>,
    /// The block.
    pub key: Option<Key>,
    /// What happened, as a sentence.
    pub reason: String,
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EventKind {
    /// A block is not what was stored. It is a miss from now on.
    CorruptBlock,
    /// A block could not be read. It stays.
    LoadFailed,
    /// A block could not be written. It is not there.
    StoreFailed,
    /// A block did not get all its shards in time, and was dropped.
    Abandoned,
    /// A request has ended, but its memory may still be read or written.
    Leased,
    /// Nothing can be stored, as there is no room for a first segment.
    NoRoom,
    /// Part of a log or checkpoint cannot be read. Blocks that it tells of may not be found.
    DamagedLog,
    /// Housekeeping failed; it is tried again.
    MaintenanceFailed,
    /// A namespace cannot be used: its description cannot be read, or another namespace has its directory.
    NamespaceUnusable,
    /// Another process took this one for dead and removed its directory. Stores that were under way may have failed.
    WriterRestarted,
    /// Another user can change the store's directories.
    UnsafeRoot,
    /// The file system takes no extended attributes: files as vLLM writes them have no checksums.
    NoChecksums,
    /// The far tier failed, or did not take blocks. The near one goes on.
    FarFailed,
    /// The far tier can be used again.
    FarRecovered,
}

/// Blocks of this process that were evicted or expired since the last call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Evicted {
    /// The blocks, oldest first; also those that were stored again in the meantime.
    pub blocks: Vec<Fingerprint>,
    /// How many more blocks were evicted or expired: only the last 65,536 are remembered.
    pub forgotten: u64,
}

/// A block in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BlockEntry {
    /// Its namespace.
    pub namespace: NamespaceId,
    /// What it is found by.
    pub fingerprint: Fingerprint,
    /// Bytes of its shards.
    pub payload_bytes: u64,
    /// Which process stored it.
    pub owner: Owner,
    /// After which it is not found any more.
    #[serde(serialize_with = "may_be_since_1970")]
    pub expires: Option<SystemTime>,
}

/// The process that a block belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// This process.
    This,
    /// Another process, which alone may remove the block.
    Other,
}

/// Part of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockPage {
    /// Some blocks.
    pub blocks: Vec<BlockEntry>,
    /// Where the next page begins; `None` after the last.
    pub next: Option<u64>,
}

/// What a block is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BlockInfo {
    /// Its shards, in order.
    pub shards: Vec<ShardInfo>,
    /// After which it is not found any more.
    #[serde(serialize_with = "may_be_since_1970")]
    pub expires: Option<SystemTime>,
}

/// A shard of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShardInfo {
    /// Its bytes.
    pub len: u64,
    /// Their CRC-32C; `None` if a device wrote them directly.
    pub checksum: Option<u32>,
}

/// What [`Store::verify`](crate::Store::verify) has seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Verified {
    /// Blocks that were read.
    pub blocks: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Of these, shards that were taken as they are, because they have no checksum.
    pub without_checksum: u64,
    /// Blocks that were damaged, and are missing now: [`Store::events`](crate::Store::events) names them.
    pub corrupt: u64,
    /// Of these, blocks of other processes, which alone can remove them.
    pub corrupt_of_others: u64,
    /// Blocks that could not be read.
    pub failed: u64,
    /// Blocks that went while they were to be read.
    pub gone: u64,
}

/// Times are numbers of seconds, as other languages have them.
fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

fn since_1970<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    seconds(&time.duration_since(UNIX_EPOCH).unwrap_or_default(), serializer)
}

fn may_be_since_1970<S: Serializer>(time: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => since_1970(time, serializer),
        None => serializer.serialize_none(),
    }
}
