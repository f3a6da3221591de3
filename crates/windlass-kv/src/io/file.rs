//! A file with the bytes of blocks, open for direct and for buffered transfers.
#![forbid(unsafe_code)]

use rustix::fs::{Mode, OFlags};
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};
use windlass::route::Unavailable;

/// Whether a file is only read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileAccess {
    Read,
    ReadWrite,
    /// Read and write; it must not be there, and is made, for its owner alone (0600).
    CreateNew,
}

/// An open file.
#[derive(Debug)]
pub(crate) struct DataFile {
    path: PathBuf,
    buffered: File,
    /// The same file, opened past the page cache, or why that is refused.
    direct: Result<File, Unavailable>,
}

impl DataFile {
    /// Opens a file, once with `O_DIRECT` where the file system allows it.
    pub(crate) fn open(path: &Path, access: FileAccess) -> io::Result<Self> {
        let flags = match access {
            FileAccess::Read => OFlags::RDONLY,
            FileAccess::ReadWrite => OFlags::RDWR,
            FileAccess::CreateNew => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
        } | OFlags::CLOEXEC;
        let buffered = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        let again = flags.difference(OFlags::CREATE | OFlags::EXCL) | OFlags::DIRECT;
        let direct =
            rustix::fs::open(path, again, Mode::empty()).map(File::from).map_err(|error| Unavailable {
                reason: format!("{} cannot be opened past the page cache: {error}", path.display()),
                fix: "use a file system that supports O_DIRECT".into(),
            });
        Ok(Self { path: path.to_owned(), buffered, direct })
    }

    /// A file that has nothing but a name, for tests whose disk is simulated.
    #[cfg(test)]
    pub(crate) fn in_name_only(path: &Path) -> io::Result<Self> {
        let null = Self::open(Path::new("/dev/null"), FileAccess::ReadWrite)?;
        Ok(Self { path: path.to_owned(), ..null })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn buffered(&self) -> &File {
        &self.buffered
    }

    /// The file past the page cache, or why there is no such way.
    pub(crate) fn direct(&self) -> Result<&File, &Unavailable> {
        self.direct.as_ref()
    }
}
