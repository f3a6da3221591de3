//! A load to host memory of so many runs that knowing all their reads takes more memory than there is: they are asked for in
//! waves, as those of a load into memory of the caller's.
#![allow(unsafe_code)]

use super::{
    FillTarget, Filled, Filling, Tensor, TensorMemory,
    fill::reader_options,
    progress::{Arrival, Progress},
    reporting::Planned,
    start::Start,
    threads::placement,
    waves::MOST_READS,
};
use crate::{
    ByteRange, Cancel, Catalog, DeviceId, Error, LoadOptions, Report, Result,
    memory::{self, Block, Fill, MemoryRequest, Promise, WriteRegion},
    plan::{Plan, TensorRequest, tensor_places},
    read::Reader,
    sys::usage::Usage,
};
use hoistway_io::Placement;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// Time between two looks for a tensor of a caller that waits without limit.
const TICK: Duration = Duration::from_secs(3600);

/// The load. Dropping it cancels it.
pub(super) struct WaveLoad {
    // Before the memory that it writes to.
    filling: Filling,
    /// For each tensor of the plan, the memory that is filled; `None` if it has no bytes, or was handed out.
    regions: Vec<Option<WriteRegion>>,
    fills: Vec<Fill>,
    catalog: Arc<Catalog>,
    plan: Plan,
    /// For each target, the position of its tensor in the plan.
    positions: Vec<usize>,
    tensors_done: usize,
}

impl WaveLoad {
    /// Whether such a load can do what is asked for.
    pub(super) fn takes(start: &Start<'_>) -> bool {
        let options = start.options;
        options.device == DeviceId::Cpu
            && !options.route.leads_to_device()
            && start.stream.max_in_flight_bytes.is_none()
    }

    pub(super) fn start(start: &Start<'_>) -> Result<Self> {
        let (started, usage) = (Instant::now(), Usage::now());
        let Start { catalog, sources, options, stream, open_time, .. } = *start;
        let requests = options.selection.resolve(catalog)?;
        let plan = Plan::without_reads(catalog, &requests, &start.plan_options(options.chunk_bytes))?;
        let Placement { node: numa_node, note: far_note, .. } = placement(sources, options.numa, None)?;
        let (pages, pool) = (options.huge_pages, options.pool.clone());
        let memory = MemoryRequest { pages, numa_node, pool, ..MemoryRequest::default() };
        let mut reader = reader_options(options, false)?;
        let fresh = memory.fresh_bytes(plan.arena_bytes());
        let known = memory::budget::bookkeeping_bytes(MOST_READS);
        if let Some(budget) = options.memory_budget_bytes {
            let left = budget.saturating_sub(fresh.saturating_add(known));
            reader.memory_budget_bytes = reader.memory_budget_bytes.min(left).max(reader.chunk_bytes);
        }
        let promise = |staging_bytes: u64| {
            memory::budget::promise(fresh, known.saturating_add(staging_bytes), options.memory_budget_bytes)
        };
        let promise = promise(reader.memory_budget_bytes).or_else(|_| {
            // One read at a time is enough where the system has no memory for more.
            reader.memory_budget_bytes = reader.chunk_bytes;
            promise(reader.chunk_bytes)
        })?;
        let reader = Reader::new(&reader)?;

        let arenas = plan.arenas().iter().map(|&len| memory::allocate(len, &memory));
        let mut fills = Vec::with_capacity(plan.arenas().len());
        let mut regions: Vec<_> = plan.tensors().iter().map(|_| None).collect();
        for (arena, tensors) in arenas.collect::<Result<Vec<_>>>()?.into_iter().zip(tensor_places(&plan)) {
            let places: Vec<_> = tensors.iter().map(|(_, place)| *place).collect();
            let positions: Vec<_> = tensors.iter().map(|(position, _)| *position).collect();
            let (fill, own) = Fill::new(arena, tensors, &places)?;
            for ((position, place), region) in positions.into_iter().zip(places).zip(own) {
                touch_in_parts(&fill, place, &promise, options)?;
                regions[position] = Some(region);
            }
            fills.push(fill);
        }
        let mut report = Planned { catalog, plan: &plan, options, numa_node }.report(None);
        report.notes.push(format!(
            "reads were asked for in waves of {MOST_READS}, as there is no memory to know all of them at once"
        ));
        report.notes.extend(far_note);
        report.notes.extend(memory.off_node.get().cloned());
        report.time.open_seconds = open_time.as_secs_f64();
        report.time.prepare_seconds = started.elapsed().as_secs_f64();

        // In the order of the checkpoint.
        let mut positions: Vec<usize> = (0..plan.tensors().len()).collect();
        positions.sort_unstable_by_key(|&position| plan.tensors()[position].tensor);
        let mut requests: HashMap<_, TensorRequest> =
            requests.into_iter().map(|request| (request.tensor, request)).collect();
        let mut targets = Vec::with_capacity(positions.len());
        for &position in &positions {
            let tensor = &plan.tensors()[position];
            let request = requests.remove(&tensor.tensor);
            let request = request.ok_or_else(|| Error::Internal("a tensor was not asked for".into()))?;
            let address = regions[position].as_ref().map_or(0, WriteRegion::address);
            targets.push(FillTarget::new(request, DeviceId::Cpu, address as u64, tensor.place.len()));
        }
        let planned = positions.iter().map(|&position| &plan.tensors()[position]);
        let parts: Vec<_> = targets.iter().zip(planned).collect();
        let filling = Filling::new(stream.order, report, usage, Vec::new());
        // SAFETY: each target is a region, whose memory is mapped and initialised. It is used for nothing else until the
        // target was told to be filled, or the filling was cancelled: it is dropped before the regions.
        let begun = unsafe { filling.begin(reader, catalog, sources, &parts, options.coalesce_gap_bytes) };
        let filling = begun?;
        let catalog = catalog.clone();
        Ok(Self { filling, regions, fills, catalog, plan, positions, tensors_done: 0 })
    }

