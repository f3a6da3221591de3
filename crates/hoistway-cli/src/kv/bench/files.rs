//! The directory that the files of a bench are in, which goes with the bench, also if that is interrupted.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
    sync::{Mutex, MutexGuard, PoisonError},
};
use tempfile::TempDir;

/// Attempts to remove a directory in which threads may still make files.
const ATTEMPTS: u32 = 100;
/// The exit code of a program that Ctrl-C has ended, as shells have it.
const INTERRUPTED: i32 = 130;

/// The directory that there is now. Who removes it holds the lock, so that an interrupt waits for a removal under way.
static CURRENT: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Has Ctrl-C, SIGTERM and SIGHUP end the process only after the directory of the bench was removed.
pub(super) fn remove_when_interrupted() -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(|| {
        // Kept to the end: nothing that fails now, as its files go, is told.
        let current = current();
        if let Some(directory) = &*current {
            let is_gone = || fs::remove_dir_all(directory).is_ok() || !directory.exists();
            (0..ATTEMPTS).any(|_| is_gone());
        }
        process::exit(INTERRUPTED)
    })
}

/// Removed when it is dropped.
pub(super) struct Files(Option<TempDir>);

impl Files {
    pub(super) fn new(directory: &Path) -> io::Result<Self> {
        let mut current = current();
        let below = tempfile::Builder::new().prefix("hoistway-kv-bench-").tempdir_in(directory)?;
        *current = Some(below.path().to_owned());
        Ok(Self(Some(below)))
    }

    pub(super) fn path(&self) -> &Path {
        self.0.as_ref().map_or(Path::new(""), TempDir::path)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let mut current = current();
        drop(self.0.take());
        *current = None;
    }
}

fn current() -> MutexGuard<'static, Option<PathBuf>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}
