//! The room of blocks, and eviction where it is short.
#![forbid(unsafe_code)]

use super::{FilesShared, lock, namespaces::Namespace};
use crate::{
    DropReason, Error, Result, StoreOptions,
    disk::Disk,
    format::{PAGE, lease::Account},
    index::{Candidates, Removed, Want},
};
use std::{
    io,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Part of the capacity that is kept free: one in so many bytes.
const AHEAD_SHARE: u64 = 64;
/// Most bytes that are kept free.
const MOST_AHEAD: u64 = 256 << 20;
/// Part of the capacity that is written without telling others each time: one in so many bytes.
const UNTOLD_SHARE: u64 = 256;
/// Most bytes that are written without telling others.
const MOST_UNTOLD: u64 = 64 << 20;
/// Pages that leases and descriptions take.
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
    /// Never locked while the disk is waited for.
    bytes: Mutex<Bytes>,
    /// Held by the thread that makes room, so that two do not evict for the same shortage.
    making: Mutex<()>,
    /// Directories that blocks are in.
    directories: AtomicU64,
}

/// Bytes that are on their way.
#[derive(Debug, Default)]
pub(super) struct Bytes {
    /// Of blocks that have a place, but are not in the index yet, and of those that are not in it any more, but whose
    /// files are still there.
    under_way: u64,
    account: Account,
    /// The bytes that others were told are taken.
    told: u64,
}

