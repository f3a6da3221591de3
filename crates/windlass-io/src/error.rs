//! What can go wrong between a byte range and memory. The engine adds the names of tensors.
#![forbid(unsafe_code)]

use crate::ByteRange;
use bytesize::ByteSize;
use std::{fmt, io, path::PathBuf};

/// Result of the operations of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused or failed an operation on a file.
    #[error("{operation} failed on {}{}: {source}", path.display(), Place(*range))]
    Io {
        /// What was tried, such as `read`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The bytes of the file that were wanted, if it was a read, or that could not be written.
        range: Option<ByteRange>,
        /// The system's own error.
        #[source]
        source: io::Error,
    },
    /// The operating system refused or failed an operation that concerns no file, or none in particular.
    #[error("{operation} failed: {source}")]
    System {
        /// What was tried, such as `starting a thread`.
        operation: &'static str,
        /// The system's own error.
        #[source]
        source: io::Error,
    },
    /// The operating system has no memory of the kind asked for.
    #[error("cannot allocate {} of {kind}: {source}", ByteSize(*bytes))]
    Allocation {
        /// Bytes asked for.
        bytes: u64,
        /// Kind of memory.
        kind: &'static str,
        /// The system's own error.
        #[source]
        source: io::Error,
    },
}

struct Place(Option<ByteRange>);

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(range) => write!(f, ", bytes {range}"),
            None => Ok(()),
        }
    }
}
