//! From slots to a device: copies that are queued as reads end, and what waits for them.
#![allow(unsafe_code)]

use super::order::InCopy;
use crate::{
    Alignment, Error, Result,
    device::{CopyStream, Device, DeviceMemory, Fence, InUse, Scratch},
    handoff::Handoff,
    memory::{DeviceArena, Slot, SlotKind, Slots},
    plan::{Plan, Transfer},
};
use hoistway_device::{Ticket, drop_aside};
use std::{
    collections::VecDeque,
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::Sender,
    },
    time::{Duration, Instant},
};
use tracing::{Span, trace_span};

/// Copies of fewer bytes are short: the default chunk is not.
const SHORT_BYTES: u64 = 4 << 20;

/// Copies to one device, on one stream, or on two in turn where kernels run: the bus carries the bytes of a slot while a kernel works
/// on those of the one before.
#[derive(Debug)]
pub(crate) struct DeviceLine {
    /// Copies that were queued, oldest first. Dropped before everything that they use.
    sent: Arc<Handoff<Sent>>,
    scratch: Option<Arc<ScratchMemory>>,
    queue: Arc<CopyStream>,
    /// The other stream, and how many slots were sent.
    second: Option<(Arc<CopyStream>, AtomicU64)>,
    /// Whether the thread that queues copies also waits for them.
    is_inline: bool,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Copies and kernels that were queued.
    copies: AtomicU64,
    /// Nanoseconds that a thread waited for copies.
    waited: AtomicU64,
    /// Slots that the waiter has not ended.
    with_waiter: AtomicU64,
}

/// What the waiter is given.
#[derive(Debug)]
enum Sent {
    Queued(Copying),
    Failed(Box<Failed>),
    /// The waiter queues it with others: to queue copies and to wait for them takes longer than the copies of a short slot.
    Unqueued(Unqueued),
}

/// Slots that are copied together, and the reads that end then. The slots are free again when the copies are done.
#[derive(Debug)]
struct Copying {
    slots: InUse<Vec<Copied>>,
    // After the slots, which are free when a read ends.
    reads: Vec<InCopy>,
    /// From when copies may be queued to their end.
    span: Span,
}

/// A slot whose copies are yet to be queued.
#[derive(Debug)]
struct Unqueued {
    queue: Arc<CopyStream>,
    copied: Copied,
    transfers: Vec<Transfer>,
    addresses: Arc<[u64]>,
    read: InCopy,
    span: Span,
}

/// A slot whose copies could not be queued, or not all of them, and its read. When it is dropped, it waits for those that were queued, and
/// ends the read.
#[derive(Debug)]
struct Failed {
    queue: Arc<CopyStream>,
    rest: Option<(Copied, hoistway_device::Error, InCopy)>,
    _span: Span,
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
pub(crate) struct ScratchMemory {
    /// A table for each slot, those of slots in host memory first, whose bytes come again after all tables.
    allocation: DeviceMemory,
    table_bytes: u64,
    data_bytes: u64,
    /// Pinned tables, as many as slots in host memory. The one that a copy takes says which part of the allocation it has.
    host_tables: Slots,
    /// As many as slots on the device.
    device_tables: Slots,
    note: Option<String>,
}

/// Waits for the copies of a line.
pub(crate) struct Waiter {
    sent: Arc<Handoff<Sent>>,
    counts: Arc<Counts>,
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
    /// A line of copies from slots, with what the plan needs beside each. They come after what `queue` waits for.
    pub(crate) fn new(queue: CopyStream, scratch: Option<ScratchMemory>, is_inline: bool) -> Result<Self> {
        let scratch = scratch.map(Arc::new);
        let second = match scratch.is_some() && !is_inline {
            true => another(&queue),
            false => None,
        };
        let (sent, queue, counts) = (Arc::default(), Arc::new(queue), Arc::default());
        let line = Self { sent, scratch, queue, second, is_inline, counts };
        line.bring_up()?;
        Ok(line)
    }

    /// The device of the copies.
    pub(crate) fn device(&self) -> &Arc<Device> {
        self.queue.device()
    }

    /// Has later copies come after what a fence stands for.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(crate) fn come_after(&self, fence: &Fence) -> Result<()> {
        let second = self.second.iter().map(|(second, _)| second);
        [&self.queue].into_iter().chain(second).try_for_each(|queue| Ok(fence.order(queue)?))
    }

