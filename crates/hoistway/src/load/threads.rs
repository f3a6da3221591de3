//! How many threads a load has, and where they run.
#![forbid(unsafe_code)]

use super::{LoadOptions, NumaPlacement};
use crate::{
    DeviceId, Error, Result,
    device::Device,
    parallel,
    plan::Plan,
    route::{DirectIo, Unavailable, member::ThreadPlan},
    source::{Latency, Source},
    sys::{block_device, numa},
};
use hoistway_io::{Placement, file};
use std::{collections::BTreeSet, io, sync::Arc};

/// Bytes in flight that saturate a local drive: bandwidth × loaded latency of a fast NVMe.
const LOCAL_IN_FLIGHT_BYTES: u64 = 32 << 20;
/// The same for a server over a network.
const REMOTE_IN_FLIGHT_BYTES: u64 = 128 << 20;
/// How many times as many, at most, where that makes the device faster.
const IN_FLIGHT_GROWTH: u64 = 8;
/// Files that are opened for direct reads at the same time.
const PARALLEL_PROBES: usize = 16;
/// Reads in one ring, at most.
const MAX_DEPTH: u64 = 256;
/// Threads that read into a device, at most.
const MAX_DIRECT: usize = 32;
/// Threads that copy from the page cache: a few saturate the memory that they copy to. For a device, whose link may be faster, there
/// are more as long as it waits for them.
const FEW_COPIERS: usize = 8;

impl ThreadPlan {
    /// For what the caller's thread does by itself.
    pub(super) const ALONE: Self = Self {
        copiers: (1, 1),
        copiers_beside: 1,
        touchers: 0,
        rings: 1,
        depth: (1, 1),
        pool: 1,
        direct: 1,
        opens_files: false,
    };

    /// For a load of `plan` on so many cores.
    pub(super) fn new(plan: &Plan, sources: &[Arc<dyn Source>], options: &LoadOptions, cores: usize) -> Self {
        let used: Vec<&Arc<dyn Source>> = {
            let mut files: Vec<_> = plan.extents().iter().map(|extent| extent.file).collect();
            files.sort_unstable();
            files.dedup();
            files.into_iter().map(|file| &sources[file.index()]).collect()
        };
        let remote = used.iter().any(|source| source.latency() == Latency::Remote);
        let by_default = if remote { REMOTE_IN_FLIGHT_BYTES } else { LOCAL_IN_FLIGHT_BYTES };
        let in_flight = options.in_flight_bytes.unwrap_or(by_default);
        let depth = (in_flight / options.chunk_bytes.max(1)).clamp(1, MAX_DEPTH);
        // A number that the caller gave does not grow.
        let growth = if options.in_flight_bytes.is_some() { 1 } else { IN_FLIGHT_GROWTH };
        let max_depth = (depth * growth).min(MAX_DEPTH) as usize;
        // Found out side by side: on a file system of a network, each takes its time.
        let is_refused = |source: &&Arc<dyn Source>| source.direct_refusal().is_some();
        let buffered = options.direct == DirectIo::Never
            || parallel::map(&used, PARALLEL_PROBES, is_refused).contains(&true);
        // After that, which may have opened them for direct reads.
        let opens_local = used.iter().filter_map(|source| source.as_local()).any(|local| !local.stays_open());
        let opens_files = opens_local || used.iter().any(|source| source.as_local().is_none());
        let most_reads = match opens_files {
            true => file::most_reads(options.threads.unwrap_or(0).max(max_depth)),
            false => usize::MAX,
        };
        let (depth, max_depth) = ((depth as usize).min(most_reads), max_depth.min(most_reads));
        let copiers = cores.min(FEW_COPIERS).max(if cores > 1 { 2 } else { 1 });
        let is_copied_on = !options.device.is_host() && !options.route.is_unified();
        let most = options.threads.unwrap_or(if is_copied_on { cores.max(copiers) } else { copiers });
        let first = if is_copied_on { copiers.min(most) } else { most };
        // Blocking direct reads only wait; buffered ones of a local file also copy, on a core each. A few saturate
        // memory, but not while they copy into slots that stay in the processor's cache.
        let pool = match (buffered && !remote, options.device) {
            (true, DeviceId::Cpu) => cores.clamp(2, 4),
            (true, _) => copiers,
            (false, _) => depth,
        };
        let many_queues = used
            .iter()
            .filter_map(|source| source.as_local())
            .any(|local| block_device::queues(local.device()) > 1);
        let rings = options.rings.unwrap_or(if cores >= 8 && many_queues { 2 } else { 1 });
        let most_copiers = if opens_local { most_copiers(most) } else { most };
        // To pin takes one thread, and an H100 with 16 processors was fed fastest by 8 more.
        let beside = options.threads.unwrap_or(cores / 2).max(1);
        Self {
            copiers: (first.min(most_copiers), most.min(most_copiers)),
            copiers_beside: beside.min(most).min(most_copiers),
            touchers: if options.pool.is_some() { 0 } else { copiers.min(2) },
            rings,
            depth: (depth.div_ceil(rings), max_depth.div_ceil(rings)),
            pool: options.threads.unwrap_or(pool).min(most_reads),
            direct: depth.min(MAX_DIRECT),
            opens_files,
        }
    }

