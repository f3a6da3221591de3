//! Room for blocks: slots that are free, segments that may be made, blocks and segments that have to go.
#![forbid(unsafe_code)]

use super::{
    failed, lock,
    names::{self, WriterFile},
    root::{RootLock, WriterDirectory},
    segment::Segment,
    slots::Waiting,
    writer::Writer,
};
use crate::{
    Error, Result,
    disk::write_full,
    format::segment::{HEAD_LEN, SegmentHead},
    index::{Candidates, Enough, Reuse, Slot, Want},
    io::FileAccess,
};
use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

/// The writers that live.
pub(super) struct Others {
    /// How many, with us.
    pub(super) writers: u64,
    /// The most that one of the others would allocate if it could.
    pub(super) wanted: u64,
}

/// Most segments that are given up for one that is larger.
const MOST_GIVEN_UP: usize = 64;
/// Bytes of blocks that are evicted at a time, so that their tombstones share a sync.
const EVICTED_BYTES: u64 = 64 << 20;

impl Writer {
    /// A slot of this size, after whatever had to go for it; `None` if nothing can go.
    pub(super) fn take_slot(&self, slot_bytes: u64) -> Result<Option<(Arc<Segment>, Slot, u8)>> {
        let Some(class) = lock(&self.slots).class(slot_bytes) else { return Ok(None) };
        let take = || {
            let mut slots = lock(&self.slots);
            // Nothing could be committed.
            let (segment, slot) = if self.log.is_in_doubt() { None } else { slots.take(class) }?;
            Some((segment, slot, class))
        };
        if let Some(taken) = take() {
            return Ok(Some(taken));
        }
        let _one = lock(&self.making_room);
        // Somebody else may have made room meanwhile.
        if let Some(taken) = take() {
            return Ok(Some(taken));
        }
        if self.log.is_in_doubt() {
            return Ok(None);
        }
        match self.make_room(class) {
            Ok(()) => Ok(take()),
            // Nothing can be evicted, as nobody could be told; the store is as good as full.
            Err(error) if is_full(&error) => {
                tracing::warn!(%error, "no room for blocks");
                Ok(take())
            }
            Err(error) => Err(error),
        }
    }

    /// Sees to it that a class has free slots, if that is possible.
    fn make_room(&self, class: u8) -> Result<()> {
        let collected = self.collect();
        if lock(&self.slots).free(class) > 0 || self.allocate(class)? {
            return Ok(());
        }
        collected?;
        let blocks = self.blocks_at_a_time(class);
        if blocks > 0 && self.evict_class(class, blocks)? {
            return Ok(());
        }
        self.take_over(class)
    }

    /// How many blocks of a class go at a time; 0 if it has no segments.
    fn blocks_at_a_time(&self, class: u8) -> u64 {
        let slots = lock(&self.slots);
        let most = (slots.slots(class) / 16).max(1).min(slots.slots(class));
        most.min((EVICTED_BYTES / slots.slot_bytes(class)).max(1))
    }

    /// Evicts blocks of a class; whether any went. Classes that evict much get segments of those that are cold.
    fn evict_class(&self, class: u8, blocks: u64) -> Result<bool> {
        let want = Want { from: Candidates::Class(class), enough: Enough::Blocks(blocks) };
        let evicted = self.evict(&want)?.len();
        let bytes = lock(&self.slots).slot_bytes(class) * evicted as u64;
        if lock(&self.slots).churned(class, bytes, self.segment_bytes.saturating_mul(2)) {
            let coldest = self.shared.index.coldest_segment(|_| true).map(|worth| worth.segment);
            if coldest.is_some_and(|number| lock(&self.slots).class_of(number) != Some(class)) {
                self.take_over(class)?;
            }
        }
        Ok(evicted > 0)
    }

