//! From staging slots to a device: each read that ends starts its own copies, and frees its slot when they are done.
#![allow(unsafe_code)]

use super::order::{Order, Reads};
use crate::{
    Alignment, ByteRange, Error, Result,
    device::{CopyStream, Device, DeviceMemory, InUse, Scratch},
    handoff::Handoff,
    memory::{DeviceArena, DeviceBlock, DeviceFill, LentMemory, Slot, SlotKind, Slots},
    plan::{ArenaPlaces, Plan, Target, Transfer, arena_places},
    report::Account,
    source::Source,
};
use hoistway_io::executor::Ticket;
use std::{
    ops::Range,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Gives so many bytes of a device, on a stream of it that it names.
pub(crate) type Lender = Arc<dyn Fn(u64) -> Result<LentMemory> + Send + Sync>;

/// The first arenas of a plan on a device, once it is clear that it has room for as many as there will be at once:
/// those that the first `extents` go to.
pub(crate) fn allocate(
    plan: &Plan,
    queue: &CopyStream,
    lent: Option<&Lender>,
    (extents, most_bytes): (usize, u64),
) -> Result<Vec<Arc<DeviceArena>>> {
    if lent.is_none() {
        let device = queue.device();
        let (available, _) = device.memory()?;
        let needed = plan.arena_bytes().min(most_bytes);
        if needed > available {
            return Err(device.too_little_memory(needed, available).into());
        }
    }
    allocate_some(plan, queue, lent, 0..arenas_of(plan, extents))
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
    lent: Option<&Lender>,
    range: Range<usize>,
) -> Result<Vec<Arc<DeviceArena>>> {
    let arenas = plan.arenas()[range].iter().map(|&len| match lent {
        None => DeviceArena::allocate(queue, len),
        Some(lend) => {
            let memory = lend(len)?;
            // SAFETY: the maker of the allocator has promised that the stream is one of the device's.
            unsafe { queue.wait_for(memory.stream)? };
            Ok(DeviceArena::lent(queue, memory))
        }
    });
    arenas.collect()
}

/// Fills the arenas of one plan on one device.
pub(crate) struct Delivery {
    /// Copies that were queued, oldest first. Dropped before everything that they use.
    queued: Handoff<Queued>,
    fills: Vec<DeviceFill>,
    /// Of the arenas that there are so far, or were.
    addresses: RwLock<Vec<u64>>,
    lent: Option<Lender>,
    /// For each extent, how many arenas it and those before it go to. Empty if all arenas were there from the start.
    arenas_of: Box<[usize]>,
    scratch: Option<Arc<ScratchMemory>>,
    queue: CopyStream,
    /// Whether the thread that ends a read also waits for its copies.
    is_inline: bool,
    copies: AtomicU64,
    waited: AtomicU64,
}

/// Copies of one slot. The slot is free again when they are done.
#[derive(Debug)]
struct Queued {
    extent: usize,
    /// Whose own pages are copied, if they are not those of a slot.
    shown: Option<Arc<dyn Source>>,
    copying: InUse<Copied>,
    account: Account,
    // After the slot, which is free when the read ends.
    ticket: Ticket<Reads>,
}

/// What the copies of one slot use. Fields are dropped in this order: the next user of the slot may need the table.
#[derive(Debug)]
struct Copied {
    table: Option<Slot>,
    slot: Slot,
    _scratch: Option<Arc<ScratchMemory>>,
    _arenas: Vec<Arc<DeviceArena>>,
}

/// Memory beside the slots, for what kernels work on.
#[derive(Debug)]
struct ScratchMemory {
    /// A table for each slot, those of slots in host memory first, whose bytes come again after all tables.
    allocation: DeviceMemory,
    table_bytes: u64,
    data_bytes: u64,
    /// Pinned tables, as many as slots in host memory. The one that a copy takes says which part of the allocation it has.
    host_tables: Slots,
    /// As many as slots on the device.
    device_tables: Slots,
}

/// What a plan needs for each slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    pub(crate) slot_bytes: u64,
    /// For the table of what kernels work on; 0 if there is nothing.
    pub(crate) table_bytes: u64,
}

/// How many slots of which kind extents come in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SlotCounts {
    /// In host memory.
    pub(crate) host: usize,
    /// On the device.
    pub(crate) device: usize,
}

