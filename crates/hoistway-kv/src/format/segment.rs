//! The head of a segment file: how blocks lie in it, and whose it is.
#![forbid(unsafe_code)]

use super::{BLOCK_LEN, HEADER_LEN, Invalid, PAGE, PAGED_VERSION, VERSION, sealed_as, unseal_up_to};
use std::ops::Range;
use uuid::Uuid;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

const MAGIC: [u8; 8] = *b"WLKVSEGM";
/// The head is there twice, as all blocks of a segment would be lost with it.
const COPY_LEN: usize = PAGE / 2;
/// Bytes of a file before its first slot.
pub(crate) const HEAD_LEN: u64 = PAGE as u64;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    writer: [u8; 16],
    slot_bytes: U64,
    number: U32,
    slots: U32,
    /// Not in version 1, where it is one in each slot.
    most_blocks: U32,
}

/// Bytes of the shortest block, with its header.
const LEAST_BYTES: u64 = HEADER_LEN as u64 + BLOCK_LEN;

/// The head of a segment. The slots follow it, one after the other. They are pages, of which a block takes a run,
/// or, in segments of version 1, room for one block each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHead {
    pub(crate) writer: Uuid,
    /// Never used twice by a writer.
    pub(crate) number: u32,
    /// Bytes of each slot with its header, a multiple of 4096.
    pub(crate) slot_bytes: u64,
    pub(crate) slots: u32,
    /// Most blocks that it adds to those that its writer may have.
    pub(crate) most_blocks: u32,
}

impl SegmentHead {
    /// Most slots of a segment, each of which takes a bit of memory.
    pub(crate) const MOST_SLOTS: u32 = 1 << 28;

    /// A segment of so many pages, for blocks that take at least so many on average.
    pub(crate) fn paged(writer: Uuid, number: u32, slots: u32, mean: u32) -> Self {
        let slots = slots.clamp(1, Self::MOST_SLOTS);
        let least = (LEAST_BYTES / BLOCK_LEN) as u32;
        Self { writer, number, slot_bytes: BLOCK_LEN, slots, most_blocks: (slots / mean.max(least)).max(1) }
    }

    /// Whether a block takes a run of pages, rather than one slot.
    pub(crate) fn is_paged(&self) -> bool {
        self.slot_bytes == BLOCK_LEN
    }

