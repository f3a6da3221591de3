//! Removes blocks on request: some blocks, or all of a namespace.
#![forbid(unsafe_code)]

use super::{FilesShared, failed, namespaces::Namespace, scan};
use crate::{Durability, Error, Fingerprint, NamespaceId, Result, disk::Disk};
use std::{collections::BTreeSet, io, path::Path, sync::Arc};

impl FilesShared {
    pub(super) fn delete(&self, namespace: NamespaceId, blocks: &[(&[u8], Fingerprint)]) -> Result<usize> {
        self.writer()?;
        let Some(namespace) = self.namespaces.get(namespace) else { return Ok(0) };
        let mut directories = BTreeSet::new();
        let mut deleted = 0;
        for (key, fingerprint) in blocks {
            let Some(path) = namespace.path(*fingerprint, Some(key)) else { continue };
            if self.delete_file(&namespace, *fingerprint, &path)? {
                deleted += 1;
                directories.extend(path.parent().map(Path::to_owned));
            }
        }
        self.sync_directories(&directories)?;
        Ok(deleted)
    }

    pub(super) fn clear(&self, namespace: NamespaceId) -> Result<usize> {
        self.writer()?;
        let Some(namespace) = self.namespaces.get(namespace) else { return Ok(0) };
        let mut directories = BTreeSet::new();
        let mut deleted = 0;
        for directory in scan::directories(&namespace.tree)? {
            for file in scan::files(&namespace, &directory)? {
                if self.delete_file(&namespace, file.fingerprint, &file.path)? {
                    deleted += 1;
                    directories.insert(directory.clone());
                }
            }
        }
        self.sync_directories(&directories)?;
        Ok(deleted)
    }

    /// Removes a block unless it is pinned. Returns whether a block was removed.
    fn delete_file(&self, namespace: &Arc<Namespace>, fingerprint: Fingerprint, path: &Path) -> Result<bool> {
        let removed = self.index.remove_if(&fingerprint, |_, is_pinned| !is_pinned);
        if removed.is_none() && self.index.peek(&fingerprint).is_some() {
            return Ok(false);
        }
        namespace.forget_key(&fingerprint);
        match self.disk.remove(path) {
            Ok(()) => {
                self.room.removed(removed.map_or(0, |removed| removed.entry.slot_bytes));
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.peers.vanished(removed.map_or(0, |removed| removed.entry.slot_bytes));
                Ok(false)
            }
            Err(error) => Err(failed("removing", path)(error)),
        }
    }

    fn sync_directories(&self, directories: &BTreeSet<std::path::PathBuf>) -> Result<(), Error> {
        if self.durability == Durability::None {
            return Ok(());
        }
        directories
            .iter()
            .try_for_each(|path| self.disk.sync_directory(path).map_err(failed("syncing", path)))
    }
}
