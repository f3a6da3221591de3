//! Addresses that look like a GPU's memory: the host faults on them, and the stand-in has a second way in.

use crate::system::{self, Sparse, WINDOW_BYTES};
use std::io;

/// Where a window starts at most beyond what it must: allocations may ask for this alignment.
const ALIGNMENT: usize = 2 << 20;

/// One device's addresses. Lives as long as the process: streams may still write to it at exit.
pub(crate) struct Window {
    base: usize,
    shadow: Sparse,
}

impl Window {
    pub(crate) fn new() -> io::Result<Window> {
        let shadow = Sparse::new(WINDOW_BYTES)?;
        let inaccessible = system::reserve(WINDOW_BYTES + ALIGNMENT)?;
        Ok(Window { base: inaccessible.next_multiple_of(ALIGNMENT), shadow })
    }

    pub(crate) fn len(&self) -> u64 {
        WINDOW_BYTES as u64
    }

    /// The device address `offset` bytes into the window.
    pub(crate) fn address(&self, offset: u64) -> u64 {
        self.base as u64 + offset
    }

    /// Where a device address lies in the window, if it does.
    pub(crate) fn offset(&self, address: u64) -> Option<u64> {
        address.checked_sub(self.base as u64).filter(|offset| *offset < WINDOW_BYTES as u64)
    }

    /// Where the host finds the byte at `offset`.
    pub(crate) fn shadow(&self, offset: u64) -> *mut u8 {
        (self.shadow.address() + offset as usize) as *mut u8
    }

    /// Puts pages behind a range.
    pub(crate) fn provide(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shadow.provide(offset, len)
    }

    /// Gives the pages of a range back to the system.
    pub(crate) fn discard(&self, offset: u64, len: u64) {
        self.shadow.discard(offset, len);
    }
}
