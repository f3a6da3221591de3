//! Parameters, which count when the driver opens.

use super::{
    abi::{Error, INVALID_VALUE, Status},
    answer, put, session,
};
use std::{
    ffi::{CStr, c_char, c_int},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Of `CUFileSizeTConfigParameter_t`.
pub(super) const MAX_DIRECT_IO_SIZE_KB: usize = 5;
pub(super) const MAX_DEVICE_CACHE_SIZE_KB: usize = 6;
pub(super) const PER_BUFFER_CACHE_SIZE_KB: usize = 7;
pub(super) const MAX_DEVICE_PINNED_MEM_SIZE_KB: usize = 8;
pub(super) const BATCH_SIZE: usize = 9;
pub(super) const POLL_THRESHOLD_KB: usize = 10;
pub(super) const BATCH_TIMEOUT_MS: usize = 11;
/// Of `CUFileBoolConfigParameter_t`.
const ALLOW_COMPAT_MODE: usize = 1;
/// Of `CUFileStringConfigParameter_t`, which are accepted and mean nothing here.
const TEXTS: usize = 4;

struct Parameters {
    sizes: [usize; 12],
    switches: [bool; 14],
}

/// With the defaults of version 1.20.
static PARAMETERS: Mutex<Parameters> = Mutex::new(Parameters {
    sizes: [0, 128, 4, 8192, 0, 16 << 10, 128 << 10, 1 << 10, 32 << 20, 128, 4, 0],
    switches: {
        let mut switches = [false; 14];
        switches[ALLOW_COMPAT_MODE] = true;
        switches
    },
});

pub(super) fn size(parameter: usize) -> usize {
    parameters().sizes.get(parameter).copied().unwrap_or(0)
}

pub(super) fn allow_compat() -> bool {
    parameters().switches.get(ALLOW_COMPAT_MODE).copied().unwrap_or(false)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileSetParameterSizeT(parameter: c_int, value: usize) -> Status {
    answer("cuFileSetParameterSizeT", || {
        session::check_closed()?;
        *slot(&mut parameters().sizes, parameter)? = value;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileSetParameterBool(parameter: c_int, value: bool) -> Status {
    answer("cuFileSetParameterBool", || {
        session::check_closed()?;
        *slot(&mut parameters().switches, parameter)? = value;
        Ok(())
    })
}

/// # Safety
/// `value` is null or ends with a NUL.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuFileSetParameterString(parameter: c_int, value: *const c_char) -> Status {
    answer("cuFileSetParameterString", || {
        session::check_closed()?;
        let known = usize::try_from(parameter).is_ok_and(|parameter| parameter < TEXTS);
        // SAFETY: not null, so the caller promised that it ends with a NUL.
        if !known || value.is_null() || unsafe { CStr::from_ptr(value) }.is_empty() {
            return Err(INVALID_VALUE);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFileGetParameterBool(parameter: c_int, place: *mut bool) -> Status {
    answer("cuFileGetParameterBool", || {
        let value = *slot(&mut parameters().switches, parameter)?;
        // SAFETY: the place is the caller's.
        unsafe { put(place, value) }
    })
}

fn slot<T>(values: &mut [T], parameter: c_int) -> Result<&mut T, Error> {
    usize::try_from(parameter).ok().and_then(|parameter| values.get_mut(parameter)).ok_or(INVALID_VALUE)
}

fn parameters() -> MutexGuard<'static, Parameters> {
    PARAMETERS.lock().unwrap_or_else(PoisonError::into_inner)
}
