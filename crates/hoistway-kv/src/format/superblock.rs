//! `STORE`: what makes a directory a store, and the lock of all who change what it has room for.
#![forbid(unsafe_code)]

use super::{Invalid, PAGE, PAGED_VERSION, VERSION, sealed_as, unseal_up_to};
use crate::LayoutKind;
use uuid::Uuid;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U64};

const MAGIC: [u8; 8] = *b"WLKVSTOR";

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    store: [u8; 16],
    /// Seconds since 1970.
    created: U64,
    layout: u8,
    reserved: [u8; 7],
}

/// The contents of `STORE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) store: Uuid,
    pub(crate) layout: LayoutKind,
    /// Seconds since 1970, for people.
    pub(crate) created: u64,
}

impl Superblock {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let raw = Raw {
            store: self.store.into_bytes(),
            created: self.created.into(),
            layout: match self.layout {
                LayoutKind::Segments => 1,
                LayoutKind::Files => 2,
            },
            reserved: [0; 7],
        };
        let version = match self.layout {
            LayoutKind::Segments => PAGED_VERSION,
            LayoutKind::Files => VERSION,
        };
        sealed_as(version, MAGIC, &raw, PAGE)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        let (_, raw): (_, &Raw) = unseal_up_to(PAGED_VERSION, bytes, MAGIC, "a superblock", PAGE)?;
        let layout = match raw.layout {
            1 => LayoutKind::Segments,
            2 => LayoutKind::Files,
            _ => return Err(Invalid::Value("its layout is unknown")),
        };
        Ok(Self { store: Uuid::from_bytes(raw.store), layout, created: raw.created.get() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Superblock {
        Superblock { store: Uuid::from_u128(7), layout: LayoutKind::Segments, created: 1 }
    }

    #[test]
    fn it_is_read_as_it_is_written() {
        assert_eq!(Superblock::parse(&example().to_bytes()), Ok(example()));
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let bytes = example().to_bytes();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::parse(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_version_is_told_from_damage() {
        let mut bytes = example().to_bytes();
        bytes[8] = 9;
        assert_eq!(Superblock::parse(&bytes), Err(Invalid::Version { found: 9 }));
        assert_eq!(Superblock::parse(&bytes[..100]), Err(Invalid::Short { len: 100 }));
        assert_eq!(Superblock::parse(&[0; PAGE]), Err(Invalid::Magic { what: "a superblock" }));
    }
}
