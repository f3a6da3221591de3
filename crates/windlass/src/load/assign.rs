//! Which line each read waits in at first, and what is refused before any is made.
#![forbid(unsafe_code)]

use super::{DirectIo, LoadOptions, direct::DirectPath, queue::Line, usrbio::UsrbioPath};
use crate::{
    Error, Result,
    plan::{Extent, Plan},
    report::Refusal,
    route::{Access, Buffer, ReadOp, Route, SourceFile, Unavailable},
};
use std::sync::Arc;
use windlass_io::file::Probe;

/// The reads of a load, each with the line that it waits in.
#[derive(Debug)]
pub(super) struct Assigned {
    pub(super) reads: Vec<(Line, ReadOp)>,
    /// For each file, who reads what the page cache does not hold.
    pub(super) cold: Box<[Line]>,
    pub(super) refused: Vec<Refusal>,
}

/// Assigns a read to each extent. `sources` are the files by their position in the catalog, `usrbio` and `direct` are the
/// paths by shared memory and past the host, if the load has them, and `refused` what was refused before.
///
/// # Errors
/// [`Error::RouteUnavailable`] if a file cannot be read by the route that the caller named.
pub(super) fn assign(
    plan: &Plan,
    sources: &[Arc<SourceFile>],
    usrbio: Option<&UsrbioPath>,
    direct: Option<&DirectPath>,
    options: &LoadOptions,
    buffers: Vec<Buffer>,
    refused: Vec<Refusal>,
) -> Result<Assigned> {
    let mut refused = Refusals(refused);
    let by_cufile = |file: usize| direct.map(|direct| direct.files[file]);
    let cold = sources.iter().enumerate().map(|(file, source)| cold_line(source, by_cufile(file)));
    let cold: Box<[Line]> = cold.collect();
    if options.direct == DirectIo::Never {
        let why = Unavailable::new("switched off by the option direct=never", "");
        refused.add("direct reads", None, &why);
    }
    if options.direct == DirectIo::Always && options.route.chooses() {
        let why = Unavailable::new("switched off by the option direct=always", "");
        refused.add("cached", None, &why);
    }
    // What holds for a file is found out once.
    let mut lines: Vec<Option<(Line, Access)>> = vec![None; sources.len()];
    let mut reads = Vec::with_capacity(plan.extents().len());
    for (position, (extent, buffer)) in plan.extents().iter().zip(buffers).enumerate() {
        let file = extent.file.index();
        let source = &sources[file];
        if usrbio.is_some_and(|path| path.takes(file)) {
            let buffer = match buffer {
                Buffer::InPlace(region) => Buffer::Landing { slot: None, region },
                staged => staged,
            };
            reads.push((Line::Usrbio, read(position, extent, source, Access::Direct, buffer)));
            continue;
        }
        let (mut line, access) = match lines[file] {
            Some(known) => known,
            None => {
                *lines[file].insert(assign_file(source, cold[file], by_cufile(file), options, &mut refused)?)
            }
        };
        let by_cufile = direct.is_some() || options.route.is_cufile();
        if by_cufile && line == Line::Ring && !Plan::is_whole_blocks(extent) {
            // cuFile would read it through the host, without saying so. A thread can read it directly.
            line = Line::Pool;
        }
        reads.push((line, read(position, extent, source, access, buffer)));
    }
    Ok(Assigned { reads, cold, refused: refused.0 })
}

/// The read of the extent at `position`, nothing of which is there yet.
fn read(
    position: usize,
    extent: &Extent,
    source: &Arc<SourceFile>,
    access: Access,
    buffer: Buffer,
) -> ReadOp {
    ReadOp {
        extent: position,
        source: source.clone(),
        access,
        buffer,
        offset: extent.read.start(),
        position: 0,
        len: 0,
        filled: 0,
        stalls: 0,
    }
}

struct Refusals(Vec<Refusal>);

impl Refusals {
    fn add(&mut self, what: &str, source: Option<&SourceFile>, why: &Unavailable) {
        let path = source.map(|source| source.path().to_owned());
        let refusal = Refusal { what: what.into(), path, why: why.clone() };
        if !self.0.contains(&refusal) {
            self.0.push(refusal);
        }
    }
}

fn assign_file(
    source: &SourceFile,
    cold: Line,
    by_cufile: Option<bool>,
    options: &LoadOptions,
    refused: &mut Refusals,
) -> Result<(Line, Access)> {
    let route = options.route;
    let unavailable =
        |why: Unavailable| Err(Error::RouteUnavailable { route, path: Some(source.path().to_owned()), why });
    if route.is_cufile() {
        let access = if source.direct_refusal().is_some() { Access::Buffered } else { Access::Direct };
        return Ok((Line::Ring, access));
    }
    let access = match (options.direct, source.direct_refusal()) {
        (DirectIo::Never, _) => Access::Buffered,
        (_, None) => Access::Direct,
        (_, Some(why)) if options.direct == DirectIo::Always || route == Route::IoUring => {
            let fix = "choose route auto or threads, or set direct to never";
            return unavailable(Unavailable::new(why.reason.clone(), fix));
        }
        (_, Some(why)) => {
            refused.add("direct reads", Some(source), why);
            Access::Buffered
        }
    };
    // With a direct path there is no ring.
    if by_cufile.is_none()
        && (route.chooses() || route == Route::IoUring)
        && let Some(why) = source.ring_refusal()
    {
        if route == Route::IoUring {
            return unavailable(why);
        }
        refused.add("io_uring", Some(source), &why);
    }
    let line = match (route, access, source.probe()) {
        (Route::Cached, _, Probe::None(why)) => return unavailable(why.clone()),
        (Route::Cached, ..) => Line::Unprobed,
        (Route::IoUring, ..) => Line::Ring,
        // Past the page cache, whatever it holds.
        (Route::Auto | Route::Staged | Route::Unified, Access::Direct, _)
            if options.direct == DirectIo::Always =>
        {
            cold
        }
        (Route::Auto | Route::Staged | Route::Unified, Access::Direct, Probe::Cachestat | Probe::Nowait) => {
            Line::Unprobed
        }
        (Route::Auto | Route::Staged | Route::Unified, Access::Direct, Probe::None(why)) => {
            refused.add("cached", Some(source), why);
            cold
        }
        // Buffered reads take what is cached from the cache by themselves.
        (Route::Auto | Route::Staged | Route::Unified, Access::Buffered, _) | (Route::Threads, ..) => {
            Line::Pool
        }
        (Route::Mapped | Route::Usrbio | Route::Gds | Route::GdsCompat, ..) => {
            return Err(Error::Internal(format!("route {route} was asked to queue reads")));
        }
    };
    Ok((line, access))
}

/// Who reads what the page cache does not hold, where that is left open. A load with a direct path has cuFile in place
/// of a ring.
fn cold_line(source: &SourceFile, by_cufile: Option<bool>) -> Line {
    match by_cufile {
        Some(true) => Line::Ring,
        Some(false) => Line::Pool,
        None if source.ring_refusal().is_none() => Line::Ring,
        None => Line::Pool,
    }
}
