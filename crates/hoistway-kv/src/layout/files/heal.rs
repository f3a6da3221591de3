//! A store whose directory is emptied, replaced or unmounted while processes use it.
#![forbid(unsafe_code)]

use super::{FileId, FilesShared, failed, lock, names};
use crate::{
    EventKind, LayoutKind, Result,
    disk::{RealDisk, metadata},
    layout::directory,
};
use std::{io, path::Path};
use uuid::Uuid;

/// The store that was opened: its identity, and the file that `STORE` was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Opened {
    store: Uuid,
    file: FileId,
}

impl Opened {
    /// The directory that the path of a store names now.
    pub(super) fn at(disk: &RealDisk, root: &Path) -> Result<Self> {
        let store = directory::expect(disk, root, LayoutKind::Files)?.store;
        let file = superblock(root)?.ok_or_else(|| {
            failed("opening", &root.join(names::SUPERBLOCK))(io::ErrorKind::NotFound.into())
        })?;
        Ok(Self { store, file })
    }

    /// Whether the path of the store names the directory that was opened. Its `STORE` may have been touched.
    fn is_at(&mut self, disk: &RealDisk, root: &Path) -> Result<bool> {
        let Some(file) = superblock(root)? else { return Ok(false) };
        if file != self.file
            && file.is_same_inode(&self.file)
            && Self::at(disk, root).ok().is_some_and(|there| there.store == self.store)
        {
            self.file = file;
        }
        Ok(file == self.file)
    }
}

/// The file that `STORE` is; `None` if there is none.
fn superblock(root: &Path) -> Result<Option<FileId>> {
    let path = root.join(names::SUPERBLOCK);
    match metadata(&path) {
        Ok(metadata) => Ok(Some(FileId::of(&metadata))),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(failed("asking for", &path)(error)),
    }
}

impl FilesShared {
    /// Forgets all blocks if the store's directory is not what was opened, and goes on with the one that is there: makes
    /// a store where there is none, on the same file system as before. Fails, and is tried again, where that may not be.
    pub(super) fn heal(&self) -> Result<()> {
        let mut known = lock(&self.opened);
        if known.is_at(&self.disk, &self.root)? {
            return Ok(());
        }
        let gone = self.index.remove_all(|_, _, _| true);
        self.observed.evicted(&gone);
        self.namespaces.all().iter().for_each(|namespace| namespace.forget_files());
        lock(&self.absent).clear();
        lock(&self.damaged).clear();
        lock(&self.durable).clear();
        directory::expect_place(&self.disk, &self.root, known.store, known.file.device())?;
        if self.writer.is_some() {
            directory::create(&self.disk, &self.root, LayoutKind::Files, self.creation)?;
        }
        let there = Opened::at(&self.disk, &self.root)?;
        if let Some(writer) = &self.writer {
            writer.restart(&self.disk, &self.root)?;
            self.unsynced.note(&self.disk, &self.root, self.written)?;
            for (id, description) in self.namespaces.described() {
                self.own_tree(id, &description)?;
                directory::describe(&self.disk, &self.root, id, &description, |path, bytes| {
                    writer.write_file(&self.disk, path, bytes).map_err(failed("writing to", path))
                })?;
            }
        }
        *known = there;
        let reason =
            format!("{} was emptied or replaced, and {} blocks with it", self.root.display(), gone.len());
        self.observed.note(EventKind::WriterRestarted, reason);
        self.scan_all()
    }
}
