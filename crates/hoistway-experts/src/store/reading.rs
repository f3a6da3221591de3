//! Reads units by the engine's reader, into the rooms that a backing gives.
#![allow(unsafe_code)]

use super::{
    ledger::Ended,
    monitor::{Elsewhere, Io, Notice},
    prepare_threads::PrepareThreads,
};
use crate::{
    Error, ReadFailure, Result,
    backing::{Fetched, PartPlace, UnitMemory, UnitRoom, host_view},
    catalog::{ExpertCatalog, Unit},
    error::guarded,
};
use hoistway::{
    ByteRange,
    read::{Batch, Priority, ReadFile, ReadRequest, ReadStatus, Reader},
};
use hoistway_io::parallel::{STACK_BYTES, lock};
use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// A reader, the files of a catalog, and the memory of its units.
pub(super) struct ReaderIo {
    // Before the memory that it fills.
    reader: Arc<Reader>,
    files: Vec<ReadFile>,
    catalog: Arc<ExpertCatalog>,
    memory: Arc<dyn UnitMemory>,
    /// Threads that prepare units, which use the memory and the store.
    preparing: Arc<PrepareThreads>,
}

/// What brings the bytes of one unit.
pub(super) struct Load {
    unit: usize,
    way: Way,
}

enum Way {
    /// Reads.
    Read {
        batch: Batch,
        /// Why the bytes of a packed expert are not its own.
        damage: Arc<OnceLock<ReadFailure>>,
    },
    /// A copy from the second level, and how it ended.
    Fetch(Arc<Mutex<Option<Fetched>>>),
}

/// What is left of the reads of a unit.
struct Left {
    reads: AtomicUsize,
    has_failed: AtomicBool,
    notice: Mutex<Option<Notice>>,
}

/// Why a unit could not be read, or got no room.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    Read(ReadFailure),
    /// The backing's error.
    Memory(Arc<Error>),
}

impl ReaderIo {
    pub(super) fn new(
        reader: Arc<Reader>,
        files: Vec<ReadFile>,
        catalog: Arc<ExpertCatalog>,
        memory: Arc<dyn UnitMemory>,
    ) -> Self {
        Self { reader, files, catalog, memory, preparing: Arc::default() }
    }

    pub(super) fn reader(&self) -> &Arc<Reader> {
        &self.reader
    }

    pub(super) fn memory(&self) -> &dyn UnitMemory {
        &*self.memory
    }

    fn unit(&self, unit: usize) -> Result<&Unit> {
        self.catalog.units().get(unit).ok_or_else(|| Error::Internal(format!("there is no unit {unit}")))
    }

    /// Starts to copy a unit from the second level. Gives the notice back if it is not there.
    fn fetch(
        &self,
        unit: usize,
        room: &UnitRoom,
        is_demand: bool,
        begin_by: Option<Instant>,
        notice: Notice,
    ) -> Result<Load, Option<Notice>> {
        let Some(level) = self.memory.level().filter(|_| unit < self.catalog.experts().len()) else {
            return Err(Some(notice));
        };
        let (fetched, notice) = (Arc::new(Mutex::new(None)), Arc::new(Mutex::new(Some(notice))));
        let (outcome, told) = (fetched.clone(), notice.clone());
        let is_fetched = level.fetch(unit, room, is_demand, begin_by, move |ended| {
            let is_gone = matches!(ended, Fetched::Gone);
            *lock(&outcome) = Some(ended);
            match lock(&told).take() {
                Some(notice) if is_gone => notice.tell_gone(),
                Some(notice) => notice.tell(),
                None => {}
            }
        });
        if is_fetched { Ok(Load { unit, way: Way::Fetch(fetched) }) } else { Err(lock(&notice).take()) }
    }

