//! Memory of a device in slots of equal length, in one allocation. Dense tensors have allocations of their own.
//!
//! Slots and dense tensors together take no more than the budget and the demand of one request: a share is set apart for
//! dense tensors, and slots take the rest. A second level in host memory is beside the budget.
#![forbid(unsafe_code)]

use super::{
    HostLevel, PartPlace, UnitMemory, UnitRoom, add,
    dense_memory::DenseMemory,
    uses::{Uses, passed},
};
use crate::{
    Error, Result,
    catalog::{ExpertCatalog, Unit},
    store::StoreOptions,
};
use hoistway::{Alignment, DeviceId};
use hoistway_device::{Device, DeviceMemory, Fence};
use hoistway_io::parallel::lock;
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
};

/// The alignment of tensors, for kernels and copies.
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
    /// The largest budget that there is memory for.
    max_budget_bytes: u64,
    dense_memory: DenseMemory,
    /// Before the slots that it copies from and to.
    level: Option<HostLevel>,
    /// `None` if there is no slot.
    slab: Option<Arc<DeviceMemory>>,
    state: Mutex<SlotUse>,
}

#[derive(Debug, Default)]
struct SlotUse {
    /// Slots that no unit has, and what reads to them come after.
    free: BTreeMap<u32, Vec<Fence>>,
    /// Work that has used units since they were read.
    uses: Uses,
    dense: HashMap<usize, DeviceMemory>,
    /// Memory that was allocated for dense tensors, or why there is none.
    prepared: HashMap<usize, Result<DeviceMemory>>,
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
        let all_slots = u64::from(slots) * slot_bytes;
        let dense_memory = DenseMemory::new(&device, all_bytes.saturating_sub(all_slots));
        let has_all_experts = slots as usize == catalog.experts().len();
        let has_all_dense = all_dense_bytes(catalog)? <= dense_memory.max_bytes();
        let max_budget_bytes = match (has_all_experts, has_all_dense) {
            (true, true) => u64::MAX,
            (true, false) => all_bytes,
            // Slots take a request's demand too, which is beside the budget.
            (false, _) => all_slots.max(options.budget_bytes),
        };
        let slab = match slots {
            0 => None,
            _ => {
                let slab = DeviceMemory::new(&device, all_slots);
                Some(Arc::new(slab.map_err(|error| no_room(error, "set a smaller budget"))?))
            }
        };
        let level = match (options.host_level_bytes, &slab) {
            (Some(bytes), Some(slab)) => {
                Some(HostLevel::new(slab, slot_bytes, catalog.experts().len(), bytes)?)
            }
            (Some(bytes), None) => {
                let reason =
                    "no expert has a slot on the device: the model has none, or the budget is too small";
                return Err(Error::invalid_option("host_level_bytes", bytes, reason));
            }
            (None, _) => None,
        };
        let state = Mutex::new(SlotUse {
            free: (0..slots).map(|slot| (slot, Vec::new())).collect(),
            ..SlotUse::default()
        });
        let catalog = catalog.clone();
        Ok(Self { catalog, device, slot_bytes, slots, max_budget_bytes, dense_memory, level, slab, state })
    }

    fn room(&self, unit: usize, slot: Option<u32>, base: u64, after: Vec<Fence>) -> Result<UnitRoom> {
        let stored = self.catalog.stored(unit)?;
        let mut next = base;
        let mut places = Vec::with_capacity(stored.len());
        for part in stored {
            places.push(PartPlace::exact(next, part));
            next = add(next, aligned(part.bytes.len())?)?;
        }
        Ok(UnitRoom { memory: self.device.id(), slot, places: places.into(), after: Some(after.into()) })
    }

    fn unit(&self, unit: usize) -> Result<&Unit> {
        self.catalog.units().get(unit).ok_or_else(|| Error::Internal(format!("there is no unit {unit}")))
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
        self.dense_memory.max_bytes()
    }

    fn max_budget_bytes(&self) -> u64 {
        self.max_budget_bytes
    }

    fn reserve(&self, unit: usize, _keep_bytes: u64) -> Result<Option<UnitRoom>> {
        let mut state = lock(&self.state);
        if unit >= self.catalog.experts().len() {
            // To allocate may wait for the device.
            let Some(memory) = state.prepared.remove(&unit) else { return Ok(None) };
            let memory = memory?;
            let room = self.room(unit, None, memory.address(), Vec::new())?;
            state.dense.insert(unit, memory);
            return Ok(Some(room));
        }
        let (Some(slab), Some((slot, after))) = (&self.slab, state.free.pop_first()) else {
            return Err(Error::Internal("all slots are used".into()));
        };
        let base = slab.address() + u64::from(slot) * self.slot_bytes;
        self.room(unit, Some(slot), base, after).map(Some)
    }

    fn prepare(&self, unit: usize) {
        let memory = self.unit(unit).and_then(padded_bytes).and_then(|len| {
            let allocated = self.dense_memory.allocate(len);
            allocated.map_err(|error| no_room(error, "evict tensors (evict_tensors)"))
        });
        lock(&self.state).prepared.insert(unit, memory);
    }

    fn used(&self, unit: usize, fence: Option<&Fence>) {
        let full = lock(&self.state).uses.full(unit);
        let passed = passed(full);
        lock(&self.state).uses.note(unit, fence, &passed);
    }

    /// Waits for nothing: kernels that were queued before leases ended may still read these bytes, and a copy of unknown fate may
    /// still write to them, but what is read to the slot next comes after them.
    fn release(&self, unit: usize, room: &UnitRoom, keep_bytes: u64) -> bool {
        let mut state = lock(&self.state);
        let mut after = state.uses.take_fences(unit, room, &self.device);
        let Some(slot) = room.slot else {
            if let Some(memory) = state.dense.remove(&unit) {
                drop(state);
                self.dense_memory.free(memory);
            }
            return true;
        };
        if let (Some(level), Some(first)) = (&self.level, room.places.first()) {
            if keep_bytes == 0 {
                // The store is gone, but for its leases.
                level.dropped(unit);
            } else {
                let len = self.unit(unit).and_then(padded_bytes).unwrap_or(self.slot_bytes);
                after = level.evicted(unit, first.address, len, after);
            }
        }
        state.free.insert(slot, after);
        true
    }

    fn level(&self) -> Option<&HostLevel> {
        self.level.as_ref()
    }

    fn trim(&self, keep_bytes: u64) {
        // No request comes any more that could want an expert again.
        if keep_bytes == 0
            && let Some(level) = &self.level
        {
            level.close();
        }
    }

    fn held_bytes(&self) -> u64 {
        let slab = u64::from(self.slots) * self.slot_bytes;
        slab.saturating_add(self.dense_memory.held_bytes())
    }
}

/// Why there is no memory of the device; `remedy` is what else to do than to free memory of others.
fn no_room(error: hoistway_device::Error, remedy: &str) -> Error {
    let mut error = hoistway::Error::from(error);
    if let hoistway::Error::MemoryBudget { fix, .. } = &mut error {
        *fix = format!("free memory of the device, or {remedy}");
    }
    error.into()
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
    Ok(all_dense_bytes(catalog)?.min(options.budget_bytes / DENSE_SHARE).min(most))
}

fn all_dense_bytes(catalog: &ExpertCatalog) -> Result<u64> {
    catalog.dense().iter().try_fold(0, |sum, unit| add(sum, padded_bytes(unit)?))
}

/// Bytes of a unit's parts, each beginning where kernels like it.
pub(super) fn padded_bytes(unit: &Unit) -> Result<u64> {
    unit.parts().iter().try_fold(0, |sum, part| add(sum, aligned(part.bytes.len())?))
}

pub(super) fn aligned(bytes: u64) -> Result<u64> {
    PART_ALIGNMENT.up(bytes).ok_or_else(|| Error::Internal(format!("{bytes} bytes do not fit 64 bits")))
}
