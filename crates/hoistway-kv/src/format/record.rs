//! Records of the index log: 64 bytes each, of which a log is a sequence.
#![forbid(unsafe_code)]

use super::{Invalid, checksum};
use crate::{Fingerprint, NamespaceId};
use uuid::Uuid;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

pub(crate) const RECORD_LEN: usize = 64;
/// Numbers that count records, and checkpoints, are smaller: no writer reaches it, and counting on never overflows.
pub(crate) const MAX_NUMBER: u64 = 1 << 62;
/// The largest payload: lengths have 48 bits.
pub(crate) const MAX_PAYLOAD_LEN: u64 = (1 << 48) - 1;

const HEAD: u8 = 1;
const NAMESPACE: u8 = 2;
const COMMIT: u8 = 3;
const COMMIT_WITHOUT_SUMS: u8 = 4;
const TOMBSTONE: u8 = 5;
const HEAD_ANEW: u8 = 6;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    sum: U32,
    kind: u8,
    /// One less than there are.
    shards: u8,
    namespace: U16,
    number: U64,
    identity: [u8; 16],
    segment: U32,
    slot: U32,
    sequence: U64,
    payload_len: [u8; 6],
    before: U16,
    expires: U32,
    stride_blocks: U32,
}

/// Whether all shards of a block have checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    All,
    /// A device wrote some of them directly.
    Some,
}

/// The relation of a log to the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// It goes on with the next number.
    Next,
    /// It leaves numbers out, as the end of the one before it is not certain: who follows begins anew.
    Anew,
}

/// The first opening of a directory whose blocks were synced: before their records, or when the writer was closed. Older
/// blocks may lack bytes after a power cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProvenFrom(pub(crate) u32);

impl ProvenFrom {
    /// No opening is known to have synced its blocks, as in files that an older version wrote.
    pub(crate) const UNKNOWN: Self = Self(0);

    /// Whether the blocks of an opening were synced.
    pub(crate) fn covers(self, epoch: u64) -> bool {
        self != Self::UNKNOWN && epoch >= u64::from(self.0)
    }
}

/// A block, as the log and checkpoints tell of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRecord {
    pub(crate) fingerprint: Fingerprint,
    /// By the writer's own numbers.
    pub(crate) namespace: u16,
    pub(crate) segment: u32,
    pub(crate) slot: u32,
    pub(crate) sequence: u64,
    /// Bytes of all shards.
    pub(crate) payload_len: u64,
    /// Blocks of 4096 bytes between the starts of shards.
    pub(crate) stride_blocks: u32,
    /// The number of shards, 1 to 256.
    pub(crate) shards: u16,
    /// Seconds since 1970; 0 is never.
    pub(crate) expires: u32,
    pub(crate) sums: Sums,
}

/// The contents of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The first record of each log.
    Head { writer: Uuid, log: u32, epoch: u32, begin: Begin, proven_from: ProvenFrom },
    /// The writer's number of a namespace.
    Namespace { number: u16, id: NamespaceId },
    /// A block is there.
    Commit(BlockRecord),
    /// A block is not there any more; nor is any older one of the same fingerprint.
    Tombstone { fingerprint: Fingerprint, sequence: u64 },
}

/// A record with its place among all records of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Counts from one log to the next.
    pub(crate) number: u64,
    /// The number of records before it that may reach the disk after it: they were written in one go. All that come
    /// before those were on the disk already. `u16::MAX`: their number is not known.
    pub(crate) before: u16,
    pub(crate) change: Change,
}

