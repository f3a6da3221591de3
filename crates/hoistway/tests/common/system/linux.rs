//! Linux: `/proc`, advice about the page cache, and system calls that can be forbidden.

#[path = "../page_cache.rs"]
mod page_cache;

use super::Footprint;
pub use page_cache::{Warm, drop_from_cache};
use std::{
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

/// When the file was changed last.
pub fn change_time(file: &File) -> (i64, i64) {
    let stat = file.metadata().unwrap();
    (stat.ctime(), stat.ctime_nsec())
}

pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) {
    file.write_all_at(bytes, offset).unwrap();
}
