//! Where blocks lie on storage. A [`Layout`] gives out places, says what is where, and makes written blocks visible;
//! it moves no payload itself.
//!
//! A store goes: [`Layout::reserve`], then shards and header are written to the [`BlockPlace`] (by `io`), then
//! [`Layout::commit`]. A load goes: [`Layout::find`], then header and shards are read from the place, then
//! [`Layout::check`] says whether they are the block's, with the checksums to compare.
//!
//! [`Layout`] is what storing and loading need. [`Administration`] has namespaces, listings and removal. [`Sharing`] is what other
//! processes change; by default they change nothing.
#![forbid(unsafe_code)]

#[cfg(test)]
mod conformance;
mod directory;
mod files;
mod observed;
mod segments;
mod steady;
mod trust;

pub(crate) use observed::{Notice, Observed};
pub(crate) use trust::warning;

use crate::{
    DropReason, Error, Fingerprint, Key, LayoutKind, NamespaceId, NamespaceOptions, Result, StoreAccess,
    StoreOptions, WriterStats,
    disk::{Disk, LazyFile, RealDisk},
    format::{
        BLOCK_LEN, HEADER_LEN, PAGE, ShardTable, expiry_seconds, expiry_time, header::BlockHeader,
        now_seconds, superblock::Superblock,
    },
    index::Index,
};
use bytesize::ByteSize;
use std::{
    any::Any,
    io,
    sync::Arc,
    time::{Instant, SystemTime},
};
use uuid::Uuid;

/// The layout that the options name, or that the store has.
///
/// # Errors
/// As [`Store::open`](crate::Store::open).
pub(crate) fn open(options: &StoreOptions) -> Result<(LayoutKind, Arc<dyn Layout>)> {
    check_room(options)?;
    let kind = match options.layout {
        Some(kind) => kind,
        None => existing(options)?.unwrap_or_default(),
    };
    let layout: Arc<dyn Layout> = match kind {
        LayoutKind::Segments => Arc::new(segments::Segments::open(options)?),
        LayoutKind::Files => Arc::new(files::Files::open(options)?),
    };
    Ok((kind, layout))
}

/// An error if the file system is too small to keep what is to be left free, and a warning if it cannot hold the capacity.
fn check_room(options: &StoreOptions) -> Result<()> {
    let root = std::path::absolute(&options.root).unwrap_or_else(|_| options.root.clone());
    // The root may have to be made. What is wrong with it is found when it is opened.
    let total =
        root.ancestors().find_map(|path| RealDisk.free_space(path).ok()).map(|space| space.total_bytes);
    let writes = options.access == StoreAccess::ReadWrite && !options.for_upkeep;
    let (Some(total), true) = (total, writes) else { return Ok(()) };
    let min_free = options.min_free_bytes;
    if total <= min_free {
        return Err(Error::InvalidOption {
            option: "min_free_bytes",
            value: ByteSize(min_free).to_string(),
            reason: format!(
                "that much of the drive stays free, so nothing could be stored: the file system of {} has {} in all",
                options.root.display(),
                ByteSize(total)
            ),
        });
    }
    if let Some(capacity) = options.capacity_bytes.filter(|capacity| *capacity > total - min_free) {
        tracing::warn!(
            root = %options.root.display(),
            "the file system cannot hold the capacity of {}: it has {}, of which min_free keeps {}; blocks are evicted \
             earlier",
            ByteSize(capacity),
            ByteSize(total),
            ByteSize(min_free)
        );
    }
    Ok(())
}

/// The layout of the store that is there, if there is one. Whatever is wrong with it is found when it is opened.
pub(crate) fn existing(options: &StoreOptions) -> Result<Option<LayoutKind>> {
    let path = options.root.join(directory::SUPERBLOCK);
    match RealDisk.read_file(&path, PAGE) {
        Ok(bytes) => Ok(Superblock::parse(&bytes).ok().map(|superblock| superblock.layout)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { operation: "reading", path, source }),
    }
}

