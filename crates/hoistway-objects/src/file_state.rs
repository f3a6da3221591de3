//! What tells a file that was replaced or written from the one before.

use std::{
    fs::{self, Metadata},
    path::PathBuf,
    time::SystemTime,
};

/// A file, and its state if it is there: another one once it was written.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileState {
    path: PathBuf,
    written: Option<Written>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Written {
    modified: SystemTime,
    len: u64,
    change: [i64; 3],
}

impl FileState {
    pub(crate) fn of(path: PathBuf) -> Self {
        let written = |file: Metadata| {
            Some(Written { modified: file.modified().ok()?, len: file.len(), change: change(&file) })
        };
        Self { written: fs::metadata(&path).ok().and_then(written), path }
    }
}

/// Differs also where length and date are as they were.
#[cfg(unix)]
fn change(file: &Metadata) -> [i64; 3] {
    use std::os::unix::fs::MetadataExt;
    [file.ino().cast_signed(), file.ctime(), file.ctime_nsec()]
}

#[cfg(not(unix))]
fn change(_: &Metadata) -> [i64; 3] {
    [0; 3]
}
