//! Windows: paths are UTF-8 for C, and files have no descriptors.
#![allow(unsafe_code)]

use crate::status::Failure;
use std::{
    borrow::Cow,
    ffi::CStr,
    fs::File,
    path::{Path, PathBuf},
};

/// The path that a string of the caller names.
pub(crate) fn path_of(text: &CStr) -> Result<&Path, Failure> {
    text.to_str().map(Path::new).map_err(|_| Failure::argument("the path is not UTF-8"))
}

/// The bytes of a path as C gets them, with replacements for what is not Unicode.
pub(crate) fn bytes_of(path: &Path) -> Cow<'_, [u8]> {
    match path.to_string_lossy() {
        Cow::Borrowed(text) => text.as_bytes().into(),
        Cow::Owned(text) => text.into_bytes().into(),
    }
}

/// Refuses: a descriptor belongs to the C runtime that opened it, which may not be this library's.
///
/// # Safety
/// None is needed here; other systems look at the descriptor.
pub(crate) unsafe fn file_of_descriptor(descriptor: i32) -> Result<(File, PathBuf), Failure> {
    Err(Failure::argument(format!(
        "descriptor {descriptor}: descriptors are not available on Windows; give the path of the file"
    )))
}
