//! The report of a load: what is planned, what preparing it took, what was done.
#![forbid(unsafe_code)]

use super::{LoadOptions, job::Job};
use crate::{
    Catalog, Report,
    device::Device,
    memory::{HugePages, Slots, unpinned_note},
    plan::{Plan, PlannedTensor},
    report::{DeviceReport, MemoryReport, Tally, TimeReport},
    route::member::Stage,
    transfer::DeviceLine,
};
use std::{cmp::Reverse, collections::BTreeSet, sync::atomic::Ordering};

/// What a report says before the first read.
pub(super) struct Planned<'a> {
    pub(super) catalog: &'a Catalog,
    pub(super) plan: &'a Plan,
    pub(super) options: &'a LoadOptions,
    /// The node that was asked for the arenas.
    pub(super) numa_node: Option<u32>,
}

impl Planned<'_> {
    /// The report of a load into memory of its own, or of a device's that it uses.
    pub(super) fn report(&self, device: Option<&Device>) -> Report {
        let Self { catalog, plan, options, numa_node } = *self;
        let read = plan.tensors().iter().filter(|tensor| !tensor.place.is_empty());
        let files: BTreeSet<_> = read.map(PlannedTensor::file).collect();
        let is_unified = options.route.is_unified();
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
                huge_pages: if options.pool.is_some() { HugePages::Transparent } else { options.huge_pages }
                    .on_this_system(),
                pooled: options.pool.is_some(),
                // A pool's memory lies where it was touched.
                numa_node: numa_node.filter(|_| options.pool.is_none()),
            },
            device: device.map(|device| DeviceReport {
                device: device.id(),
                name: device.info().name.clone(),
                pci: device.info().pci.clone(),
                unified: is_unified,
                dtype: options.dtype,
                memory_bytes: if is_unified { 0 } else { plan.arena_bytes() },
                scratch_bytes: 0,
                copies: 0,
                copiers: 0,
                copy_wait_seconds: 0.0,
                slot_wait_seconds: 0.0,
                proof: None,
            }),
            time: TimeReport::default(),
            checksums: None,
            verify: None,
            notes: catalog.notes().to_vec(),
        }
    }

    /// The report of a load into memory of the caller's, some of it perhaps on a device.
    pub(super) fn report_without_memory(&self, device: Option<&Device>) -> Report {
        let mut report = self.report(device);
        let memory = &mut report.memory;
        (memory.arenas, memory.arena_bytes) = (0, 0);
        memory.huge_pages = self.options.huge_pages.on_this_system();
        if let Some(device) = &mut report.device {
            (device.unified, device.memory_bytes) = (false, 0);
        }
        report
    }
}

/// Adds the memory and the routes that a load begins with.
pub(super) fn add_preparation(report: &mut Report, job: &Job) {
    let engine = &job.engine;
    let slots = || engine.slots_of_routes();
    report.memory.staging_bytes = engine.slots.host_bytes()
        + slots().map(Slots::host_bytes).sum::<u64>()
        + job.device_line().map_or(0, DeviceLine::pinned_bytes);
    report.notes.extend(engine.routes.iter().flat_map(|route| route.member.notes(Stage::Open)));
}

/// Adds what a load has done so far.
pub(super) fn add_progress(report: &mut Report, job: &Job) {
    let (mut tally, engine) = (job.tally().clone(), &job.engine);
    let mut proof = None;
    for route in &engine.routes {
        proof = proof.or(route.name_check.name_truly(&mut tally.carriers));
    }
    let Tally { mut carriers, refused, retries, staged_bytes } = tally;
    carriers.sort_by_key(|carrier| Reverse(carrier.tensor_bytes));
    report.read_bytes = carriers.iter().map(|carrier| carrier.read_bytes).sum();
    (report.carriers, report.refused) = (carriers, refused);
    (report.retries, report.staged_bytes) = (retries, staged_bytes);
    #[cfg(feature = "objects")]
    {
        report.memory.staging_bytes += job.ledger.most_taken_bytes();
        report.checksums = job.compared();
    }
    report.notes.extend(engine.routes.iter().flat_map(|route| route.member.notes(Stage::Over)));
    let tables = job.device_line().into_iter().flat_map(DeviceLine::slots);
    let slots: Vec<&Slots> = engine.slots_of_routes().chain([&engine.slots]).chain(tables).collect();
    // What is used without is told once.
    let short = slots.iter().filter(|slots| slots.why_unpinned().is_none());
    report.notes.extend(short.filter_map(|slots| slots.pinned_short()));
    report.notes.extend(unpinned_note(&slots, "to"));
    if report.memory.numa_node.is_some() {
        report.notes.extend(slots.iter().find_map(|slots| slots.off_node()));
    }
    let (Some(device), Some(line)) = (&mut report.device, job.device_line()) else { return };
    report.notes.extend(line.kernels_note());
    report.notes.extend(line.scratch_note());
    let slots = || engine.slots_of_routes();
    device.scratch_bytes = line.scratch_bytes() + slots().map(Slots::device_bytes).sum::<u64>();
    device.slot_wait_seconds = slots().chain([&engine.slots]).map(|slots| slots.waited().as_secs_f64()).sum();
    device.proof = proof;
    device.copies = line.copies();
    device.copiers = engine.copiers.load(Ordering::Relaxed);
    device.copy_wait_seconds = line.waited().as_secs_f64();
}
