//! Brings a checkpoint's files into the page cache, for programs that map them.
#![forbid(unsafe_code)]

use crate::{ByteRange, Cancel, Checkpoint, Error, Result, Route, parallel, source::Source};
use hoistway_io::file::{LocalFile, Probe};
use serde::{Deserialize, Serialize};
use std::{ops::ControlFlow, sync::Arc, time::Instant};

/// Bytes that are probed and read together.
const PART_BYTES: u64 = 8 << 20;
/// Parts of one file, at most.
const MAX_PARTS: u64 = 1 << 20;
/// Bytes that one read brings in: larger ones spill from the processor's cache.
const STEP_BYTES: usize = 1 << 20;
/// Threads: buffered reads copy, so more than this only contend.
const MAX_THREADS: usize = 8;

/// The result of [`Checkpoint::warm`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WarmReport {
    /// Files.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that were read, if the system says what was cached before; the rest was.
    pub read_bytes: Option<u64>,
    /// Bytes that the page cache holds now, if the system says. Fewer than `bytes` if memory is short.
    pub cached_bytes: Option<u64>,
    /// How long it took.
    pub seconds: f64,
}

fn warm(sources: &[Arc<dyn Source>], progress: impl Fn(u64) -> ControlFlow<()> + Sync) -> Result<WarmReport> {
    let started = Instant::now();
    let mut parts = Vec::new();
    for source in sources {
        // Sparse files may claim any length.
        let part_bytes = PART_BYTES.max(source.len() / MAX_PARTS);
        let starts = (0..source.len()).step_by(part_bytes as usize);
        let ends = |start: u64| source.len().min(start.saturating_add(part_bytes));
        parts.extend(starts.filter_map(|start| Some((source, ByteRange::new(start, ends(start))?))));
    }
    let threads = parallel::cores().clamp(2, MAX_THREADS);
    let read: Vec<Result<u64>> = parallel::map(&parts, threads, |(source, part)| {
        // Asked before as well: parts that are left when it breaks off are not read.
        if progress(0).is_break() {
            return Err(Error::Cancelled);
        }
        let read = read_in(&***source, *part)?;
        if progress(part.len()).is_break() { Err(Error::Cancelled) } else { Ok(read) }
    });
    let files = || sources.iter().filter_map(|source| source.as_local());
    let knows_cache = files().all(|file| file.probe() == Probe::Cachestat);
    Ok(WarmReport {
        files: sources.len(),
        bytes: sources.iter().map(|source| source.len()).sum(),
        // Where the system does not say what is cached, all is read, and some of that from the cache.
        read_bytes: read.into_iter().sum::<Result<u64>>().map(|read| knows_cache.then_some(read))?,
        cached_bytes: files().map(LocalFile::cached_bytes).sum(),
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Reads what is not cached of `part`; returns how many bytes that were.
fn read_in(source: &dyn Source, part: ByteRange) -> Result<u64> {
    let local = source.local_for(Route::Cached)?;
    let mut buffer = vec![0; STEP_BYTES];
    let mut read = 0;
    let mut offset = part.start();
    while offset < part.end() {
        let len = STEP_BYTES.min((part.end() - offset) as usize);
        let step = ByteRange::at(offset, len as u64).unwrap_or(part);
        offset += len as u64;
        if local.buffered_file().is_ok_and(|file| local.probe().is_resident(&file, step)) {
            continue;
        }
        source.read_exactly(&mut buffer[..len], step.start(), None, &Cancel::default())?;
        read += len as u64;
    }
    Ok(read)
}

impl Checkpoint {
    /// Reads the files into the page cache, on several threads, leaving out what it holds already. Calls
    /// `progress` with bytes done since the last call, from any thread, until it breaks off.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Truncated`], [`Error::Changed`] or [`Error::Cancelled`].
    pub fn warm(&self, progress: impl Fn(u64) -> ControlFlow<()> + Sync) -> Result<WarmReport> {
        warm(self.sources(), progress)
    }
}
