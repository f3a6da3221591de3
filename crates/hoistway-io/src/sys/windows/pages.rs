//! Memory in pages: allocated or mapped, read in ahead of its use, and given back.
#![allow(unsafe_code)]

use super::machine;
use std::{
    ffi::c_void,
    fs::File,
    io,
    ops::Range,
    os::windows::io::AsRawHandle,
    ptr::{self, NonNull},
    sync::OnceLock,
};
use windows_sys::Win32::{
    Foundation::CloseHandle,
    System::{
        Memory::{
            CreateFileMappingW, FILE_MAP_COPY, MEM_COMMIT, MEM_DECOMMIT, MEM_LARGE_PAGES, MEM_RELEASE,
            MEM_RESERVE, MEMORY_MAPPED_VIEW_ADDRESS, MapViewOfFile, PAGE_READWRITE, PAGE_WRITECOPY,
            PrefetchVirtualMemory, UnmapViewOfFile, VirtualAlloc, VirtualAllocExNuma, VirtualFree,
            WIN32_MEMORY_RANGE_ENTRY,
        },
        SystemInformation::{GetSystemInfo, SYSTEM_INFO},
        Threading::GetCurrentProcess,
    },
};

/// Length of a page in bytes.
pub fn page_size() -> usize {
    static PAGE_SIZE: OnceLock<usize> = OnceLock::new();
    *PAGE_SIZE.get_or_init(|| {
        let mut info = SYSTEM_INFO::default();
        // SAFETY: the structure outlives the call.
        unsafe { GetSystemInfo(&raw mut info) };
        info.dwPageSize as usize
    })
}

/// Pages of this process: zeroed, or a private view of a file. Ranges count from their start.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    len: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Allocated,
    /// Address space, of which parts are committed.
    Reserved,
    /// Allocated, of large pages: never given back in part.
    Large,
    View,
}

