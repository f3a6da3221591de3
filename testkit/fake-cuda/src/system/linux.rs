//! Linux: mappings, of which pages exist once they are written.

use std::{
    cell::Cell,
    ffi::{CStr, c_void},
    io, ptr, thread,
    time::Duration,
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

/// Bytes of a range whose pages are not in memory.
pub(crate) fn untouched_bytes(address: usize, bytes: usize) -> u64 {
    const PAGE: usize = 4096;
    let start = address / PAGE * PAGE;
    let mut states = vec![0u8; (address + bytes - start).div_ceil(PAGE)];
    // SAFETY: writes a byte for each page of the range.
    let told = unsafe { libc::mincore(start as *mut c_void, address + bytes - start, states.as_mut_ptr()) };
    let missing = states.iter().filter(|state| *state & 1 == 0).count();
    if told == 0 { (missing * PAGE) as u64 } else { 0 }
}

/// Sleeps hardly longer than asked for.
pub(crate) fn sleep(time: Duration) {
    thread_local! {
        static IS_PRECISE: Cell<bool> = const { Cell::new(false) };
    }
    if !IS_PRECISE.replace(true) {
        // SAFETY: sets how late timers of this thread may be.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
    }
    thread::sleep(time);
}

/// Whether a range is a part of one shared mapping, all pages of which are there.
pub(crate) fn is_shared_view(address: usize, bytes: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let is_shared = maps.lines().any(|line| {
        let mut words = line.split([' ', '-']);
        let mut number = || usize::from_str_radix(words.next()?, 16).ok();
        let (Some(start), Some(end)) = (number(), number()) else { return false };
        let permissions = line.split(' ').nth(1).unwrap_or_default();
        start <= address && address + bytes <= end && permissions.ends_with('s')
    });
    let mut last = 0;
    is_shared && read_view((address + bytes - 1) as *const u8, &raw mut last, 1) == 1
}

/// Copies pages of a view of a file. A device has the old bytes of those that were cut off meanwhile; here they are other
/// ones, which nobody may take for the file's.
///
/// # Safety
/// `to` is good for `bytes` bytes.
pub(crate) unsafe fn copy_from_view(from: *const u8, to: *mut u8, bytes: usize) {
    const OLD_BYTE: u8 = 0xDB;
    let copied = read_view(from, to, bytes);
    // SAFETY: inside the destination.
    unsafe { to.add(copied).write_bytes(OLD_BYTE, bytes - copied) };
}

/// Reads by a call that returns at the end of a file that was cut, where a plain read would kill the process.
fn read_view(from: *const u8, to: *mut u8, bytes: usize) -> usize {
    let mut copied = 0;
    while copied < bytes {
        // The kernel takes no more at once.
        let len = (bytes - copied).min(1 << 30);
        let local = libc::iovec { iov_base: to.wrapping_add(copied).cast(), iov_len: len };
        let remote = libc::iovec { iov_base: from.wrapping_add(copied).cast_mut().cast(), iov_len: len };
        // SAFETY: the caller's destination is good for the bytes; the source is only touched by the kernel, which checks it.
        let count =
            unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(count) {
            Ok(count @ 1..) => copied += count,
            _ => break,
        }
    }
    copied
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
