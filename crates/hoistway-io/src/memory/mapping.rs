//! Memory in pages that arenas and slots are made of. Everything above deals in offsets into a [`Mapping`].
#![allow(unsafe_code)]

use crate::{ByteRange, sys::pages::Pages};
use std::{fs::File, io, ops::Range, ptr::NonNull};

/// Size of the pages that arenas are made of where the system allows: x86-64's and most of arm64's huge page.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The pages of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Advised to be transparent huge pages. The last one may be in memory as a whole, though only a part of it is used.
    TransparentHuge,
    /// Advised to be transparent huge pages, but for the end that fills none: no more is in memory than was asked for. Each mapping is
    /// an area of its own then.
    HugeWithin,
    /// From the system's reserve of huge pages (`vm.nr_hugepages`).
    ReservedHuge,
    /// Whatever the system does by itself.
    Default,
}

/// What a report says of memory for which the system refused a NUMA node.
pub fn off_node(memory: &str, node: u32, why: &io::Error) -> String {
    let fix = match why.kind() {
        _ if !cfg!(target_os = "linux") => "",
        io::ErrorKind::PermissionDenied => {
            "; allow mbind in the container's seccomp profile (docker run --cap-add SYS_NICE)"
        }
        io::ErrorKind::Unsupported => "; the kernel has no NUMA, or a seccomp profile refuses mbind",
        _ => "",
    };
    format!("{memory} may be on any node: the system gave none on NUMA node {node}: {why}{fix}")
}

/// A private mapping: anonymous memory, or a copy-on-write view of a file.
#[derive(Debug)]
pub struct Mapping {
    pages: Pages,
    /// Its start in its pages; the bytes before align it.
    skip: usize,
    len: usize,
}

impl Mapping {
    /// `len` bytes of zeroed memory. Aligned to a huge page if at least one fits.
    ///
    /// # Errors
    /// The system's.
    pub fn anonymous(len: usize, kind: PageKind) -> io::Result<Self> {
        Self::allocated(len, kind, None)
    }

    /// As [`anonymous`](Self::anonymous), of pages that come from NUMA node `node` as long as it has any.
    ///
    /// # Errors
    /// The system's, also if there is no such node.
    pub fn anonymous_on(len: usize, kind: PageKind, node: u32) -> io::Result<Self> {
        Self::allocated(len, kind, Some(node))
    }

    /// As [`anonymous_on`](Self::anonymous_on), or of pages of any node where the system refuses that one, with its error: a node's
    /// refusal costs speed, no bytes.
    ///
    /// # Errors
    /// The system's, if it has no memory.
    pub fn anonymous_near(
        len: usize,
        kind: PageKind,
        node: Option<u32>,
    ) -> io::Result<(Self, Option<io::Error>)> {
        match node.map(|node| Self::anonymous_on(len, kind, node)) {
            Some(Ok(mapping)) => Ok((mapping, None)),
            Some(Err(error)) => Ok((Self::anonymous(len, kind)?, Some(error))),
            None => Ok((Self::anonymous(len, kind)?, None)),
        }
    }

    fn allocated(len: usize, kind: PageKind, node: Option<u32>) -> io::Result<Self> {
        let overflow = || io::Error::from(io::ErrorKind::OutOfMemory);
        if kind == PageKind::ReservedHuge {
            // They come aligned.
            let len = len.checked_next_multiple_of(HUGE_PAGE_BYTES).ok_or_else(overflow)?;
            return Ok(Self { pages: Pages::reserved_huge(len, node)?, skip: 0, len });
        }
        if kind == PageKind::Default || len < HUGE_PAGE_BYTES {
            return Ok(Self { pages: Pages::new(len, node)?, skip: 0, len });
        }
        // More than asked for, of which an aligned part is used.
        let pages = Pages::new(len.checked_add(HUGE_PAGE_BYTES).ok_or_else(overflow)?, node)?;
        // All of it, slack included, so that neighbours become one area, unless a part is without: systems limit the number of
        // areas.
        let _ = pages.advise_huge();
        let misaligned = pages.start().addr().get() % HUGE_PAGE_BYTES;
        let skip = if misaligned == 0 { 0 } else { HUGE_PAGE_BYTES - misaligned };
        let whole = len - len % HUGE_PAGE_BYTES;
        if kind == PageKind::HugeWithin && whole < len {
            let _ = pages.refuse_huge(skip + whole..len + HUGE_PAGE_BYTES);
        }
        Ok(Self { pages, skip, len })
    }

