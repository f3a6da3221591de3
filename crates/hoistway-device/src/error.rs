//! What can go wrong with a device.
#![forbid(unsafe_code)]

use crate::Unavailable;
use bytesize::ByteSize;
use std::io;

/// Result of operations on devices.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on a device failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device is not there, or cannot be used.
    #[error("device {device} cannot be used: {why}")]
    DeviceUnavailable {
        /// The device, such as `cuda:0`.
        device: String,
        /// Why, and how to change that.
        why: Unavailable,
    },
    /// The device failed an operation. What its memory holds may be lost.
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
    /// The device has less free memory than is needed.
    #[error("device {device} has {} of free memory, and {} are needed; {FREE_MEMORY}", ByteSize(*available), ByteSize(*needed))]
    OutOfMemory {
        /// The device, such as `cuda:0`.
        device: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes that are free.
        available: u64,
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
    /// A text names no device.
    #[error("device cannot be '{value}': {reason}")]
    InvalidDevice {
        /// The text.
        value: String,
        /// What it may be.
        reason: String,
    },
    /// The device was opened before this process was forked off.
    #[error("this device was opened before fork(); open it again in this process")]
    Forked,
    /// A promise that the code makes to itself was broken. Please report it.
    #[error("internal error, please report it: {0}")]
    Internal(String),
}

/// What to do about [`Error::OutOfMemory`].
pub const FREE_MEMORY: &str = "free memory of the device (torch.cuda.empty_cache() gives back what torch keeps), select fewer tensors, \
     or use torch's allocator";

impl Error {
    /// Whether the platform lacks what was asked for, as some do pinning: Windows' subsystem for Linux, and confidential
    /// computing.
    pub fn is_unsupported(&self) -> bool {
        const NOT_SUPPORTED: i32 = 801;
        matches!(self, Self::Device { source, .. } if source.code == NOT_SUPPORTED)
    }

    /// Whether work of the device may still be in flight although waiting for it ended with this error: see [`Fate`](crate::Fate).
    pub(crate) fn leaves_doubt(&self) -> bool {
        match self {
            Self::Device { source, .. } => !source.ends_work,
            // In a child of fork the memory is a copy.
            _ => false,
        }
    }
}

/// A call of a device's driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{function} returned {name}{}", described(name, description))]
#[non_exhaustive]
pub struct DriverError {
    /// The function.
    pub function: &'static str,
    /// What it returned, such as a `CUresult`.
    pub code: i32,
    /// Name of that code.
    pub name: String,
    /// The driver's description of it.
    pub description: String,
    /// Whether all work that was in flight has ended, as the device does nothing more.
    pub(crate) ends_work: bool,
}

fn described(name: &str, description: &str) -> String {
    if description.is_empty() || description == name { String::new() } else { format!(" ({description})") }
}
