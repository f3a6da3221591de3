//! Room by place, where sizes are mixed: a stretch of a segment is emptied as a whole, so that what is free is in one piece.
//! Blocks that the policy would keep are carried over to pieces that are too short for others.
//!
//! A hand goes through the segments that are worth least. Which blocks lie there is looked up once for several segments, by
//! the housekeeping where there are many blocks.
#![forbid(unsafe_code)]

use super::{
    checkpoint::record_of,
    failed, lock,
    room::is_full,
    segment::Segment,
    slots::{ClaimEnd, Waiting},
    writer::{WITHOUT_SUMS, Writer},
};
use crate::{
    Error, Result,
    disk::{read_full, write_full},
    format::{BLOCK_LEN, HEADER_LEN, header::BlockHeader, record::Change},
    index::{Entry, Heat, PlacedBlock, Reuse, Slot},
};
use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    io, mem,
    ops::Range,
    sync::{Arc, PoisonError, atomic::Ordering},
};

/// Blocks of segments that are kept once they were looked up.
const MOST_BLOCKS: usize = 1 << 18;
/// Part of the segments whose blocks are looked up at a time.
const SEGMENTS_PART: usize = 16;
/// Stretches that are tried for a block.
const MOST_STRETCHES: usize = 16;
/// Bytes that are copied at a time.
const CHUNK: usize = 1 << 20;

/// Blocks that were looked up, by segment.
#[derive(Debug, Default)]
pub(super) struct Sweep {
    /// Those that the hand goes through next.
    regions: VecDeque<Region>,
    /// Those that could be removed, the coldest first.
    removable: VecDeque<Region>,
    /// Whether a store lacked room that the sweep could clear.
    wants_regions: bool,
    /// Bytes of the smallest block that got no room although others were evicted for it, until a stretch for it is found.
    in_vain: Option<u64>,
    /// Segments that have been looked through for it in vain, one after the other and again from the coldest.
    looked_through: usize,
    /// Whether a store lacked segments that could be removed.
    wants_removable: bool,
}

/// A segment, and where the hand is in it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) segment: u32,
    hand: u32,
    /// Its blocks when they were looked up, by their places. Those that have gone since are told by the index.
    pub(super) blocks: Vec<PlacedBlock>,
}

/// Part of a segment that is to be emptied, and the blocks in it.
struct Stretch {
    segment: u32,
    slots: Range<u32>,
    blocks: Vec<PlacedBlock>,
}

/// What becomes of slots of a stretch that have neither room nor a block that could go now: they are being written to or read,
/// or wait for a tombstone or a reader, or got a block since the blocks were looked up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Busy {
    /// They may be part of a stretch.
    Counts,
    /// A stretch ends before them. To empty it would not make room.
    IsPassed,
}

/// A block that was copied to another place.
struct Moved {
    block: PlacedBlock,
    entry: Entry,
    segment: Arc<Segment>,
    /// Syncs of the segment that had failed before anything was copied to it.
    failures: u64,
}

/// Why a block could not be copied, and what becomes of the place that it was to get.
type Uncopied = Box<(Error, ClaimEnd)>;

/// The slot behind a block.
fn behind(block: &PlacedBlock) -> u32 {
    let slots = u32::try_from(block.slot_bytes.div_ceil(BLOCK_LEN)).unwrap_or(u32::MAX);
    block.slot.slot.saturating_add(slots)
}

