//! Room in the segments of this process: what is free, and what will be.
//!
//! A block takes a run of slots: pages of a segment that has blocks of all sizes, or one slot of a segment that version 1
//! of the format made. The latter keep their blocks, and get no new ones.
#![forbid(unsafe_code)]

use super::segment::Segment;
use crate::{format::BLOCK_LEN, index::Slot};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

/// Part of the slots of a segment that may be lost before it is given up.
const WORN_PART: u32 = 8;
/// Free runs that are looked at for a block that has to leave its place.
const MOST_RUNS: usize = 64;

/// All room.
#[derive(Debug, Default)]
pub(super) struct Slots {
    segments: BTreeMap<u32, OwnSegment>,
    /// Free runs that blocks may go to: length, segment and first slot.
    runs: BTreeSet<(u32, u32, u32)>,
    /// Slots in these runs.
    free: u64,
    /// Slots of all segments that blocks may go to.
    total: u64,
    /// Blocks, with those that come, and those that are gone but whose place cannot be used yet.
    blocks: u64,
    /// The most slots: records of more have no room.
    most_blocks: u64,
    /// Behind the block that got its place last.
    next: Option<Slot>,
    /// Runs of blocks that are gone, which cannot be used yet.
    retired: HashMap<Slot, (u32, Waiting)>,
    /// Runs whose readers were done before [`Slots::retire`] was called for them.
    unread: HashSet<Slot>,
}

#[derive(Debug)]
struct OwnSegment {
    segment: Arc<Segment>,
    /// Free runs: first slot and length. No two of them touch.
    free: BTreeMap<u32, u32>,
    /// Slots that are not free.
    used: u32,
    /// Blocks that these belong to.
    blocks: u32,
    /// Slots of claims: they are being written to.
    claimed: u32,
    /// Slots that the system may still write to, whenever. Removing the file does no harm: it lives until then.
    lost: u32,
    /// Runs of slots to which the last write failed.
    suspects: Vec<Range<u32>>,
    is_draining: bool,
}

/// Slots of a segment that have blocks, a bit each.
#[derive(Clone, Debug)]
pub(super) struct UsedSlots(Vec<u64>);

/// The events that a run waits for before it is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    /// The tombstone of the block has to be on the disk.
    pub(super) for_tombstone: bool,
    /// The last reader of the block has to be done.
    pub(super) for_readers: bool,
}

/// The use that is made of the place of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimEnd {
    /// It may be used again.
    Unused,
    /// A write to it failed. It may be used again, unless the last write to it failed, too.
    Failed,
    /// It has a block, or waits for a tombstone.
    Used,
    /// The system may still write to it.
    Lost,
}

impl Slots {
    /// Takes in a segment with so many blocks; those of its slots that are not `taken` are free.
    pub(super) fn add(&mut self, segment: Arc<Segment>, taken: &UsedSlots, blocks: u32) {
        let head = segment.head;
        let free = taken.gaps(head.slots);
        let used = head.slots - free.values().sum::<u32>();
        let entry = OwnSegment {
            segment,
            free,
            used,
            blocks,
            claimed: 0,
            lost: 0,
            suspects: Vec::new(),
            is_draining: true,
        };
        self.blocks += u64::from(blocks);
        self.most_blocks += u64::from(head.most_blocks);
        self.segments.insert(head.number, entry);
        self.keep(head.number);
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.segments.values().map(|entry| &entry.segment)
    }

    pub(super) fn has(&self, segment: u32) -> bool {
        self.segments.contains_key(&segment)
    }

    /// Whether a segment could be given up at once.
    pub(super) fn may_give(&self, number: u32) -> bool {
        self.segments.get(&number).is_some_and(|entry| !entry.is_draining && entry.claimed == 0)
    }

    /// Whether another segment in place of this one would have room for blocks where this has none: it has no pages, or
    /// was made for larger blocks, so that there may be no more although there is room.
    pub(super) fn is_outdated(&self, number: u32) -> bool {
        let entry = self.segments.get(&number);
        entry.map(|entry| entry.segment.head).is_some_and(|head| {
            let is_crowded = self.blocks >= self.most_blocks;
            !head.is_paged() || (is_crowded && head.slots / head.most_blocks.max(1) > self.mean(0))
        })
    }

