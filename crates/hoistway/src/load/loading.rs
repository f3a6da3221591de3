//! A load that has all its reads from the start: its threads, its tensors as they become complete, its end.
#![forbid(unsafe_code)]

use super::{
    LoadOptions, NumaPlacement, Tensor,
    flow::{Flow, Order},
    job::{FIRST_EXTENTS, Job, LoadEvent, Running},
    memory_plan::{MemoryPlan, least_bytes},
    progress::{Arrival, Progress},
    reporting::{self, Planned},
    start::{NoLoad, Start},
    threads::{no_affinity, no_thread, placement, reads_asked_for},
    waves::MOST_READS,
};
use crate::{
    Error, Report, Result,
    device::Device,
    memory::{self, MemoryRequest, Slots},
    metrics::{self, Outcome},
    parallel,
    plan::Plan,
    report::{Refusal, TimeReport, few_files_note},
    route::member::{Landing, ThreadPlan, Wanted},
    source::Latency,
    sys::{threads::run_on, usage::Usage},
    transfer::{self, MANY_READS, OpenRoute, Opening},
};
use bytesize::ByteSize;
use hoistway_io::Placement;
use std::{
    io,
    sync::{Arc, OnceLock},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tracing::{Dispatch, debug_span, dispatcher, subscriber::NoSubscriber};

/// Loads of local files that read no more than this run on the caller's thread: starting others would take longer.
const INLINE_BYTES: u64 = 1 << 20;
/// Slots for extents that cannot be read in place, besides one for each thread that copies from the cache.
const STAGING_SLOTS: usize = 8;
/// Pinned memory between files and a device, at most.
const PINNED_BYTES: u64 = 128 << 20;
/// Threads that pin slots ahead of the reads that fill them.
const PINNERS: usize = 2;
/// What a report calls threads that could not be started.
const THREADS: &str = "threads of the load's own";

/// A load in progress, by threads of its own that have all its reads.
pub(super) struct ThreadedLoad {
    job: Arc<Job>,
    threads: Vec<JoinHandle<()>>,
    /// It frees what is kept of a device's memory, which waits for the device, and for nothing that the load has still to do.
    reuser: Option<JoinHandle<()>>,
    process: u32,
    report: Report,
    started: Instant,
    usage: Usage,
    finished: bool,
    /// Whether it is among the loads of [`metrics`].
    is_counted: bool,
    flow: Flow,
    /// Until the last read has ended, if the caller's thread makes them all.
    alone: Option<Running>,
}

/// What a load does without before it looks at its files.
///
/// # Errors
/// [`Error::RouteUnavailable`] if the route that is named cannot do without it.
fn refused_before(
    options: &LoadOptions,
    copied_to: Option<&Arc<Device>>,
    no_threads: Option<&io::Error>,
) -> Result<Vec<Refusal>> {
    let mut refused = Vec::new();
    if let Some(error) = no_threads {
        let why = no_thread(error);
        if options.route.is_past_host() {
            return Err(Error::RouteUnavailable { route: options.route, path: None, why });
        }
        refused.push(Refusal::new(THREADS, None, why));
    }
    if let Some(device) = copied_to.filter(|device| device.shares_host_memory()) {
        refused.extend(options.route.unified_refusal(device.name()));
    }
    Ok(refused)
}

/// Does work of a thread for a caller that has this subscriber.
fn as_of(subscriber: &Dispatch, work: impl FnOnce()) {
    match subscriber.is::<NoSubscriber>() {
        true => work(),
        false => dispatcher::with_default(subscriber, work),
    }
}

/// Says why reads are not as long as is best for the storage.
fn shorter_reads_note(chunk_bytes: u64, longer: u64, needed: u64, budget: u64) -> String {
    let [chunk, longer, needed, budget] = [chunk_bytes, longer, needed, budget].map(ByteSize);
    format!(
        "reads are {chunk} long at most: with {longer}, which the storage reads best, the load needs {needed} of a memory \
             budget of {budget}"
    )
}

impl ThreadedLoad {
    /// # Errors
    /// [`NoLoad::TooManyReads`] if knowing all reads takes more memory than there is.
    pub(super) fn start(start: &Start<'_>) -> Result<Box<Self>, NoLoad> {
        match Self::begin(start, None)? {
            Ok(loading) => Ok(loading),
            Err(error) => Self::begin(start, Some(&error))?
                .map_err(|_| Error::Internal("a load without threads asked for some".into()).into()),
        }
    }

    /// Starts the load. `no_threads` says why there are none: then the caller's thread does everything. The inner error
    /// is the system's, which gives no thread.
    fn begin(start: &Start<'_>, no_threads: Option<&io::Error>) -> Result<io::Result<Box<Self>>, NoLoad> {
        let (started, usage) = (Instant::now(), Usage::now());
        let _preparing = debug_span!(parent: start.span, "prepare").entered();
        let Start { catalog, sources, options, stream, open_time, .. } = *start;
        let device = start.device()?;
        let copied_to = device.as_ref().filter(|_| !options.route.is_unified());
        let mut plan = start.plan(options.chunk_bytes)?;
        let mut flow = Flow::new(&plan, stream);
        let refused = refused_before(options, copied_to, no_threads)?;
        // What waits for a server is left to threads: the caller's could not end it.
        let waits = plan.extents().iter().any(|own| sources[own.file.index()].latency() == Latency::Remote);
        let is_small = plan.read_bytes() <= INLINE_BYTES
            && !waits
            && !options.route.is_past_host()
            && !flow.is_bounded();
        let is_inline = is_small || no_threads.is_some();
        let near = placement(sources, options.numa, copied_to)?;
        let cores = near.cores();
        let Placement { node: numa_node, cpus, note: far_note } = near;
        let wanted = Wanted {
            route: options.route,
            direct: options.direct,
            usrbio: options.usrbio,
            usrbio_directories: &options.usrbio_directories,
            device: copied_to,
            is_inline,
            copies_on_lanes: false,
            copiers: options.threads.unwrap_or(cores),
            reads: plan.extents().len(),
            read_bytes: plan.read_bytes(),
        };
        let mut opening = Opening::new(wanted, sources, refused);
        opening.open_first(&plan)?;
        let memory = MemoryRequest {
            pages: options.huge_pages,
            numa_node,
            off_node: OnceLock::new(),
            pool: options.pool.clone(),
            user: device.clone().filter(|_| options.route.is_unified()),
        };
        // A device has memory of its own.
        let fresh_bytes = |plan: &Plan, flow: &Flow| match copied_to {
            Some(_) => 0,
            None => memory.fresh_bytes(plan.arena_bytes().min(flow.most_bytes())),
        };
        let (mut chunk_bytes, mut too_long) = (options.chunk_bytes, None);
        let longer = opening.chunk_bytes(chunk_bytes);
        if longer != chunk_bytes && !is_inline {
            let other = start.plan(longer)?;
            let other_flow = Flow::new(&other, stream);
            // Longer reads take longer slots.
            let slot_bytes = other.slot_bytes(&start.plan_options(longer));
            let least_bytes = least_bytes(&other, fresh_bytes(&other, &other_flow), slot_bytes, &opening);
            let needed = least_bytes.saturating_add(opening.least_shared_bytes(&other));
            match options.memory_budget_bytes.filter(|budget| needed > *budget) {
                None => (chunk_bytes, plan, flow) = (longer, other, other_flow),
                Some(budget) => too_long = Some(shorter_reads_note(chunk_bytes, longer, needed, budget)),
            }
        }
        // Fewer reads fit into a bound that the caller gave: what comes first would wait for short ones, and all else too.
        let hastens = start.is_loop
            && chunk_bytes > options.chunk_bytes
            && options.in_flight_bytes.is_none()
            && !flow.is_bounded();
        if let Some((step, files)) = opening.first_step().filter(|_| hastens) {
            let slot_bytes = plan.slot_bytes(&start.plan_options(chunk_bytes));
            let needed = least_bytes(&plan, fresh_bytes(&plan, &flow), slot_bytes, &opening)
                .saturating_add(opening.least_shared_bytes(&plan))
                .saturating_add(memory::budget::bookkeeping_bytes(Plan::MORE_READS));
            if options.memory_budget_bytes.is_none_or(|budget| needed <= budget) {
                plan.hasten_first(step, stream.order == Order::File, |file| files[file.index()]);
                flow = Flow::new(&plan, stream);
            }
        }
        let threads =
            if is_inline { ThreadPlan::ALONE } else { ThreadPlan::new(&plan, sources, options, cores) };
        let planned = Planned { catalog, plan: &plan, options, numa_node };
        let mut report = planned.report(device.as_deref());
        let (slots, staging_bytes) = match copied_to {
            None => (STAGING_SLOTS + threads.copiers.1, u64::MAX),
            Some(_) => {
                let most =
                    options.memory_budget_bytes.map_or(PINNED_BYTES, |budget| budget.min(PINNED_BYTES));
                (threads.pinned_slots(), most)
            }
        };
        // Memory of the caller's is allocated by its thread.
        let allocates_on = copied_to.is_some()
            && options.allocator.is_none()
            && !is_inline
            && !flow.is_bounded()
            && plan.extents().len() > FIRST_EXTENTS;
        let place = MemoryPlan {
            memory: &memory,
            device: copied_to,
            slots,
            slot_bytes: plan.slot_bytes(&start.plan_options(chunk_bytes)),
            staging_bytes,
            threads: &threads,
            is_inline,
            admitted: if allocates_on { FIRST_EXTENTS } else { flow.admitted() },
            bound: flow.bound(),
            most_bytes: flow.most_bytes(),
            fresh_bytes: fresh_bytes(&plan, &flow),
        };
        let reads = plan.extents().len() as u64;
        let job = Job::new(start, plan, opening, &place);
        let job = job.map_err(|error| match error {
            // Waves know of fewer at a time.
            Error::MemoryBudget { .. } if reads > MOST_READS => NoLoad::TooManyReads(error),
            error => NoLoad::Failed(error),
        })?;
        reporting::add_preparation(&mut report, &job);
        report.notes.extend(too_long);
        // A load that the caller's thread makes runs where that does, which is worth a note only if another place was asked for.
        report.notes.extend(far_note.filter(|_| !is_inline || options.numa == NumaPlacement::NearStorage));
        report.notes.extend(memory.off_node.get().cloned());
        if threads.opens_files {
            report.notes.extend(few_files_note(reads_asked_for(options)));
        }
        report.time.open_seconds = open_time.as_secs_f64();
        report.time.prepare_seconds = started.elapsed().as_secs_f64();
        let mut loading = Box::new(Self {
            job,
            threads: Vec::new(),
            reuser: None,
            process: std::process::id(),
            report,
            started,
            usage,
            finished: false,
            is_counted: false,
            flow,
            alone: None,
        });
        if is_inline {
            loading.alone = Some(loading.job.enter());
            loading.run_inline();
        } else {
            loading.spawn_reuser();
            if allocates_on && loading.spawn(1, "hoistway-arenas", &None, Job::admit_all).is_err() {
                loading.job.admit_all();
            }
            if let Err(error) = loading.spawn_all(&threads, &cpus) {
                // Those that started end with the load, which begins anew.
                loading.is_counted = true;
                return Ok(Err(error));
            }
        }
        Ok(Ok(loading))
    }

    /// Does everything that may be done now, on this thread.
    fn run_inline(&mut self) {
        let job = &self.job;
        (0..job.engine.routes.len()).for_each(|route| transfer::serve(&job.engine, &**job, route));
        if !self.flow.is_bounded() || job.is_over() {
            self.alone = None;
        }
    }

    /// Starts the threads, as many as the system gives.
    ///
    /// # Errors
    /// The system's, if it gives none of a kind that the load needs.
    fn spawn_all(&mut self, threads: &ThreadPlan, cpus: &Option<Vec<usize>>) -> io::Result<()> {
        let (job, depth) = (self.job.clone(), threads.depth.0);
        let needed: Vec<bool> =
            (0..job.engine.routes.len()).map(|route| job.engine.will_serve(route)).collect();
        let is_probing =
            |(route, needed): (&OpenRoute, &bool)| *needed && route.member.facts().cache.is_some();
        let is_probing = job.engine.routes.iter().zip(&needed).any(is_probing);
        if job.device_line().is_some() {
            self.spawn(1, "hoistway-device", cpus, Job::wait_for_copies)?;
        }
        let serve = |loading: &mut Self, is_cache: bool| {
            for (number, route) in job.engine.routes.iter().enumerate() {
                if needed[number] && route.member.facts().cache.is_some() == is_cache {
                    let work = move |job: &Job| {
                        transfer::serve(&job.engine, job, number);
                        if is_cache {
                            job.touch_all_ahead(depth);
                        }
                    };
                    loading.spawn(route.share.threads, route.member.facts().thread_name, cpus, work)?;
                }
            }
            io::Result::Ok(())
        };
        serve(self, true)?;
        let has_rings =
            job.engine.routes.iter().zip(&needed).any(|(route, needed)| *needed && route.share.depth.1 > 1);
        let has = |landing| job.engine.routes.iter().any(|route| route.member.facts().landing == landing);
        // Of few reads from pinned pages, most pass no slot.
        let needs_few = has(Landing::View) && job.plan.extents().len() < MANY_READS;
        let slots = || job.engine.slots_of_routes().chain([&job.engine.slots]);
        if job.device_line().is_some() && !needs_few && !slots().all(Slots::are_pinned) {
            // Pinning takes time: threads do it side by side.
            let first = if has(Landing::Device) && !is_probing { 1 } else { depth + threads.copiers.0 };
            // Without these threads, reads pin their slots themselves.
            let _ = self.spawn(PINNERS, "hoistway-pin", cpus, move |job| {
                for route in &job.engine.routes {
                    if let Some(slots) = route.slots() {
                        slots.pin_ahead(route.share.depth.1, || job.is_over());
                    }
                }
                job.engine.slots.pin_ahead(first, || job.is_over());
            });
        } else if has_rings && !is_probing {
            // Without this thread, reads fault their memory in themselves.
            let touch = move |job: &Job| job.touch_all_ahead(depth);
            let _ = self.spawn(threads.touchers, "hoistway-touch", cpus, touch);
        }
        serve(self, false)
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
            // The caller's may be that of its thread alone.
            let subscriber = dispatcher::get_default(Clone::clone);
            let body = move || {
                let _running = running;
                if let Some(Err(error)) = cpus.map(|cpus| run_on(&cpus)) {
                    job.tally().refuse(Refusal::new("a NUMA node's processors", None, no_affinity(&error)));
                }
                as_of(&subscriber, || work(&job));
            };
            match parallel::thread_named(name).spawn(body) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    let why = no_thread(&error);
                    let what = format!("{THREADS} ({started} of {count} named {name} were started)");
                    self.job.tally().refuse(Refusal::new(what, None, why));
                    return if started == 0 { Err(error) } else { Ok(()) };
                }
            }
        }
        Ok(())
    }

    /// Starts the thread that waits for the work which uses memory of tensors that were dropped, if the load keeps any. It is not among
    /// those whose end is that of the load.
    fn spawn_reuser(&mut self) {
        let Some(reused) = self.job.reused_memory().cloned() else { return };
        let name = "hoistway-reuse";
        let subscriber = dispatcher::get_default(Clone::clone);
        let serves = reused.clone();
        let body = move || as_of(&subscriber, || serves.serve());
        match parallel::thread_named(name).spawn(body) {
            Ok(thread) => self.reuser = Some(thread),
            Err(error) => {
                // Memory is freed as tensors are dropped, then.
                reused.close();
                let what = format!("{THREADS} (0 of 1 named {name} were started)");
                self.job.tally().refuse(Refusal::new(what, None, no_thread(&error)));
            }
        }
    }

    /// The next tensor to hand out that is complete already. Never waits, and never tells of errors.
    pub(super) fn next_arrived(&mut self) -> Option<Tensor> {
        if self.process != std::process::id() {
            return None;
        }
        self.flow.release_last();
        self.flow.take()
    }

    /// The next tensor to become complete, waiting no longer than `timeout`.
    pub(super) fn advance(&mut self, timeout: Option<Duration>) -> Result<Arrival> {
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
        match self.job.next_event(timeout) {
            Ok(LoadEvent::Tensors(tensors)) => {
                self.flow.add(tensors);
                Ok(self.flow.take().map_or(Arrival::Pending, Arrival::Tensor))
            }
            Ok(LoadEvent::Finished) => {
                self.finish();
                let (done, total) = (self.job.tensors_done(), self.job.plan.tensors().len());
                let ended = if done < total {
                    Err(Error::Internal(format!("{done} of {total} tensors became complete")))
                } else {
                    self.job.check_kept()
                };
                self.count(ended.as_ref().map_or_else(Outcome::of, |()| Outcome::Ok));
                ended.map(|()| Arrival::Finished)
            }
            Err(error) => {
                self.finish();
                self.count(Outcome::of(&error));
                Err(error)
            }
        }
    }

    /// Counts it, once it is over.
    fn count(&mut self, outcome: Outcome) {
        if !std::mem::replace(&mut self.is_counted, true) {
            metrics::count(&self.report(), outcome, self.job.tensors_done());
        }
    }

    /// Ends the load early. Tensors that were handed out stay valid.
    pub(super) fn cancel(&mut self) {
        // In a child of fork the job's locks may be held by threads that do not exist there.
        if !self.finished && self.process == std::process::id() {
            self.flow.clear();
            self.job.fail(Error::Cancelled);
        }
    }

    /// How far the load has got.
    pub(super) fn progress(&self) -> Progress {
        Progress {
            bytes_done: self.job.tensor_bytes_done(),
            bytes_total: self.report.tensor_bytes,
            tensors_done: self.job.tensors_done(),
            tensors_total: self.report.tensors,
        }
    }

    /// What the load has done so far; the whole truth once all tensors were handed out. A child of `fork` learns
    /// only what was planned.
    pub(super) fn report(&self) -> Report {
        let mut report = self.report.clone();
        if self.process != std::process::id() {
            return report;
        }
        reporting::add_progress(&mut report, &self.job);
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
        // What still waits there has this load's memory: after a load that was whole, nothing does.
        self.job.engine.close();
        let mut time = self.report.time;
        self.stop_clock(&mut time);
        self.report.time = time;
        self.finished = true;
    }
}

impl Drop for ThreadedLoad {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A child of fork has neither the threads nor a consistent copy of what they were doing.
            std::mem::forget(self.threads.drain(..).chain(self.reuser.take()).collect::<Vec<_>>());
            return;
        }
        self.cancel();
        self.finish();
        if let Some(reuser) = self.reuser.take() {
            // A panic has been told, and has closed what it served.
            let _ = reuser.join();
        }
        // Its caller may have all tensors without having asked for its end.
        let is_whole = self.job.tensors_done() == self.job.plan.tensors().len();
        self.count(if is_whole { Outcome::Ok } else { Outcome::Cancelled });
    }
}
