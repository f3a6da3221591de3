//! How calls end: a status, and a message that belongs to the thread.
#![allow(unsafe_code)]

use hoistway::Error;
use std::{
    any::Any,
    cell::RefCell,
    ffi::{CString, c_char},
    panic::{self, AssertUnwindSafe},
};

/// The result of a call, or of a read.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum hoistway_status {
    /// It succeeded.
    HOISTWAY_OK = 0,
    /// It has not ended yet.
    HOISTWAY_PENDING = 1,
    /// An argument or an option is invalid.
    HOISTWAY_INVALID_ARGUMENT = 2,
    /// There is no such file, tensor, expert, layer or row.
    HOISTWAY_NOT_FOUND = 3,
    /// A file violates its format.
    HOISTWAY_INVALID_FILE = 4,
    /// A file ends too early.
    HOISTWAY_TRUNCATED = 5,
    /// A file has changed since it was opened.
    HOISTWAY_CHANGED = 6,
    /// An operation of the operating system failed.
    HOISTWAY_IO = 7,
    /// The named route cannot carry the data.
    HOISTWAY_ROUTE_UNAVAILABLE = 8,
    /// A device is missing, or has failed.
    HOISTWAY_DEVICE = 9,
    /// There is not enough memory.
    HOISTWAY_MEMORY = 10,
    /// It was cancelled.
    HOISTWAY_CANCELLED = 11,
    /// A defect of hoistway. Please report it.
    HOISTWAY_INTERNAL = 12,
    /// A block of a KV store differs from what was stored. Later loads of it are misses.
    HOISTWAY_CORRUPT = 13,
    /// There is no room, or too much is in flight. Free what is no longer needed, and try again.
    HOISTWAY_REFUSED = 14,
    /// It did not end in the time that the options allow.
    HOISTWAY_TIMED_OUT = 15,
    /// The store was closed, or it was opened by the parent of this process.
    HOISTWAY_CLOSED = 16,
    /// A KV store was opened for reading only.
    HOISTWAY_READ_ONLY = 17,
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    status: hoistway_status,
    message: String,
}

impl Failure {
    pub(crate) fn new(status: hoistway_status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(hoistway_status::HOISTWAY_INVALID_ARGUMENT, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(hoistway_status::HOISTWAY_NOT_FOUND, message)
    }

    pub(crate) fn pending() -> Self {
        Self::new(hoistway_status::HOISTWAY_PENDING, "it has not ended yet")
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(hoistway_status::HOISTWAY_INTERNAL, message)
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        Self { status: status_of(error), message: error.to_string() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::internal(format!("the JSON could not be written: {error}"))
    }
}

/// What C is told of an error.
pub(crate) fn status_of(error: &Error) -> hoistway_status {
    use hoistway_status::*;
    match error {
        Error::NotFound { .. } | Error::NoSuchTensor { .. } => HOISTWAY_NOT_FOUND,
        Error::InvalidFile { .. }
        | Error::InvalidIndex { .. }
        | Error::DuplicateTensor { .. }
        | Error::InvalidManifest { .. }
        | Error::DigestMismatch { .. }
        | Error::ChecksumMismatch { .. } => HOISTWAY_INVALID_FILE,
        Error::Truncated { .. } => HOISTWAY_TRUNCATED,
        Error::Changed { .. } => HOISTWAY_CHANGED,
        Error::Io { .. } | Error::System { .. } | Error::Sink { .. } => HOISTWAY_IO,
        Error::RouteUnavailable { .. } => HOISTWAY_ROUTE_UNAVAILABLE,
        Error::DeviceUnavailable { .. } | Error::Device { .. } => HOISTWAY_DEVICE,
        Error::Plan(_) | Error::InvalidOption { .. } | Error::Forked => HOISTWAY_INVALID_ARGUMENT,
        Error::MemoryBudget { .. } | Error::Allocation { .. } => HOISTWAY_MEMORY,
        Error::Cancelled => HOISTWAY_CANCELLED,
        _ => HOISTWAY_INTERNAL,
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Does the work of a call: notes why it failed, and lets no panic out.
pub(crate) fn call(work: impl FnOnce() -> Result<(), Failure>) -> hoistway_status {
    let failure = match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => {
            note("");
            return hoistway_status::HOISTWAY_OK;
        }
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::internal(format!("internal error, please report it: {}", words_of(&*panic))),
    };
    note(&failure.message);
    failure.status
}

/// What a panic said.
fn words_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic")
}

fn note(message: &str) {
    let message = crate::text::without_nul(message);
    // While the thread ends there is no place for the message.
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = message);
}

/// Returns why the last call of this thread that returned a status failed: a sentence in UTF-8, or an empty string if
/// that call succeeded. The string is the library's, and valid until the next such call of this thread.
/// `hoistway_batch_status` and `hoistway_kv_ticket_poll` do not change it.
#[unsafe(no_mangle)]
pub extern "C" fn hoistway_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
