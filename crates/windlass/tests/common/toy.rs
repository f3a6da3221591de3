//! A route of the tests: files lie on a shelf, and reads come back last first, short every third time. It shows what a route
//! takes to be one, and passes the suites of loads, readers and streams. The engine has it with the feature
//! `fault-injection` alone.
#![forbid(unsafe_code)]

use crate::{
    parallel::lock,
    route::{
        Access, Done, ReadLane, ReadOp, Route, Unavailable,
        member::{Demand, Member, Share, Wanted},
        registry::NotOpened,
    },
    source::Source,
};
use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    sync::{Arc, Mutex, Weak},
};
use windlass_io::lane::{Lane, ReadsFile};

/// Reads in flight in each lane.
const DEPTH: usize = 4;
/// What a short read ends at: a direct one goes on at a whole block.
const BLOCK: usize = 4096;
/// Threads of a load, each with a lane.
const THREADS: usize = 2;

/// The bytes of each file, by the address of its source.
type Shelf = Mutex<HashMap<usize, (Weak<dyn Source>, Arc<[u8]>)>>;

#[derive(Debug, Default)]
struct Toy(Arc<Shelf>);

/// Opens it if it is named.
pub(in crate::route) fn open(
    wanted: &Wanted<'_>,
    _: &[&Arc<dyn Source>],
    _: &[Arc<dyn Member>],
) -> Result<Option<Arc<dyn Member>>, NotOpened> {
    Ok((wanted.route == Route::Toy).then(|| Arc::new(Toy::default()) as Arc<dyn Member>))
}

impl Member for Toy {
    fn route(&self) -> Route {
        Route::Toy
    }

    fn add(&self, source: &Arc<dyn Source>, _: Access) -> Result<bool, Unavailable> {
        let mut shelf = lock(&self.0);
        shelf.retain(|_, (file, _)| file.strong_count() > 0);
        if let Entry::Vacant(place) = shelf.entry(Arc::as_ptr(source).addr()) {
            let bytes = fetch(&**source).map_err(|error| Unavailable::new(error.to_string(), ""))?;
            place.insert((Arc::downgrade(source), bytes.into()));
        }
        Ok(true)
    }

    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable> {
        Ok(Box::new(ToyLane { shelf: self.0.clone(), depth, reads: 0, waiting: Vec::new() }))
    }

    fn share(&self, _: &Demand<'_>) -> Share {
        Share { threads: THREADS, depth: (1, DEPTH), slots: 0, slot_bytes: 0 }
    }

    fn lanes(&self, in_flight: usize) -> (usize, usize) {
        (in_flight.div_ceil(DEPTH), in_flight.min(DEPTH))
    }

    fn thread_name(&self) -> &'static str {
        "windlass-toy"
    }
}

/// All bytes of a file.
fn fetch(source: &dyn Source) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; source.len() as usize];
    let mut filled = 0;
    while filled < bytes.len() {
        match source.read_at(&mut bytes[filled..], filled as u64)? {
            0 => break,
            count => filled += count,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

struct ToyLane {
    shelf: Arc<Shelf>,
    depth: usize,
    reads: usize,
    waiting: Vec<ReadOp>,
}

impl ToyLane {
    /// Copies what a read asks for from the shelf; half of it every third time.
    fn read(&mut self, op: &mut ReadOp) -> io::Result<usize> {
        let missing = || io::Error::other("the file is not on the shelf");
        let bytes = lock(&self.shelf).get(&Arc::as_ptr(&op.source).addr()).map(|(_, bytes)| bytes.clone());
        let bytes = bytes.ok_or_else(missing)?;
        let read = op.next_read()?;
        let left = bytes.get(read.offset as usize..).unwrap_or_default();
        self.reads += 1;
        let most = left.len().min(read.target.len());
        let half = most / 2 / BLOCK * BLOCK;
        let count = if self.reads.is_multiple_of(3) && half > 0 { half } else { most };
        read.target[..count].copy_from_slice(&left[..count]);
        Ok(count)
    }
}

impl Lane<ReadOp> for ToyLane {
    fn capacity(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn push(&mut self, op: ReadOp) {
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
