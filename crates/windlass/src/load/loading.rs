//! A load in progress: its threads, its tensors as they become complete, its end.
#![forbid(unsafe_code)]

use super::{
    LoadOptions, Loaded, NumaPlacement, Tensor,
    delivery::Delivery,
    drive,
    flow::{Flow, StreamOptions},
    job::{ALONE, Job, News, Place, Running},
    queue::Line,
    usrbio::{Shared, UsrbioPath},
    window::Window,
};
use crate::{
    Catalog, DeviceId, Error, Report, Result,
    device::Device,
    memory::{HugePages, MemoryRequest},
    parallel,
    plan::{Destination, Plan},
    report::{DeviceReport, MemoryReport, Refusal, TimeReport},
    route::{Route, SourceFile, Unavailable},
    sys::{block_device, numa, threads, usage::Usage},
};
use std::{
    io,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Loads that read no more than this run on the caller's thread: starting others would take longer.
const INLINE_BYTES: u64 = 1 << 20;
/// Reads in flight of such a load that names route `io_uring`.
const INLINE_DEPTH: usize = 8;
/// Bytes in flight that saturate a local drive: bandwidth × loaded latency of a fast NVMe.
const LOCAL_IN_FLIGHT_BYTES: u64 = 32 << 20;
/// The same for a server over a network.
const REMOTE_IN_FLIGHT_BYTES: u64 = 128 << 20;
/// Slots for extents that cannot be read in place, besides one for each thread that copies from the cache.
const STAGING_SLOTS: usize = 8;
/// Pinned memory between files and a device, at most.
const PINNED_BYTES: u64 = 128 << 20;
/// Threads that read by cuFile, at most.
const MAX_DIRECT: usize = 32;
/// Threads that copy from the page cache, at most: a few saturate memory.
const MAX_COPIERS: usize = 8;
/// What a report calls threads that could not be started.
const THREADS: &str = "threads of the load's own";
/// How many times as many, at most, where that makes the device faster.
const IN_FLIGHT_GROWTH: u64 = 8;
/// Reads in one ring, at most.
const MAX_DEPTH: u64 = 256;

/// A load in progress, on threads of its own.
///
/// Iterate to get tensors as they become complete, or [`wait`](Loading::wait) for all. Dropping it cancels the
/// load, waits for reads that the kernel already has, and frees what was not handed out.
///
/// ```no_run
/// let checkpoint = windlass::Checkpoint::open(&["model.safetensors"])?;
/// for tensor in checkpoint.start(&windlass::LoadOptions::default())? {
///     let tensor = tensor?;
///     println!("{} {:?}", tensor.name(), tensor.shape());
/// }
/// # Ok::<(), windlass::Error>(())
/// ```
pub struct Loading {
    job: Arc<Job>,
    threads: Vec<JoinHandle<()>>,
    process: u32,
    report: Report,
    started: Instant,
    usage: Usage,
    finished: bool,
    flow: Flow,
    /// Until the last read has ended, if the caller's thread makes them all.
    alone: Option<Running>,
}

/// How far a load has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of tensors that have arrived.
    pub bytes_done: u64,
    /// Bytes of tensors in all.
    pub bytes_total: u64,
    /// Tensors that are complete.
    pub tensors_done: usize,
    /// Tensors in all.
    pub tensors_total: usize,
}

/// What [`Loading::next_within`] found.
#[derive(Debug)]
pub enum Arrival {
    /// A tensor is complete.
    Tensor(Tensor),
    /// None became complete in time.
    Pending,
    /// All tensors were handed out.
    Finished,
}

/// How many threads of which kind.
struct Crew {
    copiers: usize,
    touchers: usize,
    rings: usize,
    /// Reads in flight in each ring, at first and at most.
    depth: (usize, usize),
    pool: usize,
    /// Threads that read by cuFile.
    direct: usize,
}

impl Loading {
    pub(super) fn start(
        catalog: Arc<Catalog>,
        sources: &[Arc<SourceFile>],
        options: &LoadOptions,
        stream: &StreamOptions,
        open_time: Duration,
    ) -> Result<Self> {
        let begin =
            |no_threads| Self::begin(catalog.clone(), sources, options, stream, open_time, no_threads);
        match begin(None)? {
            Ok(loading) => Ok(loading),
            Err(error) => begin(Some(&error))?
                .map_err(|_| Error::Internal("a load without threads asked for some".into())),
        }
    }

