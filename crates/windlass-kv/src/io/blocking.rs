//! `threads`: a read or write at a time, made by the worker itself.
#![allow(unsafe_code)]

use super::{
    Direction,
    lane::{Done, Op},
    wake::Wake,
};
use std::{io, os::fd::AsRawFd};

/// A lane for one operation.
#[derive(Debug, Default)]
pub(super) struct BlockingLane(Option<Op>);

impl BlockingLane {
    pub(super) fn in_flight(&self) -> usize {
        usize::from(self.0.is_some())
    }

    pub(super) fn push(&mut self, op: Op) {
        self.0 = Some(op);
    }

    /// Makes the operation; if there is none, waits for `wake`.
    pub(super) fn wait(&mut self, wake: &Wake, done: &mut Vec<Done>) {
        let Some(op) = self.0.take() else {
            wake.wait();
            return;
        };
        let result = transfer(&op);
        done.push(Done { op, result });
    }
}

fn transfer(op: &Op) -> io::Result<usize> {
    let file = op.file.descriptor(op.access).as_raw_fd();
    let too_large = || io::Error::from(io::ErrorKind::InvalidInput);
    let offset = op.offset().try_into().map_err(|_| too_large())?;
    let count = op.segments.len().try_into().map_err(|_| too_large())?;
    // SAFETY: the segments are memory of the lease that `op` holds, and memory that the transfer's caller lets be read
    // or written until the transfer ends, which is after this.
    let result = unsafe {
        match op.direction {
            Direction::Read => libc::preadv(file, op.segments.as_ptr(), count, offset),
            Direction::Write => libc::pwritev(file, op.segments.as_ptr(), count, offset),
        }
    };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