// SAFETY: plain memory with no thread affinity. No method reads or writes the bytes but `release`, which says so.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// `len` bytes of zeroed memory; from NUMA node `node`, if one is named, as long as that has any. They count against the system's commit limit from now on.
    ///
    /// # Errors
    /// The system's.
    pub fn new(len: usize, node: Option<u32>) -> io::Result<Self> {
        Self::allocated(len, 0, Kind::Allocated, node)
    }

    /// Reserves `len` bytes of address space. Only what is [committed](Self::commit) may be touched, and counts against the
    /// system's commit limit.
    ///
    /// # Errors
    /// The system's.
    pub fn reserve(len: usize) -> io::Result<Self> {
        let len = len.max(1);
        // SAFETY: new address space at a place of the system's choice touches no existing memory.
        let address = unsafe { VirtualAlloc(ptr::null(), len, MEM_RESERVE, PAGE_READWRITE) };
        Ok(Self { start: non_null(address)?, len, kind: Kind::Reserved })
    }

    /// Makes `range` of a reservation usable, widened to whole pages. Pages that are committed already keep their bytes.
    ///
    /// # Errors
    /// The system's, if the commit limit is reached.
    pub fn commit(&self, range: Range<usize>) -> io::Result<()> {
        let address = self.address(&range);
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: pages of this reservation; committing changes no bytes of those that are committed already.
        let committed = unsafe { VirtualAlloc(address, range.len(), MEM_COMMIT, PAGE_READWRITE) };
        non_null(committed).map(drop)
    }

    /// `len` bytes of large pages, a multiple of [`HUGE_PAGE_BYTES`](crate::memory::HUGE_PAGE_BYTES) and aligned to it.
    ///
    /// # Errors
    /// The system's. [`PermissionDenied`](io::ErrorKind::PermissionDenied) if the user lacks the right
    /// `SeLockMemoryPrivilege`, [`Unsupported`](io::ErrorKind::Unsupported) if the processor has no large pages.
    pub fn reserved_huge(len: usize, node: Option<u32>) -> io::Result<Self> {
        let page = machine::large_pages()?;
        let len = len.max(1).checked_next_multiple_of(page).ok_or(io::ErrorKind::OutOfMemory)?;
        Self::allocated(len, MEM_LARGE_PAGES, Kind::Large, node)
    }

    fn allocated(len: usize, flags: u32, kind: Kind, node: Option<u32>) -> io::Result<Self> {
        let len = len.max(1);
        let flags = MEM_RESERVE | MEM_COMMIT | flags;
        let address = match node {
            // SAFETY: new memory at an address of the system's choice touches no existing memory.
            None => unsafe { VirtualAlloc(ptr::null(), len, flags, PAGE_READWRITE) },
            // SAFETY: as above, and the handle of this process needs no closing.
            Some(node) => unsafe {
                VirtualAllocExNuma(GetCurrentProcess(), ptr::null(), len, flags, PAGE_READWRITE, node)
            },
        };
        Ok(Self { start: non_null(address)?, len, kind })
    }

    /// A private, writable view of the first `len` bytes of `file`.
    ///
    /// Pages are read when first touched. Windows keeps a file from shrinking while a view of it exists.
    ///
    /// # Errors
    /// The system's.
    pub fn of_file(file: &File, len: usize) -> io::Result<Self> {
        if len == 0 {
            // Windows maps no empty range.
            return Self::new(0, None);
        }
        // SAFETY: the handle is open during the call; no name and no security attributes are given.
        let section = unsafe {
            CreateFileMappingW(file.as_raw_handle(), ptr::null(), PAGE_WRITECOPY, 0, 0, ptr::null())
        };
        if section.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new view at an address of the system's choice touches no existing memory.
        let view = unsafe { MapViewOfFile(section, FILE_MAP_COPY, 0, 0, len) };
        let start = non_null(view.Value);
        // SAFETY: the section is open, and closed once. A view keeps what it needs.
        unsafe { CloseHandle(section) };
        Ok(Self { start: start?, len, kind: Kind::View })
    }

    /// Address of the first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Asks for transparent huge pages.
    ///
    /// # Errors
    /// Always: Windows makes none.
    pub fn advise_huge(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Asks for small pages in `range`.
    ///
    /// # Errors
    /// Never: Windows makes no others.
    pub fn refuse_huge(&self, _range: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    /// Faults the pages of `range` in, writable, without changing their bytes.
    ///
    /// # Errors
    /// Always: Windows has no such call.
    pub fn populate(&self, _range: Range<usize>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Reads the pages of `range` of a view of a file in.
    ///
    /// # Errors
    /// The system's.
    pub fn populate_for_reading(&self, range: Range<usize>) -> io::Result<()> {
        let entry =
            WIN32_MEMORY_RANGE_ENTRY { VirtualAddress: self.address(&range), NumberOfBytes: range.len() };
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: one entry, of a range of this mapping; the call changes no bytes.
        let result = unsafe { PrefetchVirtualMemory(GetCurrentProcess(), 1, &raw const entry, 0) };
        if result != 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Leaves the memory out of what children get: there are none that get any.
    pub fn hide_from_children(&mut self) {}

    /// Gives the whole pages of `range` back to the system. Their bytes read as zero afterwards. What is no plain
    /// allocation stays as it is until the end.
    ///
    /// # Safety
    /// No reference to these bytes may exist or be made later.
    pub unsafe fn release(&self, range: Range<usize>) {
        // The call would take every page that the range touches.
        let page = page_size();
        let range = range.start.next_multiple_of(page)..range.end / page * page;
        if !matches!(self.kind, Kind::Allocated | Kind::Reserved) || range.is_empty() {
            return;
        }
        let address = self.address(&range);
        // SAFETY: whole pages of this allocation, which are not referred to, as the caller says.
        if unsafe { VirtualFree(address, range.len(), MEM_DECOMMIT) } != 0 && self.kind == Kind::Allocated {
            // The addresses stay usable: new, zeroed pages appear there. A lack of memory for these is told at the next
            // touch only, and nothing touches them, as the caller says.
            // SAFETY: whole pages of this reservation, decommitted above.
            unsafe { VirtualAlloc(address, range.len(), MEM_COMMIT, PAGE_READWRITE) };
        }
    }

    fn address(&self, range: &Range<usize>) -> *mut c_void {
        assert!(range.start <= range.end && range.end <= self.len, "bytes {range:?} of {}", self.len);
        // SAFETY: inside the pages or at their end, checked above.
        unsafe { self.start.add(range.start) }.as_ptr().cast()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let start: *mut c_void = self.start.as_ptr().cast();
        let result = match self.kind {
            // SAFETY: exactly what was mapped, unmapped once; every pointer into it is held by something that holds the
            // pages too.
            Kind::View => unsafe { UnmapViewOfFile(MEMORY_MAPPED_VIEW_ADDRESS { Value: start }) },
            // SAFETY: exactly what was allocated, freed once; pointers as above.
            Kind::Allocated | Kind::Reserved | Kind::Large => unsafe { VirtualFree(start, 0, MEM_RELEASE) },
        };
        debug_assert!(result != 0, "freeing pages: {}", io::Error::last_os_error());
    }
}

/// Asks for transparent huge pages at addresses: Windows makes none.
pub fn advise_huge_at(_range: Range<usize>) {}

fn non_null(address: *mut c_void) -> io::Result<NonNull<u8>> {
    NonNull::new(address.cast()).ok_or_else(io::Error::last_os_error)
}
