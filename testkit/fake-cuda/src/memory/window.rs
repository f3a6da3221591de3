//! Addresses that look like a GPU's memory: the host faults on them, and the stand-in has a second way in.

use std::{io, ptr};

/// Enough for addresses to rest after use; pages exist only where something was written.
const BYTES: usize = 1 << 39;
/// Where a window starts at most beyond what it must: allocations may ask for this alignment.
const ALIGNMENT: usize = 2 << 20;

/// One device's addresses. Lives as long as the process: streams may still write to it at exit.
pub(crate) struct Window {
    base: usize,
    shadow: usize,
    /// The memory behind `shadow`, kept open to punch holes into it.
    backing: libc::c_int,
}

impl Window {
    pub(crate) fn new() -> io::Result<Window> {
        // SAFETY: creates a descriptor; the name is NUL-terminated.
        let backing = checked(unsafe { libc::memfd_create(c"fake-cuda".as_ptr(), libc::MFD_CLOEXEC) })?;
        // SAFETY: resizes the new file; nothing maps it yet.
        checked(unsafe { libc::ftruncate(backing, BYTES as libc::off_t) })?;
        let shadow = map(BYTES, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, backing)?;
        // Half a terabyte of holes would make a core dump slow, and a test that expects a crash makes one.
        // SAFETY: the range is the mapping just made; the advice changes no contents.
        unsafe { libc::madvise(shadow as *mut libc::c_void, BYTES, libc::MADV_DONTDUMP) };
        let inaccessible =
            map(BYTES + ALIGNMENT, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        Ok(Window { base: inaccessible.next_multiple_of(ALIGNMENT), shadow, backing })
    }

    pub(crate) fn len(&self) -> u64 {
        BYTES as u64
    }

    /// The device address `offset` bytes into the window.
    pub(crate) fn address(&self, offset: u64) -> u64 {
        self.base as u64 + offset
    }

    /// Where a device address lies in the window, if it does.
    pub(crate) fn offset(&self, address: u64) -> Option<u64> {
        address.checked_sub(self.base as u64).filter(|offset| *offset < BYTES as u64)
    }

    /// Where the host finds the byte at `offset`.
    pub(crate) fn shadow(&self, offset: u64) -> *mut u8 {
        (self.shadow + offset as usize) as *mut u8
    }

    /// Gives the pages of a range back to the system. They read as zeros until they are written again.
    pub(crate) fn discard(&self, offset: u64, len: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // A failure would only cost memory.
        // SAFETY: acts on a file that only this window maps, in a range that no allocation holds.
        unsafe { libc::fallocate(self.backing, mode, offset as libc::off_t, len as libc::off_t) };
    }
}

fn map(bytes: usize, protection: libc::c_int, flags: libc::c_int, file: libc::c_int) -> io::Result<usize> {
    // SAFETY: lets the kernel choose the place, so that no existing mapping is touched.
    let address =
        unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags | libc::MAP_NORESERVE, file, 0) };
    match address {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        address => Ok(address as usize),
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
