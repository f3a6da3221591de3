//! A file of this machine, or one that its kernel reads from elsewhere.
#![forbid(unsafe_code)]

use super::{Extensions, Latency, Source};
use crate::{ByteRange, Cancel, catalog::OpenFile};
use hoistway_io::file::{FileSystem, LocalFile, read_at};
use once_cell::race::OnceBox;
use std::{io, path::Path, sync::Arc};

/// A file that the kernel reads.
#[derive(Debug)]
pub(super) struct Local {
    extensions: Extensions,
    /// The file as it was opened.
    pub(super) open: Arc<OpenFile>,
    filesystem: FileSystem,
    /// The file and what it can do, once that was asked. No thread waits for another that asks: a child of `fork` lacks the
    /// threads of its parent.
    file: OnceBox<LocalFile>,
}

impl Local {
    pub(super) fn new(open: Arc<OpenFile>, filesystem: FileSystem) -> Self {
        Self { extensions: Extensions::default(), open, filesystem, file: OnceBox::new() }
    }

    /// The file and what it can do.
    pub(super) fn file(&self) -> &LocalFile {
        self.file.get_or_init(|| Box::new(LocalFile::new(self.open.clone(), self.filesystem)))
    }
}

impl Source for Local {
    fn path(&self) -> &Path {
        &self.open.path
    }

    fn len(&self) -> u64 {
        self.open.identity.len()
    }

    fn medium(&self) -> &'static str {
        self.filesystem.name
    }

    fn latency(&self) -> Latency {
        if self.filesystem.is_remote() { Latency::Remote } else { Latency::Local }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64, _: &Cancel) -> io::Result<usize> {
        read_at(&*self.open.file()?, buffer, offset)
    }

    fn check_identity(&self, needed: ByteRange) -> hoistway_io::Result<()> {
        self.open.check_unchanged(needed)
    }

    fn caveat(&self) -> Option<String> {
        let path = self.open.path.display();
        self.open.has_writer().then(|| {
            format!(
                "{path} has a writer, and is read nevertheless: what that writes meanwhile may not be noticed"
            )
        })
    }

    fn as_local(&self) -> Option<&LocalFile> {
        Some(self.file())
    }

    fn extensions(&self) -> &Extensions {
        &self.extensions
    }
}