    /// A request for each part of a unit, or for parts that lie together. The notice is told once all have ended.
    fn requests(
        &self,
        unit: usize,
        room: &UnitRoom,
        begin_by: Option<Instant>,
        notice: Notice,
        damage: &Arc<OnceLock<ReadFailure>>,
    ) -> Result<Vec<ReadRequest>> {
        let description = self.unit(unit)?;
        let reads = reads_of(description, room);
        let left = Left {
            reads: AtomicUsize::new(reads.len()),
            has_failed: AtomicBool::new(false),
            notice: Mutex::new(Some(notice)),
        };
        let left = Arc::new(left);
        let is_packed = room.places.iter().any(|place| place.file == self.catalog.files().len());
        let unverified = self.catalog.packed().filter(|packed| is_packed && packed.is_unverified(unit));
        let unverified = unverified.map(|_| (self.catalog.clone(), room.clone()));
        let mut requests = Vec::with_capacity(reads.len());
        for (name, place) in reads {
            let file = self.files.get(place.file);
            let file = file.ok_or_else(|| Error::Internal(format!("there is no file {}", place.file)))?;
            // SAFETY: the room was reserved for this unit. It is released once the ledger was told that the unit's reads have
            // ended, or was evicted after that, and nothing is leased before. When the store goes, its loads go first, and
            // wait for their reads.
            let target = unsafe { host_view::target(room.memory, &place) };
            let target = target.ok_or_else(|| Error::Internal("a place has no address".into()))?;
            let (left, unverified, damage) = (left.clone(), unverified.clone(), damage.clone());
            let request = ReadRequest::new(file, place.read, target).named(name).on_end(move |outcome| {
                if outcome.is_err() {
                    left.has_failed.store(true, Ordering::Relaxed);
                }
                // Acquire and release: the thread that tells the notice has seen the ends of the others.
                if left.reads.fetch_sub(1, Ordering::AcqRel) != 1 {
                    return;
                }
                if let Some((catalog, room)) = unverified.filter(|_| !left.has_failed.load(Ordering::Relaxed))
                {
                    // SAFETY: all reads of the unit have delivered, and its room is not released before the notice is told.
                    if let Err(error) = unsafe { verify(&catalog, unit, &room) } {
                        _ = damage.set(error.into());
                    }
                }
                if let Some(notice) = lock(&left.notice).take() {
                    notice.tell();
                }
            });
            let request = match &room.after {
                Some(fences) => request.after(fences.iter().cloned()),
                None => request,
            };
            requests.push(match begin_by {
                Some(deadline) => request.begin_by(deadline),
                None => request,
            });
        }
        Ok(requests)
    }
}

impl Io for ReaderIo {
    type Failure = Failure;
    type Load = Load;
    type Room = UnitRoom;

    fn reserve(&self, unit: usize, keep_bytes: u64) -> Result<Option<UnitRoom>, Failure> {
        self.memory.reserve(unit, keep_bytes).map_err(|error| Failure::Memory(Arc::new(error)))
    }

