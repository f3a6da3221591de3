//! The lock of a folder, against other saves.
#![forbid(unsafe_code)]

use super::folder::Folder;
use crate::{Error, Result, sys::folders};
use hoistway_io::file::{try_lock, unlock};
use std::{fs::File, io, ops::ControlFlow, thread, time::Duration};

/// Time between two looks for a lock that another has.
const TICK: Duration = Duration::from_millis(10);

/// The lock of a folder, for as long as names in it are given.
#[derive(Debug)]
pub(super) struct FolderLock(File);

impl FolderLock {
    /// Waits until no other process has it, as long as `go_on` does not break off. Returns the reason where folders
    /// cannot be locked.
    pub(super) fn wait(folder: &Folder, go_on: impl Fn(u64) -> ControlFlow<()>) -> Result<io::Result<Self>> {
        let file = match folders::open(&folder.path) {
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
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(TICK),
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