/// A block for which a caller asks for a place to write to.
#[derive(Clone, Debug)]
pub(crate) struct NewBlock {
    pub(crate) namespace: NamespaceId,
    pub(crate) key: Key,
    pub(crate) fingerprint: Fingerprint,
    /// The number of shards, 1 to [`MAX_SHARDS`].
    pub(crate) shards: u32,
    /// Bytes of its longest shard; each begins at a multiple of this, rounded up to [`BLOCK_LEN`].
    pub(crate) shard_len: u64,
    /// The time of its expiry.
    pub(crate) expires: Option<SystemTime>,
    /// Bytes of the blocks of the same request that come after it: those that are loaded together lie together, where
    /// there is room for that.
    pub(crate) following: u64,
    /// Whether shards of it are to come with other requests, if they come.
    pub(crate) is_partial: bool,
}

impl NewBlock {
    /// Bytes between the starts of shards.
    pub(crate) fn stride(&self) -> Option<u64> {
        self.shard_len.checked_next_multiple_of(BLOCK_LEN)
    }
}

/// The place of a block's bytes.
#[derive(Clone, Debug)]
pub(crate) struct BlockPlace {
    pub(crate) file: LazyFile,
    /// Offset of the header, [`HEADER_LEN`] bytes; `None` if this layout has none. Where there is one, it is just before
    /// the payload, or just behind the last shard.
    pub(crate) header: Option<u64>,
    /// Offset of shard 0.
    pub(crate) payload: u64,
    /// Bytes between the starts of shards, a multiple of [`BLOCK_LEN`].
    pub(crate) stride: u64,
    /// The number of shards.
    pub(crate) shards: u32,
}

/// Exclusive permission to write a block. Dropping a claim that was not committed gives its place back.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) block: NewBlock,
    pub(crate) place: BlockPlace,
    pub(crate) writer: Uuid,
    /// The sequence number of the block among its writer's blocks; never used twice.
    pub(crate) sequence: u64,
    /// What the layout needs to know of it; gives the place back when dropped.
    pub(crate) token: Box<dyn Any + Send + Sync>,
}

impl Claim {
    /// The header of the block with these shards, [`HEADER_LEN`] bytes.
    pub(crate) fn header(&self, table: &ShardTable) -> Vec<u8> {
        let header = BlockHeader {
            fingerprint: self.block.fingerprint,
            namespace: self.block.namespace,
            key: self.block.key.clone(),
            writer: self.writer,
            sequence: self.sequence,
            created: now_seconds().into(),
            expires: expiry_seconds(self.block.expires),
            stride: self.place.stride,
            table: table.clone(),
        };
        // Zeros are never taken for a block.
        header.to_bytes().unwrap_or_else(|_| vec![0; HEADER_LEN])
    }
}

/// The answer to [`Layout::reserve`].
#[derive(Debug)]
pub(crate) enum Reservation {
    Claimed(Claim),
    /// It is there already.
    Exists,
    /// Another claim to the block exists: another caller is writing it.
    InFlight,
    /// There is no room now. There may be once blocks have been written, and can be evicted, or others have given up theirs.
    Full,
    Dropped(DropReason),
}

/// The answer to [`Layout::wait_for_room`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoomWait {
    /// There may be more room.
    Changed,
    /// Blocks of this process are still being written. Once they are, they can be evicted.
    Writes,
    /// Blocks that may leave room are about to be looked up.
    Lookup,
    /// Other processes have not given up room that this one has asked for.
    Others,
    /// No room is about to come.
    Nothing,
}

/// A block whose header and shards have been written to its place, but not synced.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) claim: Claim,
    pub(crate) table: ShardTable,
}

/// A block that is being read. As long as this lives, its place is not given to another block by this process; other
/// processes may do so, which [`Layout::check`] and [`Layout::is_still_there`] find out.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) place: BlockPlace,
    /// Whether its place cannot get other bytes as long as this lives, whatever other processes do.
    pub(crate) is_held: bool,
    /// Whether a sync covers its bytes, or nothing tells whether they are right. A power cut may have changed those of
    /// others: their checksums are compared, whatever the options say.
    pub(crate) is_proven: bool,
    /// Holds the place; what the layout needs to know of it.
    pub(crate) token: Box<dyn Any + Send + Sync>,
}

/// The answer to [`Layout::find`].
#[derive(Debug)]
pub(crate) enum Lookup {
    Found(Found),
    Miss,
    Expired,
    /// The disk did not answer whether it is there. Only layouts without a complete index have to ask.
    Failed(io::Error),
}