    /// Starts the load. `no_threads` says why there are none: then the caller's thread does everything. The inner error
    /// is the system's, which gives no thread.
    fn begin(
        catalog: Arc<Catalog>,
        sources: &[Arc<SourceFile>],
        options: &LoadOptions,
        stream: &StreamOptions,
        open_time: Duration,
        no_threads: Option<&io::Error>,
    ) -> Result<io::Result<Self>> {
        let started = Instant::now();
        let usage = Usage::now();
        options.check()?;
        if options.route == Route::Mapped {
            return Err(Error::InvalidOption {
                option: "route",
                value: Route::Mapped.to_string(),
                reason: "a mapping has nothing to do in the background: use load rather than start".into(),
            });
        }
        let device = match options.device {
            DeviceId::Cpu => None,
            DeviceId::Cuda(ordinal) => Some(Device::open(ordinal)?),
        };
        let is_unified = options.route == Route::Unified;
        if let (Some(device), true) = (&device, is_unified)
            && !device.shares_host_memory()
        {
            let why = Unavailable::new(
                format!("{} ({}) has memory of its own", device.name(), device.info().name),
                "choose route auto or staged",
            );
            return Err(Error::RouteUnavailable { route: Route::Unified, path: None, why });
        }
        let requests = options.selection.resolve(&catalog)?;
        let mut plan_options = options.plan_options();
        if is_unified {
            plan_options.destination = Destination::Host;
        }
        stream.limit(&mut plan_options);
        let mut plan = Plan::new(&catalog, &requests, &plan_options)?;
        let copied_to = device.as_ref().filter(|_| !is_unified);
        let mut flow = Flow::new(&plan, stream);
        let is_small = plan.read_bytes() <= INLINE_BYTES && !options.route.is_cufile() && !flow.is_bounded();
        let inline = is_small || no_threads.is_some();
        let mut refused = Vec::new();
        if let Some(error) = no_threads {
            let why = no_thread(error);
            if options.route.is_cufile() {
                return Err(Error::RouteUnavailable { route: options.route, path: None, why });
            }
            refused.push(Refusal { what: THREADS.into(), path: None, why });
        }
        let shared = Shared::find(&plan, sources, options, inline, &mut refused)?;
        let whole = shared.as_ref().map_or(options.chunk_bytes, |own| own.chunk_bytes(options));
        if whole != options.chunk_bytes && !inline {
            plan_options.chunk_bytes = whole;
            stream.limit(&mut plan_options);
            plan = Plan::new(&catalog, &requests, &plan_options)?;
            flow = Flow::new(&plan, stream);
        }
        let crew = if inline { Crew::ALONE } else { Crew::new(&plan, sources, options) };
        let numa_node = numa_node(sources, options.numa, copied_to)?;
        let memory = MemoryRequest {
            pages: options.huge_pages,
            numa_node,
            pool: options.pool.clone(),
            user: device.clone().filter(|_| is_unified),
        };
        let mut report = new_report(&catalog, &plan, options, numa_node);
        report.device = device.as_deref().map(|device| new_device_report(device, &plan, options, is_unified));
        let slots = match copied_to {
            None => STAGING_SLOTS + crew.copiers,
            Some(_) => crew.pinned_slots(),
        };
        let staging_bytes = match copied_to {
            None => u64::MAX,
            Some(_) => options.memory_budget_bytes.map_or(PINNED_BYTES, |budget| budget.min(PINNED_BYTES)),
        };
        let place = Place {
            memory: &memory,
            device: copied_to,
            slots,
            staging_bytes,
            readers: crew.direct,
            is_inline: inline,
            admitted: flow.admitted(),
            most_bytes: flow.most_bytes(),
            shared: shared.as_ref(),
        };
        let job = Arc::new(Job::new(catalog, plan, sources, options, &plan_options, &place, refused)?);
        report.memory.staging_bytes = job.slots.host_bytes()
            + job.usrbio.as_ref().map_or(0, |path| path.slots.host_bytes())
            + job.delivery().map_or(0, Delivery::pinned_bytes);
        if let (Some(shared), Some(_)) = (&shared, &job.usrbio) {
            report.notes.push(shared.note());
        }
        report.time.open_seconds = open_time.as_secs_f64();
        report.time.prepare_seconds = started.elapsed().as_secs_f64();
        let mut loading = Self {
            job,
            threads: Vec::new(),
            process: std::process::id(),
            report,
            started,
            usage,
            finished: false,
            flow,
            alone: None,
        };
        if inline {
            loading.alone = Some(loading.job.enter());
            loading.run_inline();
        } else {
            // By default threads stay where the process may run: its owner may have chosen that.
            let threads_node = numa_node.filter(|_| options.numa != NumaPlacement::Unbound);
            if let Err(error) = loading.spawn_crew(&crew, threads_node) {
                // Those that started end with the load.
                return Ok(Err(error));
            }
        }
        Ok(Ok(loading))
    }

