//! What the page cache holds of a file, by probes that cannot lie.
//!
//! `mincore` is not one of them: for a file that the caller neither owns nor may write, it says that everything is
//! resident. `cachestat` is exact but answers such callers EPERM; `preadv2(RWF_NOWAIT)` of single pages answers
//! everyone, at the price of starting to read the page that it misses.
#![allow(unsafe_code)]

use super::Unavailable;
use crate::ByteRange;
use rustix::io::ReadWriteFlags;
use std::{fs::File, io, io::IoSliceMut, os::fd::AsRawFd};

/// How to ask about one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Probe {
    /// `cachestat(2)`, Linux 6.5, for files that one owns or may write.
    Cachestat,
    /// Reads of single pages that may not wait.
    Nowait,
    /// The file system answers neither.
    None(Unavailable),
}

/// What [`Probe::ask`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Residency {
    /// Worth copying: all of it, or at least its beginning, seems to be cached. The copy itself will tell.
    Cached,
    /// Not cached, or not from its beginning.
    Cold,
}

/// The beginning of a range that must be cached to make copying worth a try.
const HEAD_BYTES: u64 = 256 << 10;

fn page_bytes() -> u64 {
    crate::sys::pages::page_size() as u64
}

impl Probe {
    /// Finds out what works for `file`.
    pub(crate) fn find(file: &File) -> Self {
        // The copy itself is by RWF_NOWAIT, whatever is asked before it.
        if let Err(error) = read_without_waiting(file, 0) {
            let reason =
                format!("its file system cannot say what the page cache holds (RWF_NOWAIT: {error})");
            return Self::None(Unavailable::new(reason, ""));
        }
        let page = ByteRange::at(0, page_bytes()).unwrap_or_default();
        if cached_pages(file, page).is_ok() {
            return Self::Cachestat;
        }
        // Keeps a missed page from dragging its neighbours in.
        let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
        Self::Nowait
    }

    /// What the page cache holds of `range`.
    pub(crate) fn ask(&self, file: &File, range: ByteRange) -> Residency {
        match self {
            Self::Cachestat => ask_cachestat(file, range),
            Self::Nowait => ask_nowait(file, range),
            Self::None(_) => Residency::Cold,
        }
    }

    /// Whether the page cache is known to hold all of `range`.
    pub(crate) fn is_whole(&self, file: &File, range: ByteRange) -> bool {
        *self == Self::Cachestat && is_whole(file, range)
    }

    /// Bytes of the first `len` of `file` that the page cache holds, if that can be known.
    pub(crate) fn cached_bytes(&self, file: &File, len: u64) -> Option<u64> {
        let whole = ByteRange::new(0, len)?;
        let pages = (*self == Self::Cachestat).then(|| cached_pages(file, whole).ok()).flatten()?;
        Some((pages * page_bytes()).min(len))
    }
}

fn ask_cachestat(file: &File, range: ByteRange) -> Residency {
    let head = ByteRange::new(range.start(), range.end().min(range.start() + HEAD_BYTES)).unwrap_or(range);
    // The head decides; the copy stops by itself where the cache does.
    if is_whole(file, head) { Residency::Cached } else { Residency::Cold }
}

fn is_whole(file: &File, range: ByteRange) -> bool {
    let first = range.start() / page_bytes();
    let pages = range.end().div_ceil(page_bytes()) - first;
    cached_pages(file, range).is_ok_and(|cached| cached >= pages)
}

/// Asks for two pages at places that differ from call to call: pages that an earlier probe brought in must not
/// make a cold range look warm.
fn ask_nowait(file: &File, range: ByteRange) -> Residency {
    let first = range.start() / page_bytes();
    let pages = range.end().div_ceil(page_bytes()) - first;
    let cached = [0u64, 1].iter().all(|sample| {
        let page = first + scatter(range.start() ^ sample) % pages.max(1);
        matches!(read_without_waiting(file, page * page_bytes()), Ok(true))
    });
    if cached { Residency::Cached } else { Residency::Cold }
}

/// A number that depends on `seed` and on the moment.
fn scatter(seed: u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(seed)
}

/// Whether the page at `offset` is cached; an error if the file system cannot tell.
fn read_without_waiting(file: &File, offset: u64) -> io::Result<bool> {
    let mut byte = [0u8; 1];
    match rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::AGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Pages of `range` that the cache holds, by `cachestat(2)`.
fn cached_pages(file: &File, range: ByteRange) -> io::Result<u64> {
    #[repr(C)]
    struct CachestatRange {
        offset: u64,
        len: u64,
    }
    /// `struct cachestat` of `linux/mman.h`.
    #[repr(C)]
    #[derive(Default)]
    struct Cachestat {
        cached: u64,
        dirty: u64,
        writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    /// The same on every architecture; newer than `libc`'s tables of some targets.
    const SYS_CACHESTAT: libc::c_long = 451;
    let asked = CachestatRange { offset: range.start(), len: range.len() };
    let mut answer = Cachestat::default();
    // SAFETY: both structures are laid out as the kernel's and outlive the call.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut answer, 0u32) };
    if result == 0 { Ok(answer.cached) } else { Err(io::Error::last_os_error()) }
}
