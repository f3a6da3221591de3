//! What all threads of one load share, and the two things they tell it: a read ended well, or the load is over.
#![forbid(unsafe_code)]

use super::{
    DirectIo, LoadOptions, Tensor, TensorMemory,
    assign::{self, Assigned},
    delivery::{self, Delivery, Needs, SlotCounts},
    direct::DirectPath,
    queue::{Line, Queue},
    usrbio::{Shared, UsrbioPath},
};
use crate::{
    ByteRange, Catalog, DeviceId, Error, Result,
    device::{CopyQueue, Device},
    memory::{self, Arena, Block, DeviceBlock, Fill, MemoryRequest, Promise, SlotKind, Slots, WriteRegion},
    parallel::lock,
    plan::{Extent, Plan, PlanOptions, Target},
    report::{Carrier, Refusal, Retries},
    route::{Buffer, ReadOp, Route, SourceFile, Unavailable},
    sys::usage::Usage,
};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

/// Why a load leaves out what needs time to set up, or threads.
pub(super) const ALONE: &str = "the load runs on the caller's thread, where it does not pay";

/// One load in progress.
pub(super) struct Job {
    pub(super) catalog: Arc<Catalog>,
    pub(super) plan: Plan,
    pub(super) route: Route,
    pub(super) direct: DirectIo,
    pub(super) queue: Queue,
    pub(super) slots: Slots,
    /// The path past the host, if the load has one.
    pub(super) direct_path: Option<DirectPath>,
    /// The path by memory shared with a 3FS's daemon, if the load has one.
    pub(super) usrbio: Option<UsrbioPath>,
    /// For each file, who reads what the page cache does not hold.
    cold: Box<[Line]>,
    sink: Sink,
    /// Where tensors are said to be.
    target: DeviceId,
    board: Mutex<Board>,
    posted: Condvar,
    carriers: Mutex<Vec<Carrier>>,
    refused: Mutex<Vec<Refusal>>,
    tensor_bytes_done: AtomicU64,
    tensors_done: AtomicUsize,
    short_reads: AtomicU64,
    interrupted_reads: AtomicU64,
    staged_bytes: AtomicU64,
    /// Next extent whose memory nobody has touched ahead of the reads.
    next_to_touch: AtomicUsize,
    /// The memory that the load may have.
    promise: Promise,
    /// For each extent, whether its memory was taken from the promise.
    touched: Box<[AtomicBool]>,
    /// For each extent, whether a read has got to it: then its memory is no longer touched ahead.
    reached: Box<[AtomicBool]>,
    #[cfg(feature = "fault-injection")]
    pub(super) faults: Option<crate::route::fault::FaultScript>,
}

/// Where completed reads go.
enum Sink {
    /// Arenas of host memory.
    Host(Vec<Fill>),
    /// A device.
    Device(Box<Delivery>),
}

/// The memory that a load goes to, and how many threads and reads will ask for slots at once.
pub(super) struct Place<'a> {
    pub(super) memory: &'a MemoryRequest,
    /// The device that is to get copies; `None` if host memory is the place.
    pub(super) device: Option<&'a Arc<Device>>,
    pub(super) slots: usize,
    /// Bytes of all slots, at most.
    pub(super) staging_bytes: u64,
    /// Threads that read by cuFile.
    pub(super) readers: usize,
    /// Whether the caller's thread does everything.
    pub(super) is_inline: bool,
    /// How many extents may be read before the owner of the load takes any tensor.
    pub(super) admitted: usize,
    /// Bytes of tensors in memory at once.
    pub(super) most_bytes: u64,
    /// The 3FS that the load reads from, if it does.
    pub(super) shared: Option<&'a Shared>,
}

/// What the threads of a load have to say to its owner.
#[derive(Default)]
struct Board {
    ready: VecDeque<Tensor>,
    error: Option<Error>,
    running: usize,
    /// When the last thread ended, and what the process had used by then.
    ended: Option<(Instant, Usage)>,
}

/// News of a load.
pub(super) enum News {
    /// These tensors are complete; none if nothing happened in time.
    Tensors(VecDeque<Tensor>),
    /// All threads are done, all tensors were handed out.
    Finished,
}