    /// Reserves `len` bytes of address space. Only what is [committed](Self::commit) may be touched; it holds zeros then.
    ///
    /// # Errors
    /// The system's.
    pub fn reserve(len: usize) -> io::Result<Self> {
        Ok(Self { pages: Pages::reserve(len)?, skip: 0, len })
    }

    /// Makes `range` of a [reservation](Self::reserve) usable, widened to whole pages.
    ///
    /// # Errors
    /// The system's, if it has no memory for it.
    pub fn commit(&self, range: ByteRange) -> io::Result<()> {
        self.pages.commit(self.in_pages(range))
    }

    /// A private, writable view of the first `len` bytes of `file`.
    ///
    /// Pages are read when first touched. If the file shrinks, touching what is gone kills the process with
    /// `SIGBUS`: that is why no route but `mapped` uses this.
    ///
    /// # Errors
    /// The system's.
    pub fn of_file(file: &File, len: usize) -> io::Result<Self> {
        Ok(Self { pages: Pages::of_file(file, len)?, skip: 0, len })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of byte `offset`.
    pub fn pointer(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len, "offset {offset} of a mapping of {} bytes", self.len);
        // SAFETY: inside the pages or one past their end: they have `len` bytes from `skip` on, and it was checked above.
        unsafe { self.pages.start().add(self.skip + offset) }
    }

    /// Faults the pages of `range` in, writable, without changing their bytes.
    ///
    /// # Errors
    /// The system's; [`InvalidInput`](io::ErrorKind::InvalidInput) where it cannot do that.
    pub fn populate(&self, range: ByteRange) -> io::Result<()> {
        self.pages.populate(self.in_pages(range))
    }

    /// Reads the pages of `range` of a file mapping in.
    ///
    /// # Errors
    /// The system's; [`InvalidInput`](io::ErrorKind::InvalidInput) where it cannot do that.
    pub fn populate_for_reading(&self, range: ByteRange) -> io::Result<()> {
        self.pages.populate_for_reading(self.in_pages(range))
    }

    /// Faults everything in on any system, by writing zeros.
    pub fn fill_with_zeros(&mut self) {
        // SAFETY: all of the mapping, which the system has initialised; `&mut self` makes sure that nothing else
        // has got an address in it.
        unsafe { self.pointer(0).as_ptr().write_bytes(0, self.len) };
    }

    /// Leaves the memory out of what children of `fork` get.
    pub fn hide_from_children(&mut self) {
        self.pages.hide_from_children();
    }

    /// Gives the whole pages of `range` back to the system. Their bytes read as zero afterwards.
    ///
    /// # Safety
    /// No reference to these bytes may exist or be made later.
    pub unsafe fn release(&self, range: ByteRange) {
        // SAFETY: passed on.
        unsafe { self.pages.release(self.in_pages(range)) };
    }

    /// The place of `range` in the pages of the mapping.
    fn in_pages(&self, range: ByteRange) -> Range<usize> {
        let end = usize::try_from(range.end()).unwrap_or(usize::MAX);
        assert!(end <= self.len, "range {range} of a mapping of {} bytes", self.len);
        self.skip + usize::try_from(range.start()).unwrap_or(end)..self.skip + end
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn no_more_is_in_memory_than_was_asked_for() {
        const UNUSED: usize = 1 << 20;
        let len = 2 * HUGE_PAGE_BYTES - UNUSED;
        let mut resident = [0u8; UNUSED / 4096];
        let mut mappings = Vec::new();
        for _ in 0..8 {
            let mut mapping = Mapping::anonymous(len, PageKind::HugeWithin).unwrap();
            mapping.fill_with_zeros();
            // The rest of the last huge page, as far as it is in these pages.
            let rest = UNUSED.min(HUGE_PAGE_BYTES - mapping.skip);
            // SAFETY: behind its length the mapping has pages of the length of a huge one, but for those before it. There is a
            // byte for each page.
            let result = unsafe {
                let end = mapping.pages.start().add(mapping.skip + len);
                libc::mincore(end.as_ptr().cast(), rest, resident.as_mut_ptr())
            };
            assert_eq!(result, 0);
            let pages = resident.iter().filter(|page| **page & 1 != 0).count();
            assert_eq!(pages, 0, "{} bytes before it", mapping.skip);
            mappings.push(mapping);
        }
    }
}
