//! Jobs of one request whose bytes are neighbours in a file: they become one transfer, and so one read or write.
#![forbid(unsafe_code)]

use super::{Header, Job};
use crate::{
    disk::LazyFile,
    format::{BLOCK_LEN, HEADER_LEN},
};
use hoistway_device::DeviceId;
use hoistway_io::lane::Direction;
use std::sync::Arc;

/// Bytes of a file that jobs are joined to. Larger ones gain nothing: a drive takes that much at its full rate.
const MOST_BYTES: u64 = 1 << 20;
/// The same for jobs with memory of devices: 1 MiB, and headers of blocks of 64 KiB. Each transfer costs a copy.
pub(super) const DEVICE_BYTES: u64 = (1 << 20) + (16 * HEADER_LEN as u64);
/// Pieces of memory that jobs are joined to: the system takes 1024, and headers need some.
const MOST_PIECES: usize = 256;
/// Bytes between two jobs that are read with them rather than that there are two reads.
pub(super) const MOST_GAP: u64 = 64 << 10;

/// Bytes of a file, from the first to the last that a job asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    start: u64,
    end: u64,
}

impl Extent {
    /// That of a job, or `None` if it makes no sense.
    fn of(job: &Job) -> Option<Self> {
        let header = match job.header {
            Header::None => None,
            Header::Read { offset } | Header::Write { offset, .. } => Some((offset, HEADER_LEN as u64)),
        };
        let parts = job.parts.iter().map(|part| (part.offset, part.len));
        let mut extent: Option<Self> = None;
        for (start, len) in parts.chain(header) {
            let end = start.checked_add(len)?.checked_next_multiple_of(BLOCK_LEN)?;
            extent = Some(match extent {
                Some(extent) => Self { start: extent.start.min(start), end: extent.end.max(end) },
                None => Self { start, end },
            });
        }
        extent
    }
}

/// A job that may be joined with others of its request.
struct Candidate {
    extent: Extent,
    job: Job,
}

/// The jobs that are to be carried out together. Those that cannot be joined are alone, as are those of which `is_direct`
/// says that a device may move their bytes itself.
pub(super) fn joined(jobs: Vec<Job>, is_direct: impl Fn(&Job) -> bool) -> Vec<Vec<Job>> {
    if jobs.len() < 2 {
        return jobs.into_iter().map(|job| vec![job]).collect();
    }
    let mut groups: Vec<Vec<Job>> = Vec::with_capacity(jobs.len());
    // The candidates of each request and file, in the order in which these were first seen.
    let mut of_files: Vec<Vec<Candidate>> = Vec::new();
    for job in jobs {
        let is_short = |extent: &Extent| extent.end - extent.start < most_bytes(&job);
        match Extent::of(&job).filter(|extent| is_short(extent) && is_kept(&job) && !is_direct(&job)) {
            None => groups.push(vec![job]),
            Some(extent) => {
                let candidate = Candidate { extent, job };
                let is_alike = |candidates: &&mut Vec<Candidate>| {
                    candidates.last().is_some_and(|last| are_alike(&last.job, &candidate.job))
                };
                match of_files.iter_mut().rev().find(is_alike) {
                    Some(candidates) => candidates.push(candidate),
                    None => of_files.push(vec![candidate]),
                }
            }
        }
    }
    for mut candidates in of_files {
        candidates.sort_by_key(|candidate| candidate.extent.start);
        let mut run: Option<(Extent, usize)> = None;
        for Candidate { extent, job } in candidates {
            let pieces = pieces(&job);
            let gap = if job.direction == Direction::Read { MOST_GAP } else { 0 };
            match (&mut run, groups.last_mut()) {
                (Some((whole, sum)), Some(group))
                    if extent.start >= whole.end
                        && extent.start - whole.end <= gap
                        && extent.end - whole.start <= most_bytes(&job)
                        && *sum + pieces <= MOST_PIECES =>
                {
                    (whole.end, *sum) = (extent.end, *sum + pieces);
                    group.push(job);
                }
                _ => {
                    run = Some((extent, pieces));
                    groups.push(vec![job]);
                }
            }
        }
    }
    groups
}

/// Bytes that a job is joined to.
fn most_bytes(job: &Job) -> u64 {
    if devices(job).next().is_some() { DEVICE_BYTES } else { MOST_BYTES }
}

fn pieces(job: &Job) -> usize {
    1 + job.parts.iter().map(|part| part.pieces.len()).sum::<usize>()
}

/// Whether a job has its bytes in a file that stays open.
fn is_kept(job: &Job) -> bool {
    matches!(job.file, LazyFile::Open(_))
}

/// The devices whose memory a job has.
fn devices(job: &Job) -> impl Iterator<Item = DeviceId> {
    job.parts.iter().flat_map(|part| &part.pieces).map(|piece| piece.device).filter(|id| !id.is_host())
}

/// Whether jobs differ in nothing but their bytes.
fn are_alike(one: &Job, other: &Job) -> bool {
    let is_same_file = match (&one.file, &other.file) {
        (LazyFile::Open(one), LazyFile::Open(other)) => Arc::ptr_eq(one, other),
        _ => false,
    };
    // Who joins whom asks for one device's event and copies.
    let device = devices(one).next();
    is_same_file
        && devices(one).chain(devices(other)).all(|id| Some(id) == device)
        && device.is_some() == devices(other).next().is_some()
        && one.wait_event == other.wait_event
        && one.tag == other.tag
        && one.direction == other.direction
        && one.priority == other.priority
        && one.checksums == other.checksums
        && one.deadline == other.deadline
}