    /// Slots for each of the blocks of a new segment: half as many as a block has now, or this one needs.
    pub(super) fn mean(&self, bytes: u64) -> u32 {
        let used: u64 = self.segments.values().map(|entry| u64::from(entry.used)).sum();
        let mean = used.checked_div(self.blocks).unwrap_or(bytes.div_ceil(BLOCK_LEN));
        u32::try_from(mean / 2).unwrap_or(u32::MAX)
    }

    /// Whether no segment is long enough for a block of so many bytes, however empty.
    pub(super) fn are_too_short(&self, bytes: u64) -> bool {
        !self
            .segments
            .values()
            .any(|entry| entry.takes_blocks() && entry.segment.head.extent(0, bytes).is_some())
    }

    /// Whether there is room for a block of so many bytes.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.choose(bytes, 0).is_some()
    }

    /// Whether there is room for so many bytes in one piece.
    pub(super) fn has_run(&self, bytes: u64) -> bool {
        self.runs.last().is_some_and(|(len, ..)| u64::from(*len) * BLOCK_LEN >= bytes)
    }

    /// A place for a block of so many bytes that as many follow: behind the one before it, if possible.
    pub(super) fn take(&mut self, bytes: u64, following: u64) -> Option<(Arc<Segment>, Slot)> {
        let (segment, slot) = self.choose(bytes, following)?;
        let needed = self.segments.get(&segment)?.segment.head.slots_of(bytes);
        let taken = self.take_at(segment, slot, needed)?;
        self.next = Some(Slot { segment, slot: slot + needed });
        Some(taken)
    }

    /// Takes the first slots of a free run.
    fn take_at(&mut self, segment: u32, slot: u32, needed: u32) -> Option<(Arc<Segment>, Slot)> {
        let entry = self.segments.get_mut(&segment)?;
        let len = entry.free.remove(&slot)?;
        self.runs.remove(&(len, segment, slot));
        if len > needed {
            entry.free.insert(slot + needed, len - needed);
            self.runs.insert((len - needed, segment, slot + needed));
        }
        self.free -= u64::from(needed);
        entry.used += needed;
        entry.claimed += needed;
        entry.blocks += 1;
        self.blocks += 1;
        Some((Arc::clone(&entry.segment), Slot { segment, slot }))
    }

    /// Where a block goes: where there is room for all that follow, in the shortest run that has it, else behind the one
    /// before it, else where most of them have room.
    fn choose(&self, bytes: u64, following: u64) -> Option<(u32, u32)> {
        if self.blocks >= self.most_blocks {
            return None;
        }
        // Only segments of pages have runs.
        let longest = self.runs.last()?;
        let head = self.segments.get(&longest.1)?.segment.head;
        let (needed, wished) = (head.slots_of(bytes), head.slots_of(bytes.saturating_add(following)));
        let next = self.next.and_then(|next| {
            let entry = self.segments.get(&next.segment).filter(|entry| entry.takes_blocks())?;
            entry.free.get(&next.slot).map(|len| (*len, next.segment, next.slot))
        });
        let next_for = |len| next.as_ref().filter(|(free, ..)| *free >= len);
        let run_for = |len| self.runs.range((len, 0, 0)..).next();
        let found = next_for(wished).or_else(|| run_for(wished)).or_else(|| next_for(needed));
        let found =
            found.or_else(|| if following > 0 { Some(longest) } else { None }.or_else(|| run_for(needed)));
        let (_, segment, slot) = found.filter(|(len, ..)| *len >= needed)?;
        Some((*segment, *slot))
    }

    /// The claim of a place has ended.
    pub(super) fn end_claim(&mut self, slot: Slot, bytes: u64, end: ClaimEnd) {
        let Some(entry) = self.segments.get_mut(&slot.segment) else { return };
        let len = entry.segment.head.slots_of(bytes);
        entry.claimed = entry.claimed.saturating_sub(len);
        let run = slot.slot..slot.slot + len;
        match end {
            ClaimEnd::Unused => self.give_back(slot, len),
            ClaimEnd::Failed if entry.forgive(&run) => entry.lost += len,
            ClaimEnd::Failed => {
                entry.suspects.push(run);
                self.give_back(slot, len);
            }
            ClaimEnd::Used => drop(entry.forgive(&run)),
            ClaimEnd::Lost => entry.lost += len,
        }
    }

    /// A run may be used again.
    fn give_back(&mut self, slot: Slot, mut len: u32) {
        let Some(entry) = self.segments.get_mut(&slot.segment) else { return };
        let (number, mut start) = (slot.segment, slot.slot);
        let takes_blocks = entry.takes_blocks();
        entry.used = entry.used.saturating_sub(len);
        entry.blocks = entry.blocks.saturating_sub(1);
        self.blocks = self.blocks.saturating_sub(1);
        if takes_blocks {
            self.free += u64::from(len);
        }
        let before = entry.free.range(..start).next_back().map(|(start, len)| (*start, *len));
        if let Some((first, length)) = before.filter(|(first, length)| first + length >= start) {
            debug_assert_eq!(first + length, start, "{slot:?} is given back twice");
            entry.free.remove(&first);
            self.runs.remove(&(length, number, first));
            (start, len) = (first, length + len);
        }
        if let Some(length) = entry.free.remove(&(start + len)) {
            self.runs.remove(&(length, number, start + len));
            len += length;
        }
        entry.free.insert(start, len);
        if takes_blocks {
            self.runs.insert((len, number, start));
        }
    }

    /// The block of so many bytes at a place is gone.
    pub(super) fn retire(&mut self, slot: Slot, bytes: u64, mut waiting: Waiting) {
        let Some(entry) = self.segments.get(&slot.segment) else { return };
        let len = entry.segment.head.slots_of(bytes);
        if waiting.for_readers && self.unread.remove(&slot) {
            waiting.for_readers = false;
        }
        self.retired.insert(slot, (len, waiting));
        self.release(slot);
    }

    /// Notes that the last reader of a run is done. The run may be retired already, or later.
    pub(super) fn unread(&mut self, slot: Slot) {
        if !self.has(slot.segment) {
            return;
        }
        match self.retired.get_mut(&slot) {
            Some((_, waiting)) => {
                waiting.for_readers = false;
                self.release(slot);
            }
            None => drop(self.unread.insert(slot)),
        }
    }

    /// Records that the tombstone of a retired run's block is on the disk.
    pub(super) fn tombstone_written(&mut self, slot: Slot) {
        if let Some((_, waiting)) = self.retired.get_mut(&slot) {
            waiting.for_tombstone = false;
            self.release(slot);
        }
    }

    fn release(&mut self, slot: Slot) {
        if let Some((len, waiting)) = self.retired.get(&slot).copied()
            && !waiting.for_tombstone
            && !waiting.for_readers
        {
            self.retired.remove(&slot);
            self.give_back(slot, len);
        }
    }

    /// Segments that are long enough for a block of so many bytes, and their slots.
    pub(super) fn all_long_enough(&self, bytes: u64) -> (u64, u64) {
        let long = self.segments.keys().filter_map(|number| self.long_enough(*number, bytes));
        long.fold((0, 0), |(count, slots), segment| (count + 1, slots + u64::from(segment.head.slots)))
    }

    /// Slots that blocks can have.
    pub(super) fn free(&self) -> u64 {
        self.free
    }

    /// Slots of all segments that blocks may go to.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// A segment that gives out room, and is long enough for a block of so many bytes.
    pub(super) fn long_enough(&self, number: u32, bytes: u64) -> Option<&Arc<Segment>> {
        let entry = self.segments.get(&number).filter(|entry| entry.takes_blocks())?;
        entry.segment.head.extent(0, bytes).map(|_| &entry.segment)
    }

    /// The free run that a slot is in: its first slot and its length.
    pub(super) fn free_run(&self, slot: Slot) -> Option<(u32, u32)> {
        let entry = self.segments.get(&slot.segment)?;
        let (start, len) = entry.free.range(..=slot.slot).next_back()?;
        (slot.slot < start + len).then_some((*start, *len))
    }

    /// The slot behind the first ones of a range that are neither free nor in these runs, if there are any.
    pub(super) fn behind_busy(
        &self,
        segment: u32,
        slots: &Range<u32>,
        mut known: Vec<Range<u32>>,
    ) -> Option<u32> {
        let free = &self.segments.get(&segment)?.free;
        let before = free.range(..slots.start).next_back();
        let runs = before.into_iter().chain(free.range(slots.clone()));
        known.extend(runs.map(|(start, len)| *start..start + len));
        known.sort_unstable_by_key(|run| run.start);
        let mut reached = slots.start;
        for run in known {
            if run.start > reached {
                return Some(run.start.min(slots.end));
            }
            reached = reached.max(run.end);
        }
        (reached < slots.end).then_some(slots.end)
    }

    /// A place for a block that has to leave a stretch of a segment: in the shortest run outside of it that has room.
    pub(super) fn take_outside(
        &mut self,
        bytes: u64,
        stretch: (u32, &Range<u32>),
    ) -> Option<(Arc<Segment>, Slot)> {
        let longest = self.runs.last()?;
        let needed = self.segments.get(&longest.1)?.segment.head.slots_of(bytes);
        let is_outside = |(len, segment, slot): &&(u32, u32, u32)| {
            *segment != stretch.0 || *slot >= stretch.1.end || slot + len <= stretch.1.start
        };
        let (_, segment, slot) =
            self.runs.range((needed, 0, 0)..).take(MOST_RUNS).find(is_outside).copied()?;
        self.take_at(segment, slot, needed)
    }

    /// Gives out no more room of a segment.
    pub(super) fn drain(&mut self, number: u32) {
        let Some(entry) = self.segments.get_mut(&number).filter(|entry| !entry.is_draining) else { return };
        if entry.takes_blocks() {
            for (start, len) in &entry.free {
                self.runs.remove(&(*len, number, *start));
                self.free -= u64::from(*len);
            }
            self.total -= u64::from(entry.segment.head.slots);
        }
        entry.is_draining = true;
    }

    /// Gives out room of a draining segment again.
    pub(super) fn keep(&mut self, number: u32) {
        let Some(entry) = self.segments.get_mut(&number).filter(|entry| entry.is_draining) else { return };
        entry.is_draining = false;
        if entry.takes_blocks() {
            for (start, len) in &entry.free {
                self.runs.insert((*len, number, *start));
                self.free += u64::from(*len);
            }
            self.total += u64::from(entry.segment.head.slots);
        }
    }

    /// Draining segments that have blocks still, as far as is known without asking the index.
    pub(super) fn draining_with_blocks(&self) -> HashSet<u32> {
        let draining = self.segments.iter().filter(|(_, entry)| entry.is_draining);
        let with_blocks = draining.filter(|(number, entry)| {
            let gone = self.retired_of(**number, |_| true) + entry.claimed + entry.lost;
            entry.used > gone
        });
        with_blocks.map(|(number, _)| *number).collect()
    }

    /// Segments that give out no more room.
    pub(super) fn draining(&self) -> Vec<u32> {
        let draining = self.segments.iter().filter(|(_, segment)| segment.is_draining);
        draining.map(|(number, _)| *number).collect()
    }

    /// Whether a segment that gives out no more room waits for no write.
    pub(super) fn is_about_to_drain(&self) -> bool {
        self.segments.values().any(|entry| entry.is_draining && entry.claimed == 0)
    }

    /// Segments of which too much is lost to be kept.
    pub(super) fn worn(&self) -> Vec<u32> {
        let is_worn =
            |entry: &OwnSegment| !entry.is_draining && entry.lost > entry.segment.head.slots / WORN_PART;
        let worn = self.segments.iter().filter(|(_, entry)| is_worn(entry));
        worn.map(|(number, _)| *number).collect()
    }

    /// Segments without blocks.
    pub(super) fn unused(&self) -> Vec<u32> {
        let unused = self.segments.iter().filter(|(_, entry)| entry.used == 0 && !entry.is_draining);
        unused.map(|(number, _)| *number).collect()
    }

    /// Whether a draining segment has no readers and no writers. Lost runs, and runs that only wait for tombstones, may
    /// remain.
    pub(super) fn is_drained(&self, number: u32) -> bool {
        let is_unread = |waiting: &Waiting| !waiting.for_readers;
        let entry = self.segments.get(&number);
        entry.is_some_and(|entry| {
            entry.is_draining && entry.used == self.retired_of(number, is_unread) + entry.lost
        })
    }

    /// Slots of a segment that have no block any more, but cannot be used yet.
    fn retired_of(&self, number: u32, is_it: impl Fn(&Waiting) -> bool) -> u32 {
        let retired =
            self.retired.iter().filter(|(slot, (_, waiting))| slot.segment == number && is_it(waiting));
        retired.map(|(_, (len, _))| *len).sum()
    }

    /// Forgets a segment.
    pub(super) fn remove(&mut self, number: u32) {
        self.drain(number);
        if let Some(entry) = self.segments.remove(&number) {
            self.blocks -= u64::from(entry.blocks);
            self.most_blocks -= u64::from(entry.segment.head.most_blocks);
        }
        self.retired.retain(|slot, _| slot.segment != number);
        self.unread.retain(|slot| slot.segment != number);
    }

    /// Slots that have blocks, or are being written to. For tests.
    #[cfg(test)]
    pub(super) fn used(&self) -> u64 {
        let used: u32 = self
            .segments
            .iter()
            .map(|(number, entry)| entry.used - entry.lost - self.retired_of(*number, |_| true))
            .sum();
        used.into()
    }
}

