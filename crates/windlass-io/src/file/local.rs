//! A file of this machine: its two descriptors, and what each can do.
#![forbid(unsafe_code)]

use super::{DirectFile, FileSystem, FileUse, OpenFile, Probe, Residency, direct};
use crate::{ByteRange, sys};
use std::{
    fs::File,
    io,
    sync::{Arc, OnceLock},
};
use windlass_device::Unavailable;

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

    /// The file system that it lies on.
    pub fn filesystem(&self) -> FileSystem {
        self.filesystem
    }

    /// How to ask what the page cache holds of it.
    pub fn probe(&self) -> &Probe {
        &self.probe
    }

    /// The device that the file lies on.
    pub fn device(&self) -> u64 {
        self.open.identity.device()
    }

    /// The file's number on its file system.
    pub fn inode(&self) -> u64 {
        self.open.identity.inode()
    }

    /// The length of reads that the file system likes best.
    pub fn preferred_bytes(&self) -> u64 {
        sys::files::preferred_bytes(&self.open.file)
    }

    /// Bytes that the page cache holds, if that can be known.
    pub fn cached_bytes(&self) -> Option<u64> {
        self.probe.cached_bytes(&self.open.file, self.open.identity.len())
    }

    /// What the page cache holds of `range`.
    pub fn residency(&self, range: ByteRange) -> Residency {
        self.probe.ask(&self.open.file, range)
    }

    /// The file for reads through the page cache.
    pub fn buffered_file(&self) -> &File {
        &self.open.file
    }

    /// The file for direct reads.
    ///
    /// # Errors
    /// [`Unsupported`](io::ErrorKind::Unsupported) if there is none.
    pub fn direct_file(&self) -> io::Result<&File> {
        let direct = self.opened_for_direct();
        direct.map_err(|why| io::Error::new(io::ErrorKind::Unsupported, why.to_string()))
    }

    /// The file for direct reads, also if some were refused.
    ///
    /// # Errors
    /// Why there is none.
    pub fn opened_for_direct(&self) -> Result<&File, &Unavailable> {
        self.direct.as_ref().map(|direct| &direct.file)
    }

    /// Why direct reads cannot be used, or nothing if they can.
    pub fn direct_refusal(&self) -> Option<&Unavailable> {
        self.direct_failed.get().or(self.direct.as_ref().err())
    }

    /// Why rings cannot be used, or nothing if they can.
    pub fn ring_refusal(&self) -> Option<Unavailable> {
        self.filesystem.ring_refusal()
    }

    /// Notes that a direct read was refused: from now on this file is read through the page cache.
    pub fn refuse_direct(&self, why: Unavailable) {
        let _ = self.direct_failed.set(why);
    }
}
