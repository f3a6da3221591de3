//! What tells a file from another, and from itself before it was rewritten.
#![forbid(unsafe_code)]

use crate::sys;
use std::{fs::File, io};

/// What tells a file from another of the same name, and from itself before it was rewritten.
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
    /// Those of `fstat`.
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

    /// The number of its names.
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

    /// Whether the change time moved and nothing else that tells of other bytes.
    pub(super) fn is_touched(&self, now: &Self) -> bool {
        let bytes = |of: &Self| (of.device, of.inode, of.len, of.modified_ns);
        bytes(self) == bytes(now) && self.changed_ns != now.changed_ns
    }
}