    /// Gives up segments of other classes until this one has another, as far as nobody is in the way.
    fn take_over(&self, class: u8) -> Result<()> {
        for _ in 0..MOST_GIVEN_UP {
            let unused = lock(&self.slots).unused(Some(class));
            let number = unused.or_else(|| {
                let may_go = |number| lock(&self.slots).may_give(number, class);
                self.shared.index.coldest_segment(may_go).map(|worth| worth.segment)
            });
            let Some(number) = number else { break };
            self.give_up(number)?;
            if self.allocate(class)? {
                break;
            }
        }
        Ok(())
    }

    /// Removes a segment with all its blocks, as soon as nobody reads or writes them. No tombstones are needed: records
    /// of a segment that is not there say nothing.
    fn give_up(&self, number: u32) -> Result<()> {
        lock(&self.slots).drain(number);
        self.finish_draining()
    }

    /// Removes segments that are to go, of which nobody uses anything any more.
    pub(super) fn finish_draining(&self) -> Result<()> {
        let draining = lock(&self.slots).draining();
        for number in draining {
            let gone = self.shared.index.remove_all(|_, entry, is_pinned| {
                entry.is_own() && entry.slot.segment == number && !is_pinned
            });
            self.counts.evicted.fetch_add(gone.len() as u64, Ordering::Relaxed);
            self.departed.note(gone.iter().map(|gone| gone.fingerprint));
            let mut slots = lock(&self.slots);
            for gone in gone {
                let for_readers = gone.reuse == Reuse::Later;
                slots.retire(gone.entry.slot, Waiting { for_tombstone: false, for_readers });
            }
            for slot in self.shared.index.freed() {
                slots.unread(slot);
            }
            if !slots.is_drained(number) {
                continue;
            }
            drop(slots);
            self.remove_segment(number)?;
        }
        Ok(())
    }