/// The answer to [`Layout::check`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the block, and these are its shards.
    Good(ShardTable),
    /// The place has another block by now, as may happen where another process owns it: a miss.
    Moved,
    /// It is not what was written.
    Corrupt(String),
}

/// A block in a listing.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub(crate) namespace: NamespaceId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) payload_len: u64,
    pub(crate) is_own: bool,
    pub(crate) expires: Option<SystemTime>,
}

/// [`Administration::list`] of what is in an index, whose numbers of namespaces `namespace` knows.
fn list_blocks(
    index: &Index,
    cursor: u64,
    most: usize,
    into: &mut Vec<Listed>,
    namespace: impl Fn(u16) -> Option<NamespaceId>,
) -> Option<u64> {
    let mut entries = Vec::new();
    let next = index.list(cursor, most, &mut entries);
    into.extend(entries.into_iter().filter_map(|(fingerprint, entry)| {
        Some(Listed {
            namespace: namespace(entry.namespace)?,
            fingerprint,
            payload_len: entry.payload_len,
            is_own: entry.is_own(),
            expires: expiry_time(entry.expires),
        })
    }));
    next
}

/// Statistics of a layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Blocks that are found.
    pub(crate) blocks: u64,
    /// Bytes of their payloads.
    pub(crate) payload_bytes: u64,
    /// Bytes that this process's files take, with headers, logs and room that is not used.
    pub(crate) allocated_bytes: u64,
    /// Bytes that the files of all processes take.
    pub(crate) root_bytes: u64,
    pub(crate) evicted_blocks: u64,
    pub(crate) expired_blocks: u64,
    /// Blocks that were found damaged, and are missing now.
    pub(crate) corrupt_blocks: u64,
    /// Namespaces that are there, but cannot be used.
    pub(crate) unusable_namespaces: u64,
    /// Blocks of which the log knew, but which the last opening did not take, and why that was said.
    pub(crate) lost_on_recovery: u64,
    /// Records of other processes' logs that cannot be read although others follow them.
    pub(crate) damaged_records: u64,
    /// Time that the last opening took.
    pub(crate) recovery: std::time::Duration,
    /// Bytes of host memory for the index.
    pub(crate) index_bytes: u64,
}

/// A way for blocks to lie on storage: what storing and loading need of it. All methods of this trait and of those that it
/// builds on may be called from several threads at once. Where a layout has an index that knows of all blocks, only these
/// wait for the disk: [`Layout::reserve`], [`Layout::commit`], and the methods of [`Administration`] and [`Sharing`] that
/// return a `Result`.
pub(crate) trait Layout: Administration + Sharing {
    /// Whether blocks are there, one answer each. No disk is asked, where the layout has an index.
    fn contains(&self, namespace: NamespaceId, blocks: &[(&[u8], Fingerprint)], found: &mut [bool]);

    /// A place for a block. May evict others, and wait for the disk to know that.
    fn reserve(&self, block: NewBlock) -> Result<Reservation>;

    /// A number that changes whenever there may be more room than before without anything that a caller of
    /// [`Layout::reserve`] does.
    fn room_stamp(&self) -> u64 {
        0
    }

    /// Waits, at most until then, for the number of [`Layout::room_stamp`] to change from `stamp`, if it is about to.
    fn wait_for_room(&self, _stamp: u64, _until: Instant) -> RoomWait {
        RoomWait::Nothing
    }

    /// Brings the bytes of blocks to the disk where the durability asks for that before they are committed; one answer
    /// each. Those of the next blocks may be synced while others are committed. A block that was not prepared is synced by
    /// [`Layout::commit`].
    fn prepare(&self, blocks: &mut [Written]) -> Vec<Result<()>> {
        blocks.iter().map(|_| Ok(())).collect()
    }

    /// Makes blocks visible, as durably as the store's [`Durability`](crate::Durability) asks for: data, then index.
    /// One answer each; the group shares its syncs. An error leaves the block invisible and its place unused.
    fn commit(&self, blocks: Vec<Written>) -> Vec<Result<()>>;

