//! The threads that move bytes, and what they share.
#![forbid(unsafe_code)]

#[cfg(feature = "fault-injection")]
use super::fault::{FaultScript, Filter};
use super::{
    Failure, Job,
    bounce::BouncePool,
    lane::Lane,
    queue::{Queue, Queued},
    ring::RingLane,
    wake::Wake,
    worker::Worker,
};
use crate::{Error, IoRoute, Result};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};
use windlass::{
    Refusal,
    route::{Unavailable, ring_refusal},
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
    pub(crate) route: IoRoute,
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
            route: IoRoute::Auto,
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
    /// [`IoRoute::IoUring`] or [`IoRoute::Threads`].
    pub(crate) route: IoRoute,
    pub(crate) threads: usize,
    /// Bytes of memory for what is not aligned.
    pub(crate) bounce_bytes: u64,
    /// What would have been better, and why it is not used.
    pub(crate) refused: Vec<Refusal>,
}

/// What the workers share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) queue: Queue,
    pub(super) workers: usize,
    pub(super) window_bytes: u64,
    pub(super) background: Background,
    refused: Mutex<Vec<Refusal>>,
}

impl Shared {
    /// Notes that something better cannot be used for a file.
    pub(super) fn refuse(&self, what: &str, path: &Path, why: &Unavailable) {
        // Kept consistent by every statement, so a panic elsewhere does not spoil it.
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = refused.iter().any(|own| own.what == what && own.why == *why);
        if !is_known && refused.len() < MAX_REFUSALS {
            tracing::warn!(what, path = %path.display(), %why, "refused");
            refused.push(Refusal { what: what.to_owned(), path: Some(path.to_owned()), why: why.clone() });
        }
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
    shared: Arc<Shared>,
    route: IoRoute,
    bounce_bytes: u64,
    threads: Vec<JoinHandle<()>>,
    wakes: Vec<Arc<Wake>>,
    process: u32,
}

impl IoEngine {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if a route was named that cannot run for files below the root; [`Error::Io`] if there
    /// is no memory, descriptor or thread for it.
    pub(crate) fn start(options: IoOptions) -> Result<Self> {
        let failed = |doing| {
            let path = options.root.clone();
            move |source| Error::Io { doing, path, source }
        };
        let pool = BouncePool::new(options.bounce_bytes, SLOT_BYTES).map_err(failed("getting memory for"))?;
        let (route, refused) = match options.route {
            IoRoute::Threads => (IoRoute::Threads, None),
            IoRoute::Auto | IoRoute::IoUring => match probe(&options.root).map_err(failed("asking"))? {
                None => (IoRoute::IoUring, None),
                Some(why) if options.route == IoRoute::Auto => (IoRoute::Threads, Some(why)),
                Some(why) => {
                    let (route, path) = (IoRoute::IoUring.to_string(), options.root);
                    return Err(Error::RouteUnavailable { route, path, why });
                }
            },
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let default = if route == IoRoute::IoUring { cores.min(MAX_RINGS) } else { DEFAULT_THREADS };
        let workers = options.threads.unwrap_or(default).clamp(1, MAX_THREADS);
        let shared = Arc::new(Shared {
            queue: Queue::new(),
            workers,
            window_bytes: WINDOW_BYTES,
            background: Background::new(workers),
            refused: Mutex::default(),
        });
        if let Some(why) = refused {
            shared.refuse("io_uring", &options.root, &why);
        }
        let bounce_bytes = pool.len();
        // Threads that have started end when this is dropped, also by an error below.
        let mut engine = Self {
            shared,
            route,
            bounce_bytes,
            threads: Vec::new(),
            wakes: Vec::new(),
            process: std::process::id(),
        };
        for number in 0..workers {
            engine.start_worker(number, &pool, &options)?;
        }
        let shared = engine.shared.clone();
        let timer =
            thread::Builder::new().name("windlass-kv-time".into()).spawn(move || shared.queue.expire());
        engine.threads.push(timer.map_err(failed("starting a thread for"))?);
        Ok(engine)
    }

    fn start_worker(&mut self, number: usize, pool: &Arc<BouncePool>, options: &IoOptions) -> Result<()> {
        let failed =
            |source| Error::Io { doing: "starting a thread for", path: options.root.clone(), source };
        let wake = Arc::new(Wake::new().map_err(failed)?);
        let (route, shared, pool, own) = (self.route, self.shared.clone(), pool.clone(), wake.clone());
        #[cfg(feature = "fault-injection")]
        let faults = options.faults.clone();
        let (started, result) = mpsc::channel();
        let work = move || {
            // A ring belongs to the thread that made it.
            let lane = match route {
                IoRoute::IoUring => RingLane::new(RING_DEPTH).map(Lane::ring),
                IoRoute::Auto | IoRoute::Threads => Ok(Lane::blocking()),
            };
            match lane {
                Ok(lane) => {
                    #[cfg(feature = "fault-injection")]
                    let lane = lane.with_faults(faults.map(|script| Filter::new(script, own.clone())));
                    let _ = started.send(Ok(()));
                    Worker::new(number, shared, pool, lane, own).run();
                }
                Err(why) => _ = started.send(Err(why)),
            }
        };
        let thread =
            thread::Builder::new().name(format!("windlass-kv-io{number}")).spawn(work).map_err(failed)?;
        self.threads.push(thread);
        self.wakes.push(wake);
        match result.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => {
                let (route, path) = (self.route.to_string(), options.root.clone());
                Err(Error::RouteUnavailable { route, path, why })
            }
            Err(_) => Err(Error::Internal("a thread ended before it began".into())),
        }
    }

