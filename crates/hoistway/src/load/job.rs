//! What all threads of one load share, and the two things they tell it: a read ended well, or the load is over.
#![forbid(unsafe_code)]

use super::{
    LoadOptions, Tensor, TensorMemory,
    device_arenas::{Copying, DeviceArenas},
    memory_plan::{MemoryPlan, Sink},
};
#[cfg(feature = "objects")]
use crate::memory::Ledger;
use crate::{
    ByteRange, Cancel, Catalog, DeviceId, Error, Result,
    memory::{Block, Fill, Promise},
    parallel::lock,
    plan::{Extent, Plan, Target},
    report::{Account, Onward, Refusal, Tally},
    route::{Buffer, DirectIo, ReadOp, Route},
    sys::usage::Usage,
    transfer::{self, Assigned, DeviceLine, Engine, Opening, Order, Read, Reads, queue_of},
};
use hoistway_io::{
    cancel::Registration,
    executor::{Charge, Flight, Gate, GroupId, Next, Operation, Patience, Reason, Submission},
};
use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// One load in progress.
pub(super) struct Job {
    pub(super) catalog: Arc<Catalog>,
    pub(super) plan: Plan,
    /// Carries the reads.
    pub(super) engine: Engine,
    /// The group of all reads, once it was submitted.
    reads: OnceLock<GroupId>,
    /// How many extents, from the first on, may be read.
    admitted: AtomicUsize,
    /// Whether all reads have ended.
    is_read: AtomicBool,
    /// Cancelled once the load is over before that: by its owner, or because of an error.
    cancel: Cancel,
    /// Has the load end when its owner's token is cancelled.
    on_cancel: OnceLock<Registration>,
    sink: Sink,
    /// Where tensors are said to be.
    target: DeviceId,
    state: Mutex<LoadState>,
    posted: Condvar,
    /// What was done so far.
    tally: Mutex<Tally>,
    tensor_bytes_done: AtomicU64,
    tensors_done: AtomicUsize,
    /// Next extent whose memory is not touched ahead of the reads yet.
    next_to_touch: AtomicUsize,
    /// The memory that the load may have.
    promise: Promise,
    /// What may be taken for the node's cache.
    #[cfg(feature = "objects")]
    pub(super) ledger: Arc<Ledger>,
    /// For each extent, whether its memory was taken from the promise.
    touched: Box<[AtomicBool]>,
    /// For each extent, whether a read has got to it: then its memory is no longer touched ahead.
    reached: Box<[AtomicBool]>,
}

/// What the threads of a load have to say to its owner.
#[derive(Default)]
struct LoadState {
    ready: VecDeque<Tensor>,
    error: Option<Error>,
    running: usize,
    /// When the last thread ended, and what the process had used by then.
    ended: Option<(Instant, Usage)>,
}

/// What has happened in a load.
pub(super) enum LoadEvent {
    /// These tensors are complete; none if nothing happened in time.
    Tensors(VecDeque<Tensor>),
    /// All threads are done, all tensors were handed out.
    Finished,
}

