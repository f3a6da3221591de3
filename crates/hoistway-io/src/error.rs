//! Errors of moving bytes. The engine adds the names of tensors.
#![forbid(unsafe_code)]

use crate::ByteRange;
use bytesize::ByteSize;
use std::{
    io,
    path::{Path, PathBuf},
};

/// Result of the operations of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no file at this path.
    #[error("{}: no such file", path.display())]
    NotFound {
        /// The path as given.
        path: PathBuf,
    },
    /// The file at this path is not a regular one.
    #[error("{}: it is {kind}, not a regular file", path.display())]
    NotRegular {
        /// The path as given.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// The file ends before the bytes that were asked for.
    #[error("{} is truncated: bytes {needed} are needed but the file ends at {file_len}; copy or download it again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The bytes of the file that were asked for.
        needed: ByteRange,
        /// Where the file ends now.
        file_len: u64,
    },
    /// The file was rewritten since it was opened, or looks as if it was.
    #[error("{} changed while it was being read ({change}), first noticed at bytes {needed}; open it again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// The bytes of the file that were asked for.
        needed: ByteRange,
        /// What is different.
        change: String,
    },
    /// The operating system refused or failed an operation on a file.
    #[error("{operation} failed on {}{}: {source}", path.display(), at_range(range))]
    Io {
        /// What was tried, such as `read`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The bytes of the file that were wanted, if it was a read, or that could not be written.
        range: Option<ByteRange>,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The operating system refused or failed an operation that concerns no file, or none in particular.
    #[error("{operation} failed: {source}")]
    System {
        /// What was tried, such as `starting a thread`.
        operation: &'static str,
        /// The error of the operating system.
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
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A device failed.
    #[error(transparent)]
    Device(#[from] hoistway_device::Error),
    /// An invariant of this crate was broken. Please report it.
    #[error("internal error, please report it: {0}")]
    Internal(String),
}

impl Error {
    /// The error of a failed `open`.
    pub fn opening(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if source.kind() == io::ErrorKind::NotFound {
            return Self::NotFound { path };
        }
        Self::Io { operation: "open", path, range: None, source }
    }
}

fn at_range(range: &Option<ByteRange>) -> String {
    range.as_ref().map_or(String::new(), |range| format!(", bytes {range}"))
}
