//! `cached`: copies what the page cache holds and never waits for a disk (`preadv2(RWF_NOWAIT)`).
//!
//! The copy is its own proof: the kernel stops at the first page that it does not hold.
#![forbid(unsafe_code)]

use super::{Done, Lane, ReadOp};
use rustix::io::ReadWriteFlags;
use std::io::{self, IoSliceMut};

/// Bytes asked for at once. A miss makes the kernel read ahead up to the end of the request, so a request bounds
/// what a wrong guess costs; below 1 MiB the calls themselves show.
const STEP_BYTES: usize = 1 << 20;

/// A lane that delivers as many bytes as are cached from the read's start; 0 if its first page is not.
#[derive(Debug, Default)]
pub(crate) struct CachedLane {
    pending: Option<ReadOp>,
}

impl Lane for CachedLane {
    fn capacity(&self) -> usize {
        1
    }

    fn in_flight(&self) -> usize {
        usize::from(self.pending.is_some())
    }

    fn push(&mut self, op: ReadOp) {
        self.pending = Some(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        if let Some(mut op) = self.pending.take() {
            let result = copy_cached(&mut op);
            done.push(Done { op, result });
        }
        Ok(())
    }
}

fn copy_cached(op: &mut ReadOp) -> io::Result<usize> {
    let source = op.source.clone();
    let offset = op.offset;
    let target = op.target()?;
    let mut copied = 0;
    while copied < target.len() {
        let end = target.len().min(copied + STEP_BYTES);
        let step = &mut [IoSliceMut::new(&mut target[copied..end])];
        match rustix::io::preadv2(
            source.buffered_file(),
            step,
            offset + copied as u64,
            ReadWriteFlags::NOWAIT,
        ) {
            Ok(0) | Err(rustix::io::Errno::AGAIN) => break,
            Ok(count) => {
                copied += count;
                if copied < end {
                    break;
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(copied)
}