    fn remove_segment(&self, number: u32) -> Result<()> {
        let path = self.directory.join(names::segment(number));
        match self.shared.disk.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing", &path)(error));
            }
            _ => {}
        }
        lock(&self.slots).remove(number);
        lock(&self.unburied).retain(|gone| gone.slot.segment != number);
        self.shared.forget_segment(0, number);
        self.is_full.store(false, Ordering::Release);
        let directory = &self.directory;
        self.shared.disk.sync_directory(directory).map_err(failed("syncing", directory))
    }

    /// Makes another segment if the store has room for it; whether it did.
    fn allocate(&self, class: u8) -> Result<bool> {
        if self.is_full.load(Ordering::Acquire) {
            return Ok(false);
        }
        let slot_bytes = lock(&self.slots).slot_bytes(class);
        let slots = (self.segment_bytes.saturating_sub(HEAD_LEN) / slot_bytes).max(1);
        let number = self.next_segment.load(Ordering::Acquire);
        let head = SegmentHead {
            writer: self.id,
            number: u32::try_from(number)
                .map_err(|_| Error::Internal("there are no more segments".into()))?,
            slot_bytes,
            slots: u32::try_from(slots).unwrap_or(u32::MAX),
        };
        let (Some(len), Some(charge)) = (head.file_len(), self.limits.segment_bytes(&head)) else {
            return Ok(false);
        };
        let locked = self.shared.root.lock()?;
        while !self.has_room(len, charge, &locked)? {
            if !self.reclaim(&locked)? {
                self.is_full.store(true, Ordering::Release);
                self.note_want(charge, &locked)?;
                return Ok(false);
            }
        }
        self.wanted.store(0, Ordering::Release);
        self.next_segment.store(number + 1, Ordering::Release);
        match self.create_segment(head, len) {
            Ok(segment) => {
                self.shared.taken.fetch_add(len, Ordering::Relaxed);
                self.shared.know_segment(0, &segment);
                lock(&self.slots).add(segment, class, |_| false);
                Ok(true)
            }
            Err(error) => {
                let path = self.directory.join(names::segment(head.number));
                // What is left counts as taken until the next opening removes it.
                let _ = self.shared.disk.remove(&path);
                self.is_full.store(true, Ordering::Release);
                if is_full(&error) { Ok(false) } else { Err(error) }
            }
        }
    }

    /// Whether so many bytes more fit under all limits.
    fn has_room(&self, len: u64, charge: u64, locked: &RootLock<'_>) -> Result<bool> {
        let charges = self.shared.root.charges(&self.limits)?;
        self.shared.taken.store(charges.taken, Ordering::Relaxed);
        let own = charges.of_writers.get(&self.id).copied().unwrap_or(0).saturating_add(charge);
        let mut needed = charges.total.saturating_add(charge);
        let others = self.others(locked)?;
        if own > self.limits.capacity / others.writers {
            // Who has less than its share comes first.
            needed = needed.saturating_add(others.wanted);
        }
        let fits = needed <= self.limits.capacity;
        Ok(fits && self.shared.root.available()? >= self.limits.min_free.saturating_add(len))
    }

    /// Notes what we would allocate, if we have less than our share.
    fn note_want(&self, charge: u64, locked: &RootLock<'_>) -> Result<()> {
        let own = self.own_charge()?;
        let has_share = own.saturating_add(charge) > self.limits.capacity / self.others(locked)?.writers;
        self.wanted.store(if has_share { 0 } else { charge }, Ordering::Release);
        Ok(())
    }

    /// Who else writes. What the dead wanted does not count.
    pub(super) fn others(&self, locked: &RootLock<'_>) -> Result<Others> {
        let root = &self.shared.root;
        let mut others = Others { writers: 1, wanted: 0 };
        for other in root.writers()?.iter().filter(|other| other.id != self.id) {
            if root.try_lease(&other.path, locked)?.is_none() {
                others.writers += 1;
                let wanted = root.lease(&other.path).map_or(0, |lease| lease.wanted_bytes);
                others.wanted = others.wanted.max(wanted);
            }
        }
        Ok(others)
    }

    fn own_charge(&self) -> Result<u64> {
        let charges = self.shared.root.charges(&self.limits)?;
        Ok(charges.of_writers.get(&self.id).copied().unwrap_or(0))
    }

    fn create_segment(&self, head: SegmentHead, len: u64) -> Result<Arc<Segment>> {
        let path = self.directory.join(names::segment(head.number));
        let disk = &self.shared.disk;
        let (file, data) = disk.open_data(&path, FileAccess::CreateNew).map_err(failed("making", &path))?;
        file.allocate(len, crate::disk::Extend::Yes).map_err(failed("making room for", &path))?;
        write_full(&*file, &head.to_bytes(), 0).map_err(failed("writing to", &path))?;
        file.sync_data().map_err(failed("syncing", &path))?;
        disk.sync_directory(&self.directory).map_err(failed("syncing", &self.directory))?;
        Ok(Segment::new(head, file, data))
    }

    /// Removes a segment of a writer that is gone, or what else it left. Whether there was anything.
    fn reclaim(&self, locked: &RootLock<'_>) -> Result<bool> {
        let disk = &*self.shared.disk;
        let root = &self.shared.root;
        for other in root.writers()?.into_iter().filter(|other| other.id != self.id) {
            let Some(_lease) = root.try_lease(&other.path, locked)? else { continue };
            let files = disk.list(&other.path).map_err(failed("listing", &other.path))?;
            let number_of = |name: &str| match WriterFile::parse(name) {
                WriterFile::Segment(number) => Some(number),
                _ => None,
            };
            let first = files.iter().filter_map(|file| number_of(&file.name)).min();
            if let Some(number) = first {
                let path = other.path.join(names::segment(number));
                disk.remove(&path).map_err(failed("removing", &path))?;
                disk.sync_directory(&other.path).map_err(failed("syncing", &other.path))?;
                return Ok(true);
            }
            for file in files {
                let path = other.path.join(file.name);
                disk.remove(&path).map_err(failed("removing", &path))?;
            }
            disk.remove_directory(&other.path).map_err(failed("removing", &other.path))?;
            disk.sync_directory(&root.path).map_err(failed("syncing", &root.path))?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Evicts ahead, so that those who want a slot rarely wait; and keeps what there is within its limits.
    pub(super) fn maintain_room(&self) -> Result<()> {
        let _one = lock(&self.making_room);
        self.is_full.store(false, Ordering::Release);
        let collected = self.collect();
        let now = self.shared.now();
        let expired = self.shared.index.expired(now, 4096);
        self.counts.expired.fetch_add(expired.len() as u64, Ordering::Relaxed);
        self.departed.note(expired.iter().map(|gone| gone.fingerprint));
        let buried = self.bury(&expired);
        self.finish_draining()?;
        let kept = self.keep_limits();
        let full = [collected, buried].into_iter().find_map(Result::err);
        if let Some(error) = full {
            // The log has no room for what is gone. A segment can go without it.
            if is_full(&error)
                && let Some(worth) = self.shared.index.coldest_segment(|_| true)
            {
                self.give_up(worth.segment)?;
            }
            return Err(error);
        }
        kept?;
        self.keep_quotas()?;
        self.evict_ahead()
    }

    /// Gives up a segment if there is less room than there was, or if others have less than their share; one of a writer
    /// that is gone, if there is one.
    fn keep_limits(&self) -> Result<()> {
        let root = &self.shared.root;
        let charges = root.charges(&self.limits)?;
        self.shared.taken.store(charges.taken, Ordering::Relaxed);
        let own = charges.of_writers.get(&self.id).copied().unwrap_or(0);
        let is_too_much = charges.total > self.limits.capacity || root.available()? < self.limits.min_free;
        let is_wanted = |other: &WriterDirectory| {
            other.id != self.id && root.lease(&other.path).is_some_and(|lease| lease.wanted_bytes > 0)
        };
        if !is_too_much && !root.writers()?.iter().any(is_wanted) {
            return Ok(());
        }
        let locked = root.lock()?;
        let others = self.others(&locked)?;
        let is_unfair = others.wanted > 0
            && own > self.limits.capacity / others.writers
            && charges.total.saturating_add(others.wanted) > self.limits.capacity;
        if (is_too_much || is_unfair) && lock(&self.slots).draining().is_empty() {
            if self.reclaim(&locked)? {
                return Ok(());
            }
            drop(locked);
            let unused = lock(&self.slots).unused(None);
            let coldest = || self.shared.index.coldest_segment(|_| true).map(|worth| worth.segment);
            if let Some(number) = unused.or_else(coldest) {
                self.give_up(number)?;
                // What was given up is not taken back at once.
                self.is_full.store(true, Ordering::Release);
            }
        }
        Ok(())
    }

    /// Evicts from namespaces that have more than they may.
    fn keep_quotas(&self) -> Result<()> {
        for (number, _) in self.shared.namespaces.all() {
            let excess = self.shared.index.quota_excess(number, 0);
            if excess > 0 {
                self.evict(&Want { from: Candidates::Namespace(number), enough: Enough::Bytes(excess) })?;
            }
        }
        Ok(())
    }

    fn evict_ahead(&self) -> Result<()> {
        let classes = lock(&self.slots).classes();
        for class in classes {
            let ahead = self.blocks_at_a_time(class);
            let free = lock(&self.slots).free(class);
            // A class that has just one slot keeps its block.
            let is_low = free < ahead.div_ceil(2) && lock(&self.slots).slots(class) > 1;
            if is_low && !self.allocate(class)? {
                self.evict_class(class, ahead - free)?;
            }
        }
        Ok(())
    }
}

/// Whether an error says that there is no room on the disk.
pub(super) fn is_full(error: &Error) -> bool {
    let errnos = [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT];
    match error {
        Error::Io { source, .. } => {
            source.raw_os_error().is_some_and(|errno| errnos.iter().any(|full| full.raw_os_error() == errno))
        }
        _ => false,
    }
}
