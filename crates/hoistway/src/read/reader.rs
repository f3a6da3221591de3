//! A reader: its threads, and how batches get to them.
#![forbid(unsafe_code)]

use super::{
    Batch, Priority, ReadRequest, ReaderOptions,
    device::DeviceShare,
    pieces::{self, Cut},
    shared::ReaderShared,
    state::BatchState,
    worker::{self, PIECES},
};
#[cfg(feature = "objects")]
use crate::memory::Ledger;
use crate::{
    ByteRange, Cancel, DeviceId, Error, Result,
    device::Fence,
    memory::{self, SlotKind, Slots},
    parallel::{lock, thread_named},
    report::{Refusal, RouteRemarks, add_new},
    route::{
        Access, Buffer, DirectRoute, ReadOp, Unavailable,
        member::{Landing, Member},
        registry::{self, NotOpened},
    },
    source::Source,
    transfer::{Order, Reads},
};
use hoistway_io::executor::{Bound, Charge, Limits, Operation, QueueOptions, Reason, Scheduler, Submission};
use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Instant,
};

/// Reads byte ranges into memory of the caller's choice, on threads that stay.
///
/// Dropping it ends what waits with [`Error::Cancelled`] and waits for what is under way, unless one of its own threads
/// drops it.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<ReaderShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Held while the main route is opened.
    opening: Mutex<()>,
    next_batch: AtomicU64,
    /// Ends all reads.
    cancel: Cancel,
    process: u32,
}

