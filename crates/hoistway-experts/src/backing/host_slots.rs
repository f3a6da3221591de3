//! Host memory in slots of equal length, one for each resident expert. Dense tensors have memory of their own.
//!
//! A part lies in its slot as it does in the file, modulo a block, with room for all blocks that it touches. So one direct
//! read brings a part to its final place, with no piece of it staged.
#![allow(unsafe_code)]

use super::{PartPlace, UnitMemory, UnitRoom, add, blocks_of, whole_blocks};
use crate::{
    Error, Result,
    catalog::{ExpertCatalog, Stored},
};
use hoistway::{ByteRange, DeviceId};
use hoistway_io::{
    memory::{Mapping, PageKind},
    parallel::lock,
};
use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::{Arc, Mutex},
};

/// Host memory in slots.
pub(super) struct HostSlots {
    catalog: Arc<ExpertCatalog>,
    file_lens: Vec<u64>,
    slot_bytes: u64,
    /// Address space for a slot for every expert. Those that were used have pages.
    slab: Mapping,
    state: Mutex<SlotUse>,
}

#[derive(Debug, Default)]
struct SlotUse {
    /// Slots without a unit that have pages.
    touched: BTreeSet<u32>,
    /// Slots without a unit that have none.
    untouched: BTreeSet<u32>,
    /// Experts with a slot.
    used: usize,
    dense: HashMap<usize, Mapping>,
    dense_bytes: u64,
}

impl HostSlots {
    pub(super) fn new(catalog: &Arc<ExpertCatalog>, file_lens: &[u64]) -> Result<Self> {
        let mut slot_bytes = 0;
        for unit in 0..catalog.experts().len() {
            slot_bytes = slot_bytes.max(padded_bytes(catalog, unit)?);
        }
        let experts = catalog.experts().len() as u64;
        let too_long = || Error::Internal("the slots of all experts do not fit the address space".into());
        let slab_bytes = slot_bytes.checked_mul(experts).filter(|bytes| *bytes <= isize::MAX as u64);
        let slab_bytes = slab_bytes.ok_or_else(too_long)?;
        let slab = Mapping::reserve(slab_bytes as usize).map_err(no_memory(slab_bytes, "address space"))?;
        slab.pointer(0).as_ptr().expose_provenance();
        let untouched = (0..experts as u32).collect();
        let state = Mutex::new(SlotUse { untouched, ..SlotUse::default() });
        Ok(Self { catalog: catalog.clone(), file_lens: file_lens.to_vec(), slot_bytes, slab, state })
    }

    /// The places of a unit's parts in memory at `base`, the start of a page.
    fn places(&self, unit: usize, base: u64) -> Result<Arc<[PartPlace]>> {
        let stored = self.catalog.stored(unit)?;
        let mut next = base;
        let mut places = Vec::with_capacity(stored.len());
        for Stored { file, bytes } in stored {
            let read = blocks_of(bytes, self.file_lens.get(file).copied().unwrap_or_default())?;
            let address = next + (bytes.start() - read.start());
            places.push(PartPlace { address, file, read, target: next });
            next = add(next, whole_blocks(read.len())?)?;
        }
        Ok(places.into())
    }

    fn slot_range(&self, slot: u32) -> ByteRange {
        ByteRange::at(u64::from(slot) * self.slot_bytes, self.slot_bytes).unwrap_or_default()
    }

    /// Bytes of slots that have pages, and of dense tensors.
    fn held(&self, state: &SlotUse) -> u64 {
        let slots = (state.used + state.touched.len()) as u64;
        slots.saturating_mul(self.slot_bytes).saturating_add(state.dense_bytes)
    }

    /// Gives pages of free slots back until no more than `keep_bytes` are held.
    fn give_back(&self, state: &mut SlotUse, keep_bytes: u64) {
        while self.held(state) > keep_bytes
            && let Some(slot) = state.touched.pop_last()
        {
            // SAFETY: no unit has the slot, so no lease shows its bytes and no read fills it.
            unsafe { self.slab.release(self.slot_range(slot)) };
            state.untouched.insert(slot);
        }
    }
}

impl UnitMemory for HostSlots {
    fn cost_bytes(&self, unit: usize) -> u64 {
        if unit < self.catalog.experts().len() {
            return self.slot_bytes;
        }
        padded_bytes(&self.catalog, unit).unwrap_or(u64::MAX)
    }

    fn reserve(&self, unit: usize, keep_bytes: u64) -> Result<Option<UnitRoom>> {
        let mut state = lock(&self.state);
        if unit >= self.catalog.experts().len() {
            let len = padded_bytes(&self.catalog, unit)?;
            // Before the mapping: free slots and the tensor together may be more than the budget.
            self.give_back(&mut state, keep_bytes.saturating_sub(len));
            let mapping = Mapping::anonymous(len as usize, PageKind::HugeWithin);
            let mapping = mapping.map_err(no_memory(len, "memory"))?;
            let base = mapping.pointer(0).as_ptr().expose_provenance() as u64;
            let places = self.places(unit, base)?;
            state.dense_bytes += len;
            state.dense.insert(unit, mapping);
            return Ok(Some(UnitRoom { memory: DeviceId::Cpu, slot: None, places, after: None }));
        }
        let slot = state.touched.first().or_else(|| state.untouched.first()).copied();
        let slot = slot.ok_or_else(|| Error::Internal("all slots are used".into()))?;
        let range = self.slot_range(slot);
        let places = self.places(unit, self.slab.pointer(range.start() as usize).addr().get() as u64)?;
        self.slab.commit(range).map_err(no_memory(range.len(), "memory"))?;
        state.touched.remove(&slot);
        state.untouched.remove(&slot);
        state.used += 1;
        Ok(Some(UnitRoom { memory: DeviceId::Cpu, slot: Some(slot), places, after: None }))
    }

    fn release(&self, unit: usize, room: &UnitRoom, keep_bytes: u64) -> bool {
        let mut state = lock(&self.state);
        match room.slot {
            Some(slot) => {
                state.used -= 1;
                state.touched.insert(slot);
            }
            None => {
                if let Some(mapping) = state.dense.remove(&unit) {
                    state.dense_bytes -= mapping.len() as u64;
                }
            }
        }
        self.give_back(&mut state, keep_bytes);
        true
    }

    fn trim(&self, keep_bytes: u64) {
        self.give_back(&mut lock(&self.state), keep_bytes);
    }

    fn held_bytes(&self) -> u64 {
        self.held(&lock(&self.state))
    }
}

impl fmt::Debug for HostSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSlots").field("slot_bytes", &self.slot_bytes).finish_non_exhaustive()
    }
}

/// Bytes of all blocks that a unit's parts touch.
fn padded_bytes(catalog: &ExpertCatalog, unit: usize) -> Result<u64> {
    catalog.stored(unit)?.into_iter().try_fold(0, |sum, stored| {
        // The last block counts whole, although the file may end in it.
        let blocks = blocks_of(stored.bytes, u64::MAX)?;
        add(sum, blocks.len())
    })
}

fn no_memory(bytes: u64, kind: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |source| hoistway::Error::Allocation { bytes, kind, source }.into()
}
