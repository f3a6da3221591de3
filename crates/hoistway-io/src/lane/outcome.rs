//! Decides what follows an attempt to read: once, for all lanes and all readers.
#![forbid(unsafe_code)]

use crate::{
    Alignment, ByteRange,
    file::{is_refusal_of_direct, is_transient},
};
use std::{io, thread, time::Duration};

/// Reads in a row without progress before an error is final.
const MAX_STALLS: u32 = 100;
/// Empty reads in a row, without an error, before the file counts as truncated.
const MAX_EMPTY_STALLS: u32 = 3;
/// Pause after the system said "try again".
const AGAIN_PAUSE: Duration = Duration::from_millis(1);

/// The outcome of one attempt.
#[derive(Debug)]
pub enum Outcome {
    /// All bytes are there.
    Complete,
    /// Some came; read on.
    Short,
    /// A direct read brought no byte, or again no whole block. Some file systems end these before the last, partial block.
    DirectEndsEarly {
        /// Whether direct reads will not bring the rest.
        is_final: bool,
    },
    /// Nothing came, and nothing is wrong; read again.
    Interrupted,
    /// The file system takes no direct reads after all.
    DirectRefused(io::Error),
    /// Reading again will not help.
    Failed(io::Error),
}

impl Outcome {
    /// Returns whether fewer bytes came than were asked for: the file may have changed.
    pub fn is_short(&self) -> bool {
        match self {
            Self::Short | Self::DirectEndsEarly { .. } => true,
            Self::Failed(error) => error.kind() == io::ErrorKind::UnexpectedEof,
            Self::Complete | Self::Interrupted | Self::DirectRefused(_) => false,
        }
    }
}

/// The progress of a read, and its next attempt once it was [aimed](Self::aim).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Offset in the file of the next attempt.
    pub offset: u64,
    /// Where in the buffer its first byte goes.
    pub position: usize,
    /// Bytes to read. May go past the end of the file: direct reads take whole blocks.
    pub len: usize,
    /// Bytes that are there, counted from the start of the read.
    pub filled: u64,
    /// Attempts in a row that made no progress.
    stalls: u32,
}

impl Progress {
    /// Points the next attempt at the bytes of `read` that are missing. It begins and ends at blocks if `takes_blocks`:
    /// there must be room for them.
    pub fn aim(&mut self, read: ByteRange, takes_blocks: bool) {
        let block = if takes_blocks { Alignment::BLOCK } else { Alignment::BYTE };
        let start = block.down(self.filled);
        let len = read.len() - start;
        self.offset = read.start() + start;
        self.position = start as usize;
        self.len = block.up(len).unwrap_or(len) as usize;
    }

    /// Notes the result of an attempt, where the read has `whole` bytes and direct attempts bring whole blocks only.
    pub fn outcome(&mut self, whole: u64, result: io::Result<usize>, is_direct: bool) -> Outcome {
        match result {
            Ok(count) => {
                let reached = (self.position as u64 + count as u64).min(whole);
                // A direct read goes on at a whole block, and may spoil what it writes again and does not bring.
                let filled =
                    if is_direct && reached < whole { Alignment::BLOCK.down(reached) } else { reached };
                if filled > self.filled {
                    self.stalls = 0;
                    self.filled = filled;
                } else {
                    self.stalls += 1;
                }
                let is_empty_again = count == 0 && self.stalls > MAX_EMPTY_STALLS;
                if self.filled == whole {
                    Outcome::Complete
                } else if is_empty_again || !is_direct && self.stalls > MAX_STALLS {
                    Outcome::Failed(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the file ends early, although its length says otherwise",
                    ))
                } else if is_direct && (count == 0 || self.stalls > 1) {
                    Outcome::DirectEndsEarly { is_final: self.is_out_of_patience() }
                } else {
                    Outcome::Short
                }
            }
            Err(error) if is_transient(&error) && !self.is_out_of_patience() => {
                self.stalls += 1;
                if error.kind() == io::ErrorKind::WouldBlock {
                    thread::sleep(AGAIN_PAUSE);
                }
                Outcome::Interrupted
            }
            Err(error) if is_direct && is_refusal_of_direct(&error) => Outcome::DirectRefused(error),
            Err(error) => Outcome::Failed(error),
        }
    }

    /// Returns whether too many attempts in a row made no progress.
    pub fn is_out_of_patience(&self) -> bool {
        self.stalls >= MAX_STALLS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: u64 = 3 * 4096;

    fn begun(takes_blocks: bool) -> Progress {
        let mut progress = Progress::default();
        progress.aim(ByteRange::at(4096, WHOLE).unwrap(), takes_blocks);
        progress
    }

    #[test]
    fn a_short_read_goes_on_where_it_ended_and_a_direct_one_at_a_whole_block() {
        for (takes_blocks, reached) in [(false, 5000), (true, 4096)] {
            let mut progress = begun(takes_blocks);
            assert!(matches!(progress.outcome(WHOLE, Ok(5000), takes_blocks), Outcome::Short));
            assert_eq!(progress.filled, reached);
            progress.aim(ByteRange::at(4096, WHOLE).unwrap(), takes_blocks);
            assert_eq!((progress.offset, progress.position as u64), (4096 + reached, reached));
            let rest = progress.len;
            assert!(matches!(progress.outcome(WHOLE, Ok(rest), takes_blocks), Outcome::Complete));
        }
    }

    #[test]
    fn bytes_past_the_end_of_what_is_wanted_do_not_count() {
        let mut progress = Progress::default();
        progress.aim(ByteRange::at(0, 100).unwrap(), true);
        assert_eq!(progress.len, 4096);
        assert!(matches!(progress.outcome(100, Ok(4096), true), Outcome::Complete));
        assert_eq!(progress.filled, 100);
    }

    #[test]
    fn a_read_without_progress_ends() {
        let mut progress = begun(false);
        let ends = |outcome: &Outcome| matches!(outcome, Outcome::Failed(error) if error.kind() == io::ErrorKind::UnexpectedEof);
        let attempts = (1..100).find(|_| ends(&progress.outcome(WHOLE, Ok(0), false)));
        assert_eq!(attempts, Some(1 + MAX_EMPTY_STALLS as usize));
        let mut progress = begun(true);
        let early = progress.outcome(WHOLE, Ok(0), true);
        assert!(matches!(early, Outcome::DirectEndsEarly { is_final: false }), "{early:?}");
    }

    #[test]
    fn an_interrupted_read_is_repeated_a_bounded_number_of_times() {
        let mut progress = begun(false);
        let again = || Err(io::ErrorKind::Interrupted.into());
        for _ in 0..MAX_STALLS {
            assert!(matches!(progress.outcome(WHOLE, again(), false), Outcome::Interrupted));
        }
        assert!(progress.is_out_of_patience());
        assert!(matches!(progress.outcome(WHOLE, again(), false), Outcome::Failed(_)));
        // Progress makes patience whole again.
        assert!(matches!(progress.outcome(WHOLE, Ok(1), false), Outcome::Short));
        assert!(!progress.is_out_of_patience());
    }
}
