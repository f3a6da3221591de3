//! Writes a pack, and reads it again.
#![forbid(unsafe_code)]

use super::{
    Layout, SourceIdentity, Unusable, digest_of,
    index::{self, Index},
    open_index, sources,
};
use crate::{
    Error, ReadFailure, Result,
    catalog::{ExpertCatalog, Unit},
};
use hoistway::{
    ByteRange, Cancel, Checkpoint, DirectIo, Route,
    read::{Batch, Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    save,
};
use hoistway_io::file::OpenFile;
use serde::Serialize;
use std::{
    collections::VecDeque,
    fs::File,
    io,
    path::{Path, PathBuf},
    time::Instant,
};

/// Bytes of experts that are read ahead of the one that is written.
const AHEAD_BYTES: u64 = 64 << 20;

/// Options of a pack that is written.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PackOptions {
    /// Ends it early, with [`Error::Engine`] of [`hoistway::Error::Cancelled`]. Nothing is left then.
    pub cancel: Cancel,
}

hoistway_io::setters! {
    PackOptions {
        cancel: Cancel,
    }
}

/// A pack that was written, or checked.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PackReport {
    /// The pack.
    #[serde(serialize_with = "super::shown")]
    pub path: PathBuf,
    /// Experts in it.
    pub experts: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
    /// How long it took.
    pub seconds: f64,
}

/// Writes the experts of a catalog, which is that of the checkpoint, to a pack. The file takes its name once all experts were read
/// from it again as they were written, past the page cache where the file system allows that: until then, and if anything goes
/// wrong, a pack that had the name stays. Memory for 64 MiB of experts is used, and for one expert.
///
/// `progress` is told of bytes that were written, and again when they were read.
///
/// # Errors
/// [`Error::InvalidOption`] if there are no experts, the model's files are not of this machine, or `path` is one of them;
/// [`Error::Read`] names the expert; [`Error::InvalidPack`] if an expert is not read as it was written; [`Error::Engine`], also if
/// another file than a pack has the name.
pub fn write(
    checkpoint: &Checkpoint,
    catalog: &ExpertCatalog,
    path: &Path,
    options: &PackOptions,
    mut progress: impl FnMut(u64),
) -> Result<PackReport> {
    let started = Instant::now();
    if catalog.experts().is_empty() {
        return Err(Error::invalid_option("pack", path.display(), "the model has no experts"));
    }
    let layout = Layout::of(catalog)?;
    let files = ExpertCatalog::open_files(checkpoint);
    refuse_model(path, &files)?;
    save::refuse_others(path, "a file of packed experts", |begin| begin.starts_with(&index::MARK))?;
    let identity = identity_of(catalog, &files)?;
    let reader = reader(Route::Auto, &options.cancel)?;
    let mut file_bytes = 0;
    save::write_by(path, layout.end, catalog.files(), |file| -> Result<()> {
        let failed = |source| io_error("write", path, source);
        let mut digests = Vec::with_capacity(catalog.experts().len());
        let requests = |unit: usize| requests(catalog, &files, unit);
        each_expert(&reader, catalog, &options.cancel, requests, |position, parts| {
            let mut hasher = blake3::Hasher::new();
            for (bytes, place) in parts.iter().zip(layout.units[position].iter()) {
                index::write(file, bytes, place.start()).map_err(failed)?;
                hasher.update(bytes);
                progress(bytes.len() as u64);
            }
            digests.push(hasher.finalize().to_hex().to_string());
            Ok(())
        })?;
        identity_of(catalog, &files)?;
        let (sources, layout_digest) = (identity.clone(), layout.digest.clone());
        let index = Index { sources, layout: layout_digest, experts: digests, start: layout.end };
        index.write(file, layout.end).map_err(failed)?;
        file.sync_all().map_err(|source| io_error("sync", path, source))?;
        file_bytes = file.metadata().map_err(|source| io_error("stat", path, source))?.len();
        verify(catalog, &layout, &index, file, path, &options.cancel, &mut progress)
    })?;
    Ok(report(catalog, path, file_bytes, started))
}

