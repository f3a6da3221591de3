//! A reader: its threads, and how batches get to them.
#![forbid(unsafe_code)]

use super::{
    Batch, Priority, ReadRequest, ReaderOptions,
    batch::BatchState,
    device::DeviceLine,
    pieces::{self, Cut, Piece},
    queue::Queue,
    request,
    usrbio::UsrbioPath,
    worker::Worker,
};
use crate::{
    ByteRange, DeviceId, Error, Result,
    memory::{self, SlotKind, Slots},
    parallel::{lock, thread_named},
    report::Refusal,
    route::{AnyLane, BlockingLane, Route, SourceFile, Unavailable, UringLane},
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

/// Reads byte ranges into memory of the caller's choice, on threads that stay.
///
/// Dropping it ends what waits with [`Error::Cancelled`] and waits for what is under way, unless one of its own threads
/// drops it.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Held while a 3FS is opened.
    opening: Mutex<()>,
    next_batch: AtomicU64,
    process: u32,
}

/// What the threads of a reader share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: ReaderOptions,
    pub(super) queue: Arc<Queue>,
    /// Staging for what cannot be read in place.
    pub(super) slots: Slots,
    /// The 3FS that route `usrbio` reads from, once there was a file on it.
    pub(super) usrbio: OnceLock<UsrbioPath>,
    lines: Mutex<HashMap<u32, Arc<DeviceLine>>>,
}

