//! The threads that move bytes, and what they share.
#![allow(unsafe_code)]

#[cfg(feature = "fault-injection")]
use super::fault::{FaultScript, FaultyLane};
use super::{
    Failure, Job, Outcome, concerns_devices,
    device::{DeviceLane, DeviceSide, Region},
    join::joined,
    operation::Operation,
    staging::Staging,
    transfer::Transfer,
    worker::{Mover, Party, STAGED, WAITING, Worker, WorkersShared},
};
use crate::{DirectPath, Error, Priority, Result, Route};
use hoistway_device::{DeviceId, Unavailable};
use hoistway_io::{
    Refusal,
    executor::{
        self, Bound, Carried, Charge, Executor, InFlightLimit, Limits, Patience, QueueOptions, Scheduler,
        Served, Service, Submission, Whose,
    },
    file::ring_refusal,
    lane::{BlockingLane, Lane, VectoredCall, VectoredRing},
    parallel::lock,
};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, mpsc},
};

/// Memory of our own for bytes that are not aligned.
const DEFAULT_BOUNCE_BYTES: u64 = 64 << 20;
/// What it is given out in.
const SLOT_BYTES: usize = 64 << 10;
/// Threads with rings by default, also where there are fewer CPUs: each sums bytes while others wait for the drive.
const DEFAULT_RINGS: usize = 4;
/// Threads of route `threads` by default: each makes one request at a time.
const DEFAULT_THREADS: usize = 8;
pub(crate) const MAX_THREADS: usize = 256;
/// Threads that serve devices by default: each has copies to wait for.
const DEVICE_WORKERS: usize = 4;
/// Requests that a ring holds.
const RING_DEPTH: usize = 64;
/// Bytes of one step.
pub(super) const STEP_BYTES: u64 = 8 << 20;
/// Bytes of one step of prefetches and background while there is demand, and of all that a drive has of them then: demand
/// waits for what a drive has begun. Beside four times as much, loads of 64 KiB took up to four times as long as alone.
pub(super) const BYTES_BESIDE_DEMAND: u64 = 256 << 10;
/// Bytes that one thread's ring has in flight.
const WINDOW_BYTES: u64 = 16 << 20;
/// Refusals that a report lists: those of further files say the same.
const MAX_REFUSALS: usize = 64;

/// How an engine is started.
#[derive(Clone, Debug)]
pub(crate) struct IoOptions {
    /// The directory below which the files will lie.
    pub(crate) root: PathBuf,
    pub(crate) route: Route,
    /// Whether devices are read from and written to directly.
    pub(crate) direct: DirectPath,
    /// Threads that move bytes; by default as many as the route needs.
    pub(crate) threads: Option<usize>,
    /// Bytes of memory for what is not aligned, and of as much for devices.
    pub(crate) staging_bytes: Option<u64>,
    /// Faults for tests.
    #[cfg(feature = "fault-injection")]
    pub(crate) faults: Option<FaultScript>,
}

impl IoOptions {
    /// Defaults for files below `root`.
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            route: Route::Auto,
            direct: DirectPath::Prefer,
            threads: None,
            staging_bytes: None,
            #[cfg(feature = "fault-injection")]
            faults: None,
        }
    }
}

/// How an engine moves bytes.
#[derive(Clone, Debug)]
pub(crate) struct IoReport {
    /// [`Route::IoUring`] or [`Route::Threads`].
    pub(crate) route: Route,
    pub(crate) threads: usize,
    /// Bytes of memory for what is not aligned.
    pub(crate) bounce_bytes: u64,
    /// What shows, for each device, that bytes go past the host's memory.
    pub(crate) proofs: Vec<String>,
    /// What would have been better, and why it is not used.
    pub(crate) refused: Vec<Refusal>,
    /// The NUMA node of the memory that bytes of devices pass through, if it is to be of one.
    pub(crate) numa_node: Option<u32>,
    /// What users should know of it.
    pub(crate) notes: Vec<String>,
}

