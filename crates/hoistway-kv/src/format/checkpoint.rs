//! The head of a checkpoint. Records follow it, as in a log: all namespaces, and all blocks that were there.
#![forbid(unsafe_code)]

use super::{
    Invalid, PAGE,
    record::{MAX_NUMBER, ProvenFrom},
    sealed, unseal,
};
use uuid::Uuid;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

const MAGIC: [u8; 8] = *b"WLKVCKPT";
/// Bytes before the records.
pub(crate) const HEAD_LEN: usize = PAGE;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    writer: [u8; 16],
    generation: U64,
    next_record: U64,
    records: U64,
    log: U32,
    epoch: U32,
    next_segment: U32,
    proven_from: U32,
}

/// The head of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointHead {
    pub(crate) writer: Uuid,
    /// The higher of two is the newer.
    pub(crate) generation: u64,
    /// The number of times that the directory was opened for writing.
    pub(crate) epoch: u32,
    /// The log that goes on from here.
    pub(crate) log: u32,
    /// The number of that log's first record.
    pub(crate) next_record: u64,
    /// Segments from this number on have never been used.
    pub(crate) next_segment: u32,
    /// The number of records that follow, which are numbered from 0.
    pub(crate) records: u64,
    /// The blocks that a sync covers.
    pub(crate) proven_from: ProvenFrom,
}

impl CheckpointHead {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let raw = Raw {
            writer: self.writer.into_bytes(),
            generation: self.generation.into(),
            next_record: self.next_record.into(),
            records: self.records.into(),
            log: self.log.into(),
            epoch: self.epoch.into(),
            next_segment: self.next_segment.into(),
            proven_from: self.proven_from.0.into(),
        };
        sealed(MAGIC, &raw, HEAD_LEN)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        let raw: &Raw = unseal(bytes, MAGIC, "a checkpoint", HEAD_LEN)?;
        if raw.generation.get().max(raw.next_record.get()) >= MAX_NUMBER {
            return Err(Invalid::Value("its numbers are out of range"));
        }
        Ok(Self {
            writer: Uuid::from_bytes(raw.writer),
            generation: raw.generation.get(),
            epoch: raw.epoch.get(),
            log: raw.log.get(),
            next_record: raw.next_record.get(),
            next_segment: raw.next_segment.get(),
            records: raw.records.get(),
            proven_from: ProvenFrom(raw.proven_from.get()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> CheckpointHead {
        CheckpointHead {
            writer: Uuid::from_u128(7),
            generation: 1,
            epoch: 2,
            log: 3,
            next_record: 4,
            next_segment: 5,
            records: 6,
            proven_from: ProvenFrom(7),
        }
    }

    #[test]
    fn numbers_that_could_not_be_counted_on_are_refused() {
        for head in [
            CheckpointHead { generation: u64::MAX, ..example() },
            CheckpointHead { next_record: MAX_NUMBER, ..example() },
        ] {
            assert!(CheckpointHead::parse(&head.to_bytes()).is_err(), "{head:?}");
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let head = example();
        let bytes = head.to_bytes();
        assert_eq!(CheckpointHead::parse(&bytes), Ok(head));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(CheckpointHead::parse(&flipped).is_err(), "bit {bit}");
        }
    }
}