    /// Queues jobs; each ends by its `done`, whatever happens.
    pub(crate) fn submit(&self, jobs: Vec<Job>) {
        let rejected = if self.is_childs() { Err(jobs) } else { self.shared.queue.push(jobs) };
        for job in rejected.err().into_iter().flatten() {
            let what = if self.is_childs() {
                "this process was forked off the one that opened the store: open it anew"
            } else {
                "the threads that move bytes have ended"
            };
            Queued { job, steps: None }.end(Failure::Io(io::Error::other(what)));
        }
    }

    /// Ends the jobs with this tag that have not begun, and says how many.
    pub(crate) fn cancel(&self, tag: u64) -> usize {
        if self.is_childs() { 0 } else { self.shared.queue.cancel(tag) }
    }

    /// How bytes are moved.
    pub(crate) fn report(&self) -> IoReport {
        let refused = self.shared.refused.lock().unwrap_or_else(PoisonError::into_inner).clone();
        IoReport { route: self.route, threads: self.shared.workers, bounce_bytes: self.bounce_bytes, refused }
    }

    /// Whether this is a copy in a child of fork, which has none of the threads.
    fn is_childs(&self) -> bool {
        self.process != std::process::id()
    }
}

impl Drop for IoEngine {
    /// Jobs that wait are cancelled; those that have begun are waited for, however long that takes.
    fn drop(&mut self) {
        if self.is_childs() {
            // Locks may be held by threads that this process does not have.
            std::mem::forget(self.shared.clone());
            return;
        }
        self.shared.queue.close(|| Failure::Cancelled);
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
        for route in [IoRoute::Auto, IoRoute::Threads] {
            let engine = IoEngine::start(IoOptions { route, ..IoOptions::new(directory.path()) }).unwrap();
            let shared = Arc::downgrade(&engine.shared);
            let wakes: Vec<_> = engine.wakes.iter().map(Arc::downgrade).collect();
            drop(engine);
            assert!(shared.upgrade().is_none(), "a thread lives on");
            assert!(wakes.iter().all(|wake| wake.upgrade().is_none()), "a descriptor is left");
        }
    }

    #[test]
    fn a_root_that_is_not_there_is_an_error() {
        for route in [IoRoute::Auto, IoRoute::IoUring] {
            let options = IoOptions { route, ..IoOptions::new("/nonexistent") };
            assert!(matches!(IoEngine::start(options), Err(Error::Io { .. })));
        }
    }
}
