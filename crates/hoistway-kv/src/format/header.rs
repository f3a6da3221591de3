//! The header of a block, at the beginning of its slot: what is there, so that nothing else is taken for it.
#![forbid(unsafe_code)]

use super::{Invalid, PAGE, sealed, unseal};
use crate::{
    Fingerprint, Key, NamespaceId,
    format::{BLOCK_LEN, MAX_SHARDS, Shard, ShardTable},
};
use uuid::Uuid;
use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

const MAGIC: [u8; 8] = *b"WLKVBLCK";
/// The longest shard: lengths have 48 bits.
pub(crate) const MAX_SHARD_LEN: u64 = (1 << 48) - 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    fingerprint: [u8; 16],
    namespace: [u8; 16],
    writer: [u8; 16],
    sequence: U64,
    created: U64,
    stride: U64,
    expires: U32,
    shards: U16,
    key_len: U16,
    /// A bit for each shard that has a checksum.
    has_checksum: [u8; MAX_SHARDS as usize / 8],
    table: [RawShard; MAX_SHARDS as usize],
    key: [u8; Key::MAX_LEN],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawShard {
    len: [u8; 6],
    checksum: U32,
}

/// The contents of a block's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockHeader {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) namespace: NamespaceId,
    pub(crate) key: Key,
    pub(crate) writer: Uuid,
    /// The sequence number of the block among its writer's blocks; never used twice.
    pub(crate) sequence: u64,
    /// Seconds since 1970, for people.
    pub(crate) created: u64,
    /// Seconds since 1970; 0 is never.
    pub(crate) expires: u32,
    pub(crate) stride: u64,
    pub(crate) table: ShardTable,
}

impl BlockHeader {
    /// The 4096 bytes of it; [`Invalid`] if there are too many shards, or longer ones than a header can tell.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, Invalid> {
        let shards = &self.table.0;
        if shards.is_empty() || shards.len() > MAX_SHARDS as usize {
            return Err(Invalid::Value("a block has 1 to 256 shards"));
        }
        let mut raw = Raw::new_zeroed();
        raw.fingerprint = *self.fingerprint.as_bytes();
        raw.namespace = *self.namespace.as_bytes();
        raw.writer = self.writer.into_bytes();
        raw.sequence = self.sequence.into();
        raw.created = self.created.into();
        raw.stride = self.stride.into();
        raw.expires = self.expires.into();
        // Both are bounded, by the check above and by `Key`.
        raw.shards = (shards.len() as u16).into();
        let key = self.key.as_bytes();
        raw.key_len = (key.len() as u16).into();
        raw.key[..key.len()].copy_from_slice(key);
        for (number, shard) in shards.iter().enumerate() {
            if shard.len > self.stride.min(MAX_SHARD_LEN) {
                return Err(Invalid::Value("a shard is longer than its room"));
            }
            raw.table[number].len.copy_from_slice(&shard.len.to_le_bytes()[..6]);
            if let Some(sum) = shard.checksum {
                raw.has_checksum[number / 8] |= 1 << (number % 8);
                raw.table[number].checksum = sum.into();
            }
        }
        Ok(sealed(MAGIC, &raw, PAGE))
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        let raw: &Raw = unseal(bytes, MAGIC, "a block", PAGE)?;
        let shards = usize::from(raw.shards.get());
        let stride = raw.stride.get();
        if shards == 0 || shards > MAX_SHARDS as usize || !stride.is_multiple_of(BLOCK_LEN) {
            return Err(Invalid::Value("its number of shards is out of range"));
        }
        let key = raw.key.get(..raw.key_len.get().into()).and_then(|key| Key::new(key).ok());
        let key = key.ok_or(Invalid::Value("its key has an invalid length"))?;
        let mut table = Vec::with_capacity(shards);
        for (number, shard) in raw.table[..shards].iter().enumerate() {
            let mut len = [0; 8];
            len[..6].copy_from_slice(&shard.len);
            let len = u64::from_le_bytes(len);
            if len > stride {
                return Err(Invalid::Value("a shard is longer than its room"));
            }
            let has_checksum = raw.has_checksum[number / 8] & (1 << (number % 8)) != 0;
            table.push(Shard { len, checksum: has_checksum.then(|| shard.checksum.get()) });
        }
        Ok(Self {
            fingerprint: Fingerprint(raw.fingerprint),
            namespace: NamespaceId(raw.namespace),
            key,
            writer: Uuid::from_bytes(raw.writer),
            sequence: raw.sequence.get(),
            created: raw.created.get(),
            expires: raw.expires.get(),
            stride,
            table: ShardTable(table),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    fn header(key: &[u8], sequence: u64, shards: Vec<(u64, Option<u32>)>) -> BlockHeader {
        let namespace = NamespaceId([7; 16]);
        BlockHeader {
            fingerprint: Fingerprint::of(namespace, key),
            namespace,
            key: Key::new(key).unwrap(),
            writer: Uuid::from_u128(9),
            sequence,
            created: 1,
            expires: 2,
            stride: 1 << 20,
            table: ShardTable(shards.into_iter().map(|(len, checksum)| Shard { len, checksum }).collect()),
        }
    }

    proptest! {
        #[test]
        fn it_is_read_as_it_is_written(
            key in vec(any::<u8>(), 1..=Key::MAX_LEN),
            sequence: u64,
            shards in vec((0..=1u64 << 20, any::<Option<u32>>()), 1..=MAX_SHARDS as usize),
        ) {
            let header = header(&key, sequence, shards);
            prop_assert_eq!(BlockHeader::parse(&header.to_bytes().unwrap()), Ok(header));
        }

        #[test]
        fn whatever_is_taken_makes_sense(body in vec(any::<u8>(), size_of::<Raw>())) {
            let raw = Raw::read_from_bytes(&body).unwrap();
            if let Ok(header) = BlockHeader::parse(&sealed(MAGIC, &raw, PAGE)) {
                prop_assert!(header.table.0.iter().all(|shard| shard.len <= header.stride));
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let bytes = header(b"key", 5, vec![(100, Some(1)), (0, None)]).to_bytes().unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(BlockHeader::parse(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(header(b"key", 5, vec![]).to_bytes().is_err());
        assert!(header(b"key", 5, vec![((1 << 20) + 1, None)]).to_bytes().is_err());
        assert!(header(b"key", 5, vec![(1, None); 257]).to_bytes().is_err());
    }
}
