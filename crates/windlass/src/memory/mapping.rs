//! The only owner of `mmap`ed bytes. Everything above deals in offsets into a [`Mapping`].
#![allow(unsafe_code)]

use crate::ByteRange;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::{
    ffi::c_void,
    fs::File,
    io,
    ptr::{self, NonNull},
};

/// Size of the pages that arenas are made of where the kernel allows: x86-64's and most of arm64's huge page.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What the memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// Advised to be transparent huge pages.
    TransparentHuge,
    /// From the system's reserve of huge pages (`vm.nr_hugepages`).
    ReservedHuge,
    /// Whatever the system does by itself.
    Default,
}

/// A private mapping: anonymous memory, or a copy-on-write view of a file.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// What was mapped, alignment slack included.
    mapped_start: NonNull<u8>,
    mapped_len: usize,
    /// The only process that has it, if it is hidden from children of `fork`.
    only_in: Option<u32>,
}

// SAFETY: the mapping is plain memory with no thread affinity; who may touch which byte when is decided by the
// types that hold it (`WriteRegion` exclusively, `Block` after all writes).
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself has no method that reads or writes the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `len` bytes of zeroed memory. Aligned to a huge page if at least one fits.
    pub(super) fn anonymous(len: usize, pages: Pages) -> io::Result<Self> {
        let overflow = || io::Error::from(io::ErrorKind::OutOfMemory);
        let huge = pages != Pages::Default && len >= HUGE_PAGE_BYTES;
        let len = match pages {
            Pages::ReservedHuge => len.checked_next_multiple_of(HUGE_PAGE_BYTES).ok_or_else(overflow)?,
            _ => len,
        };
        // Reserved huge pages come aligned; for the others, map more and keep an aligned part.
        let slack = if huge && pages == Pages::TransparentHuge { HUGE_PAGE_BYTES } else { 0 };
        let mapped_len = len.checked_add(slack).ok_or_else(overflow)?.max(1);
        let mut flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        if pages == Pages::ReservedHuge {
            // Reserving now turns a lack of pages into an error here rather than a SIGBUS later.
            flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing memory.
        let address = unsafe { mm::mmap_anonymous(ptr::null_mut(), mapped_len, protection, flags)? };
        let mapped_start = non_null(address)?;
        let misaligned = mapped_start.addr().get() % HUGE_PAGE_BYTES;
        let skip = if slack == 0 || misaligned == 0 { 0 } else { HUGE_PAGE_BYTES - misaligned };
        // SAFETY: `skip < slack`, so the result stays inside the mapping.
        let start = unsafe { mapped_start.add(skip) };
        let mapping = Self { start, len, mapped_start, mapped_len, only_in: None };
        if slack > 0 {
            // Advice may be refused (huge pages compiled out): small pages then serve, and fault more often. All of
            // it, slack included, so that neighbours become one area: systems limit the number of areas.
            let _ = mapping.advise_all(Advice::LinuxHugepage);
        }
        Ok(mapping)
    }

    /// A private, writable view of the first `len` bytes of `file`.
    ///
    /// Pages are read when first touched. If the file shrinks, touching what is gone kills the process with
    /// `SIGBUS`: that is why no route but `mapped` uses this.
    pub(super) fn of_file(file: &File, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let mapped_len = len.max(1);
        // SAFETY: a new private mapping at an address of the kernel's choice touches no existing memory.
        let address = unsafe {
            mm::mmap(
                ptr::null_mut(),
                mapped_len,
                protection,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
                file,
                0,
            )?
        };
        let start = non_null(address)?;
        Ok(Self { start, len, mapped_start: start, mapped_len, only_in: None })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Address of byte `offset`.
    pub(super) fn pointer(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len, "offset {offset} of a mapping of {} bytes", self.len);
        // SAFETY: inside the mapping or one past its end, checked above.
        unsafe { self.start.add(offset) }
    }

    /// Faults the pages of `range` in, writable, without changing their bytes.
    ///
    /// Needs Linux 5.14; older kernels answer `InvalidInput`.
    pub(super) fn populate(&self, range: ByteRange) -> io::Result<()> {
        self.advise(self.whole_pages(range), Advice::LinuxPopulateWrite)
    }

    /// Reads the pages of `range` of a file mapping in.
    pub(super) fn populate_for_reading(&self, range: ByteRange) -> io::Result<()> {
        self.advise(self.whole_pages(range), Advice::LinuxPopulateRead)
    }

    /// Faults everything in on any kernel, by writing zeros.
    pub(super) fn fill_with_zeros(&mut self) {
        // SAFETY: all of the mapping, which the kernel has initialised; `&mut self` makes sure that nobody else
        // has got an address in it.
        unsafe { self.start.as_ptr().write_bytes(0, self.len) };
    }

    /// Leaves the memory out of what children of `fork` get.
    pub(super) fn hide_from_children(&mut self) {
        // A refusal means that children get a copy, which they do not use.
        if self.advise_all(Advice::LinuxDontFork).is_ok() {
            self.only_in = Some(std::process::id());
        }
    }

    /// Gives the whole pages of `range` back to the system. Their bytes read as zero afterwards.
    ///
    /// # Safety
    /// No reference to these bytes may exist or be made later.
    pub(super) unsafe fn release(&self, range: ByteRange) {
        // A refusal (locked pages) only means that the memory comes back when the mapping goes.
        let _ = self.advise(self.checked(range), Advice::LinuxDontNeed);
    }

    /// Asks that the pages come from NUMA node `node` as long as it has any. Must precede the first touch.
    pub(super) fn prefer(&self, node: u32) -> io::Result<()> {
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
                self.mapped_start.as_ptr(),
                self.mapped_len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                mask.len() * bits_a_word as usize + 1,
                0usize,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn checked(&self, range: ByteRange) -> std::ops::Range<usize> {
        let end = usize::try_from(range.end()).unwrap_or(usize::MAX);
        assert!(end <= self.len, "range {range} of a mapping of {} bytes", self.len);
        usize::try_from(range.start()).unwrap_or(end)..end
    }

    /// `range`, beginning at a page: larger ones than 4 KiB exist.
    fn whole_pages(&self, range: ByteRange) -> std::ops::Range<usize> {
        let range = self.checked(range);
        let page = rustix::param::page_size();
        range.start / page * page..range.end
    }

    fn advise_all(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: exactly what was mapped, and advice that changes no bytes: see the two callers.
        unsafe { mm::madvise(self.mapped_start.as_ptr().cast(), self.mapped_len, advice)? };
        Ok(())
    }

    fn advise(&self, range: std::ops::Range<usize>, advice: Advice) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let address = self.pointer(range.start).as_ptr().cast::<c_void>();
        // SAFETY: the range lies in this mapping, which nobody else maps or unmaps. Only `LinuxDontNeed` changes
        // bytes, and `release` passes its condition on to its caller.
        unsafe { mm::madvise(address, range.len(), advice)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.only_in.is_some_and(|process| process != std::process::id()) {
            // A child never had it, and may have mapped something else at its place.
            return;
        }
        // SAFETY: exactly what was mapped, unmapped once; every pointer into it is held by something that holds
        // this mapping too.
        let result = unsafe { mm::munmap(self.mapped_start.as_ptr().cast(), self.mapped_len) };
        debug_assert!(result.is_ok(), "munmap: {result:?}");
    }
}

fn non_null(address: *mut c_void) -> io::Result<NonNull<u8>> {
    NonNull::new(address.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
}
