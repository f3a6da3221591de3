//! The memory of a load: what it may take, the arenas and slots that it gets, and where each extent is read to.
#![forbid(unsafe_code)]

use super::{
    LoadOptions,
    device_arenas::{self, ArenaSource, DeviceArenas},
};
use crate::{
    Error, Result,
    device::{CopyStream, Device, ReusedMemory},
    memory::{self, Arena, Fill, MemoryRequest, Promise, SlotKind, Slots, WriteRegion},
    plan::{ArenaPlaces, Extent, Plan, Target, arena_places},
    route::{Buffer, member::ThreadPlan},
    transfer::{Needs, Opening, Room, ScratchMemory},
};
use std::sync::Arc;

/// Where completed reads go.
pub(super) enum Sink {
    /// Arenas of host memory.
    Host(Vec<Fill>),
    /// A device.
    Device(Box<DeviceArenas>),
}

/// Which part of its bound a stream keeps of a device's memory for its next tensors, at most.
const KEPT_PART: u64 = 2;

/// The memory that a load goes to and passes through.
pub(super) struct MemoryPlan<'a> {
    pub(super) memory: &'a MemoryRequest,
    /// The device that is to get copies; `None` if host memory is the place.
    pub(super) device: Option<&'a Arc<Device>>,
    /// Slots of the load's own, at most.
    pub(super) slots: usize,
    /// Bytes of one.
    pub(super) slot_bytes: u64,
    /// Bytes of all slots in host memory, at most.
    pub(super) staging_bytes: u64,
    pub(super) threads: &'a ThreadPlan,
    /// Whether the caller's thread does everything.
    pub(super) is_inline: bool,
    /// How many extents may be read before the owner of the load takes any tensor.
    pub(super) admitted: usize,
    /// The bound of a load whose reads wait for its owner to take tensors.
    pub(super) bound: Option<u64>,
    /// Bytes of tensors in memory at once.
    pub(super) most_bytes: u64,
    /// Those of them that are of host memory, and that the machine must find now.
    pub(super) fresh_bytes: u64,
}

/// Whether an extent is read into a slot of the load's own.
fn needs_own_slot(extent: &Extent, opening: &Opening<'_>) -> bool {
    extent.target == Target::Staged && opening.needs_host_slot(extent)
}

/// Bytes of host memory that a load of `plan` needs beside the slots of its routes: its tensors, what it knows of its reads,
/// and one slot of its own if a read goes there.
pub(super) fn least_bytes(plan: &Plan, fresh_bytes: u64, slot_bytes: u64, opening: &Opening<'_>) -> u64 {
    let has_slot = plan.extents().iter().any(|extent| needs_own_slot(extent, opening));
    let known = memory::budget::bookkeeping_bytes(plan.extents().len() as u64);
    fresh_bytes.saturating_add(known).saturating_add(if has_slot { slot_bytes } else { 0 })
}

