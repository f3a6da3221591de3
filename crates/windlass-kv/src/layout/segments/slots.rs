//! Slots of our own segments: which are free, and which will be.
//!
//! A segment has slots of one size. Sizes are rounded up a little, so that few are in use; segments of one size are a
//! class.
#![forbid(unsafe_code)]

use super::segment::Segment;
use crate::{
    format::{BLOCK_LEN, HEADER_LEN, record::Sums},
    index::Slot,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

/// Sizes between a power of two and the next: a slot is at most a sixteenth too large.
const STEPS: u64 = 16;

/// Bytes of the slot for so many bytes of payload, which is a multiple of 4096; `None` if there is none so large.
pub(super) fn slot_bytes(payload: u64) -> Option<u64> {
    let power = if payload == 0 { BLOCK_LEN } else { 1 << (63 - payload.leading_zeros()) };
    let step = (power / STEPS).max(BLOCK_LEN);
    payload.max(BLOCK_LEN).checked_next_multiple_of(step)?.checked_add(HEADER_LEN as u64)
}

/// All slots.
#[derive(Debug, Default)]
pub(super) struct Slots {
    classes: Vec<Class>,
    segments: BTreeMap<u32, OwnSegment>,
    /// Slots of blocks that are gone, which cannot be used yet.
    retired: HashMap<Slot, Waiting>,
    /// Slots whose readers were done before anybody said that they are retired.
    unread: HashSet<Slot>,
}

#[derive(Debug)]
struct Class {
    slot_bytes: u64,
    with_free: BTreeSet<u32>,
    /// Slots of all its segments.
    slots: u64,
    free: u64,
    /// Bytes that were evicted since a segment last changed hands.
    churn: u64,
}

#[derive(Debug)]
struct OwnSegment {
    segment: Arc<Segment>,
    class: u8,
    free: Vec<u32>,
    /// Slots that somebody writes to.
    claimed: u32,
    /// Slots that the system may still write to, whenever. Removing the file does no harm: it lives until then.
    lost: u32,
    /// Slots that have blocks without checksums, a bit each.
    without_sums: Vec<u64>,
    is_draining: bool,
}

/// What has to happen before a slot is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    /// That the block is gone has to be on the disk.
    pub(super) for_tombstone: bool,
    /// Somebody reads it.
    pub(super) for_readers: bool,
}

/// What becomes of the slot of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimEnd {
    /// It may be used again.
    Unused,
    /// It has a block, or waits for a tombstone.
    Used,
    /// The system may still write to it.
    Lost,
}

impl Slots {
    /// The class of slots of this size, or of the next larger size if there can be no more classes.
    pub(super) fn class(&mut self, slot_bytes: u64) -> Option<u8> {
        let same = self.classes.iter().position(|class| class.slot_bytes == slot_bytes);
        let found = same.or_else(|| {
            if self.classes.len() <= usize::from(u8::MAX) {
                let with_free = BTreeSet::new();
                self.classes.push(Class { slot_bytes, with_free, slots: 0, free: 0, churn: 0 });
                return Some(self.classes.len() - 1);
            }
            let larger = self.classes.iter().enumerate().filter(|(_, class)| class.slot_bytes > slot_bytes);
            larger.min_by_key(|(_, class)| class.slot_bytes).map(|(number, _)| number)
        });
        found.and_then(|number| u8::try_from(number).ok())
    }

    pub(super) fn slot_bytes(&self, class: u8) -> u64 {
        self.classes[usize::from(class)].slot_bytes
    }

    /// Takes in a segment; those of its slots that `is_taken` are not free.
    pub(super) fn add(&mut self, segment: Arc<Segment>, class: u8, is_taken: impl Fn(u32) -> bool) {
        let head = segment.head;
        // Backwards, as slots are taken from the end.
        let free: Vec<u32> = (0..head.slots).rev().filter(|slot| !is_taken(*slot)).collect();
        let own = &mut self.classes[usize::from(class)];
        own.slots += u64::from(head.slots);
        own.free += free.len() as u64;
        if !free.is_empty() {
            own.with_free.insert(head.number);
        }
        let without_sums = vec![0; (head.slots as usize).div_ceil(64)];
        let segment =
            OwnSegment { segment, class, free, claimed: 0, lost: 0, without_sums, is_draining: false };
        self.segments.insert(head.number, segment);
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.segments.values().map(|own| &own.segment)
    }

    pub(super) fn class_of(&self, segment: u32) -> Option<u8> {
        self.segments.get(&segment).map(|own| own.class)
    }

    /// Whether a segment could be given up at once, unless for its own class.
    pub(super) fn may_give(&self, number: u32, but: Option<u8>) -> bool {
        let segment = self.segments.get(&number);
        segment.is_some_and(|own| Some(own.class) != but && !own.is_draining && own.claimed == 0)
    }