    /// Allocates what is copied to. If that is ordered, later copies come after what `allocate` has the stream wait for.
    ///
    /// # Errors
    /// Those of `allocate`, and [`Error::Device`].
    pub(crate) fn allocate<T>(
        &self,
        is_ordered: bool,
        allocate: impl FnOnce(&CopyStream) -> Result<T>,
    ) -> Result<T> {
        let allocated = allocate(&self.queue)?;
        if is_ordered {
            self.bring_up()?;
        }
        Ok(allocated)
    }

    /// Has all copies come after what the first stream waits for, such as memory that was allocated in its order.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn bring_up(&self) -> Result<()> {
        self.second.iter().try_for_each(|(second, _)| Ok(second.follow(&self.queue)?))
    }

    /// The stream of the next copies.
    fn next_queue(&self) -> &Arc<CopyStream> {
        match &self.second {
            Some((second, sent)) if sent.fetch_add(1, Ordering::Relaxed) % 2 == 1 => second,
            _ => &self.queue,
        }
    }

    /// Bytes of pinned memory beside the slots.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.slots().map(Slots::host_bytes).sum()
    }

    /// Pinned memory beside the slots.
    pub(crate) fn slots(&self) -> impl Iterator<Item = &Slots> {
        self.scratch.iter().flat_map(|scratch| [&scratch.host_tables, &scratch.device_tables])
    }

    /// Bytes of the device beside arenas and slots.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.scratch.as_ref().map_or(0, |scratch| scratch.allocation.len())
    }

    /// What a report says of how the kernels were loaded that it needs, if anything.
    pub(crate) fn kernels_note(&self) -> Option<String> {
        self.scratch.as_ref().and_then(|_| self.queue.device().kernels_note())
    }

    /// What a report says of the memory beside the slots, if anything.
    pub(crate) fn scratch_note(&self) -> Option<String> {
        self.scratch.as_ref().and_then(|scratch| scratch.note.clone())
    }

    /// Copies and kernels that were queued.
    pub(crate) fn copies(&self) -> u64 {
        self.counts.copies.load(Ordering::Relaxed)
    }

    /// How long a thread waited for copies.
    pub(crate) fn waited(&self) -> Duration {
        Duration::from_nanos(self.counts.waited.load(Ordering::Relaxed))
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
        transfers: Vec<Transfer>,
        (addresses, arenas): (Arc<[u64]>, Vec<Arc<DeviceArena>>),
        read: InCopy,
    ) {
        let (queue, with_waiter) = (self.next_queue().clone(), &self.counts.with_waiter);
        let is_short =
            !self.is_inline && with_waiter.load(Ordering::Relaxed) > 0 && self.is_short(&transfers);
        let table = match &self.scratch {
            Some(scratch) if !is_short => scratch.table_for(&queue, &slot, &transfers),
            _ => Ok(None),
        };
        let (table, _scratch) = match table {
            Ok(table) => (table, self.scratch.clone().filter(|_| !is_short)),
            Err(error) => {
                drop((slot, arenas));
                return read.end(Err(error));
            }
        };
        let copied = Copied { table, slot, _scratch, _arenas: arenas };
        // Short ones are copied together, in a span of their own.
        let span = if is_short { Span::none() } else { copy_span(&queue, read.part.wanted.len()) };
        let mut unqueued = Unqueued { queue, copied, transfers, addresses, read, span };
        if self.is_inline {
            // SAFETY: the same contract.
            let queued = unsafe { unqueued.queue(&self.counts) };
            match unqueued.kept(queued) {
                Ok(copying) => copying.end(&self.counts),
                Err(failed) => drop(failed),
            }
            return;
        }
        let Some(sender) = self.sent.sender() else { return drop(unqueued) };
        if is_short {
            with_waiter.fetch_add(1, Ordering::Relaxed);
            return give(&sender, Sent::Unqueued(unqueued));
        }
        let counts = self.counts.clone();
        self.queue.device().between_long_calls(move || {
            // SAFETY: the same contract.
            let queued = unsafe { unqueued.queue(&counts) };
            // It may be another's thread: it waits for no copy, and ends no read.
            counts.with_waiter.fetch_add(1, Ordering::Relaxed);
            give(&sender, unqueued.kept(queued).map_or_else(Sent::Failed, Sent::Queued));
        });
    }

    /// Whether copies of a slot are so short that it pays to queue them with those of others. Kernels have memory for one slot.
    fn is_short(&self, transfers: &[Transfer]) -> bool {
        let len = |transfer: &Transfer| match *transfer {
            Transfer::Linear { len, .. } => len,
            Transfer::Pitched { width, height, .. } => width.saturating_mul(height),
            Transfer::Converted { .. } => u64::MAX,
        };
        let needs_kernels = || self.queue.device().table_bytes(transfers).map_or(true, |bytes| bytes > 0);
        transfers.iter().map(len).fold(0, u64::saturating_add) < SHORT_BYTES && !needs_kernels()
    }

    /// What a thread waits for the copies with.
    pub(crate) fn waiter(&self) -> Waiter {
        Waiter { sent: self.sent.clone(), counts: self.counts.clone() }
    }

    /// Nothing is sent any more.
    pub(crate) fn close(&self) {
        self.sent.close();
    }
}

