//! Reads and writes of memory in pieces: several at a time by a ring, or one by a thread that waits.
#![allow(unsafe_code)]

use super::UringLane;
use crate::{
    executor::Carried,
    lane::{BlockingRead, Done, Lane},
    sys::pieces::{self, Piece},
};
use hoistway_device::Unavailable;
use io_uring::{opcode, types};
use std::{fs::File, io, os::fd::AsRawFd, task::Waker};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From a file to memory.
    Read,
    /// From memory to a file.
    Write,
}

/// The memory and bytes of an operation's next attempt.
#[derive(Debug)]
pub struct Attempt<'a> {
    /// The file.
    pub file: &'a File,
    /// Which way bytes go.
    pub direction: Direction,
    /// Offset of the first byte.
    pub offset: u64,
    /// The memory, in the order of the file. At most 1024 pieces.
    pub pieces: &'a [Piece],
}

/// An operation that reads or writes a file, from or to memory in pieces.
///
/// # Safety
/// The file and the list of pieces that [`next_attempt`](Self::next_attempt) gives stay where they are, and the pieces
/// valid, until the operation is dropped, also while it is moved. Nothing else uses memory that is read to until then, or
/// writes to memory that is written from.
pub unsafe trait MovesPieces {
    /// The pieces that are moved next.
    ///
    /// # Errors
    /// Why nothing can be moved.
    fn next_attempt(&mut self) -> io::Result<Attempt<'_>>;
}

// SAFETY: the operation is a part of it, and what that refers to does not move with it.
unsafe impl<O: MovesPieces> MovesPieces for Carried<O> {
    fn next_attempt(&mut self) -> io::Result<Attempt<'_>> {
        self.content.next_attempt()
    }
}

/// A ring for operations whose memory is in pieces. Other threads can wake it.
pub struct VectoredRing<T>(UringLane<T>);

impl<T> VectoredRing<T> {
    /// A ring for up to `depth` operations. Must be used by the thread that made it.
    ///
    /// # Errors
    /// Why no ring can be used here, and what changes that.
    pub fn new(depth: usize) -> Result<Self, Unavailable> {
        UringLane::wakeable(depth, [opcode::Readv::CODE, opcode::Writev::CODE]).map(Self)
    }
}

impl<T: MovesPieces> Lane<T> for VectoredRing<T> {
    fn capacity(&self) -> usize {
        self.0.depth()
    }

    fn in_flight(&self) -> usize {
        self.0.count()
    }

    fn push(&mut self, op: T) {
        let entry = |op: &mut T| {
            let Attempt { file, direction, offset, pieces } = op.next_attempt()?;
            let count =
                u32::try_from(pieces.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            let file = types::Fd(file.as_raw_fd());
            Ok(match direction {
                Direction::Read => opcode::Readv::new(file, pieces.as_ptr(), count).offset(offset).build(),
                Direction::Write => opcode::Writev::new(file, pieces.as_ptr(), count).offset(offset).build(),
            })
        };
        // SAFETY: by the contract of `MovesPieces`.
        unsafe { self.0.submit(op, entry) };
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        self.0.wait(done)
    }

    fn waker(&self) -> Option<Waker> {
        self.0.waker()
    }
}

/// Reads and writes that wait: `preadv` and `pwritev`.
#[derive(Debug, Default)]
pub struct VectoredCall;

impl<T: MovesPieces> BlockingRead<T> for VectoredCall {
    fn read(&self, op: &mut T) -> io::Result<usize> {
        let attempt = op.next_attempt()?;
        // SAFETY: by the contract of `MovesPieces`; the operation is borrowed until the call is over.
        unsafe {
            match attempt.direction {
                Direction::Read => pieces::read(attempt.file, attempt.pieces, attempt.offset),
                Direction::Write => pieces::write(attempt.file, attempt.pieces, attempt.offset),
            }
        }
    }
}
