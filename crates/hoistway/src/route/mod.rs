//! How bytes move from a file to memory.
//!
//! `member` is what a route says of itself, `members` has a file for each route, and `registry` lists them. `name_check` finds out
//! whether a route has done what its name says. Lanes are those of `hoistway-io`, and those of `usrbio`, `directstorage`,
//! `object_lane`, and `gds`, which also proves the path past the host. `direct` is what a reader keeps of such a route. `threefs` is
//! the mounts that `usrbio` reads from, `mounts` opens each once, and `shared` is memory that their daemon writes to. `graphics` has
//! the buffers of D3D12 that DirectStorage fills. `absent` stands for the routes of other systems.

mod absent;
mod direct;
#[cfg(windows)]
mod directstorage;
pub(crate) mod gds;
#[cfg(windows)]
mod graphics;
pub(crate) mod member;
mod members;
#[cfg(target_os = "linux")]
mod mounts;
mod name_check;
#[cfg(feature = "objects")]
mod object_lane;
pub(crate) mod registry;
#[cfg(target_os = "linux")]
mod shared;
#[cfg(target_os = "linux")]
mod threefs;
pub(crate) mod threefs_client;
#[cfg(target_os = "linux")]
mod usrbio;

#[cfg(not(target_os = "linux"))]
use absent::linux as threefs;
#[cfg(not(target_os = "linux"))]
pub(crate) use absent::linux::{errno, probe_ring};
pub(crate) use direct::DirectRoute;
pub(crate) use gds::DirectRead;
pub use hoistway_device::Unavailable;
pub use hoistway_io::file::Access;
#[doc(hidden)]
pub use hoistway_io::file::is_remote;
#[cfg(windows)]
pub(crate) use hoistway_io::lane::PortLane;
#[cfg(target_os = "linux")]
pub(crate) use hoistway_io::lane::UringLane;
#[cfg(feature = "fault-injection")]
pub use hoistway_io::lane::fault;
pub(crate) use hoistway_io::lane::{BlockingLane, BlockingRead, CachedCopy, Lane, Outcome, Progress};
#[cfg(target_os = "linux")]
pub(crate) use members::io_uring::probe_ring;
#[cfg(feature = "objects")]
pub(crate) use members::object_notes::ObjectNotes;
pub(crate) use name_check::NameCheck;
#[cfg(target_os = "linux")]
use shared::SharedSlots;
#[cfg(target_os = "linux")]
pub(crate) use threefs::OpenMount;
pub use threefs::{mount_point_of_3fs, mount_points_of_3fs, probe_3fs};
pub use threefs_client::Client as UsrbioClient;
#[cfg(target_os = "linux")]
pub(crate) use usrbio::{Files as UsrbioFiles, UsrbioLane, errno, host_rings, is_daemon_lost};

#[cfg(feature = "objects")]
use crate::source::objects::ObjectSource;
use crate::{
    ByteRange, Cancel, Error, Result,
    memory::{Slot, WriteRegion},
    report::{Account, Refusal},
    source::Source,
    transfer::Order,
};
use hoistway_io::{
    executor::Carried,
    file::Held,
    lane::{FileRead, Pread, ReadsFile},
};
use serde::{Deserialize, Serialize};
use std::{fmt, fs::File, io, mem, str::FromStr, sync::Arc};

/// A way for bytes to get from storage to memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Route {
    /// The best one for each extent: `usrbio` for files on a 3FS; for objects
    /// `node-cache` for what the node's cache holds, and `http`; of others `pinned-cache` or `cached` for what the page cache holds; for
    /// the rest `gds` if the target is a device and that is proven, else `io_uring` or, on Windows, `overlapped`, or `threads`
    /// where that is refused. Never `mapped`.
    #[default]
    Auto,
    /// Asynchronous reads through an io_uring, past the page cache.
    IoUring,
    /// Asynchronous reads whose ends a completion port tells, past the cache, on Windows.
    Overlapped,
    /// A pool of threads that call `pread`, past the page cache where the file system allows it.
    Threads,
    /// Copies of what the page cache holds. Fails where it does not hold the data.
    Cached,
    /// To a device from the pages of the page cache, which are pinned where they lie. Fails where it does not hold the data.
    #[serde(rename = "pinned-cache")]
    PinnedCache,
    /// A private mapping of the file: nothing is read until it is touched.
    Mapped,
    /// From a 3FS through memory shared with its daemon, past the kernel. Fails for files that lie elsewhere.
    Usrbio,
    /// By Microsoft's DirectStorage, whose runtime stages what goes to a device, on Windows.
    #[serde(rename = "directstorage")]
    DirectStorage,
    /// To a device by way of pinned host memory, each extent read the best way: as `auto`, but never `gds`.
    Staged,
    /// To host memory that the device uses as it is, because it has none of its own. Fails on other devices.
    Unified,
    /// From the drive to a device past the host's memory (GPUDirect Storage). Fails where that cannot be proven.
    Gds,
    /// By the device's library for direct reads, by whichever path it takes: also one that goes through host memory.
    #[serde(rename = "gds-compat")]
    GdsCompat,
    /// Copies of what the node's cache holds of objects, from a drive of this machine. Fails where it does not hold the data.
    #[cfg(feature = "objects")]
    #[serde(rename = "node-cache")]
    NodeCache,
    /// Requests for ranges, on several connections, from an object store or a web server. Fails for files of this machine.
    #[cfg(feature = "objects")]
    Http,
    /// A route of the tests.
    #[cfg(feature = "fault-injection")]
    Toy,
}