impl Job {
    /// Allocates the memory of `plan` and submits its reads, by routes of which the first are open.
    pub(super) fn new(
        catalog: Arc<Catalog>,
        plan: Plan,
        mut opening: Opening<'_>,
        options: &LoadOptions,
        place: &MemoryPlan<'_>,
    ) -> Result<Arc<Self>> {
        let cancel = options.cancel.as_ref().map_or_else(Cancel::default, Cancel::child);
        let needs = place.needs(&plan)?;
        let room = place.room(&plan, needs, &opening, options);
        opening.ready_first(&plan, &room)?;
        #[cfg_attr(not(feature = "objects"), expect(unused_variables, reason = "nothing takes it"))]
        let (slots, promise, left_bytes) = place.slots(&plan, &needs, &opening, options)?;
        let (sink, buffers) = place.sink(&plan, &room, &mut opening, options, &slots)?;
        #[cfg_attr(not(feature = "objects"), expect(unused_mut, reason = "no ledger is set"))]
        let Assigned { routes, takers, mut reads, refused } = opening.assign(&plan, buffers, &cancel)?;
        #[cfg(feature = "objects")]
        let ledger = Ledger::new(left_bytes);
        #[cfg(feature = "objects")]
        reads.iter_mut().for_each(|op| op.ledger = Some(ledger.clone()));
        let engine = Engine {
            chosen: (options.route, options.direct),
            scheduler: transfer::scheduler(routes.len()),
            patience: if place.is_inline { Patience::None } else { Patience::UntilOver },
            routes,
            takers,
            slots,
            #[cfg(feature = "fault-injection")]
            faults: options.faults.clone(),
        };
        let job = Self {
            catalog,
            engine,
            reads: OnceLock::new(),
            admitted: AtomicUsize::new(place.admitted),
            is_read: AtomicBool::new(false),
            cancel,
            on_cancel: OnceLock::new(),
            sink,
            target: options.device,
            state: Mutex::default(),
            posted: Condvar::new(),
            tally: Mutex::new(Tally { refused, ..Tally::default() }),
            tensor_bytes_done: AtomicU64::new(0),
            tensors_done: AtomicUsize::new(0),
            next_to_touch: AtomicUsize::new(0),
            promise,
            #[cfg(feature = "objects")]
            ledger,
            touched: plan.extents().iter().map(|_| AtomicBool::new(false)).collect(),
            reached: plan.extents().iter().map(|_| AtomicBool::new(false)).collect(),
            plan,
        };
        let planned = job.plan.tensors().iter().enumerate();
        let empty = planned.filter(|(_, tensor)| tensor.place.is_empty());
        let block = || TensorMemory::Host(Arc::new(Block::empty()));
        job.post(empty.map(|(position, _)| job.tensor(position, block())).collect());
        let job = Arc::new(job);
        let weak = Arc::downgrade(&job);
        let end = move || weak.upgrade().into_iter().for_each(|job| job.fail(Error::Cancelled));
        if let Some(cancel) = &options.cancel {
            job.on_cancel.get_or_init(|| cancel.on_cancel(end));
        }
        match job.submit(reads) {
            _ if job.is_stopped() => return Err(Error::Cancelled),
            submitted => submitted?,
        }
        Ok(job)
    }

    /// Hands the reads to the scheduler: all that it will ever have.
    fn submit(self: &Arc<Self>, reads: Vec<ReadOp>) -> Result<()> {
        let operation = |op: ReadOp| {
            let route = self.engine.takers[op.extent].from(0).unwrap_or_default();
            let charge = Charge::of_bytes(self.extent(&op).read.len());
            Operation { queue: queue_of(route), charge, order: op.extent as u64, content: op }
        };
        let operations = reads.into_iter().map(operation).collect();
        let gate = match self.admitted.load(Ordering::Relaxed) {
            usize::MAX => Gate::Open,
            admitted => Gate::Below(admitted as u64),
        };
        let own = Arc::downgrade(self);
        let order: Weak<dyn Order> = own;
        let submission = Submission { gate, ..Submission::new(order, operations) };
        let group = self.engine.scheduler.submit(submission).map_err(|refused| refused.reason.clone())?;
        self.reads.get_or_init(|| group);
        self.engine.scheduler.seal();
        Ok(())
    }

    /// Lets the reads of the first `extents` begin.
    pub(super) fn admit(&self, extents: usize) {
        if let Sink::Device(arenas) = &self.sink
            && let Err(error) = arenas.admit(&self.plan, extents)
        {
            self.fail(error);
        }
        self.admitted.fetch_max(extents, Ordering::Relaxed);
        if let Some(&group) = self.reads.get() {
            self.engine.scheduler.admit(group, extents as u64);
        }
    }

    pub(super) fn extent(&self, op: &ReadOp) -> &Extent {
        &self.plan.extents()[op.extent]
    }

    /// The name of the tensor that has the byte at `offset` of an extent's file.
    fn name_in(&self, extent: &Extent, offset: u64) -> Option<String> {
        let tensor = self.plan.tensor_at(extent, offset)?;
        Some(self.catalog.tensor(tensor).name.to_string())
    }

