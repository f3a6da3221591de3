//! `HEAT`: the blocks of other writers that a process has used lately. Their writers, which may evict them, read it. A
//! file of an older version's store does not have it, and an older version does not look at it.
#![forbid(unsafe_code)]

use super::{Invalid, checksum, sealed, unseal};
use crate::Fingerprint;
use uuid::Uuid;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

const MAGIC: [u8; 8] = *b"WLKVHEAT";
/// Bytes before the fingerprints.
const HEAD_LEN: usize = 64;
/// Bytes of a fingerprint.
const FINGERPRINT_LEN: usize = 16;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    writer: [u8; 16],
    round: U64,
    count: U32,
    /// CRC-32C of the fingerprints.
    sum: U32,
}

/// The contents of a heat file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeatFile {
    /// Whose it is.
    pub(crate) writer: Uuid,
    /// Another number whenever it is written.
    pub(crate) round: u64,
    /// The blocks that were used.
    pub(crate) blocks: Vec<Fingerprint>,
}

impl HeatFile {
    /// Bytes of a file with so many blocks.
    pub(crate) const fn len(blocks: usize) -> usize {
        HEAD_LEN + blocks * FINGERPRINT_LEN
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let blocks: Vec<u8> = self.blocks.iter().flat_map(|block| *block.as_bytes()).collect();
        let raw = Raw {
            writer: self.writer.into_bytes(),
            round: self.round.into(),
            count: u32::try_from(self.blocks.len()).unwrap_or(u32::MAX).into(),
            sum: checksum(&blocks).into(),
        };
        let mut bytes = sealed(MAGIC, &raw, HEAD_LEN);
        bytes.extend(blocks);
        bytes
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        let raw: &Raw = unseal(bytes, MAGIC, "a heat file", HEAD_LEN)?;
        let short = Invalid::Short { len: bytes.len() };
        let len = (raw.count.get() as usize).checked_mul(FINGERPRINT_LEN).ok_or(short.clone())?;
        let blocks = bytes.get(HEAD_LEN..).and_then(|rest| rest.get(..len)).ok_or(short)?;
        if checksum(blocks) != raw.sum.get() {
            return Err(Invalid::Checksum);
        }
        let (blocks, _) = blocks.as_chunks::<FINGERPRINT_LEN>();
        Ok(Self {
            writer: Uuid::from_bytes(raw.writer),
            round: raw.round.get(),
            blocks: blocks.iter().map(|block| Fingerprint(*block)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_found() {
        let blocks = vec![Fingerprint([3; 16]), Fingerprint([4; 16])];
        let file = HeatFile { writer: Uuid::from_u128(7), round: 2, blocks };
        let bytes = file.to_bytes();
        assert_eq!(bytes.len(), HeatFile::len(2));
        assert_eq!(HeatFile::parse(&bytes), Ok(file));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(HeatFile::parse(&flipped).is_err(), "bit {bit}");
        }
        assert!(HeatFile::parse(&bytes[..bytes.len() - 1]).is_err());
    }
}