impl Route {
    /// Every route.
    pub const ALL: &[Self] = &[
        Self::Auto,
        Self::IoUring,
        Self::Overlapped,
        Self::Threads,
        Self::Cached,
        Self::PinnedCache,
        Self::Mapped,
        Self::Usrbio,
        Self::DirectStorage,
        Self::Staged,
        Self::Unified,
        Self::Gds,
        Self::GdsCompat,
        #[cfg(feature = "objects")]
        Self::NodeCache,
        #[cfg(feature = "objects")]
        Self::Http,
    ];

    /// The name that options, reports and messages use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Overlapped => "overlapped",
            Self::Threads => "threads",
            Self::Cached => "cached",
            Self::PinnedCache => "pinned-cache",
            Self::Mapped => "mapped",
            Self::Usrbio => "usrbio",
            Self::DirectStorage => "directstorage",
            Self::Staged => "staged",
            Self::Unified => "unified",
            Self::Gds => "gds",
            Self::GdsCompat => "gds-compat",
            #[cfg(feature = "objects")]
            Self::NodeCache => "node-cache",
            #[cfg(feature = "objects")]
            Self::Http => "http",
            #[cfg(feature = "fault-injection")]
            Self::Toy => "toy",
        }
    }

    /// The route of saves: calls that write, on threads.
    pub(crate) const OF_SAVES: Self = Self::Threads;

    /// Whether it leaves the way of each extent to be found out.
    pub(crate) fn chooses(self) -> bool {
        matches!(self, Self::Auto | Self::Staged | Self::Unified)
    }

    /// Whether its reads past the page cache may begin and end anywhere, rather than only at blocks.
    pub(crate) fn reads_any_bytes(self) -> bool {
        self.is_past_host() || matches!(self, Self::Usrbio | Self::DirectStorage)
    }

    /// Why host memory is not used as it is by `device`, which could, if that was not asked for or against.
    pub(crate) fn unified_refusal(self, device: impl fmt::Display) -> Option<Refusal> {
        if self != Self::Auto {
            return None;
        }
        let reason = format!("memory that {device} does not know of is no place for every kernel");
        let why = Unavailable::new(reason, "choose route unified, which copies nothing, if yours take it");
        Some(Refusal::new(Self::Unified.name(), None, why))
    }

    /// Whether it may read through the page cache where a file system refuses direct reads, which are wanted so.
    pub(crate) fn may_read_buffered(self, direct: DirectIo) -> bool {
        direct != DirectIo::Always
            && !matches!(self, Self::IoUring | Self::Overlapped | Self::DirectStorage)
            && !self.is_past_host()
    }

    /// Whether it shows files as they lie in the page cache, and reads nothing.
    pub(crate) fn is_mapping(self) -> bool {
        registry::maps(self)
    }

    /// Whether it takes every byte from the page cache.
    pub(crate) fn is_of_page_cache(self) -> bool {
        matches!(self, Self::Cached | Self::PinnedCache) || self.is_mapping()
    }

    /// Whether the device is to use host memory as it is.
    pub(crate) fn is_unified(self) -> bool {
        self == Self::Unified
    }

    /// Whether it leads to a device, and nowhere else.
    pub(crate) fn leads_to_device(self) -> bool {
        self.is_past_host() || matches!(self, Self::PinnedCache | Self::Staged | Self::Unified)
    }

    /// Whether it leads to a device past the host.
    pub(crate) fn is_past_host(self) -> bool {
        matches!(self, Self::Gds | Self::GdsCompat)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Route {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|route| route.name() == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|route| route.name()).collect();
            Error::invalid_option("route", name, format!("it must be one of {}", known.join(", ")))
        })
    }
}

/// Whether a load, a reader or a save goes past the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectIo {
    /// Where the file system allows it. Routes `io_uring` and `overlapped` fail where it does not.
    #[default]
    Auto,
    /// Always, whatever the page cache holds; an error where the file system refuses.
    Always,
    /// Never.
    Never,
}