/// Reads all experts of a pack of this catalog, and those of the model, and compares both with the digests of those that were packed.
/// `progress` is told of bytes that were read.
///
/// # Errors
/// [`Error::InvalidPack`] if it is none of this catalog, or an expert is another one; [`Error::Read`]; [`Error::Engine`].
pub fn check(
    checkpoint: &Checkpoint,
    catalog: &ExpertCatalog,
    path: &Path,
    options: &PackOptions,
    mut progress: impl FnMut(u64),
) -> Result<PackReport> {
    let started = Instant::now();
    let unusable = |error: Unusable| error.into_error(path.to_owned());
    let (file, layout, index) = open_index(catalog, path).map_err(unusable)?;
    let files = ExpertCatalog::open_files(checkpoint);
    let identity = identity_of(catalog, &files)?;
    index.compare(&layout, &identity).map_err(|reason| unusable(Unusable::Refused(reason)))?;
    let model = reader(Route::Auto, &options.cancel)?;
    let requests = |unit: usize| requests(catalog, &files, unit);
    each_expert(&model, catalog, &options.cancel, requests, |position, parts| {
        progress(parts.iter().map(|part| part.len() as u64).sum());
        if index.has(position, &digest_of(parts.iter().map(|part| &**part))) {
            return Ok(());
        }
        Err(Error::InvalidPack { path: path.to_owned(), reason: other_expert(catalog, position) })
    })?;
    verify(catalog, &layout, &index, &file, path, &options.cancel, &mut progress)?;
    let file_bytes = file.metadata().map_err(|source| io_error("stat", path, source))?.len();
    Ok(report(catalog, path, file_bytes, started))
}

/// Compares the first expert of the model, one in its middle, and the last with their digests. Fails in words.
pub(super) fn compare_some(catalog: &ExpertCatalog, index: &Index, files: &[ReadFile]) -> Result<(), String> {
    let Some(last) = catalog.experts().len().checked_sub(1) else { return Ok(()) };
    let mut positions = vec![0, last / 2, last];
    positions.dedup();
    let reader = reader(Route::Threads, &Cancel::default()).map_err(|error| error.to_string())?;
    for position in positions {
        let read = || -> Result<blake3::Hash> {
            let batch = reader.submit(requests(catalog, files, position)?, Priority::Demand)?;
            if batch.wait().is_err() {
                let failed = (0..batch.len()).find(|read| batch.status(*read).error().is_some());
                let unit = catalog.experts()[position].label();
                return Err(Error::Read {
                    unit,
                    source: ReadFailure::of_batch(&batch, failed.unwrap_or_default()),
                });
            }
            let parts: Option<Vec<_>> = (0..batch.len()).map(|read| batch.take(read)).collect();
            let parts = parts.ok_or_else(|| Error::Internal("a read has no memory".into()))?;
            Ok(digest_of(parts.iter().map(|part| &**part)))
        };
        let digest = read().map_err(|error| format!("the model cannot be compared with it: {error}"))?;
        if !index.has(position, &digest) {
            return Err(other_expert(catalog, position));
        }
    }
    Ok(())
}

fn other_expert(catalog: &ExpertCatalog, position: usize) -> String {
    let unit = catalog.experts().get(position).map(Unit::label).unwrap_or_default();
    format!("{unit} of the model is not what was packed: pack again")
}