impl OwnSegment {
    fn takes_blocks(&self) -> bool {
        !self.is_draining && self.segment.head.is_paged()
    }

    /// Forgets failures of writes to a run, and to no slot beside it. Returns whether there were any.
    fn forgive(&mut self, run: &Range<u32>) -> bool {
        let mut has_failed = false;
        for suspect in std::mem::take(&mut self.suspects) {
            has_failed |= suspect.start < run.end && run.start < suspect.end;
            let before = suspect.start..suspect.end.min(run.start);
            let behind = suspect.start.max(run.end)..suspect.end;
            self.suspects.extend([before, behind].into_iter().filter(|rest| !rest.is_empty()));
        }
        has_failed
    }
}

impl UsedSlots {
    /// None of so many slots.
    pub(super) fn none(slots: u32) -> Self {
        Self(vec![0; (slots as usize).div_ceil(64)])
    }

    /// Takes a run if none of it is taken; whether it was not.
    pub(super) fn take(&mut self, slot: u32, len: u32) -> bool {
        let words = || {
            let (start, end) = (slot as usize, slot as usize + len as usize);
            (start / 64..end.div_ceil(64)).map(move |word| {
                let first = start.saturating_sub(word * 64);
                let behind = (end - word * 64).min(64);
                (word, (u64::MAX << first) & (u64::MAX >> (64 - behind)))
            })
        };
        let is_free = words().all(|(word, mask)| self.0.get(word).is_some_and(|bits| bits & mask == 0));
        if is_free {
            words().for_each(|(word, mask)| self.0[word] |= mask);
        }
        is_free
    }

