//! Memory of a device in slots of equal length, in one allocation. Dense tensors have allocations of their own.
//!
//! Slots and dense tensors together take no more than the budget and the demand of one request: a share is set apart for
//! dense tensors, and slots take the rest.
#![forbid(unsafe_code)]

use super::{Place, UnitMemory, UnitRoom, add};
use crate::{
    Error, Result,
    catalog::{ExpertCatalog, Unit},
    store::StoreOptions,
};
use hoistway::{Alignment, DeviceId};
use hoistway_device::{Device, DeviceMemory};
use hoistway_io::parallel::lock;
use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex},
};

/// What kernels and copies like tensors to begin at.
const PART_ALIGNMENT: Alignment = match Alignment::new(256) {
    Some(alignment) => alignment,
    None => Alignment::BLOCK,
};

/// The part of the budget that is set apart for dense tensors by default, at most: an eighth.
const DENSE_SHARE: u64 = 8;

/// Memory of a device in slots.
#[derive(Debug)]
pub(super) struct DeviceSlots {
    catalog: Arc<ExpertCatalog>,
    device: Arc<Device>,
    slot_bytes: u64,
    slots: u32,
    /// Bytes that dense tensors may have at a time.
    max_dense_bytes: u64,
    /// `None` if there is no slot.
    slab: Option<DeviceMemory>,
    state: Mutex<SlotUse>,
}

#[derive(Debug, Default)]
struct SlotUse {
    free: BTreeSet<u32>,
    dense: HashMap<usize, DeviceMemory>,
    /// Bytes of dense tensors, also of those whose memory was lost.
    dense_bytes: u64,
}

impl DeviceSlots {
    pub(super) fn new(
        catalog: &Arc<ExpertCatalog>,
        device: DeviceId,
        options: &StoreOptions,
        batch_bytes: u64,
    ) -> Result<Self> {
        let device = Device::open(device).map_err(hoistway::Error::from)?;
        let mut slot_bytes = 0;
        for unit in catalog.experts() {
            slot_bytes = slot_bytes.max(padded_bytes(unit)?);
        }
        let all_bytes = options.budget_bytes.saturating_add(batch_bytes);
        let dense_bytes = dense_share(catalog, options, slot_bytes)?;
        let slab_bytes = all_bytes.saturating_sub(dense_bytes);
        let affordable = slab_bytes.checked_div(slot_bytes).unwrap_or_default();
        let slots = affordable.min(catalog.experts().len() as u64) as u32;
        let max_dense_bytes = all_bytes.saturating_sub(u64::from(slots) * slot_bytes);
        let slab = match slots {
            0 => None,
            _ => Some(
                DeviceMemory::new(&device, u64::from(slots) * slot_bytes).map_err(hoistway::Error::from)?,
            ),
        };
        let state = Mutex::new(SlotUse { free: (0..slots).collect(), ..SlotUse::default() });
        Ok(Self { catalog: catalog.clone(), device, slot_bytes, slots, max_dense_bytes, slab, state })
    }

    fn room(&self, unit: &Unit, slot: Option<u32>, base: u64) -> Result<UnitRoom> {
        let mut next = base;
        let mut places = Vec::with_capacity(unit.parts().len());
        for part in unit.parts() {
            places.push(Place::exact(next, part.bytes));
            next = add(next, aligned(part.bytes.len())?)?;
        }
        Ok(UnitRoom { memory: self.device.id(), slot, places: places.into() })
    }
}

impl UnitMemory for DeviceSlots {
    fn cost_bytes(&self, unit: usize) -> u64 {
        if unit < self.catalog.experts().len() {
            return self.slot_bytes;
        }
        self.catalog.units().get(unit).map_or(u64::MAX, |unit| padded_bytes(unit).unwrap_or(u64::MAX))
    }

    fn max_experts(&self) -> usize {
        self.slots as usize
    }

    fn max_dense_bytes(&self) -> u64 {
        self.max_dense_bytes
    }

    fn max_budget_bytes(&self) -> u64 {
        if self.slots as usize == self.catalog.experts().len() {
            return u64::MAX;
        }
        u64::from(self.slots) * self.slot_bytes
    }

    fn reserve(&self, unit: usize, _keep_bytes: u64) -> Result<UnitRoom> {
        let description = self.catalog.units().get(unit);
        let description = description.ok_or_else(|| Error::Internal(format!("there is no unit {unit}")))?;
        let mut state = lock(&self.state);
        if unit >= self.catalog.experts().len() {
            let len = padded_bytes(description)?;
            let memory = DeviceMemory::new(&self.device, len.max(1)).map_err(hoistway::Error::from)?;
            let room = self.room(description, None, memory.address())?;
            state.dense.insert(unit, memory);
            state.dense_bytes += len;
            return Ok(room);
        }
        let (Some(slab), Some(slot)) = (&self.slab, state.free.pop_first()) else {
            return Err(Error::Internal("all slots are used".into()));
        };
        self.room(description, Some(slot), slab.address() + u64::from(slot) * self.slot_bytes)
    }

    fn release(&self, unit: usize, room: &UnitRoom, _in_doubt: bool, _keep_bytes: u64) -> bool {
        // Kernels that were queued before the lease was dropped may still read these bytes, and a copy that failed may still
        // write to them.
        let is_lost = !self.device.wait_for_all();
        let mut state = lock(&self.state);
        match room.slot {
            Some(_) if is_lost => {}
            Some(slot) => _ = state.free.insert(slot),
            None => {
                let Some(memory) = state.dense.remove(&unit) else { return !is_lost };
                if is_lost {
                    std::mem::forget(memory);
                } else {
                    let len = self.cost_bytes(unit);
                    state.dense_bytes = state.dense_bytes.saturating_sub(len);
                }
            }
        }
        !is_lost
    }

    fn held_bytes(&self) -> u64 {
        let slab = u64::from(self.slots) * self.slot_bytes;
        slab.saturating_add(lock(&self.state).dense_bytes)
    }
}

/// Bytes of the budget that are set apart for dense tensors.
fn dense_share(catalog: &ExpertCatalog, options: &StoreOptions, slot_bytes: u64) -> Result<u64> {
    let most = options.budget_bytes.saturating_sub(slot_bytes);
    if let Some(chosen) = options.dense_bytes {
        if chosen > most {
            let reason = format!("the budget of {} has to hold one expert besides", options.budget_bytes);
            return Err(Error::invalid_option("dense_bytes", chosen, reason));
        }
        return Ok(chosen);
    }
    let all = catalog.dense().iter().try_fold(0, |sum, unit| add(sum, padded_bytes(unit)?))?;
    Ok(all.min(options.budget_bytes / DENSE_SHARE).min(most))
}

/// Bytes of a unit's parts, each beginning where kernels like it.
fn padded_bytes(unit: &Unit) -> Result<u64> {
    unit.parts().iter().try_fold(0, |sum, part| add(sum, aligned(part.bytes.len())?))
}

fn aligned(bytes: u64) -> Result<u64> {
    PART_ALIGNMENT.up(bytes).ok_or_else(|| Error::Internal(format!("{bytes} bytes do not fit 64 bits")))
}
