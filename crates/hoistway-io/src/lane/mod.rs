//! Lanes carry operations: a ring, a completion port, a pool's thread, a copy from the page cache. One thread owns a
//! lane.
#![deny(unsafe_code)]

mod blocking;
mod cached;
#[cfg(feature = "fault-injection")]
pub mod fault;
mod outcome;
#[cfg(windows)]
mod port;
#[cfg(target_os = "linux")]
mod ring;

pub use blocking::{BlockingLane, BlockingRead, Pread};
pub use cached::CachedCopy;
pub use outcome::{Outcome, Progress};
#[cfg(windows)]
pub use port::PortLane;
#[cfg(target_os = "linux")]
pub use ring::{
    UringLane,
    vectored::{Attempt, Direction, MovesPieces, VectoredCall, VectoredRing},
};

use crate::executor::Carried;
use std::{fs::File, io, mem, task::Waker};

/// An operation that the lane has completed.
#[derive(Debug)]
pub struct Done<T> {
    /// The operation, with its memory.
    pub op: T,
    /// How many bytes it moved, or the system's error.
    pub result: io::Result<usize>,
}

/// A queue of operations with one owner. Operations own their memory, and complete in any order.
///
/// A lane that is dropped with operations in flight waits for them, or leaks them: it never frees memory that the system
/// may still write to.
pub trait Lane<T> {
    /// Returns how many operations may be in flight at once.
    fn capacity(&self) -> usize;

    /// Returns how many operations should be in flight now: at least 1, at most the capacity.
    fn allowed(&self) -> usize {
        self.capacity()
    }

    /// Returns how many operations were pushed and have not come back.
    fn in_flight(&self) -> usize;

    /// Adds an operation. Only while `in_flight() < capacity()`.
    fn push(&mut self, op: T);

    /// Waits until at least one operation is done, and appends those that are. Returns at once if none is in flight. May
    /// return with none: a lane with a [waker](Lane::waker) does so once it is woken.
    ///
    /// # Errors
    /// If the lane cannot find out what becomes of its operations. It is of no use any more.
    fn submit_and_wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()>;

    /// Returns what ends [`Lane::submit_and_wait`] from another thread, now or when it is next called. `None` if only
    /// operations do.
    fn waker(&self) -> Option<Waker> {
        None
    }
}

impl<T, L: Lane<T> + ?Sized> Lane<T> for Box<L> {
    fn capacity(&self) -> usize {
        (**self).capacity()
    }

    fn allowed(&self) -> usize {
        (**self).allowed()
    }

    fn in_flight(&self) -> usize {
        (**self).in_flight()
    }

    fn push(&mut self, op: T) {
        (**self).push(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        (**self).submit_and_wait(done)
    }

    fn waker(&self) -> Option<Waker> {
        (**self).waker()
    }
}

/// A lane for threads whose handler does all of an operation as it begins. What is pushed nevertheless fails.
#[derive(Debug)]
pub struct NoLane<T>(Option<T>);

impl<T> Default for NoLane<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> Lane<T> for NoLane<T> {
    fn capacity(&self) -> usize {
        1
    }

    fn in_flight(&self) -> usize {
        self.0.iter().len()
    }

    fn push(&mut self, op: T) {
        self.0 = Some(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        done.extend(self.0.take().map(|op| Done { op, result: Err(io::ErrorKind::Unsupported.into()) }));
        Ok(())
    }
}

/// The next attempt of a read.
#[derive(Debug)]
pub struct FileRead<'a> {
    /// The file.
    pub file: &'a File,
    /// Offset of the first byte.
    pub offset: u64,
    /// The memory that is filled.
    pub target: &'a mut [u8],
}

/// An operation that reads a file into host memory that it owns.
///
/// # Safety
/// The file that [`next_read`](Self::next_read) gives stays open, and the memory stays valid and where it is, until the
/// operation is dropped, also while it is moved. Nothing else reads or writes that memory until then. If the operation is
/// [abandoned](Self::abandon), all of this holds for ever.
#[allow(unsafe_code)]
pub unsafe trait ReadsFile {
    /// Returns the next attempt.
    ///
    /// # Errors
    /// Why it cannot be read: the file is not open for it, or the memory is too short.
    fn next_read(&mut self) -> io::Result<FileRead<'_>>;

    /// Gives up an operation whose end cannot be known: the system may still carry it out. Leaks its file and its memory, and
    /// may drop the rest after that. By default, all is leaked.
    fn abandon(self)
    where
        Self: Sized,
    {
        mem::forget(self);
    }
}

// SAFETY: the operation is a part of it, and what that refers to does not move with it.
#[allow(unsafe_code)]
unsafe impl<O: ReadsFile> ReadsFile for Carried<O> {
    fn next_read(&mut self) -> io::Result<FileRead<'_>> {
        self.content.next_read()
    }

    fn abandon(self) {
        self.content.abandon();
    }
}