impl Needs {
    /// # Errors
    /// [`Error::DeviceUnavailable`] if the device cannot do what the plan wants.
    pub(crate) fn of(plan: &Plan, device: &Device, slot_bytes: u64) -> Result<Self> {
        let mut table_bytes = 0;
        for extent in plan.extents() {
            table_bytes = device.table_bytes(&plan.transfers(extent))?.max(table_bytes);
        }
        Ok(Self { slot_bytes, table_bytes: table_bytes.next_multiple_of(Alignment::BLOCK.bytes()) })
    }

    /// How many slots `bytes` of memory are enough for; at least one.
    pub(crate) fn slots_in(&self, bytes: u64) -> usize {
        usize::try_from(bytes / (self.slot_bytes + self.table_bytes).max(1)).unwrap_or(usize::MAX).max(1)
    }
}

impl Delivery {
    /// Lays the arenas of `plan` out on the device of `queue`. Extents come in as many slots as `counts` says.
    pub(crate) fn new(
        queue: CopyStream,
        plan: &Plan,
        arenas: Vec<Arc<DeviceArena>>,
        lent: Option<Lender>,
        counts: SlotCounts,
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
        let scratch = match needs.table_bytes {
            0 => None,
            _ => Some(Arc::new(ScratchMemory::new(&queue, counts, needs)?)),
        };
        Ok(Self {
            queued: Handoff::default(),
            fills,
            addresses: RwLock::new(addresses),
            lent,
            arenas_of,
            scratch,
            queue,
            is_inline,
            copies: AtomicU64::new(0),
            waited: AtomicU64::new(0),
        })
    }

    /// Allocates what the first `extents` of `plan` go to, as far as it is not there. On the thread of the load's owner.
    pub(crate) fn admit(&self, plan: &Plan, extents: usize) -> Result<()> {
        let Some(last) = extents.min(self.arenas_of.len()).checked_sub(1) else { return Ok(()) };
        let there = self.addresses().len();
        let needed = self.arenas_of[last];
        if needed > there {
            let arenas = allocate_some(plan, &self.queue, self.lent.as_ref(), there..needed)?;
            let mut addresses = self.addresses.write().unwrap_or_else(PoisonError::into_inner);
            for (fill, arena) in self.fills[there..].iter().zip(arenas) {
                addresses.push(arena.address());
                fill.set_arena(arena);
            }
        }
        Ok(())
    }