    pub(super) fn advance(&mut self, timeout: Option<Duration>) -> Result<Arrival> {
        match self.filling.next_or_end(timeout.unwrap_or(TICK))? {
            Filled::Target(target) => self.tensor(self.positions[target]).map(Arrival::Tensor),
            Filled::Pending => Ok(Arrival::Pending),
            Filled::Finished => Ok(Arrival::Finished),
        }
    }

    /// The next tensor that is complete already.
    pub(super) fn next_arrived(&mut self) -> Option<Tensor> {
        // An error is kept for who waits.
        match self.filling.next_within(Duration::ZERO) {
            Ok(Filled::Target(target)) => self.tensor(self.positions[target]).ok(),
            Ok(Filled::Pending | Filled::Finished) | Err(_) => None,
        }
    }

    /// The tensor at a position, all of which is there.
    fn tensor(&mut self, position: usize) -> Result<Tensor> {
        let planned = &self.plan.tensors()[position];
        let mut complete = None;
        match self.regions[position].take() {
            None => complete = Some(Block::empty()),
            Some(region) => self.fills[planned.arena].complete(region, |_, block| complete = Some(block))?,
        }
        let block = complete.ok_or_else(|| Error::Internal("a tensor is not whole".into()))?;
        self.tensors_done += 1;
        let entry = self.catalog.tensor(planned.tensor);
        Ok(Tensor::new(entry, planned, DeviceId::Cpu, TensorMemory::Host(Arc::new(block))))
    }

    pub(super) fn cancel(&mut self) {
        self.filling.stop();
    }

    pub(super) fn progress(&self) -> Progress {
        let report = self.filling.report();
        Progress {
            bytes_done: report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum(),
            bytes_total: report.tensor_bytes,
            tensors_done: self.tensors_done,
            tensors_total: self.positions.len(),
        }
    }

    pub(super) fn report(&self) -> Report {
        self.filling.report()
    }
}

/// Touches the memory of a tensor as the promise allows it, so that it counts as taken before other loads look.
fn touch_in_parts(fill: &Fill, place: ByteRange, promise: &Promise, options: &LoadOptions) -> Result<()> {
    let is_over = || options.cancel.as_ref().is_some_and(Cancel::is_cancelled);
    let mut start = place.start();
    while start < place.end() {
        let end = place.end().min(start.saturating_add(options.chunk_bytes));
        let part = ByteRange::new(start, end).unwrap_or_default();
        let touch = || fill.touch(part);
        if !promise.touch(part.len(), is_over, touch)? {
            touch();
        }
        if is_over() {
            return Err(Error::Cancelled);
        }
        start = end;
    }
    Ok(())
}
