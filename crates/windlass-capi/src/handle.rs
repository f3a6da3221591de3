//! What callers hold: made on the heap, and given back once.
#![allow(unsafe_code)]

use crate::status::{Failure, call, windlass_status};
use std::{
    panic::{self, AssertUnwindSafe},
    ptr,
};

/// Gives the caller what `work` makes; NULL if it fails.
///
/// # Safety
/// `place` must be NULL or writable.
pub(crate) unsafe fn make<T>(
    place: *mut *mut T,
    work: impl FnOnce() -> Result<T, Failure>,
) -> windlass_status {
    call(|| {
        if place.is_null() {
            return Err(Failure::argument("there is no place for the handle: the pointer is NULL"));
        }
        // SAFETY: writable, as the caller says.
        unsafe { place.write(ptr::null_mut()) };
        let made = Box::into_raw(Box::new(work()?));
        // SAFETY: as above.
        unsafe { place.write(made) };
        Ok(())
    })
}

/// What the caller holds, if it is not NULL.
///
/// # Safety
/// `handle` must be NULL or live as long as the result.
pub(crate) unsafe fn held<'a, T>(handle: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: as the caller says.
    unsafe { handle.as_ref() }
        .ok_or_else(|| Failure::argument(format!("there is no {what}: the pointer is NULL")))
}

/// Drops what the caller gives back, and leaves its last error as it is. NULL is nothing.
///
/// # Safety
/// `handle` must be NULL or come from [`make`], and not have been given back.
pub(crate) unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // What panics here has been told by the panic hook, and there is no status to return.
        // SAFETY: made by `make`, given back once.
        let _ = panic::catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(handle) })));
    }
}