impl Record {
    /// All records before this number were on the disk before this one was written.
    pub(crate) fn first_unsynced(&self) -> u64 {
        match self.before {
            u16::MAX => 0,
            before => self.number.saturating_sub(before.into()),
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; RECORD_LEN] {
        let mut raw = Raw {
            sum: 0.into(),
            kind: 0,
            shards: 0,
            namespace: 0.into(),
            number: self.number.into(),
            identity: [0; 16],
            segment: 0.into(),
            slot: 0.into(),
            sequence: 0.into(),
            payload_len: [0; 6],
            before: self.before.into(),
            expires: 0.into(),
            stride_blocks: 0.into(),
        };
        match self.change {
            Change::Head { writer, log, epoch, begin, proven_from } => {
                raw.kind = if begin == Begin::Next { HEAD } else { HEAD_ANEW };
                raw.identity = writer.into_bytes();
                raw.segment = log.into();
                raw.slot = epoch.into();
                raw.stride_blocks = proven_from.0.into();
            }
            Change::Namespace { number, id } => {
                raw.kind = NAMESPACE;
                raw.namespace = number.into();
                raw.identity = *id.as_bytes();
            }
            Change::Commit(block) => {
                raw.kind = if block.sums == Sums::All { COMMIT } else { COMMIT_WITHOUT_SUMS };
                // The maker of a record has limited the shards to 256.
                raw.shards = block.shards.wrapping_sub(1) as u8;
                raw.namespace = block.namespace.into();
                raw.identity = *block.fingerprint.as_bytes();
                raw.segment = block.segment.into();
                raw.slot = block.slot.into();
                raw.sequence = block.sequence.into();
                raw.payload_len.copy_from_slice(&block.payload_len.to_le_bytes()[..6]);
                raw.expires = block.expires.into();
                raw.stride_blocks = block.stride_blocks.into();
            }
            Change::Tombstone { fingerprint, sequence } => {
                raw.kind = TOMBSTONE;
                raw.identity = *fingerprint.as_bytes();
                raw.sequence = sequence.into();
            }
        }
        raw.sum = checksum(&raw.as_bytes()[4..]).into();
        zerocopy::transmute!(raw)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        let short = |_| Invalid::Short { len: bytes.len() };
        let raw = Raw::ref_from_bytes(bytes).map_err(short)?;
        if raw.sum != checksum(&bytes[4..]) {
            return Err(Invalid::Checksum);
        }
        if raw.number.get() >= MAX_NUMBER {
            return Err(Invalid::Value("its number is out of range"));
        }
        let change = match raw.kind {
            HEAD | HEAD_ANEW => Change::Head {
                writer: Uuid::from_bytes(raw.identity),
                log: raw.segment.get(),
                epoch: raw.slot.get(),
                begin: if raw.kind == HEAD { Begin::Next } else { Begin::Anew },
                proven_from: ProvenFrom(raw.stride_blocks.get()),
            },
            NAMESPACE => Change::Namespace { number: raw.namespace.get(), id: NamespaceId(raw.identity) },
            COMMIT | COMMIT_WITHOUT_SUMS => {
                let mut payload_len = [0; 8];
                payload_len[..6].copy_from_slice(&raw.payload_len);
                Change::Commit(BlockRecord {
                    fingerprint: Fingerprint(raw.identity),
                    namespace: raw.namespace.get(),
                    segment: raw.segment.get(),
                    slot: raw.slot.get(),
                    sequence: raw.sequence.get(),
                    payload_len: u64::from_le_bytes(payload_len),
                    stride_blocks: raw.stride_blocks.get(),
                    expires: raw.expires.get(),
                    shards: u16::from(raw.shards) + 1,
                    sums: if raw.kind == COMMIT { Sums::All } else { Sums::Some },
                })
            }
            TOMBSTONE => {
                Change::Tombstone { fingerprint: Fingerprint(raw.identity), sequence: raw.sequence.get() }
            }
            _ => return Err(Invalid::Value("its kind of record is unknown")),
        };
        Ok(Self { number: raw.number.get(), before: raw.before.get(), change })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn any_block() -> impl Strategy<Value = BlockRecord> {
        let place = (any::<u32>(), any::<u32>(), any::<u64>());
        (
            any::<[u8; 16]>(),
            any::<u16>(),
            place,
            0..=MAX_PAYLOAD_LEN,
            (any::<(u32, u32, bool)>(), 1..=256_u16),
        )
            .prop_map(
                |(identity, namespace, (segment, slot, sequence), payload_len, (rest, shards))| {
                    let (stride_blocks, expires, has_sums) = rest;
                    BlockRecord {
                        fingerprint: Fingerprint(identity),
                        namespace,
                        segment,
                        slot,
                        sequence,
                        payload_len,
                        stride_blocks,
                        shards,
                        expires,
                        sums: if has_sums { Sums::All } else { Sums::Some },
                    }
                },
            )
    }

    fn any_change() -> impl Strategy<Value = Change> {
        prop_oneof![
            any::<(u128, u32, u32, bool, u32)>().prop_map(|(writer, log, epoch, is_next, proven)| {
                Change::Head {
                    writer: Uuid::from_u128(writer),
                    log,
                    epoch,
                    begin: if is_next { Begin::Next } else { Begin::Anew },
                    proven_from: ProvenFrom(proven),
                }
            }),
            any::<(u16, [u8; 16])>()
                .prop_map(|(number, id)| Change::Namespace { number, id: NamespaceId(id) }),
            any_block().prop_map(Change::Commit),
            any::<([u8; 16], u64)>().prop_map(|(identity, sequence)| Change::Tombstone {
                fingerprint: Fingerprint(identity),
                sequence
            }),
        ]
    }

    proptest! {
        #[test]
        fn it_proves_no_more_than_it_knows(number: u64, before: u16) {
            let change = Change::Tombstone { fingerprint: Fingerprint([0; 16]), sequence: 1 };
            let first = Record { number, before, change }.first_unsynced();
            prop_assert!(first <= number && (first == 0 || number - first == u64::from(before)));
            prop_assert!(before != u16::MAX || first == 0);
        }

        #[test]
        fn it_is_read_as_it_is_written(number in 0..MAX_NUMBER, before: u16, change in any_change()) {
            let record = Record { number, before, change };
            prop_assert_eq!(Record::parse(&record.to_bytes()), Ok(record));
        }

        #[test]
        fn every_flipped_bit_is_found(change in any_change(), bit in 0..RECORD_LEN * 8) {
            let mut bytes = Record { number: 1, before: 0, change }.to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Record::parse(&bytes).is_err());
        }
    }

    #[test]
    fn numbers_that_could_not_be_counted_on_are_refused() {
        let change = Change::Tombstone { fingerprint: Fingerprint([0; 16]), sequence: 1 };
        for number in [MAX_NUMBER, u64::MAX] {
            assert!(Record::parse(&Record { number, before: 0, change }.to_bytes()).is_err());
        }
    }

    #[test]
    fn room_that_was_never_written_is_no_record() {
        assert!(Record::parse(&[0; RECORD_LEN]).is_err());
        assert!(Record::parse(&[0; 63]).is_err());
    }
}