impl Reader {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::InvalidOption`]; [`Error::RouteUnavailable`] if the route that is named cannot run here;
    /// [`Error::Allocation`]; [`Error::System`] if the system gives no thread. If it gives some, these serve.
    pub fn new(options: &ReaderOptions) -> Result<Self> {
        options.check()?;
        let in_flight = Bound { rest_operations: (options.most_reads() / 2).max(1), ..Bound::NONE };
        let limits = Limits { accepted: Bound::NONE, in_flight };
        let scheduler = Scheduler::new(Reads, limits, &[QueueOptions::default()]);
        let (cached, main) = open_routes(options, &[])?;
        let (lines, lost) = (Mutex::default(), Arc::default());
        let cancel = options.cancel.as_ref().map_or_else(Cancel::default, Cancel::child);
        if options.in_flight > options.most_reads() {
            tracing::warn!(
                in_flight = options.most_reads(),
                "a reader has fewer reads in flight than in_flight asks for, as the process may have few files open: raise \
                 ulimit -n"
            );
        }
        let shared = ReaderShared {
            scheduler,
            cached,
            main: OnceLock::new(),
            remarks: OnceLock::new(),
            slots: OnceLock::new(),
            lost,
            lines,
            #[cfg(feature = "objects")]
            ledger: Ledger::new(options.unstaged_bytes()),
            options: options.clone(),
        };
        let (threads, opening, next_batch) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        let (shared, process) = (Arc::new(shared), std::process::id());
        let reader = Self { shared, threads, opening, next_batch, cancel, process };
        // A route that needs a file begins with the first.
        if let Some(main) = main.or_else(|| reader.shared.cached.clone()) {
            reader.start(main)?;
            reader.make_host_slots()?;
        }
        Ok(reader)
    }

    /// The options that it was made with.
    pub fn options(&self) -> &ReaderOptions {
        &self.shared.options
    }

    /// Bytes of the host that staging slots have room for, each of which is taken as it is first used, and the most that have waited
    /// for the node's cache.
    pub(crate) fn staging_bytes(&self) -> u64 {
        let slots = self.shared.slots.get().map_or(0, Slots::host_bytes);
        #[cfg(feature = "objects")]
        let slots = slots + self.shared.ledger.most_taken_bytes();
        slots
    }

    /// Starts to read. Each request succeeds or fails for itself: what is wrong with one, a range past the end of its
    /// file for instance, is told by its status.
    ///
    /// Reads that are not in [demand](Priority::Demand) take half of the lanes at most, but one at least, so that demand
    /// finds a lane free.
    ///
    /// # Errors
    /// [`Error::Forked`] in a child of the process that made the reader. Nothing else.
    pub fn submit(
        &self,
        requests: impl IntoIterator<Item = ReadRequest>,
        priority: Priority,
    ) -> Result<Batch> {
        if self.process != std::process::id() {
            return Err(Error::Forked);
        }
        let shared = &self.shared;
        let (mut reads, mut cuts, mut broken, mut borrowed) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut direct, mut refused) = (Vec::new(), Vec::new());
        // Many requests share one.
        let mut queued: Vec<(DeviceId, Fence)> = Vec::new();
        let mut by_host: Vec<DeviceId> = Vec::new();
        for (number, request) in requests.into_iter().enumerate() {
            borrowed.extend(request.borrowed());
            let (source, is_on_device) = (request.file.0.clone(), request.target.0.is_on_device());
            let usable = self.make_usable(&source, !is_on_device);
            let fences = request.fences.clone();
            let line = |device| {
                let (line, is_direct) = self.way_to(device, &source, &mut direct, &mut refused)?;
                if !is_direct
                    && !by_host.contains(&device)
                    && let Some(main) = shared.main.get()
                {
                    by_host.push(device);
                    add_new(&mut refused, main.refusals(Some(device)));
                }
                for fence in fences.into_iter().filter(Fence::is_queued) {
                    let queued_before = (device, fence);
                    if !queued.contains(&queued_before) {
                        line.come_after(&queued_before.1)?;
                        queued.push(queued_before);
                    }
                }
                Ok((line, is_direct))
            };
            match pieces::cut(request, shared.options.chunk_bytes, usable, line) {
                Ok(Cut { state, pieces, begin_by }) => {
                    reads.push(state);
                    cuts.push((number, pieces, begin_by));
                }
                Err(failed) => {
                    let (state, error) = *failed;
                    reads.push(state);
                    broken.push((number, error));
                }
            }
        }
        if shared.options.huge_pages {
            memory::advise_huge_pages(borrowed);
        }
        let number = self.next_batch.fetch_add(1, Ordering::Relaxed);
        let cancel = self.cancel.child();
        let state = Arc::new(BatchState::new(number, cancel, reads, priority, direct, shared));
        let batch = Batch::new(state.clone(), shared.scheduler.clone());
        for refusal in refused {
            state.tally().refuse(refusal);
        }
        for (read, error) in broken {
            state.fail(read, error);
        }
        let (mut submitted, mut submissions) =
            (Vec::with_capacity(cuts.len()), Vec::with_capacity(cuts.len()));
        for (read, pieces, begin_by) in cuts {
            if pieces.is_empty() {
                state.end_empty(read);
                continue;
            }
            submitted.push(read);
            submissions.push(self.submission(&state, read, pieces, begin_by));
        }
        // At once, since each wake of a thread may cost this one its processor.
        for (read, answer) in submitted.into_iter().zip(shared.scheduler.submit_all(submissions)) {
            match answer {
                Ok(group) => _ = state.read(read).group.set(group),
                Err(refused) => {
                    let reason = refused.reason.clone();
                    drop(refused);
                    state.fail(read, reason.into());
                }
            }
        }
        Ok(batch)
    }

    /// The pieces of a read, for the scheduler.
    fn submission(
        &self,
        batch: &Arc<BatchState>,
        read: usize,
        pieces: Vec<(ByteRange, Buffer)>,
        begin_by: Option<Instant>,
    ) -> Submission<Reads> {
        let order: Arc<dyn Order> = batch.clone();
        let operation = |(wanted, buffer): (ByteRange, Buffer)| {
            let (source, cancel) = (batch.read(read).file.0.clone(), batch.cancel.clone());
            #[cfg_attr(not(feature = "objects"), expect(unused_mut, reason = "no ledger is set"))]
            let mut content =
                ReadOp::new(order.clone(), (read, wanted), source, Access::Direct, buffer, cancel);
            #[cfg(feature = "objects")]
            {
                content.ledger = Some(self.shared.ledger.clone());
            }
            Operation { queue: PIECES, charge: Charge::of_bytes(wanted.len()), order: 0, content }
        };
        let operations = pieces.into_iter().map(operation).collect();
        let (tag, priority) = (batch.number, *lock(&batch.priority));
        Submission { tag, priority, deadline: begin_by, ..Submission::new((order.clone(), read), operations) }
    }

    /// The way to a device for reads of a file, and whether it leads past the host: then its route is added to `direct`. Adds
    /// to `refused` why it does not, if it might.
    fn way_to(
        &self,
        device: DeviceId,
        source: &Arc<dyn Source>,
        direct: &mut Vec<Arc<DirectRoute>>,
        refused: &mut Vec<Refusal>,
    ) -> Result<(Arc<DeviceShare>, bool)> {
        let line = self.line(device)?;
        let is_direct = match line.add_direct(source) {
            Ok(is_direct) => is_direct,
            Err(error) if self.shared.options.route.is_past_host() => return Err(error),
            Err(Error::RouteUnavailable { route, path, why }) => {
                add_new(refused, [Refusal::new(route.name(), path, why)]);
                false
            }
            Err(error) => {
                let why = Unavailable::new(error.to_string(), "");
                let route = line.direct().map(|direct| direct.member.route());
                add_new(refused, route.map(|route| Refusal::new(route.name(), None, why)));
                false
            }
        };
        if let Some(own) = line.direct().filter(|_| is_direct)
            && !direct.iter().any(|known| Arc::ptr_eq(known, own))
        {
            direct.push(own.clone());
        }
        Ok((line, is_direct))
    }

    fn line(&self, device: DeviceId) -> Result<Arc<DeviceShare>> {
        if device.is_host() {
            let reason = "it has no addresses of its own: give a pointer of the host";
            return Err(Error::invalid_option("device", device, reason));
        }
        // A device that is lost is opened anew once nothing uses it. The reader alone holds the line, which ends with its copies.
        let lost = {
            let mut lines = lock(&self.shared.lines);
            let is_lost = lines.get(&device).is_some_and(|line| line.is_lost());
            if is_lost { lines.remove(&device) } else { None }
        };
        // That calls the driver.
        drop(lost);
        let mut lines = lock(&self.shared.lines);
        if let Some(line) = lines.get(&device) {
            return Ok(line.clone());
        }
        let line = DeviceShare::new(device, &self.shared.options, self.shared.main.get())?;
        let waiter = line.line.waiter();
        self.spawn("hoistway-device", move |_| waiter.serve(|_| ()))?;
        lines.insert(device, line.clone());
        Ok(line)
    }

    /// Makes a file ready for the route that threads read by; with the first one, perhaps that route.
    fn make_usable(&self, source: &Arc<dyn Source>, is_to_host: bool) -> Result<()> {
        let options = &self.shared.options;
        let unavailable =
            |why| Error::RouteUnavailable { route: options.route, path: Some(source.path().to_owned()), why };
        if is_to_host && options.route.is_past_host() {
            let reason = format!("route {} leads to a device, and the target is host memory", options.route);
            return Err(unavailable(Unavailable::new(reason, "choose route auto")));
        }
        let main = match self.shared.main.get() {
            Some(main) => main,
            None => self.start_with(source)?,
        };
        main.add(source, Access::Direct).map_err(unavailable)?;
        if is_to_host { self.make_host_slots() } else { Ok(()) }
    }

    /// Makes the slots for reads to the host, unless they are there.
    fn make_host_slots(&self) -> Result<()> {
        let ReaderShared { options, main, slots, .. } = &*self.shared;
        let _opening = lock(&self.opening);
        if slots.get().is_none() {
            let (count, slot_bytes) = (options.slots(), options.chunk_bytes as usize);
            let made = match main.get().filter(|main| main.facts().landing == Landing::Shared) {
                Some(main) => main.slots(count, slot_bytes, None, None)?,
                None => Slots::new(count, slot_bytes, SlotKind::Host)?,
            };
            let _ = slots.set(made);
        }
        Ok(())
    }

    /// Opens the route that `source` is read by.
    fn start_with(&self, source: &Arc<dyn Source>) -> Result<&Arc<dyn Member>> {
        let opening = lock(&self.opening);
        if self.shared.main.get().is_none() {
            let (_, main) = open_routes(&self.shared.options, &[source])?;
            self.start(main.ok_or_else(|| Error::Internal("no route reads".into()))?)?;
        }
        drop(opening);
        self.shared.main.get().ok_or_else(|| Error::Internal("no route was started".into()))
    }

    /// Starts the threads that read by a route, as many as the system gives.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if a thread gets no lane; [`Error::System`] if there is no thread.
    fn start(&self, main: Arc<dyn Member>) -> Result<()> {
        let options = &self.shared.options;
        let in_flight =
            if main.facts().landing == Landing::Shared { options.slots() } else { options.most_reads() };
        let (lanes, depth) = main.facts().lanes(in_flight);
        main.open_lanes(lanes, depth)?;
        let (tells, hears) = mpsc::channel();
        for started in 0..lanes {
            let (told, member) = (tells.clone(), main.clone());
            let thread = self.spawn(main.facts().thread_name, move |shared| match member.lane(depth) {
                Ok(lane) => {
                    drop(told);
                    worker::run(shared, member, lane);
                }
                Err(why) => drop(told.send(why)),
            });
            match thread {
                Err(error) if started > 0 => {
                    tracing::warn!(%error, started, "a reader has fewer threads than lanes");
                    break;
                }
                thread => thread?,
            }
        }
        drop(tells);
        // Reads that are made one at a time, on any number of lanes, need nothing of the system that it could refuse.
        if (depth > 1 || main.facts().most_lanes == 1)
            && let Ok(why) = hears.recv()
        {
            return Err(Error::RouteUnavailable { route: main.route(), path: None, why });
        }
        let _ = self.shared.remarks.set(Arc::new(RouteRemarks::of(&*main, None)));
        let _ = self.shared.main.set(main);
        Ok(())
    }

    fn spawn(&self, name: &str, work: impl FnOnce(&ReaderShared) + Send + 'static) -> Result<()> {
        let shared = self.shared.clone();
        let thread = thread_named(name).spawn(move || work(&shared));
        let thread = thread.map_err(|source| Error::System { operation: "starting a thread", source })?;
        lock(&self.threads).push(thread);
        Ok(())
    }
}

/// A route, if there is one.
type OpenMember = Option<Arc<dyn Member>>;

/// What copies from the page cache, and what reads the rest, if these files or the options say which that is.
///
/// # Errors
/// [`Error::RouteUnavailable`] if the route that is named cannot be.
fn open_routes(options: &ReaderOptions, files: &[&Arc<dyn Source>]) -> Result<(OpenMember, OpenMember)> {
    let wanted = options.wanted(None);
    let (mut cached, mut main) = (None, None);
    for entry in registry::readers().filter(|entry| entry.landing != Landing::Device) {
        match (entry.open)(&wanted, files, &[]) {
            Ok(Some(member)) if member.facts().cache.is_some() => cached = Some(member),
            Ok(Some(member)) => main = main.or(Some(member)),
            Ok(None) => {}
            Err(NotOpened { path, why }) if wanted.names(entry.route) => {
                return Err(Error::RouteUnavailable { route: options.route, path, why });
            }
            Err(_) => {}
        }
    }
    Ok((cached, main))
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The threads live in the parent: here, what detaches them may write to memory that has another owner by now.
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(threads));
            return;
        }
        self.shared.scheduler.close(Reason::Closed);
        self.cancel.cancel();
        let lines: Vec<_> = lock(&self.shared.lines).drain().map(|(_, line)| line).collect();
        let (devices, readers): (Vec<_>, Vec<_>) = lock(&self.threads)
            .drain(..)
            .partition(|thread| thread.thread().name() == Some("hoistway-device"));
        let current = thread::current().id();
        let is_own = readers.iter().chain(&devices).any(|thread| thread.thread().id() == current);
        let end = move || {
            // Those who wait for copies go last: readers may still send some.
            for thread in readers {
                let _ = thread.join();
            }
            lines.iter().for_each(|line| line.line.close());
            for thread in devices {
                let _ = thread.join();
            }
        };
        if is_own {
            // It cannot wait for itself. If no thread is to be had, the others end without being waited for. What they still copy to
            // a device fails then, as its line goes here.
            let _ = thread_named("hoistway-end").spawn(end);
        } else {
            end();
        }
    }
}
