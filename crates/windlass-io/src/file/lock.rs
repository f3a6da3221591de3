//! Locks of files and folders, against other processes and other descriptors of this one.
#![forbid(unsafe_code)]

use std::{
    fs::{File, TryLockError},
    io,
};

/// Locks it unless another descriptor has the lock.
///
/// # Errors
/// [`WouldBlock`](io::ErrorKind::WouldBlock) if another has it; others where it cannot be locked.
pub fn try_lock(file: &File) -> io::Result<()> {
    loop {
        match file.try_lock() {
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            locked => return Ok(locked?),
        }
    }
}

/// Unlocks it. To close it would not do: a process that was forked off meanwhile has the descriptor too, and so the lock.
pub fn unlock(file: &File) {
    // What was not locked need not be unlocked.
    let _ = file.unlock();
}
