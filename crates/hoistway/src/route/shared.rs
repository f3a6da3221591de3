//! Memory that the daemon of a 3FS writes to, as slots that are lent to transfers.
#![allow(unsafe_code)]

use crate::parallel::lock;
use hoistway_io::memory::{SharedMemory, off_node};
use hoistway_usrbio::{Iov, IovSlot};
use std::{
    ptr::NonNull,
    sync::{Arc, Mutex},
};

/// Slots of one length. Until a slot that was lent is given back, or for ever if its transfer may not have ended, nothing
/// else uses its memory.
#[derive(Debug)]
pub(super) struct SharedSlots {
    /// The slots, but for those that were lent.
    slots: Box<[Mutex<Option<IovSlot>>]>,
    iov: Arc<Iov>,
}

impl SharedSlots {
    /// Cuts new memory into slots; `None` if it is too short.
    pub(super) fn new(iov: Arc<Iov>, count: usize, slot_bytes: usize) -> Option<Self> {
        let slot = |index: usize| {
            // Where a slot lies is computed from its number.
            let slot = iov.cut(slot_bytes).filter(|slot| slot.offset() == index * slot_bytes)?;
            Some(Mutex::new(Some(slot)))
        };
        Some(Self { slots: (0..count).map(slot).collect::<Option<_>>()?, iov })
    }

    /// The memory of a slot, for a transfer.
    pub(super) fn lend(&self, slot: usize) -> Option<IovSlot> {
        lock(&self.slots[slot]).take()
    }

    /// Takes the memory of a slot back: its transfer is over.
    pub(super) fn give_back(&self, slot: usize, memory: IovSlot) {
        *lock(&self.slots[slot]) = Some(memory);
    }
}

// SAFETY: the memory stays mapped as long as `iov` lives, and an address is checked to lie inside or one past its end.
unsafe impl SharedMemory for SharedSlots {
    fn len(&self) -> usize {
        self.iov.len()
    }

    fn address(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.iov.len(), "offset {offset} of shared memory of {} bytes", self.iov.len());
        // SAFETY: inside the memory or one past its end, checked above.
        unsafe { self.iov.base().add(offset) }
    }

    fn off_node(&self) -> Option<String> {
        self.iov.off_node().map(|(node, error)| off_node("shared memory", node, error))
    }

    fn copy_to(&self, slot: usize, offset: usize, bytes: &mut [u8]) -> bool {
        lock(&self.slots[slot]).as_ref().is_some_and(|slot| slot.copy_to(offset, bytes).is_ok())
    }

    fn copy_from(&self, slot: usize, offset: usize, bytes: &[u8]) -> bool {
        lock(&self.slots[slot]).as_mut().is_some_and(|slot| slot.copy_from(offset, bytes).is_ok())
    }

    fn is_lent(&self, slot: usize) -> bool {
        lock(&self.slots[slot]).is_none()
    }
}
