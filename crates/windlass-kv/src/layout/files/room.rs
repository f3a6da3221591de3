//! How much the blocks may take, and what goes so that others can come.
#![forbid(unsafe_code)]

use super::{Shared, lock, namespaces::Namespace};
use crate::{
    DropReason, Error, Result, StoreOptions,
    disk::Disk,
    format::{PAGE, now_seconds},
    index::{Candidates, Enough, Removed, Want},
};
use std::{
    io,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

/// Part of the capacity that is kept free: one in so many bytes.
const AHEAD_SHARE: u64 = 64;
/// Most bytes that are kept free.
const MOST_AHEAD: u64 = 256 << 20;
/// Pages that leases, descriptions and checksums take.
const SMALL_PAGES: u64 = 16;
/// Pages that are left for directories that are to be made.
const SPARE_PAGES: u64 = 48;
/// Times that room is made for a block, before it is given up.
const MOST_ROUNDS: usize = 8;
/// Blocks that are expired in one go.
const MOST_EXPIRED: usize = 4096;

/// The limits, and what is about to be written.
#[derive(Debug)]
pub(super) struct Room {
    capacity: u64,
    min_free: u64,
    /// Bytes of blocks that have a place, but are not in the index yet, and of those that are not in it any more, but
    /// whose files are still there. Never locked while the disk is waited for.
    reserved: Mutex<u64>,
    /// Locked by who makes room, so that two do not evict for the same shortage.
    making: Mutex<()>,
    /// Directories that blocks are in.
    directories: AtomicU64,
}

impl Room {
    pub(super) fn new(options: &StoreOptions, may_write: bool) -> Result<Self> {
        let capacity = match options.capacity_bytes {
            Some(capacity) => capacity,
            None if !may_write => 0,
            None => {
                return Err(Error::InvalidOption {
                    option: "capacity_bytes",
                    value: "none".into(),
                    reason: "a store that is written to needs a limit for what its files take".into(),
                });
            }
        };
        Ok(Self {
            capacity,
            min_free: options.min_free_bytes,
            reserved: Mutex::new(0),
            making: Mutex::new(()),
            directories: AtomicU64::new(0),
        })
    }

    /// Bytes that are taken besides those in the index.
    pub(super) fn besides(&self) -> u64 {
        self.overhead().saturating_add(*lock(&self.reserved))
    }

    /// The bytes of blocks that are written or removed.
    pub(super) fn lock(&self) -> MutexGuard<'_, u64> {
        lock(&self.reserved)
    }

    /// A directory was made.
    pub(super) fn add_directory(&self, namespace: &Namespace) {
        namespace.directories.fetch_add(1, Ordering::Relaxed);
        self.directories.fetch_add(1, Ordering::Relaxed);
    }

    /// A namespace has so many directories.
    pub(super) fn note_directories(&self, namespace: &Namespace, count: usize) {
        let before = namespace.directories.swap(count as u64, Ordering::Relaxed);
        // Wraps where there are fewer than before.
        self.directories.fetch_add((count as u64).wrapping_sub(before), Ordering::Relaxed);
    }

    /// Bytes of directories, and of small files.
    fn overhead(&self) -> u64 {
        (self.directories.load(Ordering::Relaxed) + SMALL_PAGES) * PAGE as u64
    }

    fn take(&self, bytes: u64) {
        let mut reserved = lock(&self.reserved);
        *reserved = reserved.saturating_add(bytes);
    }

    pub(super) fn give_back(&self, bytes: u64) {
        let mut reserved = lock(&self.reserved);
        *reserved = reserved.saturating_sub(bytes);
    }
}