/// Another stream of the device, on which nothing was sent. `None` if it has none: copies share one then, and are slower.
fn another(queue: &CopyStream) -> Option<(Arc<CopyStream>, AtomicU64)> {
    let made = CopyStream::new(queue.device());
    if let Err(error) = &made {
        tracing::warn!(%error, "there is one stream for copies and kernels, which take turns");
    }
    Some((Arc::new(made.ok()?), AtomicU64::new(0)))
}

/// Gives the waiter something. If there is none any more, another thread drops it, as that may wait for copies.
fn give(waiter: &Sender<Sent>, sent: Sent) {
    if let Err(unsent) = waiter.send(sent) {
        drop_aside(unsent.0);
    }
}

fn copy_span(queue: &CopyStream, bytes: u64) -> Span {
    trace_span!("copy", track = %queue.device().info().id, bytes)
}

impl Unqueued {
    /// Queues the copies, and a mark behind them.
    ///
    /// # Safety
    /// That of [`DeviceLine::send`], until what [`Unqueued::kept`] returns is over.
    unsafe fn queue(&mut self, counts: &Counts) -> hoistway_device::Result<Ticket> {
        let Self { queue, copied, transfers, addresses, .. } = self;
        let Copied { table, slot, _scratch: scratch, .. } = copied;
        slot.order(queue)?;
        let source = slot.source();
        // SAFETY: by the contract. What the work uses is kept until it is over. Each scratch belongs to the owner of its table.
        let transfer = |transfers: &[Transfer], scratch: Option<Scratch<'_>>| unsafe {
            queue.transfer(source, transfers, addresses, scratch)
        };
        let operations = match (scratch, table) {
            (Some(scratch), Some(table)) => transfer(transfers, Some(scratch.beside(slot, table)))?,
            (Some(_), None) => transfer(transfers, None)?,
            // Few enough at a time that no kernel is needed for them.
            (None, _) => transfers
                .chunks(CopyStream::MAX_COPIES)
                .map(|few| transfer(few, None))
                .sum::<Result<_, _>>()?,
        };
        counts.copies.fetch_add(operations, Ordering::Relaxed);
        queue.mark()
    }

    /// What waits for the copies, or has to find out what has become of them.
    fn kept(self, queued: hoistway_device::Result<Ticket>) -> std::result::Result<Copying, Box<Failed>> {
        let Self { queue, copied, read, span, .. } = self;
        match queued {
            Ok(ticket) => Ok(Copying { slots: ticket.keep(vec![copied]), reads: vec![read], span }),
            Err(error) => Err(Box::new(Failed { queue, rest: Some((copied, error, read)), _span: span })),
        }
    }
}

impl Drop for Failed {
    fn drop(&mut self) {
        if let Some((copied, error, read)) = self.rest.take() {
            let kept = self.queue.keep(vec![copied], Err(error));
            read.end(kept.map(drop).map_err(Error::from));
        }
    }
}

impl Waiter {
    /// Waits for copies, the oldest first, until the line is closed or gone and none is left, and ends their reads. Queues those
    /// that were not queued before it waits: all that have come in the meantime. Calls `then` after each wait with the time that the
    /// device is known to have worked in all.
    pub(crate) fn serve(&self, mut then: impl FnMut(Duration)) {
        let mut under_way = VecDeque::<Copying>::new();
        let (mut worked, mut since) = (Duration::ZERO, Instant::now());
        loop {
            let mut next = if under_way.is_empty() {
                let next = self.sent.next();
                since = Instant::now();
                next
            } else {
                self.sent.try_next()
            };
            if next.is_none() && under_way.is_empty() {
                return;
            }
            let mut unqueued = Vec::new();
            while let Some(sent) = next {
                match sent {
                    Sent::Queued(copying) => under_way.push_back(copying),
                    Sent::Failed(failed) => {
                        drop(failed);
                        self.counts.with_waiter.fetch_sub(1, Ordering::Relaxed);
                    }
                    Sent::Unqueued(one) => unqueued.push(one),
                }
                next = self.sent.try_next();
            }
            under_way.extend(self.queue_together(unqueued));
            if let Some(oldest) = under_way.pop_front() {
                let (count, was_over) = (oldest.reads.len(), oldest.slots.is_over());
                oldest.end(&self.counts);
                self.counts.with_waiter.fetch_sub(count as u64, Ordering::Relaxed);
                let now = Instant::now();
                // Until this copy ended, the device was at work. If the copy had ended before, it is not known how long ago.
                worked += if was_over { Duration::ZERO } else { now - since };
                since = now;
                then(worked);
            }
        }
    }

