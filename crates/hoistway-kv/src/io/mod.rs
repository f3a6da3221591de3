//! How bytes move between memory and files: reads and writes of whole slots, with checksums computed on the way.
//!
//! It knows files, offsets and memory; nothing of blocks, keys or the store.

mod checksum;
mod device;
mod engine;
#[cfg(feature = "fault-injection")]
pub(crate) mod fault;
mod join;
mod memory;
mod operation;
mod plan;
mod staging;
#[cfg(test)]
mod tests;
mod transfer;
mod transfers;
mod worker;

pub(crate) use device::Region as DeviceRegion;
pub(crate) use engine::{IoEngine, IoOptions, IoReport, MAX_THREADS};
pub(crate) use transfers::Transfers;

use crate::{KeepAlive, Piece, Priority, disk::LazyFile};
use hoistway_device::DeviceId;
pub(crate) use hoistway_io::lane::Direction;
use hoistway_io::{executor::Reason, file::Access};
use serde::{Serialize, Serializer, ser::SerializeStruct};
use std::{
    collections::{BTreeSet, HashSet},
    fmt,
    hash::{Hash, Hasher},
    io,
    mem::{self, Discriminant},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// A run of bytes of a file, and the memory that they go to or come from. It begins at a multiple of 4096 and may end
/// anywhere: what a write lacks to a whole block is zeros.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) len: u64,
}

/// Makes a header when the checksums of all parts are known.
pub(crate) type MakeHeader = Box<dyn FnOnce(&[Option<u32>]) -> Vec<u8> + Send>;

/// What becomes of the 4096 bytes that describe a block.
pub(crate) enum Header {
    /// There are none, or they were not asked for.
    None,
    /// They are read with the parts, in one go where they are neighbours.
    Read {
        /// Where they are.
        offset: u64,
    },
    /// They are written with the parts, in one go where they are neighbours.
    Write {
        /// Where they go.
        offset: u64,
        /// What they say.
        make: MakeHeader,
    },
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Read { offset } => write!(f, "Read at {offset}"),
            Self::Write { offset, .. } => write!(f, "Write at {offset}"),
        }
    }
}

/// Is called exactly once, by a thread that moves bytes: it must not block.
pub(crate) type Done = Box<dyn FnOnce(Outcome) + Send>;

/// One transfer.
///
/// The submitter vouches for the memory of a job: its pieces are readable, or writable, for their whole length, and until
/// `keep` is dropped they stay so; nothing writes to them, and nothing reads what is being filled.
pub(crate) struct Job {
    /// Whose it is: what [`IoEngine::cancel`] takes.
    pub(crate) tag: u64,
    pub(crate) direction: Direction,
    pub(crate) priority: Priority,
    pub(crate) file: LazyFile,
    pub(crate) header: Header,
    pub(crate) parts: Vec<Part>,
    /// Whether CRC-32C of each part is computed.
    pub(crate) checksums: Checksums,
    /// If it has not begun by then, it does not. Nor do further steps of what no caller waits for.
    pub(crate) deadline: Option<Instant>,
    /// If it is set before it has begun, it does not begin.
    pub(crate) withdrawn: Withdrawn,
    /// An event of the device, as a handle of the driver's, that work on the device must have reached before the memory is
    /// touched. It lives until `keep` is dropped.
    pub(crate) wait_event: Option<u64>,
    /// Dropped after the memory was touched for the last time, before `done` is called.
    pub(crate) keep: KeepAlive,
    pub(crate) done: Done,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("tag", &self.tag)
            .field("direction", &self.direction)
            .field("file", &self.file.path())
            .field("header", &self.header)
            .field("parts", &self.parts)
            .finish_non_exhaustive()
    }
}

/// Whether a job needs workers that serve devices.
fn concerns_devices(job: &Job) -> bool {
    let mut pieces = job.parts.iter().flat_map(|part| &part.pieces);
    job.wait_event.is_some() || pieces.any(|piece| piece.device != DeviceId::Cpu)
}

/// Whether jobs of a request are wanted no more. Set before they are looked for to be cancelled, so that one that is not
/// found, being on its way from one thread to another, does not begin either.
#[derive(Clone, Debug, Default)]
pub(crate) struct Withdrawn(Arc<AtomicBool>);

impl Withdrawn {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Whether checksums are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checksums {
    /// But for parts that a device moves directly.
    Compute,
    /// Of all parts: no device moves any directly.
    Require,
    Skip,
}

/// How bytes were carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Carrier {
    /// Through a ring, past the page cache.
    IoUringDirect,
    /// Through a ring and the page cache.
    IoUringBuffered,
    /// By a thread, past the page cache.
    ThreadsDirect,
    /// By a thread, through the page cache.
    ThreadsBuffered,
    /// Between a device and the drive, past the host's memory.
    Gds,
    /// By the library of devices, which went through host memory after all, or may have.
    GdsCompat,
}

impl Carrier {
    pub(crate) const ALL: [Self; 6] = [
        Self::IoUringDirect,
        Self::IoUringBuffered,
        Self::ThreadsDirect,
        Self::ThreadsBuffered,
        Self::Gds,
        Self::GdsCompat,
    ];