impl Job {
    /// Allocates the memory of `plan` and queues its reads. `sources` are the files by their position in the
    /// catalog.
    pub(super) fn new(
        catalog: Arc<Catalog>,
        plan: Plan,
        sources: &[Arc<SourceFile>],
        options: &LoadOptions,
        plan_options: &PlanOptions,
        place: &Place<'_>,
        mut refused: Vec<Refusal>,
    ) -> Result<Self> {
        let fresh = if place.device.is_some() { 0 } else { place.memory.fresh_bytes(plan.arena_bytes()) };
        let usrbio = match place.shared {
            Some(shared) => UsrbioPath::open(shared, &plan, options, place, fresh, &mut refused)?,
            None => None,
        };
        let shared_bytes = usrbio.as_ref().map_or(0, |path| path.slots.host_bytes());
        // What goes past the host, or has slots elsewhere, needs none of it.
        let needs_slot = |extent: &&Extent| {
            extent.target == Target::Staged
                && !(options.route.is_cufile() && Plan::is_whole_blocks(extent))
                && !usrbio.as_ref().is_some_and(|path| path.takes(extent.file.index()))
        };
        let slot_bytes = plan.slot_bytes(plan_options);
        let needs = match place.device {
            None => Needs { slot_bytes, table_bytes: 0 },
            Some(_) => Needs::of(&plan, slot_bytes),
        };
        let slots = place.slots.min(needs.slots_in(place.staging_bytes.saturating_sub(shared_bytes)));
        let slot_count = plan.extents().iter().filter(needs_slot).count().min(slots);
        let staging_bytes = (slot_bytes + needs.table_bytes).saturating_mul(slot_count as u64);
        let fresh = if place.device.is_some() {
            0
        } else {
            place.memory.fresh_bytes(plan.arena_bytes().min(place.most_bytes))
        };
        let budget = options.memory_budget_bytes.map(|budget| budget.saturating_sub(shared_bytes));
        let promise = memory::budget::promise(fresh, staging_bytes, budget)?;
        let kind = match place.device {
            None => SlotKind::Host,
            Some(device) => SlotKind::Pinned(device, place.memory.numa_node),
        };
        let slots = Slots::new(slot_count, slot_bytes as usize, kind)?;
        if let (Some(device), Route::Auto) = (place.device, options.route)
            && device.shares_host_memory()
        {
            let reason =
                format!("memory that {} does not know of is no place for every kernel", device.name());
            let why =
                Unavailable::new(reason, "choose route unified, which copies nothing, if yours take it");
            refused.push(Refusal { what: Route::Unified.to_string(), path: None, why });
        }
        let mut direct_path = None;
        let (sink, buffers) = match place.device {
            None => {
                let arenas: Vec<Arc<Arena>> = plan
                    .arenas()
                    .iter()
                    .map(|&len| memory::allocate(len, place.memory))
                    .collect::<Result<_>>()?;
                let (fills, buffers) = fills_and_buffers(&plan, arenas)?;
                (Sink::Host(fills), buffers)
            }
            Some(device) => {
                let queue = CopyQueue::new(device)?;
                // Before what the direct path needs, which `auto` can do without.
                let arenas = delivery::allocate(&plan, &queue, options, (place.admitted, place.most_bytes))?;
                if !place.is_inline {
                    let sizes = (place.readers, &needs);
                    direct_path = DirectPath::find(
                        &plan,
                        sources,
                        options,
                        device,
                        sizes,
                        usrbio.as_ref(),
                        &mut refused,
                    )?;
                } else if options.route == Route::Auto {
                    let why = Unavailable::new(ALONE, "");
                    refused.push(Refusal { what: Route::Gds.to_string(), path: None, why });
                }
                let landing = direct_path.as_ref().map_or(0, |path| path.slots.count());
                let shared = usrbio.as_ref().map_or(0, |path| path.slots.count());
                let counts = SlotCounts { host: slots.count(), shared, device: landing };
                let lent = options.allocator.clone();
                let delivery = Delivery::new(queue, &plan, arenas, lent, counts, &needs, place.is_inline)?;
                let staged = || Buffer::Staged { slot: None, pieces: Vec::new() };
                (Sink::Device(Box::new(delivery)), plan.extents().iter().map(|_| staged()).collect())
            }
        };
        let Assigned { reads, cold, refused } =
            assign::assign(&plan, sources, usrbio.as_ref(), direct_path.as_ref(), options, buffers, refused)?;

        let job = Self {
            catalog,
            route: options.route,
            direct: options.direct,
            queue: Queue::new(reads, place.admitted, place.is_inline),
            slots,
            direct_path,
            usrbio,
            cold,
            sink,
            target: options.device,
            board: Mutex::default(),
            posted: Condvar::new(),
            carriers: Mutex::default(),
            refused: Mutex::new(refused),
            tensor_bytes_done: AtomicU64::new(0),
            tensors_done: AtomicUsize::new(0),
            short_reads: AtomicU64::new(0),
            interrupted_reads: AtomicU64::new(0),
            staged_bytes: AtomicU64::new(0),
            next_to_touch: AtomicUsize::new(0),
            promise,
            touched: plan.extents().iter().map(|_| AtomicBool::new(false)).collect(),
            reached: plan.extents().iter().map(|_| AtomicBool::new(false)).collect(),
            #[cfg(feature = "fault-injection")]
            faults: options.faults.clone(),
            plan,
        };
        let planned = job.plan.tensors().iter().enumerate();
        let empty = planned.filter(|(_, tensor)| tensor.place.is_empty());
        let block = || TensorMemory::Host(Arc::new(Block::empty()));
        job.post(empty.map(|(position, _)| job.tensor(position, block())).collect());
        Ok(job)
    }