    /// The class that blocks of a class go to: their own if it has segments, else that of the next larger slots, at most
    /// twice as large.
    pub(super) fn stand_in(&self, class: u8) -> u8 {
        let own = &self.classes[usize::from(class)];
        if own.slots > 0 {
            return class;
        }
        let sizes = own.slot_bytes..=own.slot_bytes.saturating_mul(2);
        let larger = self.classes().filter(|number| {
            let other = &self.classes[usize::from(*number)];
            other.slots > 0 && sizes.contains(&other.slot_bytes)
        });
        larger.min_by_key(|number| self.slot_bytes(*number)).unwrap_or(class)
    }

    /// A free slot of a class, for a claim.
    pub(super) fn take(&mut self, class: u8) -> Option<(Arc<Segment>, Slot)> {
        let own = &mut self.classes[usize::from(class)];
        let number = *own.with_free.first()?;
        let segment = self.segments.get_mut(&number)?;
        let slot = segment.free.pop()?;
        own.free -= 1;
        segment.claimed += 1;
        if segment.free.is_empty() {
            own.with_free.remove(&number);
        }
        Some((Arc::clone(&segment.segment), Slot { segment: number, slot }))
    }

    /// The claim of a slot has ended.
    pub(super) fn end_claim(&mut self, slot: Slot, end: ClaimEnd) {
        let Some(segment) = self.segments.get_mut(&slot.segment) else { return };
        segment.claimed = segment.claimed.saturating_sub(1);
        match end {
            ClaimEnd::Unused => self.give_back(slot),
            ClaimEnd::Used => {}
            ClaimEnd::Lost => segment.lost += 1,
        }
    }

    /// A slot may be used again.
    fn give_back(&mut self, slot: Slot) {
        let Some(segment) = self.segments.get_mut(&slot.segment) else { return };
        debug_assert!(!segment.free.contains(&slot.slot), "{slot:?} is given back twice");
        segment.free.push(slot.slot);
        if let Some(word) = segment.without_sums.get_mut(slot.slot as usize / 64) {
            *word &= !(1 << (slot.slot % 64));
        }
        if !segment.is_draining {
            let class = &mut self.classes[usize::from(segment.class)];
            class.free += 1;
            class.with_free.insert(slot.segment);
        }
    }

    /// The block of a slot is gone.
    pub(super) fn retire(&mut self, slot: Slot, mut waiting: Waiting) {
        if waiting.for_readers && self.unread.remove(&slot) {
            waiting.for_readers = false;
        }
        if waiting.for_tombstone || waiting.for_readers {
            self.retired.insert(slot, waiting);
        } else {
            self.give_back(slot);
        }
    }

    /// Nobody reads a retired slot any more.
    pub(super) fn unread(&mut self, slot: Slot) {
        match self.retired.get_mut(&slot) {
            Some(waiting) => {
                waiting.for_readers = false;
                self.release(slot);
            }
            None => drop(self.unread.insert(slot)),
        }
    }

    /// That the block of a retired slot is gone is on the disk.
    pub(super) fn buried(&mut self, slot: Slot) {
        if let Some(waiting) = self.retired.get_mut(&slot) {
            waiting.for_tombstone = false;
            self.release(slot);
        }
    }

    fn release(&mut self, slot: Slot) {
        if self.retired.get(&slot).is_some_and(|waiting| !waiting.for_tombstone && !waiting.for_readers) {
            self.retired.remove(&slot);
            self.give_back(slot);
        }
    }

    /// Notes that the block of a slot has shards without checksums.
    pub(super) fn note_without_sums(&mut self, slot: Slot) {
        let segment = self.segments.get_mut(&slot.segment);
        if let Some(word) = segment.and_then(|segment| segment.without_sums.get_mut(slot.slot as usize / 64))
        {
            *word |= 1 << (slot.slot % 64);
        }
    }

    /// Whether the block of a slot has checksums of all its shards.
    pub(super) fn sums(&self, slot: Slot) -> Sums {
        let words = self.segments.get(&slot.segment).map(|own| &own.without_sums);
        let word = words.and_then(|words| words.get(slot.slot as usize / 64)).unwrap_or(&0);
        if word >> (slot.slot % 64) & 1 == 0 { Sums::All } else { Sums::Some }
    }

    pub(super) fn free(&self, class: u8) -> u64 {
        self.classes[usize::from(class)].free
    }

    /// Slots of all segments of a class.
    pub(super) fn slots(&self, class: u8) -> u64 {
        self.classes[usize::from(class)].slots
    }

    pub(super) fn classes(&self) -> impl Iterator<Item = u8> + use<> {
        (0..self.classes.len()).filter_map(|number| u8::try_from(number).ok())
    }

