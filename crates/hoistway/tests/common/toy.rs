//! A source and a route of the tests, which the engine has with the feature `fault-injection` alone. The source `toy://PATH`
//! has the bytes of a file, but no file descriptor. Reads of the route come back last first, short every third time.
#![forbid(unsafe_code)]

use crate::{
    ByteRange, Cancel, Result,
    route::{
        Access, CarriedRead, Done, Lane, ReadLane, ReadOp, Route, Unavailable,
        member::{Demand, Facts, Member, Share, Wanted},
        registry::NotOpened,
    },
    source::{Bytes, Extensions, Source},
};
use hoistway_io::Error::{Changed, Truncated};
use std::{fs, io, path::Path, sync::Arc, time::SystemTime};

/// Reads in flight in each lane.
const DEPTH: usize = 4;
/// What a short read ends at: a direct one goes on at a whole block.
const BLOCK: usize = 4096;

/// Bytes that were copied when the source was opened.
#[derive(Debug)]
struct ToySource {
    url: String,
    version: (u64, SystemTime),
    bytes: Bytes<Vec<u8>>,
}

pub(crate) fn open_source(url: &str) -> Result<Arc<dyn Source>> {
    let opened = version_of(url).and_then(|version| Ok((version, fs::read(file_of(url))?)));
    let (version, bytes) = opened.map_err(|source| hoistway_io::Error::opening(url.as_ref(), source))?;
    Ok(Arc::new(ToySource { url: url.to_owned(), version, bytes: Bytes::new(bytes) }))
}

fn file_of(url: &str) -> &str {
    url.trim_start_matches("toy://")
}

fn version_of(url: &str) -> io::Result<(u64, SystemTime)> {
    fs::metadata(file_of(url)).and_then(|stat| Ok((stat.len(), stat.modified()?)))
}

impl Source for ToySource {
    fn path(&self) -> &Path {
        self.url.as_ref()
    }

    fn len(&self) -> u64 {
        self.version.0
    }

    fn medium(&self) -> &'static str {
        "a toy"
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64, cancel: &Cancel) -> io::Result<usize> {
        self.bytes.read_at(buffer, offset, cancel)
    }

    fn check_identity(&self, needed: ByteRange) -> hoistway_io::Result<()> {
        let path = self.url.clone().into();
        match version_of(&self.url).map_err(|source| hoistway_io::Error::opening(self.path(), source))? {
            now if now == self.version => Ok(()),
            (file_len, _) if file_len < needed.end() => Err(Truncated { path, needed, file_len }),
            _ => Err(Changed { path, needed, change: "its version is another".into() }),
        }
    }

    fn extensions(&self) -> &Extensions {
        self.bytes.extensions()
    }
}

#[derive(Debug)]
struct Toy;

pub(crate) fn open_route(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    Ok((wanted.route == Route::Toy).then(|| Arc::new(Toy) as Arc<dyn Member>))
}

impl Member for Toy {
    fn facts(&self) -> Facts {
        Facts { most_lanes: 2, ..Facts::of(Route::Toy, "hoistway-toy") }
    }

    fn add(&self, _: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        Ok(true)
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(ToyLane { depth, ..ToyLane::default() }))
    }

    fn share(&self, _: &Demand<'_>) -> Share {
        Share { threads: 2, depth: (1, DEPTH), slots: 0, slot_bytes: 0 }
    }
}

#[derive(Default)]
struct ToyLane {
    depth: usize,
    reads: usize,
    waiting: Vec<CarriedRead>,
}

impl ToyLane {
    /// Reads from the source; half of what was asked for every third time.
    fn read(&mut self, op: &mut ReadOp) -> io::Result<usize> {
        self.reads += 1;
        let target = op.buffer.target(op.progress)?;
        let half = target.len() / 2 / BLOCK * BLOCK;
        let len = if self.reads.is_multiple_of(3) && half > 0 { half } else { target.len() };
        op.source.read_at(&mut target[..len], op.progress.offset, &op.cancel)
    }
}

impl Lane<CarriedRead> for ToyLane {
    fn capacity(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn push(&mut self, op: CarriedRead) {
        self.waiting.push(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        if let Some(mut op) = self.waiting.pop() {
            let result = self.read(&mut op);
            done.push(Done { op, result });
        }
        Ok(())
    }
}
