//! Lanes of one read at a time: whoever waits for it makes it. Several threads with such a lane make a pool.
#![forbid(unsafe_code)]

use super::{Done, Lane, ReadOp};
use std::io;

/// A way to read that comes back when it is done.
pub(crate) trait BlockingRead {
    /// Reads once, and says how many bytes came.
    fn read(&self, op: &mut ReadOp) -> io::Result<usize>;
}

/// One thread's share of a pool.
#[derive(Debug, Default)]
pub(crate) struct BlockingLane<R> {
    backend: R,
    pending: Option<ReadOp>,
}

impl<R> BlockingLane<R> {
    pub(crate) fn new(backend: R) -> Self {
        Self { backend, pending: None }
    }
}

impl<R: BlockingRead> Lane for BlockingLane<R> {
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
            let result = self.backend.read(&mut op);
            done.push(Done { op, result });
        }
        Ok(())
    }
}