    /// Lets the reads of the first `extents` begin.
    pub(super) fn admit(&self, extents: usize) {
        if let Sink::Device(delivery) = &self.sink
            && let Err(error) = delivery.admit(&self.plan, extents)
        {
            self.fail(error);
        }
        self.queue.admit(extents);
    }

    pub(super) fn extent(&self, op: &ReadOp) -> &Extent {
        &self.plan.extents()[op.extent]
    }

    /// The name of the tensor that a read has got to.
    pub(super) fn tensor_name(&self, op: &ReadOp) -> Option<String> {
        let extent = self.extent(op);
        self.tensor_name_at(extent, extent.read.start() + op.filled)
    }

    fn tensor_name_at(&self, extent: &Extent, offset: u64) -> Option<String> {
        let tensor = self.plan.tensor_at(extent, offset)?;
        Some(self.catalog.tensor(tensor).name.to_string())
    }

    /// Fails if the file of a read is no longer the one whose header was read.
    pub(super) fn check_unchanged(&self, op: &ReadOp) -> Result<()> {
        let extent = self.extent(op);
        let checked = op.source.check_unchanged(extent.read, |offset| self.tensor_name_at(extent, offset));
        checked.map_err(|error| match error {
            Error::Io { operation, path, source, .. } => {
                let tensor = self.tensor_name_at(extent, extent.read.start());
                Error::Io { operation, path, tensor, range: Some(extent.read), source }
            }
            other => other,
        })
    }

    /// `op` got as far as byte `filled` of its extent, `read` bytes of it by this carrier.
    pub(super) fn account(&self, op: &mut ReadOp, route: Route, read: usize, filled: u64) {
        let extent = self.extent(op);
        let window =
            ByteRange::new(extent.read.start() + op.filled, extent.read.start() + filled).unwrap_or_default();
        let delivered: u64 = self.plan.delivered_bytes(extent, window);
        op.filled = filled;
        self.tensor_bytes_done.fetch_add(delivered, Ordering::Relaxed);
        let via = match (&self.sink, &op.buffer) {
            (Sink::Device(_), Buffer::Staged { slot: Some(slot), .. }) if slot.device_address().is_none() => {
                Some(Route::Staged)
            }
            (Sink::Host(_), _) if self.route == Route::Unified => Some(Route::Unified),
            _ => None,
        };
        let new = Carrier { route, access: op.access, via, tensor_bytes: 0, read_bytes: 0, reads: 0 };
        let mut carriers = lock(&self.carriers);
        let carrier = match carriers.iter().position(|own| own.is_same_way(&new)) {
            Some(known) => &mut carriers[known],
            None => carriers.push_mut(new),
        };
        carrier.tensor_bytes += delivered;
        carrier.read_bytes += read as u64;
        carrier.reads += 1;
    }

    /// What `route` has brought of `op` is of no use: its read begins again.
    pub(super) fn take_back(&self, op: &mut ReadOp, route: Route) {
        let extent = self.extent(op);
        let window = ByteRange::at(extent.read.start(), op.filled).unwrap_or_default();
        let delivered = self.plan.delivered_bytes(extent, window);
        self.tensor_bytes_done.fetch_sub(delivered, Ordering::Relaxed);
        let mut carriers = lock(&self.carriers);
        if let Some(own) = carriers.iter_mut().find(|own| own.route == route && own.access == op.access) {
            own.tensor_bytes = own.tensor_bytes.saturating_sub(delivered);
        }
        op.filled = 0;
        op.stalls = 0;
    }

