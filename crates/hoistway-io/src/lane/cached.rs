//! `cached`: copies what the page cache holds and never waits for a disk (`preadv2(RWF_NOWAIT)`).
//!
//! The copy is the proof: the kernel stops at the first page that it does not hold.
#![forbid(unsafe_code)]

use super::{BlockingRead, FileRead, ReadsFile};
use crate::file;
use std::io;

/// Bytes asked for at once. A miss makes the kernel read ahead up to the end of the request, so a request bounds
/// what a wrong guess costs; below 1 MiB the calls themselves show.
const STEP_BYTES: usize = 1 << 20;

/// Delivers as many bytes as are cached from the read's start; 0 if its first page is not.
#[derive(Debug, Default)]
pub struct CachedCopy;

impl<T: ReadsFile> BlockingRead<T> for CachedCopy {
    fn read(&self, op: &mut T) -> io::Result<usize> {
        let FileRead { file, offset, target } = op.next_read()?;
        let mut copied = 0;
        while copied < target.len() {
            let end = target.len().min(copied + STEP_BYTES);
            let step = &mut target[copied..end];
            copied += file::read_cached_at(file, step, offset + copied as u64)?;
            if copied < end {
                break;
            }
        }
        Ok(copied)
    }
}