    /// Moves the bytes of a read to their places in host memory, and posts the tensors that become whole.
    fn fill(&self, fills: &[Fill], mut op: ReadOp) -> Result<()> {
        let account = std::mem::take(&mut op.account);
        let staged_bytes = match self.place(&mut op) {
            Ok(staged_bytes) => staged_bytes,
            Err(error) => {
                self.note_undelivered(account);
                return Err(error);
            }
        };
        // Before its bytes make a tensor whole, which another read may post.
        self.note_delivered(account, staged_bytes);
        let extent = &self.plan.extents()[op.extent];
        let mut tensors = Vec::new();
        let mut ready = |position, block| {
            tensors.push(self.tensor(position, TensorMemory::Host(Arc::new(block))));
        };
        match (op.buffer, extent.target) {
            (
                Buffer::InPlace(region) | Buffer::SharedStaging { region, .. },
                Target::InPlace { arena, .. },
            ) => {
                fills[arena].complete(region, &mut ready)?;
            }
            (Buffer::Staged { pieces: regions, .. }, _) => {
                for (piece, region) in self.plan.pieces(extent, extent.read).zip(regions) {
                    fills[piece.arena].complete(region, &mut ready)?;
                }
            }
            _ => return Err(Error::Internal("a staged extent was read in place".into())),
        }
        self.post(tensors);
        Ok(())
    }

    /// Moves the bytes of a read from its slot to their places in host memory, if it has one. Returns how many those are.
    fn place(&self, op: &mut ReadOp) -> Result<u64> {
        let extent = &self.plan.extents()[op.extent];
        match &mut op.buffer {
            Buffer::InPlace(_) => Ok(0),
            Buffer::SharedStaging { slot, region } => {
                let place = region.as_mut_slice().get_mut(..extent.read.len() as usize);
                let (Some(mut slot), Some(place)) = (slot.take(), place) else {
                    return Err(Error::Internal("an extent by shared memory has no slot or no place".into()));
                };
                slot.copy_to(0, place)?;
                Ok(self.plan.delivered_bytes(extent, extent.read))
            }
            Buffer::Staged { slot, pieces: regions } => {
                let Some(mut slot) = slot.take() else {
                    return Err(Error::Internal("a staged extent has no slot".into()));
                };
                let mut staged_bytes = 0;
                for (piece, region) in self.plan.pieces(extent, extent.read).zip(regions) {
                    self.promise.touch(piece.place.len(), || self.is_stopped(), || ())?;
                    let place = region.as_mut_slice();
                    let mut filled = 0;
                    for copy in self.plan.copies(extent, piece) {
                        let from = (copy.source.start() - extent.read.start()) as usize;
                        let len = copy.source.len() as usize;
                        slot.copy_to(from, &mut place[filled..filled + len])?;
                        filled += len;
                    }
                    staged_bytes += filled as u64;
                }
                Ok(staged_bytes)
            }
        }
    }

    /// The copies of a read to a device have ended.
    fn copied(&self, arenas: &DeviceArenas, read: Copying, result: Result<()>) {
        let Copying { extent: number, shown, account, ticket } = read;
        let extent = &self.plan.extents()[number];
        // Pages of a file may have changed until they were copied, which its read does not know.
        let unchanged = || match &shown {
            Some(source) => source.check_unchanged(extent.read, |offset| self.name_in(extent, offset)),
            None => Ok(()),
        };
        if let Err(error) = result.and_then(|()| unchanged()) {
            return self.fail_with(ticket, account, error);
        }
        let whole = arenas.complete(&self.plan, number).into_iter();
        let memory = |block| TensorMemory::Device(Arc::new(block));
        let tensors = whole.map(|(position, block)| self.tensor(position, memory(block))).collect();
        let staged_bytes = if shown.is_none() { self.plan.delivered_bytes(extent, extent.read) } else { 0 };
        self.note_delivered(account, staged_bytes);
        self.post(tensors);
        ticket.end(Ok(()));
    }

    /// Waits for copies to a device, one after the other, until the load is over.
    pub(super) fn wait_for_copies(&self) {
        if let Sink::Device(arenas) = &self.sink {
            arenas.line.waiter().serve(|read, result| self.copied(arenas, read, result));
        }
    }

    /// All bytes of a read are in their places.
    fn note_delivered(&self, account: Account, staged_bytes: u64) {
        self.tensor_bytes_done.fetch_add(account.tensor_bytes(), Ordering::Relaxed);
        self.tally().add(account, staged_bytes);
    }

    fn tensor(&self, position: usize, memory: TensorMemory) -> Tensor {
        let planned = &self.plan.tensors()[position];
        Tensor::new(self.catalog.tensor(planned.tensor), planned, self.target, memory)
    }

