//! What kind of file system a file lies on. For messages and defaults only: what a file can do is probed.
#![forbid(unsafe_code)]

use super::Unavailable;
use rustix::io::Errno;
use std::{fmt, fs::File, io, os::fd::AsFd};

/// A file system's name and what follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileSystem {
    /// Its usual name, or `unknown`.
    pub(crate) name: &'static str,
    /// What it is made of.
    pub(crate) kind: FileSystemKind,
}

/// What a file system is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileSystemKind {
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
    /// Not known to this version.
    Unknown,
    /// The process may not ask.
    Hidden,
}

impl FileSystem {
    /// The file system of an open file.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let filesystem = match rustix::fs::fstatfs(file) {
            Ok(found) => Self::from_magic(found.f_type),
            // A filter of system calls. What the name decides can be done without.
            Err(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => Self::HIDDEN,
            Err(error) => return Err(error.into()),
        };
        // Only FUSE file systems are asked: to others the question may mean something else.
        let is_3fs = filesystem.kind == FileSystemKind::Fuse && windlass_usrbio::is_3fs(file.as_fd());
        Ok(if is_3fs { Self::THREEFS } else { filesystem })
    }

    /// One that the process may not ask about.
    const HIDDEN: Self = Self { name: "unknown", kind: FileSystemKind::Hidden };

    /// DeepSeek's 3FS, mounted by FUSE.
    const THREEFS: Self = Self { name: "3fs", kind: FileSystemKind::Fuse };

    /// Whether it is a 3FS, which USRBIO can read.
    pub(crate) fn is_3fs(self) -> bool {
        self == Self::THREEFS
    }

    /// By the numbers of `statfs(2)` and `linux/magic.h`.
    fn from_magic(magic: i64) -> Self {
        use FileSystemKind::*;
        let (name, kind) = match magic & 0xffff_ffff {
            0xEF53 => ("ext4", Local),
            0x5846_5342 => ("xfs", Local),
            0x9123_683E => ("btrfs", Local),
            0xF2F5_2010 => ("f2fs", Local),
            0x2FC1_2FC1 => ("zfs", Local),
            0xCA45_1A4E => ("bcachefs", Local),
            0x5346_544E | 0x7366_746E => ("ntfs", Local),
            0x2011_BAB0 => ("exfat", Local),
            0x4D44 => ("vfat", Local),
            0x7371_7368 => ("squashfs", Local),
            0xE0F5_E1E2 => ("erofs", Local),
            0x0102_1994 => ("tmpfs", Memory),
            0x8584_58F6 => ("ramfs", Memory),
            0x9584_58F6 => ("hugetlbfs", Memory),
            0x6969 => ("nfs", Network),
            0xFF53_4D42 | 0xFE53_4D42 => ("smb", Network),
            0x0BD0_0BD0 => ("lustre", Network),
            0x00C3_6400 => ("ceph", Network),
            0x4750_4653 => ("gpfs", Network),
            0x1983_0326 => ("beegfs", Network),
            0x0102_1997 => ("9p", Network),
            0x6A65_7377 => ("wekafs", Network),
            0x6573_5546 => ("fuse", Fuse),
            0x6573_5543 => ("fusectl", Fuse),
            0x794C_7630 => ("overlayfs", Overlay),
            _ => ("unknown", Unknown),
        };
        Self { name, kind }
    }

    /// Why rings cannot be used, or nothing if they can. See docs/decisions/0002-no-io-uring-on-fuse.md.
    pub(crate) fn ring_refusal(self) -> Option<Unavailable> {
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

    /// Whether reads take long to answer, however fast they are in bulk.
    pub(crate) fn is_remote(self) -> bool {
        matches!(self.kind, FileSystemKind::Network | FileSystemKind::Fuse)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}
