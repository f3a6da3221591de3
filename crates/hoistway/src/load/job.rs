//! What all threads of one load share, and the two things they tell it: a read ended well, or the load is over.
#![forbid(unsafe_code)]

use super::{
    Tensor, TensorMemory,
    memory_plan::{MemoryPlan, Sink},
    start::Start,
};
use crate::{
    ByteRange, Cancel, Catalog, DeviceId, Error, Result,
    device::ReusedMemory,
    memory::{Block, Promise, Slot, WriteRegion},
    parallel::lock,
    plan::{Extent, Plan, Target},
    report::{Account, Onward, Refusal, Tally},
    route::{
        Access, Buffer, DirectIo, Part, ReadOp, Route,
        member::{Facts, Landing},
    },
    source::Source,
    sys::usage::Usage,
    transfer::{
        self, Assigned, DeviceLine, Engine, EngineOwner, Failure, InCopy, Opening, Order, Placed, queue_of,
    },
};
#[cfg(feature = "objects")]
use crate::{
    memory::Ledger,
    report::ChecksumReport,
    source::objects::{CHECKSUM_PATIENCE, Comparing, ObjectSource, ToCompare, compared_by, mismatch},
};
use hoistway_io::{
    cancel::Registration,
    executor::{Charge, Gate, GroupId, Operation, Patience, Reason, Submission},
    span::OwnSpan,
};
#[cfg(feature = "objects")]
#[cfg(feature = "objects")]
use std::{collections::BTreeMap, ops::Range};
use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tracing::{Span, debug_span, trace};

/// Reads whose memory on a device is allocated before the first of them begins.
pub(super) const FIRST_EXTENTS: usize = 32;
/// Reads whose memory is allocated at once afterwards: copies wait meanwhile for as long as it takes to pin a window.
const MORE_EXTENTS: usize = 128;

