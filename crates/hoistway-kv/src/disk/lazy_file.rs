//! Files that jobs name: open all the time, or only while a job has begun.
#![forbid(unsafe_code)]

use super::file::{DataFile, FileAccess};
use hoistway_io::parallel::lock;
use std::{
    fs::Metadata,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak},
};

/// A file that bytes are to be moved to or from.
#[derive(Clone, Debug)]
pub(crate) enum LazyFile {
    /// One of few, which stays open.
    Open(Arc<DataFile>),
    /// One of many files: it is open only while a caller holds the result of [`LazyFile::open`].
    Unopened(Arc<UnopenedFile>),
}

/// A file that is opened when it is needed.
#[derive(Debug)]
pub(crate) struct UnopenedFile {
    path: PathBuf,
    access: FileAccess,
    /// Which file it was when it was looked for.
    expected: Option<Identity>,
    opened: Mutex<Weak<DataFile>>,
}

/// What tells a file from a later one of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(file: &Metadata) -> Self {
        let modified = (file.mtime(), file.mtime_nsec());
        Self { device: file.dev(), inode: file.ino(), len: file.len(), modified }
    }
}

impl LazyFile {
    /// A file that is read later, if it is still the one that was found.
    pub(crate) fn found(path: PathBuf, metadata: &Metadata) -> Self {
        Self::unopened(path, FileAccess::Read, Some(Identity::of(metadata)))
    }

    /// A file that is written later. Its name is unique, so no other process uses it.
    pub(crate) fn made(path: PathBuf) -> Self {
        Self::unopened(path, FileAccess::ReadWrite, None)
    }

    fn unopened(path: PathBuf, access: FileAccess, expected: Option<Identity>) -> Self {
        Self::Unopened(Arc::new(UnopenedFile { path, access, expected, opened: Mutex::default() }))
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Open(file) => file.path(),
            Self::Unopened(file) => &file.path,
        }
    }

    pub(crate) fn is_lazy(&self) -> bool {
        matches!(self, Self::Unopened(_))
    }

    /// Returns the open file. A lazy file is closed when the last holder of the returned handle drops it.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::NotFound`] also if another file has the name by now.
    pub(crate) fn open(&self) -> io::Result<Arc<DataFile>> {
        let unopened = match self {
            Self::Open(file) => return Ok(Arc::clone(file)),
            Self::Unopened(unopened) => unopened,
        };
        let mut opened = lock(&unopened.opened);
        if let Some(file) = opened.upgrade() {
            return Ok(file);
        }
        let file = Arc::new(DataFile::open(&unopened.path, unopened.access)?);
        if let Some(expected) = unopened.expected
            && Identity::of(&file.buffered().metadata()?) != expected
        {
            return Err(io::ErrorKind::NotFound.into());
        }
        *opened = Arc::downgrade(&file);
        Ok(file)
    }
}

impl From<Arc<DataFile>> for LazyFile {
    fn from(file: Arc<DataFile>) -> Self {
        Self::Open(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_lazy_file_is_open_while_a_handle_to_it_lives() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "bytes").unwrap();
        let file = LazyFile::found(path.clone(), &path.metadata().unwrap());
        let (one, two) = (file.open().unwrap(), file.open().unwrap());
        assert!(Arc::ptr_eq(&one, &two));
        let open = Arc::downgrade(&one);
        drop((one, two));
        assert!(open.upgrade().is_none());
        assert_eq!(file.open().unwrap().path(), path);
    }

    #[test]
    fn another_file_of_the_same_name_is_not_the_one_that_was_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "bytes").unwrap();
        let file = LazyFile::found(path.clone(), &path.metadata().unwrap());
        let other = directory.path().join("other");
        fs::write(&other, "other").unwrap();
        fs::rename(&other, &path).unwrap();
        assert_eq!(file.open().unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::remove_file(&path).unwrap();
        assert_eq!(file.open().unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
