//! Probes of the page cache that report only what it holds.
//!
//! `mincore` is not one of them: for a file that the caller neither owns nor may write, it says that everything is
//! resident. `cachestat` is exact but answers such callers EPERM; `preadv2(RWF_NOWAIT)` of single pages answers
//! everyone, at the price of starting to read the page that it misses.
#![forbid(unsafe_code)]

use crate::{
    ByteRange,
    sys::{files, pages},
};
use hoistway_device::Unavailable;
use std::{fs::File, io};

/// The way to ask about one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// `cachestat(2)`, Linux 6.5, for files that one owns or may write.
    Cachestat,
    /// Reads of single pages that may not wait.
    Nowait,
    /// The file system supports neither.
    None(Unavailable),
}

/// The answer of [`Probe::ask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// All of it, or at least its beginning, seems to be cached. Only a copy shows how much.
    Cached,
    /// It is not cached, or not from its beginning.
    Cold,
}

/// The beginning of a range that must be cached to make copying worth a try.
const HEAD_BYTES: u64 = 256 << 10;

fn page_bytes() -> u64 {
    pages::page_size() as u64
}

impl Probe {
    /// Finds out what works for `file`.
    pub fn find(file: &File) -> Self {
        // The copy itself is by RWF_NOWAIT, whatever is asked before it.
        if let Err(error) = is_page_cached(file, 0) {
            return Self::None(files::no_residency(&error));
        }
        let page = ByteRange::at(0, page_bytes()).unwrap_or_default();
        if files::cached_pages(file, page).is_ok() {
            return Self::Cachestat;
        }
        // Keeps a missed page from dragging its neighbours in.
        files::expect_random_reads(file);
        Self::Nowait
    }

    /// Returns what the page cache holds of `range`.
    pub fn ask(&self, file: &File, range: ByteRange) -> Residency {
        match self {
            Self::Cachestat => ask_cachestat(file, range),
            Self::Nowait => ask_nowait(file, range),
            Self::None(_) => Residency::Cold,
        }
    }

    /// Returns whether the page cache is known to hold all of `range`.
    pub fn is_whole(&self, file: &File, range: ByteRange) -> bool {
        *self == Self::Cachestat && is_whole(file, range)
    }

    /// Returns how many of the first `len` bytes the page cache holds, if that can be known.
    pub fn cached_bytes(&self, file: &File, len: u64) -> Option<u64> {
        let whole = ByteRange::new(0, len)?;
        let pages = (*self == Self::Cachestat).then(|| files::cached_pages(file, whole).ok()).flatten()?;
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
    files::cached_pages(file, range).is_ok_and(|cached| cached >= pages)
}

/// Asks for two pages at places that differ from call to call: pages that an earlier probe brought in must not
/// make a cold range look warm.
fn ask_nowait(file: &File, range: ByteRange) -> Residency {
    let first = range.start() / page_bytes();
    let pages = range.end().div_ceil(page_bytes()) - first;
    let cached = [0u64, 1].iter().all(|sample| {
        let page = first + scatter(range.start() ^ sample) % pages.max(1);
        matches!(is_page_cached(file, page * page_bytes()), Ok(true))
    });
    if cached { Residency::Cached } else { Residency::Cold }
}

/// A number that depends on `seed` and on the moment.
fn scatter(seed: u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(seed)
}

/// Whether the page at `offset` is cached; an error if the file system cannot tell.
fn is_page_cached(file: &File, offset: u64) -> io::Result<bool> {
    files::read_cached_at(file, &mut [0], offset).map(|count| count > 0)
}
