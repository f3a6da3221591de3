//! The threads that move bytes, and what they share.
#![allow(unsafe_code)]

#[cfg(feature = "fault-injection")]
use super::fault::{FaultScript, Filter};
use super::{
    Failure, Job,
    bounce::BouncePool,
    device::{DeviceLane, DeviceSide, Region},
    events::{AwaitedEvent, EventLine},
    lane::Lane,
    queue::{Closing, Queue, Queued},
    ring::RingLane,
    wake::Wake,
    worker::Worker,
};
use crate::{DirectPath, Error, Result, Route};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};
use windlass_device::{DeviceId, Unavailable};
use windlass_io::{
    Refusal,
    file::ring_refusal,
    parallel::{lock, thread_named},
};

/// Memory of our own for bytes that are not aligned.
pub(crate) const DEFAULT_BOUNCE_BYTES: u64 = 64 << 20;
/// What it is given out in.
const SLOT_BYTES: usize = 64 << 10;
/// Most threads with rings by default: one serves many requests.
const MAX_RINGS: usize = 4;
/// Threads of route `threads` by default: each makes one request at a time.
const DEFAULT_THREADS: usize = 8;
const MAX_THREADS: usize = 256;
/// Threads that serve devices by default: each has copies to wait for.
const DEVICE_WORKERS: usize = 4;
/// Requests that a ring holds.
const RING_DEPTH: usize = 64;
/// Bytes that one worker's ring has in flight before it takes another request on.
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
    /// Bytes of memory for what is not aligned.
    pub(crate) bounce_bytes: u64,
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
            bounce_bytes: DEFAULT_BOUNCE_BYTES,
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
}

/// What would have been better, and why it is not used.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<Vec<Refusal>>);

impl Refusals {
    /// Notes that something better cannot be used for a file.
    pub(super) fn add(&self, what: &str, path: &Path, why: &Unavailable) {
        let mut refused = self.lock();
        let is_known = refused.iter().any(|own| own.what == what && own.why == *why);
        if !is_known && refused.len() < MAX_REFUSALS {
            tracing::warn!(what, path = %path.display(), %why, "refused");
            refused.push(Refusal { what: what.to_owned(), path: Some(path.to_owned()), why: why.clone() });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Refusal>> {
        lock(&self.0)
    }
}

/// What the workers of a group share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) queue: Queue,
    /// Of workers that serve devices.
    pub(super) events: EventLine,
    pub(super) workers: usize,
    pub(super) window_bytes: u64,
    pub(super) background: Background,
    pub(super) refusals: Arc<Refusals>,
}

impl Shared {
    fn push(&self, jobs: Vec<Job>) {
        let (mut waiting, mut ready) = (Vec::new(), Vec::new());
        for job in jobs {
            match AwaitedEvent::of(&job) {
                Some(event) => waiting.push((event, job)),
                None => ready.push(job),
            }
        }
        self.events.push(waiting);
        self.queue.push(ready);
    }

    fn cancel(&self, tag: u64) -> usize {
        // In the order in which jobs go from one to the other.
        self.events.cancel(tag) + self.queue.cancel(tag)
    }
}

/// How many threads are busy with jobs that nobody waits for: some are kept free for the others.
#[derive(Debug)]
pub(super) struct Background {
    busy: AtomicUsize,
    most: usize,
}

impl Background {
    fn new(workers: usize) -> Self {
        Self { busy: AtomicUsize::new(0), most: (workers - workers / 4).max(1) }
    }

    pub(super) fn is_full(&self) -> bool {
        self.busy.load(Ordering::Relaxed) >= self.most
    }

