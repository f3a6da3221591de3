//! Folders and the names in them.
#![allow(unsafe_code)]

use super::{code, verbatim};
use std::{
    ffi::{OsStr, OsString},
    fs::{File, OpenOptions},
    io,
    os::windows::{
        ffi::{OsStrExt, OsStringExt},
        fs::OpenOptionsExt,
    },
    path::Path,
};
use windows_sys::Win32::{
    Foundation::{ERROR_INVALID_FUNCTION, ERROR_NOT_SUPPORTED, GENERIC_READ, GENERIC_WRITE},
    Storage::FileSystem::{FILE_FLAG_BACKUP_SEMANTICS, MoveFileExW, WRITE_DAC},
};

/// Opens a folder, to lock or to sync it.
///
/// # Errors
/// The system's.
pub fn open(path: &Path) -> io::Result<File> {
    // Only what may be written to can be synced.
    let access = GENERIC_READ | GENERIC_WRITE;
    OpenOptions::new().access_mode(access).custom_flags(FILE_FLAG_BACKUP_SEMANTICS).open(path)
}

/// Makes the names in a folder durable.
///
/// # Errors
/// The system's.
pub fn sync(path: &Path) -> io::Result<()> {
    match open(path)?.sync_all() {
        // Some file systems have no such thing.
        Err(error) if matches!(code(&error), Some(ERROR_INVALID_FUNCTION | ERROR_NOT_SUPPORTED)) => Ok(()),
        done => done,
    }
}

/// Makes a new file for reading and writing, with the rights that its folder gives. They can be changed later.
///
/// # Errors
/// The system's; [`AlreadyExists`](io::ErrorKind::AlreadyExists) if the name is taken.
pub fn create_private(path: &Path) -> io::Result<File> {
    let access = GENERIC_READ | GENERIC_WRITE | WRITE_DAC;
    OpenOptions::new().access_mode(access).write(true).create_new(true).open(path)
}

/// Renames without replacing.
///
/// # Errors
/// The system's; [`AlreadyExists`](io::ErrorKind::AlreadyExists) if the name is taken.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (verbatim(from)?, verbatim(to)?);
    // SAFETY: both paths end with a zero and outlive the call.
    if unsafe { MoveFileExW(from.as_ptr(), to.as_ptr(), 0) } != 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// As much of a name as `max_bytes` hold; the system counts characters of two bytes, and takes 255 of them.
pub fn shortened(name: &OsStr, max_bytes: usize) -> OsString {
    OsString::from_wide(&name.encode_wide().take(max_bytes).collect::<Vec<_>>())
}
