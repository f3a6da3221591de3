//! Windows: reserved address space, of which pages are committed where memory is allocated.

use std::{
    ffi::{CStr, c_void},
    io, ptr,
    sync::LazyLock,
    thread,
    time::{Duration, Instant},
};
use windows_sys::Win32::System::Memory::{
    MEM_COMMIT, MEM_DECOMMIT, MEM_RELEASE, MEM_RESERVE, MEMORY_BASIC_INFORMATION, PAGE_NOACCESS,
    PAGE_READWRITE, VirtualAlloc, VirtualFree, VirtualQuery,
};

/// Bytes of a device's window. Fewer than on Linux: Wine keeps a byte for each reserved page.
pub(crate) const WINDOW_BYTES: usize = 1 << 36;

/// A range of memory whose pages can be given back. Lives as long as the process.
pub(crate) struct Sparse(usize);

impl Sparse {
    pub(crate) fn new(bytes: usize) -> io::Result<Sparse> {
        reserve(bytes).map(Sparse)
    }

    pub(crate) fn address(&self) -> usize {
        self.0
    }

    /// Makes a range usable.
    pub(crate) fn provide(&self, offset: u64, len: u64) -> io::Result<()> {
        virtual_alloc(self.0 + offset as usize, len as usize, MEM_COMMIT, PAGE_READWRITE).map(drop)
    }

    /// Gives the pages of a range back to the system.
    pub(crate) fn discard(&self, offset: u64, len: u64) {
        let start = (self.0 + offset as usize) as *mut c_void;
        // A failure would only cost memory.
        // SAFETY: the range is part of this reservation, and no allocation lies there.
        unsafe { VirtualFree(start, len as usize, MEM_DECOMMIT) };
    }
}

/// Addresses that the process cannot follow, and that nothing else gets.
pub(crate) fn reserve(bytes: usize) -> io::Result<usize> {
    virtual_alloc(0, bytes, MEM_RESERVE, PAGE_NOACCESS)
}

/// Bytes of a range whose pages are not in memory: none that this knows of.
pub(crate) fn untouched_bytes(_address: usize, _bytes: usize) -> u64 {
    0
}

pub(crate) fn sleep(time: Duration) {
    thread::sleep(time);
}

/// New pages.
pub(crate) fn allocate(bytes: usize) -> io::Result<usize> {
    virtual_alloc(0, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE)
}

/// Frees what `allocate` made.
///
/// # Safety
/// Nothing uses it any more.
pub(crate) unsafe fn free(address: usize, _bytes: usize) {
    // SAFETY: as the caller says.
    unsafe { VirtualFree(address as *mut c_void, 0, MEM_RELEASE) };
}

/// Whether a range can be pinned for reads alone.
pub(crate) fn is_shared_view(address: usize, bytes: usize) -> bool {
    is_mapped(address, bytes)
}

/// Copies pages of a view of a file, which Windows lets nobody cut.
///
/// # Safety
/// Both are good for `bytes` bytes.
pub(crate) unsafe fn copy_from_view(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { from.copy_to(to, bytes) };
}

/// Whether all pages of a range are committed and accessible.
pub(crate) fn is_mapped(address: usize, bytes: usize) -> bool {
    let (mut next, end) = (address, address + bytes);
    while next < end {
        let mut found = MEMORY_BASIC_INFORMATION::default();
        // SAFETY: asks about an address, and writes no more than the structure.
        let len = unsafe { VirtualQuery(next as *const c_void, &raw mut found, size_of_val(&found)) };
        if len == 0 || found.State != MEM_COMMIT || found.Protect & PAGE_NOACCESS != 0 {
            return false;
        }
        next = found.BaseAddress as usize + found.RegionSize;
    }
    true
}

/// The time since this was called first.
pub(crate) fn now_ns() -> u64 {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGIN.elapsed().as_nanos() as u64
}

/// Null: Windows knows symbols by their libraries, and no test runs Python's interpreter there.
pub(crate) fn symbol(_name: &CStr) -> *mut c_void {
    ptr::null_mut()
}

fn virtual_alloc(address: usize, bytes: usize, kind: u32, protection: u32) -> io::Result<usize> {
    // SAFETY: the system chooses the place, or the range is part of a reservation of this library's.
    let address = unsafe { VirtualAlloc(address as *const c_void, bytes, kind, protection) };
    if address.is_null() { Err(io::Error::last_os_error()) } else { Ok(address as usize) }
}