    /// Does everything that may be done now, on this thread.
    fn run_inline(&mut self) {
        let job = &self.job;
        match job.route {
            Route::IoUring | Route::Gds | Route::GdsCompat => {
                drive::serve_ring(job, Window::fixed(INLINE_DEPTH), 1)
            }
            Route::Usrbio => drive::serve_usrbio(job),
            _ => {
                drive::serve_cached(job, usize::MAX);
                if job.queue.has_any(Line::Ring) {
                    let why = Unavailable::new(ALONE, "");
                    job.note_refusal(Refusal { what: "io_uring".into(), path: None, why });
                    job.queue.give_ring_to_pool();
                }
                drive::serve_pool(job);
            }
        }
        if !self.flow.is_bounded() || job.queue.is_over() {
            self.alone = None;
        }
    }

    /// Starts the threads, as many as the system gives.
    ///
    /// # Errors
    /// The system's, if it gives none of a kind that the load needs.
    fn spawn_crew(&mut self, crew: &Crew, numa_node: Option<u32>) -> io::Result<()> {
        let cpus = numa_node
            .and_then(|id| numa::nodes().into_iter().find(|node| node.id == id))
            .map(|node| node.cpus);
        let ((depth, max_depth), pool) = (crew.depth, crew.pool);
        let has = |line| self.job.queue.has_any(line);
        let (unprobed, ring) = (has(Line::Unprobed), has(Line::Ring));
        // What is not cached goes on to those who can read it, which may differ from file to file.
        let cold = |line| unprobed && self.job.route.chooses() && self.job.has_cold_line(line);
        let (ring, pooled) = (ring || cold(Line::Ring), has(Line::Pool) || cold(Line::Pool));
        let usrbio = self.job.usrbio.as_ref().map_or(0, UsrbioPath::rings);
        if self.job.delivery().is_some() {
            self.spawn(1, "windlass-device", &cpus, |job| {
                if let Some(delivery) = job.delivery() {
                    delivery.serve(job);
                }
            })?;
        }
        if unprobed {
            self.spawn(crew.copiers, "windlass-copy", &cpus, move |job| drive::serve_cached(job, depth))?;
        }
        if self.job.delivery().is_some() {
            // Pinning takes time: the first slots are pinned side by side.
            let past_host = self.job.direct_path.is_some() && !unprobed;
            let first = if past_host { 1 } else { crew.depth.0 + crew.copiers };
            // Without this thread, reads pin their slots themselves.
            let _ = self.spawn(1, "windlass-pin", &cpus, move |job| {
                if let Some(path) = &job.usrbio {
                    path.slots.pin_ahead(path.depth, || job.queue.is_over());
                }
                job.slots.pin_ahead(first, || job.queue.is_over());
            });
        } else if (ring || usrbio > 0) && !unprobed {
            // Without this thread, reads fault their memory in themselves.
            let _ = self.spawn(
                crew.touchers,
                "windlass-touch",
                &cpus,
                move |job| while job.touch_ahead(depth) {},
            );
        }
        if ring {
            // cuFile reads one after the other on each thread.
            let rings = if self.job.direct_path.is_some() { crew.direct } else { crew.rings };
            self.spawn(rings, "windlass-ring", &cpus, move |job| {
                drive::serve_ring(job, Window::between(depth, max_depth), pool);
            })?;
        }
        self.spawn(usrbio, "windlass-3fs", &cpus, drive::serve_usrbio)?;
        if pooled {
            self.spawn(pool, "windlass-read", &cpus, drive::serve_pool)?;
        }
        Ok(())
    }

