//! A file of this machine: its two descriptors, and what each can do.
#![forbid(unsafe_code)]

use super::{DirectFile, FileSystem, FileUse, OpenFile, Probe, Residency, direct};
use crate::{ByteRange, sys};
use hoistway_device::Unavailable;
use std::{
    fs::File,
    io,
    sync::{Arc, OnceLock},
};

/// An open file to read from.
#[derive(Debug)]
pub struct LocalFile {
    open: Arc<OpenFile>,
    filesystem: FileSystem,
    direct: Result<DirectFile, Unavailable>,
    /// Set when a direct read was refused although opening was not.
    direct_failed: OnceLock<Unavailable>,
    probe: Probe,
}

impl LocalFile {
    /// Finds out what can be done with an open file that lies on `filesystem`.
    pub fn new(open: Arc<OpenFile>, filesystem: FileSystem) -> Self {
        let direct = direct::open_on(&open.file, filesystem, FileUse::Read);
        let probe = Probe::find(&open.file);
        Self { open, filesystem, direct, direct_failed: OnceLock::new(), probe }
    }

    /// Returns the file system that the file lies on.
    pub fn filesystem(&self) -> FileSystem {
        self.filesystem
    }

    /// Returns the probe of the page cache.
    pub fn probe(&self) -> &Probe {
        &self.probe
    }

    /// Returns the number of the device that the file lies on.
    pub fn device(&self) -> u64 {
        self.open.identity.device()
    }

    /// Returns the file's number on its file system.
    pub fn inode(&self) -> u64 {
        self.open.identity.inode()
    }

    /// Returns the length when it was opened.
    pub fn len_bytes(&self) -> u64 {
        self.open.identity.len()
    }

    /// Returns the length of reads that the file system prefers.
    pub fn preferred_bytes(&self) -> u64 {
        sys::files::preferred_bytes(&self.open.file)
    }

    /// Returns the bytes that the page cache holds, if that can be known.
    pub fn cached_bytes(&self) -> Option<u64> {
        self.probe.cached_bytes(&self.open.file, self.len_bytes())
    }

    /// Returns what the page cache holds of `range`.
    pub fn residency(&self, range: ByteRange) -> Residency {
        self.probe.ask(&self.open.file, range)
    }

    /// Returns the file for reads through the page cache.
    pub fn buffered_file(&self) -> &File {
        &self.open.file
    }

    /// Returns the file for direct reads.
    ///
    /// # Errors
    /// [`Unsupported`](io::ErrorKind::Unsupported) if there is none.
    pub fn direct_file(&self) -> io::Result<&File> {
        let direct = self.opened_for_direct();
        direct.map_err(|why| io::Error::new(io::ErrorKind::Unsupported, why.to_string()))
    }

    /// Returns the file for direct reads, even if some were refused.
    ///
    /// # Errors
    /// Why there is none.
    pub fn opened_for_direct(&self) -> Result<&File, &Unavailable> {
        self.direct.as_ref().map(|direct| &direct.file)
    }

    /// Returns why direct reads cannot be used, or `None` if they can.
    pub fn direct_refusal(&self) -> Option<&Unavailable> {
        self.direct_failed.get().or(self.direct.as_ref().err())
    }

    /// Returns why rings cannot be used, or `None` if they can.
    pub fn ring_refusal(&self) -> Option<Unavailable> {
        self.filesystem.ring_refusal()
    }

    /// Notes that a direct read was refused: from now on this file is read through the page cache.
    pub fn refuse_direct(&self, why: Unavailable) {
        let _ = self.direct_failed.set(why);
    }
}