    fn prepare(
        &self,
        unit: usize,
        is_demand: bool,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<(), Failure> {
        let memory = self.memory.clone();
        let prepare = move || {
            memory.prepare(unit);
            then();
        };
        self.preparing.start(unit, is_demand, prepare).map_err(|source| {
            let (bytes, kind) = (STACK_BYTES as u64, "a thread's stack");
            let error = hoistway::Error::Allocation { bytes, kind, source };
            Failure::Memory(Arc::new(error.into()))
        })
    }

    fn elsewhere(&self) -> Elsewhere {
        let preparing = self.preparing.clone();
        // Without a thread, the next caller does it.
        Box::new(move |job| _ = preparing.start(usize::MAX, true, job))
    }

    fn end_preparing(&self) {
        self.preparing.end();
    }

    fn hasten(&self, unit: usize) {
        self.preparing.promote(unit);
    }

    fn start(
        &self,
        unit: usize,
        room: &UnitRoom,
        is_demand: bool,
        begin_by: Option<Instant>,
        notice: Notice,
    ) -> Result<Load, Failure> {
        let notice = match self.fetch(unit, room, is_demand, begin_by, notice) {
            Ok(load) => return Ok(load),
            Err(notice) => notice,
        };
        let notice = notice.ok_or_else(|| {
            Failure::Memory(Arc::new(Error::Internal("the notice of a load is gone".into())))
        })?;
        let damage = Arc::default();
        let requests = self.requests(unit, room, begin_by, notice, &damage);
        let requests = requests.map_err(|error| Failure::Memory(Arc::new(error)))?;
        let priority = if is_demand { Priority::Demand } else { Priority::Prefetch };
        // Threads that wait for them get the panic as an error.
        let submitted = guarded("the reader", || self.reader.submit(requests, priority));
        let submitted = submitted.map_err(|error| Failure::Memory(Arc::new(error)))?;
        let batch = submitted.map_err(|error| Failure::Read(error.into()))?;
        Ok(Load { unit, way: Way::Read { batch, damage } })
    }

    fn outcome(&self, Load { unit, way }: Load) -> Ended<Failure> {
        let ended = match way {
            Way::Read { batch, damage } => outcome_of_reads(&batch, &damage),
            Way::Fetch(fetched) => match lock(&fetched).take() {
                Some(Fetched::Copied) => Ended::Copied,
                Some(Fetched::Gone) | None => Ended::Again,
                Some(Fetched::Cancelled) => {
                    Ended::Cancelled(Failure::Read(hoistway::Error::Cancelled.into()))
                }
                Some(Fetched::Failed(error)) => {
                    Ended::Failed(Failure::Read(hoistway::Error::from(error).into()))
                }
            },
        };
        if matches!(ended, Ended::Delivered | Ended::Copied)
            && let Some(level) = self.memory.level()
            && unit < self.catalog.experts().len()
        {
            level.delivered(unit);
        }
        ended
    }

    fn cancel(&self, load: &Load) {
        match &load.way {
            Way::Read { batch, .. } => batch.cancel(),
            Way::Fetch(_) => self.memory.level().into_iter().for_each(|level| level.cancel(load.unit)),
        }
    }

    fn promote(&self, load: &Load) {
        match &load.way {
            Way::Read { batch, .. } => batch.promote(),
            Way::Fetch(_) => self.memory.level().into_iter().for_each(|level| level.promote(load.unit)),
        }
    }

    fn release(&self, unit: usize, room: &UnitRoom, keep_bytes: u64) -> bool {
        self.memory.release(unit, room, keep_bytes)
    }
}

/// How reads ended, which have all ended or are about to.
fn outcome_of_reads(batch: &Batch, damage: &OnceLock<ReadFailure>) -> Ended<Failure> {
    let (mut failed, mut cancelled) = (None, None);
    for read in 0..batch.len() {
        // Its end was told a moment ago, or is about to be seen.
        match batch.wait_read(read, Duration::MAX) {
            ReadStatus::Delivered => {}
            ReadStatus::Failed(hoistway::Error::Cancelled) => cancelled = cancelled.or(Some(read)),
            ReadStatus::Failed(_) | ReadStatus::Pending => failed = failed.or(Some(read)),
        }
    }
    let failure = |read| Failure::Read(ReadFailure::of_batch(batch, read));
    match (failed, cancelled) {
        (Some(read), _) => Ended::Failed(failure(read)),
        (None, Some(read)) => Ended::Cancelled(failure(read)),
        (None, None) => match damage.get() {
            Some(failure) => Ended::Failed(Failure::Read(failure.clone())),
            None => Ended::Delivered,
        },
    }
}

/// Compares the bytes of a packed expert with its digest.
///
/// # Safety
/// All bytes of the unit were read to the room, which stays reserved meanwhile.
unsafe fn verify(catalog: &ExpertCatalog, unit: usize, room: &UnitRoom) -> hoistway::Result<()> {
    let (Some(packed), Some(description)) = (catalog.packed(), catalog.units().get(unit)) else {
        return Ok(());
    };
    let parts = description.parts().iter().zip(room.places.iter());
    // SAFETY: as the caller says.
    packed.verify(
        unit,
        parts.filter_map(|(part, place)| unsafe { host_view::bytes(room, place, part.bytes.len()) }),
    )
}

/// The reads of a unit, each with the tensor that it begins with. Parts that lie one after the other in the file and in their slot
/// are one read.
fn reads_of(unit: &Unit, room: &UnitRoom) -> Vec<(Arc<str>, PartPlace)> {
    let mut reads: Vec<(Arc<str>, PartPlace)> = Vec::with_capacity(unit.parts().len());
    for (part, place) in unit.parts().iter().zip(room.places.iter()) {
        // Only a slot is known to be one piece of memory.
        if let Some((_, last)) = reads.last_mut().filter(|_| room.slot.is_some())
            && last.file == place.file
            && last.read.end() == place.read.start()
            && last.target.checked_add(last.read.len()) == Some(place.target)
            && let Some(both) = ByteRange::new(last.read.start(), place.read.end())
        {
            last.read = both;
            continue;
        }
        reads.push((part.tensor.clone(), *place));
    }
    reads
}

/// The length of each file.
pub(super) fn lens(files: &[ReadFile]) -> Vec<u64> {
    files.iter().map(ReadFile::len).collect()
}

/// Fails unless the files are those of the catalog, in its order, and every part lies in its file.
pub(super) fn check_files(catalog: &ExpertCatalog, files: &[ReadFile]) -> Result<()> {
    let known = catalog.files().len();
    if files.len() > known {
        let reason = format!("the catalog has {known} files: give no others");
        return Err(Error::invalid_option("files", files.len(), reason));
    }
    for (position, (file, path)) in files.iter().zip(catalog.files()).enumerate() {
        if file.path() != path {
            let (found, path) = (file.path().display(), path.display());
            let reason = format!("file {position} of the catalog is {path}: give its files in its order");
            return Err(Error::invalid_option("files", found, reason));
        }
    }
    for part in catalog.units().iter().flat_map(Unit::parts) {
        let Some(file) = files.get(part.file) else {
            let reason = format!("the catalog names file {} of {}", part.file, files.len());
            return Err(Error::invalid_option("files", files.len(), reason));
        };
        let (needed, file_len): (ByteRange, u64) = (part.bytes, file.len());
        if needed.end() > file_len {
            let (path, tensor) = (file.path().to_owned(), Some(part.tensor.to_string()));
            return Err(hoistway::Error::Truncated { path, tensor, needed, file_len }.into());
        }
    }
    Ok(())
}