    fn spawn(
        &mut self,
        count: usize,
        name: &str,
        cpus: &Option<Vec<usize>>,
        work: impl Fn(&Job) + Clone + Send + 'static,
    ) -> io::Result<()> {
        for started in 0..count {
            let (job, work, cpus) = (self.job.clone(), work.clone(), cpus.clone());
            let running = job.enter();
            let body = move || {
                let _running = running;
                if let Some(cpus) = cpus {
                    threads::run_on(&cpus);
                }
                work(&job);
            };
            match parallel::thread_named(name).spawn(body) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    let why = no_thread(&error);
                    let what = format!("{THREADS} ({started} of {count} named {name} were started)");
                    self.job.note_refusal(Refusal { what, path: None, why });
                    return if started == 0 { Err(error) } else { Ok(()) };
                }
            }
        }
        Ok(())
    }

    /// The next tensor to become complete, waiting no longer than `timeout`.
    ///
    /// # Errors
    /// Whatever ended the load. After an error there are no more tensors.
    pub fn next_within(&mut self, timeout: Duration) -> Result<Arrival> {
        self.advance(Some(timeout))
    }

    /// The next tensor to hand out that is complete already. Never waits, and never tells of errors.
    pub fn next_arrived(&mut self) -> Option<Tensor> {
        if self.process != std::process::id() {
            return None;
        }
        self.flow.release_last();
        self.flow.take()
    }

    fn advance(&mut self, timeout: Option<Duration>) -> Result<Arrival> {
        if self.process != std::process::id() {
            return Err(Error::Forked);
        }
        self.flow.release_last();
        if self.flow.is_bounded() {
            self.job.admit(self.flow.admitted());
        }
        if self.alone.is_some() {
            self.run_inline();
        }
        if let Some(tensor) = self.flow.take() {
            return Ok(Arrival::Tensor(tensor));
        }
        if self.finished {
            return Ok(Arrival::Finished);
        }
        match self.job.news(timeout) {
            Ok(News::Tensors(tensors)) => {
                self.flow.add(tensors);
                Ok(self.flow.take().map_or(Arrival::Pending, Arrival::Tensor))
            }
            Ok(News::Finished) => {
                self.finish();
                let (done, total) = (self.job.tensors_done(), self.job.plan.tensors().len());
                if done < total {
                    return Err(Error::Internal(format!("{done} of {total} tensors became complete")));
                }
                self.job.check_direct()?;
                Ok(Arrival::Finished)
            }
            Err(error) => {
                self.finish();
                Err(error)
            }
        }
    }

    /// Waits for all tensors that were not handed out yet.
    ///
    /// # Errors
    /// Whatever ended the load.
    pub fn wait(mut self) -> Result<Loaded> {
        let mut tensors = Vec::with_capacity(self.job.plan.tensors().len());
        loop {
            match self.advance(None)? {
                Arrival::Tensor(tensor) => tensors.push(tensor),
                Arrival::Pending => {}
                Arrival::Finished => return Ok(self.into_loaded(tensors)),
            }
        }
    }

    /// Puts `tensors`, taken from this load, into the order of the checkpoint and adds the report.
    pub fn into_loaded(self, tensors: Vec<Tensor>) -> Loaded {
        let report = self.report();
        Loaded::new(tensors, report)
    }

    /// Ends the load early. Tensors that were handed out stay valid.
    pub fn cancel(&mut self) {
        // In a child of fork the job's locks may be held by threads that do not exist there.
        if !self.finished && self.process == std::process::id() {
            self.flow.clear();
            self.job.fail(Error::Cancelled);
        }
    }

    /// How far the load has got.
    pub fn progress(&self) -> Progress {
        Progress {
            bytes_done: self.job.tensor_bytes_done(),
            bytes_total: self.report.tensor_bytes,
            tensors_done: self.job.tensors_done(),
            tensors_total: self.report.tensors,
        }
    }

    /// What the load has done so far; the whole truth once all tensors were handed out. A child of `fork` learns
    /// only what was planned.
    pub fn report(&self) -> Report {
        let mut report = self.report.clone();
        if self.process != std::process::id() {
            return report;
        }
        report.carriers = self.job.carriers();
        report.read_bytes = report.carriers.iter().map(|carrier| carrier.read_bytes).sum();
        report.refused = self.job.refused();
        report.retries = self.job.retries();
        report.staged_bytes = self.job.staged_bytes();
        if let (Some(device), Some(delivery)) = (&mut report.device, self.job.delivery()) {
            device.scratch_bytes = delivery.scratch_bytes();
            device.slot_wait_seconds = self.job.slots.waited().as_secs_f64();
            if let Some(path) = &self.job.usrbio {
                device.slot_wait_seconds += path.slots.waited().as_secs_f64();
            }
            if let Some(path) = &self.job.direct_path {
                device.scratch_bytes += path.landing_bytes();
                device.slot_wait_seconds += path.slots.waited().as_secs_f64();
                let carried =
                    report.carriers.iter().any(|own| own.route == Route::Gds && own.tensor_bytes > 0);
                device.proof = path.proof.clone().filter(|_| carried && path.is_kept());
            }
            device.copies = delivery.copies();
            device.copy_wait_seconds = delivery.waited().as_secs_f64();
        }
        if !self.finished {
            self.stop_clock(&mut report.time);
        }
        report
    }

    fn stop_clock(&self, time: &mut TimeReport) {
        // Not until the caller has taken the last tensor: that would time the caller.
        let (ended, usage) = self.job.ended().unwrap_or_else(|| (Instant::now(), Usage::now()));
        let seconds = ended.saturating_duration_since(self.started).as_secs_f64();
        time.transfer_seconds = seconds - time.prepare_seconds;
        time.total_seconds = time.open_seconds + seconds;
        time.cpu_seconds = usage.cpu.saturating_sub(self.usage.cpu).as_secs_f64();
        time.page_faults = usage.page_faults.saturating_sub(self.usage.page_faults);
    }

    /// Waits for the threads and stops the clock.
    fn finish(&mut self) {
        if self.finished {
            return;
        }
        self.alone = None;
        for thread in self.threads.drain(..) {
            // A panic was already reported through the job.
            let _ = thread.join();
        }
        let mut time = self.report.time;
        self.stop_clock(&mut time);
        self.report.time = time;
        self.finished = true;
    }
}

