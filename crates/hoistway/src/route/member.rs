//! The interface of a route, by which loads and readers use it without knowing it.
#![forbid(unsafe_code)]

use super::{Access, DirectIo, Progress, ReadLane, ReadOp, Route, Unavailable, UsrbioClient};
use crate::{
    Alignment, ByteRange, Error,
    device::{Device, DeviceId},
    memory::Slots,
    report::Refusal,
    source::Source,
};
use hoistway_io::file::Residency;
use std::{fmt, io, path::PathBuf, sync::Arc};

/// The request of a load or a reader to routes.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "routes of Linux alone ask for it"))]
pub(crate) struct Wanted<'a> {
    /// The route of the options.
    pub(crate) route: Route,
    /// Whether reads go past the page cache.
    pub(crate) direct: DirectIo,
    /// The client of a 3FS.
    pub(crate) usrbio: UsrbioClient,
    /// Directories that may hold the vendor's library for 3FS.
    pub(crate) usrbio_directories: &'a [PathBuf],
    /// The device that the bytes are copied to; `None` for host memory.
    pub(crate) device: Option<&'a Arc<Device>>,
    /// Whether the caller's thread makes all reads.
    pub(crate) is_inline: bool,
    /// Whether the thread that makes a read copies its bytes as well, so that many threads are faster than a ring.
    pub(crate) copies_on_lanes: bool,
    /// Threads that may copy from the page cache, at most.
    pub(crate) copiers: usize,
    /// Reads in all, as far as that is known.
    pub(crate) reads: usize,
    /// Bytes that are read in all, as far as that is known.
    pub(crate) read_bytes: u64,
}

/// Why a load leaves out what needs time to set up, or threads.
pub(crate) const ALONE: &str = "the load is small and runs on the caller's thread, where setting this route up takes longer than reading";
const FIX_DIRECT: &str = "choose route auto or threads, or set direct to never";

impl Wanted<'_> {
    /// Whether the caller has named a route, so that its refusal is an error.
    pub(crate) fn names(&self, route: Route) -> bool {
        self.route == route || route.is_past_host() && self.route.is_past_host()
    }

    /// Whether a file is read past the page cache, and why not if that would be better.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`] if direct reads are asked for, and refused.
    pub(crate) fn access(&self, source: &dyn Source) -> crate::Result<(Access, Option<Refusal>)> {
        if self.direct == DirectIo::Never && !self.route.reads_any_bytes() {
            return Ok((Access::Buffered, None));
        }
        // This opens the file for direct reads.
        match (self.direct, source.direct_refusal()) {
            (_, None) => Ok((Access::Direct, None)),
            (_, Some(_)) if self.route.reads_any_bytes() => Ok((Access::Buffered, None)),
            (direct, Some(why)) if !self.route.may_read_buffered(direct) => {
                Err(no_direct_reads(self.route, source, why))
            }
            (_, Some(why)) => Ok((Access::Buffered, Some(refused_direct_reads(source, why.clone())))),
        }
    }
}

/// The refusal of direct reads of a source.
pub(crate) fn refused_direct_reads(source: &dyn Source, why: Unavailable) -> Refusal {
    Refusal::new("direct reads", Some(source.path().to_owned()), why)
}

/// The error of a route that must read a source directly, where that is refused.
pub(crate) fn no_direct_reads(route: Route, source: &dyn Source, why: &Unavailable) -> Error {
    let why = Unavailable::new(&why.reason, FIX_DIRECT);
    Error::RouteUnavailable { route, path: Some(source.path().to_owned()), why }
}

/// The properties of a route, in plain data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// What reports call it.
    pub(crate) route: Route,
    /// The name of its threads.
    pub(crate) thread_name: &'static str,
    /// The memory that its reads fill.
    pub(crate) landing: Landing,
    /// How its files are read.
    pub(crate) files: Files,
    /// Where its reads begin and end.
    pub(crate) grain: Grain,
    /// What it copies from, if it copies what a cache holds and leaves the rest to the routes after it.
    pub(crate) cache: Option<CacheFacts>,
    /// Whether each of its reads in flight needs a connection, which takes time to be made.
    pub(crate) connects: bool,
    /// The length that its reads should be a multiple of, if it has an opinion. The only fact that changes: with the files
    /// that are made ready.
    pub(crate) chunk_bytes: Option<u64>,
    /// Where the reads of the tensor that comes first begin and end, at multiples of this, if others take so long that they should
    /// be apart from them and made before them.
    pub(crate) first_step: Option<Alignment>,
    /// Lanes of a reader, at most. The reads in flight are divided among them.
    pub(crate) most_lanes: usize,
}

impl Facts {
    /// Those of a route whose threads make one read at a time, in blocks, into any memory of the host.
    pub(crate) const fn of(route: Route, thread_name: &'static str) -> Self {
        Self {
            route,
            thread_name,
            landing: Landing::Any,
            files: Files::Asked,
            grain: Grain::Blocks,
            cache: None,
            connects: false,
            chunk_bytes: None,
            first_step: None,
            most_lanes: usize::MAX,
        }
    }

