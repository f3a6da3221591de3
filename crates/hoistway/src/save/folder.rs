//! The folder that a save goes to: temporary files in it, and its entries on the disk.
#![forbid(unsafe_code)]

use super::{
    io_error,
    temp::{self, TempFile, TempName},
};
use crate::{Error, Result, sys::folders};
use hoistway_io::file::{FileSystem, FileSystemKind};
use std::{
    cell::LazyCell,
    ffi::{OsStr, OsString},
    fs, io,
    path::{Path, PathBuf},
};

/// Bytes of a file's own name that the name of its temporary files has: there is a limit of 255.
const MAX_NAME_BYTES: usize = 200;

/// A folder, and the name of what is saved in it.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// What names of temporary files begin with.
    temp_prefix: OsString,
    sync: bool,
}

impl Folder {
    /// That of the file of this absolute path.
    pub(super) fn of_file(path: &Path, sync: bool) -> Result<Self> {
        match (path.parent(), path.file_name()) {
            (Some(folder), Some(name)) => Ok(Self::new(folder, name, sync)),
            _ => Err(io_error("save", path, io::Error::other("it is no name of a file"))),
        }
    }

    /// A folder that is made if it is not there.
    pub(super) fn create(path: &Path, name: &str, sync: bool) -> Result<Self> {
        let folder = Self::new(path, OsStr::new(name), sync);
        if path.is_dir() {
            return Ok(folder);
        }
        let new: Vec<&Path> = path.ancestors().take_while(|level| !level.exists()).collect();
        fs::create_dir_all(path).map_err(|source| io_error("create folder", path, source))?;
        // Each is an entry of the one above.
        for parent in new.into_iter().rev().filter_map(Path::parent) {
            Self::new(parent, OsStr::new(name), sync).sync()?;
        }
        Ok(folder)
    }

    fn new(path: &Path, name: &OsStr, sync: bool) -> Self {
        let mut temp_prefix = OsString::from(".");
        temp_prefix.push(folders::shortened(name, MAX_NAME_BYTES));
        temp_prefix.push(temp::MARK);
        Self { path: path.to_owned(), temp_prefix, sync }
    }

    /// Whether saves to it are on the disk when they end.
    pub(super) fn is_synced(&self) -> bool {
        self.sync
    }

    /// A new temporary file, which is locked.
    pub(super) fn new_temp(&self) -> Result<TempFile> {
        TempFile::new(|random| {
            let mut name = self.temp_prefix.clone();
            name.push(format!("{random:016x}{}", temp::SUFFIX));
            self.path.join(name)
        })
    }

    /// Removes what saves to the folder left behind that were killed: those of the same name, and others where a lock tells that
    /// nothing writes to them. Notes what may be such a file and stays.
    pub(super) fn remove_stale_temps(&self, notes: &mut Vec<String>) {
        // Elsewhere a lock may not reach other machines.
        let is_local = LazyCell::new(|| {
            use FileSystemKind::{Local, Memory, Overlay};
            let found = folders::open(&self.path).and_then(|folder| FileSystem::of(&folder));
            found.is_ok_and(|found| matches!(found.kind, Local | Memory | Overlay))
        });
        // A folder that cannot be listed does not hinder the save.
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(name) = TempName::of(&name) else { continue };
            let is_own = name.prefix == self.temp_prefix.as_encoded_bytes();
            // A link is none of a save, and would have another file opened.
            if entry.file_type().is_ok_and(|kind| kind.is_file())
                && (is_own || *is_local)
                && let Err(error) = temp::remove_if_stale(&entry.path())
            {
                let path = entry.path();
                notes.push(format!("{} stays, if a save left it: {error}", path.display()));
            }
        }
    }

    /// Sees to it that names given and taken so far are on the disk.
    pub(super) fn sync(&self) -> Result<()> {
        self.try_sync().map_err(|error| io_error("sync folder", &self.path, error))
    }

    /// As [`sync`](Self::sync), once `saved` has its name: a failure is none of the save, but of the knowledge that it is
    /// on the disk.
    pub(super) fn sync_saved(&self, saved: &Path) -> Result<()> {
        self.try_sync().map_err(|error| Error::NotSynced { path: saved.to_owned(), source: error })
    }

    fn try_sync(&self) -> io::Result<()> {
        if !self.sync {
            return Ok(());
        }
        #[cfg(test)]
        super::crash_tests::step(super::crash_tests::Step::SyncFolder(self.path.clone()));
        folders::sync(&self.path)
    }
}