impl Writer {
    /// Empties stretches of segments until there is room for a block of `bytes` bytes. Returns whether there is.
    pub(super) fn clear_place(&self, bytes: u64) -> Result<bool> {
        let mut sweep = lock(&self.sweep);
        for _ in 0..MOST_STRETCHES {
            let Some(stretch) = self.next_stretch(&mut sweep, bytes) else { break };
            self.empty(&stretch)?;
            if lock(&self.slots).has_room(bytes) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// As [`Writer::clear_place`] in this segment alone.
    pub(super) fn clear_place_in(&self, mut region: Region, bytes: u64) -> Result<bool> {
        // Bounded: what is free may be of no use to the block, and the hand would find it again and again.
        for _ in 0..MOST_STRETCHES {
            let Some(stretch) = self.stretch(&mut region, bytes, Busy::IsPassed) else { break };
            self.empty(&stretch)?;
            if lock(&self.slots).has_room(bytes) {
                // The hand goes on from there.
                self.keep_regions([region].into());
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a stretch could be emptied for a block of `bytes` bytes: pinned blocks may leave none. Not known where there
    /// are many blocks.
    pub(super) fn may_clear(&self, bytes: u64) -> bool {
        let index = &self.shared.index;
        let pinned = index.pinned();
        if pinned.blocks == 0 || !self.has_few_blocks() {
            return true;
        }
        // What is pinned leaves so many gaps at most: one of them is as long as all are on average.
        let (segments, slots) = lock(&self.slots).all_long_enough(bytes);
        let unpinned = (slots * BLOCK_LEN).saturating_sub(pinned.slot_bytes);
        if unpinned / (segments + pinned.blocks) >= bytes {
            return true;
        }
        let segments: Vec<u32> = lock(&self.slots).all().map(|segment| segment.head.number).collect();
        self.regions(&segments).iter_mut().any(|region| self.stretch(region, bytes, Busy::Counts).is_some())
    }

    /// Whether all blocks may be looked at while a store waits.
    pub(super) fn has_few_blocks(&self) -> bool {
        self.shared.index.totals(None).own_blocks <= self.shared.surroundings.few_blocks
    }

    /// Whether the room of single blocks may do for a block of `bytes` bytes until stretches have been looked up.
    pub(super) fn may_do_without_stretch(&self, bytes: u64) -> bool {
        lock(&self.sweep).in_vain.is_none_or(|in_vain| bytes < in_vain)
    }

    /// The room of single blocks did not do for a block of `bytes` bytes.
    pub(super) fn note_in_vain(&self, bytes: u64) {
        let mut sweep = lock(&self.sweep);
        sweep.in_vain = Some(sweep.in_vain.map_or(bytes, |in_vain| in_vain.min(bytes)));
    }

    /// Looks up what goes next, if a store has lacked it.
    pub(super) fn prepare_sweep(&self) {
        let (wants_regions, wants_removable) = {
            let sweep = lock(&self.sweep);
            (sweep.wants_regions, sweep.wants_removable)
        };
        // What is wanted is wanted until it is there.
        if wants_regions {
            self.look_for_stretches();
        }
        if wants_removable {
            let removable = self.removable_regions();
            let mut sweep = lock(&self.sweep);
            (sweep.removable, sweep.wants_removable) = (removable, false);
        }
    }

    /// Looks up the next segments that the hand goes through: the coldest, or those behind what was looked through in vain.
    fn look_for_stretches(&self) {
        let before = lock(&self.sweep).looked_through;
        let (mut regions, all) = self.coldest_regions(SEGMENTS_PART, before);
        let mut sweep = lock(&self.sweep);
        let has_stretch = sweep.in_vain.is_none_or(|bytes| {
            regions.iter_mut().any(|region| {
                let stretch = self.stretch(region, bytes, Busy::IsPassed);
                region.hand = 0;
                stretch.is_some()
            })
        });
        if has_stretch {
            (sweep.in_vain, sweep.looked_through) = (None, 0);
        } else {
            sweep.looked_through = before + regions.len();
        }
        (sweep.regions, sweep.wants_regions) = (regions, false);
        // Those who wait ask again, before they are told that there is nothing to wait for.
        self.note_room();
        let has_more = !has_stretch && sweep.looked_through < all;
        self.has_stretches_to_come.store(has_more, Ordering::Release);
    }

    /// Takes the segments that could be removed when that was last looked up.
    pub(super) fn removable_regions_before(&self) -> VecDeque<Region> {
        let mut sweep = lock(&self.sweep);
        // What has come since it was looked up would be in the way.
        sweep.wants_removable = true;
        mem::take(&mut sweep.removable)
    }

    /// Keeps regions that are of use yet, before those that were looked up, where looking them up takes time.
    pub(super) fn keep_regions(&self, mut regions: VecDeque<Region>) {
        if self.has_few_blocks() {
            return;
        }
        let mut sweep = lock(&self.sweep);
        regions.append(&mut sweep.removable);
        sweep.removable = regions;
    }

    fn next_stretch(&self, sweep: &mut Sweep, bytes: u64) -> Option<Stretch> {
        let mut looks = 0;
        loop {
            if sweep.regions.is_empty() {
                if !self.has_few_blocks() {
                    sweep.wants_regions = true;
                    if sweep.in_vain.is_none() {
                        self.has_stretches_to_come.store(true, Ordering::Release);
                    }
                    return None;
                }
                // Where all that is coldest is in use, others may have stretches.
                let part = [SEGMENTS_PART, 1].get(looks)?;
                (sweep.regions, _) = self.coldest_regions(*part, 0);
                looks += 1;
            }
            let region = sweep.regions.front_mut()?;
            if let Some(stretch) = self.stretch(region, bytes, Busy::IsPassed) {
                return Some(stretch);
            }
            sweep.regions.pop_front();
        }
    }

    /// The segments that are worth least behind the first so many: one of `part`. Returns how many there are in all, too.
    fn coldest_regions(&self, part: usize, behind: usize) -> (VecDeque<Region>, usize) {
        let survey = self.shared.index.survey();
        let all = survey.len();
        let most = all.div_ceil(part).max(1);
        let order: Vec<u32> =
            survey.into_iter().map(|worth| worth.segment).skip(behind % all.max(1)).take(most).collect();
        (self.regions(&order), all)
    }

    /// Segments with their blocks: as many of the first as have few blocks together, but at least one.
    pub(super) fn regions(&self, segments: &[u32]) -> VecDeque<Region> {
        let chosen: HashSet<u32> = segments.iter().copied().collect();
        let mut blocks = BTreeMap::<u32, Vec<PlacedBlock>>::new();
        for block in self.shared.index.placed(|segment| chosen.contains(&segment)) {
            blocks.entry(block.slot.segment).or_default().push(block);
        }
        let mut count = 0;
        let is_few = |region: &Region| {
            let is_first = count == 0;
            count += region.blocks.len();
            is_first || count <= MOST_BLOCKS
        };
        let region = |segment: &u32| Region {
            segment: *segment,
            hand: 0,
            blocks: blocks.remove(segment).unwrap_or_default(),
        };
        segments.iter().map(region).take_while(is_few).collect()
    }

    /// The next stretch of a segment that holds a block of `bytes` bytes, and in which no block is in use.
    fn stretch(&self, region: &mut Region, bytes: u64, busy: Busy) -> Option<Stretch> {
        let Region { segment, hand, blocks } = region;
        let segment = *segment;
        let least = bytes.max(self.bytes_of_stretch());
        let (mut needed, least, last) = {
            let slots = lock(&self.slots);
            let head = slots.long_enough(segment, bytes)?.head;
            let needed = head.slots_of(least.min(u64::from(head.slots) * BLOCK_LEN));
            // What is free before the hand is of use, too.
            if let Some((start, _)) = slots.free_run(Slot { segment, slot: *hand }) {
                *hand = start;
            }
            (needed, head.slots_of(bytes), head.slots)
        };
        'stretch: loop {
            let slots = *hand..hand.checked_add(needed).filter(|end| *end <= last)?;
            let lies_there =
                |block: &&PlacedBlock| block.slot.slot < slots.end && slots.start < behind(block);
            let found: Vec<PlacedBlock> = blocks.iter().filter(lies_there).copied().collect();
            let heats = self.shared.index.heat(&found);
            for (block, heat) in found.iter().zip(&heats) {
                let is_in_use = match heat {
                    Some(Heat::Pinned) => true,
                    Some(Heat::Read) => busy == Busy::IsPassed,
                    _ => false,
                };
                if is_in_use {
                    needed = least;
                    *hand = behind(block);
                    continue 'stretch;
                }
            }
            if busy == Busy::IsPassed {
                let there = found.iter().zip(&heats).filter(|(_, heat)| heat.is_some());
                let runs = there.map(|(block, _)| block.slot.slot..behind(block)).collect();
                if let Some(end) = lock(&self.slots).behind_busy(segment, &slots, runs) {
                    needed = least;
                    *hand = end;
                    continue 'stretch;
                }
            }
            *hand = slots.end;
            return Some(Stretch { segment, slots, blocks: found });
        }
    }

    /// Bytes of a stretch, so that tombstones of several blocks share a sync.
    fn bytes_of_stretch(&self) -> u64 {
        self.bytes_at_a_time() / 2
    }

    /// Has the blocks of a stretch go, the hot ones to other places.
    fn empty(&self, stretch: &Stretch) -> Result<()> {
        let heats = self.shared.index.heat(&stretch.blocks);
        let hot = stretch.blocks.iter().zip(heats).filter(|(_, heat)| *heat == Some(Heat::Hot));
        let hot: Vec<PlacedBlock> = hot.map(|(block, _)| *block).collect();
        // Where the log takes no records, no block goes in vain.
        self.carry_over(&hot, stretch)?;
        self.tombstone(|| {
            let gone = self.shared.index.evict_placed(&stretch.blocks);
            self.shared.observed.evicted(&gone);
            gone
        })
        .map(drop)
    }

    /// Copies blocks to pieces of room outside of a stretch, as far as there are any.
    fn carry_over(&self, blocks: &[PlacedBlock], stretch: &Stretch) -> Result<()> {
        let mut moved = Vec::new();
        for block in blocks {
            let Some((entry, hold)) = self.shared.index.hold(block) else { continue };
            // Nothing would tell whether its copy is whole; or the copy would count as synced, which the block is not.
            if entry.class == WITHOUT_SUMS || !self.shared.is_proven(&entry) {
                continue;
            }
            // Before it is asked who stores the block again: a store that began before has a lower sequence, and would lose to
            // the copy.
            let sequence = self.next_sequence.fetch_add(1, Ordering::Relaxed);
            if lock(&self.pending).blocks.contains(&block.fingerprint) {
                continue;
            }
            let taken = lock(&self.slots).take_outside(entry.slot_bytes, (stretch.segment, &stretch.slots));
            let Some((segment, slot)) = taken else { continue };
            let failures = segment.failures();
            let copy = Entry { slot, sequence, ..entry };
            if let Err(uncopied) = self.copy(block, &copy, &segment) {
                let (error, end) = *uncopied;
                lock(&self.slots).end_claim(slot, copy.slot_bytes, end);
                tracing::debug!(%error, "a block is not carried over");
                continue;
            }
            drop(hold);
            moved.push(Moved { block: *block, entry: copy, segment, failures });
        }
        self.sync_moved(&mut moved);
        if moved.is_empty() {
            return Ok(());
        }
        // Alone, so that none of them is removed or replaced between its record and its new place.
        let _alone = self.publishing.write().unwrap_or_else(PoisonError::into_inner);
        let index = &self.shared.index;
        let (there, gone): (Vec<Moved>, Vec<Moved>) = moved.into_iter().partition(|moved| {
            matches!(index.heat(&[moved.block]).first(), Some(Some(Heat::Hot | Heat::Cold)))
        });
        for moved in gone {
            lock(&self.slots).end_claim(moved.entry.slot, moved.entry.slot_bytes, ClaimEnd::Unused);
        }
        let commits: Vec<Change> = there
            .iter()
            .map(|moved| Change::Commit(record_of(moved.block.fingerprint, &moved.entry)))
            .collect();
        let appended = self.log.append(&commits, self.sync_mode());
        if appended.is_err() {
            // The records of the copies may be on the disk, and their tombstones are those of the blocks, too.
            let blocks: Vec<PlacedBlock> = there.iter().map(|moved| moved.block).collect();
            let gone = index.evict_placed(&blocks);
            self.shared.observed.evicted(&gone);
            self.shared.gone(&gone);
            gone.iter().for_each(|gone| self.tombstone_later(gone.fingerprint, &gone.entry, gone.reuse));
        }
        for Moved { block, entry, .. } in there {
            lock(&self.slots).end_claim(entry.slot, entry.slot_bytes, ClaimEnd::Used);
            let relocated = if appended.is_ok() { index.relocate(&block, &entry) } else { None };
            match relocated {
                // Its tombstone is the record of the copy.
                Some(before) => {
                    let for_readers = before.reuse == Reuse::Later;
                    let waiting = Waiting { for_tombstone: false, for_readers };
                    lock(&self.slots).retire(before.entry.slot, before.entry.slot_bytes, waiting);
                }
                // The record may be on the disk.
                None => self.tombstone_later(block.fingerprint, &entry, Reuse::Now),
            }
        }
        appended
    }

    /// Copies the bytes of a block, under the header of its new place. An error comes with what becomes of that place.
    fn copy(&self, block: &PlacedBlock, copy: &Entry, to: &Segment) -> Result<(), Uncopied> {
        let source = self.shared.segment(0, block.slot.segment);
        let offsets = source.as_ref().and_then(|source| source.head.offset(block.slot.slot));
        let (Some(source), Some(from), Some(into)) = (source, offsets, to.head.offset(copy.slot.slot)) else {
            let nowhere = Error::Internal(format!("{:?} is in no segment", block.slot));
            return Err(Box::new((nowhere, ClaimEnd::Unused)));
        };
        let reading = |error| Box::new((failed("reading", source.data.path())(error), ClaimEnd::Unused));
        let writing = |error| {
            let error = failed("writing to", to.data.path())(error);
            let end = if is_full(&error) { ClaimEnd::Unused } else { ClaimEnd::Failed };
            Box::new((error, end))
        };
        let cut_short = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let mut header = vec![0; HEADER_LEN];
        read_full(&*source.file, &mut header, from).map_err(reading)?;
        let header = BlockHeader::parse(&header)
            .ok()
            .filter(|header| header.fingerprint == block.fingerprint && header.sequence == block.sequence)
            .and_then(|header| BlockHeader { sequence: copy.sequence, ..header }.to_bytes().ok())
            .ok_or_else(|| reading(io::Error::other("the header of a block is damaged")))?;
        write_full(&*to.file, &header, into).map_err(writing)?;
        let mut chunk = vec![0; CHUNK];
        let mut done = HEADER_LEN as u64;
        while done < block.slot_bytes {
            let len = usize::try_from(block.slot_bytes - done).map_or(CHUNK, |left| left.min(CHUNK));
            let read = read_full(&*source.file, &mut chunk[..len], from + done).map_err(reading)?;
            if read < len {
                return Err(reading(cut_short()));
            }
            write_full(&*to.file, &chunk[..len], into + done).map_err(writing)?;
            done += len as u64;
        }
        Ok(())
    }

    /// Brings copies to the disk where that is promised. Those where that fails are given up.
    fn sync_moved(&self, moved: &mut Vec<Moved>) {
        if self.durability == crate::Durability::None {
            return;
        }
        let segments: BTreeMap<u32, Arc<Segment>> =
            moved.iter().map(|moved| (moved.entry.slot.segment, Arc::clone(&moved.segment))).collect();
        let failed: HashSet<u32> = segments
            .iter()
            .filter(|(_, segment)| segment.sync().is_err())
            .map(|(number, _)| *number)
            .collect();
        let is_lost = |moved: &mut Moved| {
            failed.contains(&moved.entry.slot.segment) || moved.segment.failures() != moved.failures
        };
        for lost in moved.extract_if(.., is_lost) {
            lock(&self.slots).end_claim(lost.entry.slot, lost.entry.slot_bytes, ClaimEnd::Failed);
        }
    }
}
