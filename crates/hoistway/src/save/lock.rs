//! The lock of a folder, against other saves.
#![forbid(unsafe_code)]

use super::folder::Folder;
use crate::{Error, Result, sys::folders};
use hoistway_io::file::unlock;
use std::{
    fs::File,
    io,
    ops::ControlFlow,
    thread,
    time::{Duration, Instant},
};

/// Time between two looks for a lock that another has.
const TICK: Duration = Duration::from_millis(10);

/// A save that waits longer than this says for what.
const PATIENCE: Duration = Duration::from_secs(1);

/// The lock of a folder, for as long as names in it are given.
#[derive(Debug)]
pub(super) struct FolderLock(File);

impl FolderLock {
    /// Waits until no other process has it, as long as `go_on` does not break off. A long wait is logged when it begins, and
    /// noted when it has ended. Returns the reason where folders cannot be locked.
    pub(super) fn wait(
        folder: &Folder,
        go_on: impl Fn(u64) -> ControlFlow<()>,
        notes: &mut Vec<String>,
    ) -> Result<io::Result<Self>> {
        let started = Instant::now();
        let mut holder = None;
        loop {
            let locked = folders::try_lock(&folder.path).map(Self);
            if go_on(0).is_break() {
                return Err(Error::Cancelled);
            }
            match locked {
                Ok(lock) => {
                    if let Some(holder) = holder {
                        let seconds = started.elapsed().as_secs_f64();
                        notes.push(format!(
                            "the save waited {seconds:.1} s for the lock of its folder: {holder} held it"
                        ));
                    }
                    return Ok(Ok(lock));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(TICK),
                Err(error) => return Ok(Err(error)),
            }
            if holder.is_none() && started.elapsed() >= PATIENCE {
                let found = folders::open(&folder.path).ok().and_then(|file| folders::lock_holder(&file));
                let found = found.unwrap_or_else(|| "another process".to_owned());
                let path = folder.path.display();
                tracing::warn!("the save waits for the lock of {path}: {found} holds it");
                holder = Some(found);
            }
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        unlock(&self.0);
    }
}