impl Reader {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::InvalidOption`]; [`Error::RouteUnavailable`] if the route that is named cannot run here;
    /// [`Error::Allocation`]; [`Error::System`] if the system gives no thread. If it gives some, these serve.
    pub fn new(options: &ReaderOptions) -> Result<Self> {
        options.check()?;
        let slots = Slots::new(options.slots(), options.chunk_bytes as usize, SlotKind::Host)?;
        let queue = Queue::new(options.in_flight);
        let (usrbio, lines) = (OnceLock::new(), Mutex::default());
        let shared = Arc::new(Shared { options: options.clone(), queue, slots, usrbio, lines });
        let (threads, opening, next_batch) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        let reader = Self { shared, threads, opening, next_batch, process: std::process::id() };
        match options.route {
            Route::IoUring => reader.start_ring()?,
            // With the first file.
            Route::Usrbio => {}
            _ => {
                for started in 0..options.in_flight {
                    let thread = reader.spawn("windlass-read", |shared| {
                        Worker::run(shared, AnyLane::Pread(BlockingLane::default()), Route::Threads);
                    });
                    match thread {
                        Err(error) if started > 0 => {
                            tracing::warn!(%error, started, "a reader has fewer threads than reads in flight");
                            break;
                        }
                        thread => thread?,
                    }
                }
            }
        }
        Ok(reader)
    }

    /// The options that it was made with.
    pub fn options(&self) -> &ReaderOptions {
        &self.shared.options
    }

    /// Bytes of the host that staging slots have room for. Each is taken as it is first used.
    pub(crate) fn staging_bytes(&self) -> u64 {
        self.shared.slots.host_bytes()
    }

    /// Starts to read. Each request succeeds or fails for itself: what is wrong with one, a range past the end of its
    /// file for instance, is told by its status.
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
        let mut goes_to_device = false;
        for (number, request) in requests.into_iter().enumerate() {
            if let request::Place::Host(start) = &request.target.0 {
                borrowed.extend(ByteRange::at(start.pointer().addr().get() as u64, request.range.len()));
            }
            let is_on_device = request.target.0.is_on_device();
            goes_to_device |= is_on_device;
            let usable = self.make_usable(&request.file.0, !is_on_device);
            match pieces::cut(request, shared.options.chunk_bytes, usable, |device| self.line(device)) {
                Ok(Cut { state, pieces }) => {
                    reads.push(state);
                    cuts.push((number, pieces));
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
        let state = Arc::new(BatchState::new(number, reads, shared.options.route, priority));
        let batch = Batch::new(state.clone(), shared.queue.clone());
        if goes_to_device && shared.options.route == Route::Auto {
            let why = "batches reach a device by way of pinned host memory";
            let why = Unavailable::new(why, "load whole tensors to use the direct path");
            state.note_refusal(Refusal { what: Route::Gds.to_string(), path: None, why });
        }
        for (read, error) in broken {
            state.fail(read, error);
        }
        let mut waiting = Vec::new();
        for (read, pieces) in cuts {
            if pieces.is_empty() {
                state.end_empty(read);
                continue;
            }
            waiting.extend(pieces.into_iter().map(|(wanted, place)| Piece::new(&state, read, wanted, place)));
        }
        shared.queue.push(waiting, priority);
        Ok(batch)
    }

    /// The way to a device.
    fn line(&self, device: DeviceId) -> Result<Arc<DeviceLine>> {
        let DeviceId::Cuda(ordinal) = device else {
            return Err(Error::InvalidOption {
                option: "device",
                value: device.to_string(),
                reason: "it has no addresses of its own: give a pointer of the host".into(),
            });
        };
        let mut lines = lock(&self.shared.lines);
        if let Some(line) = lines.get(&ordinal) {
            return Ok(line.clone());
        }
        let line = DeviceLine::new(ordinal, &self.shared.options, self.shared.usrbio.get())?;
        let serving = line.clone();
        self.spawn("windlass-device", move |_| serving.serve())?;
        lines.insert(ordinal, line.clone());
        Ok(line)
    }

    /// Opens a file for USRBIO, if that is the route; with the first one, the 3FS that it lies on.
    fn make_usable(&self, source: &Arc<SourceFile>, needs_host_memory: bool) -> Result<()> {
        if self.shared.options.route != Route::Usrbio {
            return Ok(());
        }
        let path = match self.shared.usrbio.get() {
            Some(path) => path,
            None => self.open_usrbio(source)?,
        };
        path.add(source)?;
        if needs_host_memory { path.make_host_slots(&self.shared.options) } else { Ok(()) }
    }

    /// Opens the 3FS that `source` lies on, and starts the threads of its rings.
    fn open_usrbio(&self, source: &SourceFile) -> Result<&UsrbioPath> {
        let _opening = lock(&self.opening);
        if let Some(path) = self.shared.usrbio.get() {
            return Ok(path);
        }
        let (path, lanes) = UsrbioPath::open(source, &self.shared.options)?;
        // Nobody may count on them before all are there: those that started wait for their rings, and end without.
        let start = |lane| {
            let (give, get) = mpsc::channel();
            self.spawn("windlass-3fs", move |shared| {
                if let Ok(lane) = get.recv() {
                    Worker::run(shared, AnyLane::Usrbio(Box::new(lane)), Route::Usrbio);
                }
            })?;
            Ok((give, lane))
        };
        let started: Vec<_> = lanes.into_iter().map(start).collect::<Result<_>>()?;
        let path = self.shared.usrbio.get_or_init(|| path);
        for (give, lane) in started {
            // They wait for nothing else.
            let _ = give.send(lane);
        }
        Ok(path)
    }

    /// Starts the one thread of a ring, which must be made by whoever uses it.
    fn start_ring(&self) -> Result<()> {
        let (told, hears) = mpsc::channel();
        self.spawn("windlass-ring", move |shared| match UringLane::new(shared.options.in_flight) {
            Ok(lane) => {
                drop(told);
                Worker::run(shared, AnyLane::Uring(Box::new(lane)), Route::IoUring);
            }
            Err(why) => drop(told.send(why)),
        })?;
        match hears.recv() {
            Ok(why) => Err(Error::RouteUnavailable { route: Route::IoUring, path: None, why }),
            // It has begun.
            Err(mpsc::RecvError) => Ok(()),
        }
    }

    fn spawn(&self, name: &str, work: impl FnOnce(&Shared) + Send + 'static) -> Result<()> {
        let shared = self.shared.clone();
        let thread = thread_named(name).spawn(move || work(&shared));
        let thread = thread.map_err(|source| Error::System { operation: "starting a thread", source })?;
        lock(&self.threads).push(thread);
        Ok(())
    }
}

impl Shared {
    /// Where reads land that are not made in place.
    pub(super) fn host_slots(&self) -> &Slots {
        self.usrbio.get().and_then(UsrbioPath::host_slots).unwrap_or(&self.slots)
    }

    /// Nothing comes from the 3FS any more, so nobody may wait for it.
    pub(super) fn lose_daemon(&self, reason: &str) {
        if let Some(path) = self.usrbio.get() {
            path.lose(reason);
        }
        lock(&self.lines).values().for_each(|line| line.close_slots());
    }

    pub(super) fn with_faults(&self, lane: AnyLane) -> AnyLane {
        #[cfg(feature = "fault-injection")]
        if let Some(faults) = &self.options.faults {
            return faults.wrap(lane);
        }
        lane
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The threads live in the parent: here, what detaches them may write to memory that is somebody else's by now.
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(threads));
            return;
        }
        self.shared.queue.close("");
        let lines: Vec<_> = lock(&self.shared.lines).drain().map(|(_, line)| line).collect();
        let (devices, readers): (Vec<_>, Vec<_>) = lock(&self.threads)
            .drain(..)
            .partition(|thread| thread.thread().name() == Some("windlass-device"));
        let current = thread::current().id();
        let is_own = readers.iter().chain(&devices).any(|thread| thread.thread().id() == current);
        let end = move || {
            // Those who wait for copies go last: readers may still send some.
            for thread in readers {
                let _ = thread.join();
            }
            lines.iter().for_each(|line| line.close());
            for thread in devices {
                let _ = thread.join();
            }
        };
        if is_own {
            // It cannot wait for itself. If no thread is to be had, the others end without being waited for.
            let _ = thread_named("windlass-end").spawn(end);
        } else {
            end();
        }
    }
}
