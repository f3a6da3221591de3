//! Host memory that belongs to the caller.
#![allow(unsafe_code)]

use crate::{ByteRange, sys::pages};
use hoistway_io::memory::HUGE_PAGE_BYTES;
use std::ptr::NonNull;

/// Gaps between ranges that are advised along: allocators pad what they give.
const PADDING_BYTES: u64 = 64 << 10;

/// Bytes that the caller lends.
#[derive(Debug)]
pub(super) struct Borrowed(NonNull<u8>);

// SAFETY: plain memory with no thread affinity, which its lender leaves alone; the right to touch each byte is decided
// by the types that hold it.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

impl Borrowed {
    /// # Safety
    /// The memory from `start` on, as much of it as will be asked for, must be there.
    pub(super) unsafe fn new(start: NonNull<u8>) -> Self {
        Self(start)
    }

    /// Address of byte `offset`, which must not lie past the end of what was lent.
    pub(super) fn pointer(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: inside what was lent, or one past its end.
        unsafe { self.0.add(offset) }
    }
}

/// Advises huge pages for memory that is about to be written, given as ranges of addresses: first touch by small pages
/// can take longer than the reading. Whatever lies in the gaps of padding between two ranges is advised along.
pub(crate) fn advise_huge_pages(mut ranges: Vec<ByteRange>) {
    ranges.sort_unstable();
    let mut runs: Vec<ByteRange> = Vec::new();
    for range in ranges {
        match runs.last_mut() {
            Some(last) if range.start() <= last.end().saturating_add(PADDING_BYTES) => {
                let end = last.end().max(range.end());
                *last = ByteRange::new(last.start(), end).unwrap_or(*last);
            }
            _ => runs.push(range),
        }
    }
    let huge = HUGE_PAGE_BYTES as u64;
    for run in runs {
        let (start, end) = (run.start().next_multiple_of(huge), run.end() / huge * huge);
        if start < end {
            pages::advise_huge_at(start as usize..end as usize);
        }
    }
}