/// An object, and its comparison or why there is none.
#[cfg(feature = "objects")]
type Compared = (Arc<dyn Source>, Result<Arc<Comparing>, &'static str>);

/// One load in progress.
pub(super) struct Job {
    pub(super) catalog: Arc<Catalog>,
    pub(super) plan: Plan,
    /// Carries the reads.
    pub(super) engine: Engine,
    /// From the first read to the end.
    span: OwnSpan,
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
    /// The objects that it reads, and what is compared with the checksums of their stores.
    #[cfg(feature = "objects")]
    comparisons: BTreeMap<usize, Compared>,
    /// For each extent, whether its memory was taken from the promise.
    touched: Box<[AtomicBool]>,
    /// For each extent, whether a read has got to it: then its memory is touched ahead only if the read waits for that.
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
        start: &Start<'_>,
        plan: Plan,
        mut opening: Opening<'_>,
        place: &MemoryPlan<'_>,
    ) -> Result<Arc<Self>> {
        let Start { catalog, sources, options, .. } = *start;
        let cancel = options.cancel.as_ref().map_or_else(Cancel::default, Cancel::child);
        let needs = place.needs(&plan)?;
        let room = place.room(&plan, needs, &opening, options);
        opening.ready_first(&plan, &room)?;
        #[cfg_attr(not(feature = "objects"), expect(unused_variables, reason = "nothing takes it"))]
        let (slots, promise, left_bytes) = place.slots(&plan, &needs, &opening, options)?;
        let (sink, buffers) = place.sink(&plan, &room, &mut opening, options, &slots)?;
        let Assigned { routes, takers, access, refused } = opening.assign(&plan)?;
        #[cfg(feature = "objects")]
        let comparisons = comparisons(sources, &plan, &cancel);
        let engine = Engine {
            chosen: (options.route, options.direct),
            scheduler: transfer::scheduler(routes.len()),
            patience: if place.is_inline { Patience::None } else { Patience::UntilOver },
            routes,
            takers,
            slots,
            most_copiers: (place.threads.copiers_beside, place.threads.copiers.1),
            copiers: AtomicUsize::new(0),
            #[cfg(feature = "fault-injection")]
            faults: options.faults.clone(),
        };
        let job = Self {
            catalog: catalog.clone(),
            engine,
            span: debug_span!(parent: start.span, "transfer", reads = plan.extents().len(), bytes = plan.read_bytes())
                .into(),
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
            ledger: Ledger::new(left_bytes),
            #[cfg(feature = "objects")]
            comparisons,
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
        match job.submit(sources, &access, buffers) {
            _ if job.cancel.is_cancelled() => return Err(Error::Cancelled),
            submitted => submitted?,
        }
        Ok(job)
    }

    /// Hands the reads to the scheduler: all that it will ever have.
    fn submit(
        self: &Arc<Self>,
        sources: &[Arc<dyn Source>],
        access: &[Access],
        buffers: Vec<Buffer>,
    ) -> Result<()> {
        let operation = |(item, (extent, buffer)): (usize, (&Extent, Buffer))| {
            let (file, order) = (extent.file.index(), self.clone());
            let (source, cancel) = (sources[file].clone(), self.cancel.clone());
            #[cfg_attr(not(feature = "objects"), expect(unused_mut, reason = "no ledger is set"))]
            let mut content = ReadOp::new(order, (item, extent.read), source, access[file], buffer, cancel);
            #[cfg(feature = "objects")]
            {
                content.ledger = Some(self.ledger.clone());
                if let Some((_, comparison)) = self.comparisons.get(&file) {
                    content.comparison = comparison.clone().ok();
                }
            }
            let route = self.engine.takers[item].from(0).unwrap_or_default();
            let charge = Charge::of_bytes(extent.read.len());
            Operation { queue: queue_of(route), charge, order: item as u64, content }
        };
        let operations = self.plan.extents().iter().zip(buffers).enumerate().map(operation).collect();
        let gate = match self.admitted.load(Ordering::Relaxed) {
            usize::MAX => Gate::Open,
            admitted => Gate::Below(admitted as u64),
        };
        let order: Arc<dyn Order> = self.clone();
        let submission = Submission { gate, ..Submission::new((order, 0), operations) };
        let group = self.engine.scheduler.submit(submission).map_err(|refused| refused.reason.clone())?;
        self.reads.get_or_init(|| group);
        self.engine.scheduler.seal();
        Ok(())
    }

    /// The objects that were compared with the checksums of their stores so far; `None` if it reads none.
    #[cfg(feature = "objects")]
    pub(super) fn compared(&self) -> Option<ChecksumReport> {
        let mut report = ChecksumReport::default();
        for (source, comparison) in self.comparisons.values() {
            let outcome = comparison.as_ref().map(|comparing| comparing.outcome()).map_err(|why| *why);
            match outcome.and_then(compared_by) {
                Ok(algorithm) => report.add_equal(source.len(), algorithm),
                Err(reason) => report.add_uncompared(reason, 1),
            }
        }
        (!self.comparisons.is_empty()).then_some(report)
    }

    /// Lets the reads of the first `extents` begin.
    pub(super) fn admit(&self, extents: usize) {
        if let Sink::Device(arenas) = &self.sink
            && let Err(error) = arenas.admit(&self.plan, extents)
        {
            return self.fail(error);
        }
        self.admitted.fetch_max(extents, Ordering::Relaxed);
        if let Some(&group) = self.reads.get() {
            self.engine.scheduler.admit(group, extents as u64);
        }
    }

    /// Lets the reads begin that were not admitted, as memory of the device is allocated for them.
    pub(super) fn admit_all(&self) {
        let mut extents = self.admitted.load(Ordering::Relaxed);
        while extents < self.plan.extents().len() && !self.is_over() {
            extents = extents.saturating_add(MORE_EXTENTS);
            self.admit(extents);
        }
    }

    /// The name of the tensor that has the byte at `offset` of an extent's file.
    fn name_in(&self, extent: &Extent, offset: u64) -> Option<String> {
        let tensor = self.plan.tensor_at(extent, offset)?;
        Some(self.catalog.tensor(tensor).name.to_string())
    }

    /// Copies the pieces of an extent from a slot to their places in host memory. Returns how many bytes those are.
    fn scatter(&self, extent: &Extent, slot: &mut Slot, regions: &mut [WriteRegion]) -> Result<u64> {
        let mut staged_bytes = 0;
        for (piece, region) in self.plan.pieces(extent, extent.read).zip(regions) {
            let touch = || match &self.sink {
                Sink::Host(fills) => fills[piece.arena].touch(piece.place),
                Sink::Device(_) => {}
            };
            self.promise.touch(piece.place.len(), || self.cancel.is_cancelled(), touch)?;
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

    /// Waits for copies to a device, one after the other, until the load is over. Starts threads that copy from the page cache while the
    /// device waits for them.
    pub(super) fn wait_for_copies(&self) {
        if let Sink::Device(arenas) = &self.sink {
            transfer::with_copiers(&self.engine, self, |then| arenas.line.waiter().serve(then));
        }
    }

    fn tensor(&self, position: usize, memory: TensorMemory) -> Tensor {
        let planned = &self.plan.tensors()[position];
        Tensor::new(self.catalog.tensor(planned.tensor), planned, self.target, memory)
    }

    fn post(&self, tensors: Vec<Tensor>) {
        if tensors.is_empty() {
            return;
        }
        for tensor in &tensors {
            trace!(name = tensor.name(), bytes = tensor.len_bytes(), "tensor");
        }
        self.tensors_done.fetch_add(tensors.len(), Ordering::Relaxed);
        let mut state = lock(&self.state);
        // No caller takes them after it has cancelled the load.
        if matches!(state.error, Some(Error::Cancelled)) {
            drop(state);
            return drop(tensors);
        }
        state.ready.extend(tensors);
        drop(state);
        self.posted.notify_all();
    }

    /// Whether no further read begins: all have ended, or the load has.
    pub(super) fn is_over(&self) -> bool {
        self.is_read.load(Ordering::Acquire) || self.cancel.is_cancelled()
    }

    /// What is kept of a device's memory for the next tensors, if any is. A thread serves it.
    pub(super) fn reused_memory(&self) -> Option<&Arc<ReusedMemory>> {
        match &self.sink {
            Sink::Device(arenas) => arenas.reused(),
            Sink::Host(_) => None,
        }
    }

    fn close_device(&self) {
        self.device_line().into_iter().for_each(|line| line.close());
        self.reused_memory().into_iter().for_each(|reused| reused.close());
    }

    /// The way to the device, if one is the target.
    pub(super) fn device_line(&self) -> Option<&DeviceLine> {
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
            // Memory of a load that is over may be given back.
            let touch = || {
                if !self.is_over() {
                    fills[arena].touch(room);
                }
            };
            // Where memory is tight, a read of this extent waits for it.
            match self.take_from_promise(position, room, touch) {
                Ok(true) => {}
                // A read may have got to it meanwhile.
                Ok(false) if self.reached[position].load(Ordering::Relaxed) => {}
                Ok(false) => touch(),
                Err(error) => self.fail(error),
            }
        }
        !self.is_over()
    }

    /// Takes the memory of an extent that is read in place from the promise, once. Calls `touch` where memory is tight, and
    /// returns whether it did.
    fn take_from_promise(&self, position: usize, room: ByteRange, touch: impl FnOnce()) -> Result<bool> {
        let is_over = || self.cancel.is_cancelled();
        self.promise.touch_once(&self.touched[position], room.len(), is_over, touch)
    }

    /// Fails if the bytes of an object are not those of its store, or the route that the caller named has not done what its name
    /// promises.
    pub(super) fn check_kept(&self) -> Result<()> {
        #[cfg(feature = "objects")]
        for (source, comparison) in self.comparisons.values() {
            let problem = comparison.as_ref().ok().and_then(|comparison| comparison.difference());
            if let Some(error) = problem.and_then(|problem| mismatch(source.path(), &problem)) {
                return Err(error);
            }
        }
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

    /// It is over. The first reason given is the one that its owner sees.
    pub(super) fn fail(&self, error: Error) {
        let mut state = lock(&self.state);
        // What reads end with that their owner has cancelled is no reason.
        let is_cancelled = state.error.is_none() && self.cancel.is_cancelled();
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
        self.close_device();
        self.posted.notify_all();
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
            if state.running == 0 && self.cancel.is_cancelled() {
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

impl Order for Job {
    fn chosen(&self) -> (Route, DirectIo) {
        self.engine.chosen
    }

    fn span(&self) -> Option<&Span> {
        Some(&self.span)
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        Job::tally(self)
    }

    fn name_at(&self, item: usize, offset: u64) -> Option<String> {
        self.name_in(&self.plan.extents()[item], offset)
    }

    fn delivered_bytes(&self, item: usize, range: ByteRange) -> u64 {
        self.plan.delivered_bytes(&self.plan.extents()[item], range)
    }

    fn onward(&self, _: usize) -> Onward {
        match &self.sink {
            Sink::Device(_) => Onward::ToDevice,
            Sink::Host(_) if self.engine.chosen.0.is_unified() => Onward::Unified,
            Sink::Host(_) => Onward::Stay,
        }
    }

    fn may_go_on(&self, _: &Part) -> Result<(), Failure> {
        if self.cancel.is_cancelled() { Err(Reason::Cancelled.into()) } else { Ok(()) }
    }

    fn begins(&self, part: &mut Part, buffer: &mut Buffer, facts: &Facts, _: Access) -> Result<()> {
        self.reached[part.item].store(true, Ordering::Relaxed);
        match (self.plan.extents()[part.item].target, &self.sink) {
            (Target::InPlace { arena, room }, Sink::Host(fills)) => {
                buffer.set_staged(facts.landing == Landing::Shared);
                self.take_from_promise(part.item, room, || fills[arena].touch(room)).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn place(&self, part: &Part, buffer: &mut Buffer) -> Result<Placed> {
        let extent = &self.plan.extents()[part.item];
        let staged_bytes = match (&mut *buffer, &self.sink) {
            (Buffer::InPlace(_), Sink::Host(_)) => 0,
            (buffer @ Buffer::Through { .. }, Sink::Host(_)) => {
                buffer.fill_from_slot(ByteRange::at(0, part.range.len()), part.range.len())?;
                self.plan.delivered_bytes(extent, extent.read)
            }
            (Buffer::Staged { slot: Some(slot), pieces }, Sink::Host(_)) => {
                self.scatter(extent, slot, pieces)?
            }
            (buffer, _) => return Ok(Placed::InSlot(buffer.take_slot()?)),
        };
        buffer.give_slot_back();
        Ok(Placed::Here(staged_bytes))
    }

    fn copy_on(&self, slot: Slot, read: InCopy) {
        match &self.sink {
            Sink::Device(arenas) => arenas.send(&self.plan, slot, read),
            Sink::Host(_) => read.end(Err(Error::Internal("a read to the host has no place".into()))),
        }
    }

    fn complete(&self, part: &Part, buffer: Buffer) -> Result<()> {
        let extent = &self.plan.extents()[part.item];
        let mut tensors = Vec::new();
        match &self.sink {
            Sink::Device(arenas) => {
                for (position, block) in arenas.complete(&self.plan, part.item) {
                    tensors.push(self.tensor(position, TensorMemory::Device(Arc::new(block))));
                }
            }
            Sink::Host(fills) => {
                let mut ready = |position, block| {
                    tensors.push(self.tensor(position, TensorMemory::Host(Arc::new(block))));
                };
                match (buffer, extent.target) {
                    (
                        Buffer::InPlace(region) | Buffer::Through { region, .. },
                        Target::InPlace { arena, .. },
                    ) => fills[arena].complete(region, &mut ready)?,
                    (Buffer::Staged { pieces: regions, .. }, _) => {
                        for (piece, region) in self.plan.pieces(extent, extent.read).zip(regions) {
                            fills[piece.arena].complete(region, &mut ready)?;
                        }
                    }
                    _ => return Err(Error::Internal("a staged extent was read in place".into())),
                }
            }
        }
        self.post(tensors);
        Ok(())
    }

    fn note_delivered(&self, _: &Part, account: &Account) {
        self.tensor_bytes_done.fetch_add(account.tensor_bytes(), Ordering::Relaxed);
    }

    fn failed(&self, error: Error) -> Failure {
        self.fail(error);
        Reason::Cancelled.into()
    }

    fn ended(&self, _: usize, result: Result<(), Failure>) {
        self.is_read.store(true, Ordering::Release);
        match result {
            // The thread whose lane failed says why.
            Ok(()) | Err(Failure::Unmade(Reason::Lost(_))) => {}
            Err(_) if self.cancel.is_cancelled() => {}
            Err(failure) => self.fail(failure.into()),
        }
        self.close_device();
    }
}

impl EngineOwner for Job {
    fn fail(&self, error: Error) {
        Job::fail(self, error);
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
}

/// The objects that a plan reads, by their files.
#[cfg(feature = "objects")]
fn comparisons(sources: &[Arc<dyn Source>], plan: &Plan, cancel: &Cancel) -> BTreeMap<usize, Compared> {
    let until = Instant::now() + CHECKSUM_PATIENCE;
    // What comes first need not be of the first file.
    let mut of_files: BTreeMap<usize, Vec<Range<u64>>> = BTreeMap::new();
    for extent in plan.extents() {
        let ranges = of_files.entry(extent.file.index()).or_default();
        ranges.push(extent.read.start()..extent.read.end());
    }
    let objects = of_files.into_iter().filter_map(|(file, ranges)| {
        let source = sources.get(file)?;
        Some((file, source, ObjectSource::of(source)?.to_compare(ranges)))
    });
    // All are asked for before the first is waited for.
    let objects: Vec<_> = objects.collect();
    let compare = |(file, source, own): (usize, &Arc<dyn Source>, Result<ToCompare<'_>, &'static str>)| {
        (file, (source.clone(), own.and_then(|own| own.begin(until, cancel)).map(Arc::new)))
    };
    objects.into_iter().map(compare).collect()
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
