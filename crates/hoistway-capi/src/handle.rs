//! What callers hold: made on the heap, and given back once.
#![allow(unsafe_code)]

use crate::status::{Failure, call, hoistway_status};
use std::{
    panic::{self, AssertUnwindSafe},
    ptr, slice,
};

/// Gives the caller what `work` makes; NULL if it fails.
///
/// # Safety
/// `place` must be NULL or writable.
pub(crate) unsafe fn make<T>(
    place: *mut *mut T,
    work: impl FnOnce() -> Result<T, Failure>,
) -> hoistway_status {
    call(|| {
        check_place(place, "handle")?;
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
    unsafe { handle.as_ref() }.ok_or_else(|| Failure::argument(format!("the pointer to the {what} is NULL")))
}

/// What the caller lists: `count` values side by side, or none.
///
/// # Safety
/// `first` must be readable for `count` values, which outlive the result, or `count` be 0.
pub(crate) unsafe fn list<'a, T>(first: *const T, count: u64, what: &str) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(Failure::argument(format!("the list of {what} is NULL, but its length is {count}")));
    }
    let most = isize::MAX as usize / size_of::<T>().max(1);
    let length = usize::try_from(count).ok().filter(|length| *length <= most);
    let length =
        length.ok_or_else(|| Failure::argument(format!("the list of {what} is too long: {count}")))?;
    // SAFETY: readable, as the caller says.
    Ok(unsafe { slice::from_raw_parts(first, length) })
}

/// Fails if the caller has no place for an answer.
pub(crate) fn check_place<T>(place: *mut T, what: &str) -> Result<(), Failure> {
    if place.is_null() {
        return Err(Failure::argument(format!("the output pointer for the {what} is NULL")));
    }
    Ok(())
}

/// Writes an answer to the caller's place.
///
/// # Safety
/// `place` must be NULL or writable.
pub(crate) unsafe fn tell<T>(place: *mut T, answer: T, what: &str) -> Result<(), Failure> {
    check_place(place, what)?;
    // SAFETY: writable, as the caller says.
    unsafe { place.write(answer) };
    Ok(())
}

/// Writes an answer to the caller's place, if there is one.
///
/// # Safety
/// `place` must be NULL or writable.
pub(crate) unsafe fn tell_if_asked<T>(place: *mut T, answer: T) {
    if !place.is_null() {
        // SAFETY: writable, as the caller says.
        unsafe { place.write(answer) };
    }
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
