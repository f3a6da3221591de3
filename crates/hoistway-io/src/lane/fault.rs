//! A lane that fails on purpose: the test bench of everything that handles completions.
//!
//! Only with the feature `fault-injection`. Whatever a fault withholds from the caller is overwritten with a
//! pattern first, so that code which believes a failed read delivers wrong bytes, not right ones by luck.
#![forbid(unsafe_code)]

use super::{Done, Lane};
use crate::{
    executor::Carried,
    sys::files::{BROKEN, REFUSED, again, interrupted},
};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Waker,
    time::Duration,
};

/// The fault of one read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Only this many bytes arrive; 0 looks like the end of the file.
    Short(usize),
    /// The drive fails the read.
    Broken,
    /// The read is interrupted before it brings a byte.
    Interrupted,
    /// The system asks for another attempt.
    Again,
    /// The file system takes no direct reads of the file.
    Refused,
    /// The read takes this much longer.
    Delay(Duration),
    /// The lane fails, and does not tell what became of the read.
    Lost,
}

impl Fault {
    /// Returns the error that the read ends with, if it does.
    fn error(&self) -> Option<io::Error> {
        Some(match self {
            Self::Broken => io::Error::from_raw_os_error(BROKEN),
            Self::Interrupted => interrupted(),
            Self::Again => again(),
            Self::Refused => io::Error::from_raw_os_error(REFUSED),
            Self::Short(_) | Self::Delay(_) | Self::Lost => return None,
        })
    }

    /// Returns the system's number of the error that the read ends with, if it has one.
    pub fn errno(&self) -> Option<i32> {
        self.error()?.raw_os_error()
    }
}

/// Decides the fault of each read, by its number (counted over all lanes, from 0) and its offset in the file.
#[derive(Clone)]
pub struct FaultScript {
    decide: Arc<dyn Fn(u64, u64) -> Option<Fault> + Send + Sync>,
    before: Option<Arc<dyn Fn() + Send + Sync>>,
    reads: Arc<AtomicU64>,
}

impl FaultScript {
    /// A script that asks `decide(number, offset)` for each read.
    pub fn new(decide: impl Fn(u64, u64) -> Option<Fault> + Send + Sync + 'static) -> Self {
        Self { decide: Arc::new(decide), before: None, reads: Arc::default() }
    }

    /// Calls `act` on the thread of a lane before the lane makes reads that it was given.
    #[must_use]
    pub fn before_reads(self, act: impl Fn() + Send + Sync + 'static) -> Self {
        Self { before: Some(Arc::new(act)), ..self }
    }

    /// Reads that were made under this script.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Lets a lane fail by this script.
    pub fn wrap<T: Spoil + 'static>(&self, lane: Box<dyn Lane<T>>) -> Box<dyn Lane<T>> {
        Box::new(FaultyLane { lane, script: self.clone() })
    }
}

impl std::fmt::Debug for FaultScript {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultScript").field("reads", &self.reads()).finish_non_exhaustive()
    }
}

/// An operation whose bytes can be overwritten.
pub trait Spoil {
    /// Where it begins in its file.
    fn offset(&self) -> u64;

    /// Overwrites what it has brought, but for the first `kept` bytes.
    fn spoil(&mut self, kept: usize, pattern: u8);
}

impl<O: Spoil> Spoil for Carried<O> {
    fn offset(&self) -> u64 {
        self.content.offset()
    }

    fn spoil(&mut self, kept: usize, pattern: u8) {
        self.content.spoil(kept, pattern);
    }
}

/// Another lane, with faults.
struct FaultyLane<T> {
    lane: Box<dyn Lane<T>>,
    script: FaultScript,
}

impl<T: Spoil> Lane<T> for FaultyLane<T> {
    fn capacity(&self) -> usize {
        self.lane.capacity()
    }

    fn allowed(&self) -> usize {
        self.lane.allowed()
    }

    fn in_flight(&self) -> usize {
        self.lane.in_flight()
    }

    fn push(&mut self, op: T) {
        self.lane.push(op);
    }

    fn waker(&self) -> Option<Waker> {
        self.lane.waker()
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done<T>>) -> io::Result<()> {
        let before = done.len();
        if let Some(act) = &self.script.before {
            act();
        }
        self.lane.submit_and_wait(done)?;
        for Done { op, result } in &mut done[before..] {
            let number = self.script.reads.fetch_add(1, Ordering::Relaxed);
            let Some(fault) = (self.script.decide)(number, op.offset()) else {
                continue;
            };
            match fault {
                Fault::Delay(time) => std::thread::sleep(time),
                Fault::Lost => return Err(io::Error::other("the lane tells nothing any more")),
                _ => {}
            }
            let (kept, outcome) = match (fault.error(), &fault, &*result) {
                (Some(error), ..) => (0, Err(error)),
                (None, Fault::Short(limit), Ok(count)) => (*count.min(limit), Ok(*count.min(limit))),
                (None, ..) => continue,
            };
            op.spoil(kept, 0xA5);
            *result = outcome;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error that callers receive: the system's, with its number if it has one.
    #[test]
    fn faults_are_errors_of_the_system() {
        let kinds = [Fault::Interrupted, Fault::Again].map(|fault| fault.error().unwrap().kind());
        assert_eq!(kinds, [io::ErrorKind::Interrupted, io::ErrorKind::WouldBlock]);
        #[cfg(target_os = "linux")]
        assert_eq!(
            [Fault::Interrupted, Fault::Again, Fault::Broken, Fault::Refused].map(|fault| fault.errno()),
            [libc::EINTR, libc::EAGAIN, libc::EIO, libc::EINVAL].map(Some)
        );
        assert!(Fault::Broken.errno().is_some() && Fault::Short(1).errno().is_none());
    }
}
