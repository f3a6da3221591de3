//! Errors of a store as a whole. What happens to a single block is a [`Status`](crate::Status).
#![forbid(unsafe_code)]

use crate::Fingerprint;
use hoistway_device::Unavailable;
use std::{io, path::PathBuf};

/// Result of the store's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a store could not be opened or asked. Each text is a sentence that a user can act on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key has no bytes, or too many.
    #[error("a key has {len} bytes; keys have 1 to 1024")]
    InvalidKey {
        /// Its length in bytes.
        len: usize,
    },
    /// An option has a value that it cannot have.
    #[error("{option} cannot be {value}: {reason}")]
    InvalidOption {
        /// The option, by the name that it has everywhere.
        option: &'static str,
        /// What was given.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A request makes no sense: pieces without bytes, a shard that is not there, lengths that do not fit.
    #[error("{0}")]
    InvalidRequest(String),
    /// There is no store at this path, or what is there is not one.
    #[error("{} is not a KV store: {reason}", path.display())]
    NotAStore {
        /// The root.
        path: PathBuf,
        /// What was looked for, or found instead.
        reason: String,
    },
    /// The store was written by another version, in a format that this one does not read.
    #[error("{} has format {found}, and this version reads format {known}: use the version that wrote it, or another directory", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// A file of the store could not be opened, read, written or synced.
    #[error("{operation} {}: {source}", path.display())]
    Io {
        /// What was being done, such as `writing to`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A block was asked about that is not what was stored. It is a miss from now on.
    #[error("the block {fingerprint} is damaged: {reason}")]
    DamagedBlock {
        /// Which one.
        fingerprint: Fingerprint,
        /// What is wrong with it.
        reason: String,
    },
    /// A named way of moving bytes cannot be used.
    #[error("route {route} cannot be used for {}: {why}", path.display())]
    RouteUnavailable {
        /// The route, as the option names it.
        route: String,
        /// The root of the store, or a file of it.
        path: PathBuf,
        /// What is in the way.
        why: Unavailable,
    },
    /// A device cannot be used, or failed.
    #[error(transparent)]
    Device(#[from] hoistway_device::Error),
    /// The store's threads have ended: it was closed, or this process is a child of fork.
    #[error("the store {} is closed", path.display())]
    Closed {
        /// The root.
        path: PathBuf,
    },
    /// It was opened for reading only.
    #[error("the store {} was opened for reading only", path.display())]
    ReadOnly {
        /// The root.
        path: PathBuf,
    },
    /// No caller fetches the completions of requests with [`Notify::EventFd`](crate::Notify::EventFd).
    #[error(
        "{most} requests with notification are under way or not drained, the most that a store allows: call drain_completions"
    )]
    TooManyCompletions {
        /// How many there may be.
        most: usize,
    },
    /// It did not happen in the time that the caller gave.
    #[error("{what} did not end within {waited_ms} ms")]
    TimedOut {
        /// What was waited for.
        what: &'static str,
        /// How long, in milliseconds.
        waited_ms: u128,
    },
    /// The far tier could not be asked, and may still have what was to be removed.
    #[error("the far tier {} cannot be reached, and may still have what was to be removed; remove it again once the tier is back", path.display())]
    FarUnavailable {
        /// Its root.
        path: PathBuf,
    },
    /// The store was closed before all blocks were written to the far tier.
    #[error("{blocks} blocks were not written to the far tier {} before the store was closed", path.display())]
    NotWrittenBack {
        /// How many.
        blocks: u64,
        /// Root of the far tier.
        path: PathBuf,
    },
    /// A defect of this library.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}