    fn post(&self, tensors: Vec<Tensor>) {
        if !tensors.is_empty() {
            self.tensors_done.fetch_add(tensors.len(), Ordering::Relaxed);
            lock(&self.state).ready.extend(tensors);
            self.posted.notify_all();
        }
    }

    /// Whether no further read begins: all have ended, or the load has.
    pub(super) fn is_over(&self) -> bool {
        self.is_read.load(Ordering::Acquire) || self.is_stopped()
    }

    /// The way to the device, if one is the target.
    pub(super) fn device_line(&self) -> Option<&DeviceLine<Copying>> {
        match &self.sink {
            Sink::Host(_) => None,
            Sink::Device(arenas) => Some(&arenas.line),
        }
    }

    /// What was done so far.
    pub(super) fn tally(&self) -> MutexGuard<'_, Tally> {
        lock(&self.tally)
    }

    /// Touches memory ahead of the reads, leaving out the first `ahead` extents.
    pub(super) fn touch_all_ahead(&self, ahead: usize) {
        while self.touch_ahead(ahead) {}
    }

    /// Faults in the memory of one extent that no read has got to, at least `ahead` extents into the plan.
    /// `false` if there is none left.
    fn touch_ahead(&self, ahead: usize) -> bool {
        let position = ahead.saturating_add(self.next_to_touch.fetch_add(1, Ordering::Relaxed));
        let Some(extent) = self.plan.extents().get(position) else {
            return false;
        };
        if position >= self.admitted.load(Ordering::Relaxed) {
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
        !self.is_over()
    }

    /// Takes the memory of an extent that is read in place from the promise, once. Calls `touch` where memory is tight, and
    /// returns whether it did.
    fn take_from_promise(&self, position: usize, room: ByteRange, touch: impl FnOnce()) -> Result<bool> {
        if self.touched[position].swap(true, Ordering::Relaxed) {
            return Ok(false);
        }
        self.promise.touch(room.len(), || self.is_stopped(), touch)
    }

    /// Fails if the route that the caller named has not done what its name promises.
    pub(super) fn check_kept(&self) -> Result<()> {
        for route in &self.engine.routes {
            let Err(why) = route.name_check.check() else { continue };
            let route = route.member.route();
            if self.engine.names(route) {
                return Err(Error::RouteUnavailable { route, path: None, why });
            }
            self.tally().refuse(Refusal::new(route.name(), None, why));
        }
        Ok(())
    }

    /// A thread of this load begins; it ends when the result is dropped.
    pub(super) fn enter(self: &Arc<Self>) -> Running {
        lock(&self.state).running += 1;
        Running(self.clone())
    }

    /// The next event. Waits for it, but no longer than `timeout` if there is one.
    pub(super) fn next_event(&self, timeout: Option<Duration>) -> Result<LoadEvent> {
        let nothing_new =
            |state: &mut LoadState| state.ready.is_empty() && state.error.is_none() && state.running > 0;
        let state = lock(&self.state);
        let mut state = match timeout {
            None => self.posted.wait_while(state, nothing_new).unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                let waited = self.posted.wait_timeout_while(state, timeout, nothing_new);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        if state.ready.is_empty() {
            // What was complete before an error is whole.
            if let Some(error) = state.error.take() {
                return Err(error);
            }
            if state.running == 0 && self.is_stopped() {
                return Err(Error::Cancelled);
            }
            if state.running == 0 {
                return Ok(LoadEvent::Finished);
            }
        }
        Ok(LoadEvent::Tensors(std::mem::take(&mut state.ready)))
    }

    /// When the last thread ended, and what the process had used by then; `None` while one runs.
    pub(super) fn ended(&self) -> Option<(Instant, Usage)> {
        let state = lock(&self.state);
        state.ended.filter(|_| state.running == 0)
    }

    pub(super) fn tensor_bytes_done(&self) -> u64 {
        self.tensor_bytes_done.load(Ordering::Relaxed)
    }

    pub(super) fn tensors_done(&self) -> usize {
        self.tensors_done.load(Ordering::Relaxed)
    }
}

impl Read for Job {
    fn chosen(&self) -> (Route, DirectIo) {
        self.engine.chosen
    }

    fn range(&self, op: &ReadOp) -> ByteRange {
        self.extent(op).read
    }

    fn name_at(&self, op: &ReadOp, offset: u64) -> Option<String> {
        self.name_in(self.extent(op), offset)
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        Job::tally(self)
    }

    fn delivered_bytes(&self, op: &ReadOp, range: ByteRange) -> u64 {
        self.plan.delivered_bytes(self.extent(op), range)
    }

    fn onward(&self) -> Onward {
        match &self.sink {
            Sink::Device(_) => Onward::ToDevice,
            Sink::Host(_) if self.engine.chosen.0.is_unified() => Onward::Unified,
            Sink::Host(_) => Onward::Stay,
        }
    }
}

impl Order for Job {
    fn is_stopped(&self) -> bool {
        self.cancel.is_cancelled()
    }

    fn begins(&self, op: &ReadOp) -> Result<()> {
        self.reached[op.extent].store(true, Ordering::Relaxed);
        match (self.plan.extents()[op.extent].target, &self.sink) {
            (Target::InPlace { arena, room }, Sink::Host(fills)) => {
                self.take_from_promise(op.extent, room, || fills[arena].touch(room)).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn complete(&self, flight: Flight<Reads>) -> Next<Reads> {
        if let Err(error) = self.check_unchanged(&flight.content) {
            return self.fail_read(flight, error);
        }
        let (op, ticket) = flight.into_parts();
        match (&self.sink, op) {
            (Sink::Host(fills), op) => match self.fill(fills, op) {
                Ok(()) => ticket.end(Ok(())),
                Err(error) => self.fail_with(ticket, Account::default(), error),
            },
            (
                Sink::Device(arenas),
                ReadOp { extent, source, account, buffer: Buffer::Staged { slot: Some(slot), .. }, .. },
            ) => {
                let shown = slot.is_view().then_some(source);
                let read = Copying { extent, shown, account, ticket };
                if let Some((read, result)) = arenas.send(&self.plan, slot, read) {
                    self.copied(arenas, read, result);
                }
            }
            (Sink::Device(_), op) => {
                let error = Error::Internal("an extent for a device has no slot".into());
                self.fail_with(ticket, op.account, error);
            }
        }
        Next::Ended
    }

    fn fail(&self, error: Error) {
        let mut state = lock(&self.state);
        // What reads end with that their owner has cancelled is no reason.
        let is_cancelled = state.error.is_none() && self.is_stopped();
        let error = if is_cancelled { Error::Cancelled } else { error };
        let is_first = state.error.is_none();
        let text = (is_first && !matches!(error, Error::Cancelled)).then(|| error.to_string());
        // The caller that cancels a load wants no more of it.
        let unwanted = if matches!(error, Error::Cancelled) {
            std::mem::take(&mut state.ready)
        } else {
            VecDeque::new()
        };
        state.error.get_or_insert(error);
        drop(state);
        drop(unwanted);
        self.cancel.cancel();
        if let Some(error) = text {
            tracing::debug!(error, "load failed");
        }
        self.engine.close();
        if let Some(line) = self.device_line() {
            line.close();
        }
        self.posted.notify_all();
    }

    fn lost_reads(&self, first: Option<u64>, source: io::Error) -> Error {
        // Reads are submitted in the order of their extents.
        let extent = first.and_then(|first| self.plan.extents().get(usize::try_from(first).ok()?));
        let Some(extent) = extent else { return Error::System { operation: "waiting for reads", source } };
        Error::Io {
            operation: "read",
            path: self.catalog.file(extent.file).source.as_path().to_owned(),
            tensor: self.name_in(extent, extent.read.start()),
            range: Some(extent.read),
            source,
        }
    }

    fn reads_ended(&self, result: Result<(), Reason>) {
        self.is_read.store(true, Ordering::Release);
        match result {
            // The thread whose lane failed says why.
            Ok(()) | Err(Reason::Lost(_)) => {}
            Err(_) if self.is_stopped() => {}
            Err(reason) => self.fail(reason.into()),
        }
        if let Some(line) = self.device_line() {
            line.close();
        }
    }
}

/// A thread that works on a load. Its end is noticed however it ends.
pub(super) struct Running(Arc<Job>);

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::Internal("a thread of the load panicked".into()));
        }
        let mut state = lock(&self.0.state);
        state.running -= 1;
        if state.running == 0 {
            self.0.promise.end();
            state.ended = Some((Instant::now(), Usage::now()));
        }
        drop(state);
        self.0.posted.notify_all();
    }
}