impl Bytes {
    /// A block has been taken in.
    pub(super) fn settle(&mut self, bytes: u64) {
        self.under_way = self.under_way.saturating_sub(bytes);
        self.account.settled = self.account.settled.saturating_add(bytes);
    }
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
            bytes: Mutex::default(),
            making: Mutex::new(()),
            directories: AtomicU64::new(0),
        })
    }

    /// Bytes that are taken besides those in the index.
    pub(super) fn besides(&self) -> u64 {
        self.overhead().saturating_add(lock(&self.bytes).under_way)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Bytes> {
        lock(&self.bytes)
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

    /// The bytes that may be written without telling others each time.
    fn ahead(&self) -> u64 {
        (self.capacity / UNTOLD_SHARE).min(MOST_UNTOLD)
    }

    /// Takes room for a block. Whether others know that it may be taken.
    fn take(&self, bytes: u64) -> bool {
        let mut state = lock(&self.bytes);
        state.under_way = state.under_way.saturating_add(bytes);
        state.account.taken = state.account.taken.saturating_add(bytes);
        state.account.taken <= state.told
    }

    /// A block will not be stored, and its file is not there.
    pub(super) fn give_up(&self, bytes: u64) {
        let mut state = lock(&self.bytes);
        state.settle(bytes);
        state.account.removed = state.account.removed.saturating_add(bytes);
    }

    /// The file of a block was removed.
    pub(super) fn removed(&self, bytes: u64) {
        let mut state = lock(&self.bytes);
        state.account.removed = state.account.removed.saturating_add(bytes);
    }
}

impl FilesShared {
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
                self.unlink_evicted(Want { from, bytes: excess });
            }
            if self.index.quota_excess(namespace, bytes) > 0 {
                return Err(DropReason::Quota);
            }
        }
        // The bytes are taken before room is made, so that no other thread takes what is freed. Other processes are
        // told of them before this process reads what those have taken.
        let is_told = self.room.take(bytes);
        if !is_told && let Err(error) = self.tell(self.room.ahead()).and_then(|()| self.listen()) {
            tracing::warn!(%error, "other processes cannot be told what is written");
            self.room.give_up(bytes);
            return Err(DropReason::NoRoom);
        }
        if self.shortage(bytes) == 0 {
            return Ok(());
        }
        self.sweep();
        let alone = lock(&self.room.making);
        self.look_for_departed();
        // What other processes have written may be learned of meanwhile: then more has to go.
        let mut has_looked = false;
        for _ in 0..MOST_ROUNDS {
            let shortage = self.shortage(bytes);
            if shortage == 0 {
                return Ok(());
            }
            if self.make_room(shortage) > 0 {
                continue;
            }
            if has_looked || self.peers.bytes() == 0 {
                break;
            }
            // All that is left is others', of whose blocks this process does not know.
            self.scan_now();
            has_looked = true;
        }
        drop(alone);
        self.room.give_up(bytes);
        Err(DropReason::NoRoom)
    }

    /// Tells others what this process has written, and that it may write so much more.
    pub(super) fn tell(&self, ahead: u64) -> Result<()> {
        let mut lease = self.writer()?.lease();
        let account = {
            let mut bytes = self.room.lock();
            let taken = bytes.account.taken.saturating_add(ahead);
            // A thread that takes more from now on has to tell the other processes.
            bytes.told = bytes.told.min(taken);
            Account { taken, ..bytes.account }
        };
        lease.write(account)?;
        self.room.lock().told = account.taken;
        Ok(())
    }

    /// Tells others that this process lives, and what it has done, if it has not lately.
    pub(super) fn tell_now_and_then(&self, every: Duration, changed_every: Duration) -> Result<()> {
        let account = self.room.lock().account;
        let is_due = self.writer()?.lease().is_due(account, every, changed_every);
        if is_due { self.tell(0) } else { Ok(()) }
    }

    /// Bytes that have to go before so many can be written for which room was taken.
    fn shortage(&self, bytes: u64) -> u64 {
        let excess = self.used(SPARE_PAGES * PAGE as u64).saturating_sub(self.room.capacity);
        excess.max(self.room.min_free.saturating_add(bytes).saturating_sub(self.available()))
    }

    /// Bytes of all files, and so many more.
    fn used(&self, more: u64) -> u64 {
        let bytes = self.room.lock();
        let blocks = self.index.totals(None).own_slot_bytes.saturating_add(bytes.under_way);
        drop(bytes);
        let others = self.peers.bytes();
        [self.room.overhead(), others, more].into_iter().fold(blocks, u64::saturating_add)
    }

    /// Returns the bytes that can still be written; `u64::MAX` where the system does not say, so that writes are tried.
    fn available(&self) -> u64 {
        self.disk.free_space(&self.root).map_or(u64::MAX, |space| space.free_bytes)
    }

    /// Evicts blocks of so many bytes; says of how many it did.
    pub(super) fn make_room(&self, bytes: u64) -> u64 {
        self.unlink_evicted(Want { from: Candidates::Anywhere, bytes })
    }

    /// Finds out what a writer has left that went since the last look, before blocks are evicted for it.
    fn look_for_departed(&self) {
        if self.peers.have_departed() {
            self.scan_now();
        }
    }

    /// Keeps some room free, so that stores need not wait for it.
    pub(super) fn make_room_ahead(&self) -> Result<()> {
        let ahead = (self.room.capacity / AHEAD_SHARE).min(MOST_AHEAD);
        let too_much = || self.used(ahead).saturating_sub(self.room.capacity);
        if too_much() == 0 {
            return Ok(());
        }
        let _alone = lock(&self.room.making);
        // Others may have made room for it already.
        self.listen()?;
        if too_much() > 0 {
            self.look_for_departed();
        }
        let too_much = too_much();
        if too_much > 0 {
            self.make_room(too_much);
        }
        Ok(())
    }

    /// Until their files are gone, blocks that were evicted count as if they were being written.
    fn unlink_evicted(&self, want: Want) -> u64 {
        let _evicting = tracing::debug_span!("kv.evict", bytes = want.bytes).entered();
        let mut bytes = self.room.lock();
        let removed = self.index.evict(&want, self.steady_now());
        let going = removed.iter().fold(0_u64, |sum, removed| sum.saturating_add(removed.entry.slot_bytes));
        bytes.under_way = bytes.under_way.saturating_add(going);
        drop(bytes);
        let mut freed = 0_u64;
        for removed in removed {
            if self.unlink(&removed) {
                self.observed.evicted(&[removed]);
                freed = freed.saturating_add(removed.entry.slot_bytes);
            }
        }
        let mut bytes = self.room.lock();
        bytes.under_way = bytes.under_way.saturating_sub(going);
        drop(bytes);
        if freed > 0
            && let Err(error) = self.tell(self.room.ahead())
        {
            tracing::warn!(%error, "other processes cannot be told what was removed");
        }
        freed
    }

    /// Removes blocks whose time is over.
    pub(super) fn expire(&self) {
        for removed in self.index.expired(self.steady_now(), MOST_EXPIRED) {
            if self.unlink(&removed) {
                self.observed.expired(&[removed]);
            }
        }
    }

    /// Removes the file of a block that is not in the index any more. Whether it is gone: if not, the next look at all
    /// files finds it again.
    pub(super) fn unlink(&self, removed: &Removed) -> bool {
        let Some(namespace) = self.namespaces.numbered(removed.entry.namespace) else { return false };
        let Some(path) = namespace.path(removed.fingerprint, None) else { return false };
        match self.disk.remove(&path) {
            Ok(()) => self.room.removed(removed.entry.slot_bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.peers.vanished(removed.entry.slot_bytes);
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a block cannot be removed");
                return false;
            }
        }
        namespace.forget_key(&removed.fingerprint);
        true
    }
}
