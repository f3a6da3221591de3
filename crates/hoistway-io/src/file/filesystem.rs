//! Kinds of file systems. For messages and defaults only: the abilities of a file are probed.
#![forbid(unsafe_code)]

use crate::sys;
use hoistway_device::Unavailable;
use std::{fmt, fs::File, io};

/// The name and the kind of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Its usual name, or `unknown`.
    pub name: &'static str,
    /// Its kind.
    pub kind: FileSystemKind,
}

/// The kind of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystemKind {
    /// Blocks of a local device.
    Local,
    /// Memory.
    Memory,
    /// A server elsewhere: high latency, so more reads in flight.
    Network,
    /// A program on this machine, which may itself talk to a server.
    Fuse,
    /// Layers of other file systems, as in containers.
    Overlay,
    /// Unknown to this version.
    Unknown,
    /// The process is not allowed to ask.
    Hidden,
}

impl FileSystem {
    /// The file system of an open file.
    ///
    /// # Errors
    /// The system's.
    pub fn of(file: &File) -> io::Result<Self> {
        sys::files::filesystem(file)
    }

    /// Returns why rings cannot be used, or `None` if they can. See docs/decisions/0002-no-io-uring-on-fuse.md.
    pub fn ring_refusal(self) -> Option<Unavailable> {
        let (reason, fix) = match self.kind {
            FileSystemKind::Fuse => (
                "on FUSE, the kernel continues short asynchronous reads at a wrong offset",
                "choose route auto or threads",
            ),
            FileSystemKind::Overlay => (
                "the layers of overlayfs may lie on FUSE, where short asynchronous reads continue at a wrong offset",
                "choose route auto or threads",
            ),
            FileSystemKind::Hidden => (
                "fstatfs is blocked for this process, and the file may lie on FUSE, where short asynchronous reads continue at a wrong offset",
                "allow fstatfs in the container's seccomp profile, or choose route auto or threads",
            ),
            _ => return None,
        };
        Some(Unavailable::new(reason, fix))
    }

    /// Returns whether reads have a high latency.
    pub fn is_remote(self) -> bool {
        matches!(self.kind, FileSystemKind::Network | FileSystemKind::Fuse)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}
