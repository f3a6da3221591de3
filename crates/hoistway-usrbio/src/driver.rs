//! The interface between a ring and its client: the native one, or the vendor's library.
#![forbid(unsafe_code)]

use crate::{File, Iov, Result};
use std::time::Duration;

/// One transfer, its numbers checked.
#[derive(Clone, Copy)]
pub(crate) struct Prepared<'a> {
    pub(crate) file: &'a File,
    pub(crate) file_offset: u64,
    pub(crate) iov: &'a Iov,
    pub(crate) iov_offset: usize,
    pub(crate) len: usize,
    /// Comes back with the completion.
    pub(crate) mark: u64,
}

/// A completion, nothing of it checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawCompletion {
    pub(crate) mark: u64,
    pub(crate) result: i64,
}

/// Whether a transfer fitted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prepare {
    Done,
    Full,
}

pub(crate) trait Driver: Send {
    /// Appends a transfer. It may begin at once.
    fn prepare(&mut self, transfer: Prepared<'_>) -> Result<Prepare>;

    /// Tells the daemon of what was appended.
    fn submit(&mut self) -> Result<()>;

    /// Takes what is complete; waits up to `limit` if nothing is.
    fn wait(&mut self, limit: Duration, completions: &mut Vec<RawCompletion>) -> Result<()>;

    /// The name of the ring's registration, as far as it is known.
    fn key(&self) -> Option<&str>;
}
