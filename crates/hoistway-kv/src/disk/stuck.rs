//! A file system that does not answer, such as a mount whose server is gone: for tests of what waits for it.
#![forbid(unsafe_code)]

use hoistway_io::parallel::lock;
use std::{
    fs::File,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, PoisonError},
};

/// Directories below which calls hang, and how many calls each has held up.
static STUCK: Mutex<Vec<(PathBuf, u64)>> = Mutex::new(Vec::new());
static CHANGED: Condvar = Condvar::new();

/// While it lives, calls that name a file below a directory, or go to an open one there, do not come back. Transfers of
/// blocks follow a script alone.
#[derive(Debug)]
pub struct HangingCalls(PathBuf);

impl HangingCalls {
    /// Lets the calls below this directory hang.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        lock(&STUCK).push((root.clone(), 0));
        Self(root)
    }

    /// How many calls it has held up.
    pub fn came(&self) -> u64 {
        lock(&STUCK).iter().filter(|(root, _)| *root == self.0).map(|(_, came)| came).sum()
    }
}

impl Drop for HangingCalls {
    fn drop(&mut self) {
        lock(&STUCK).retain(|(root, _)| *root != self.0);
        CHANGED.notify_all();
    }
}

/// Waits if calls hang that name this file.
pub(super) fn pass(path: &Path) {
    let mut stuck = lock(&STUCK);
    if let Some((_, came)) = stuck.iter_mut().find(|(root, _)| path.starts_with(root)) {
        *came += 1;
    }
    let hangs = |stuck: &mut Vec<(PathBuf, u64)>| stuck.iter().any(|(root, _)| path.starts_with(root));
    drop(CHANGED.wait_while(stuck, hangs).unwrap_or_else(PoisonError::into_inner));
}

/// Waits if calls hang that go to this file.
pub(super) fn pass_file(file: &File) {
    let is_any = !lock(&STUCK).is_empty();
    if is_any && let Ok(path) = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        pass(&path);
    }
}