impl Iterator for Loading {
    type Item = Result<Tensor>;

    fn next(&mut self) -> Option<Result<Tensor>> {
        loop {
            match self.advance(None) {
                Ok(Arrival::Tensor(tensor)) => return Some(Ok(tensor)),
                Ok(Arrival::Pending) => {}
                Ok(Arrival::Finished) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A child of fork has neither the threads nor a consistent copy of what they were doing.
            std::mem::forget(self.threads.drain(..).collect::<Vec<_>>());
            return;
        }
        self.cancel();
        self.finish();
    }
}

impl std::fmt::Debug for Loading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loading").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

impl Crew {
    /// For what the caller's thread does by itself.
    const ALONE: Self = Self { copiers: 1, touchers: 0, rings: 1, depth: (1, 1), pool: 1, direct: 1 };

    fn new(plan: &Plan, sources: &[Arc<SourceFile>], options: &LoadOptions) -> Self {
        let cores = parallel::cores();
        let used: Vec<&Arc<SourceFile>> = {
            let mut files: Vec<_> = plan.extents().iter().map(|extent| extent.file).collect();
            files.dedup();
            files.into_iter().map(|file| &sources[file.index()]).collect()
        };
        let remote = used.iter().any(|source| source.filesystem().is_remote());
        let in_flight = options.in_flight_bytes.unwrap_or(if remote {
            REMOTE_IN_FLIGHT_BYTES
        } else {
            LOCAL_IN_FLIGHT_BYTES
        });
        let depth = (in_flight / options.chunk_bytes.max(1)).clamp(1, MAX_DEPTH);
        // A number that the caller gave is not second-guessed.
        let max_depth = if options.in_flight_bytes.is_some() { depth } else { depth * IN_FLIGHT_GROWTH };
        let buffered = options.direct == super::DirectIo::Never
            || used.iter().any(|source| source.direct_refusal().is_some());
        let copiers = cores.min(MAX_COPIERS).max(if cores > 1 { 2 } else { 1 });
        // Blocking direct reads only wait; buffered ones of a local file also copy, on a core each. A few saturate
        // memory, but not while they copy into slots that stay in the processor's cache.
        let pool = match (buffered && !remote, options.device) {
            (true, DeviceId::Cpu) => cores.clamp(2, 4),
            (true, DeviceId::Cuda(_)) => copiers,
            (false, _) => depth as usize,
        };
        let many_queues = used.iter().any(|source| block_device::queues(source.device()) > 1);
        let rings = options.rings.unwrap_or(if cores >= 8 && many_queues { 2 } else { 1 });
        Self {
            copiers: options.threads.unwrap_or(copiers),
            touchers: if options.pool.is_some() { 0 } else { copiers.min(2) },
            rings,
            depth: ((depth as usize).div_ceil(rings), (max_depth.min(MAX_DEPTH) as usize).div_ceil(rings)),
            pool: options.threads.unwrap_or(pool),
            direct: (depth as usize).min(MAX_DIRECT),
        }
    }

