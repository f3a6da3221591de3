//! Memory of the store's own that unaligned bytes, headers, and bytes of devices pass through: slots of one length, of which a
//! step has as many as it needs, not necessarily neighbours. The scheduler counts them: a step that was admitted finds its slots.
#![forbid(unsafe_code)]

use hoistway_device::Address;
use hoistway_io::memory::{Slot, SlotKind, Slots};
use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

/// The slots.
#[derive(Debug)]
pub(super) struct Staging {
    /// Once there is memory for them.
    slots: OnceLock<Slots>,
    slot_len: usize,
    count: u32,
    /// Slots that were set aside.
    lost: AtomicU32,
}

impl Staging {
    /// At least one slot, of `slot_len` bytes each: a multiple of [`BLOCK_LEN`](crate::format::BLOCK_LEN).
    pub(super) fn new(bytes: u64, slot_len: usize) -> io::Result<Self> {
        let staging = Self::without_memory(bytes, slot_len)?;
        staging.get_memory(None)?;
        Ok(staging)
    }

    /// The same, but none can be taken before there is memory for them.
    pub(super) fn without_memory(bytes: u64, slot_len: usize) -> io::Result<Self> {
        let count = bytes.div_ceil(slot_len as u64).max(1);
        let count = u32::try_from(count).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { slots: OnceLock::new(), slot_len, count, lost: AtomicU32::new(0) })
    }

    /// Gets memory for them, unless they have it; on a NUMA node, if one is given.
    pub(super) fn get_memory(&self, node: Option<u32>) -> io::Result<()> {
        if self.slots.get().is_none() {
            let kind = node.map_or(SlotKind::Host, SlotKind::HostOn);
            let slots = Slots::new(self.count as usize, self.slot_len, kind).map_err(io::Error::other)?;
            // Another thread may have been first.
            let _ = self.slots.set(slots);
        }
        Ok(())
    }

    /// Slots, also those that are lost.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of all slots that are not lost.
    pub(super) fn len(&self) -> u64 {
        u64::from(self.count.saturating_sub(self.lost.load(Ordering::Relaxed))) * self.slot_len as u64
    }

    /// All of its memory, for a device to know, once it has some.
    pub(super) fn slots(&self) -> Option<&Slots> {
        self.slots.get()
    }

    /// Slots for so many bytes.
    pub(super) fn slots_for(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.div_ceil(self.slot_len as u64)).unwrap_or(u32::MAX)
    }

    /// So many slots; `None` if fewer are free.
    pub(super) fn try_take(&self, count: u32) -> Option<StagingLease> {
        let all = self.slots.get()?;
        let mut slots: Vec<Slot> = (0..count).map_while(|_| all.try_take()).collect();
        if slots.len() < count as usize {
            return None;
        }
        // Neighbours become one run.
        slots.sort_unstable_by_key(Slot::index);
        Some(StagingLease { slots, slot_len: self.slot_len })
    }

    /// Sets a lease aside, as a device may go on using its slots. `count` of them count as lost until the result is dropped.
    pub(super) fn set_aside(self: &Arc<Self>, lease: StagingLease, count: u32) -> SetAside {
        self.lost.fetch_add(count, Ordering::Relaxed);
        SetAside { _lease: lease, count, staging: self.clone() }
    }
}

/// Slots that a device may go on using.
#[derive(Debug)]
pub(super) struct SetAside {
    _lease: StagingLease,
    count: u32,
    staging: Arc<Staging>,
}

impl Drop for SetAside {
    fn drop(&mut self) {
        self.staging.lost.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// Some slots, to oneself. They go back when it is dropped.
#[derive(Debug, Default)]
pub(super) struct StagingLease {
    slots: Vec<Slot>,
    slot_len: usize,
}

impl StagingLease {
    /// Bytes of its slots.
    pub(super) fn len(&self) -> u64 {
        (self.slots.len() * self.slot_len) as u64
    }

    /// The memory of bytes `start..start + len` of the lease, in as many runs as slots are not neighbours. Bytes past
    /// its end are left out.
    pub(super) fn runs(&self, start: u64, len: u64) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        let slot_len = self.slot_len.max(1);
        let (mut position, end) = (start as usize, (start + len) as usize);
        std::iter::from_fn(move || {
            let (number, within) = (position / slot_len, position % slot_len);
            let Address::Host(address) = self.slots.get(number)?.source() else { return None };
            let neighbours = self.slots[number..].windows(2);
            let neighbours = neighbours.take_while(|pair| pair[1].index() == pair[0].index() + 1);
            let reach = slot_len - within + neighbours.count() * slot_len;
            let count = reach.min(end.checked_sub(position)?);
            if count == 0 {
                return None;
            }
            position += count;
            Some((address.wrapping_add(within), count))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_are_disjoint_runs_of_whole_slots() {
        let staging = Staging::new(8 * 4096, 4096).unwrap();
        let scattered: Vec<StagingLease> = (0..8).map(|_| staging.try_take(1).unwrap()).collect();
        assert!(staging.try_take(1).is_none());
        drop(scattered);
        let lease = staging.try_take(8).unwrap();
        let mut bytes: Vec<usize> = Vec::new();
        for (address, len) in lease.runs(100, 8 * 4096 - 200) {
            bytes.extend(address.addr()..address.addr() + len);
        }
        assert_eq!(bytes.len(), 8 * 4096 - 200);
        bytes.sort_unstable();
        bytes.dedup();
        assert_eq!(bytes.len(), 8 * 4096 - 200);
        assert_eq!(lease.runs(8 * 4096, 1).count(), 0);
    }

    #[test]
    fn slots_that_are_set_aside_are_not_given_out_until_they_come_back() {
        let staging = Arc::new(Staging::new(4 * 4096, 4096).unwrap());
        let (kept, lost) = (staging.try_take(2).unwrap(), staging.try_take(2).unwrap());
        let aside = staging.set_aside(lost, 2);
        assert_eq!((staging.len(), staging.count()), (2 * 4096, 4));
        drop(kept);
        assert!(staging.try_take(3).is_none());
        assert!(staging.try_take(2).is_some());
        drop(aside);
        assert_eq!(staging.len(), 4 * 4096);
        assert!(staging.try_take(4).is_some());
    }
}
