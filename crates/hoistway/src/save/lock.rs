//! The lock of a folder, against other saves.
#![forbid(unsafe_code)]

use super::{folder::Folder, io_error};
use crate::{Error, Result, sys::folders::FolderLock};
use std::{
    io,
    ops::ControlFlow,
    thread,
    time::{Duration, Instant},
};

/// Time between two looks for a lock that another has.
const TICK: Duration = Duration::from_millis(10);

/// A save that waits longer than this says for what.
const PATIENCE: Duration = Duration::from_secs(1);

/// Waits until no other process has the lock of the folder, as long as `go_on` does not break off. A long wait is logged when
/// it begins, and noted when it has ended. Returns the reason where folders cannot be locked.
///
/// # Errors
/// [`Error::Cancelled`]; the system's, if another has the lock and the wait for it fails.
pub(super) fn wait(
    folder: &Folder,
    go_on: impl Fn(u64) -> ControlFlow<()>,
    notes: &mut Vec<String>,
) -> Result<io::Result<FolderLock>> {
    let mut lock = match FolderLock::new(&folder.path) {
        Ok(lock) => lock,
        Err(error) => return Ok(Err(error)),
    };
    let taken = wait_for(folder, &mut lock, FolderLock::try_lock, FolderLock::holder, go_on, notes)?;
    Ok(taken.map(|()| lock))
}

fn wait_for<L>(
    folder: &Folder,
    lock: &mut L,
    try_lock: impl Fn(&mut L) -> io::Result<()>,
    holder_of: impl Fn(&L) -> Option<String>,
    go_on: impl Fn(u64) -> ControlFlow<()>,
    notes: &mut Vec<String>,
) -> Result<io::Result<()>> {
    let started = Instant::now();
    let (mut is_held, mut holder) = (false, None);
    loop {
        let locked = try_lock(lock);
        if go_on(0).is_break() {
            return Err(Error::Cancelled);
        }
        match locked {
            Ok(()) => {
                if let Some(holder) = holder {
                    let seconds = started.elapsed().as_secs_f64();
                    notes.push(format!(
                        "the save waited {seconds:.1} s for the lock of its folder: {holder} held it"
                    ));
                }
                return Ok(Ok(()));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(TICK),
            // The folder can be locked, and another save names files in it.
            Err(error) if is_held => return Err(io_error("lock folder", &folder.path, error)),
            Err(error) => return Ok(Err(error)),
        }
        is_held = true;
        if holder.is_none() && started.elapsed() >= PATIENCE {
            let found = holder_of(lock).unwrap_or_else(|| "another process".to_owned());
            let path = folder.path.display();
            tracing::warn!("the save waits for the lock of {path}: {found} holds it");
            holder = Some(found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_with(answers: &[io::ErrorKind]) -> Result<io::Result<()>> {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::create(directory.path(), "model", false).unwrap();
        let next = |left: &mut std::slice::Iter<'_, io::ErrorKind>| match left.next() {
            Some(&kind) => Err(kind.into()),
            None => Ok(()),
        };
        let go_on = |_| ControlFlow::Continue(());
        wait_for(&folder, &mut answers.iter(), next, |_| None, go_on, &mut Vec::new())
    }

    /// Such a save would name files beside the one that has the lock.
    #[test]
    fn a_lock_that_another_has_is_waited_for_or_fails_the_save() {
        use io::ErrorKind::{Other, Unsupported, WouldBlock};
        wait_with(&[]).unwrap().unwrap();
        wait_with(&[WouldBlock, WouldBlock]).unwrap().unwrap();
        assert_eq!(wait_with(&[Unsupported]).unwrap().unwrap_err().kind(), Unsupported);
        let error = wait_with(&[WouldBlock, Other]).unwrap_err();
        assert!(matches!(&error, Error::Io { operation: "lock folder", .. }), "{error:?}");
    }
}
