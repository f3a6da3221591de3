//! What tests of readers share: files, every kind of memory to read into, and scripts of faults.

pub use super::system::Warm;
use super::{
    QUEUED,
    on_device::{CUDA, ROCM, TOY},
    stand_in::STAND_IN,
};
use hoistway::{
    ByteRange, DeviceId, DirectIo, Error, Route,
    read::{Batch, Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    route::fault::FaultScript,
};
use hoistway_device::{CopyStream, Device, DeviceMemory};
use requirements::{Requirement, skip};
use std::{
    fs,
    path::Path,
    ptr::NonNull,
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

/// Longer than anything here takes.
pub const LONG: Duration = Duration::from_secs(60);
/// Around lent memory, and in it before it is written.
const GUARD: u8 = 0xEE;
const GUARD_BYTES: usize = 4096;

pub fn range(start: u64, len: u64) -> ByteRange {
    ByteRange::at(start, len).unwrap()
}

/// Writes a file whose bytes depend on their place.
pub fn write_file(path: &Path, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (word, chunk) in bytes.chunks_mut(8).enumerate() {
        let value = (word as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        chunk.copy_from_slice(&value.to_le_bytes()[..chunk.len()]);
    }
    fs::write(path, &bytes).unwrap();
    bytes
}

/// A file on disk, and its bytes.
pub struct TestFile {
    _directory: tempfile::TempDir,
    pub path: std::path::PathBuf,
    pub bytes: Vec<u8>,
}

impl TestFile {
    pub fn new(len: usize) -> Self {
        let directory = super::on_device::disk();
        let path = directory.path().join("data");
        let bytes = write_file(&path, len);
        Self { _directory: directory, path, bytes }
    }

    pub fn open(&self) -> ReadFile {
        ReadFile::open(&self.path).unwrap()
    }

    pub fn bytes_of(&self, range: ByteRange) -> &[u8] {
        &self.bytes[range.start() as usize..range.end() as usize]
    }
}

/// Puts a file into the page cache, or takes it out.
pub fn prepare(file: &TestFile, warm: bool) -> Option<Warm> {
    if !warm {
        super::make_cold(&file.path);
    }
    warm.then(|| Warm::make(&file.path))
}

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The reader's.
    Memory,
    /// The caller's, so many bytes away from where blocks of the file and of memory coincide.
    Host(usize),
    Sink,
    /// A device's, so many bytes from the start of an allocation.
    Device(DeviceId, usize),
}

impl Kind {
    pub const ALL: [Self; 7] = [
        Self::Memory,
        Self::Host(0),
        Self::Host(1),
        Self::Sink,
        Self::Device(CUDA, 3),
        Self::Device(ROCM, 3),
        Self::Device(TOY, 3),
    ];
}

/// Memory of one kind for one range, and how to look at it.
pub struct Place {
    pub range: ByteRange,
    pub kind: Kind,
    memory: Memory,
}

enum Memory {
    Reader,
    Host { bytes: Vec<u8>, start: usize },
    Sink(Arc<Mutex<Sunk>>),
    Device { memory: DeviceMemory, start: usize },
}

struct Sunk {
    bytes: Vec<u8>,
    /// How often each byte came.
    times: Vec<u8>,
}

impl Place {
    pub fn new(kind: Kind, range: ByteRange) -> Self {
        let len = range.len() as usize;
        let memory = match kind {
            Kind::Memory => Memory::Reader,
            Kind::Host(shift) => {
                let bytes = vec![GUARD; len + 4 * GUARD_BYTES];
                let first = bytes.as_ptr().addr() + GUARD_BYTES;
                let wanted = (range.start() as usize + shift) % 4096;
                let start = GUARD_BYTES + (wanted + 4096 - first % 4096) % 4096;
                Memory::Host { bytes, start }
            }
            Kind::Sink => {
                Memory::Sink(Arc::new(Mutex::new(Sunk { bytes: vec![0; len], times: vec![0; len] })))
            }
            Kind::Device(id, start) => {
                LazyLock::force(&STAND_IN);
                let device = Device::open(id).unwrap();
                let memory = DeviceMemory::new(&device, (len + start + GUARD_BYTES) as u64).unwrap();
                Memory::Device { memory, start }
            }
        };
        Self { range, kind, memory }
    }

    pub fn target(&mut self) -> Target {
        match &mut self.memory {
            Memory::Reader => Target::memory(),
            Memory::Host { bytes, start } => {
                // SAFETY: within the vector, which outlives the batch and which nothing looks at meanwhile.
                unsafe { Target::host(NonNull::new(bytes.as_mut_ptr().add(*start)).unwrap()) }
            }
            Memory::Sink(sunk) => {
                let sunk = sunk.clone();
                Target::sink(move |position, bytes| {
                    let mut sunk = sunk.lock().unwrap();
                    let place = position as usize..position as usize + bytes.len();
                    sunk.bytes[place.clone()].copy_from_slice(bytes);
                    sunk.times[place].iter_mut().for_each(|times| *times += 1);
                    Ok(())
                })
            }
            // SAFETY: within the allocation, which outlives the batch and which nothing uses meanwhile.
            Memory::Device { memory, start } => unsafe {
                Target::device(memory.device().id(), memory.address() + *start as u64)
            },
        }
    }

    pub fn request(&mut self, file: &ReadFile) -> ReadRequest {
        let range = self.range;
        ReadRequest::new(file, range, self.target()).named(format!("{:?} {range}", self.kind))
    }

    /// Fails unless `read` of `batch` has brought exactly these bytes, and touched none beside them.
    pub fn assert_holds(&self, expected: &[u8], batch: &Batch, read: usize) {
        let (kind, range) = (self.kind, self.range);
        match &self.memory {
            Memory::Reader => {
                let block = batch.take(read).unwrap();
                assert!(*block == *expected, "{kind:?} {range}");
                assert!(batch.take(read).is_none(), "memory is given once");
            }
            Memory::Host { bytes, start } => {
                assert!(bytes[*start..start + expected.len()] == *expected, "{kind:?} {range}");
            }
            Memory::Sink(sunk) => {
                let sunk = sunk.lock().unwrap();
                assert!(sunk.bytes == expected, "{kind:?} {range}");
                assert!(sunk.times.iter().all(|times| *times == 1), "each byte once");
            }
            Memory::Device { start, .. } => {
                assert!(self.device_bytes()[*start..start + expected.len()] == *expected, "{kind:?} {range}");
            }
        }
        self.assert_fenced();
    }

    /// All bytes of the allocation, if it is a device's.
    pub fn device_bytes(&self) -> Vec<u8> {
        let Memory::Device { memory, .. } = &self.memory else { return Vec::new() };
        let mut all = vec![0; memory.len() as usize];
        CopyStream::new(memory.device()).unwrap().read_back(memory.address(), &mut all).unwrap();
        all
    }

    /// Fails if bytes around lent memory were touched.
    pub fn assert_fenced(&self) {
        if let Memory::Host { bytes, start } = &self.memory {
            let end = start + self.range.len() as usize;
            let is_whole = bytes[..*start].iter().chain(&bytes[end..]).all(|byte| *byte == GUARD);
            assert!(is_whole, "{:?} {}: bytes beside it were written", self.kind, self.range);
        }
    }
}

/// One place of every kind for each of `ranges`.
pub fn places(ranges: &[ByteRange]) -> Vec<Place> {
    ranges.iter().flat_map(|range| Kind::ALL.map(|kind| Place::new(kind, *range))).collect()
}

pub fn submit(reader: &Reader, file: &ReadFile, places: &mut [Place], priority: Priority) -> Batch {
    reader.submit(places.iter_mut().map(|place| place.request(file)), priority).unwrap()
}

/// Fails unless each read of the batch has brought its bytes.
pub fn assert_all_hold(file: &TestFile, places: &[Place], batch: &Batch) {
    for (read, place) in places.iter().enumerate() {
        if let Some(error) = batch.status(read).error() {
            panic!("{:?} {}: {error}", place.kind, place.range);
        }
        place.assert_holds(file.bytes_of(place.range), batch, read);
    }
}

pub fn reader(route: Route, direct: DirectIo, faults: FaultScript) -> Reader {
    let options = ReaderOptions::default().route(route).direct(direct).chunk_bytes(64 << 10).faults(faults);
    Reader::new(&options).unwrap()
}

pub fn no_faults() -> FaultScript {
    FaultScript::new(|_, _| None)
}

/// Route, access, and whether the file is in the page cache: what carries reads differently here.
pub fn lanes() -> Vec<(Route, DirectIo, bool)> {
    let directory = super::on_device::disk();
    let path = directory.path().join("probe");
    write_file(&path, 1 << 20);
    let can_read = |route, direct| {
        let Some(reader) = open_reader(&ReaderOptions::default().route(route).direct(direct)) else {
            return false;
        };
        let file = ReadFile::open(&path).unwrap();
        let request = ReadRequest::new(&file, range(0, 1 << 20), Target::memory());
        match reader.submit([request], Priority::Demand).unwrap().wait() {
            Ok(()) => true,
            Err(Error::RouteUnavailable { why, .. }) => {
                skip(Requirement::Direct, why);
                false
            }
            Err(error) => panic!("{error}"),
        }
    };
    let mut lanes = vec![
        (Route::Auto, DirectIo::Auto, true),
        (Route::Auto, DirectIo::Auto, false),
        (Route::Threads, DirectIo::Never, false),
        (Route::Toy, DirectIo::Always, false),
        (Route::Threads, DirectIo::Always, false),
        (QUEUED, DirectIo::Auto, false),
        (QUEUED, DirectIo::Never, true),
    ];
    lanes.retain(|(route, direct, _)| can_read(*route, *direct));
    lanes
}

/// Opens a reader, or returns `None` where the machine lacks what its route needs.
#[track_caller]
pub fn open_reader(options: &ReaderOptions) -> Option<Reader> {
    match Reader::new(options) {
        Err(Error::RouteUnavailable { route: QUEUED, why, .. }) => {
            skip(Requirement::IoUring, why);
            None
        }
        reader => Some(reader.unwrap()),
    }
}

/// A gate that faults or sinks wait at until it is opened.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, std::sync::Condvar)>);

impl Gate {
    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    /// Waits for it; gives up after a while, so that a test that fails ends.
    pub fn pass(&self) {
        let open = self.0.0.lock().unwrap();
        drop(self.0.1.wait_timeout_while(open, LONG, |open| !*open).unwrap());
    }
}

/// Waits until something holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + LONG;
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "{what} does not come to hold");
        std::thread::sleep(Duration::from_millis(1));
    }
}