impl Shared {
    /// Takes room for a block of a namespace, and evicts others for it. Why there is none, else.
    pub(super) fn take_room(&self, namespace: u16, bytes: u64) -> Result<(), DropReason> {
        if bytes.saturating_add(self.room.overhead()) > self.room.capacity {
            return Err(DropReason::TooLarge);
        }
        if self.index.quota_excess(namespace, bytes) > 0 {
            let _alone = lock(&self.room.making);
            let excess = self.index.quota_excess(namespace, bytes);
            if excess > 0 {
                let from = Candidates::Namespace(namespace);
                self.unlink_evicted(Want { from, enough: Enough::Bytes(excess) });
            }
            if self.index.quota_excess(namespace, bytes) > 0 {
                return Err(DropReason::Quota);
            }
        }
        // Taken first, so that nobody else takes what is freed for it.
        self.room.take(bytes);
        if self.shortage(bytes) == 0 {
            return Ok(());
        }
        let alone = lock(&self.room.making);
        // What other processes have written may be learned of meanwhile: then more has to go.
        for _ in 0..MOST_ROUNDS {
            let shortage = self.shortage(bytes);
            if shortage == 0 {
                return Ok(());
            }
            if self.make_room(shortage) == 0 {
                break;
            }
        }
        drop(alone);
        self.room.give_back(bytes);
        Err(DropReason::NoRoom)
    }

    /// Bytes that have to go before so many can be written for which room was taken.
    fn shortage(&self, bytes: u64) -> u64 {
        let excess = self.used(SPARE_PAGES * PAGE as u64).saturating_sub(self.room.capacity);
        excess.max(self.room.min_free.saturating_add(bytes).saturating_sub(self.available()))
    }

    /// Bytes of all files, and so many more.
    fn used(&self, more: u64) -> u64 {
        let reserved = self.room.lock();
        let blocks = self.index.totals(None).own_slot_bytes.saturating_add(*reserved);
        blocks.saturating_add(self.room.overhead()).saturating_add(more)
    }

    /// Bytes that can still be written. Where nobody can say, the attempt tells.
    fn available(&self) -> u64 {
        self.disk.free_space(&self.root).map_or(u64::MAX, |space| space.available)
    }

    /// Evicts blocks of so many bytes; says of how many it did.
    pub(super) fn make_room(&self, bytes: u64) -> u64 {
        self.unlink_evicted(Want { from: Candidates::Anywhere, enough: Enough::Bytes(bytes) })
    }

    /// Keeps some room free, so that who writes need not wait for it.
    pub(super) fn make_room_ahead(&self) {
        let ahead = (self.room.capacity / AHEAD_SHARE).min(MOST_AHEAD);
        let _alone = lock(&self.room.making);
        let too_much = self.used(ahead).saturating_sub(self.room.capacity);
        if too_much > 0 {
            self.make_room(too_much);
        }
    }

    /// Until their files are gone, blocks that were evicted count as if they were being written.
    fn unlink_evicted(&self, want: Want) -> u64 {
        let mut reserved = self.room.lock();
        let removed = self.index.evict(&want, now_seconds());
        let going = removed.iter().fold(0_u64, |sum, removed| sum.saturating_add(removed.entry.slot_bytes));
        *reserved = reserved.saturating_add(going);
        drop(reserved);
        let mut freed = 0_u64;
        for removed in removed {
            if self.unlink(&removed) {
                self.counters.evicted.fetch_add(1, Ordering::Relaxed);
                self.departed.note([removed.fingerprint]);
                freed = freed.saturating_add(removed.entry.slot_bytes);
            }
        }
        self.room.give_back(going);
        freed
    }

    /// Removes blocks whose time is over.
    pub(super) fn expire(&self) {
        for removed in self.index.expired(now_seconds(), MOST_EXPIRED) {
            if self.unlink(&removed) {
                self.counters.expired.fetch_add(1, Ordering::Relaxed);
                self.departed.note([removed.fingerprint]);
            }
        }
    }

    /// Removes the file of a block that is not in the index any more. Whether it is gone: if not, the next look at all
    /// files finds it again.
    pub(super) fn unlink(&self, removed: &Removed) -> bool {
        let Some(namespace) = self.namespaces.numbered(removed.entry.namespace) else { return false };
        let Some(path) = namespace.path(removed.fingerprint, None) else { return false };
        match self.disk.remove(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a block cannot be removed");
                return false;
            }
        }
        namespace.forget_key(&removed.fingerprint);
        self.sums.forget(&removed.fingerprint);
        true
    }
}
