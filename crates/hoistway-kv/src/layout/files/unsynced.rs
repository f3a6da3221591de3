//! Whether a store may have blocks that no sync covers. Files of blocks do not say it: a file in the root does for all of
//! them, from when a process opens the store to write without syncs.
#![forbid(unsafe_code)]

use super::{failed, names};
use crate::{
    Durability, Result,
    disk::{Disk, FileAccess, RealDisk, metadata},
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

/// The known state of the file.
#[derive(Debug)]
pub(super) struct Unsynced {
    path: PathBuf,
    is_there: AtomicBool,
}

impl Unsynced {
    /// Looks, and notes it for others if this process writes without syncs; on the disk when this returns.
    pub(super) fn open(disk: &RealDisk, root: &Path, written: Option<Durability>) -> Result<Self> {
        let unsynced = Self { path: root.join(names::UNSYNCED), is_there: AtomicBool::new(false) };
        unsynced.look();
        unsynced.note(disk, root, written)?;
        Ok(unsynced)
    }

    /// Notes it for others if this process writes without syncs; on the disk when this returns.
    pub(super) fn note(&self, disk: &RealDisk, root: &Path, written: Option<Durability>) -> Result<()> {
        if written != Some(Durability::None) {
            return Ok(());
        }
        match disk.open(&self.path, FileAccess::CreateNew) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("making", &self.path)(error));
            }
            _ => {}
        }
        // Also if it was there: its maker may not have synced it yet.
        disk.sync_directory(root).map_err(failed("syncing", root))?;
        self.is_there.store(true, Ordering::Release);
        Ok(())
    }

    /// Looks whether another process has noted it meanwhile.
    pub(super) fn look(&self) -> bool {
        // If that cannot be found out, checksums are compared.
        let is_missing = || metadata(&self.path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        let is_there = self.is_there() || !is_missing();
        self.is_there.store(is_there, Ordering::Release);
        is_there
    }

    /// Whether there may be such blocks.
    pub(super) fn is_there(&self) -> bool {
        self.is_there.load(Ordering::Acquire)
    }
}
