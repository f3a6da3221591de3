//! Room for a block: a place that is free, or that others leave for it.
#![forbid(unsafe_code)]

use super::{lock, log::Sync, segment::Segment, writer::Writer};
use crate::{
    Error, Result,
    format::{BLOCK_LEN, segment::HEAD_LEN},
    index::{Candidates, Slot, Want},
};
use std::sync::{Arc, atomic::Ordering};

/// Most bytes of blocks that are evicted at a time, so that their tombstones share a sync.
const EVICTED_BYTES: u64 = 64 << 20;
/// Part of our segments of which blocks are evicted at a time.
const EVICTED_PART: u64 = 64;
/// Part of our room that is free in pieces before blocks go by place.
const SCATTERED_PART: u64 = 32;
/// Most times that room is made for one block, while others of this process are faster to use it.
const MOST_ATTEMPTS: usize = 16;

/// What comes of asking for room.
pub(super) enum Room {
    Taken(Arc<Segment>, Slot),
    /// No more can be evicted as long as blocks are being written, or others give up nothing.
    NotYet,
    /// What is pinned leaves no room.
    Never,
}

/// What comes of making room.
enum Made {
    /// More is free. It may not be in one piece.
    More,
    /// There is nothing that could go now.
    Nothing,
    /// What is pinned leaves nothing that could go.
    Never,
}

impl Made {
    fn more(is_more: bool) -> Self {
        if is_more { Self::More } else { Self::Nothing }
    }
}

impl Writer {
    /// Takes a place for a block of `bytes` bytes; `following` bytes of the same request come after it. Evicts blocks for
    /// it if it must.
    pub(super) fn take_slot(&self, bytes: u64, following: u64) -> Result<Room> {
        let take = || {
            let mut slots = lock(&self.slots);
            // A log in doubt takes no commits.
            if self.log.is_in_doubt() {
                return None;
            }
            slots.take(bytes, following).map(|(segment, slot)| Room::Taken(segment, slot))
        };
        if !self.is_scattered(bytes, following)
            && let Some(taken) = take()
        {
            self.evict_early();
            return Ok(taken);
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
                return Ok(taken);
            }
            if self.log.is_in_doubt() {
                break;
            }
            match self.make_room(bytes) {
                Ok(Made::More) => {}
                Ok(Made::Nothing) => break,
                Ok(Made::Never) => return Ok(take().unwrap_or(Room::Never)),
                // Nothing can be evicted, as tombstones cannot be written. The store is then as good as full.
                Err(error) if is_full(&error) => {
                    tracing::warn!(%error, "no room for blocks");
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(take().unwrap_or(Room::NotYet))
    }

    /// Whether a block of `bytes` bytes may have room once others have gone.
    pub(super) fn may_have_room(&self, bytes: u64) -> bool {
        if !self.is_full.load(Ordering::Acquire) || lock(&self.slots).has_room(bytes) {
            return true;
        }
        let evictable = self.shared.index.evictable(Candidates::Anywhere);
        (lock(&self.slots).free() * BLOCK_LEN).saturating_add(evictable) >= bytes
    }

    /// Tries to make room for a block of `bytes` bytes. Evicts by the policy while little is free, and by place once what is
    /// free is in pieces that are too short.
    fn make_room(&self, bytes: u64) -> Result<Made> {
        let collected = self.collect();
        if lock(&self.slots).has_room(bytes) || self.allocate(bytes)? {
            return Ok(Made::More);
        }
        collected?;
        if !lock(&self.releasing).is_empty() {
            self.log.sync_all()?;
            self.release_synced();
            if lock(&self.slots).has_room(bytes) {
                return Ok(Made::More);
            }
        }
        let is_too_short = lock(&self.slots).are_too_short(bytes);
        if is_too_short || bytes > self.segment_bytes.saturating_sub(HEAD_LEN) {
            return self.make_room_for_large(bytes).map(Made::more);
        }
        if self.take_over(bytes, |number| lock(&self.slots).is_outdated(number))? {
            return Ok(Made::More);
        }
        if !self.may_clear(bytes) {
            return Ok(if self.waits_for_others() { Made::Nothing } else { Made::Never });
        }
        let (free, total) = {
            let slots = lock(&self.slots);
            (slots.free() * BLOCK_LEN, slots.total() * BLOCK_LEN)
        };
        if free < (total / SCATTERED_PART).max(bytes) {
            self.evict_some(bytes)?;
            let slots = lock(&self.slots);
            if slots.has_room(bytes) {
                return Ok(Made::More);
            }
        }
        if self.clear_place(bytes)? {
            return Ok(Made::More);
        }
        if self.has_few_blocks() || !self.may_do_without_stretch(bytes) {
            // What is in use leaves no stretch; or what goes in vain until stretches have been looked up would be missed.
            return Ok(Made::Nothing);
        }
        self.evict_some(bytes)?;
        let has_room = lock(&self.slots).has_room(bytes);
        if !has_room {
            self.note_in_vain(bytes);
        }
        Ok(Made::more(has_room))
    }

    /// Tries to make room for a block that is larger than a usual segment: what is worth least goes, be it the blocks of a
    /// segment that is long enough, or several short segments.
    fn make_room_for_large(&self, bytes: u64) -> Result<bool> {
        match self.coldest_long_enough(bytes) {
            Some(region) => self.clear_place_in(region, bytes),
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

    /// Evicts ahead, so that stores rarely wait for a slot, and keeps the store within its limits.
    pub(super) fn maintain_room(&self) -> Result<()> {
        // Before others wait for this thread: that looks at all blocks.
        let draining = self.blocks_of_draining();
        let _one = lock(&self.making_room);
        self.forget_want();
        self.is_full.store(false, Ordering::Release);
        self.is_refused.store(false, Ordering::Release);
        let collected = self.collect();
        let now = self.shared.steady_now();
        let written = self.tombstone(|| {
            let expired = self.shared.index.expired(now, 4096);
            self.shared.observed.expired(&expired);
            expired
        });
        {
            let mut slots = lock(&self.slots);
            slots.worn().into_iter().for_each(|number| slots.drain(number));
        }
        self.empty_draining(&draining);
        self.finish_draining()?;
        let kept = self.keep_limits();
        let full = [collected, written.map(drop)].into_iter().find_map(Result::err);
        if let Some(error) = full {
            // The log has no room for what is gone. A segment can go without it.
            if is_full(&error)
                && let Some(region) = self.least_at_once()
            {
                self.give_up(&region)?;
            }
            return Err(error);
        }
        kept?;
        self.keep_quotas()?;
        self.evict_ahead()
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