    /// All bytes of `op` are there: they become parts of tensors, and tensors that are whole are posted.
    pub(super) fn complete(&self, op: ReadOp) -> Result<()> {
        self.check_unchanged(&op)?;
        let fills = match &self.sink {
            Sink::Host(fills) => fills,
            Sink::Device(delivery) => {
                let Buffer::Staged { slot: Some(slot), .. } = op.buffer else {
                    return Err(Error::Internal("an extent for a device has no slot".into()));
                };
                return delivery.send(self, op.extent, slot);
            }
        };
        let extent = &self.plan.extents()[op.extent];
        let mut tensors = Vec::new();
        let mut ready = |position, block| {
            tensors.push(self.tensor(position, TensorMemory::Host(Arc::new(block))));
        };
        match op.buffer {
            Buffer::InPlace(region) => {
                let Target::InPlace { arena, .. } = extent.target else {
                    return Err(Error::Internal("a staged extent was read in place".into()));
                };
                fills[arena].complete(region, &mut ready)?;
            }
            Buffer::Landing { slot, mut region } => {
                let Target::InPlace { arena, .. } = extent.target else {
                    return Err(Error::Internal("a staged extent has one place".into()));
                };
                let place = region.as_mut_slice().get_mut(..extent.read.len() as usize);
                let (Some(mut slot), Some(place)) = (slot, place) else {
                    return Err(Error::Internal("an extent by shared memory has no slot or no place".into()));
                };
                slot.copy_to(0, place)?;
                drop(slot);
                let delivered = self.plan.delivered_bytes(extent, extent.read);
                self.staged_bytes.fetch_add(delivered, Ordering::Relaxed);
                fills[arena].complete(region, &mut ready)?;
            }
            Buffer::Staged { slot, pieces: regions } => {
                let Some(mut slot) = slot else {
                    return Err(Error::Internal("a staged extent has no slot".into()));
                };
                for (piece, mut region) in self.plan.pieces(extent, extent.read).zip(regions) {
                    self.promise.touch(piece.place.len(), || self.queue.is_stopped(), || ())?;
                    let place = region.as_mut_slice();
                    let mut filled = 0;
                    for copy in self.plan.copies(extent, piece) {
                        let from = (copy.source.start() - extent.read.start()) as usize;
                        let len = copy.source.len() as usize;
                        slot.copy_to(from, &mut place[filled..filled + len])?;
                        filled += len;
                    }
                    self.staged_bytes.fetch_add(filled as u64, Ordering::Relaxed);
                    fills[piece.arena].complete(region, &mut ready)?;
                }
            }
        }
        self.post(tensors);
        self.queue.finish_one();
        Ok(())
    }

    /// The copies of a read to a device are done, which makes the tensors of `blocks` whole.
    pub(super) fn deliver(&self, extent: &Extent, blocks: Vec<(usize, DeviceBlock)>) {
        let staged = self.plan.delivered_bytes(extent, extent.read);
        self.staged_bytes.fetch_add(staged, Ordering::Relaxed);
        let memory = |block| TensorMemory::Device(Arc::new(block));
        self.post(blocks.into_iter().map(|(position, block)| self.tensor(position, memory(block))).collect());
        self.queue.finish_one();
    }

    fn tensor(&self, position: usize, memory: TensorMemory) -> Tensor {
        let planned = &self.plan.tensors()[position];
        Tensor::new(self.catalog.tensor(planned.tensor), planned, self.target, memory)
    }

    fn post(&self, tensors: Vec<Tensor>) {
        if !tensors.is_empty() {
            self.tensors_done.fetch_add(tensors.len(), Ordering::Relaxed);
            lock(&self.board).ready.extend(tensors);
            self.posted.notify_all();
        }
    }

