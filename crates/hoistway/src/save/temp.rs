//! A file under a temporary name, until it is complete.
#![forbid(unsafe_code)]

use super::io_error;
use crate::{
    ByteRange, Error, Result,
    sys::{files, folders},
};
use hoistway_io::file::{FileIdentity, try_lock, unlock};
use std::{
    collections::hash_map::RandomState,
    fs::{self, File, OpenOptions},
    hash::{BuildHasher, Hasher},
    io,
    path::{Path, PathBuf},
};

/// Names that are tried before giving up.
const ATTEMPTS: usize = 100;

/// A new file. Removed when dropped, unless it was given its name.
///
/// It is locked as long as it is being written, so that others can tell it from one whose writer is gone: the lock goes
/// with the process.
#[derive(Debug)]
pub(super) struct TempFile {
    file: File,
    path: PathBuf,
    is_named: bool,
}

impl TempFile {
    /// A new file; `path_of` gives a path for a random number.
    pub(super) fn new(path_of: impl Fn(u64) -> PathBuf) -> Result<Self> {
        for _ in 0..ATTEMPTS {
            let path = path_of(RandomState::new().build_hasher().finish());
            // Until it has its name, no other user may open it.
            let file = match folders::create_private(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(source) => return Err(io_error("create", &path, source)),
            };
            let temp = Self { file, path, is_named: false };
            // Another process may have removed it as a file without a writer: then it has no name any more.
            if try_lock(&temp.file).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                continue;
            }
            let identity =
                FileIdentity::of(&temp.file).map_err(|source| io_error("stat", &temp.path, source))?;
            if identity.links() > 0 {
                return Ok(temp);
            }
        }
        let path = path_of(0);
        Err(io_error("create", &path, io::Error::other("every name that was tried is taken")))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Sees to it that its bytes are on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        #[cfg(test)]
        super::crash_tests::step(super::crash_tests::Step::SyncFile(self.path.clone()));
        self.file.sync_all()
    }

    /// Makes it `len` bytes long, on blocks that are reserved where the file system can do that.
    /// `shown` is what messages call it.
    pub(super) fn allocate(&self, len: u64, shown: &Path) -> Result<()> {
        files::allocate(&self.file, len).map_err(|source| Error::Io {
            operation: "allocate",
            path: shown.to_owned(),
            tensor: None,
            range: ByteRange::at(0, len),
            source,
        })
    }

    /// Gives it its name, in place of a file that has it.
    pub(super) fn persist(mut self, path: &Path) -> Result<()> {
        #[cfg(test)]
        super::crash_tests::step(super::crash_tests::Step::Rename(self.path.clone(), path.to_owned()));
        folders::rename(&self.path, path).map_err(|source| io_error("rename", path, source))?;
        self.is_named = true;
        Ok(())
    }

    /// Gives it its name, unless a file has that: `false` then.
    pub(super) fn persist_new(&mut self, path: &Path) -> Result<bool> {
        #[cfg(test)]
        super::crash_tests::step(super::crash_tests::Step::Rename(self.path.clone(), path.to_owned()));
        match folders::rename_new(&self.path, path) {
            Ok(()) => {
                self.is_named = true;
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(source) => Err(io_error("rename", path, source)),
        }
    }

    /// Takes back the name that [`persist_new`](Self::persist_new) gave it, if it did.
    pub(super) fn take_back(&mut self, path: &Path) {
        if self.is_named && folders::rename(path, &self.path).is_ok() {
            self.is_named = false;
        }
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.is_named {
            // What stays is removed by the next save to the folder.
            let _ = fs::remove_file(&self.path);
        }
        unlock(&self.file);
    }
}

/// Removes the file if no process is writing it. An error if that is not known, or the file cannot be removed.
pub(super) fn remove_if_stale(path: &Path) -> io::Result<()> {
    // Network file systems lock what is open for writing alone.
    let removed =
        OpenOptions::new().read(true).write(true).open(path).and_then(|file| match try_lock(&file) {
            Ok(()) => {
                let removed = fs::remove_file(path);
                unlock(&file);
                removed
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        });
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_taken_is_not_given_again() {
        let folder = tempfile::tempdir().unwrap();
        let [taken, free] = ["taken", "free"].map(|name| folder.path().join(name));
        fs::write(&taken, "another's").unwrap();
        let mut temp = TempFile::new(|random| folder.path().join(random.to_string())).unwrap();
        assert!(!temp.persist_new(&taken).unwrap());
        assert_eq!(fs::read(&taken).unwrap(), b"another's");
        assert!(temp.persist_new(&free).unwrap());
        temp.take_back(&free);
        drop(temp);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
