//! Structures of callers, whichever version of the header they were compiled with.
#![allow(unsafe_code)]

use crate::status::Failure;
use std::{mem::MaybeUninit, ptr, slice};

/// A structure that begins with its size and may grow at its end, by members for which 0 means what was before.
///
/// # Safety
/// All members must be valid for any bytes that callers may give, zeros included, and the first must be a `u64`.
pub(crate) unsafe trait Versioned: Copy {
    /// Its name in C.
    const NAME: &str;
    /// Its size in version 1.
    const FIRST_SIZE: usize;
}

/// Reads a structure: members that the caller's header lacks are 0.
///
/// # Errors
/// If the size is none that this structure ever had, or there is something behind the members known here.
///
/// # Safety
/// `place` must be readable as far as its size says.
pub(crate) unsafe fn read<T: Versioned>(place: *const T) -> Result<T, Failure> {
    // SAFETY: readable, as the caller says.
    let (size, known) = (unsafe { size_of_instance(place)? }, size_of::<T>());
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: readable as far as `size` says; `value` has room for `known` bytes.
    unsafe { ptr::copy_nonoverlapping(place.cast::<u8>(), value.as_mut_ptr().cast(), size.min(known)) };
    if size > known {
        // SAFETY: readable as far as `size` says.
        let unknown = unsafe { slice::from_raw_parts(place.cast::<u8>().add(known), size - known) };
        if unknown.iter().any(|byte| *byte != 0) {
            let reason = format!("{} asks for something that this version does not know", T::NAME);
            return Err(Failure::argument(reason));
        }
    }
    // SAFETY: `Versioned` says that any bytes are valid.
    Ok(unsafe { value.assume_init() })
}

/// Writes the members of `value` that the caller's header has, and nothing behind them. `set_size` is told how many bytes
/// these are.
///
/// # Safety
/// `place` must be writable as far as its size says.
pub(crate) unsafe fn write<T: Versioned>(
    place: *mut T,
    mut value: T,
    set_size: impl FnOnce(&mut T, u64),
) -> Result<(), Failure> {
    // SAFETY: readable, as the caller says.
    let size = unsafe { size_of_instance(place)? }.min(size_of::<T>());
    set_size(&mut value, size as u64);
    // SAFETY: writable as far as its size says.
    unsafe { ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), place.cast(), size) };
    Ok(())
}

/// The size of the caller's structure.
///
/// # Safety
/// The first member must be readable.
pub(crate) unsafe fn size_of_instance<T: Versioned>(place: *const T) -> Result<usize, Failure> {
    // SAFETY: the first member is a `u64`, whatever the version.
    let size = unsafe { place.cast::<u64>().read() };
    let size = usize::try_from(size).ok();
    // No version is longer than a page: whatever says so was never set.
    let size =
        size.filter(|size| (T::FIRST_SIZE..4096).contains(size) && size.is_multiple_of(align_of::<T>()));
    size.ok_or_else(|| Failure::argument(format!("the size of {} was not set", T::NAME)))
}