    /// Slots that so many bytes of a block with its header take.
    pub(crate) fn slots_of(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.max(LEAST_BYTES).div_ceil(self.slot_bytes)).unwrap_or(u32::MAX)
    }

    /// Where a block of so many bytes lies in the file; `None` if it does not fit in there.
    pub(crate) fn extent(&self, slot: u32, bytes: u64) -> Option<Range<u64>> {
        let end = slot.checked_add(self.slots_of(bytes)).filter(|end| *end <= self.slots)?;
        let is_whole = self.is_paged() || end - slot == 1;
        // More slots than can be counted are counted as fewer.
        let is_in = bytes <= u64::from(end - slot).saturating_mul(self.slot_bytes);
        let start = self.offset(slot).filter(|_| is_whole && is_in)?;
        Some(start..start.checked_add(bytes)?)
    }

    /// Bytes of the whole file; `None` if no file has so many.
    pub(crate) fn file_len(&self) -> Option<u64> {
        let len = self.slot_bytes.checked_mul(self.slots.into())?.checked_add(HEAD_LEN)?;
        i64::try_from(len).is_ok().then_some(len)
    }

    /// Where a slot begins; `None` if there is no such slot.
    pub(crate) fn offset(&self, slot: u32) -> Option<u64> {
        if slot >= self.slots {
            return None;
        }
        self.slot_bytes.checked_mul(slot.into())?.checked_add(HEAD_LEN)
    }

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let raw = Raw {
            writer: self.writer.into_bytes(),
            slot_bytes: self.slot_bytes.into(),
            number: self.number.into(),
            slots: self.slots.into(),
            most_blocks: if self.is_paged() { self.most_blocks } else { 0 }.into(),
        };
        let version = if self.is_paged() { PAGED_VERSION } else { VERSION };
        sealed_as(version, MAGIC, &raw, COPY_LEN).repeat(PAGE / COPY_LEN)
    }

    /// One good copy will do.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        let page = bytes.get(..PAGE).ok_or(Invalid::Short { len: bytes.len() })?;
        let (first, second) = page.split_at(COPY_LEN);
        Self::parse_copy(first).or_else(|why| Self::parse_copy(second).map_err(|_| why))
    }

    fn parse_copy(bytes: &[u8]) -> Result<Self, Invalid> {
        let (version, raw): (_, &Raw) = unseal_up_to(PAGED_VERSION, bytes, MAGIC, "a segment", COPY_LEN)?;
        let head = Self {
            writer: Uuid::from_bytes(raw.writer),
            number: raw.number.get(),
            slot_bytes: raw.slot_bytes.get(),
            slots: raw.slots.get(),
            most_blocks: if version == VERSION { raw.slots.get() } else { raw.most_blocks.get() },
        };
        let has_room = head.slot_bytes >= BLOCK_LEN && head.slot_bytes.is_multiple_of(BLOCK_LEN);
        if !has_room
            || head.is_paged() != (version == PAGED_VERSION)
            || head.most_blocks > head.slots
            || head.slots == 0
            || head.file_len().is_none()
        {
            return Err(Invalid::Value("its slots are out of range"));
        }
        Ok(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> SegmentHead {
        SegmentHead { writer: Uuid::from_u128(7), number: 3, slot_bytes: 12288, slots: 5, most_blocks: 5 }
    }

    #[test]
    fn a_flipped_bit_is_made_good_and_two_are_found() {
        let bytes = example().to_bytes();
        assert_eq!(SegmentHead::parse(&bytes), Ok(example()));
        for bit in 0..COPY_LEN * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHead::parse(&flipped), Ok(example()), "bit {bit}");
            flipped[COPY_LEN + bit / 8] ^= 1 << (bit % 8);
            assert!(SegmentHead::parse(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_block_takes_a_run_of_pages_or_one_slot() {
        let paged = SegmentHead::paged(Uuid::nil(), 1, 16, 1);
        assert_eq!(SegmentHead::parse(&paged.to_bytes()), Ok(paged));
        assert_eq!((paged.slots, paged.most_blocks, paged.slots_of(1), paged.slots_of(12289)), (16, 8, 2, 4));
        assert_eq!(paged.extent(1, 8192), Some(8192..16384));
        assert_eq!(paged.extent(13, 12288), Some(57344..69632));
        assert_eq!(paged.extent(14, 12288), None);
        assert_eq!(paged.extent(u32::MAX, 8192), None);
        assert_eq!(example().extent(4, 12288), Some(53248..65536));
        assert_eq!(example().extent(3, 12289), None);
        assert_eq!(SegmentHead::paged(Uuid::nil(), 1, 16, 17).most_blocks, 1);
        // As long as a segment may say that it is, and longer.
        let longest = SegmentHead { slots: u32::MAX, most_blocks: 1, ..paged };
        let bytes = u64::from(u32::MAX) * BLOCK_LEN;
        assert_eq!(longest.extent(0, bytes), Some(4096..4096 + bytes));
        assert_eq!(longest.extent(0, bytes + 1), None);
        assert_eq!(longest.extent(0, u64::MAX), None);
    }

    #[test]
    fn slots_lie_one_after_the_other() {
        let head = example();
        assert_eq!(head.offset(0), Some(4096));
        assert_eq!(head.offset(4), Some(4096 + 4 * 12288));
        assert_eq!(head.offset(5), None);
        assert_eq!(head.file_len(), Some(4096 + 5 * 12288));
    }

    proptest! {
        #[test]
        fn whatever_is_taken_makes_sense(number: u32, slot_bytes: u64, slots: u32) {
            let head = SegmentHead { writer: Uuid::nil(), number, slot_bytes, slots, most_blocks: slots };
            if let Ok(parsed) = SegmentHead::parse(&head.to_bytes()) {
                prop_assert_eq!(parsed, head);
                let end = head.offset(slots - 1).unwrap().checked_add(slot_bytes);
                prop_assert_eq!(end, head.file_len());
            }
        }
    }
}
