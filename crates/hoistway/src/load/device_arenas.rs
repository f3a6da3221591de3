//! The arenas of a load on a device, and the way there: each read that ends starts its own copies.
#![allow(unsafe_code)]

use super::DeviceAllocator;
use crate::{
    ByteRange, Error, Result,
    device::{CopyStream, ReusedMemory},
    memory::{DeviceArena, DeviceBlock, DeviceFill, Slot},
    plan::{ArenaPlaces, Plan, Target, Transfer, arena_places},
    transfer::{DeviceLine, InCopy, Needs, ScratchMemory},
};
use std::{
    ops::Range,
    sync::{Arc, PoisonError, RwLock},
};

/// If less than this is left on a device, all arenas are allocated before routes take memory there: those take 128 MiB for slots, and
/// as much for conversions.
const SCARCE_BYTES: u64 = 512 << 20;

/// A load of up to so many bytes learns by allocating whether a device has room for it: to ask takes as long.
const SMALL_BYTES: u64 = 64 << 20;

/// Where arenas have their memory from.
pub(super) enum ArenaSource {
    Own,
    /// Of arenas before them, as far as those have gone.
    Reused(Arc<ReusedMemory>),
    Lent(DeviceAllocator),
}

/// The first arenas of a plan on a device, once it is clear that it has room for as many as there will be at once:
/// those that the first `extents` go to, or all if memory is scarce.
pub(super) fn allocate(
    plan: &Plan,
    queue: &CopyStream,
    source: &ArenaSource,
    (extents, most_bytes): (usize, u64),
) -> Result<Vec<Arc<DeviceArena>>> {
    let mut count = arenas_of(plan, extents);
    if matches!(source, ArenaSource::Lent(_)) {
        return allocate_some(plan, queue, source, 0..count);
    }
    let (device, all) = (queue.device(), plan.arenas().len());
    let needed = plan.arena_bytes().min(most_bytes);
    let check = |available: u64| -> Result<u64> {
        let is_enough = needed <= available;
        is_enough.then_some(available).ok_or_else(|| device.too_little_memory(needed, available).into())
    };
    if count == all && needed <= SMALL_BYTES {
        let allocated = allocate_some(plan, queue, source, 0..all);
        // Says how much the whole load needs, where that is too much, and the device tells what it has.
        if matches!(allocated, Err(Error::MemoryBudget { .. }))
            && let Ok((available, _)) = device.memory()
        {
            check(available)?;
        }
        return allocated;
    }
    let available = device.free_bytes_for(needed)?;
    // What routes need must not take the memory of tensors that is allocated later.
    if check(available)? - needed < SCARCE_BYTES && needed == plan.arena_bytes() {
        count = all;
    }
    allocate_some(plan, queue, source, 0..count)
}

/// How many arenas, from the first on, the first `extents` go to.
fn arenas_of(plan: &Plan, extents: usize) -> usize {
    let Some(first) = plan.extents().get(..extents) else { return plan.arenas().len() };
    let pieces = first.iter().flat_map(|extent| plan.pieces(extent, extent.read));
    pieces.map(|piece| piece.arena + 1).max().unwrap_or(0)
}

fn allocate_some(
    plan: &Plan,
    queue: &CopyStream,
    source: &ArenaSource,
    range: Range<usize>,
) -> Result<Vec<Arc<DeviceArena>>> {
    let lens = &plan.arenas()[range];
    let ArenaSource::Lent(allocator) = source else {
        let mut arenas = Vec::with_capacity(lens.len());
        let mut allocate_rest = || {
            for &len in &lens[arenas.len()..] {
                arenas.push(match source {
                    ArenaSource::Reused(reused) => DeviceArena::reused(queue, len, reused)?,
                    _ => DeviceArena::allocate(queue, len)?,
                });
            }
            Ok(())
        };
        // What waits for the device does so in no turn: to make room for the rest, and to free these after an error.
        let device = queue.device();
        device.with_room(|| device.make_long_calls(&mut allocate_rest))?;
        return Ok(arenas);
    };
    let arenas = lens.iter().map(|&len| {
        let memory = allocator.allocate(len)?;
        // SAFETY: the maker of the allocator has promised that the stream is one of the device's.
        unsafe { queue.wait_for(memory.stream)? };
        Ok(DeviceArena::lent(queue, memory))
    });
    arenas.collect()
}

/// Fills the arenas of one plan on one device.
pub(super) struct DeviceArenas {
    /// Dropped before what its copies use.
    pub(super) line: DeviceLine,
    fills: Vec<DeviceFill>,
    /// Of the arenas that there are so far, or were.
    addresses: RwLock<Arc<[u64]>>,
    source: ArenaSource,
    /// For each extent, how many arenas it and those before it go to. Empty if all arenas were there from the start.
    arenas_of: Box<[usize]>,
}

