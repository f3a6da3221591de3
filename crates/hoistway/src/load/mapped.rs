//! Route `mapped`: tensors are views of a private mapping of the file, read when they are first touched.
#![forbid(unsafe_code)]

use super::{LoadOptions, Loaded, Tensor, TensorMemory, reporting::Planned};
use crate::{
    Catalog, DeviceId, Error, Result,
    catalog::TensorId,
    memory::{self, Arena, Block},
    metrics::{self, Outcome},
    parallel,
    plan::{Extent, Layout, Plan, PlannedTensor, Target, TensorRequest},
    report::{Carrier, MemoryReport, Onward, Report, TimeReport},
    route::{Access, Route, Unavailable},
    source::Source,
    sys::usage::Usage,
};
use hoistway_io::file;
use std::{
    collections::HashMap,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

/// Maps the files that hold the selected tensors.
pub(super) fn map(
    catalog: &Catalog,
    sources: &[Arc<dyn Source>],
    options: &LoadOptions,
    open_time: Duration,
) -> Result<Loaded> {
    let (started, usage) = (Instant::now(), Usage::now());
    options.check()?;
    go_on(options)?;
    let requests = options.selection.resolve(catalog)?;
    let plan = Plan::new(catalog, &requests, &options.plan_options())?;
    refuse_copies(catalog, &plan, options)?;
    let mut arenas = vec![None; sources.len()];
    let tensors = views(catalog, sources, &requests, &plan, &mut arenas, options.route)?;
    let prepared = started.elapsed();
    let is_mapped_late = options.populate && !populate(&plan, catalog, sources, &arenas, options)?;
    let (total, now) = (started.elapsed(), Usage::now());
    let time = TimeReport {
        open_seconds: open_time.as_secs_f64(),
        prepare_seconds: prepared.as_secs_f64(),
        transfer_seconds: (total - prepared).as_secs_f64(),
        total_seconds: (open_time + total).as_secs_f64(),
        cpu_seconds: now.cpu.saturating_sub(usage.cpu).as_secs_f64(),
        page_faults: now.page_faults.saturating_sub(usage.page_faults),
    };
    let planned = Planned { catalog, plan: &plan, options, numa_node: None };
    let mut report = report(&planned, &tensors, &arenas, time);
    if is_mapped_late {
        let note = "pages were read in, and are mapped one by one as they are used: only Linux 5.14 and later map them at once";
        report.notes.push(note.into());
    }
    metrics::count(&report, Outcome::Ok, tensors.len());
    Ok(Loaded::new(tensors, report))
}

/// Makes the requested tensors. A file is mapped for its first one.
fn views(
    catalog: &Catalog,
    sources: &[Arc<dyn Source>],
    requests: &[TensorRequest],
    plan: &Plan,
    arenas: &mut [Option<Arc<Arena>>],
    route: Route,
) -> Result<Vec<Tensor>> {
    let planned: HashMap<TensorId, &PlannedTensor> = plan.tensors().iter().map(|p| (p.tensor, p)).collect();
    let view = |request: &TensorRequest| {
        let entry = catalog.tensor(request.tensor);
        let Some(planned) = planned.get(&request.tensor) else {
            return Err(Error::Internal(format!("tensor '{}' was not planned", entry.name)));
        };
        let block = match planned.bytes_in_file() {
            None => Block::empty(),
            Some(bytes) => {
                let source = &sources[entry.file.index()];
                source.check_unchanged(bytes, |_| Some(entry.name.to_string()))?;
                let local = source.local_for(route)?;
                let arena = match &mut arenas[entry.file.index()] {
                    Some(arena) => arena,
                    slot @ None => {
                        let file = local
                            .buffered_file()
                            .map_err(|error| source.read_error(bytes, Some(&*entry.name), error))?;
                        slot.insert(memory::map_file(&file, catalog.file(entry.file).len)?)
                    }
                };
                arena.file_block(bytes)?
            }
        };
        Ok(Tensor::new(entry, planned, DeviceId::Cpu, TensorMemory::Host(Arc::new(block))))
    };
    requests.iter().map(view).collect()
}

fn report(
    planned: &Planned<'_>,
    tensors: &[Tensor],
    arenas: &[Option<Arc<Arena>>],
    time: TimeReport,
) -> Report {
    let Planned { plan, options, .. } = *planned;
    let tensor_bytes = plan.tensor_bytes();
    let mut carrier = Carrier::new(options.route, Access::Buffered, Onward::Stay);
    carrier.tensor_bytes = tensor_bytes;
    let mut report = planned.report(None);
    if options.populate {
        carrier.read_bytes = tensor_bytes;
    } else {
        report.notes.push("bytes are read when they are first used; the time above leaves that out".into());
    }
    // Windows keeps a file from shrinking while a view of it exists.
    if cfg!(not(windows)) {
        let note =
            "mapped files must not shrink while tensors are in use: touching lost bytes kills the process";
        report.notes.push(note.into());
    }
    let files = arenas.iter().flatten().count();
    (report.files, report.tensors) = (files, tensors.len());
    report.read_bytes = carrier.read_bytes;
    report.carriers.push(carrier);
    report.memory = MemoryReport {
        layout: Layout::File,
        arenas: files,
        arena_bytes: arenas.iter().flatten().map(|arena| arena.len() as u64).sum(),
        staging_bytes: 0,
        huge_pages: memory::HugePages::Never,
        pooled: false,
        numa_node: None,
    };
    report.time = time;
    report
}

/// A mapping shows bytes as the file has them: what would have to be moved cannot be served.
fn refuse_copies(catalog: &Catalog, plan: &Plan, options: &LoadOptions) -> Result<()> {
    let Some(extent) = plan.extents().iter().find(|extent| extent.target == Target::Staged) else {
        return Ok(());
    };
    let piece = plan.pieces(extent, extent.read).next();
    let name = piece.map(|piece| &catalog.tensor(plan.tensors()[piece.tensor].tensor).name);
    let reason = format!(
        "tensor '{}' is a slice across rows, or its elements are misaligned in the file: it must be copied",
        name.map_or("?", |name| name)
    );
    let path = Some(catalog.file(extent.file).source.as_path().to_owned());
    Err(Error::RouteUnavailable {
        route: options.route,
        path,
        why: Unavailable::new(reason, "choose another route"),
    })
}

/// Reads the wanted parts of the mappings in, on all cores. `false` if their pages are not mapped yet.
fn populate(
    plan: &Plan,
    catalog: &Catalog,
    sources: &[Arc<dyn Source>],
    arenas: &[Option<Arc<Arena>>],
    options: &LoadOptions,
) -> Result<bool> {
    let read_in = |extent: &Extent| {
        go_on(options)?;
        let (Some(arena), source) = (&arenas[extent.file.index()], &sources[extent.file.index()]) else {
            return Ok(true);
        };
        let name_at = |at| plan.tensor_at(extent, at).map(|id| catalog.tensor(id).name.to_string());
        let populated = match arena.populate_for_reading(extent.read) {
            // Before Linux 5.14.
            Err(error) if cfg!(target_os = "linux") && error.kind() == io::ErrorKind::InvalidInput => {
                let file = source.local_for(options.route)?.buffered_file();
                file.and_then(|file| file::read_in(&file, extent.read)).map(|()| false)
            }
            populated => populated.map(|()| true),
        };
        // A file that was cut or rewritten explains an error better, and must not pass without one.
        source.check_unchanged(extent.read, name_at)?;
        populated.map_err(|source| Error::Io {
            operation: "reading a mapping in",
            path: catalog.file(extent.file).source.as_path().to_owned(),
            tensor: name_at(extent.read.start()),
            range: Some(extent.read),
            source,
        })
    };
    let are_mapped = parallel::try_map(plan.extents(), parallel::cores(), read_in)?;
    Ok(!are_mapped.contains(&false))
}

fn go_on(options: &LoadOptions) -> Result<()> {
    match &options.cancel {
        Some(cancel) if cancel.is_cancelled() => Err(Error::Cancelled),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cancel, Checkpoint};
    use std::fs;

    #[test]
    fn a_load_that_is_cancelled_reads_nothing_more_in() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("one.safetensors");
        let header = br#"{"a":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}"#;
        let length = (header.len() as u64).to_le_bytes();
        fs::write(&path, [&length[..], header, &[7; 4096]].concat()).unwrap();
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let (catalog, sources) = (checkpoint.catalog(), checkpoint.sources());
        let cancel = Cancel::default();
        let options = LoadOptions::default().route(Route::Mapped).populate(true).cancel(cancel.clone());
        let requests = options.selection.resolve(catalog).unwrap();
        let plan = Plan::new(catalog, &requests, &options.plan_options()).unwrap();
        let mut arenas = vec![None; sources.len()];
        let tensors = views(catalog, sources, &requests, &plan, &mut arenas, options.route).unwrap();
        populate(&plan, catalog, sources, &arenas, &options).unwrap();
        assert_eq!(tensors[0].bytes().unwrap()[..], [7; 4096]);
        cancel.cancel();
        let ended = populate(&plan, catalog, sources, &arenas, &options);
        assert!(matches!(ended, Err(Error::Cancelled)), "{ended:?}");
    }
}