    /// Queues the copies of slots. `None` if there are none, or their reads have failed.
    fn queue_together(&self, unqueued: Vec<Unqueued>) -> Option<Copying> {
        let queue = unqueued.first()?.queue.clone();
        let sources = unqueued.iter().map(|one| (one.copied.slot.source(), &*one.transfers, &*one.addresses));
        let in_order = unqueued.iter().try_for_each(|one| one.copied.slot.order(&queue));
        // SAFETY: by the contract of `DeviceLine::send`, until the reads end; what the work uses is kept until it is over.
        let queued = in_order.and_then(|()| unsafe { queue.transfer_all(sources) });
        let queued = queued.map(|copies| _ = self.counts.copies.fetch_add(copies, Ordering::Relaxed));
        let (slots, reads): (Vec<_>, Vec<_>) = unqueued.into_iter().map(|one| (one.copied, one.read)).unzip();
        match queue.keep(slots, queued) {
            Ok(slots) => {
                let span = copy_span(&queue, reads.iter().map(|read| read.part.wanted.len()).sum());
                Some(Copying { slots, reads, span })
            }
            Err(error) => {
                self.counts.with_waiter.fetch_sub(reads.len() as u64, Ordering::Relaxed);
                end_all(reads, Err(error.into()));
                None
            }
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

impl Copying {
    /// Waits for the copies, and ends the reads.
    fn end(self, counts: &Counts) {
        let Self { slots, reads, span } = self;
        let since = Instant::now();
        let result = trace_span!("wait for copies").in_scope(|| slots.wait().result());
        drop(span);
        let nanoseconds = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        counts.waited.fetch_add(nanoseconds, Ordering::Relaxed);
        drop(slots);
        end_all(reads, result.map_err(Error::from));
    }
}

fn end_all(mut reads: Vec<InCopy>, result: Result<()>) {
    let last = reads.pop();
    for read in reads {
        read.end(result.as_ref().map_err(Error::copied).copied());
    }
    if let Some(last) = last {
        last.end(result);
    }
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
    /// What a plan needs beside so many slots; `None` if no kernel works on them.
    ///
    /// # Errors
    /// [`Error::MemoryBudget`] if the device has too little memory for so many; others of the device.
    pub(crate) fn new(
        queue: &CopyStream,
        SlotCounts { host, device }: SlotCounts,
        &Needs { slot_bytes, table_bytes }: &Needs,
    ) -> Result<Option<Self>> {
        if table_bytes == 0 {
            return Ok(None);
        }
        let data_bytes = slot_bytes.next_multiple_of(256);
        let len = table_bytes
            .saturating_mul((host + device) as u64)
            .saturating_add(data_bytes.saturating_mul(host as u64));
        let allocation = queue.allocate_scratch(len)?;
        let kind = SlotKind::Pinned(queue.device(), queue.device().info().numa_node);
        let host_tables = Slots::new(host, table_bytes as usize, kind)?;
        let device_tables = Slots::new(device, table_bytes as usize, kind)?;
        Ok(Some(Self { allocation, table_bytes, data_bytes, host_tables, device_tables, note: None }))
    }

    /// The same, with a note for reports.
    pub(crate) fn with_note(self, note: Option<String>) -> Self {
        Self { note, ..self }
    }

    /// A pinned table for the copies of a slot, if they need one. There is one for each.
    fn table_for(&self, queue: &CopyStream, slot: &Slot, transfers: &[Transfer]) -> Result<Option<Slot>> {
        if queue.device().table_bytes(transfers)? == 0 {
            return Ok(None);
        }
        let none = || Error::Internal("there are more slots in use than tables".into());
        let tables = if slot.device_address().is_some() { &self.device_tables } else { &self.host_tables };
        let table = tables.try_take().ok_or_else(none)?;
        table.pin_if_possible()?;
        Ok(Some(table))
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
