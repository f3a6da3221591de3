//! Lanes of one operation at a time: the thread that waits for it carries it out. Several threads with such a lane make a
//! pool.
#![forbid(unsafe_code)]

use super::{Done, FileRead, Lane, ReadsFile};
use crate::file;
use std::io;

/// A way to read that comes back when it is done.
pub trait BlockingRead<T> {
    /// Reads once. Returns how many bytes came.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, op: &mut T) -> io::Result<usize>;
}

/// One thread's share of a pool.
#[derive(Debug)]
pub struct BlockingLane<R, T> {
    backend: R,
    pending: Option<T>,
}

impl<R, T> BlockingLane<R, T> {
    /// Makes a lane that reads this way.
    pub fn new(backend: R) -> Self {
        Self { backend, pending: None }
    }
}

impl<R: BlockingRead<T>, T> Lane<T> for BlockingLane<R, T> {
    fn capacity(&self) -> usize {
        1
    }

    fn in_flight(&self) -> usize {
        usize::from(self.pending.is_some())
    }

    fn push(&mut self, op: T) {
        self.pending = Some(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        if let Some(mut op) = self.pending.take() {
            let result = self.backend.read(&mut op);
            done.push(Done { op, result });
        }
        Ok(())
    }
}

/// Reads that wait: `pread`, direct or through the page cache.
#[derive(Debug, Default)]
pub struct Pread;

impl<T: ReadsFile> BlockingRead<T> for Pread {
    fn read(&self, op: &mut T) -> io::Result<usize> {
        let FileRead { file, offset, target } = op.next_read()?;
        file::read_at(file, target, offset)
    }
}
