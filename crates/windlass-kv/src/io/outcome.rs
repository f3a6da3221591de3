//! What an attempt to read or write that ended asks for next: decided here once, for all lanes.
#![forbid(unsafe_code)]

use super::{Direction, Failure, lane::Op};
use crate::layout::BLOCK_LEN;
use std::{io, thread, time::Duration};
use windlass_io::file::{Access, is_refusal_of_direct, is_transient};

/// Attempts in a row without progress before an error is final.
const MAX_STALLS: u32 = 100;
/// Of these, how many may move nothing without an error.
const MAX_EMPTY_STALLS: u32 = 3;
/// Pause after the system said "try again".
const AGAIN_PAUSE: Duration = Duration::from_millis(1);

/// What comes next.
#[derive(Debug)]
pub(super) enum Next {
    /// All bytes were moved.
    Complete,
    /// Another attempt, at what is missing.
    Again,
    /// Trying again will not help.
    Failed(Failure),
}

/// Notes in `op` what an attempt has moved.
pub(super) fn settle(op: &mut Op, result: io::Result<usize>) -> Next {
    match result {
        Ok(count) => moved(op, count as u64),
        Err(error) if is_transient(&error) => {
            op.stalls += 1;
            if op.stalls > MAX_STALLS {
                return Next::Failed(Failure::Io(error));
            }
            if error.kind() == io::ErrorKind::WouldBlock {
                thread::sleep(AGAIN_PAUSE);
            }
            Next::Again
        }
        Err(error) if op.access == Access::Direct && is_refusal_of_direct(&error) => {
            op.file.refuse_direct(&error);
            op.access = Access::Buffered;
            Next::Again
        }
        Err(error) => Next::Failed(Failure::Io(error)),
    }
}

fn moved(op: &mut Op, count: u64) -> Next {
    let wanted = match op.direction {
        Direction::Read => op.step.wanted(),
        Direction::Write => op.step.len,
    };
    let reached = (op.filled + count).min(wanted);
    if reached == wanted {
        return Next::Complete;
    }
    // A direct transfer goes on at a whole block.
    let filled = match op.access {
        Access::Direct => ((op.step.offset + reached) / BLOCK_LEN * BLOCK_LEN).saturating_sub(op.step.offset),
        Access::Buffered => reached,
    };
    if filled > op.filled {
        op.filled = filled;
        op.stalls = 0;
        return Next::Again;
    }
    op.stalls += 1;
    if op.direction == Direction::Read {
        match op.file.buffered().metadata().map(|file| file.len()) {
            Ok(file_len) if file_len < op.step.offset + wanted => {
                return Next::Failed(Failure::Short { file_len });
            }
            Ok(_) => {}
            Err(error) => return Next::Failed(Failure::Io(error)),
        }
    }
    if op.access == Access::Direct && op.stalls > 1 {
        // Some file systems end direct transfers short of a last, partial block.
        op.access = Access::Buffered;
        return Next::Again;
    }
    if op.stalls > MAX_EMPTY_STALLS {
        let (kind, what) = match op.direction {
            Direction::Read => {
                (io::ErrorKind::UnexpectedEof, "the file ends early, although its length says otherwise")
            }
            Direction::Write => (
                io::ErrorKind::WriteZero,
                "the file takes no more bytes, although nothing is said to be wrong",
            ),
        };
        return Next::Failed(Failure::Io(io::Error::new(kind, what)));
    }
    Next::Again
}
