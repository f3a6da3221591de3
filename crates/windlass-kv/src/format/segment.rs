//! The head of a segment file: the size of its slots, and whose it is.
#![forbid(unsafe_code)]

use super::{Invalid, PAGE, sealed, unseal};
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
}

/// What the head of a segment says. The slots follow it, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHead {
    pub(crate) writer: Uuid,
    /// Never used twice by a writer.
    pub(crate) number: u32,
    /// Bytes of each slot with its header, a multiple of 4096.
    pub(crate) slot_bytes: u64,
    pub(crate) slots: u32,
}

impl SegmentHead {
    /// Most slots of a segment, each of which takes some bytes of memory.
    pub(crate) const MOST_SLOTS: u32 = 1 << 24;

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
        };
        sealed(MAGIC, &raw, COPY_LEN).repeat(PAGE / COPY_LEN)
    }

    /// One good copy will do.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        let page = bytes.get(..PAGE).ok_or(Invalid::Short { len: bytes.len() })?;
        let (first, second) = page.split_at(COPY_LEN);
        Self::parse_copy(first).or_else(|why| Self::parse_copy(second).map_err(|_| why))
    }

    fn parse_copy(bytes: &[u8]) -> Result<Self, Invalid> {
        let raw: &Raw = unseal(bytes, MAGIC, "a segment", COPY_LEN)?;
        let head = Self {
            writer: Uuid::from_bytes(raw.writer),
            number: raw.number.get(),
            slot_bytes: raw.slot_bytes.get(),
            slots: raw.slots.get(),
        };
        let has_room = head.slot_bytes > PAGE as u64 && head.slot_bytes.is_multiple_of(PAGE as u64);
        if !has_room || head.slots == 0 || head.file_len().is_none() {
            return Err(Invalid::Value("its slots are none that a segment has"));
        }
        Ok(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> SegmentHead {
        SegmentHead { writer: Uuid::from_u128(7), number: 3, slot_bytes: 12288, slots: 5 }
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
            let head = SegmentHead { writer: Uuid::nil(), number, slot_bytes, slots };
            if let Ok(parsed) = SegmentHead::parse(&head.to_bytes()) {
                prop_assert_eq!(parsed, head);
                let end = head.offset(slots - 1).unwrap().checked_add(slot_bytes);
                prop_assert_eq!(end, head.file_len());
            }
        }
    }
}