    /// Counts what was evicted from a class. Whether that is so much by now that a segment should change hands.
    pub(super) fn churned(&mut self, class: u8, bytes: u64, enough: u64) -> bool {
        let own = &mut self.classes[usize::from(class)];
        own.churn += bytes;
        let is_enough = own.churn >= enough;
        if is_enough {
            own.churn = 0;
        }
        is_enough
    }

    /// Gives out no more slots of a segment.
    pub(super) fn drain(&mut self, number: u32) {
        let Some(segment) = self.segments.get_mut(&number) else { return };
        if segment.is_draining {
            return;
        }
        segment.is_draining = true;
        let class = &mut self.classes[usize::from(segment.class)];
        class.with_free.remove(&number);
        class.free -= segment.free.len() as u64;
        class.slots -= u64::from(segment.segment.head.slots);
    }

    /// Gives out slots of a draining segment again.
    pub(super) fn keep(&mut self, number: u32) {
        let Some(segment) = self.segments.get_mut(&number).filter(|own| own.is_draining) else { return };
        segment.is_draining = false;
        let class = &mut self.classes[usize::from(segment.class)];
        class.free += segment.free.len() as u64;
        class.slots += u64::from(segment.segment.head.slots);
        if !segment.free.is_empty() {
            class.with_free.insert(number);
        }
    }

    /// Draining segments that have blocks still, as far as is known without asking the index.
    pub(super) fn draining_with_blocks(&self) -> HashSet<u32> {
        let draining = self.segments.iter().filter(|(_, own)| own.is_draining);
        let with_blocks = draining.filter(|(number, own)| {
            let retired = self.retired.keys().filter(|slot| slot.segment == **number).count();
            let gone = own.free.len() + retired + own.claimed as usize + own.lost as usize;
            gone < own.segment.head.slots as usize
        });
        with_blocks.map(|(number, _)| *number).collect()
    }

    /// Segments that give out no more slots.
    pub(super) fn draining(&self) -> Vec<u32> {
        let draining = self.segments.iter().filter(|(_, segment)| segment.is_draining);
        draining.map(|(number, _)| *number).collect()
    }

    /// A segment without blocks, of any class but this one.
    pub(super) fn unused(&self, but: Option<u8>) -> Option<u32> {
        let mut others = self.segments.iter().filter(|(_, own)| Some(own.class) != but && !own.is_draining);
        others.find(|(_, own)| own.free.len() == own.segment.head.slots as usize).map(|(number, _)| *number)
    }

    /// Whether nobody uses a slot of a draining segment any more, but for those whose tombstones only are missing.
    pub(super) fn is_drained(&self, number: u32) -> bool {
        let Some(segment) = self.segments.get(&number) else { return false };
        let waiting = self.retired.iter().filter(|(slot, _)| slot.segment == number);
        let buried = waiting.filter(|(_, waiting)| !waiting.for_readers).count();
        let unused = segment.free.len() + buried + segment.lost as usize;
        segment.is_draining && unused == segment.segment.head.slots as usize
    }

    /// Forgets a segment.
    pub(super) fn remove(&mut self, number: u32) {
        self.drain(number);
        self.segments.remove(&number);
        self.retired.retain(|slot, _| slot.segment != number);
        self.unread.retain(|slot| slot.segment != number);
    }

    /// Slots that are free, or will be, or are lost. For tests.
    #[cfg(test)]
    pub(super) fn free_or_retired(&self) -> u64 {
        let unused = |own: &OwnSegment| own.free.len() + own.lost as usize;
        let free: usize = self.segments.values().map(unused).sum();
        (free + self.retired.len()) as u64
    }

    #[cfg(test)]
    pub(super) fn total(&self) -> u64 {
        self.segments.values().map(|segment| u64::from(segment.segment.head.slots)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slots_are_large_enough_and_not_much_larger(blocks in 0..1_u64 << 40) {
            let payload = blocks * BLOCK_LEN;
            let slot = slot_bytes(payload).unwrap();
            let room = slot - HEADER_LEN as u64;
            prop_assert!(room >= payload && room.is_multiple_of(BLOCK_LEN));
            prop_assert!(room <= payload.max(BLOCK_LEN) + payload / STEPS + BLOCK_LEN);
            // A block of the slot's size has this slot too.
            prop_assert_eq!(slot_bytes(room), Some(slot));
        }
    }

    #[test]
    fn usual_sizes_fit_exactly() {
        for payload in [4 << 10, 64 << 10, 1 << 20, 3 << 19, 5 << 20, 32 << 20] {
            assert_eq!(slot_bytes(payload), Some(payload + 4096));
        }
        assert_eq!(slot_bytes(u64::MAX - 4095), None);
    }
}
