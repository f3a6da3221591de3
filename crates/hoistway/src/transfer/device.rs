//! From slots to a device: copies that are queued as reads end, and what waits for them.
#![allow(unsafe_code)]

use super::order::InCopy;
use crate::{
    Alignment, Error, Result,
    device::{CopyStream, Device, DeviceMemory, InUse, Scratch},
    handoff::Handoff,
    memory::{DeviceArena, Slot, SlotKind, Slots},
    plan::{Plan, Transfer},
};
use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Copies to one device on one stream.
#[derive(Debug)]
pub(crate) struct DeviceLine {
    /// Copies that were queued, oldest first. Dropped before everything that they use.
    sent: Arc<Handoff<Sent>>,
    scratch: Option<Arc<ScratchMemory>>,
    queue: CopyStream,
    /// Whether the thread that queues copies also waits for them.
    is_inline: bool,
    copies: AtomicU64,
    waited: Arc<AtomicU64>,
}

/// Copies of one slot. The slot is free again when they are done.
#[derive(Debug)]
struct Sent {
    copying: InUse<Copied>,
    // After the slot, which is free when a read ends.
    read: InCopy,
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

/// Waits for the copies of a line.
pub(crate) struct Waiter {
    sent: Arc<Handoff<Sent>>,
    waited: Arc<AtomicU64>,
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
        if table_bytes > 0 {
            device.prepare_kernels();
        }
        Ok(Self { slot_bytes, table_bytes: table_bytes.next_multiple_of(Alignment::BLOCK.bytes()) })
    }

    /// How many slots `bytes` of memory are enough for; at least one.
    pub(crate) fn slots_in(&self, bytes: u64) -> usize {
        usize::try_from(bytes / (self.slot_bytes + self.table_bytes).max(1)).unwrap_or(usize::MAX).max(1)
    }
}

impl DeviceLine {
    /// A line of copies from so many slots as `counts` says, with what the plan needs for each.
    pub(crate) fn new(queue: CopyStream, counts: SlotCounts, needs: &Needs, is_inline: bool) -> Result<Self> {
        let scratch = match needs.table_bytes {
            0 => None,
            _ => Some(Arc::new(ScratchMemory::new(&queue, counts, needs)?)),
        };
        let (sent, copies, waited) = (Arc::default(), AtomicU64::new(0), Arc::default());
        Ok(Self { sent, scratch, queue, is_inline, copies, waited })
    }

    /// The stream of the copies.
    pub(crate) fn queue(&self) -> &CopyStream {
        &self.queue
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

    /// What a report says of how the kernels were loaded that it needs, if anything.
    pub(crate) fn kernels_note(&self) -> Option<String> {
        self.scratch.as_ref().and_then(|_| self.queue.device().kernels_note())
    }

    /// Copies and kernels that were queued.
    pub(crate) fn copies(&self) -> u64 {
        self.copies.load(Ordering::Relaxed)
    }

    /// How long a thread waited for copies.
    pub(crate) fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    /// Copies the bytes of a slot to arenas at `addresses`, and ends the read then: at once, or by the line's [`Waiter`]. `arenas` are
    /// kept until then.
    ///
    /// # Safety
    /// The slot is full. The transfers stay inside of it and of the arenas, and until the read ends nothing else uses the bytes that
    /// they write.
    pub(crate) unsafe fn send(
        &self,
        slot: Slot,
        transfers: &[Transfer],
        (addresses, arenas): (&[u64], Vec<Arc<DeviceArena>>),
        read: InCopy,
    ) {
        // SAFETY: the same contract.
        match unsafe { self.copy(slot, transfers, addresses, arenas) } {
            Err(error) => read.end(Err(error)),
            Ok(copying) if self.is_inline => {
                let result = wait(&copying, &self.waited);
                drop(copying);
                read.end(result);
            }
            Ok(copying) => self.sent.send(Sent { copying, read }),
        }
    }

    /// # Safety
    /// That of [`DeviceLine::send`], until the result is over.
    unsafe fn copy(
        &self,
        slot: Slot,
        transfers: &[Transfer],
        addresses: &[u64],
        arenas: Vec<Arc<DeviceArena>>,
    ) -> Result<InUse<Copied>> {
        let table = match &self.scratch {
            Some(scratch) if self.queue.device().table_bytes(transfers)? > 0 => {
                Some(scratch.take_table(&slot)?)
            }
            _ => None,
        };
        let mut copied = Copied { table, slot, _scratch: self.scratch.clone(), _arenas: arenas };
        let source = copied.slot.source();
        let queued = copied.slot.order(&self.queue).and_then(|()| {
            // SAFETY: by the contract. What the work uses is kept until it is over. Each scratch belongs to the owner of its table.
            let transfer = |transfers: &[Transfer], scratch: Option<Scratch<'_>>| unsafe {
                self.queue.transfer(source, transfers, addresses, scratch)
            };
            match (&self.scratch, &mut copied.table) {
                (Some(scratch), Some(table)) => {
                    transfer(transfers, Some(scratch.beside(&copied.slot, table)))
                }
                (Some(_), None) => transfer(transfers, None),
                // Few enough at a time that no kernel is needed for them.
                (None, _) => transfers.chunks(CopyStream::MAX_COPIES).map(|few| transfer(few, None)).sum(),
            }
        });
        let queued = queued.map(|operations| _ = self.copies.fetch_add(operations, Ordering::Relaxed));
        Ok(self.queue.keep(copied, queued)?)
    }

    /// What a thread waits for the copies with.
    pub(crate) fn waiter(&self) -> Waiter {
        Waiter { sent: self.sent.clone(), waited: self.waited.clone() }
    }

    /// Nothing is sent any more.
    pub(crate) fn close(&self) {
        self.sent.close();
    }
}

impl Waiter {
    /// Waits for copies, one after the other, until the line is closed or gone and none is left, and ends
    /// their reads. Calls `then` after each with the time that was waited in all.
    pub(crate) fn serve(&self, mut then: impl FnMut(Duration)) {
        while let Some(Sent { copying, read }) = self.sent.next() {
            let result = wait(&copying, &self.waited);
            drop(copying);
            read.end(result);
            then(Duration::from_nanos(self.waited.load(Ordering::Relaxed)));
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        // After a panic, copies are left. Each has its order, which has this line: neither would go.
        self.sent.close();
        while let Some(left) = self.sent.next() {
            drop(left);
        }
    }
}

fn wait(copying: &InUse<Copied>, waited: &AtomicU64) -> Result<()> {
    let since = Instant::now();
    let result = copying.wait().result();
    let nanoseconds = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
    waited.fetch_add(nanoseconds, Ordering::Relaxed);
    Ok(result?)
}

impl Drop for DeviceLine {
    fn drop(&mut self) {
        self.sent.close();
        // Those that no thread waits for.
        drop(mem::take(&mut self.sent));
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
