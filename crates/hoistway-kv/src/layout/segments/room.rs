//! Room for blocks: slots that are free, segments that may be made, blocks and segments that have to go.
#![forbid(unsafe_code)]

use super::{
    WriterDirectory, failed, lock,
    log::Sync,
    names::{self, WriterFile},
    root::{Charges, Limits, RootLock},
    segment::Segment,
    slots::Taken,
    writer::Writer,
};
use crate::{
    Error, EventKind, Result,
    disk::{FileAccess, write_full},
    format::{
        BLOCK_LEN,
        segment::{HEAD_LEN, SegmentHead},
    },
    index::{Candidates, Entry, Slot, Want},
};
use std::{
    collections::{HashSet, VecDeque},
    io,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

/// What is known of the living writers of a store.
pub(super) struct Others {
    /// Their number, including this one.
    pub(super) writers: u64,
    /// The most that one of the others would allocate if it could.
    pub(super) wanted: u64,
}

/// A segment that is to be created.
struct NewSegment {
    head: SegmentHead,
    len: u64,
    /// Bytes that are counted for it.
    charge: u64,
}

/// Bytes that were freed for a segment that is to be created.
#[derive(Default)]
struct Given {
    /// The charge of this writer before that.
    own_before: u64,
    /// Bytes of files. As long as others have them open, the disk does not know that they are free.
    bytes: u64,
}

/// Time between attempts to make a segment ahead where there was no room for it.
const SPARE_PAUSE: Duration = Duration::from_secs(1);
/// A request for room expires after this long.
const SILENCE: Duration = Duration::from_secs(60);
/// Limit of the segments that are removed for a larger one.
const MOST_GIVEN_UP: usize = 64;
/// Most bytes of blocks that are evicted at a time, so that their tombstones share a sync.
const EVICTED_BYTES: u64 = 64 << 20;
/// Part of our segments of which blocks are evicted at a time.
const EVICTED_PART: u64 = 64;
/// Pages of the shortest segment: any block but an empty one takes more than one.
const LEAST_PAGES: u64 = 2;
/// Part of our room that is free in pieces before blocks go by place.
const SCATTERED_PART: u64 = 32;

/// Most times that room is made for one block, while others of this process are faster to use it.
const MOST_ATTEMPTS: usize = 16;

impl Writer {
    /// Takes a place for a block of `bytes` bytes; `following` bytes of the same request come after it. Evicts blocks for
    /// it if it must. `None` if no more can be evicted.
    pub(super) fn take_slot(&self, bytes: u64, following: u64) -> Result<Option<(Arc<Segment>, Slot)>> {
        let take = || {
            let mut slots = lock(&self.slots);
            // A log in doubt takes no commits.
            if self.log.is_in_doubt() { None } else { slots.take(bytes, following) }
        };
        if !self.is_scattered(bytes, following)
            && let Some(taken) = take()
        {
            self.evict_early();
            return Ok(Some(taken));
        }
        let _one = lock(&self.making_room);
        if self.is_scattered(bytes, following) && !self.log.is_in_doubt() {
            // Also if this fails, there may be room for this block.
            let made =
                self.allocate(bytes).and_then(|is_made| if is_made { Ok(()) } else { self.evict_some(0) });
            if let Err(error) = made {
                tracing::debug!(%error, "blocks of a request do not lie together");
            }
        }
        for _ in 0..MOST_ATTEMPTS {
            // Another thread may have made room in the meantime.
            if let Some(taken) = take() {
                return Ok(Some(taken));
            }
            if self.log.is_in_doubt() {
                return Ok(None);
            }
            match self.make_room(bytes) {
                Ok(true) => {}
                Ok(false) => break,
                // Nothing can be evicted, as tombstones cannot be written. The store is then as good as full.
                Err(error) if is_full(&error) => {
                    tracing::warn!(%error, "no room for blocks");
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(take())
    }

    /// Tries to make room for a block of `bytes` bytes. Returns whether more is free; it may not be in one piece. Evicts by
    /// the policy while little is free, and by place once what is free is in pieces that are too short.
    fn make_room(&self, bytes: u64) -> Result<bool> {
        let collected = self.collect();
        if lock(&self.slots).has_room(bytes) || self.allocate(bytes)? {
            return Ok(true);
        }
        collected?;
        if !lock(&self.releasing).is_empty() {
            self.log.sync_all()?;
            self.release_synced();
            if lock(&self.slots).has_room(bytes) {
                return Ok(true);
            }
        }
        let is_too_short = lock(&self.slots).are_too_short(bytes);
        if is_too_short || bytes > self.segment_bytes.saturating_sub(HEAD_LEN) {
            return self.make_room_for_large(bytes);
        }
        if self.take_over(bytes, |number| lock(&self.slots).is_outdated(number))? {
            return Ok(true);
        }
        let (free, total) = {
            let slots = lock(&self.slots);
            (slots.free() * BLOCK_LEN, slots.total() * BLOCK_LEN)
        };
        if free < (total / SCATTERED_PART).max(bytes) {
            self.evict_some(bytes)?;
            let slots = lock(&self.slots);
            if slots.has_room(bytes) {
                return Ok(true);
            }
        }
        if self.clear_place(bytes)? {
            return Ok(true);
        }
        // What is in use leaves no stretch. Single blocks may do.
        let before = lock(&self.slots).free();
        self.evict_some(bytes)?;
        Ok(lock(&self.slots).free() > before)
    }

    /// Tries to make room for a block that is larger than a usual segment: what is worth least goes, be it the blocks of a
    /// segment that is long enough, or several short segments.
    fn make_room_for_large(&self, bytes: u64) -> Result<bool> {
        let coldest = self.by_worth(|_| true).first().copied();
        let is_long = coldest.is_some_and(|number| lock(&self.slots).long_enough(number, bytes).is_some());
        match coldest.filter(|_| is_long) {
            Some(number) => self.clear_place_in(number, bytes),
            None => self.take_over(bytes, |_| true),
        }
    }

    /// Evicts before there is no room left, where that costs a sync: the next commit has one anyway.
    fn evict_early(&self) {
        if !self.was_full.load(Ordering::Acquire) || self.sync_mode() == Sync::Later {
            return;
        }
        let ahead = self.bytes_at_a_time();
        let free = lock(&self.slots).free() * BLOCK_LEN;
        if free >= ahead / 2 || !lock(&self.releasing).is_empty() || !self.are_small(ahead) {
            return;
        }
        let want = Want { from: Candidates::Anywhere, bytes: ahead - free };
        if let Err(error) = self.evict_before_need(&want) {
            tracing::debug!(%error, "blocks are evicted when their room is needed");
        }
    }

    /// Whether blocks are so small that some can go ahead: a few large ones stay until their room is needed.
    fn are_small(&self, ahead: u64) -> bool {
        let totals = self.shared.index.totals(None);
        totals.own_slot_bytes <= totals.own_blocks.saturating_mul(ahead)
    }

    /// Whether blocks that come together would not lie together, although little room is free.
    fn is_scattered(&self, bytes: u64, following: u64) -> bool {
        let some = self.bytes_at_a_time();
        let slots = lock(&self.slots);
        following > 0
            && slots.free() * BLOCK_LEN < some.saturating_mul(2)
            && !slots.has_run(bytes.saturating_add(following).min(some.saturating_mul(2)))
    }

    /// Evicts one batch of blocks, of at least `bytes` bytes.
    pub(super) fn evict_some(&self, bytes: u64) -> Result<()> {
        let bytes = self.bytes_at_a_time().max(bytes);
        self.evict(&Want { from: Candidates::Anywhere, bytes }).map(drop)
    }

    /// Returns the bytes of one batch of evictions.
    pub(super) fn bytes_at_a_time(&self) -> u64 {
        (lock(&self.slots).total() * BLOCK_LEN / EVICTED_PART).min(EVICTED_BYTES)
    }

    /// Removes segments for which `may_go` until a new one for a block of `bytes` bytes fits. Returns whether it does.
    fn take_over(&self, bytes: u64, may_go: impl Fn(u32) -> bool) -> Result<bool> {
        if !lock(&self.slots).draining().is_empty() {
            // What was given up before comes first.
            self.finish_draining()?;
            if self.allocate(bytes)? {
                return Ok(true);
            }
        }
        if self.is_refused.load(Ordering::Acquire) || !lock(&self.slots).draining().is_empty() {
            return Ok(false);
        }
        let mut going: VecDeque<u32> = self.by_worth(&may_go).into();
        going.truncate(MOST_GIVEN_UP);
        if going.is_empty() {
            return Ok(false);
        }
        let Some(new) = self.new_segment(bytes, self.segment_bytes)? else { return Ok(false) };
        // Until the new one is there: others would take the room.
        let Some(locked) = self.lock_root()? else { return Ok(false) };
        let charges = self.shared.root.charges(&self.limits)?;
        if !charges.is_current || self.is_too_much(charges.total)? {
            // There would not be room for another. What is too much goes in time.
            return Ok(false);
        }
        let own = charges.of_writers.get(&self.id).copied().unwrap_or(0);
        let mut given = Given { own_before: own, bytes: 0 };
        // None goes in vain.
        let charge_of = |number: &u32| {
            self.shared
                .segment(0, *number)
                .and_then(|segment| Limits::segment_bytes(&segment.head))
                .unwrap_or(0)
        };
        let gained = going.iter().map(charge_of).fold(0, u64::saturating_add);
        if charges.total.saturating_sub(gained).saturating_add(new.charge) > self.limits.capacity {
            return Ok(false);
        }
        while let Some(number) = going.pop_front() {
            if !lock(&self.slots).may_give(number) {
                continue;
            }
            let len = self.shared.segment(0, number).and_then(|segment| segment.head.file_len());
            self.give_up(number)?;
            if lock(&self.slots).has(number) {
                // The segment is freed once its last reader is done, if it can be freed.
                break;
            }
            given.bytes = given.bytes.saturating_add(len.unwrap_or(0));
            let charges = self.charges()?;
            if !charges.is_current {
                // The charges still include the segment that was just removed.
                break;
            }
            if self.has_room(&charges, &new, &given, &locked)? {
                let made = self.make_segment(&new);
                self.is_refused.store(!matches!(made, Ok(true)), Ordering::Release);
                return made;
            }
        }
        Ok(false)
    }

    /// Returns the segment whose removal loses least, of those that can be removed at once.
    fn least_useful(&self) -> Option<u32> {
        self.by_worth(|_| true).first().copied()
    }

    /// Returns the segments that can be removed at once and for which `may_go`, those first whose removal loses least.
    fn by_worth(&self, may_go: impl Fn(u32) -> bool) -> Vec<u32> {
        let survey = self.shared.index.survey();
        let slots = lock(&self.slots);
        let unused = slots.unused().into_iter();
        let used = survey.into_iter().filter(|worth| !worth.is_in_use).map(|worth| worth.segment);
        let segments = unused.chain(used).filter(|number| slots.may_give(*number));
        let segments: Vec<u32> = segments.collect();
        drop(slots);
        segments.into_iter().filter(|number| may_go(*number)).collect()
    }

    /// Removes a segment with all its blocks, once their last reader and writer are done.
    fn give_up(&self, number: u32) -> Result<()> {
        lock(&self.slots).drain(number);
        self.finish_draining()
    }

    /// Removes draining segments that have no readers and no writers left.
    pub(super) fn finish_draining(&self) -> Result<()> {
        let with_blocks = lock(&self.slots).draining_with_blocks();
        if !with_blocks.is_empty() {
            let is_it = |entry: &Entry| entry.is_own() && with_blocks.contains(&entry.slot.segment);
            let pinned = Mutex::new(HashSet::new());
            let buried = self.bury(|| {
                let gone = self.shared.index.remove_all(|_, entry, is_pinned| {
                    if is_it(entry) && is_pinned {
                        lock(&pinned).insert(entry.slot.segment);
                    }
                    is_it(entry) && !is_pinned
                });
                self.shared.observed.evicted(&gone);
                gone
            });
            if let Err(error) = buried {
                // Records of a segment that is not there say nothing.
                tracing::debug!(%error, "blocks go with their segment");
            }
            let mut slots = lock(&self.slots);
            // How long blocks stay pinned is not known, so segments with pinned blocks are kept.
            lock(&pinned).drain().for_each(|number| slots.keep(number));
        }
        let drained: Vec<u32> = {
            let mut slots = lock(&self.slots);
            self.shared.index.freed().into_iter().for_each(|slot| slots.unread(slot));
            slots.draining().into_iter().filter(|number| slots.is_drained(*number)).collect()
        };
        drained.into_iter().try_for_each(|number| self.remove_segment(number))
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

    /// Creates a segment that holds a block of `bytes` bytes, if the store has room for it. Returns whether it did.
    fn allocate(&self, bytes: u64) -> Result<bool> {
        if self.is_full.load(Ordering::Acquire) {
            return Ok(false);
        }
        let Some(usual) = self.new_segment(bytes, self.segment_bytes)? else { return Ok(false) };
        let Some(locked) = self.lock_root()? else { return Ok(false) };
        let found = loop {
            let charges = self.charges()?;
            let mut len = self.segment_bytes;
            let mut found = None;
            // The last one has what room is left.
            while !charges.is_partial && found.is_none() && len >= self.least_segment.max(1) {
                let new = self.new_segment(bytes, len)?;
                found = match new {
                    Some(new) if self.has_room(&charges, &new, &Given::default(), &locked)? => Some(new),
                    _ => None,
                };
                len /= 2;
            }
            if found.is_some() {
                break found;
            }
            // What is not known to be in the way does not have to go.
            if !charges.is_current || !self.reclaim(&locked)? {
                self.is_full.store(true, Ordering::Release);
                self.tell_of_room(&charges, &usual)?;
                self.note_want(usual.charge, &locked)?;
                break None;
            }
        };
        let is_made = found.map_or(Ok(false), |new| self.make_segment(&new))?;
        self.was_full.store(!is_made, Ordering::Release);
        if is_made {
            self.wanted.store(0, Ordering::Release);
            self.has_told_of_room.store(false, Ordering::Release);
        }
        Ok(is_made)
    }

    /// Takes the lock of the store. `None` if another process keeps it: the room that there is has to do.
    fn lock_root(&self) -> Result<Option<RootLock<'_>>> {
        match self.shared.root.lock() {
            Err(error @ Error::TimedOut { .. }) => {
                tracing::debug!(%error, "no segment is made");
                Ok(None)
            }
            locked => locked.map(Some),
        }
    }

    /// Notes once that blocks cannot be stored, because there is no room for a first segment.
    fn tell_of_room(&self, charges: &Charges, new: &NewSegment) -> Result<()> {
        let has_segments = lock(&self.slots).all().next().is_some();
        if has_segments || self.has_told_of_room.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let Limits { capacity, min_free } = self.limits;
        let available = self.shared.root.available()?;
        self.shared.observed.note(
            EventKind::NoRoom,
            format!(
                "nothing is stored for want of room: a first segment takes {} bytes; of the capacity of {capacity} bytes, \
                 {} are taken; the file system has {available} bytes free, of which min_free keeps {min_free}",
                new.charge, charges.total,
            ),
        );
        Ok(())
    }

    /// Describes the next segment: of `len` bytes, or longer if the block needs that; `None` if no file can be so large.
    fn new_segment(&self, bytes: u64, len: u64) -> Result<Option<NewSegment>> {
        let number = u32::try_from(self.next_segment.load(Ordering::Acquire))
            .map_err(|_| Error::Internal("there are no more segments".into()))?;
        let pages =
            (len.saturating_sub(HEAD_LEN) / BLOCK_LEN).max(bytes.div_ceil(BLOCK_LEN)).max(LEAST_PAGES);
        let mean = lock(&self.slots).mean(bytes);
        let head = SegmentHead::paged(self.id, number, u32::try_from(pages).unwrap_or(u32::MAX), mean);
        let sizes = head.file_len().zip(Limits::segment_bytes(&head));
        Ok(sizes.map(|(len, charge)| NewSegment { head, len, charge }))
    }

    /// Creates a segment for which there is room; `false` if the disk is full all the same.
    fn make_segment(&self, new: &NewSegment) -> Result<bool> {
        self.next_segment.store(u64::from(new.head.number) + 1, Ordering::Release);
        match self.create_segment(new.head, new.len) {
            Ok(segment) => {
                self.shared.taken.fetch_add(new.len, Ordering::Relaxed);
                self.shared.know_segment(0, &segment);
                lock(&self.slots).add(segment, &Taken::none(new.head.slots), 0);
                Ok(true)
            }
            Err(error) => {
                let path = self.directory.join(names::segment(new.head.number));
                // What is left counts as taken until the next opening removes it.
                let _ = self.shared.disk.remove(&path);
                self.is_full.store(true, Ordering::Release);
                if is_full(&error) { Ok(false) } else { Err(error) }
            }
        }
    }

    fn charges(&self) -> Result<Charges> {
        let charges = self.shared.root.charges(&self.limits)?;
        self.shared.taken.store(charges.taken, Ordering::Relaxed);
        Ok(charges)
    }

    /// Whether a new segment fits under all limits. A writer that gets no more than it had takes no room from others.
    fn has_room(
        &self,
        charges: &Charges,
        new: &NewSegment,
        given: &Given,
        locked: &RootLock<'_>,
    ) -> Result<bool> {
        let own = charges.of_writers.get(&self.id).copied().unwrap_or(0).saturating_add(new.charge);
        let mut needed = charges.total.saturating_add(new.charge);
        let others = self.others(locked)?;
        if own > given.own_before && own > self.limits.capacity / others.writers {
            // Writers below their share come first.
            needed = needed.saturating_add(others.wanted);
        }
        let available = self.shared.root.available()?.saturating_add(given.bytes);
        let fits = needed <= self.limits.capacity;
        Ok(fits && available >= self.limits.min_free.saturating_add(new.len))
    }

    /// Whether the store is over its capacity, or the disk below its minimum of free bytes.
    fn is_too_much(&self, taken: u64) -> Result<bool> {
        Ok(taken > self.limits.capacity || self.shared.root.available()? < self.limits.min_free)
    }

    /// Writes to the lease how much this writer would allocate, if it has less than its share.
    fn note_want(&self, charge: u64, locked: &RootLock<'_>) -> Result<()> {
        let own = self.own_charge()?;
        let has_share = own.saturating_add(charge) > self.limits.capacity / self.others(locked)?.writers;
        self.wanted.store(if has_share { 0 } else { charge }, Ordering::Release);
        self.say_alive()
    }

    /// Counts the living writers, and what they want. Dead writers, and requests in leases that have expired, do not count.
    pub(super) fn others(&self, locked: &RootLock<'_>) -> Result<Others> {
        let root = &self.shared.root;
        let mut others = Others { writers: 1, wanted: 0 };
        for other in root.writers()?.iter().filter(|other| other.id != self.id) {
            let is_dead = match root.try_lease(&other.path, locked) {
                Ok(lease) => lease.is_some(),
                Err(error) => {
                    root.warn_once(&other.path, &error);
                    false
                }
            };
            if !is_dead {
                others.writers += 1;
                others.wanted = others.wanted.max(self.wanted_by(other));
            }
        }
        Ok(others)
    }

    /// Returns the bytes for which another writer asks in its lease; 0 if its request has expired.
    fn wanted_by(&self, other: &WriterDirectory) -> u64 {
        let oldest = u64::from(self.shared.now()).saturating_sub(SILENCE.as_secs());
        let lease = other.lease(&*self.shared.disk).filter(|lease| lease.heartbeat >= oldest);
        lease.map_or(0, |lease| lease.wanted_bytes)
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

    /// Removes a segment, or else the other files, of a writer that has ended. Returns whether there were any.
    fn reclaim(&self, locked: &RootLock<'_>) -> Result<bool> {
        let root = &self.shared.root;
        for other in root.writers()?.into_iter().filter(|other| other.id != self.id) {
            match self.reclaim_from(&other, locked) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                // Others may have left something, too.
                Err(error) => root.warn_once(&other.path, &error),
            }
        }
        Ok(false)
    }

    fn reclaim_from(&self, other: &WriterDirectory, locked: &RootLock<'_>) -> Result<bool> {
        let disk = &*self.shared.disk;
        let root = &self.shared.root;
        let Some(_lease) = root.try_lease(&other.path, locked)? else { return Ok(false) };
        let mut files = disk.list(&other.path).map_err(failed("listing", &other.path))?;
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
        files.sort_unstable_by(|first, second| first.name.cmp(&second.name));
        for file in files {
            let path = other.path.join(file.name);
            disk.remove(&path).map_err(failed("removing", &path))?;
        }
        disk.remove_directory(&other.path).map_err(failed("removing", &other.path))?;
        disk.sync_directory(&root.path).map_err(failed("syncing", &root.path))?;
        Ok(true)
    }

    /// Evicts ahead, so that stores rarely wait for a slot, and keeps the store within its limits.
    pub(super) fn maintain_room(&self) -> Result<()> {
        let _one = lock(&self.making_room);
        self.is_full.store(false, Ordering::Release);
        self.is_refused.store(false, Ordering::Release);
        let collected = self.collect();
        let now = self.shared.steady_now();
        let buried = self.bury(|| {
            let expired = self.shared.index.expired(now, 4096);
            self.shared.observed.expired(&expired);
            expired
        });
        {
            let mut slots = lock(&self.slots);
            slots.worn().into_iter().for_each(|number| slots.drain(number));
        }
        self.finish_draining()?;
        let kept = self.keep_limits();
        let full = [collected, buried.map(drop)].into_iter().find_map(Result::err);
        if let Some(error) = full {
            // The log has no room for what is gone. A segment can go without it.
            if is_full(&error)
                && let Some(number) = self.least_useful()
            {
                self.give_up(number)?;
            }
            return Err(error);
        }
        kept?;
        self.keep_quotas()?;
        self.evict_ahead()?;
        self.make_spare()
    }

    /// Makes a segment before it is needed, while blocks are stored and there is room for it, so that no store waits for the
    /// disk and for the lock of the store.
    fn make_spare(&self) -> Result<()> {
        let now = (self.shared.surroundings.monotonic)();
        let stored = self.next_sequence.load(Ordering::Relaxed);
        let mut spare = lock(&self.spare);
        let is_idle = std::mem::replace(&mut spare.1, stored) == stored;
        let (free, total) = {
            let slots = lock(&self.slots);
            (slots.free() * BLOCK_LEN, slots.total())
        };
        if is_idle || now < spare.0 || total == 0 || free >= self.segment_bytes / 2 {
            return Ok(());
        }
        spare.0 = now + SPARE_PAUSE;
        let Some(new) = self.new_segment(0, self.segment_bytes)? else { return Ok(()) };
        let Some(locked) = self.shared.root.try_lock()? else { return Ok(()) };
        let charges = self.charges()?;
        if !charges.is_partial && self.has_room(&charges, &new, &Given::default(), &locked)? {
            self.make_segment(&new)?;
            spare.0 = now;
        }
        Ok(())
    }

    /// Gives up a segment if there is less room than there was, or if others have less than their share; one of a writer
    /// that is gone, if there is one.
    fn keep_limits(&self) -> Result<()> {
        let root = &self.shared.root;
        let charges = self.charges()?;
        let is_wanted = |other: &WriterDirectory| other.id != self.id && self.wanted_by(other) > 0;
        if !self.is_too_much(charges.total)? && !root.writers()?.iter().any(is_wanted) {
            return Ok(());
        }
        // Stores wait for this thread, which waits for no other process.
        let Some(locked) = root.try_lock()? else { return Ok(()) };
        // Another process may have given up a segment in the meantime.
        let charges = root.charges(&self.limits)?;
        let own = charges.of_writers.get(&self.id).copied().unwrap_or(0);
        let others = self.others(&locked)?;
        let is_unfair = others.wanted > 0
            && own > self.limits.capacity / others.writers
            && charges.total.saturating_add(others.wanted) > self.limits.capacity;
        let must_give = is_unfair || self.is_too_much(charges.total)?;
        if must_give
            && lock(&self.slots).draining().is_empty()
            && !self.reclaim(&locked)?
            && let Some(number) = self.least_useful()
        {
            self.give_up(number)?;
            // What was given up is not taken back at once.
            self.is_full.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Evicts from namespaces that have more than they may.
    fn keep_quotas(&self) -> Result<()> {
        for (number, _) in self.shared.namespaces.all() {
            let excess = self.shared.index.quota_excess(number, 0);
            if excess > 0 {
                self.evict(&Want { from: Candidates::Namespace(number), bytes: excess })?;
            }
        }
        Ok(())
    }

    fn evict_ahead(&self) -> Result<()> {
        let ahead = self.bytes_at_a_time();
        let free = lock(&self.slots).free() * BLOCK_LEN;
        if free < ahead / 2 && self.are_small(ahead) && !self.allocate(0)? {
            self.evict(&Want { from: Candidates::Anywhere, bytes: ahead - free })?;
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