    pub(super) fn began(&self, is_demand: bool) {
        if !is_demand {
            self.busy.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn ended(&self, is_demand: bool) {
        if !is_demand {
            self.busy.fetch_sub(1, Ordering::Relaxed);
        }
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
        let side = Arc::new(DeviceSide::new(options.direct, options.root.clone(), refusals.clone())?);
        let pool = BouncePool::new(options.bounce_bytes, SLOT_BYTES).map_err(failed("getting memory for"))?;
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let default = if route == Route::IoUring { cores.min(MAX_RINGS) } else { DEFAULT_THREADS };
        let workers = options.threads.unwrap_or(default).clamp(1, MAX_THREADS);
        let bounce_bytes = pool.len();
        let hosts = Group::start(&options, route, workers, &pool, None, &refusals)?;
        let process = std::process::id();
        let devices = Mutex::new(None);
        Ok(Self { hosts, devices, side, options, route, bounce_bytes, refusals, process })
    }

    /// Queues jobs; each ends by its `done`, whatever happens.
    pub(crate) fn submit(&self, jobs: Vec<Job>) {
        if self.is_childs() {
            let what = "this process was forked off the one that opened the store: open it anew";
            return reject(jobs, || io::Error::other(what));
        }
        let (of_devices, of_hosts): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(concerns_devices);
        self.hosts.shared.push(of_hosts);
        if of_devices.is_empty() {
            return;
        }
        match self.devices() {
            Ok(shared) => shared.push(of_devices),
            Err(error) => reject(of_devices, || io::Error::other(error.to_string())),
        }
    }

    /// What the workers share that serve devices; they are started if they are not. Jobs are pushed, or rejected, once
    /// the lock is free: their ends may submit others.
    fn devices(&self) -> Result<Arc<Shared>> {
        let mut devices = lock(&self.devices);
        if let Some(group) = &*devices {
            return Ok(group.shared.clone());
        }
        let group = self.start_devices()?;
        Ok(devices.insert(group).shared.clone())
    }

    fn start_devices(&self) -> Result<Group> {
        let failed =
            |source| Error::Io { operation: "getting memory for", path: self.options.root.clone(), source };
        let pool = self.side.pool().map_err(failed)?;
        let workers = self.options.threads.unwrap_or(DEVICE_WORKERS).clamp(1, MAX_THREADS);
        Group::start(&self.options, self.route, workers, &pool, Some(&self.side), &self.refusals)
    }

    /// Ends the jobs with this tag that have not begun, and says how many.
    pub(crate) fn cancel(&self, tag: u64) -> usize {
        if self.is_childs() {
            return 0;
        }
        let devices = lock(&self.devices);
        let of_devices = devices.as_ref().map(|group| group.shared.clone());
        drop(devices);
        self.hosts.shared.cancel(tag) + of_devices.map_or(0, |shared| shared.cancel(tag))
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
        let threads = self.hosts.shared.workers;
        let proofs = self.side.proofs();
        IoReport { route: self.route, threads, bounce_bytes: self.bounce_bytes, proofs, refused }
    }

    /// Whether this is a copy in a child of fork, which has none of the threads.
    fn is_childs(&self) -> bool {
        self.process != std::process::id()
    }
}

/// Whether a job needs workers that serve devices.
fn concerns_devices(job: &Job) -> bool {
    let mut pieces = job.parts.iter().flat_map(|part| &part.pieces);
    job.wait_event.is_some() || pieces.any(|piece| piece.device != DeviceId::Cpu)
}

fn reject(jobs: Vec<Job>, error: impl Fn() -> io::Error) {
    for job in jobs {
        Queued { job, steps: None }.end(Failure::Io(error()));
    }
}

/// Some workers, and their queue.
#[derive(Debug)]
struct Group {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    wakes: Vec<Arc<Wake>>,
    process: u32,
}

impl Group {
    fn start(
        options: &IoOptions,
        route: Route,
        workers: usize,
        pool: &Arc<BouncePool>,
        side: Option<&Arc<DeviceSide>>,
        refusals: &Arc<Refusals>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            queue: Queue::default(),
            events: EventLine::default(),
            workers,
            window_bytes: WINDOW_BYTES,
            background: Background::new(workers),
            refusals: refusals.clone(),
        });
        // Threads that have started end when this is dropped, also by an error below.
        let mut group = Self { shared, threads: Vec::new(), wakes: Vec::new(), process: std::process::id() };
        for number in 0..workers {
            let devices = side.map(|side| DeviceLane::new(side.clone(), pool.clone()));
            group.start_worker(options, route, number, pool, devices)?;
        }
        if let Some(side) = side.cloned() {
            let shared = group.shared.clone();
            let watch = move || {
                // SAFETY: whoever submits a job vouches for its event until `keep` is dropped, which nobody does while
                // the line asks.
                shared.events.watch(&shared.queue, |event| unsafe { side.is_reached(event) });
            };
            let watcher = thread_named("windlass-kv-event").spawn(watch);
            let failed =
                |source| Error::Io { operation: "starting a thread for", path: options.root.clone(), source };
            group.threads.push(watcher.map_err(failed)?);
        }
        Ok(group)
    }

