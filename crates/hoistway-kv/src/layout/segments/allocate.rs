//! Segments that are made: when a block needs one, or ahead of that.
#![forbid(unsafe_code)]

use super::{
    failed, lock, names,
    recover::LEAST_PART,
    room::is_full,
    root::{Charges, Limits, RootLock},
    segment::Segment,
    shares::Given,
    slots::UsedSlots,
    writer::Writer,
};
use crate::{
    Error, EventKind, Result,
    disk::{Extend, FileAccess, write_full},
    format::{
        BLOCK_LEN,
        segment::{HEAD_LEN, SegmentHead},
    },
};
use std::{
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// A segment that is to be created.
pub(super) struct NewSegment {
    pub(super) head: SegmentHead,
    pub(super) len: u64,
    /// Bytes that are counted for it.
    pub(super) charge: u64,
}

/// Whether there is room for a segment.
enum Room {
    For(NewSegment),
    /// Not now.
    None,
    /// No segment is made for such a block: no file can be so large.
    Never,
}

/// Time between attempts to make a segment ahead where there was no room for it.
const SPARE_PAUSE: Duration = Duration::from_secs(1);
/// Pages of the shortest segment: any block but an empty one takes more than one.
const LEAST_PAGES: u64 = 2;

impl Writer {
    /// Creates a segment that holds a block of `bytes` bytes, if the store has room for it. Returns whether it did.
    pub(super) fn allocate(&self, bytes: u64) -> Result<bool> {
        if self.is_full.load(Ordering::Acquire) {
            return Ok(false);
        }
        let Some(locked) = self.lock_root()? else { return Ok(false) };
        let mut reclaimed = Vec::new();
        let found = self.find_room(bytes, &locked, &mut reclaimed);
        let is_made = match &found {
            Ok(Room::For(new)) => self.make_segment(new, locked),
            _ => {
                drop(locked);
                Ok(false)
            }
        };
        // Also where the search has failed: until then, a power cut brings back what was removed.
        self.sync_reclaimed(&reclaimed);
        if let Room::Never = found? {
            return Ok(false);
        }
        let is_made = is_made?;
        self.was_full.store(!is_made, Ordering::Release);
        if is_made {
            self.wanted.store(0, Ordering::Release);
            self.has_told_of_room.store(false, Ordering::Release);
        }
        Ok(is_made)
    }

    /// Looks for room for a segment that holds a block of `bytes` bytes. Removes what writers have left that have ended, as far as that is
    /// in the way, and adds where that was to `reclaimed`.
    fn find_room(&self, bytes: u64, locked: &RootLock<'_>, reclaimed: &mut Vec<PathBuf>) -> Result<Room> {
        loop {
            let charges = self.charges()?;
            let Some((usual, mut len)) = self.next_segment_of(bytes, &charges, locked)? else {
                return Ok(Room::Never);
            };
            // The last one has what room is left.
            let least = self.least_segment.min(len).max(1);
            while !charges.is_partial && len >= least {
                if let Some(new) = self.new_segment(bytes, len)?
                    && self.has_room(&charges, &new, &Given::default(), locked)?
                {
                    return Ok(Room::For(new));
                }
                len /= 2;
            }
            // What is not known to be in the way does not have to go.
            let left = if charges.is_current { self.reclaim(locked)? } else { None };
            let is_over = left.is_none();
            reclaimed.extend(left);
            if is_over {
                self.is_full.store(true, Ordering::Release);
                self.tell_of_room(&charges, &usual)?;
                self.note_want(usual.charge, locked)?;
                return Ok(Room::None);
            }
        }
    }

    /// Makes a segment before it is needed, while blocks are stored and there is room for it, so that no store waits for the
    /// disk and for the lock of the store.
    pub(super) fn make_spare(&self) -> Result<()> {
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
        let Some(locked) = self.shared.root.try_lock()? else { return Ok(()) };
        let charges = self.charges()?;
        let Some((new, _)) = self.next_segment_of(0, &charges, &locked)? else { return Ok(()) };
        if !charges.is_partial && self.has_room(&charges, &new, &Given::default(), &locked)? {
            self.make_segment(&new, locked)?;
            spare.0 = now;
        }
        Ok(())
    }

    /// Takes the lock of the store. `None` if another process keeps it: the room that there is has to do.
    pub(super) fn lock_root(&self) -> Result<Option<RootLock<'_>>> {
        let locked = match self.shared.root.lock() {
            Err(error @ Error::TimedOut { .. }) => {
                tracing::debug!(%error, "no segment is made");
                None
            }
            locked => Some(locked?),
        };
        self.is_locked_out.store(locked.is_none(), Ordering::Release);
        Ok(locked)
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

    /// Describes the next segment for a block of `bytes` bytes, and the length that it is to have besides: the usual one, or less
    /// where there are so many writers that one of the usual length is more than a share. `None` if no file can be so large.
    pub(super) fn next_segment_of(
        &self,
        bytes: u64,
        charges: &Charges,
        locked: &RootLock<'_>,
    ) -> Result<Option<(NewSegment, u64)>> {
        let writers = self.others(charges, locked)?.writers;
        let room = (self.limits.capacity / writers).saturating_sub(self.limits.writer_bytes());
        let mut len = self.segment_bytes;
        loop {
            let new = self.new_segment(bytes, len)?;
            match new {
                Some(new) if new.charge > room && len > 1 && len / 2 >= self.segment_bytes / LEAST_PART => {
                    len /= 2
                }
                new => return Ok(new.map(|new| (new, len))),
            }
        }
    }

    /// Describes the next segment: of `len` bytes, or longer if the block needs that; `None` if no file can be so large.
    /// Until the lock of the store is held, another thread may make one of this number.
    pub(super) fn new_segment(&self, bytes: u64, len: u64) -> Result<Option<NewSegment>> {
        let number = u32::try_from(self.next_segment.load(Ordering::Acquire))
            .map_err(|_| Error::Internal("there are no more segments".into()))?;
        let pages =
            (len.saturating_sub(HEAD_LEN) / BLOCK_LEN).max(bytes.div_ceil(BLOCK_LEN)).max(LEAST_PAGES);
        let mean = lock(&self.slots).mean(bytes);
        let head = SegmentHead::paged(self.id, number, u32::try_from(pages).unwrap_or(u32::MAX), mean);
        let sizes = head.file_len().zip(Limits::segment_bytes(&head));
        Ok(sizes.map(|(len, charge)| NewSegment { head, len, charge }))
    }

    /// Creates a segment for which there is room; `false` if the disk is full all the same. The lock of the store is held
    /// until the segment has its room, and not while the disk is waited for.
    pub(super) fn make_segment(&self, new: &NewSegment, locked: RootLock<'_>) -> Result<bool> {
        self.next_segment.store(u64::from(new.head.number) + 1, Ordering::Release);
        let created = self.create_segment(new.head, new.len);
        drop(locked);
        match created.and_then(|segment| self.sync_segment(&segment).map(|()| segment)) {
            Ok(segment) => {
                self.shared.taken.fetch_add(new.len, Ordering::Relaxed);
                self.shared.know_segment(0, &segment);
                lock(&self.slots).add(segment, &UsedSlots::none(new.head.slots), 0);
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

    fn create_segment(&self, head: SegmentHead, len: u64) -> Result<Arc<Segment>> {
        let path = self.directory.join(names::segment(head.number));
        let disk = &self.shared.disk;
        let (file, data) = disk.open_data(&path, FileAccess::CreateNew).map_err(failed("making", &path))?;
        file.allocate(len, Extend::Yes).map_err(failed("making room for", &path))?;
        write_full(&*file, &head.to_bytes(), 0).map_err(failed("writing to", &path))?;
        Ok(Segment::new(head, file, data))
    }

    /// Brings a new segment and its name to the disk.
    fn sync_segment(&self, segment: &Segment) -> Result<()> {
        segment.file.sync_data().map_err(failed("syncing", segment.data.path()))?;
        self.sync_names()
    }

    /// Brings the names of this writer's files to the disk.
    fn sync_names(&self) -> Result<()> {
        // Held while the disk syncs: a thread that finds nothing to sync does not overtake one that syncs it.
        let mut synced = lock(&self.synced_names);
        let removed = self.removed.load(Ordering::Acquire);
        self.shared.disk.sync_directory(&self.directory).map_err(failed("syncing", &self.directory))?;
        *synced = removed;
        Ok(())
    }

    /// Sees to it that no segment that was removed comes back after a crash.
    pub(super) fn sync_removed(&self) -> Result<()> {
        let synced = *lock(&self.synced_names);
        if synced == self.removed.load(Ordering::Acquire) { Ok(()) } else { self.sync_names() }
    }
}
