//! Memory in pages: mapped, faulted in ahead of its use, advised, and given back.
#![allow(unsafe_code)]

use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::{
    ffi::c_void,
    fs::File,
    io,
    ops::Range,
    ptr::{self, NonNull},
};

/// Length of a page in bytes.
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// Pages of this process: zeroed, or a private view of a file. Ranges count from their start.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    len: usize,
    /// The only process that has them, if they are hidden from children of `fork`.
    only_in: Option<u32>,
}

// SAFETY: plain memory with no thread affinity. No method reads or writes the bytes but `release`, which says so.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// `len` bytes of zeroed memory; from NUMA node `node`, if one is named, as long as that has any.
    ///
    /// # Errors
    /// The system's.
    pub fn new(len: usize, node: Option<u32>) -> io::Result<Self> {
        Self::anonymous(len, MapFlags::PRIVATE | MapFlags::NORESERVE, node)
    }

    /// Reserves `len` bytes of address space. Pages appear, zeroed, as they are [committed](Self::commit) or touched: small
    /// ones, so that no more memory is used than was asked for.
    ///
    /// # Errors
    /// The system's.
    pub fn reserve(len: usize) -> io::Result<Self> {
        let pages = Self::new(len, None)?;
        // A refusal means that huge pages are compiled out.
        let _ = pages.advise(0..pages.len, Advice::LinuxNoHugepage);
        Ok(pages)
    }

    /// Makes `range` of a reservation usable, widened to whole pages.
    ///
    /// # Errors
    /// None on Linux: pages appear at their first touch.
    pub fn commit(&self, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= self.len, "bytes {range:?} of {} that are mapped", self.len);
        Ok(())
    }

    /// `len` bytes of the system's reserve of huge pages, a multiple of [`HUGE_PAGE_BYTES`](crate::memory::HUGE_PAGE_BYTES) and aligned to it.
    ///
    /// # Errors
    /// The system's, also if the reserve has too few.
    pub fn reserved_huge(len: usize, node: Option<u32>) -> io::Result<Self> {
        // Reserving now turns a lack of pages into an error here rather than a SIGBUS later.
        Self::anonymous(len, MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB, node)
    }

    fn anonymous(len: usize, flags: MapFlags, node: Option<u32>) -> io::Result<Self> {
        let len = len.max(1);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing memory.
        let address =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)? };
        let pages = Self { start: non_null(address)?, len, only_in: None };
        if let Some(node) = node {
            pages.prefer(node)?;
        }
        Ok(pages)
    }

    /// A private, writable view of the first `len` bytes of `file`.
    ///
    /// Pages are read when first touched. If the file shrinks, touching what is gone kills the process with `SIGBUS`.
    ///
    /// # Errors
    /// The system's.
    pub fn of_file(file: &File, len: usize) -> io::Result<Self> {
        let (len, protection) = (len.max(1), ProtFlags::READ | ProtFlags::WRITE);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new private mapping at an address of the kernel's choice touches no existing memory.
        let address = unsafe { mm::mmap(ptr::null_mut(), len, protection, flags, file, 0)? };
        Ok(Self { start: non_null(address)?, len, only_in: None })
    }

    /// A shared view of `len` bytes of `file` from `offset` on, a multiple of the page size, which must not be written
    /// to. The processor must not read it either: where the file has shrunk, that kills the process with `SIGBUS`.
    ///
    /// # Errors
    /// The system's.
    pub fn view(file: &File, offset: u64, len: usize) -> io::Result<Self> {
        let len = len.max(1);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let address =
            unsafe { mm::mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, offset)? };
        Ok(Self { start: non_null(address)?, len, only_in: None })
    }

    /// Address of the first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Asks for transparent huge pages.
    ///
    /// # Errors
    /// The system's, if they are compiled out: small pages then serve, and fault more often.
    pub fn advise_huge(&self) -> io::Result<()> {
        self.advise(0..self.len, Advice::LinuxHugepage)
    }

    /// Asks for small pages in `range`, which begins at a page.
    ///
    /// # Errors
    /// The system's.
    pub fn refuse_huge(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, Advice::LinuxNoHugepage)
    }

    /// Faults the pages of `range` in, writable, without changing their bytes.
    ///
    /// # Errors
    /// The system's; [`InvalidInput`](io::ErrorKind::InvalidInput) before Linux 5.14.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(whole_pages(range), Advice::LinuxPopulateWrite)
    }

    /// Reads the pages of `range` of a view of a file in.
    ///
    /// # Errors
    /// The system's; [`InvalidInput`](io::ErrorKind::InvalidInput) before Linux 5.14.
    pub fn populate_for_reading(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(whole_pages(range), Advice::LinuxPopulateRead)
    }

    /// Leaves the memory out of what children of `fork` get.
    pub fn hide_from_children(&mut self) {
        // A refusal means that children get a copy, which they do not use.
        if self.advise(0..self.len, Advice::LinuxDontFork).is_ok() {
            self.only_in = Some(std::process::id());
        }
    }

    /// Gives the whole pages of `range` back to the system. Their bytes read as zero afterwards.
    ///
    /// # Safety
    /// No reference to these bytes may exist or be made later.
    pub unsafe fn release(&self, range: Range<usize>) {
        // The kernel takes no range that begins inside a page, and all of a page that it ends in.
        let page = page_size();
        let range = range.start.next_multiple_of(page)..range.end / page * page;
        // A refusal (locked pages) only means that the memory comes back when the mapping goes.
        let _ = self.advise(range, Advice::LinuxDontNeed);
    }

    /// Asks that the pages come from NUMA node `node` as long as it has any. Must precede the first touch.
    fn prefer(&self, node: u32) -> io::Result<()> {
        // Not MPOL_BIND: on a full node that ends in the OOM killer.
        const MPOL_PREFERRED: libc::c_ulong = 1;
        let mut mask = [0u64; 16];
        let bits_a_word = u64::BITS;
        let word = mask
            .get_mut((node / bits_a_word) as usize)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        *word = 1 << (node % bits_a_word);
        // SAFETY: `mask` outlives the call and holds `16 * 64` bits; the kernel reads one less than it is told.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                mask.len() * bits_a_word as usize + 1,
                0usize,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn advise(&self, range: Range<usize>, advice: Advice) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        assert!(range.end <= self.len, "bytes {range:?} of {} that are mapped", self.len);
        // SAFETY: inside the mapping, checked above.
        let address = unsafe { self.start.add(range.start) };
        // SAFETY: the range lies in this mapping, which nothing else maps or unmaps. Only `LinuxDontNeed` changes bytes,
        // and `release` passes its condition on to its caller.
        unsafe { mm::madvise(address.as_ptr().cast::<c_void>(), range.len(), advice)? };
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.only_in.is_some_and(|process| process != std::process::id()) {
            // A child never had it, and may have mapped something else at its place.
            return;
        }
        // SAFETY: exactly what was mapped, unmapped once; every pointer into it is held by something that holds
        // the mapping too.
        let result = unsafe { mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(result.is_ok(), "munmap: {result:?}");
    }
}

/// Asks for transparent huge pages in `range` of addresses, all of it or none, whatever lies there. Changes no bytes.
pub fn advise_huge_at(range: Range<usize>) {
    let address = ptr::with_exposed_provenance_mut(range.start);
    // SAFETY: this advice changes no bytes and no rights, whatever is mapped there; a refusal is no harm.
    let _ = unsafe { mm::madvise(address, range.len(), Advice::LinuxHugepage) };
}

/// `range`, beginning at a page.
fn whole_pages(range: Range<usize>) -> Range<usize> {
    range.start / page_size() * page_size()..range.end
}

fn non_null(address: *mut c_void) -> io::Result<NonNull<u8>> {
    NonNull::new(address.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
}
