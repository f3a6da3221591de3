//! The identity of a file, which changes when it is replaced or rewritten.
#![forbid(unsafe_code)]

use crate::sys;
use std::{fs::File, io};

/// The identity of a file, which changes when another file takes its name or it is rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) len: u64,
    pub(crate) modified_ns: i128,
    pub(crate) changed_ns: i128,
    pub(crate) links: u64,
}

impl FileIdentity {
    /// The identity of an open file.
    ///
    /// # Errors
    /// The system's.
    pub fn of(file: &File) -> io::Result<Self> {
        sys::files::identity(file)
    }

    /// Length of the file in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device number that the file lies on.
    pub const fn device(&self) -> u64 {
        self.device
    }

    /// The file's number on that device.
    pub const fn inode(&self) -> u64 {
        self.inode
    }

    /// The time of its last change, in nanoseconds since 1970.
    pub const fn modified_ns(&self) -> i128 {
        self.modified_ns
    }

    /// Returns whether it is the same file, changed or not.
    pub const fn is_same_file(&self, other: &Self) -> bool {
        self.device == other.device && self.inode == other.inode
    }

    /// The number of links to it.
    pub const fn links(&self) -> u64 {
        self.links
    }

    /// What is different in `now`, in words, or `None` if it is the same file, unchanged.
    ///
    /// The change time (`ctime`) counts too: programs set a modification time back, as `cp -p` does, but cannot set a
    /// change time. A new or removed link also moves the change time. It is not a change if the number of links
    /// differs.
    pub fn change(&self, now: &Self) -> Option<String> {
        if (self.device, self.inode) != (now.device, now.inode) {
            Some("another file has taken its name".into())
        } else if self.len != now.len {
            Some(format!("it had {} bytes and now has {}", self.len, now.len))
        } else if self.modified_ns != now.modified_ns {
            Some("its modification time moved".into())
        } else if self.is_touched(now) && self.links == now.links {
            let reasons = "it was rewritten and its modification time set back, or its permissions, owner or attributes changed";
            Some(format!("only its change time moved: {reasons}"))
        } else {
            None
        }
    }

    /// Returns whether only the change time moved.
    pub(super) fn is_touched(&self, now: &Self) -> bool {
        let bytes = |of: &Self| (of.device, of.inode, of.len, of.modified_ns);
        bytes(self) == bytes(now) && self.changed_ns != now.changed_ns
    }
}
