//! Linux: paths are bytes, and files have descriptors.
#![allow(unsafe_code)]

use crate::status::Failure;
use std::{
    borrow::Cow,
    ffi::{CStr, OsStr},
    fs::File,
    os::{fd::BorrowedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

/// The path that a string of the caller names.
pub(crate) fn path_of(text: &CStr) -> Result<&Path, Failure> {
    Ok(Path::new(OsStr::from_bytes(text.to_bytes())))
}

/// The bytes of a path as C gets them.
pub(crate) fn bytes_of(path: &Path) -> Cow<'_, [u8]> {
    path.as_os_str().as_bytes().into()
}

/// A duplicate of a descriptor of the caller, and the path that messages name it by: where the file lies, if known.
///
/// # Safety
/// `descriptor` must not be closed during the call.
pub(crate) unsafe fn file_of_descriptor(descriptor: i32) -> Result<(File, PathBuf), Failure> {
    // SAFETY: open during this call, as the caller says.
    let duplicate = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned();
    let duplicate =
        duplicate.map_err(|error| Failure::argument(format!("descriptor {descriptor}: {error}")))?;
    let link = PathBuf::from(format!("/proc/self/fd/{descriptor}"));
    let path = std::fs::read_link(&link).unwrap_or(link);
    Ok((duplicate.into(), path))
}
