//! A store whose directory is emptied, replaced or unmounted while processes use it.
#![forbid(unsafe_code)]

use super::{FileId, Shared, failed, lock, names};
use crate::{EventKind, LayoutKind, Result, disk::metadata, layout::directory};
use std::{io, path::Path};

/// The file that `STORE` is; `None` if there is none.
pub(super) fn superblock(root: &Path) -> Result<Option<FileId>> {
    let path = root.join(names::SUPERBLOCK);
    match metadata(&path) {
        Ok(metadata) => Ok(Some(FileId::of(&metadata))),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(failed("asking for", &path)(error)),
    }
}

impl Shared {
    /// Forgets all blocks if the store's directory is not what was opened, and goes on with the one that is there: makes
    /// a store where there is none, on the same file system as before. Fails, and is tried again, where that may not be.
    pub(super) fn heal(&self) -> Result<()> {
        let mut known = lock(&self.superblock);
        if superblock(&self.root)? == Some(*known) {
            return Ok(());
        }
        let gone = self.index.remove_all(|_, _, _| true);
        self.observed.evicted(&gone);
        self.namespaces.all().iter().for_each(|namespace| namespace.forget_files());
        lock(&self.absent).clear();
        lock(&self.damaged).clear();
        lock(&self.durable).clear();
        directory::expect_file_system(&self.disk, &self.root, known.device())?;
        if self.writer.is_some() {
            directory::create(&self.disk, &self.root, LayoutKind::Files, self.creation)?;
        }
        directory::expect(&self.disk, &self.root, LayoutKind::Files)?;
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
        if let Some(there) = superblock(&self.root)? {
            *known = there;
        }
        let reason =
            format!("{} was emptied or replaced, and {} blocks with it", self.root.display(), gone.len());
        self.observed.note(EventKind::WriterRestarted, reason);
        self.scan_all()
    }
}
