//! Text across the border: NUL-terminated UTF-8, and paths as the system has them.
#![allow(unsafe_code)]

use crate::{handle, status::Failure, system};
use std::{
    borrow::Cow,
    ffi::{CStr, CString, c_char},
    path::Path,
};

/// Returns the version of the library, such as "0.1.0". The string is static: do not free it.
#[unsafe(no_mangle)]
pub extern "C" fn hoistway_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// Frees a string that a function of this library gave to the caller. NULL is allowed.
///
/// # Safety
/// `string` must be NULL or come from this library, and not have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_string_free(string: *mut c_char) {
    if !string.is_null() {
        // SAFETY: made by `give`.
        drop(unsafe { CString::from_raw(string) });
    }
}

/// `text` for C, which has no zero bytes within strings.
pub(crate) fn without_nul(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{FFFD}")).unwrap_or_default()
}

/// Gives a string to the caller, who frees it.
///
/// # Safety
/// `place` must be NULL or writable.
pub(crate) unsafe fn give(text: &str, place: *mut *mut c_char) -> Result<(), Failure> {
    if place.is_null() {
        return Err(Failure::argument("the output pointer for the string is NULL"));
    }
    // SAFETY: writable.
    unsafe { place.write(without_nul(text).into_raw()) };
    Ok(())
}

/// A string of the caller; `None` for NULL.
///
/// # Safety
/// `text` must be NULL or a NUL-terminated string that outlives the result.
pub(crate) unsafe fn borrow<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: a string, as the caller says.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Failure::argument(format!("{what} is not UTF-8")))
}

/// A string of the caller, which must not be NULL.
///
/// # Safety
/// `text` must be NULL or a NUL-terminated string that outlives the result.
pub(crate) unsafe fn required<'a>(text: *const c_char, what: &str) -> Result<&'a str, Failure> {
    // SAFETY: as the caller says.
    let text = unsafe { borrow(text, &format!("the {what}"))? };
    text.ok_or_else(|| Failure::argument(format!("the {what} is NULL")))
}

/// Names that the caller lists.
///
/// # Safety
/// `names` must be `count` NUL-terminated strings that outlive the result.
pub(crate) unsafe fn borrow_all<'a>(
    names: *const *const c_char,
    count: u64,
) -> Result<Vec<&'a str>, Failure> {
    // SAFETY: as many, as the caller says.
    let names = unsafe { handle::list(names, count, "names")? };
    // SAFETY: strings, as the caller says.
    names.iter().map(|name| unsafe { required(*name, "name of a tensor") }).collect()
}

/// A string of the caller, with replacements for what is not UTF-8; `None` for NULL.
///
/// # Safety
/// `text` must be NULL or a NUL-terminated string that outlives the result.
pub(crate) unsafe fn borrow_lossily<'a>(text: *const c_char) -> Option<Cow<'a, str>> {
    // SAFETY: a string, as the caller says.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// A path of the caller; `None` for NULL.
///
/// # Safety
/// `path` must be NULL or a NUL-terminated string that outlives the result.
pub(crate) unsafe fn borrow_path<'a>(path: *const c_char) -> Result<Option<&'a Path>, Failure> {
    if path.is_null() {
        return Ok(None);
    }
    // SAFETY: a string, as the caller says.
    system::path_of(unsafe { CStr::from_ptr(path) }).map(Some)
}
