//! Route `mapped`: tensors are views of a private mapping of the file, read when they are first touched.
#![forbid(unsafe_code)]

use super::{DirectIo, LoadOptions, Loaded, Tensor, TensorMemory};
use crate::{
    Catalog, DeviceId, Error, Result,
    catalog::TensorId,
    memory::{self, Arena, Block},
    parallel,
    plan::{Extent, Layout, Plan, PlanOptions, PlannedTensor, Target},
    report::{Carrier, MemoryReport, Report, Retries, TimeReport},
    route::{Access, Route, SourceFile, Unavailable},
    sys::usage::Usage,
};
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// Maps the files that hold the selected tensors.
pub(super) fn map(
    catalog: &Catalog,
    sources: &[Arc<SourceFile>],
    options: &LoadOptions,
    open_time: Duration,
) -> Result<Loaded> {
    let started = Instant::now();
    let usage = Usage::now();
    options.check()?;
    for (option, is_set, value) in
        [("pool", options.pool.is_some(), "a pool"), ("direct", options.direct == DirectIo::Always, "always")]
    {
        if is_set {
            let reason = "route mapped shows the page cache and allocates nothing".into();
            return Err(Error::InvalidOption { option, value: value.into(), reason });
        }
    }
    let requests = options.selection.resolve(catalog)?;
    let plan =
        Plan::new(catalog, &requests, &PlanOptions { layout: Layout::File, ..options.plan_options() })?;
    refuse_copies(catalog, &plan)?;
    let planned: HashMap<TensorId, &PlannedTensor> = plan.tensors().iter().map(|p| (p.tensor, p)).collect();
    let mut arenas = vec![None; sources.len()];
    let mut tensors = Vec::with_capacity(requests.len());
    for request in &requests {
        let entry = catalog.tensor(request.tensor);
        let Some(planned) = planned.get(&request.tensor) else {
            return Err(Error::Internal(format!("tensor '{}' was not planned", entry.name)));
        };
        let block = match planned.bytes_in_file() {
            None => Block::empty(),
            Some(bytes) => {
                let source = &sources[entry.file.index()];
                source.check_unchanged(bytes, |_| Some(entry.name.to_string()))?;
                let arena = match &mut arenas[entry.file.index()] {
                    Some(arena) => arena,
                    slot @ None => {
                        slot.insert(memory::map_file(source.buffered_file(), catalog.file(entry.file).len)?)
                    }
                };
                arena.file_block(bytes)?
            }
        };
        let memory = TensorMemory::Host(Arc::new(block));
        tensors.push(Tensor::new(entry, planned, DeviceId::Cpu, memory));
    }
    let prepared = started.elapsed().as_secs_f64();
    if options.populate {
        populate(&plan, catalog, sources, &arenas)?;
    }
    let mapped_bytes = arenas.iter().flatten().map(|arena| arena.len() as u64).sum();
    let total = started.elapsed().as_secs_f64();
    let now = Usage::now();
    let tensor_bytes = plan.tensor_bytes();
    let mut notes = catalog.notes().to_vec();
    if !options.populate {
        notes.push("bytes are read when they are first used; the time above leaves that out".into());
    }
    notes.push(
        "mapped files must not shrink while tensors are in use: touching lost bytes kills the process".into(),
    );
    let report = Report {
        version: env!("CARGO_PKG_VERSION").into(),
        route: Route::Mapped,
        files: arenas.iter().flatten().count(),
        tensors: tensors.len(),
        tensor_bytes,
        read_bytes: if options.populate { tensor_bytes } else { 0 },
        staged_bytes: 0,
        carriers: vec![Carrier {
            route: Route::Mapped,
            access: Access::Buffered,
            via: None,
            tensor_bytes,
            read_bytes: if options.populate { tensor_bytes } else { 0 },
            reads: 0,
        }],
        refused: Vec::new(),
        retries: Retries::default(),
        memory: MemoryReport {
            layout: Layout::File,
            arenas: arenas.iter().flatten().count(),
            arena_bytes: mapped_bytes,
            staging_bytes: 0,
            huge_pages: memory::HugePages::Never,
            pooled: false,
            numa_node: None,
        },
        device: None,
        time: TimeReport {
            open_seconds: open_time.as_secs_f64(),
            prepare_seconds: prepared,
            transfer_seconds: total - prepared,
            total_seconds: open_time.as_secs_f64() + total,
            cpu_seconds: now.cpu.saturating_sub(usage.cpu).as_secs_f64(),
            page_faults: now.page_faults.saturating_sub(usage.page_faults),
        },
        verify: None,
        notes,
    };
    Ok(Loaded::new(tensors, report))
}

/// A mapping shows bytes as the file has them: what would have to be moved cannot be served.
fn refuse_copies(catalog: &Catalog, plan: &Plan) -> Result<()> {
    let Some(extent) = plan.extents().iter().find(|extent| extent.target == Target::Staged) else {
        return Ok(());
    };
    let piece = plan.pieces(extent, extent.read).next();
    let name = piece.map(|piece| &catalog.tensor(plan.tensors()[piece.tensor].tensor).name);
    let reason = format!(
        "tensor '{}' is a slice across rows, or its elements are misaligned in the file: it must be copied",
        name.map_or("?", |name| name)
    );
    let path = Some(catalog.file(extent.file).path.clone());
    Err(Error::RouteUnavailable {
        route: Route::Mapped,
        path,
        why: Unavailable::new(reason, "choose another route"),
    })
}

/// Reads the wanted parts of the mappings in, on all cores.
fn populate(
    plan: &Plan,
    catalog: &Catalog,
    sources: &[Arc<SourceFile>],
    arenas: &[Option<Arc<Arena>>],
) -> Result<()> {
    let read_in = |extent: &Extent| {
        let Some(arena) = &arenas[extent.file.index()] else {
            return Ok(());
        };
        let name_at = |at| plan.tensor_at(extent, at).map(|id| catalog.tensor(id).name.to_string());
        let populated = arena.populate_for_reading(extent.read);
        // A file that was cut or rewritten explains an error better, and must not pass without one.
        sources[extent.file.index()].check_unchanged(extent.read, name_at)?;
        populated.map_err(|source| Error::Io {
            operation: "reading a mapping in",
            path: catalog.file(extent.file).path.clone(),
            tensor: name_at(extent.read.start()),
            range: Some(extent.read),
            source,
        })
    };
    parallel::map(plan.extents(), parallel::cores(), read_in).into_iter().collect()
}
