//! Locks of files and folders, against other saves.
#![forbid(unsafe_code)]

use super::folder::Folder;
use crate::{Error, Result};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use std::{
    ops::ControlFlow,
    os::fd::{AsFd, OwnedFd},
    thread,
    time::Duration,
};

/// Time between two looks for a lock that another has.
const TICK: Duration = Duration::from_millis(10);

/// Locks it if nobody else has.
pub(super) fn try_lock(file: impl AsFd) -> rustix::io::Result<()> {
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::INTR) => {}
            locked => return locked,
        }
    }
}

/// Unlocks it. To close it would not do: a process that was forked off meanwhile has the descriptor too, and so the lock.
pub(super) fn unlock(file: impl AsFd) {
    // What was not locked need not be unlocked.
    let _ = flock(file, FlockOperation::Unlock);
}

/// The lock of a folder, for as long as names in it are given.
#[derive(Debug)]
pub(super) struct FolderLock(OwnedFd);

impl FolderLock {
    /// Waits until nobody else has it, as long as `go_on` does not break off; why it cannot be had, where folders cannot be
    /// locked.
    pub(super) fn wait(
        folder: &Folder,
        go_on: impl Fn(u64) -> ControlFlow<()>,
    ) -> Result<Result<Self, Errno>> {
        let file = match folder.open() {
            Ok(file) => file,
            Err(error) => return Ok(Err(error)),
        };
        loop {
            let locked = try_lock(&file);
            if go_on(0).is_break() {
                // A lock is let go with what holds it.
                drop(locked.map(|()| Self(file)));
                return Err(Error::Cancelled);
            }
            match locked {
                Ok(()) => return Ok(Ok(Self(file))),
                Err(Errno::WOULDBLOCK) => thread::sleep(TICK),
                Err(error) => return Ok(Err(error)),
            }
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        unlock(&self.0);
    }
}