    /// How many lanes a reader has for so many reads in flight, and how many reads each holds.
    pub(crate) fn lanes(&self, in_flight: usize) -> (usize, usize) {
        let lanes = self.most_lanes.min(in_flight).max(1);
        (lanes, in_flight.div_ceil(lanes))
    }
}

/// How a route's files are read: past the page cache or not.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "objects"), expect(dead_code, reason = "routes to objects alone have some"))]
pub(crate) enum Files {
    /// As the system allows it for each, which is asked.
    Asked,
    /// So, without a question.
    Own(Access),
    /// So, and no other route is needed for them, and none may look at them. One whose slots are [shared](Landing::Shared)
    /// has such files.
    Alone(Access),
}

impl Files {
    /// How they are read, if that is known without asking.
    pub(crate) fn access(self) -> Option<Access> {
        match self {
            Self::Asked => None,
            Self::Own(access) | Self::Alone(access) => Some(access),
        }
    }
}

/// The boundaries of a route's reads past the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(any(target_os = "linux", windows)),
    expect(dead_code, reason = "routes of Linux and Windows alone read any bytes")
)]
pub(crate) enum Grain {
    /// At blocks.
    Blocks,
    /// Anywhere.
    AnyBytes,
    /// Anywhere in whole blocks: the last block of a file is left to others if it is cut short.
    InWholeBlocks,
}

impl Grain {
    /// Whether a read begins and ends anywhere, rather than at blocks.
    pub(crate) fn is_any(self) -> bool {
        self != Self::Blocks
    }
}

/// The cache that a route copies from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheFacts {
    /// How it reads what it holds.
    pub(crate) access: Access,
    /// Whether the source tells what is held; else only the read does.
    pub(crate) is_seen: bool,
    /// The name of the cache in messages.
    pub(crate) name: &'static str,
    /// The fix for bytes that it lacks.
    pub(crate) fix: &'static str,
}

impl CacheFacts {
    /// The page cache of the system.
    pub(crate) const PAGES: Self = Self {
        access: Access::Buffered,
        is_seen: true,
        name: "the page cache",
        fix: "run 'hoistway warm' first, or choose route auto",
    };

    /// The part of a range that seems to be held.
    pub(crate) fn holds(&self, source: &dyn Source, range: ByteRange) -> Residency {
        if self.is_seen { source.residency(range) } else { Residency::Cached }
    }
}

/// A route that is open: for one load, or for a reader as long as that lives.
pub(crate) trait Member: fmt::Debug + Send + Sync {
    /// What it is.
    fn facts(&self) -> Facts;

    /// Makes a file ready, which is read with this access otherwise. `false` if the route leaves the file to others
    /// without a reason worth telling. Does nothing for a file that is ready.
    ///
    /// # Errors
    /// Why the route cannot read it.
    fn add(&self, source: &Arc<dyn Source>, access: Access) -> Result<bool, Unavailable>;

    /// How much a load gives it to do at once.
    fn share(&self, demand: &Demand<'_>) -> Share;

    /// Makes slots of its own memory, pinned for `device` if host memory is copied to one.
    ///
    /// # Errors
    /// Why there are none; [`Error::RouteUnavailable`](crate::Error::RouteUnavailable) if the route is to blame.
    fn slots(
        &self,
        count: usize,
        slot_bytes: usize,
        device: Option<&Arc<Device>>,
        numa_node: Option<u32>,
    ) -> crate::Result<Slots> {
        let _ = (count, slot_bytes, device, numa_node);
        Err(Error::Internal(format!("route {} has no memory of its own", self.facts().route)))
    }

    /// Sets lanes up ahead of the threads that take them, so that a refusal is known before the first read.
    ///
    /// # Errors
    /// Why there are none.
    fn open_lanes(&self, count: usize, depth: usize) -> crate::Result<()> {
        let _ = (count, depth);
        Ok(())
    }

    /// A queue of up to `depth` reads, for the thread that calls.
    ///
    /// # Errors
    /// Why there is none.
    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable>;

    /// The consequence of a read's error for the route.
    fn verdict(&self, error: &io::Error, progress: Progress) -> Verdict {
        let _ = (error, progress);
        Verdict::OfRead
    }

    /// Unpins memory that it keeps, and pins no more, since staging memory cannot be pinned. Returns whether it had any: what is
    /// still used is unpinned by a later call.
    fn make_room(&self) -> bool {
        false
    }

    /// Whether it takes reads of those that it was opened for, as far as it knows now.
    fn goes_on(&self) -> bool {
        true
    }

    /// Its notes in a report.
    fn notes(&self, stage: Stage) -> Vec<String> {
        let _ = stage;
        Vec::new()
    }

    /// Better ways to bring bytes to memory of the host, or to `device`, that it does not use.
    fn refusals(&self, device: Option<DeviceId>) -> Vec<Refusal> {
        let _ = device;
        Vec::new()
    }

    /// The proof that it does what its name promises, if one is needed.
    fn proof(&self) -> Option<&dyn Proof> {
        None
    }
}

impl dyn Member + '_ {
    /// What reports call it.
    pub(crate) fn route(&self) -> Route {
        self.facts().route
    }

