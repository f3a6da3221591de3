//! Windows: handles are counted. Nothing tells or changes what the cache holds of a file, and no load asks.

use super::Footprint;
use std::{fs::File, io, os::windows::fs::FileExt, path::Path, path::PathBuf, time::SystemTime};
use windows_sys::Win32::{
    Foundation::ERROR_SHARING_VIOLATION,
    System::Threading::{GetCurrentProcess, GetProcessHandleCount},
};

impl Footprint {
    pub fn now() -> Self {
        let mut count = 0;
        // SAFETY: the handle of this process needs no closing, and the number outlives the call.
        assert_ne!(unsafe { GetProcessHandleCount(GetCurrentProcess(), &raw mut count) }, 0);
        Self { descriptors: count as usize, threads: 0, arena_kib: 0 }
    }
}

/// The files that are open: not known.
pub fn open_files() -> Vec<PathBuf> {
    Vec::new()
}

/// Whether the engine has a file open: nothing may write to it then.
pub fn is_open(path: &Path) -> bool {
    let writer = File::options().write(true).open(path);
    writer.is_err_and(|error| error.raw_os_error() == Some(ERROR_SHARING_VIOLATION.cast_signed()))
}

/// A folder of a file system in memory: there is none.
pub fn in_memory() -> io::Result<tempfile::TempDir> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Writes back what the cache holds of an open file, which stays there.
pub fn drop_from_cache(file: &File) {
    // One that is open for reading cannot be.
    let _ = file.sync_all();
}

/// When the file was written last.
pub fn change_time(file: &File) -> SystemTime {
    file.metadata().unwrap().modified().unwrap()
}

pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) {
    assert_eq!(file.seek_write(bytes, offset).unwrap(), bytes.len());
}

/// A file that is in the cache as far as it was written or read a moment ago.
pub struct Warm(());

impl Warm {
    pub fn make(path: &Path) -> Self {
        std::fs::read(path).unwrap();
        Self(())
    }
}
