//! Staging slots: the bounded memory through which bytes pass that cannot be read in place.
#![allow(unsafe_code)]

use super::mapping::{Mapping, Pages};
use crate::{Error, Result};
use std::{
    slice,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// A fixed number of slots of equal size. A slot is free, or it is owned by whoever took it.
#[derive(Debug)]
pub(crate) struct Slots {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    mapping: Mapping,
    slot_bytes: usize,
    free: Mutex<Free>,
    returned: Condvar,
}

#[derive(Debug)]
struct Free {
    slots: Vec<usize>,
    closed: bool,
}

impl Slots {
    /// `count` slots of `slot_bytes` each, block-aligned.
    pub(crate) fn new(count: usize, slot_bytes: usize) -> Result<Self> {
        let bytes = count.saturating_mul(slot_bytes);
        let mapping = Mapping::anonymous(bytes, Pages::TransparentHuge)
            .map_err(|source| Error::Allocation { bytes: bytes as u64, kind: "staging memory", source })?;
        // A child of fork has no use for them, and a page that a read is filling must not become a copy.
        mapping.keep_from_children();
        let free = Mutex::new(Free { slots: (0..count).rev().collect(), closed: false });
        Ok(Self { shared: Arc::new(Shared { mapping, slot_bytes, free, returned: Condvar::new() }) })
    }

    /// A free slot, if there is one now.
    pub(crate) fn try_take(&self) -> Option<Slot> {
        let index = self.shared.free().slots.pop()?;
        Some(Slot { shared: self.shared.clone(), index })
    }

    /// A free slot. Waits for one; whoever waits must not hold slots itself. `None` once [`Slots::close`] was
    /// called.
    pub(crate) fn take(&self) -> Option<Slot> {
        let mut free = self.shared.free();
        loop {
            if free.closed {
                return None;
            }
            if let Some(index) = free.slots.pop() {
                return Some(Slot { shared: self.shared.clone(), index });
            }
            free = self.shared.returned.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Nobody waits for a slot any more.
    pub(crate) fn close(&self) {
        self.shared.free().closed = true;
        self.shared.returned.notify_all();
    }

    /// Bytes of all slots.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.shared.mapping.len() as u64
    }
}

impl Shared {
    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One slot, owned. Goes back when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    shared: Arc<Shared>,
    index: usize,
}

impl Slot {
    /// The slot's bytes. They hold what its last user left.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        let Shared { mapping, slot_bytes, .. } = &*self.shared;
        // SAFETY: each index is in the free list or in one `Slot`, so no other reference to these bytes exists;
        // the mapping is held by the slot and initialised by the kernel.
        unsafe { slice::from_raw_parts_mut(mapping.pointer(self.index * slot_bytes).as_ptr(), *slot_bytes) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.free().slots.push(self.index);
        self.shared.returned.notify_one();
    }
}
