//! The functions of `libcufile.so.0`, with the signatures of `cufile.h`.
#![allow(non_snake_case)]

mod abi;
pub(crate) mod buffer;
pub(crate) mod file;
mod parameters;
mod session;
mod stats;
mod transfer;

use crate::{gate, status::NOT_INITIALIZED};
use abi::{CUDA_DRIVER_ERROR, DRIVER_NOT_INITIALIZED, Error, INVALID_VALUE, OPERATIONS, Status};

/// A call that reports by a `CUfileError_t`.
fn answer(name: &'static str, body: impl FnOnce() -> Result<(), Error>) -> Status {
    match admit(name) {
        Err(refused) => refused,
        Ok(()) => Status { error: body().err().unwrap_or(0), cuda: 0 },
    }
}

/// Counts a call and says whether it may go on: not in a forked child, and not if a fault was asked for,
/// which is one of cuFile's or one of the driver's that cuFile passes on.
fn admit(name: &'static str) -> Result<(), Status> {
    gate::admit(name).map_err(|code| match code {
        _ if gate::is_forked() => Status { error: DRIVER_NOT_INITIALIZED, cuda: NOT_INITIALIZED },
        code if code > OPERATIONS => Status { error: code, cuda: 0 },
        code => Status { error: CUDA_DRIVER_ERROR, cuda: code },
    })
}

/// Writes an answer where the caller wants it.
///
/// # Safety
/// `place` is null or can be written.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Error> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so the caller promised that it can be written.
    unsafe { place.write(value) };
    Ok(())
}
