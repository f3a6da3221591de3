//! Puts the runs of a part of a tensor where they belong, from reads of all that lies between its first byte and its last.
#![allow(unsafe_code)]

use crate::{ByteRange, plan::Runs, read::SinkError};
use std::ptr;

/// Memory of the caller's that takes the runs, one after the other.
#[derive(Clone, Debug)]
pub(super) struct Scatter {
    address: u64,
    runs: Runs,
}

impl Scatter {
    /// # Safety
    /// As many bytes from `address` on as all runs have must be valid for writes, and nothing else may use them, until the
    /// last call of [`Scatter::take`] has ended.
    pub(super) unsafe fn new(address: u64, runs: Runs) -> Self {
        Self { address, runs }
    }

    /// Takes `bytes`, which lie at `offset` of the file. No byte may be given twice.
    pub(super) fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        let window = ByteRange::at(offset, bytes.len() as u64).ok_or("a read ends past 2^64")?;
        for (part, before) in self.runs.within(window) {
            let start = (part.start() - offset) as usize;
            let source = bytes.get(start..start + part.len() as usize).ok_or("a run leaves its read")?;
            let target: *mut u8 = ptr::with_exposed_provenance_mut((self.address + before) as usize);
            // SAFETY: `before` bytes of the runs lie before this part of them, so it is inside the memory that `new` was
            // promised; threads that take other bytes write to other places.
            unsafe { ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
        }
        Ok(())
    }

    /// Bytes of runs in a part of the file.
    pub(super) fn count(&self, window: ByteRange) -> u64 {
        self.runs.within(window).map(|(part, _)| part.len()).sum()
    }
}
