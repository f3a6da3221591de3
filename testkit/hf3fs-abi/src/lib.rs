//! The C ABI of 3FS's `libhf3fs_api_shared.so`, on hoistway's own client: so that what loads the vendor's library can be
//! tested where there is none.
//!
//! It keeps the vendor's contract, its traps included: `hf3fs_reg_fd` reports errors by positive numbers, forgets a file
//! only while it is open and its daemon alive, and the time that `hf3fs_wait_for_ios` takes is absolute. It does not end
//! the process, though, where the vendor's does.
#![allow(unsafe_code)]
// The names and the contract are the vendor's; the first lines of each section say what counts.
#![allow(missing_docs, clippy::missing_safety_doc, clippy::missing_errors_doc)]

mod files;
mod memory;
mod rings;

use std::{ffi::CStr, path::Path};

pub use files::{hf3fs_dereg_fd, hf3fs_extract_mount_point, hf3fs_is_hf3fs, hf3fs_reg_fd};
pub use memory::{hf3fs_iovcreate, hf3fs_iovdestroy, hf3fs_iovunlink, hf3fs_iovwrap};
pub use rings::{
    hf3fs_io_entries, hf3fs_ior_size, hf3fs_iorcreate, hf3fs_iorcreate2, hf3fs_iorcreate3, hf3fs_iorcreate4,
    hf3fs_iordestroy, hf3fs_prep_io, hf3fs_submit_ios, hf3fs_wait_for_ios,
};

/// The number that a call returns for an error.
pub(crate) fn negative(error: &hoistway_usrbio::Error) -> i32 {
    use hoistway_usrbio::Error;
    -match error {
        Error::SharedMemoryNamespace { .. } | Error::Invalid(_) => libc::EINVAL,
        Error::ReadOnlyMount { .. } => libc::EROFS,
        Error::DaemonDead { .. } => libc::ENOTCONN,
        Error::SharedMemoryFull { .. } => libc::ENOSPC,
        other => other.errno().unwrap_or(libc::EIO),
    }
}

/// A mount point as callers give it; `None` for none, or one that is too long.
///
/// # Safety
/// `point` must be null or end in NUL.
pub(crate) unsafe fn mount_point<'a>(point: *const std::ffi::c_char) -> Option<&'a Path> {
    if point.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let point = unsafe { CStr::from_ptr(point) }.to_str().ok()?;
    let fits = !point.is_empty() && point.len() < hoistway_usrbio::parts::abi::MOUNT_POINT_BYTES;
    fits.then(|| Path::new(point))
}
