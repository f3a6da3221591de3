//! What a route says of itself, so that loads and readers use it without knowing it.
#![forbid(unsafe_code)]

use super::{Access, DirectIo, ReadLane, ReadOp, Route, Unavailable, UsrbioClient};
use crate::{ByteRange, Error, device::Device, memory::Slots, report::Refusal, source::Source};
use hoistway_io::file::Residency;
use std::{fmt, io, path::PathBuf, sync::Arc};

/// What a load or a reader asks of routes.
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
}

/// Why a load leaves out what needs time to set up, or threads.
pub(crate) const ALONE: &str = "the load runs on the caller's thread, where it does not pay";
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

/// A route that is open: for one load, or for a reader as long as that lives.
pub(crate) trait Member: fmt::Debug + Send + Sync {
    /// What reports call it.
    fn route(&self) -> Route;

    /// Makes a file ready, which is read with this access otherwise. `false` if the route leaves the file to others
    /// without a reason worth telling. Does nothing for a file that is ready.
    ///
    /// # Errors
    /// Why the route cannot read it.
    fn add(&self, source: &Arc<dyn Source>, access: Access) -> Result<bool, Unavailable>;

    /// A queue of up to `depth` reads, for the thread that calls.
    ///
    /// # Errors
    /// Why there is none.
    fn lane(&self, depth: usize) -> Result<Box<ReadLane>, Unavailable>;

    /// How much a load gives it to do at once.
    fn share(&self, demand: &Demand<'_>) -> Share;

    /// Whether each of its reads in flight needs a connection, which takes time to be made.
    fn connects(&self) -> bool {
        false
    }

    /// The name of its threads.
    fn thread_name(&self) -> &'static str;

    /// Whether it copies what the page cache holds, and leaves the rest to the routes after it.
    fn is_cache(&self) -> bool {
        false
    }

    /// What a cache seems to hold of a range.
    fn holds(&self, source: &dyn Source, range: ByteRange) -> Residency {
        source.residency(range)
    }

    /// How a cache reads what it holds.
    fn cache_access(&self) -> Access {
        Access::Buffered
    }

    /// What a message calls the place that a cache holds bytes in, and what to do about bytes that it lacks.
    fn not_held(&self) -> (&'static str, &'static str) {
        ("the page cache", "run 'hoistway warm' first, or choose route auto")
    }

    /// How the files are read that it takes, if it knows that without asking them.
    fn own_access(&self) -> Option<Access> {
        self.serves_alone()
    }

    /// How it reads its files, if no other route is needed for them, and none may look at them. One whose slots are
    /// [shared](Landing::Shared) has such a way.
    fn serves_alone(&self) -> Option<Access> {
        None
    }

    /// Whether its reads begin and end anywhere, rather than at blocks where the page cache is bypassed.
    fn reads_any_bytes(&self) -> bool {
        false
    }

    /// Whether it leaves the last block of a file to others if that is cut short.
    fn needs_whole_blocks(&self) -> bool {
        false
    }

    /// The memory that its reads fill.
    fn landing(&self) -> Landing {
        Landing::Any
    }

    /// Whether the system may still write to the memory of its reads when its lane is gone, so that a reader has it read
    /// into slots rather than memory of the caller's.
    fn may_outlive_lane(&self) -> bool {
        false
    }

    /// How many lanes a reader has for so many reads in flight, and how many reads each holds.
    fn lanes(&self, in_flight: usize) -> (usize, usize) {
        (in_flight, 1)
    }

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
        Err(Error::Internal(format!("route {} has no memory of its own", self.route())))
    }

    /// Sets lanes up ahead of the threads that take them, so that a refusal is known before the first read.
    ///
    /// # Errors
    /// Why there are none.
    fn open_lanes(&self, count: usize, depth: usize) -> crate::Result<()> {
        let _ = (count, depth);
        Ok(())
    }

    /// The length that its reads should be a multiple of, if it has an opinion.
    fn chunk_bytes(&self) -> Option<u64> {
        None
    }

    /// Why it is given up after a read that ended so, if the routes after it go on.
    fn gives_up(&self, op: &ReadOp, result: &io::Result<usize>) -> Option<Unavailable> {
        let _ = (op, result);
        None
    }

    /// Whether an error says that it brings nothing any more, and that asking about its files gets no answer.
    fn is_lost(&self, error: &io::Error) -> bool {
        let _ = error;
        false
    }

    /// What a report says of it.
    fn note(&self) -> Option<String> {
        None
    }

    /// What a report says of it once reads have been made.
    fn last_notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Better ways to do what it does that are not used.
    fn refusals(&self) -> Vec<Refusal> {
        Vec::new()
    }

    /// What proves that it does what its name promises, if that needs a proof.
    fn proof(&self) -> Option<String> {
        None
    }

    /// How many of its reads so far were not what its name promises; `None` if that is not known.
    fn broken(&self) -> Option<u64> {
        Some(0)
    }

    /// Fails if it has not done what its name promises since [`Member::broken`] returned `before`.
    ///
    /// # Errors
    /// What it did instead.
    fn check_kept(&self, before: Option<u64>) -> Result<(), Unavailable> {
        let _ = before;
        Ok(())
    }

    /// What reports call it if [`Member::check_kept`] fails.
    fn route_unless_kept(&self) -> Route {
        self.route()
    }
}

/// The memory that reads of a route fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landing {
    /// Any memory of the host.
    Any,
    /// Slots that another process writes to.
    Shared,
    /// Slots on the device.
    Device,
}

/// How much a load does at once, for routes to take their share of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadPlan {
    /// Threads that copy from the page cache.
    pub(crate) copiers: usize,
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
}

/// What a load asks of one route, and the memory that it has for it.
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