    /// Slots between files and a device: for the reads in flight, as many copies, and whoever copies from the cache.
    fn pinned_slots(&self) -> usize {
        2 * (self.depth.1 * self.rings).max(self.pool) + self.copiers
    }
}

/// Why the system starts no thread, and what to do.
fn no_thread(error: &io::Error) -> Unavailable {
    let fix = "raise ulimit -u or the control group's pids.max, or allow clone and clone3 in the container's seccomp profile";
    Unavailable::new(format!("the system starts no thread: {error}"), fix)
}

fn new_device_report(device: &Device, plan: &Plan, options: &LoadOptions, unified: bool) -> DeviceReport {
    DeviceReport {
        device: options.device,
        name: device.info().name.clone(),
        pci: device.info().pci.clone(),
        unified,
        dtype: options.dtype,
        memory_bytes: if unified { 0 } else { plan.arena_bytes() },
        scratch_bytes: 0,
        copies: 0,
        copy_wait_seconds: 0.0,
        slot_wait_seconds: 0.0,
        proof: None,
    }
}

fn new_report(catalog: &Catalog, plan: &Plan, options: &LoadOptions, numa_node: Option<u32>) -> Report {
    let mut files: Vec<_> = plan.extents().iter().map(|extent| extent.file).collect();
    files.dedup();
    Report {
        version: env!("CARGO_PKG_VERSION").into(),
        route: options.route,
        files: files.len(),
        tensors: plan.tensors().len(),
        tensor_bytes: plan.tensor_bytes(),
        read_bytes: 0,
        staged_bytes: 0,
        carriers: Vec::new(),
        refused: Vec::new(),
        retries: Default::default(),
        memory: MemoryReport {
            layout: options.layout,
            arenas: plan.arenas().len(),
            arena_bytes: plan.arena_bytes(),
            staging_bytes: 0,
            huge_pages: if options.pool.is_some() { HugePages::Transparent } else { options.huge_pages },
            pooled: options.pool.is_some(),
            // A pool's memory lies where it was touched.
            numa_node: numa_node.filter(|_| options.pool.is_none()),
        },
        device: None,
        time: TimeReport::default(),
        verify: None,
        notes: catalog.notes().to_vec(),
    }
}

/// The node that `placement` stands for on this machine.
fn numa_node(
    sources: &[Arc<SourceFile>],
    placement: NumaPlacement,
    copied_to: Option<&Arc<Device>>,
) -> Result<Option<u32>> {
    match placement {
        // Pinned memory far from the device halves the speed of copies.
        NumaPlacement::Unbound => {
            let near_device = copied_to.and_then(|device| device.info().numa_node);
            Ok(near_device.filter(|_| numa::nodes().len() > 1))
        }
        NumaPlacement::NearStorage => {
            Ok(sources.first().and_then(|source| block_device::numa_node(source.device())))
        }
        NumaPlacement::Node(id) if numa::nodes().iter().any(|node| node.id == id) => Ok(Some(id)),
        NumaPlacement::Node(id) => Err(Error::InvalidOption {
            option: "numa",
            value: id.to_string(),
            reason: "this machine has no such node".into(),
        }),
    }
}
