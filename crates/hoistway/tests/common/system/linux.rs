//! Linux: `/proc`, advice about the page cache, and system calls that can be forbidden.

use super::Footprint;
use rustix::mm::{self, MapFlags, ProtFlags};
use std::{
    ffi::c_void,
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

impl Footprint {
    pub fn now() -> Self {
        let (mut arena_kib, mut size) = (0, 0);
        for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            if let Some(kib) = line.strip_prefix("Size:") {
                size = kib.trim().trim_end_matches(" kB").parse().unwrap();
            } else if line
                .strip_prefix("VmFlags:")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hg"))
            {
                arena_kib += size;
            }
        }
        let threads = fs::read_dir("/proc/self/task").unwrap().filter(|thread| {
            // One that has just ended has no name any more.
            let name = fs::read_to_string(thread.as_ref().unwrap().path().join("comm")).unwrap_or_default();
            ["hoistway", "iou-"].iter().any(|prefix| name.starts_with(prefix))
        });
        Self { descriptors: open_files().len(), threads: threads.count(), arena_kib }
    }
}

/// What the descriptors of this process lead to, without the memory that the stand-in driver keeps once it was used.
pub fn open_files() -> Vec<PathBuf> {
    let links = fs::read_dir("/proc/self/fd").unwrap();
    links
        .filter_map(|link| fs::read_link(link.ok()?.path()).ok())
        .filter(|open| !open.to_string_lossy().starts_with("/memfd:fake-cuda"))
        .collect()
}

/// Whether this process has a file open.
pub fn is_open(path: &Path) -> bool {
    open_files().iter().any(|open| open == path)
}

/// A folder of a file system in memory.
pub fn in_memory() -> io::Result<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm")
}

/// Drops an open file from the page cache.
pub fn drop_from_cache(file: &File) {
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// When the file was changed last.
pub fn change_time(file: &File) -> (i64, i64) {
    let stat = file.metadata().unwrap();
    (stat.ctime(), stat.ctime_nsec())
}

pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) {
    file.write_all_at(bytes, offset).unwrap();
}

/// A file in the page cache. Single pages that are mapped and locked stay there, whatever else happens on the machine. Folios of
/// several pages do not: if memory is short, the kernel splits them, which unmaps the pages of a file, and then evicts these.
pub struct Warm {
    start: *mut c_void,
    len: usize,
}

// SAFETY: the mapping is the process's, and any thread may unmap it.
unsafe impl Send for Warm {}

impl Warm {
    pub fn make(path: &Path) -> Self {
        let file = File::open(path).unwrap();
        let len = file.metadata().unwrap().len() as usize;
        read_by_pages(&file);
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice, which nothing reads.
        let start = unsafe { mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, flags, &file, 0) }.unwrap();
        // A limit on locked memory may forbid it. Mapped pages are the last that the system evicts.
        // SAFETY: the mapping from above, of this length.
        let _ = unsafe { mm::mlock(start, len) };
        Self { start, len }
    }
}

impl Drop for Warm {
    fn drop(&mut self) {
        // SAFETY: mapped by `make`, unmapped once.
        unsafe { mm::munmap(self.start, self.len) }.unwrap();
    }
}

/// Brings a file into the page cache as single pages, as far as it is not there: of one in memory, or that others map.
fn read_by_pages(file: &File) {
    drop_from_cache(file);
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random).unwrap();
    let (mut piece, mut offset) = (vec![0; 1 << 20], 0);
    loop {
        match file.read_at(&mut piece, offset).unwrap() {
            0 => break,
            read => offset += read as u64,
        }
    }
}
