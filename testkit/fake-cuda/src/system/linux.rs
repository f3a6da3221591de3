//! Linux: mappings, of which pages exist once they are written.

use std::{
    ffi::{CStr, c_void},
    io, ptr,
};

/// Bytes of a device's window: enough for addresses to rest after use.
pub(crate) const WINDOW_BYTES: usize = 1 << 39;

/// A range of memory whose pages can be given back. Lives as long as the process.
pub(crate) struct Sparse {
    address: usize,
    /// The memory behind it, kept open to punch holes into it.
    backing: libc::c_int,
}

impl Sparse {
    pub(crate) fn new(bytes: usize) -> io::Result<Sparse> {
        // SAFETY: creates a descriptor; the name is NUL-terminated.
        let backing = checked(unsafe { libc::memfd_create(c"fake-cuda".as_ptr(), libc::MFD_CLOEXEC) })?;
        // SAFETY: resizes the new file; nothing maps it yet.
        checked(unsafe { libc::ftruncate(backing, bytes as libc::off_t) })?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let address = map(bytes, libc::PROT_READ | libc::PROT_WRITE, flags, backing)?;
        // Half a terabyte of holes would make a core dump slow, and a test that expects a crash makes one.
        // SAFETY: the range is the mapping just made; the advice changes no contents.
        unsafe { libc::madvise(address as *mut c_void, bytes, libc::MADV_DONTDUMP) };
        Ok(Sparse { address, backing })
    }

    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Makes a range usable, as it is here already.
    pub(crate) fn provide(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Gives the pages of a range back to the system. They read as zeros until they are written again.
    pub(crate) fn discard(&self, offset: u64, len: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // A failure would only cost memory.
        // SAFETY: acts on a file that only this range maps, where no allocation lies.
        unsafe { libc::fallocate(self.backing, mode, offset as libc::off_t, len as libc::off_t) };
    }
}

/// Addresses that the process cannot follow, and that nothing else gets.
pub(crate) fn reserve(bytes: usize) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    map(bytes, libc::PROT_NONE, flags, -1)
}

/// New pages.
pub(crate) fn allocate(bytes: usize) -> io::Result<usize> {
    map(bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
}

/// Frees what `allocate` made.
///
/// # Safety
/// Nothing uses it any more.
pub(crate) unsafe fn free(address: usize, bytes: usize) {
    // SAFETY: as the caller says.
    unsafe { libc::munmap(address as *mut c_void, bytes) };
}

/// Whether all pages of a range are mapped.
pub(crate) fn is_mapped(address: usize, bytes: usize) -> bool {
    const PAGE: usize = 4096;
    let start = address / PAGE * PAGE;
    // SAFETY: MS_ASYNC does nothing but check that the range is mapped.
    let checked = unsafe { libc::msync(start as *mut c_void, address + bytes - start, libc::MS_ASYNC) };
    checked == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ENOMEM)
}

/// The time by CLOCK_MONOTONIC.
pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills the structure.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A symbol of any library that the process has loaded; null if there is none.
pub(crate) fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: looks a name up.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

fn map(bytes: usize, protection: libc::c_int, flags: libc::c_int, file: libc::c_int) -> io::Result<usize> {
    // SAFETY: lets the kernel choose the place, so that no existing mapping is touched.
    let address = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, file, 0) };
    match address {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        address => Ok(address as usize),
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
