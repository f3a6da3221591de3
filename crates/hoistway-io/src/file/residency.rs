//! Probes of the page cache that report only what it holds.
//!
//! `mincore` is not one of them: for a file that the caller neither owns nor may write, it says that everything is
//! resident. `cachestat` is exact but answers such callers EPERM; `preadv2(RWF_NOWAIT)` of single pages answers
//! everyone, at the price of starting to read the page that it misses. Files on `tmpfs` and `ramfs` have no other place than
//! the cache: what is not there is swapped out, or a hole.
#![forbid(unsafe_code)]

use super::{FileSystem, FileSystemKind};
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
    /// None is needed: the file lies in memory, all but what was swapped out and what was never written.
    Memory,
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
        // Pages of hugetlbfs are not those of the cache, and the system does not tell which of them there are.
        let lies_in_memory =
            |system: FileSystem| system.kind == FileSystemKind::Memory && system.name != "hugetlbfs";
        if FileSystem::of(file).is_ok_and(lies_in_memory) {
            return Self::Memory;
        }
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
            // A copy waits for what was swapped out, as reads of any other kind do.
            Self::Memory => Residency::Cached,
            Self::None(_) => Residency::Cold,
        }
    }

    /// Returns whether the page cache is known to hold all of `range`. Of a file in memory it holds what was swapped out too, but no
    /// hole: a page for that would have to be made.
    pub fn is_whole(&self, file: &File, range: ByteRange) -> bool {
        match self {
            Self::Cachestat => is_whole(file, range),
            Self::Memory => {
                let has_no_hole = || files::first_hole(file, range.start()).ok() >= Some(range.end());
                is_whole(file, range) || has_no_hole()
            }
            Self::Nowait | Self::None(_) => false,
        }
    }

    /// Returns whether all of `range` is known to be in memory now, so that no access waits for a drive.
    pub fn is_resident(&self, file: &File, range: ByteRange) -> bool {
        matches!(self, Self::Cachestat | Self::Memory) && is_whole(file, range)
    }

    /// Returns how many of the first `len` bytes the page cache holds, if that can be known.
    pub fn cached_bytes(&self, file: &File, len: u64) -> Option<u64> {
        let whole = ByteRange::new(0, len)?;
        let tells = matches!(self, Self::Cachestat | Self::Memory);
        let pages = tells.then(|| files::cached_pages(file, whole).ok()).flatten()?;
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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use requirements::{Requirement, skip};
    use std::os::unix::fs::FileExt;

    #[test]
    fn files_in_memory_are_whole_but_for_their_holes() {
        let file = match tempfile::tempfile_in("/dev/shm") {
            Ok(file) => file,
            Err(error) => return skip(Requirement::Shm, error),
        };
        let (page, range) = (page_bytes(), |start, end| ByteRange::new(start, end).unwrap());
        file.write_all_at(&vec![1; 2 * page as usize], 0).unwrap();
        file.write_all_at(&[1; 9], 3 * page).unwrap();
        let probe = Probe::find(&file);
        assert_eq!(probe, Probe::Memory);
        for (range, is_whole) in [
            (range(0, 2 * page), true),
            (range(page / 2, page), true),
            (range(0, 3 * page), false),
            (range(2 * page, 2 * page + 1), false),
            (range(3 * page, 3 * page + 9), true),
            // Past the end of the file.
            (range(4 * page, 5 * page), false),
        ] {
            assert_eq!(probe.is_whole(&file, range), is_whole, "{range}");
            assert!(!probe.is_resident(&file, range) || is_whole, "{range}");
            assert_eq!(probe.ask(&file, range), Residency::Cached);
        }
    }
}