    /// Why it is given up after a read that ended so, if the routes after it go on.
    pub(crate) fn gives_up(&self, op: &ReadOp, result: &io::Result<usize>) -> Option<Unavailable> {
        match self.verdict(result.as_ref().err()?, op.progress) {
            Verdict::GiveUp(why) => Some(why),
            Verdict::OfRead | Verdict::Lost => None,
        }
    }

    /// Whether an error says that it brings nothing any more.
    pub(crate) fn is_lost(&self, error: &io::Error) -> bool {
        matches!(self.verdict(error, Progress::default()), Verdict::Lost)
    }
}

/// The consequence of a read's error for its route.
#[derive(Debug)]
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "a route of Linux alone can be lost"))]
pub(crate) enum Verdict {
    /// Nothing: it is about the read.
    OfRead,
    /// It is given up, for this reason, and the routes after it go on.
    GiveUp(Unavailable),
    /// It brings nothing any more, and asking about its files gets no answer.
    Lost,
}

/// The moment at which a report asks a route for notes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// When it is open.
    Open,
    /// When its reads have been made.
    Over,
}

/// Watches whether a route does what its name promises.
pub(crate) trait Proof {
    /// The proof that it can.
    fn shown(&self) -> Option<String>;

    /// How many of its reads so far were not what its name promises; `None` if that is not known.
    fn broken(&self) -> Option<u64>;

    /// Fails if it has not done what its name promises since [`Proof::broken`] returned `before`.
    ///
    /// # Errors
    /// What it did instead.
    fn check_kept(&self, before: Option<u64>) -> Result<(), Unavailable>;

    /// What reports call it if that fails.
    fn route_unless_kept(&self) -> Route;
}

/// The memory that reads of a route fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landing {
    /// Any memory of the host.
    Any,
    /// Memory of the host that the system may still write to when a lane is gone, so that a reader has slots for it rather
    /// than memory of the caller's.
    Kept,
    /// Slots that another process writes to.
    Shared,
    /// Slots that show pages of the file itself.
    View,
    /// Slots on the device.
    Device,
}

/// How much a load does at once, for routes to take their share of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadPlan {
    /// Threads that copy from the page cache, at first and at most.
    pub(crate) copiers: (usize, usize),
    /// The most of them beside a route that has a device copy from the same pages.
    pub(crate) copiers_beside: usize,
    /// Threads that fault memory in ahead of reads.
    pub(crate) touchers: usize,
    /// Threads with a ring each.
    pub(crate) rings: usize,
    /// Reads in flight in each ring, at first and at most.
    pub(crate) depth: (usize, usize),
    /// Threads that make one read at a time.
    pub(crate) pool: usize,
    /// Threads that make one read into a device at a time.
    pub(crate) direct: usize,
    /// Whether reads open files or connections, so that these limit how many are in flight.
    pub(crate) opens_files: bool,
}

/// A load's request to one route, and the memory for it.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "routes of Linux alone ask for it"))]
pub(crate) struct Demand<'a> {
    pub(crate) threads: &'a ThreadPlan,
    /// Whether the caller's thread makes all reads.
    pub(crate) is_inline: bool,
    /// Whether a device gets copies of slots in host memory.
    pub(crate) has_device: bool,
    /// Reads that the route may make.
    pub(crate) reads: usize,
    /// The longest of them, in bytes.
    pub(crate) longest_bytes: u64,
    /// Bytes in flight that the caller chose.
    pub(crate) in_flight_bytes: Option<u64>,
    /// Rings that the caller chose.
    pub(crate) rings: Option<usize>,
    /// Bytes of slots that there is room for in host memory.
    pub(crate) budget_bytes: u64,
    /// Bytes of a slot of the load's own, and of what lies beside each on the device.
    pub(crate) slot_bytes: (u64, u64),
}

/// A route's part of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Threads, each with a lane.
    pub(crate) threads: usize,
    /// Reads in flight in each lane, at first and at most.
    pub(crate) depth: (usize, usize),
    /// Slots of its own memory.
    pub(crate) slots: usize,
    /// Bytes of each.
    pub(crate) slot_bytes: u64,
}

impl Share {
    /// Threads that make one read after the other, into memory of the load's.
    pub(super) fn blocking(threads: usize) -> Self {
        Self { threads, depth: (1, 1), slots: 0, slot_bytes: 0 }
    }
}
