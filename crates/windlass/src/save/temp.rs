//! A file under a name that nobody looks for, until it is complete.
#![forbid(unsafe_code)]

use super::{
    io_error,
    lock::{try_lock, unlock},
};
use crate::{ByteRange, Error, Result};
use rustix::{fs::FallocateFlags, io::Errno};
use std::{
    collections::hash_map::RandomState,
    fs::{self, File, OpenOptions},
    hash::{BuildHasher, Hasher},
    io,
    os::unix::fs::MetadataExt,
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
            let file = match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(source) => return Err(io_error("create", &path, source)),
            };
            let temp = Self { file, path, is_named: false };
            // Somebody who removes files without writers may have come between: then it has no name any more.
            if matches!(try_lock(&temp.file), Err(Errno::WOULDBLOCK)) {
                continue;
            }
            let stat = temp.file.metadata().map_err(|source| io_error("stat", &temp.path, source))?;
            if stat.nlink() > 0 {
                return Ok(temp);
            }
        }
        let path = path_of(0);
        Err(io_error("create", &path, io::Error::other("every name that was tried is taken")))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Makes it `len` bytes long, on blocks that nobody else can take any more where the file system can promise that.
    /// `shown` is what messages call it.
    pub(super) fn allocate(&self, len: u64, shown: &Path) -> Result<()> {
        let allocated = loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, len) {
                Err(Errno::INTR) => {}
                done => break done,
            }
        };
        let done = match allocated {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.file.set_len(len),
            done => done.map_err(io::Error::from),
        };
        done.map_err(|source| Error::Io {
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
        super::crash_tests::step();
        fs::rename(&self.path, path).map_err(|source| io_error("rename", path, source))?;
        self.is_named = true;
        Ok(())
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        if !self.is_named {
            // What stays is removed by the next save of the name.
            let _ = fs::remove_file(&self.path);
        }
        unlock(&self.file);
    }
}

/// Removes the file if nobody is writing it.
pub(super) fn remove_if_stale(path: &Path) {
    let Ok(file) = File::open(path) else { return };
    // Where locks are not supported nobody knows, and it stays.
    if try_lock(&file).is_ok() {
        let _ = fs::remove_file(path);
        unlock(&file);
    }
}