    /// Gives up a claim after a write to its place failed. The place is given out once more; if that write fails too, it is
    /// never given out again. In a layout that gives no place out twice, dropping the claim is enough.
    fn fail(&self, claim: Claim) {
        drop(claim);
    }

    /// Gives up a claim whose place the system may still write to, or that the drive has declared bad: the place is never
    /// given out again. In a layout that gives no place out twice, dropping the claim is enough.
    fn lose(&self, claim: Claim) {
        drop(claim);
    }

    /// Where a block is.
    fn find(&self, namespace: NamespaceId, key: &Key, fingerprint: Fingerprint) -> Lookup;

    /// Whether the header that was read from a place is that of the block that was looked for. `header` is empty where
    /// the place has none.
    fn check(&self, found: &Found, key: &Key, header: &[u8]) -> Verdict;

    /// Makes a damaged block a miss. Blocks of other processes are forgotten until those write them anew.
    fn invalidate(&self, found: &Found);

    /// Notes that blocks were used, in this order.
    fn touch(&self, blocks: &[Fingerprint]);

    /// Keeps a block from being evicted, or deleted by others of this process, until as many unpins. Whether it is there.
    fn pin(&self, block: Fingerprint) -> bool;

    /// Undoes a pin.
    fn unpin(&self, block: Fingerprint);
}

/// The care for a store: its namespaces, what is removed and listed, and what it says of itself.
pub(crate) trait Administration: Send + Sync {
    /// Makes a namespace known: its description is written down, its limits hold from now on.
    fn open_namespace(&self, id: NamespaceId, description: &str, options: NamespaceOptions) -> Result<()>;

    /// Forgets a namespace that is not open any more in this process, and its description, if it has no blocks and is not
    /// in use. Returns whether it did.
    fn close_namespace(&self, _: NamespaceId) -> Result<bool> {
        Ok(false)
    }

    /// The namespaces that there are, with their descriptions.
    fn namespaces(&self) -> Result<Vec<(NamespaceId, String)>>;

    /// Removes blocks that are not pinned: those of this process, or, if all processes own all blocks, any. Returns how many.
    fn delete(&self, namespace: NamespaceId, blocks: &[(&[u8], Fingerprint)]) -> Result<usize>;

    /// Removes all blocks of a namespace that are not pinned, as [`Layout::delete`]. Returns how many.
    fn clear(&self, namespace: NamespaceId) -> Result<usize>;

    /// Evicts blocks of this process that are not pinned, until as many bytes are free for others. Returns how many bytes
    /// it freed.
    fn evict(&self, bytes: u64) -> Result<u64>;

    /// Blocks after `cursor` in an order that stays as it is; at most `most`. The next cursor, or `None` at the end.
    fn list(&self, cursor: u64, most: usize, into: &mut Vec<Listed>) -> Option<u64>;

    /// The key of a block, which may be read from its header. A block whose header is damaged is a miss from then on, as
    /// after [`Layout::invalidate`], and is [`Error::DamagedBlock`].
    fn key_of(&self, block: Fingerprint) -> Result<Option<Key>>;

    /// What has to be done now and then, a few times a second: expire, follow others, evict ahead, write checkpoints,
    /// say that this process lives.
    fn maintain(&self) -> Result<()>;

    /// Its statistics.
    fn usage(&self) -> Usage;

    /// The damage that it has found, and the blocks that it has removed without a request.
    fn observed(&self) -> &Observed;

    /// Writes down what is only in memory. Afterwards nothing is written any more.
    fn close(&self) -> Result<()>;
}

/// Changes by other processes. By default there are none: blocks that were found stay, and finding asks no disk.
pub(crate) trait Sharing: Send + Sync {
    /// Whether [`Layout::find`] may wait for the disk. Then only threads that may wait call it.
    fn find_waits(&self) -> bool {
        false
    }

    /// Whether a place that is not held is the block's still, as its owner's log says now. What was read from it before
    /// is the block then. May read that log.
    fn is_still_there(&self, _: &Found) -> bool {
        true
    }

    /// Looks now for what other processes have stored, where that is known from their logs.
    fn follow(&self) -> Result<()> {
        Ok(())
    }

    /// The processes that write, or wrote, and whose directories are there.
    fn writers(&self) -> Result<Vec<WriterStats>> {
        Ok(Vec::new())
    }
}