    /// Runs of slots that are not taken, of those before `end`: first slot and length.
    fn gaps(&self, end: u32) -> BTreeMap<u32, u32> {
        let mut gaps = BTreeMap::new();
        let mut slot = 0;
        while slot < end {
            let is_taken = |slot: u32| self.0[slot as usize / 64] >> (slot % 64) & 1 == 1;
            let is_first_taken = is_taken(slot);
            let mut behind = slot;
            while behind < end && is_taken(behind) == is_first_taken {
                let word = self.0[behind as usize / 64];
                let rest = if is_first_taken { !word } else { word } >> (behind % 64);
                behind += rest.trailing_zeros().min(64 - behind % 64);
            }
            if !is_first_taken {
                gaps.insert(slot, behind.min(end) - slot);
            }
            slot = behind;
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_map_of_slots_says_what_was_taken(runs in proptest::collection::vec((0..300_u32, 1..150_u32), 0..12)) {
            let mut taken = UsedSlots::none(450);
            let mut plain = [false; 450];
            for (slot, len) in runs {
                let run = &mut plain[slot as usize..(slot + len) as usize];
                let is_free = run.iter().all(|slot| !slot);
                if is_free {
                    run.fill(true);
                }
                prop_assert_eq!(taken.take(slot, len), is_free);
            }
            let mut free = [true; 450];
            for (start, len) in taken.gaps(450) {
                prop_assert!(start == 0 || plain[start as usize - 1]);
                free[start as usize..(start + len) as usize].fill(false);
            }
            prop_assert_eq!(free, plain);
        }
    }
}
