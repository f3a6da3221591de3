//! `LEASE`: the process that writes a directory, for people and for other writers. It lives if it holds the lock on
//! the file, not by what is in it.
#![forbid(unsafe_code)]

use super::{Invalid, sealed, unseal};
use crate::Durability;
use uuid::Uuid;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

const MAGIC: [u8; 8] = *b"WLKVLEAS";
/// Bytes of a lease: a sector, which is written as a whole.
pub(crate) const LEASE_LEN: usize = 512;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    writer: [u8; 16],
    heartbeat: U64,
    wanted_bytes: U64,
    process: U32,
    epoch: U32,
    capacity: U64,
    taken: U64,
    settled: U64,
    removed: U64,
    lock_domain: [u8; 16],
    durability: U32,
}

/// Where locks of files mean the same: one boot of one host, and one mount. Zeros if the lease is not locked, or that is
/// not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LockDomain(pub(crate) [u8; 16]);

impl LockDomain {
    /// Whether a process of one domain sees the locks of a process of the other.
    pub(crate) fn is_shared_with(self, other: Self) -> bool {
        self == other && self != Self::default()
    }
}

/// Bytes that a writer has written and removed since it began. None ever falls, but what is taken ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Account {
    /// Of blocks that it has begun, and of some more, so that it need not say so for each.
    pub(crate) taken: u64,
    /// Bytes of blocks that it has stored, or given up.
    pub(crate) settled: u64,
    /// Bytes of blocks that it has removed, its own or others', or given up.
    pub(crate) removed: u64,
}

/// The state that a writer publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) writer: Uuid,
    /// The number of times that the directory was opened for writing.
    pub(crate) epoch: u32,
    pub(crate) process: u32,
    /// Seconds since 1970 when this was written; 0 once it writes no more.
    pub(crate) heartbeat: u64,
    /// Bytes that it would allocate if others gave them up; 0 if it has what it needs, or its share.
    pub(crate) wanted_bytes: u64,
    /// Most bytes that the files of all writers may take, as this one was told.
    pub(crate) capacity: u64,
    /// The durability of its acknowledgements; `None` if it has not published one.
    pub(crate) durability: Option<Durability>,
    /// What it has written, in a layout where others cannot see whose a file is.
    pub(crate) account: Account,
    /// The domain in which the lock on this lease is visible.
    pub(crate) lock_domain: LockDomain,
}

/// The durabilities, by the numbers that stand for them.
const DURABILITIES: [Option<Durability>; 4] =
    [None, Some(Durability::None), Some(Durability::Batched), Some(Durability::Sync)];

impl Lease {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let raw = Raw {
            writer: self.writer.into_bytes(),
            heartbeat: self.heartbeat.into(),
            wanted_bytes: self.wanted_bytes.into(),
            process: self.process.into(),
            epoch: self.epoch.into(),
            capacity: self.capacity.into(),
            taken: self.account.taken.into(),
            settled: self.account.settled.into(),
            removed: self.account.removed.into(),
            durability: DURABILITIES
                .iter()
                .position(|durability| *durability == self.durability)
                .map_or(0, |place| place as u32)
                .into(),
            lock_domain: self.lock_domain.0,
        };
        sealed(MAGIC, &raw, LEASE_LEN)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        let raw: &Raw = unseal(bytes, MAGIC, "a lease", LEASE_LEN)?;
        Ok(Self {
            writer: Uuid::from_bytes(raw.writer),
            epoch: raw.epoch.get(),
            process: raw.process.get(),
            heartbeat: raw.heartbeat.get(),
            wanted_bytes: raw.wanted_bytes.get(),
            capacity: raw.capacity.get(),
            durability: DURABILITIES.get(raw.durability.get() as usize).copied().flatten(),
            account: Account {
                taken: raw.taken.get(),
                settled: raw.settled.get(),
                removed: raw.removed.get(),
            },
            lock_domain: LockDomain(raw.lock_domain),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_found() {
        let lease = Lease {
            writer: Uuid::from_u128(7),
            epoch: 2,
            process: 3,
            heartbeat: 4,
            wanted_bytes: 5,
            capacity: 6,
            durability: Some(Durability::Sync),
            account: Account { taken: 6, settled: 7, removed: 8 },
            lock_domain: LockDomain([9; 16]),
        };
        let bytes = lease.to_bytes();
        assert_eq!(Lease::parse(&bytes), Ok(lease));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Lease::parse(&flipped).is_err(), "bit {bit}");
        }
    }
}