    /// The route, by the name that options, reports and metrics of every kind use.
    pub const fn route(self) -> &'static str {
        match self {
            Self::IoUringDirect | Self::IoUringBuffered => "io_uring",
            Self::ThreadsDirect | Self::ThreadsBuffered => "threads",
            Self::Gds => "gds",
            Self::GdsCompat => "gds-compat",
        }
    }

    /// Whether the bytes passed through the page cache.
    pub const fn access(self) -> Access {
        match self {
            Self::IoUringDirect | Self::ThreadsDirect | Self::Gds | Self::GdsCompat => Access::Direct,
            Self::IoUringBuffered | Self::ThreadsBuffered => Access::Buffered,
        }
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.route(), self.access())
    }
}

impl Serialize for Carrier {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Carrier", 2)?;
        fields.serialize_field("route", self.route())?;
        fields.serialize_field("access", &self.access())?;
        fields.end()
    }
}

/// How a transfer ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) result: Result<(), Failure>,
    /// The header that was read; empty if none was asked for.
    pub(crate) header: Vec<u8>,
    /// CRC-32C of each part, as far as they were computed.
    pub(crate) checksums: Vec<Option<u32>>,
    /// Bytes by the way that they took.
    pub(crate) carried: Vec<(Carrier, u64)>,
    /// Bytes that went by way of memory of our own, because they were not aligned, or on a device.
    pub(crate) bounced_bytes: u64,
    /// When it began; `None` if it did not.
    pub(crate) started: Option<Instant>,
}

/// An event of a device that jobs wait for, and what it lives as long as.
#[derive(Clone)]
pub(super) struct AwaitedEvent {
    /// As the driver knows it.
    handle: u64,
    /// The device that is asked; `None` if it is unknown which kind the event is of.
    id: Option<DeviceId>,
    _keep: Vec<KeepAlive>,
}

impl AwaitedEvent {
    /// An event of the kind of these devices. Where they are the host's alone, it is of the only kind whose driver this
    /// process has.
    fn new(handle: u64, devices: impl Iterator<Item = DeviceId>, keep: Vec<KeepAlive>) -> Self {
        let devices: BTreeSet<DeviceId> = devices.filter(|device| !device.is_host()).collect();
        let kinds: HashSet<Discriminant<DeviceId>> = devices.iter().map(mem::discriminant).collect();
        let id = match kinds.len() {
            0 => DeviceId::only_in_process(),
            1 => devices.first().copied(),
            _ => None,
        };
        Self { handle, id, _keep: keep }
    }
}

impl PartialEq for AwaitedEvent {
    fn eq(&self, other: &Self) -> bool {
        (self.handle, self.id) == (other.handle, other.id)
    }
}

impl Eq for AwaitedEvent {}

impl Hash for AwaitedEvent {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.handle, self.id).hash(state);
    }
}

impl Outcome {
    /// One that moved nothing.
    pub(crate) fn failed(failure: Failure) -> Self {
        Self {
            result: Err(failure),
            header: Vec::new(),
            checksums: Vec::new(),
            carried: Vec::new(),
            bounced_bytes: 0,
            started: None,
        }
    }
}

/// What transfers of a child of `fork` fail with.
const FORKED: &str = "this process was forked off the one that opened the store: open it anew";

/// Why a transfer failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The system's error.
    Io(io::Error),
    /// The file ends before its parts do.
    Short {
        /// Where it ends.
        file_len: u64,
    },
    /// It had not begun by its deadline.
    TimedOut,
    /// It had not begun when it was cancelled.
    Cancelled,
    /// A device failed.
    Device(hoistway_device::Error),
    /// The system's error, after which it may still use the memory: that must never be freed, and
    /// `keep` is not dropped.
    Lost(io::Error),
}

impl Failure {
    /// The same for another job.
    fn copied(&self) -> Self {
        let error = |error: &io::Error| match error.raw_os_error() {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::Error::new(error.kind(), error.to_string()),
        };
        match self {
            Self::Io(source) => Self::Io(error(source)),
            Self::Short { file_len } => Self::Short { file_len: *file_len },
            Self::TimedOut => Self::TimedOut,
            Self::Cancelled => Self::Cancelled,
            Self::Device(source) => Self::Io(io::Error::other(source.to_string())),
            Self::Lost(source) => Self::Lost(error(source)),
        }
    }

    /// The number of the system's error; of others, that of input and output.
    pub(crate) fn errno(&self) -> i32 {
        match self {
            Self::Io(error) | Self::Lost(error) => error.raw_os_error().unwrap_or(libc::EIO),
            Self::TimedOut => libc::ETIMEDOUT,
            Self::Cancelled => libc::ECANCELED,
            Self::Short { .. } | Self::Device(_) => libc::EIO,
        }
    }
}

impl From<Reason> for Failure {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Cancelled | Reason::Closed => Self::Cancelled,
            Reason::TimedOut => Self::TimedOut,
            Reason::Lost(why) => Self::Lost(io::Error::other(why.to_string())),
            Reason::NoMemory => Self::Io(io::Error::other(
                "most of the memory that bytes pass through is lost: devices or the system may still use it",
            )),
            Reason::Forked => Self::Io(io::Error::other(FORKED)),
            other => Self::Io(io::Error::other(other)),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Short { file_len } => write!(f, "the file ends at byte {file_len}"),
            Self::TimedOut => f.write_str("it had not begun by its deadline"),
            Self::Cancelled => f.write_str("it was cancelled"),
            Self::Device(error) => error.fmt(f),
            Self::Lost(error) => write!(f, "{error}, and the system may still use the memory"),
        }
    }
}
