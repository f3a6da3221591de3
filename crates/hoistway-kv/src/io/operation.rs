//! What lanes carry of a transfer: one step at a time, and its memory.
#![allow(unsafe_code)]

use super::{
    Direction, Failure, memory,
    plan::Step,
    staging::StagingLease,
    transfer::{Kept, Transfer},
};
use crate::disk::DataFile;
use hoistway_io::{
    file::Access,
    lane::{Attempt, MovesPieces, Outcome, Progress},
};
use std::{io, sync::Arc};

/// A share of a transfer: it carries out steps one after the other, as long as there are any.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) transfer: Arc<Transfer>,
    /// The caller's memory stays until this is dropped.
    pub(super) kept: Kept,
    /// The step that it has taken.
    pub(super) step: Option<Step>,
    pub(super) lease: StagingLease,
    /// Of the step that a lane has.
    carried: Option<Carried>,
}

/// How far a step has come.
#[derive(Debug)]
struct Carried {
    file: Arc<DataFile>,
    access: Access,
    progress: Progress,
    /// The memory that the next attempt fills or writes.
    segments: Vec<libc::iovec>,
}

// SAFETY: the segments are memory of the lease, which is the operation's, and memory of the caller's, which any thread may
// use until `kept` is dropped.
unsafe impl Send for Carried {}

/// What comes of an attempt.
#[derive(Debug)]
pub(super) enum Attempted {
    /// All bytes of the step were moved.
    Complete,
    /// Another attempt is to move what is missing.
    Again,
    /// Trying again will not help.
    Failed(Failure),
}

impl Operation {
    pub(super) fn new(transfer: &Arc<Transfer>) -> Self {
        let (transfer, kept) = (transfer.clone(), transfer.kept());
        Self { transfer, kept, step: None, lease: StagingLease::default(), carried: None }
    }

    /// Aims the first attempt at its step.
    pub(super) fn aim(&mut self, file: Arc<DataFile>) {
        let access = if file.direct().is_ok() { Access::Direct } else { Access::Buffered };
        self.carried = Some(Carried { file, access, progress: Progress::default(), segments: Vec::new() });
        self.aim_again();
    }

    fn aim_again(&mut self) {
        let (Some(step), Some(carried)) = (&self.step, &mut self.carried) else { return };
        let end = match (self.transfer.direction, carried.access) {
            // Direct reads take whole blocks.
            (Direction::Read, Access::Buffered) => step.wanted(),
            _ => step.len,
        };
        let Progress { filled, .. } = carried.progress;
        (carried.progress.offset, carried.progress.position) = (step.offset + filled, filled as usize);
        carried.segments = memory::segments(step, &self.lease, filled..end);
    }

    /// How the bytes of the last attempt went.
    pub(super) fn access(&self) -> Access {
        self.carried.as_ref().map_or(Access::Buffered, |carried| carried.access)
    }

    /// Bytes of its step that were moved.
    pub(super) fn filled(&self) -> u64 {
        self.carried.as_ref().map_or(0, |carried| carried.progress.filled)
    }

    /// Notes what an attempt has moved, and aims the next one if there is to be one.
    pub(super) fn attempted(&mut self, result: io::Result<usize>) -> Attempted {
        let (Some(step), Some(carried)) = (&self.step, &mut self.carried) else {
            return Attempted::Failed(Failure::Io(io::ErrorKind::Unsupported.into()));
        };
        let Carried { file, access, progress, .. } = carried;
        let direction = self.transfer.direction;
        let wanted = if direction == Direction::Read { step.wanted() } else { step.len };
        let before = progress.filled;
        let outcome = progress.outcome(wanted, result, *access == Access::Direct);
        if direction == Direction::Read && outcome.is_short() && progress.filled == before {
            match file.buffered().metadata().map(|file| file.len()) {
                Ok(file_len) if file_len < step.offset + wanted => {
                    return Attempted::Failed(Failure::Short { file_len });
                }
                Ok(_) => {}
                Err(error) => return Attempted::Failed(Failure::Io(error)),
            }
        }
        match outcome {
            Outcome::Complete => return Attempted::Complete,
            Outcome::Short | Outcome::Interrupted => {}
            // Some file systems end direct transfers short of a last, partial block.
            Outcome::DirectEndsEarly { .. } => *access = Access::Buffered,
            Outcome::DirectRefused(error) => {
                file.refuse_direct(&error);
                *access = Access::Buffered;
            }
            Outcome::Failed(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let error = match direction {
                    Direction::Read => error,
                    Direction::Write => io::Error::new(
                        io::ErrorKind::WriteZero,
                        "the file takes no more bytes, although nothing is said to be wrong",
                    ),
                };
                return Attempted::Failed(Failure::Io(error));
            }
            Outcome::Failed(error) => return Attempted::Failed(Failure::Io(error)),
        }
        self.aim_again();
        Attempted::Again
    }

    /// The lane is done with the step.
    pub(super) fn landed(&mut self) -> Option<Step> {
        self.carried = None;
        self.step.take()
    }

    /// The file and the memory of the next attempt, for faults.
    #[cfg(feature = "fault-injection")]
    pub(super) fn attempt_mut(&mut self) -> Option<(&DataFile, Access, u64, &mut Vec<libc::iovec>)> {
        let Carried { file, access, progress, segments } = self.carried.as_mut()?;
        Some((file, *access, progress.offset, segments))
    }
}

// SAFETY: the file is held by the operation, and so are the list of segments, which is on the heap, and the lease; memory of
// the caller's is left alone until `kept` is dropped, by the contract of `Job`.
unsafe impl MovesPieces for Operation {
    fn next_attempt(&mut self) -> io::Result<Attempt<'_>> {
        let Carried { file, access, progress, segments } =
            self.carried.as_ref().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        Ok(Attempt {
            file: file.descriptor(*access),
            direction: self.transfer.direction,
            offset: progress.offset,
            pieces: segments,
        })
    }
}