    fn addresses(&self) -> RwLockReadGuard<'_, Vec<u64>> {
        self.addresses.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of pinned memory beside the slots.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.scratch
            .as_ref()
            .map_or(0, |scratch| scratch.host_tables.host_bytes() + scratch.device_tables.host_bytes())
    }

    /// Bytes of the device beside arenas and slots.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.scratch.as_ref().map_or(0, |scratch| scratch.allocation.len())
    }

    /// Copies and kernels that were queued.
    pub(crate) fn copies(&self) -> u64 {
        self.copies.load(Ordering::Relaxed)
    }

    /// How long a thread waited for copies.
    pub(crate) fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    /// Queues the copies of an extent, all of whose bytes are in `slot`. Its read ends when they are done.
    pub(crate) fn send(
        &self,
        (order, plan): (&dyn Order, &Plan),
        extent: usize,
        slot: Slot,
        source: Arc<dyn Source>,
        account: Account,
        ticket: Ticket<Reads>,
    ) {
        let shown = slot.is_view().then_some(source);
        let copying = match self.copy(plan, extent, slot) {
            Ok(copying) => copying,
            Err(error) => return order.fail_with(ticket, account, error),
        };
        let queued = Queued { extent, shown, copying, account, ticket };
        if self.is_inline {
            return self.finish((order, plan), queued);
        }
        self.queued.send(queued);
    }

    fn copy(&self, plan: &Plan, extent: usize, slot: Slot) -> Result<InUse<Copied>> {
        let transfers = plan.transfers(&plan.extents()[extent]);
        let table = match &self.scratch {
            Some(scratch) if self.queue.device().table_bytes(&transfers)? > 0 => {
                Some(scratch.take_table(&slot)?)
            }
            _ => None,
        };
        let mut arenas: Vec<usize> = transfers.iter().map(Transfer::arena).collect();
        arenas.sort_unstable();
        arenas.dedup();
        let arenas = arenas.into_iter().filter_map(|arena| self.fills[arena].arena()).collect();
        let mut copied = Copied { table, slot, _scratch: self.scratch.clone(), _arenas: arenas };
        let scratch = match (&self.scratch, &mut copied.table) {
            (Some(scratch), Some(table)) => Some(scratch.beside(&copied.slot, table)),
            _ => None,
        };
        let source = copied.slot.source();
        let queued = copied.slot.order(&self.queue);
        // SAFETY: the slot is full. What the work uses is kept until it is over. Each scratch belongs to the owner of its
        // table, and `DeviceFill` has checked that no two extents write the same place. `check_inside` has seen each transfer.
        let queued = queued
            .and_then(|()| unsafe { self.queue.transfer(source, &transfers, &self.addresses(), scratch) });
        let queued = queued.map(|operations| _ = self.copies.fetch_add(operations, Ordering::Relaxed));
        Ok(self.queue.keep(copied, queued)?)
    }

    /// Waits for copies, one after the other, until the order is over.
    pub(crate) fn serve(&self, order: &dyn Order, plan: &Plan) {
        while let Some(next) = self.queued.next() {
            self.finish((order, plan), next);
        }
    }

    /// The order is over: nothing more is copied.
    pub(crate) fn stop(&self) {
        self.queued.close();
    }

    /// Waits for the copies of an extent, which ends its read.
    fn finish(
        &self,
        (order, plan): (&dyn Order, &Plan),
        Queued { extent, shown, copying, account, ticket }: Queued,
    ) {
        let waited = self.wait(&copying);
        drop(copying);
        // Pages of a file may have changed until they were copied, which its read does not know.
        let unchanged = || shown.as_ref().map_or(Ok(()), |source| order.check_source(extent, &**source));
        if let Err(error) = waited.and_then(|()| unchanged()) {
            return order.fail_with(ticket, account, error);
        }
        let read = &plan.extents()[extent];
        let mut blocks: Vec<(usize, DeviceBlock)> = Vec::new();
        for piece in plan.pieces(read, read.read) {
            self.fills[piece.arena].complete(piece.place, |position, block| blocks.push((position, block)));
        }
        order.copied(extent, shown.is_none(), account, blocks);
        ticket.end(Ok(()));
    }

    fn wait(&self, copying: &InUse<Copied>) -> Result<()> {
        if !copying.is_over() {
            let since = Instant::now();
            copying.wait().result()?;
            let nanoseconds = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.waited.fetch_add(nanoseconds, Ordering::Relaxed);
        }
        // Also says whether it went well.
        Ok(copying.wait().result()?)
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.queued.close();
        while self.queued.next().is_some() {}
        // What copies of unknown fate use is parked.
        if self.scratch.take().and_then(Arc::into_inner).is_some() {
            // It is freed in the order of the stream. The next load looks how much memory is free, so the device has it
            // back before this load has ended. Copies are done, so that this waits for nothing else.
            if let Err(error) = self.queue.synchronize().result() {
                tracing::warn!(%error, "memory of a load may be freed later");
            }
        }
    }
}

impl ScratchMemory {
    fn new(
        queue: &CopyStream,
        SlotCounts { host, device }: SlotCounts,
        &Needs { slot_bytes, table_bytes }: &Needs,
    ) -> Result<Self> {
        let data_bytes = slot_bytes.next_multiple_of(256);
        let len = table_bytes
            .saturating_mul((host + device) as u64)
            .saturating_add(data_bytes.saturating_mul(host as u64));
        let allocation = queue.allocate_scratch(len)?;
        let kind = SlotKind::Pinned(queue.device(), queue.device().info().numa_node);
        let host_tables = Slots::new(host, table_bytes as usize, kind)?;
        let device_tables = Slots::new(device, table_bytes as usize, kind)?;
        Ok(Self { allocation, table_bytes, data_bytes, host_tables, device_tables })
    }

    /// A pinned table for the copies of a slot. There is one for each.
    fn take_table(&self, slot: &Slot) -> Result<Slot> {
        let none = || Error::Internal("there are more slots in use than tables".into());
        let tables = if slot.device_address().is_some() { &self.device_tables } else { &self.host_tables };
        let table = tables.try_take().ok_or_else(none)?;
        table.pin()?;
        Ok(table)
    }

    /// What lies beside a slot that has this table.
    fn beside<'a>(&self, slot: &Slot, table: &'a mut Slot) -> Scratch<'a> {
        let on_device = slot.device_address().is_some();
        let host = self.host_tables.count();
        let number = if on_device { host + table.index() } else { table.index() };
        let start = self.allocation.address();
        let tables_end = start + (host + self.device_tables.count()) as u64 * self.table_bytes;
        Scratch {
            data: tables_end + if on_device { 0 } else { number as u64 * self.data_bytes },
            table: start + number as u64 * self.table_bytes,
            host_table: table.as_mut_slice(),
        }
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
