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
pub(crate) enum FileRef {
    /// One of few, which stays open.
    Kept(Arc<DataFile>),
    /// One of many files: it is open only while a caller holds the result of [`FileRef::open`].
    Late(Arc<LateFile>),
}

/// A file that is opened when it is needed.
#[derive(Debug)]
pub(crate) struct LateFile {
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

impl FileRef {
    /// A file that is read later, if it is still the one that was found.
    pub(crate) fn found(path: PathBuf, metadata: &Metadata) -> Self {
        Self::late(path, FileAccess::Read, Some(Identity::of(metadata)))
    }

    /// A file that is written later. Its name is unique, so no other process uses it.
    pub(crate) fn made(path: PathBuf) -> Self {
        Self::late(path, FileAccess::ReadWrite, None)
    }

    fn late(path: PathBuf, access: FileAccess, expected: Option<Identity>) -> Self {
        Self::Late(Arc::new(LateFile { path, access, expected, opened: Mutex::default() }))
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Kept(file) => file.path(),
            Self::Late(file) => &file.path,
        }
    }

    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::Late(_))
    }

    /// Returns the open file. A late file is closed when the last holder of the returned handle drops it.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::NotFound`] also if another file has the name by now.
    pub(crate) fn open(&self) -> io::Result<Arc<DataFile>> {
        let late = match self {
            Self::Kept(file) => return Ok(Arc::clone(file)),
            Self::Late(late) => late,
        };
        let mut opened = lock(&late.opened);
        if let Some(file) = opened.upgrade() {
            return Ok(file);
        }
        let file = Arc::new(DataFile::open(&late.path, late.access)?);
        if let Some(expected) = late.expected
            && Identity::of(&file.buffered().metadata()?) != expected
        {
            return Err(io::ErrorKind::NotFound.into());
        }
        *opened = Arc::downgrade(&file);
        Ok(file)
    }
}

impl From<Arc<DataFile>> for FileRef {
    fn from(file: Arc<DataFile>) -> Self {
        Self::Kept(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_late_file_is_open_while_a_handle_to_it_lives() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "bytes").unwrap();
        let late = FileRef::found(path.clone(), &path.metadata().unwrap());
        let (one, two) = (late.open().unwrap(), late.open().unwrap());
        assert!(Arc::ptr_eq(&one, &two));
        let open = Arc::downgrade(&one);
        drop((one, two));
        assert!(open.upgrade().is_none());
        assert_eq!(late.open().unwrap().path(), path);
    }

    #[test]
    fn another_file_of_the_same_name_is_not_the_one_that_was_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "bytes").unwrap();
        let late = FileRef::found(path.clone(), &path.metadata().unwrap());
        let other = directory.path().join("other");
        fs::write(&other, "other").unwrap();
        fs::rename(&other, &path).unwrap();
        assert_eq!(late.open().unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::remove_file(&path).unwrap();
        assert_eq!(late.open().unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