/// Fails if the pack would replace a file of the model, by whatever name.
fn refuse_model(path: &Path, files: &[ReadFile]) -> Result<()> {
    let found = match OpenFile::open(path).map_err(hoistway::Error::from) {
        Ok(found) => found.identity,
        Err(hoistway::Error::NotFound { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let model = files.iter().find(|file| file.identity().is_some_and(|file| file.is_same_file(&found)));
    match model {
        None => Ok(()),
        Some(file) => {
            let reason = format!("it is the model's file {}: give another name", file.path().display());
            Err(Error::invalid_option("output", path.display(), reason))
        }
    }
}

fn report(catalog: &ExpertCatalog, path: &Path, file_bytes: u64, started: Instant) -> PackReport {
    PackReport {
        path: path.to_owned(),
        experts: catalog.experts().len(),
        bytes: catalog.total_expert_bytes(),
        file_bytes,
        seconds: started.elapsed().as_secs_f64(),
    }
}

/// Fails unless experts are what was packed. They come from the drive where direct reads are possible.
fn verify(
    catalog: &ExpertCatalog,
    layout: &Layout,
    index: &Index,
    file: &File,
    path: &Path,
    cancel: &Cancel,
    progress: &mut impl FnMut(u64),
) -> Result<()> {
    let again = file.try_clone().map_err(|source| io_error("open", path, source))?;
    let packed = ReadFile::from_file(again, path)?;
    let reader = reader(Route::Threads, cancel)?;
    let request = |unit: usize| {
        let name = catalog.experts().get(unit).map(Unit::label).unwrap_or_default();
        Ok(vec![ReadRequest::new(&packed, layout.range(unit), Target::memory()).named(name)])
    };
    each_expert(&reader, catalog, cancel, request, |position, read| {
        let start = layout.range(position).start();
        let bytes = read.first().map_or(&[][..], |bytes| bytes);
        let mut parts = Vec::with_capacity(layout.units[position].len());
        for place in &layout.units[position] {
            let part = (place.start() - start) as usize..(place.end() - start) as usize;
            let part = bytes.get(part).ok_or_else(|| Error::Internal("a part was not read".into()))?;
            parts.push(part);
            progress(part.len() as u64);
        }
        if !index.has(position, &digest_of(parts)) {
            let unit = catalog.experts().get(position).map(Unit::label).unwrap_or_default();
            let range = layout.range(position);
            let reason = format!("{unit}, at {range}, is not what was packed: pack again");
            return Err(Error::InvalidPack { path: path.to_owned(), reason });
        }
        Ok(())
    })
}

/// Reads experts in their order, some ahead, and gives the bytes of each one's requests to `take`.
fn each_expert(
    reader: &Reader,
    catalog: &ExpertCatalog,
    cancel: &Cancel,
    requests: impl Fn(usize) -> Result<Vec<ReadRequest>>,
    mut take: impl FnMut(usize, &[hoistway::memory::Block]) -> Result<()>,
) -> Result<()> {
    let experts = catalog.experts();
    let (mut next, mut bytes_ahead) = (0, 0u64);
    let mut ahead: VecDeque<(usize, Batch)> = VecDeque::new();
    loop {
        while let Some(unit) = experts.get(next)
            && (ahead.is_empty() || bytes_ahead.saturating_add(unit.bytes()) <= AHEAD_BYTES)
        {
            ahead.push_back((next, reader.submit(requests(next)?, Priority::Demand)?));
            bytes_ahead = bytes_ahead.saturating_add(unit.bytes());
            next += 1;
        }
        let Some((position, batch)) = ahead.pop_front() else { return Ok(()) };
        let unit = &experts[position];
        bytes_ahead = bytes_ahead.saturating_sub(unit.bytes());
        if batch.wait().is_err() {
            let failed = (0..batch.len()).find(|read| batch.status(*read).error().is_some());
            let source = ReadFailure::of_batch(&batch, failed.unwrap_or_default());
            if cancel.is_cancelled() {
                return Err(hoistway::Error::Cancelled.into());
            }
            return Err(Error::Read { unit: unit.label(), source });
        }
        let blocks: Option<Vec<_>> = (0..batch.len()).map(|read| batch.take(read)).collect();
        take(position, &blocks.ok_or_else(|| Error::Internal("a read has no memory".into()))?)?;
        if cancel.is_cancelled() {
            return Err(hoistway::Error::Cancelled.into());
        }
    }
}

/// Reads of the parts of an expert from the files of the model.
fn requests(catalog: &ExpertCatalog, files: &[ReadFile], unit: usize) -> Result<Vec<ReadRequest>> {
    let parts = catalog.experts().get(unit).map_or(&[][..], Unit::parts);
    let request = |part: &crate::catalog::Part| {
        let file = files.get(part.file);
        let file = file.ok_or_else(|| Error::Internal(format!("there is no file {}", part.file)))?;
        Ok(ReadRequest::new(file, part.bytes, Target::memory()).named(part.tensor.clone()))
    };
    parts.iter().map(request).collect()
}

fn reader(route: Route, cancel: &Cancel) -> Result<Reader> {
    let options = ReaderOptions::default().route(route).direct(DirectIo::Auto).cancel(cancel.clone());
    Ok(Reader::new(&options)?)
}

/// What the files of a model are that are read. Fails unless their paths still lead to them.
fn identity_of(catalog: &ExpertCatalog, files: &[ReadFile]) -> Result<Vec<SourceIdentity>> {
    let first = || catalog.files().first().cloned().unwrap_or_default();
    let identity: Option<Vec<_>> = files.iter().map(SourceIdentity::of).collect();
    let identity = identity.ok_or_else(|| {
        Error::invalid_option("pack", first().display(), "only files of this machine can be packed")
    })?;
    if sources(catalog)? != identity {
        let reason = "a file of the model was changed or replaced since it was opened".into();
        return Err(Error::InvalidPack { path: first(), reason });
    }
    Ok(identity)
}

fn io_error(operation: &'static str, path: &Path, source: io::Error) -> Error {
    let range = None::<ByteRange>;
    hoistway::Error::Io { operation, path: path.to_owned(), tensor: None, range, source }.into()
}
