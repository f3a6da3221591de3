//! The functions of `libcuda.so.1`, with the signatures of `cuda.h`. What they do is in functions that `hip` has, too.
#![allow(non_snake_case)]

mod batch;
mod context;
pub(crate) mod copy;
pub(crate) mod device;
pub(crate) mod event;
#[cfg(windows)]
pub(crate) mod external;
mod host_memory;
mod mapped;
pub(crate) mod memory;
pub(crate) mod module;
pub(crate) mod pointer;
pub(crate) mod stream;

#[cfg(target_os = "linux")]
pub(crate) use device::uuid;

use crate::status::{Code, INVALID_VALUE};
use std::ffi::c_char;

/// Writes an answer where the caller wants it.
///
/// # Safety
/// `place` is null or can be written.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so the caller promised that it can be written. Unaligned, since some answers go where
    // the caller knows the type only at run time.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

/// Writes as much of a text as fits, and a NUL.
///
/// # Safety
/// `place` is null or `room` bytes can be written there.
pub(crate) unsafe fn put_text(place: *mut c_char, room: i32, text: &str) -> Result<(), Code> {
    let room =
        usize::try_from(room).ok().filter(|room| *room > 0 && !place.is_null()).ok_or(INVALID_VALUE)?;
    let len = text.len().min(room - 1);
    // SAFETY: `len + 1` bytes are at most `room`, which the caller promised can be written.
    unsafe {
        place.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), len);
        place.add(len).write(0);
    }
    Ok(())
}