    /// Slots between files and a device: for the reads in flight, as many copies, and the threads that copy from the
    /// cache.
    pub(super) fn pinned_slots(&self) -> usize {
        2 * (self.depth.1 * self.rings).max(self.pool) + self.copiers.1
    }
}

/// Threads that copy from the page cache, where the process may have few files open: they read beside those that read what the
/// cache lacks.
fn most_copiers(wanted: usize) -> usize {
    file::most_reads(wanted.saturating_mul(4)).div_ceil(4)
}

/// The reads in flight that the caller's options ask for.
pub(super) fn reads_asked_for(options: &LoadOptions) -> usize {
    let depth = options.in_flight_bytes.map(|bytes| (bytes / options.chunk_bytes.max(1)).min(MAX_DEPTH));
    options.threads.unwrap_or(0).max(depth.unwrap_or(0) as usize)
}

/// Why the system starts no thread, and what to do.
pub(super) fn no_thread(error: &io::Error) -> Unavailable {
    let fix = if cfg!(windows) {
        "free memory, or raise the limits of the job that the process belongs to"
    } else {
        "raise ulimit -u or the control group's pids.max, or allow clone and clone3 in the container's seccomp profile"
    };
    Unavailable::new(format!("the system starts no thread: {error}"), fix)
}

/// Why threads do not stay on the processors that were chosen for them, and what to do.
pub(super) fn no_affinity(error: &io::Error) -> Unavailable {
    let fix = "allow sched_setaffinity in the container's seccomp profile";
    Unavailable::new(Placement::unbound(error), if cfg!(windows) { "" } else { fix })
}

/// Where a load gets its memory and runs its threads, as asked for on this machine; near a device if it is to that.
///
/// # Errors
/// [`Error::InvalidOption`] if there is no such node.
pub(super) fn placement(
    sources: &[Arc<dyn Source>],
    wanted: NumaPlacement,
    copied_to: Option<&Arc<Device>>,
) -> Result<Placement> {
    // The system takes ten calls to list its nodes: not for each load of a small tensor.
    let listed = |id: u32| numa::nodes().into_iter().find(|node| node.id == id);
    match wanted {
        NumaPlacement::Auto => {
            Ok(copied_to.map_or_else(Placement::default, |device| Placement::near_device(device)))
        }
        NumaPlacement::Unbound => Ok(Placement::default()),
        NumaPlacement::NearStorage => {
            let drive = |source: &Arc<dyn Source>| Some(source.as_local()?.device());
            let node = |drive: Option<u64>| block_device::numa_node(drive?);
            let Some(first) = sources.first() else { return Ok(Placement::default()) };
            let Some(id) = node(drive(first)) else {
                let note = format!(
                    "memory and threads were on any node: the system does not say at which NUMA node the drive of {} is",
                    first.path().display()
                );
                return Ok(Placement { note: Some(note), ..Placement::default() });
            };
            let unlisted = Placement { node: Some(id), ..Placement::default() };
            let mut near = listed(id).map_or(unlisted, |node| Placement::on(&node));
            let drives: BTreeSet<_> = sources.iter().map(drive).collect();
            if drives.into_iter().any(|drive| node(drive) != Some(id)) {
                let others = format!(
                    "not all files are known to be on drives at NUMA node {id}, that of the first file's"
                );
                near.note = Some(near.note.map_or(others.clone(), |note| format!("{note}; {others}")));
            }
            Ok(near)
        }
        NumaPlacement::Node(id) => match listed(id) {
            Some(node) => Ok(Placement::on(&node)),
            None => Err(Error::invalid_option("numa", id, "this machine has no such node")),
        },
    }
}
