//! What the page cache of Linux holds of a file.
#![allow(unreachable_pub)]

use rustix::mm::{self, MapFlags, ProtFlags};
use std::{ffi::c_void, fs::File, os::unix::fs::FileExt, path::Path};

/// Drops an open file from the page cache.
pub fn drop_from_cache(file: &File) {
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
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
