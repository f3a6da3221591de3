//! Everything that can go wrong, sorted by what the caller can do about it.
#![forbid(unsafe_code)]

use crate::{
    ByteRange,
    catalog::{FormatError, index::IndexError},
    device::{self, DriverError},
    plan::PlanError,
    route::{self, Route, Unavailable},
    save::ContentError,
};
use bytesize::ByteSize;
use hoistway_device::FREE_MEMORY;
use hoistway_io::executor::Reason;
use std::{io, path::PathBuf};

/// Result of hoistway's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation did not deliver.
///
/// Each variant's text is a sentence that names the file and, where there is one, the tensor and the offset.
/// An operation that returns an error has delivered nothing partial under the name of a whole tensor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing to load at this path.
    #[error("{}: {reason}", path.display())]
    NotFound {
        /// The path as given.
        path: PathBuf,
        /// What was looked for.
        reason: String,
    },
    /// A file is not what its format allows.
    #[error("{}: {problem}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        problem: FormatError,
    },
    /// A `*.index.json` is not what its format allows, or disagrees with the files it names.
    #[error("{}: {problem}", path.display())]
    InvalidIndex {
        /// The index file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        problem: IndexError,
    },
    /// Two files hold a tensor of the same name.
    #[error(
        "tensor '{tensor}' is in both {} and {}; name the files to load, or load through their index",
        first.display(), second.display()
    )]
    DuplicateTensor {
        /// The name.
        tensor: String,
        /// The file that has it first.
        first: PathBuf,
        /// The file that has it again.
        second: PathBuf,
    },
    /// The file ends before the tensor does, although its header was fine.
    #[error(
        "{} is truncated: {} needs bytes {needed} but the file ends at {file_len}; copy or download it again",
        path.display(), subject(tensor)
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The tensor that is cut, if the bytes belong to one.
        tensor: Option<String>,
        /// The bytes of the file that were asked for.
        needed: ByteRange,
        /// Where the file ends now.
        file_len: u64,
    },
    /// The file was rewritten since its header was read, or looks as if it was: only its change time moved. New
    /// permissions do that too. A file that got another name, or that another file replaced, is read to its end.
    #[error("{} changed while it was being read ({change}), first noticed at {}; open it again", path.display(), subject(tensor))]
    Changed {
        /// The file.
        path: PathBuf,
        /// A tensor whose bytes can no longer be trusted, if the reading had got to one.
        tensor: Option<String>,
        /// What is different.
        change: String,
    },
    /// The operating system refused or failed an operation.
    #[error("{} failed on {}{}: {source}", operation, path.display(), location(tensor, range))]
    Io {
        /// What was tried, such as `read`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The tensor whose bytes were wanted, if they belong to one.
        tensor: Option<String>,
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
    /// A save is complete and has its name, but the folder could not be synced: a loss of power may undo it, and bring
    /// what was there before back.
    #[error("{} is saved, but it is not known whether that is on the disk: to sync its folder failed: {source}", path.display())]
    NotSynced {
        /// The file, or the index, that has its name.
        path: PathBuf,
        /// The system's own error.
        #[source]
        source: io::Error,
    },
    /// The route that the caller named cannot carry the data.
    #[error("route {route} cannot {}: {why}", served(path))]
    RouteUnavailable {
        /// The route.
        route: Route,
        /// The file that it cannot serve; `None` if the reason is none of a file's.
        path: Option<PathBuf>,
        /// Why, and how to change that.
        why: Unavailable,
    },
    /// The device that the caller named is not there, or cannot be used.
    #[error("device {device} cannot be used: {why}")]
    DeviceUnavailable {
        /// The device, such as `cuda:0`.
        device: String,
        /// Why, and how to change that.
        why: Unavailable,
    },
    /// A device failed an operation. Tensors that were handed out before may be lost with it.
    #[error("{operation} failed on device {device}: {source}")]
    Device {
        /// The device, such as `cuda:0`.
        device: String,
        /// What was tried.
        operation: &'static str,
        /// The driver's own error.
        #[source]
        source: DriverError,
    },
    /// No tensor has this name, or no name matches the pattern.
    #[error("no tensor matches '{pattern}'{}", hint(nearest))]
    NoSuchTensor {
        /// The name or pattern.
        pattern: String,
        /// The most similar name that exists.
        nearest: Option<String>,
    },
    /// The request does not fit the tensor, or cannot be laid out.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Tensors cannot be saved as they are. Nothing was written.
    #[error(transparent)]
    Content(#[from] ContentError),
    /// An option has a value that means nothing.
    #[error("{option} cannot be '{value}': {reason}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// The value as given.
        value: String,
        /// What it may be.
        reason: String,
    },
    /// The load would need more memory than it may have.
    #[error("the load needs {} of memory but {limit_name} leaves {}; {fix}", ByteSize(*needed), ByteSize(*available))]
    MemoryBudget {
        /// Bytes that the load needs: tensors, padding and staging.
        needed: u64,
        /// Bytes that it may have.
        available: u64,
        /// What sets the limit.
        limit_name: String,
        /// What to do.
        fix: String,
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
    /// What was loaded differs from what a second reading, or the digest given, says.
    #[error("tensor '{tensor}' of {}: loaded as {found}, expected {expected}", path.display())]
    DigestMismatch {
        /// The tensor.
        tensor: String,
        /// Its file.
        path: PathBuf,
        /// Type, shape and BLAKE3 digest expected.
        expected: String,
        /// Type, shape and BLAKE3 digest found.
        found: String,
    },
    /// All bytes of an object came, and are not those that its store says.
    #[error(
        "{}: the bytes that came have the {checksum} {found}, and the store says {expected}; load it again, over https:// if the \
         store has it, or, if the store's checksum is wrong, set the store option checksums=off",
        path.display()
    )]
    ChecksumMismatch {
        /// The URL of the object.
        path: PathBuf,
        /// The checksum, such as `CRC-64/NVME`.
        checksum: &'static str,
        /// What the store says, in base64; a digest such as SHA-256 in hex.
        expected: String,
        /// What the bytes have that came.
        found: String,
    },
    /// A manifest of digests could not be used.
    #[error("digest manifest {}: {reason}", path.display())]
    InvalidManifest {
        /// The manifest.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The function that was to take bytes failed.
    #[error("{}: bytes {range}{} were not accepted by the function that was to take them: {source}", path.display(), location(tensor, &None))]
    Sink {
        /// The file.
        path: PathBuf,
        /// Name of the read, if it has one.
        tensor: Option<String>,
        /// The bytes of the file.
        range: ByteRange,
        /// What the function said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The caller cancelled the load, the read or the save, or the read did not begin by its deadline.
    #[error("the load, read or save was cancelled")]
    Cancelled,
    /// A load, reader or pool of memory was made before this process was forked off; its threads and locks are the parent's.
    #[error("this load, reader or pool is of the time before fork(); make it anew in this process")]
    Forked,
    /// A promise that the code makes to itself was broken. Please report it.
    #[error("internal error, please report it: {0}")]
    Internal(String),
}

impl From<device::Error> for Error {
    fn from(error: device::Error) -> Self {
        match error {
            device::Error::DeviceUnavailable { device, why } => Self::DeviceUnavailable { device, why },
            device::Error::Device { device, operation, source } => Self::Device { device, operation, source },
            device::Error::OutOfMemory { device, needed, available } => Self::MemoryBudget {
                needed,
                available,
                limit_name: format!("the memory of {device}"),
                fix: FREE_MEMORY.to_owned(),
            },
            device::Error::Allocation { bytes, kind, source } => Self::Allocation { bytes, kind, source },
            device::Error::InvalidDevice { value, reason } => {
                Self::InvalidOption { option: "device", value, reason }
            }
            device::Error::Forked => Self::Forked,
            device::Error::Internal(text) => Self::Internal(text),
            other => Self::Internal(other.to_string()),
        }
    }
}

impl Error {
    /// The same error, where another owner has this one. What reads do not end with is put in words.
    pub(crate) fn copied(&self) -> Self {
        match self {
            Self::Cancelled => Self::Cancelled,
            Self::Forked => Self::Forked,
            Self::Truncated { path, tensor, needed, file_len } => Self::Truncated {
                path: path.clone(),
                tensor: tensor.clone(),
                needed: *needed,
                file_len: *file_len,
            },
            Self::Changed { path, tensor, change } => {
                Self::Changed { path: path.clone(), tensor: tensor.clone(), change: change.clone() }
            }
            Self::Io { operation, path, tensor, range, source } => Self::Io {
                operation,
                path: path.clone(),
                tensor: tensor.clone(),
                range: *range,
                source: match source.raw_os_error() {
                    Some(code) => io::Error::from_raw_os_error(code),
                    None => io::Error::new(source.kind(), source.to_string()),
                },
            },
            Self::ChecksumMismatch { path, checksum, expected, found } => Self::ChecksumMismatch {
                path: path.clone(),
                checksum,
                expected: expected.clone(),
                found: found.clone(),
            },
            Self::Device { device, operation, source } => {
                Self::Device { device: device.clone(), operation, source: source.clone() }
            }
            other => Self::Internal(other.to_string()),
        }
    }

    /// An error of a file that holds tensors. `tensor_at` gives the tensor that has a byte of it.
    pub(crate) fn of_file(error: hoistway_io::Error, tensor_at: impl FnOnce(u64) -> Option<String>) -> Self {
        use hoistway_io::Error as Io;
        match error {
            Io::NotFound { path } => Self::NotFound { path, reason: "no such file".into() },
            Io::NotRegular { path, kind } => {
                Self::InvalidFile { path, problem: FormatError::NotRegular { kind } }
            }
            Io::Truncated { path, needed, file_len } => {
                let tensor = tensor_at(file_len.max(needed.start()));
                Self::Truncated { path, tensor, needed, file_len }
            }
            Io::Changed { path, needed, change } => {
                Self::Changed { path, tensor: tensor_at(needed.start()), change }
            }
            Io::Io { operation, path, range, source } => {
                Self::Io { operation, path, tensor: None, range, source }
            }
            Io::System { operation, source } => Self::System { operation, source },
            Io::Allocation { bytes, kind, source } => Self::Allocation { bytes, kind, source },
            Io::Device(error) => error.into(),
            Io::Internal(what) => Self::Internal(what),
        }
    }

    /// An option that cannot have this value, and what it may be.
    pub(crate) fn invalid_option(
        option: &'static str,
        value: impl ToString,
        reason: impl Into<String>,
    ) -> Self {
        Self::InvalidOption { option, value: value.to_string(), reason: reason.into() }
    }

    /// The system's number of what went wrong, if there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. } | Self::System { source, .. } => route::errno(source),
            Self::Allocation { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

impl From<hoistway_io::Error> for Error {
    fn from(error: hoistway_io::Error) -> Self {
        Self::of_file(error, |_| None)
    }
}

impl From<Reason> for Error {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Cancelled | Reason::TimedOut | Reason::Closed => Self::Cancelled,
            Reason::Forked => Self::Forked,
            reason => Self::Internal(reason.to_string()),
        }
    }
}

/// What a file lacks, or what is wrong in it.
fn subject(tensor: &Option<String>) -> String {
    tensor.as_ref().map_or("the read".into(), |tensor| format!("tensor '{tensor}'"))
}

fn served(path: &Option<PathBuf>) -> String {
    path.as_ref().map_or("be used".into(), |path| format!("serve {}", path.display()))
}

fn location(tensor: &Option<String>, range: &Option<ByteRange>) -> String {
    let range = range.as_ref().map_or(String::new(), |range| format!(", bytes {range}"));
    range + &tensor.as_ref().map_or(String::new(), |tensor| format!(" (tensor '{tensor}')"))
}

fn hint(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or(String::new(), |nearest| format!("; did you mean '{nearest}'?"))
}