/// What a read is a part of, and which bytes it is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// An item of its order: the position of an extent in the plan of a load, or of a read in its batch.
    pub(crate) item: usize,
    /// The bytes of the file that it delivers.
    pub(crate) wanted: ByteRange,
    /// The bytes that are read: those, or the blocks that they lie in.
    pub(crate) range: ByteRange,
}

/// A read on its way: it owns the memory that it fills, so nothing else can touch that meanwhile.
#[derive(Debug)]
pub(crate) struct ReadOp {
    /// The load or the batch that wants it.
    pub(crate) order: Arc<dyn Order>,
    pub(crate) part: Part,
    pub(crate) source: Arc<dyn Source>,
    /// The number of the route that reads it, among those of its thread.
    pub(crate) way: usize,
    pub(crate) access: Access,
    /// How the bytes are read that a cache does not hold, while it is asked for them.
    pub(crate) cold_access: Access,
    pub(crate) buffer: Buffer,
    /// The route past the host that reads it, if one does. After the buffer, whose slot may be of its memory.
    pub(crate) past_host: Option<Arc<DirectRoute>>,
    pub(crate) progress: Progress,
    /// Which routes have brought which of its bytes so far.
    pub(crate) account: Account,
    /// The file, if it is open for its reads alone.
    opened: Option<Arc<File>>,
    /// Ends it, where it waits for a server.
    pub(crate) cancel: Cancel,
    /// What the read has claimed in the node's cache.
    #[cfg(feature = "objects")]
    pub(crate) claims: Option<crate::cache::Claims>,
    /// What its load may take for the node's cache; without one, any number of bytes.
    #[cfg(feature = "objects")]
    pub(crate) ledger: Option<Arc<crate::memory::Ledger>>,
    /// What its load compares with the checksum of the object's store.
    #[cfg(feature = "objects")]
    pub(crate) comparison: Option<Arc<crate::source::objects::Comparing>>,
}

/// The memory of a [`ReadOp`].
#[derive(Debug)]
pub(crate) enum Buffer {
    /// The final place.
    InPlace(WriteRegion),
    /// A staging slot, once one was taken, and the final place of what it will hold.
    Through { slot: Option<Slot>, region: WriteRegion },
    /// A staging slot, once one was taken, and the final places of its pieces; none if they are not of host memory.
    Staged { slot: Option<Slot>, pieces: Vec<WriteRegion> },
}

impl ReadOp {
    /// A read of `wanted`, nothing of which is there yet.
    pub(crate) fn new(
        order: Arc<dyn Order>,
        (item, wanted): (usize, ByteRange),
        source: Arc<dyn Source>,
        access: Access,
        buffer: Buffer,
        cancel: Cancel,
    ) -> Self {
        Self {
            order,
            part: Part { item, wanted, range: wanted },
            source,
            way: 0,
            access,
            cold_access: access,
            buffer,
            past_host: None,
            progress: Progress::default(),
            account: Account::default(),
            opened: None,
            cancel,
            #[cfg(feature = "objects")]
            claims: None,
            #[cfg(feature = "objects")]
            ledger: None,
            #[cfg(feature = "objects")]
            comparison: None,
        }
    }

    /// Nothing of it is there any more: what was read was read for nothing.
    pub(crate) fn begin_again(&mut self) {
        self.account.take_back();
        self.progress = Progress::default();
        self.wait();
    }

    /// It waits for its next attempt: its file is closed if it is open for its reads alone.
    pub(crate) fn wait(&mut self) {
        self.opened = None;
    }

    /// Points the next attempt at the bytes that are missing.
    pub(crate) fn aim(&mut self) {
        self.progress.aim(self.part.range, self.access == Access::Direct);
    }

    /// Fails if its file is no longer the one whose header was read.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let Part { item, wanted, .. } = self.part;
        self.source.check_unchanged(wanted, |offset| self.order.name_at(item, offset))
    }
}

impl Buffer {
    /// A slot, once one was taken, whose bytes go to no place in host memory.
    pub(crate) const SLOT: Self = Self::Staged { slot: None, pieces: Vec::new() };

    /// Has a read that has one final place made right there, or by way of a slot.
    pub(crate) fn set_staged(&mut self, is_staged: bool) {
        *self = match (mem::replace(self, Self::SLOT), is_staged) {
            (Self::InPlace(region), true) => Self::Through { slot: None, region },
            (Self::Through { region, .. }, false) => Self::InPlace(region),
            (same, _) => same,
        };
    }

    /// The slot of a read that goes by way of one; `None` inside before one was taken.
    pub(crate) fn slot(&mut self) -> Option<&mut Option<Slot>> {
        match self {
            Self::InPlace(_) => None,
            Self::Staged { slot, .. } | Self::Through { slot, .. } => Some(slot),
        }
    }