/// What would have been better, and why it is not used.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<Vec<Refusal>>);

impl Refusals {
    /// Notes that something better cannot be used for a file.
    pub(super) fn add(&self, what: &str, path: &Path, why: &Unavailable) {
        let mut refused = self.lock();
        let is_known = refused.iter().any(|refusal| refusal.what == what && refusal.why == *why);
        if !is_known && refused.len() < MAX_REFUSALS {
            tracing::warn!(what, path = %path.display(), %why, "refused");
            refused.push(Refusal::new(what, Some(path.to_owned()), why.clone()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Refusal>> {
        lock(&self.0)
    }
}

/// Moves bytes between memory and files, by threads of its own.
#[derive(Debug)]
pub(crate) struct IoEngine {
    hosts: Group,
    /// Those that serve devices, once there was something to serve.
    devices: Mutex<Option<Group>>,
    side: Arc<DeviceSide>,
    options: IoOptions,
    /// The one that was chosen.
    route: Route,
    bounce_bytes: u64,
    refusals: Arc<Refusals>,
    process: u32,
}

impl IoEngine {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if a route was named that cannot run for files below the root; [`Error::Io`] if there
    /// is no memory, descriptor or thread for it.
    pub(crate) fn start(options: IoOptions) -> Result<Self> {
        let failed = |operation| {
            let path = options.root.clone();
            move |source| Error::Io { operation, path, source }
        };
        let refusals = Arc::new(Refusals::default());
        let route = match options.route {
            Route::Threads => Route::Threads,
            Route::Auto | Route::IoUring => match probe(&options.root).map_err(failed("asking"))? {
                None => Route::IoUring,
                Some(why) if options.route == Route::Auto => {
                    refusals.add("io_uring", &options.root, &why);
                    Route::Threads
                }
                Some(why) => {
                    let (route, path) = (Route::IoUring.to_string(), options.root);
                    return Err(Error::RouteUnavailable { route, path, why });
                }
            },
        };
        let side = Arc::new(DeviceSide::new(
            options.direct,
            options.root.clone(),
            options.staging_bytes,
            refusals.clone(),
        )?);
        let staging_bytes = options.staging_bytes.unwrap_or(DEFAULT_BOUNCE_BYTES);
        let staging =
            Arc::new(Staging::new(staging_bytes, SLOT_BYTES).map_err(failed("getting memory for"))?);
        let default = if route == Route::IoUring { DEFAULT_RINGS } else { DEFAULT_THREADS };
        let workers = options.threads.unwrap_or(default).clamp(1, MAX_THREADS);
        let bounce_bytes = staging.len();
        let hosts = Group::start(&options, route, workers, staging, None, &refusals)?;
        let process = std::process::id();
        let devices = Mutex::new(None);
        Ok(Self { hosts, devices, side, options, route, bounce_bytes, refusals, process })
    }

    /// Queues jobs; each ends by its `done`, whatever happens.
    pub(crate) fn submit(&self, jobs: Vec<Job>) {
        if self.is_childs() {
            // Before any lock: that of a thread that the parent had would be held for ever.
            return reject(jobs, Failure::from(executor::Reason::Forked));
        }
        for jobs in joined(jobs, |job| self.side.may_move(job)) {
            if jobs.iter().any(concerns_devices) {
                match self.devices() {
                    Ok((scheduler, staging)) => {
                        let is_direct = jobs.iter().any(|job| self.side.may_move(job));
                        submit(&scheduler, jobs, Some(&Ours { staging: &staging, is_direct }));
                    }
                    Err(error) => reject(jobs, Failure::Io(io::Error::other(error.to_string()))),
                }
            } else {
                let ours = Ours { staging: &self.hosts.staging, is_direct: true };
                submit(self.hosts.executor.scheduler(), jobs, Some(&ours));
            }
        }
    }

    /// What serves devices, with threads that are started if they are not; no driver is called. Jobs are submitted once the lock is
    /// free: their ends may submit others.
    fn devices(&self) -> Result<(Arc<Scheduler<Mover>>, Arc<Staging>)> {
        let mut devices = lock(&self.devices);
        let group = match &mut *devices {
            Some(group) => group,
            none => none.insert(self.start_devices()?),
        };
        Ok((group.executor.scheduler().clone(), group.staging.clone()))
    }

    fn start_devices(&self) -> Result<Group> {
        let failed =
            |source| Error::Io { operation: "getting memory for", path: self.options.root.clone(), source };
        let pool = self.side.pool().map_err(failed)?;
        let workers = self.options.threads.unwrap_or(DEVICE_WORKERS).clamp(1, MAX_THREADS);
        Group::start(&self.options, self.route, workers, pool, Some(&self.side), &self.refusals)
    }

    /// Ends the jobs with this tag that have not begun, or are between two steps, and says how many.
    pub(crate) fn cancel(&self, tag: u64) -> usize {
        if self.is_childs() {
            return 0;
        }
        let of_devices = lock(&self.devices).as_ref().map(|group| group.executor.scheduler().clone());
        let schedulers = of_devices.iter().chain([self.hosts.executor.scheduler()]);
        schedulers.map(|scheduler| scheduler.cancel(Whose::Tag(tag)).not_begun).sum()
    }

    /// Makes memory of a device known to the direct path, if `direct` of the options allows that and it is proven to
    /// work; else the report says why not, and the memory's bytes go by way of the host.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if the direct path is required, and cannot be had; [`Error::Device`] if the device
    /// cannot be used at all.
    ///
    /// # Safety
    /// It must be memory of this device, and stay allocated until the result is dropped.
    pub(crate) unsafe fn register_device(&self, id: DeviceId, address: u64, len: u64) -> Result<Region> {
        // SAFETY: passed on.
        unsafe { self.side.register(id, address, len) }
    }

    /// How bytes are moved.
    pub(crate) fn report(&self) -> IoReport {
        let refused = self.refusals.lock().clone();
        let threads = self.hosts.workers;
        let proofs = self.side.proofs();
        let (numa_node, notes) = self.side.placed();
        let (route, bounce_bytes) = (self.route, self.bounce_bytes);
        IoReport { route, threads, bounce_bytes, proofs, refused, numa_node, notes }
    }

    /// Whether this is a copy in a child of fork, which has none of the threads.
    fn is_childs(&self) -> bool {
        self.process != std::process::id()
    }
}

fn reject(jobs: Vec<Job>, failure: Failure) {
    for job in jobs {
        let Job { keep, done, .. } = job;
        drop(keep);
        done(Outcome::failed(failure.copied()));
    }
}

/// Memory of ours that jobs may need.
struct Ours<'a> {
    staging: &'a Staging,
    /// Whether devices may move their bytes without it.
    is_direct: bool,
}

impl Ours<'_> {
    /// Slots for the first step of a transfer, which has `bytes` bytes: fewer than it needs at times, which it is given later.
    fn slots(&self, transfer: &Transfer, bytes: u64) -> u32 {
        let most = self.staging.slots_for(self.staging.len().min(STEP_BYTES));
        let headers = transfer.header_bytes();
        let payload = if self.is_direct { 0 } else { transfer.device_bytes().min(bytes) };
        self.staging.slots_for(headers.saturating_add(payload)).min(most)
    }
}

/// Queues jobs that are carried out together, unless they were withdrawn. They wait for the memory of `ours` that they need
/// from the beginning, rather than for their turn first.
fn submit(scheduler: &Arc<Scheduler<Mover>>, jobs: Vec<Job>, ours: Option<&Ours<'_>>) {
    let Some(first) = jobs.first() else { return };
    let withdrawn = first.withdrawn.clone();
    if withdrawn.is_set() {
        return reject(jobs, Failure::Cancelled);
    }
    let (tag, priority, deadline, event) = (first.tag, first.priority, first.deadline, first.wait_event);
    let Some(transfer) = Transfer::new(jobs, Arc::downgrade(scheduler)) else { return };
    let bytes = step_bytes(&transfer, priority, scheduler);
    let slots = ours.map_or(0, |ours| ours.slots(&transfer, bytes));
    let operation = executor::Operation {
        queue: if slots > 0 { STAGED } else { WAITING },
        charge: Charge { bytes, slots },
        order: 0,
        content: Operation::new(&transfer),
    };
    let event = event.map(|handle| transfer.event(handle));
    let submission = Submission {
        tag,
        priority,
        deadline,
        event,
        ..Submission::new(Party::new(&transfer), vec![operation])
    };
    match scheduler.submit(submission) {
        // The thread that withdraws a job sets `withdrawn` before it looks for the group.
        Ok(group) if withdrawn.is_set() => _ = scheduler.cancel(Whose::Group(group)),
        Ok(_) => {}
        Err(refused) => {
            let reason = refused.reason.clone();
            drop(refused);
            transfer.fail(reason.into());
            end(&transfer);
        }
    }
}

/// Bytes that the next step of a transfer may be.
pub(super) fn step_bytes(transfer: &Transfer, priority: Priority, scheduler: &Scheduler<Mover>) -> u64 {
    let is_beside_demand = priority != Priority::Demand && scheduler.has_demand();
    let most = if is_beside_demand { BYTES_BESIDE_DEMAND } else { STEP_BYTES };
    transfer.len_bytes().min(most)
}

/// Ends a transfer. If one of several jobs may have failed it, each is carried out again, alone.
pub(super) fn end(transfer: &Transfer) {
    let again = transfer.end();
    if again.is_empty() {
        return;
    }
    match transfer.scheduler.upgrade() {
        Some(scheduler) => again.into_iter().for_each(|job| submit(&scheduler, vec![job], None)),
        None => reject(again, Failure::Cancelled),
    }
}

/// Threads that serve the same queues. Dropped, it cancels jobs that wait, and waits for those that have begun, however long
/// that takes.
#[derive(Debug)]
struct Group {
    executor: Executor<Mover>,
    staging: Arc<Staging>,
    workers: usize,
}

impl Group {
    fn start(
        options: &IoOptions,
        route: Route,
        workers: usize,
        staging: Arc<Staging>,
        devices: Option<&Arc<DeviceSide>>,
        refusals: &Arc<Refusals>,
    ) -> Result<Self> {
        let depth = if route == Route::IoUring { RING_DEPTH } else { 1 };
        let bytes = if route == Route::IoUring { WINDOW_BYTES * workers as u64 } else { u64::MAX };
        let in_flight =
            Bound { rest_bytes_beside_demand: BYTES_BESIDE_DEMAND, ..Bound::new(bytes, depth * workers) };
        let limits = Limits { accepted: Bound::NONE, in_flight };
        let queues = [
            QueueOptions { slots: None, hands_over_to: vec![STAGED] },
            QueueOptions { slots: Some(staging.count()), hands_over_to: Vec::new() },
        ];
        let side = devices.cloned();
        let scheduler = Scheduler::new(Mover { side }, limits, &queues);
        // Threads that have started end when this is dropped, also by an error below.
        let group = Self { executor: Executor::new(scheduler), staging: staging.clone(), workers };
        let shared =
            Arc::new(WorkersShared { staging, refusals: refusals.clone(), lazy_files: Arc::default() });
        for number in 0..workers {
            group.start_worker(options, route, number, &shared, devices)?;
        }
        if devices.is_some() {
            let failed =
                |source| Error::Io { operation: "starting a thread for", path: options.root.clone(), source };
            group.executor.spawn_watcher("hoistway-kv-event").map_err(failed)?;
        }
        Ok(group)
    }

    fn start_worker(
        &self,
        options: &IoOptions,
        route: Route,
        number: usize,
        shared: &Arc<WorkersShared>,
        devices: Option<&Arc<DeviceSide>>,
    ) -> Result<()> {
        let devices = devices.map(|side| DeviceLane::new(side.clone(), shared.staging.clone()));
        let kind = if devices.is_some() { "dev" } else { "io" };
        let is_ring = route == Route::IoUring;
        let worker = Worker { shared: shared.clone(), is_ring, devices };
        #[cfg(feature = "fault-injection")]
        let faults = options.faults.clone();
        let (started, result) = mpsc::channel();
        let work = move |scheduler: &Arc<Scheduler<Mover>>| {
            let serve = |lane: Way| {
                let _ = started.send(Ok(()));
                #[cfg(feature = "fault-injection")]
                if let Some(script) = faults {
                    return match lane {
                        Way::Ring(ring) => serve(scheduler, FaultyLane::new(ring, script), worker),
                        Way::Calls(calls) => serve(scheduler, FaultyLane::new(calls, script), worker),
                    };
                }
                match lane {
                    Way::Ring(ring) => serve(scheduler, ring, worker),
                    Way::Calls(calls) => serve(scheduler, calls, worker),
                }
            };
            if !is_ring {
                return serve(Way::Calls(BlockingLane::new(VectoredCall)));
            }
            // A ring belongs to the thread that made it.
            match VectoredRing::new(RING_DEPTH) {
                Ok(ring) => serve(Way::Ring(ring)),
                Err(why) => _ = started.send(Err(why)),
            }
        };
        let failed =
            |source| Error::Io { operation: "starting a thread for", path: options.root.clone(), source };
        self.executor.spawn(&format!("hoistway-kv-{kind}{number}"), work).map_err(failed)?;
        match result.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => {
                let (route, path) = (route.to_string(), options.root.clone());
                Err(Error::RouteUnavailable { route, path, why })
            }
            Err(_) => Err(Error::Internal("a thread ended before it began".into())),
        }
    }
}

/// What carries the operations of a thread.
enum Way {
    Ring(VectoredRing<Carried<Operation>>),
    Calls(BlockingLane<VectoredCall, Carried<Operation>>),
}

fn serve(scheduler: &Arc<Scheduler<Mover>>, lane: impl Lane<Carried<Operation>>, mut worker: Worker) {
    let limit = InFlightLimit::fixed(lane.capacity());
    let service = Service { queues: &[WAITING, STAGED], limit, patience: Patience::UntilOver };
    if let Served::Failed { error, .. } = scheduler.serve(lane, &mut worker, service) {
        tracing::error!(%error, "a ring cannot be waited for: memory is leaked, and the store takes no more requests");
    }
}

/// Why no ring can serve files below `root`, or nothing if one can.
fn probe(root: &Path) -> io::Result<Option<Unavailable>> {
    if let Some(why) = ring_refusal(&File::open(root)?)? {
        return Ok(Some(why));
    }
    Ok(VectoredRing::<Carried<Operation>>::new(1).err())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_of_an_engine() {
        let directory = tempfile::tempdir().unwrap();
        for route in [Route::Auto, Route::Threads] {
            let engine = IoEngine::start(IoOptions { route, ..IoOptions::new(directory.path()) }).unwrap();
            let scheduler = Arc::downgrade(engine.hosts.executor.scheduler());
            drop(engine);
            assert!(scheduler.upgrade().is_none(), "a thread lives on");
        }
    }

    #[test]
    fn a_root_that_is_not_there_is_an_error() {
        for route in [Route::Auto, Route::IoUring] {
            let options = IoOptions { route, ..IoOptions::new("/nonexistent") };
            assert!(matches!(IoEngine::start(options), Err(Error::Io { .. })));
        }
    }
}
