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
            let reason = format!("{} sets members that this version of the library does not know", T::NAME);
            return Err(Failure::argument(reason));
        }
    }
    // SAFETY: `Versioned` says that any bytes are valid.
    Ok(unsafe { value.assume_init() })
}

/// Makes something of each of `count` structures that lie side by side.
///
/// # Errors
/// As [`read`]; if the structures differ in size; or what `make` fails with.
///
/// # Safety
/// `first` must be readable as far as the sizes of `count` structures say.
pub(crate) unsafe fn read_all<T: Versioned, U>(
    first: *const T,
    count: u64,
    mut make: impl FnMut(&T, usize) -> Result<U, Failure>,
) -> Result<Vec<U>, Failure> {
    let count = usize::try_from(count)
        .map_err(|_| Failure::argument(format!("the list of {} is too long: {count}", T::NAME)))?;
    if count == 0 {
        return Ok(Vec::new());
    }
    if first.is_null() {
        return Err(Failure::argument(format!("the list of {} is NULL, but its length is {count}", T::NAME)));
    }
    // Later versions of the structure are longer, and so are the distances between its instances.
    // SAFETY: readable, as the caller says.
    let stride = unsafe { size_of_instance(first)? };
    let mut made = Vec::with_capacity(count.min(1 << 20));
    for index in 0..count {
        // SAFETY: `count` instances at this distance.
        let (size, value) = unsafe {
            let instance = first.byte_add(index * stride);
            (size_of_instance(instance)?, read(instance)?)
        };
        if size != stride {
            return Err(Failure::argument(format!(
                "{}: entry {index} has another size than entry 0",
                T::NAME
            )));
        }
        made.push(make(&value, index)?);
    }
    Ok(made)
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
    size.ok_or_else(|| Failure::argument(format!("{0}.size is not sizeof({0})", T::NAME)))
}