    /// Takes the slot of a read that has come by way of one.
    pub(crate) fn take_slot(&mut self) -> Result<Slot> {
        let slot = self.slot().and_then(Option::take);
        slot.ok_or_else(|| Error::Internal("a staged read has no slot".into()))
    }

    /// Copies parts of a full slot, one after the other, to the final place of a read that goes by way of one. Fails unless they are
    /// `len` bytes: what is not filled would be taken for the file's.
    pub(crate) fn fill_from_slot(
        &mut self,
        parts: impl IntoIterator<Item = ByteRange>,
        len: u64,
    ) -> Result<()> {
        let too_short = || Error::Internal("a place is too short for its bytes".into());
        let Self::Through { slot: Some(slot), region } = self else {
            return Err(Error::Internal("a staged read has no slot".into()));
        };
        let (mut left, mut filled) = (region.as_mut_slice(), 0);
        for part in parts {
            let (place, rest) = left.split_at_mut_checked(part.len() as usize).ok_or_else(too_short)?;
            slot.copy_to(part.start() as usize, place)?;
            left = rest;
            filled += part.len();
        }
        if filled != len {
            return Err(Error::Internal(format!("{filled} of {len} bytes of a slot were copied")));
        }
        Ok(())
    }

    /// Frees the slot of a read that goes by way of one.
    pub(crate) fn give_slot_back(&mut self) {
        if let Some(slot) = self.slot() {
            *slot = None;
        }
    }

    /// The part that an attempt fills.
    pub(crate) fn target(&mut self, progress: Progress) -> io::Result<&mut [u8]> {
        let bytes = match self {
            Self::InPlace(region) => region.as_mut_slice(),
            Self::Staged { slot: Some(slot), .. } | Self::Through { slot: Some(slot), .. } => {
                slot.as_mut_slice()
            }
            Self::Staged { slot: None, .. } | Self::Through { slot: None, .. } => &mut [],
        };
        let end = progress.position.checked_add(progress.len);
        end.and_then(|end| bytes.get_mut(progress.position..end))
            .ok_or_else(|| io::Error::other("a read does not fit its buffer"))
    }
}

// SAFETY: the operation holds the source, which keeps its files open, or the open file itself, and the region or slot that it writes to, which is
// its alone until it is dropped and does not move with it. It leaks these if it is abandoned, and the route whose memory a slot may be.
#[allow(unsafe_code)]
unsafe impl ReadsFile for ReadOp {
    fn next_read(&mut self) -> io::Result<FileRead<'_>> {
        let local = self.source.local().map_err(|why| io::Error::other(why.to_string()))?;
        let held = match self.access {
            Access::Direct => local.direct_file()?,
            Access::Buffered => local.buffered_file()?,
        };
        let file = match held {
            Held::Kept(file) => file,
            Held::Opened(file) => self.opened.insert(file),
        };
        let target = self.buffer.target(self.progress)?;
        Ok(FileRead { file, offset: self.progress.offset, target })
    }

    fn abandon(self) {
        let Self { buffer, past_host, source, opened, .. } = self;
        mem::forget((buffer, past_host, source, opened));
        // The rest is dropped: the order has all memory of a load.
    }
}

/// Reads that wait, by any source.
#[derive(Debug)]
pub(crate) struct SourceRead;

impl BlockingRead<CarriedRead> for SourceRead {
    fn read(&self, op: &mut CarriedRead) -> io::Result<usize> {
        match op.access {
            Access::Direct => Pread.read(op),
            Access::Buffered => {
                let op = &mut op.content;
                let source = op.source.clone();
                #[cfg(feature = "objects")]
                if let Some(object) = ObjectSource::of(&source) {
                    return object.read_plainly(op);
                }
                source.read_at(op.buffer.target(op.progress)?, op.progress.offset, &op.cancel)
            }
        }
    }
}

#[cfg(feature = "fault-injection")]
impl fault::Spoil for ReadOp {
    fn offset(&self) -> u64 {
        self.progress.offset
    }

    fn spoil(&mut self, kept: usize, pattern: u8) {
        let Progress { position, len, .. } = self.progress;
        let (start, len) = (position + kept, len.saturating_sub(kept));
        if let Some(Some(slot)) = self.buffer.slot() {
            // Other memory is overwritten below.
            let _ = slot.copy_from(start, &vec![pattern; len]);
        }
        if let Ok(target) = self.buffer.target(self.progress) {
            target[kept..].fill(pattern);
        }
    }
}

/// A read as lanes have it.
pub(crate) type CarriedRead = Carried<ReadOp>;

/// A queue of reads with one owner. They are of 64 KiB and more, so that a call through a table of functions is not worth an
/// enum.
pub(crate) type ReadLane = dyn Lane<CarriedRead>;

/// A read that ended: how many bytes came, or why none did.
pub(crate) type Done = hoistway_io::lane::Done<CarriedRead>;