impl DeviceArenas {
    /// Lays the arenas of `plan` out on the device of `queue`. `scratch` is for the slots that extents come in.
    pub(super) fn new(
        queue: CopyStream,
        plan: &Plan,
        arenas: Vec<Arc<DeviceArena>>,
        source: ArenaSource,
        scratch: Option<ScratchMemory>,
        needs: &Needs,
        is_inline: bool,
    ) -> Result<Self> {
        for extent in plan.extents() {
            if extent.target != Target::Staged {
                return Err(Error::Internal("a plan for a device reads in place".into()));
            }
            check_inside(&plan.transfers(extent), plan, needs.slot_bytes)?;
        }
        let places = arena_places(plan).into_iter().zip(plan.arenas());
        let fills =
            places.map(|(ArenaPlaces { tensors, writes }, &len)| DeviceFill::new(len, tensors, &writes));
        let fills = fills.collect::<Result<Vec<_>>>()?;
        let addresses = arenas.iter().map(|arena| arena.address()).collect();
        let is_complete = arenas.len() == plan.arenas().len();
        let source = match source {
            // No arena comes after these.
            ArenaSource::Reused(_) if is_complete => ArenaSource::Own,
            source => source,
        };
        for (fill, arena) in fills.iter().zip(arenas) {
            fill.set_arena(arena);
        }
        let mut most = 0;
        let extents = plan.extents().iter().take(if is_complete { 0 } else { usize::MAX });
        let arenas_of = extents.map(|extent| {
            let pieces = plan.pieces(extent, extent.read);
            most = pieces.map(|piece| piece.arena + 1).max().unwrap_or(0).max(most);
            most
        });
        let arenas_of = arenas_of.collect();
        let line = DeviceLine::new(queue, scratch, is_inline)?;
        Ok(Self { line, fills, addresses: RwLock::new(addresses), source, arenas_of })
    }

    /// Allocates what the first `extents` of `plan` go to, as far as it is not there. On the thread of the load's owner.
    pub(super) fn admit(&self, plan: &Plan, extents: usize) -> Result<()> {
        let Some(last) = extents.min(self.arenas_of.len()).checked_sub(1) else { return Ok(()) };
        let there = self.addresses().len();
        let needed = self.arenas_of[last];
        if needed > there {
            let is_lent = matches!(self.source, ArenaSource::Lent(_));
            let allocate = |queue: &_| allocate_some(plan, queue, &self.source, there..needed);
            let arenas = self.line.allocate(is_lent, allocate)?;
            let before = self.addresses();
            let addresses =
                before.iter().copied().chain(arenas.iter().map(|arena| arena.address())).collect();
            *self.addresses.write().unwrap_or_else(PoisonError::into_inner) = addresses;
            for (fill, arena) in self.fills[there..].iter().zip(arenas) {
                fill.set_arena(arena);
            }
            if needed == plan.arenas().len() {
                self.keep_no_more();
            }
        }
        Ok(())
    }

    /// What is kept of memory for the next arenas, if any is. A thread serves it.
    pub(super) fn reused(&self) -> Option<&Arc<ReusedMemory>> {
        match &self.source {
            ArenaSource::Reused(reused) => Some(reused),
            _ => None,
        }
    }

    /// No arena comes after those that there are.
    pub(super) fn keep_no_more(&self) {
        self.reused().into_iter().for_each(|reused| reused.close());
    }

    /// A copy, so that no lock is held while the device works.
    fn addresses(&self) -> Arc<[u64]> {
        self.addresses.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Copies an extent of `plan`, all of whose bytes are in `slot`.
    pub(super) fn send(&self, plan: &Plan, slot: Slot, read: InCopy) {
        let transfers = plan.transfers(&plan.extents()[read.part.item]);
        let mut arenas: Vec<usize> = transfers.iter().map(Transfer::arena).collect();
        arenas.sort_unstable();
        arenas.dedup();
        let arenas = arenas.into_iter().filter_map(|arena| self.fills[arena].arena()).collect();
        // SAFETY: the slot is full. `DeviceFill` has checked that no two extents write the same place, `check_inside` has seen each
        // transfer, and tensors are posted once `complete` has got the extent.
        unsafe { self.line.send(slot, transfers, (self.addresses(), arenas), read) }
    }

    /// All bytes of an extent are in their places. Returns the tensors that became whole, by their positions.
    pub(super) fn complete(&self, plan: &Plan, extent: usize) -> Vec<(usize, DeviceBlock)> {
        let extent = &plan.extents()[extent];
        let mut blocks = Vec::new();
        for piece in plan.pieces(extent, extent.read) {
            self.fills[piece.arena].complete(piece.place, |position, block| blocks.push((position, block)));
        }
        blocks
    }
}

/// Whether transfers stay inside slot and arenas: what the device does with them is not checked later.
fn check_inside(transfers: &[Transfer], plan: &Plan, slot_bytes: u64) -> Result<()> {
    for transfer in transfers {
        let (from, arena, to) = match *transfer {
            Transfer::Linear { source, arena, destination, len } => {
                (ByteRange::at(source, len), arena, ByteRange::at(destination, len))
            }
            Transfer::Pitched { source, pitch, arena, destination, width, height } => {
                let span =
                    pitch.checked_mul(height.saturating_sub(1)).and_then(|rows| rows.checked_add(width));
                let len = width.checked_mul(height);
                (
                    span.and_then(|span| ByteRange::at(source, span)),
                    arena,
                    len.and_then(|len| ByteRange::at(destination, len)),
                )
            }
            Transfer::Converted { conversion, source, arena, destination, elements } => {
                let bytes = |of_one: u64| elements.checked_mul(of_one);
                (
                    bytes(conversion.from().bytes()).and_then(|len| ByteRange::at(source, len)),
                    arena,
                    bytes(conversion.to().bytes()).and_then(|len| ByteRange::at(destination, len)),
                )
            }
        };
        let fits = |range: Option<ByteRange>, len: u64| range.is_some_and(|range| range.end() <= len);
        if !fits(from, slot_bytes) || !fits(to, plan.arenas()[arena]) {
            return Err(Error::Internal(format!("{transfer:?} leaves its slot or its arena")));
        }
    }
    Ok(())
}