    fn start_worker(
        &mut self,
        options: &IoOptions,
        route: Route,
        number: usize,
        pool: &Arc<BouncePool>,
        devices: Option<DeviceLane>,
    ) -> Result<()> {
        let failed =
            |source| Error::Io { operation: "starting a thread for", path: options.root.clone(), source };
        let wake = Arc::new(Wake::new().map_err(failed)?);
        let (shared, pool, own) = (self.shared.clone(), pool.clone(), wake.clone());
        #[cfg(feature = "fault-injection")]
        let faults = options.faults.clone();
        let kind = if devices.is_some() { "dev" } else { "io" };
        let (started, result) = mpsc::channel();
        let work = move || {
            // A ring belongs to the thread that made it.
            let lane = match route {
                Route::IoUring => RingLane::new(RING_DEPTH).map(Lane::ring),
                Route::Auto | Route::Threads => Ok(Lane::blocking()),
            };
            match lane {
                Ok(lane) => {
                    #[cfg(feature = "fault-injection")]
                    let lane = lane.with_faults(faults.map(|script| Filter::new(script, own.clone())));
                    let _ = started.send(Ok(()));
                    Worker::new((number, own), shared, pool, lane, devices).run();
                }
                Err(why) => _ = started.send(Err(why)),
            }
        };
        let builder = thread_named(&format!("windlass-kv-{kind}{number}"));
        self.threads.push(builder.spawn(work).map_err(failed)?);
        self.wakes.push(wake);
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

impl Drop for Group {
    /// Jobs that wait are cancelled; those that have begun are waited for, however long that takes.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A child of fork has none of the threads, and they may have held locks.
            std::mem::forget(self.shared.clone());
            return;
        }
        self.shared.events.close(Closing::Dropped);
        self.shared.queue.close(Closing::Dropped);
        self.wakes.iter().for_each(|wake| wake.notify());
        for thread in self.threads.drain(..) {
            // The last reference may go in a callback, on a thread of ours: it ends by itself.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// Why no ring can serve files below `root`, or nothing if one can.
fn probe(root: &Path) -> io::Result<Option<Unavailable>> {
    if let Some(why) = ring_refusal(&File::open(root)?)? {
        return Ok(Some(why));
    }
    Ok(RingLane::new(1).err())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_of_an_engine() {
        let directory = tempfile::tempdir().unwrap();
        for route in [Route::Auto, Route::Threads] {
            let engine = IoEngine::start(IoOptions { route, ..IoOptions::new(directory.path()) }).unwrap();
            let shared = Arc::downgrade(&engine.hosts.shared);
            let wakes: Vec<_> = engine.hosts.wakes.iter().map(Arc::downgrade).collect();
            drop(engine);
            assert!(shared.upgrade().is_none(), "a thread lives on");
            assert!(wakes.iter().all(|wake| wake.upgrade().is_none()), "a descriptor is left");
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