impl MemoryPlan<'_> {
    /// The memory that routes may have of the load's.
    pub(super) fn room<'a>(
        &'a self,
        plan: &Plan,
        needs: Needs,
        opening: &Opening<'_>,
        options: &LoadOptions,
    ) -> Room<'a> {
        let slot_bytes = needs.slot_bytes.saturating_add(needs.table_bytes);
        let least_bytes = least_bytes(plan, self.fresh_bytes, slot_bytes, opening);
        let affordable = options.memory_budget_bytes.map(|budget| budget.saturating_sub(least_bytes));
        let staging_bytes = self.staging_bytes.min(affordable.unwrap_or(u64::MAX));
        Room {
            threads: self.threads,
            numa_node: self.memory.numa_node,
            least_bytes,
            staging_bytes,
            needs,
            in_flight_bytes: options.in_flight_bytes,
            rings: options.rings,
            budget_bytes: options.memory_budget_bytes,
        }
    }

    pub(super) fn needs(&self, plan: &Plan) -> Result<Needs> {
        match self.device {
            None => Ok(Needs { slot_bytes: self.slot_bytes, table_bytes: 0 }),
            Some(device) => Needs::of(plan, device, self.slot_bytes),
        }
    }

    /// Slots of the load's own, the memory that it may have besides, and what its budget has left then.
    pub(super) fn slots(
        &self,
        plan: &Plan,
        needs: &Needs,
        opening: &Opening<'_>,
        options: &LoadOptions,
    ) -> Result<(Slots, Promise, u64)> {
        let taken = opening.host_bytes();
        let known = memory::budget::bookkeeping_bytes(plan.extents().len() as u64);
        let fresh = self.fresh_bytes;
        let budget = options.memory_budget_bytes.map(|budget| budget.saturating_sub(taken));
        // Fewer slots are slower, and enough.
        let affordable = budget.map_or(u64::MAX, |budget| budget.saturating_sub(fresh + known));
        let staging_bytes = self.staging_bytes.saturating_sub(taken).min(affordable);
        let most = self.slots.min(needs.slots_in(staging_bytes));
        let staged = plan.extents().iter().filter(|extent| needs_own_slot(extent, opening));
        let count = staged.count().min(most);
        let staging_bytes = (needs.slot_bytes + needs.table_bytes).saturating_mul(count as u64);
        let staging_bytes = staging_bytes.saturating_add(known);
        let promise = memory::budget::promise(fresh, staging_bytes, budget)?;
        let kind = match self.device {
            None => SlotKind::Host,
            Some(device) => SlotKind::Pinned(device, self.memory.numa_node),
        };
        let left = budget.map_or(u64::MAX, |budget| budget.saturating_sub(fresh + staging_bytes));
        Ok((Slots::new(count, needs.slot_bytes as usize, kind)?, promise, left))
    }

    /// The memory of the tensors, and for each extent where it is read to. Opens the routes that were not opened before it
    /// was there.
    pub(super) fn sink(
        &self,
        plan: &Plan,
        room: &Room<'_>,
        opening: &mut Opening<'_>,
        options: &LoadOptions,
        slots: &Slots,
    ) -> Result<(Sink, Vec<Buffer>)> {
        let Some(device) = self.device else {
            let arenas = plan.arenas().iter().map(|&len| memory::allocate(len, self.memory));
            let (fills, buffers) = fills_and_buffers(plan, arenas.collect::<Result<_>>()?)?;
            opening.open_others(plan, room)?;
            return Ok((Sink::Host(fills), buffers));
        };
        let queue = CopyStream::new(device)?;
        // Before what routes need on the device, which a route that chooses can do without.
        let source = match &options.allocator {
            Some(allocator) => ArenaSource::Lent(allocator.clone()),
            None => match self.bound.filter(|_| !self.is_inline) {
                // Tensors are dropped while others are still to come.
                Some(bound) => ArenaSource::Reused(ReusedMemory::new(device, bound / KEPT_PART)),
                None => ArenaSource::Own,
            },
        };
        let arenas = device_arenas::allocate(plan, &queue, &source, (self.admitted, self.most_bytes))?;
        opening.open_others(plan, room)?;
        let scratch = scratch(&queue, room, opening, slots)?;
        let arenas = DeviceArenas::new(queue, plan, arenas, source, scratch, &room.needs, self.is_inline)?;
        let buffers = plan.extents().iter().map(|_| Buffer::SLOT);
        Ok((Sink::Device(Box::new(arenas)), buffers.collect()))
    }
}

/// What kernels need beside the slots. Where the device has too little memory, the load does without routes that need more of it, and
/// then with fewer slots.
fn scratch(
    queue: &CopyStream,
    room: &Room<'_>,
    opening: &mut Opening<'_>,
    slots: &Slots,
) -> Result<Option<ScratchMemory>> {
    let mut count = slots.count();
    loop {
        match ScratchMemory::new(queue, opening.slot_counts(count), &room.needs) {
            Err(mut error @ Error::MemoryBudget { .. }) => {
                if opening.drop_one_of_device(&error) {
                    continue;
                }
                if count <= 1 {
                    if let Error::MemoryBudget { fix, .. } = &mut error {
                        *fix = opening.how_to_need_less().into();
                    }
                    return Err(error);
                }
                let rest = count.div_ceil(2);
                slots.withdraw(count - rest);
                count = rest;
            }
            scratch => {
                let few = (count < slots.count()).then(|| {
                    format!(
                        "conversions use {count} of {} slots: the device has no memory for more",
                        slots.count()
                    )
                });
                return scratch.map(|scratch| scratch.map(|scratch| scratch.with_note(few)));
            }
        }
    }
}

/// For each arena its fill, for each extent its buffer.
fn fills_and_buffers(plan: &Plan, arenas: Vec<Arc<Arena>>) -> Result<(Vec<Fill>, Vec<Buffer>)> {
    let mut fills = Vec::with_capacity(arenas.len());
    let mut regions: Vec<std::vec::IntoIter<WriteRegion>> = Vec::with_capacity(arenas.len());
    for (arena, ArenaPlaces { tensors, writes }) in arenas.into_iter().zip(arena_places(plan)) {
        let (fill, arena_regions) = Fill::new(arena, tensors, &writes)?;
        fills.push(fill);
        regions.push(arena_regions.into_iter());
    }
    // The regions come back in the order in which they were asked for above.
    let missing = || Error::Internal("an extent has no place in its arena".into());
    let mut next = |arena: usize| regions[arena].next().ok_or_else(missing);
    let buffers = plan
        .extents()
        .iter()
        .map(|extent| match extent.target {
            Target::InPlace { arena, .. } => Ok(Buffer::InPlace(next(arena)?)),
            Target::Staged => {
                let pieces: Result<_> =
                    plan.pieces(extent, extent.read).map(|piece| next(piece.arena)).collect();
                Ok(Buffer::Staged { slot: None, pieces: pieces? })
            }
        })
        .collect::<Result<_>>()?;
    Ok((fills, buffers))
}