    /// The load is over. The first reason given is the one that its owner sees.
    pub(super) fn fail(&self, error: Error) {
        tracing::debug!(%error, "load failed");
        let mut board = lock(&self.board);
        // Whoever cancels a load wants no more of it.
        let unwanted = if matches!(error, Error::Cancelled) {
            std::mem::take(&mut board.ready)
        } else {
            VecDeque::new()
        };
        board.error.get_or_insert(error);
        drop(board);
        drop(unwanted);
        self.queue.stop();
        self.slots.close();
        if let Some(path) = &self.direct_path {
            path.slots.close();
        }
        if let Some(path) = &self.usrbio {
            path.slots.close();
        }
        if let Sink::Device(delivery) = &self.sink {
            delivery.stop();
        }
        self.posted.notify_all();
    }

    /// The way to the device, if one is the target.
    pub(super) fn delivery(&self) -> Option<&Delivery> {
        match &self.sink {
            Sink::Host(_) => None,
            Sink::Device(delivery) => Some(delivery),
        }
    }

    pub(super) fn note_short_read(&self) {
        self.short_reads.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_interruption(&self) {
        self.interrupted_reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Something better than what will be done is not possible.
    pub(super) fn note_refusal(&self, refusal: Refusal) {
        tracing::debug!(what = refusal.what, why = %refusal.why, "refused");
        let mut refused = lock(&self.refused);
        if !refused.contains(&refusal) {
            refused.push(refusal);
        }
    }

    /// Faults in the memory of one extent that no read has got to, at least `ahead` extents into the plan.
    /// `false` if there is none left.
    pub(super) fn touch_ahead(&self, ahead: usize) -> bool {
        let position = ahead.saturating_add(self.next_to_touch.fetch_add(1, Ordering::Relaxed));
        let Some(extent) = self.plan.extents().get(position) else {
            return false;
        };
        if !self.queue.is_admitted(position) {
            return false;
        }
        // Memory of an extent that was read may be given back already, and must not be faulted in again.
        if let (Target::InPlace { arena, room }, Sink::Host(fills)) = (extent.target, &self.sink)
            && !self.reached[position].load(Ordering::Relaxed)
        {
            let touch = || {
                // It may have been reached while this thread waited.
                if !self.reached[position].load(Ordering::Relaxed) {
                    fills[arena].touch(room);
                }
            };
            match self.take_from_promise(position, room, touch) {
                Ok(true) => {}
                Ok(false) => touch(),
                Err(error) => self.fail(error),
            }
        }
        !self.queue.is_over()
    }

    /// Takes the memory of an extent that is read in place from the promise, once. Calls `touch` where memory is tight, and
    /// returns whether it did.
    fn take_from_promise(&self, position: usize, room: ByteRange, touch: impl FnOnce()) -> Result<bool> {
        if self.touched[position].swap(true, Ordering::Relaxed) {
            return Ok(false);
        }
        self.promise.touch(room.len(), || self.queue.is_stopped(), touch)
    }

    /// The line of a read that the page cache cannot serve.
    pub(super) fn cold_line(&self, op: &ReadOp) -> Line {
        let extent = self.extent(op);
        if self.direct_path.is_some() && !Plan::is_whole_blocks(extent) {
            return Line::Pool;
        }
        self.cold[extent.file.index()]
    }

    /// Whether any file's reads wait in this line if the page cache cannot serve them.
    pub(super) fn has_cold_line(&self, line: Line) -> bool {
        // With a direct path, the ends of files go to the pool.
        self.cold.contains(&line) || (line == Line::Pool && self.direct_path.is_some())
    }

    /// Fails if route `gds` was named and some reads went through host memory after all.
    pub(super) fn check_direct(&self) -> Result<()> {
        let Some(Err(why)) = self.direct_path.as_ref().map(DirectPath::check_kept) else { return Ok(()) };
        if self.route == Route::Gds {
            return Err(Error::RouteUnavailable { route: Route::Gds, path: None, why });
        }
        self.note_refusal(Refusal { what: Route::Gds.to_string(), path: None, why });
        Ok(())
    }

    /// Whether reads may pass through the page cache where a file system refuses direct ones.
    pub(super) fn may_read_buffered(&self) -> bool {
        self.direct != DirectIo::Always && self.route != Route::IoUring && !self.route.is_cufile()
    }

    /// A read begins to fill the memory of its extent.
    ///
    /// # Errors
    /// [`Error::MemoryBudget`] if the system has no memory for it any more.
    pub(super) fn note_reached(&self, op: &ReadOp) -> Result<()> {
        self.reached[op.extent].store(true, Ordering::Relaxed);
        match (self.plan.extents()[op.extent].target, &self.sink) {
            (Target::InPlace { arena, room }, Sink::Host(fills)) => {
                self.take_from_promise(op.extent, room, || fills[arena].touch(room)).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// A thread of this load begins; it ends when the result is dropped.
    pub(super) fn enter(self: &Arc<Self>) -> Running {
        lock(&self.board).running += 1;
        Running(self.clone())
    }

    /// The next news. Waits for it, but no longer than `timeout` if there is one.
    pub(super) fn news(&self, timeout: Option<std::time::Duration>) -> Result<News> {
        let nothing_new =
            |board: &mut Board| board.ready.is_empty() && board.error.is_none() && board.running > 0;
        let board = lock(&self.board);
        let mut board = match timeout {
            None => self.posted.wait_while(board, nothing_new).unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                let waited = self.posted.wait_timeout_while(board, timeout, nothing_new);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        if board.ready.is_empty() {
            // What was complete before an error is whole.
            if let Some(error) = board.error.take() {
                return Err(error);
            }
            if board.running == 0 {
                return Ok(News::Finished);
            }
        }
        Ok(News::Tensors(std::mem::take(&mut board.ready)))
    }

    /// When the last thread ended, and what the process had used by then; `None` while one runs.
    pub(super) fn ended(&self) -> Option<(Instant, Usage)> {
        let board = lock(&self.board);
        board.ended.filter(|_| board.running == 0)
    }

    pub(super) fn tensor_bytes_done(&self) -> u64 {
        self.tensor_bytes_done.load(Ordering::Relaxed)
    }

    pub(super) fn tensors_done(&self) -> usize {
        self.tensors_done.load(Ordering::Relaxed)
    }

    pub(super) fn staged_bytes(&self) -> u64 {
        self.staged_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn retries(&self) -> Retries {
        Retries {
            short: self.short_reads.load(Ordering::Relaxed),
            interrupted: self.interrupted_reads.load(Ordering::Relaxed),
        }
    }

    pub(super) fn carriers(&self) -> Vec<Carrier> {
        let mut carriers = lock(&self.carriers).clone();
        if self.direct_path.as_ref().is_some_and(|path| !path.is_kept()) {
            // Some went through the host, nobody knows which: none of them may be called direct.
            for carrier in carriers.iter_mut().filter(|carrier| carrier.route == Route::Gds) {
                carrier.route = Route::GdsCompat;
            }
        }
        carriers.sort_by_key(|carrier| std::cmp::Reverse(carrier.tensor_bytes));
        carriers
    }

    pub(super) fn refused(&self) -> Vec<Refusal> {
        lock(&self.refused).clone()
    }
}

/// A thread that works on a load. Its end is noticed however it ends.
pub(super) struct Running(Arc<Job>);

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::Internal("a thread of the load panicked".into()));
        }
        let mut board = lock(&self.0.board);
        board.running -= 1;
        if board.running == 0 {
            self.0.promise.end();
            board.ended = Some((Instant::now(), Usage::now()));
        }
        drop(board);
        self.0.posted.notify_all();
    }
}

/// For each arena its fill, for each extent its buffer.
fn fills_and_buffers(plan: &Plan, arenas: Vec<Arc<Arena>>) -> Result<(Vec<Fill>, Vec<Buffer>)> {
    let mut writes: Vec<Vec<ByteRange>> = vec![Vec::new(); arenas.len()];
    let mut tensors: Vec<Vec<(usize, ByteRange)>> = vec![Vec::new(); arenas.len()];
    for extent in plan.extents() {
        match extent.target {
            Target::InPlace { arena, room } => writes[arena].push(room),
            Target::Staged => {
                for piece in plan.pieces(extent, extent.read) {
                    writes[piece.arena].push(piece.place);
                }
            }
        }
    }
    for (position, tensor) in plan.tensors().iter().enumerate() {
        if !tensor.place.is_empty() {
            tensors[tensor.arena].push((position, tensor.place));
        }
    }
    let mut fills = Vec::with_capacity(arenas.len());
    let mut regions: Vec<std::vec::IntoIter<WriteRegion>> = Vec::with_capacity(arenas.len());
    for ((arena, tensors), writes) in arenas.into_iter().zip(tensors).zip(&writes) {
        let (fill, arena_regions) = Fill::new(arena, tensors, writes)?;
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
