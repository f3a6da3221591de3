//! Contexts.

use super::{device::ordinal, put};
use crate::{
    execution::{capture, context},
    gate,
    status::{Code, INVALID_VALUE},
};
use std::ffi::{c_int, c_uint};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(place: *mut usize, device: c_int) -> Code {
    gate::initialized("cuDevicePrimaryCtxRetain", || {
        if place.is_null() {
            return Err(INVALID_VALUE);
        }
        let handle = context::retain_primary(ordinal(device)?)?;
        // SAFETY: the place is the caller's.
        unsafe { put(place, handle) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Code {
    gate::initialized("cuDevicePrimaryCtxRelease_v2", || context::release_primary(ordinal(device)?))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxReset_v2(device: c_int) -> Code {
    gate::initialized("cuDevicePrimaryCtxReset_v2", || context::reset_primary(ordinal(device)?))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetId(handle: usize, place: *mut u64) -> Code {
    gate::initialized("cuCtxGetId", || {
        let handle = if handle == 0 { context::current_handle() } else { handle };
        // SAFETY: the place is the caller's.
        unsafe { put(place, context::id_of(handle)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: *mut c_uint,
    active: *mut c_int,
) -> Code {
    gate::initialized("cuDevicePrimaryCtxGetState", || {
        let is_active = context::primary_is_active(ordinal(device)?);
        // SAFETY: the places are the caller's.
        unsafe { put(flags, 0).and_then(|()| put(active, is_active.into())) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(place: *mut usize) -> Code {
    // SAFETY: the place is the caller's.
    gate::initialized("cuCtxGetCurrent", || unsafe { put(place, context::current_handle()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxSetCurrent(handle: usize) -> Code {
    gate::initialized("cuCtxSetCurrent", || context::set_current(handle))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPushCurrent_v2(handle: usize) -> Code {
    gate::initialized("cuCtxPushCurrent_v2", || context::push_current(handle))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(place: *mut usize) -> Code {
    gate::initialized("cuCtxPopCurrent_v2", || {
        let popped = context::pop_current()?;
        if place.is_null() {
            return Ok(());
        }
        // SAFETY: the place is the caller's.
        unsafe { put(place, popped) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> Code {
    gate::initialized("cuCtxGetDevice", || {
        let context = context::current()?;
        // SAFETY: the place is the caller's.
        unsafe { put(device, context.owner.device as c_int) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxSynchronize() -> Code {
    gate::ending("cuCtxSynchronize", |context| {
        capture::check_context(&context.owner)?;
        context.owner.synchronize();
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxCreate_v2(place: *mut usize, _flags: c_uint, device: c_int) -> Code {
    gate::initialized("cuCtxCreate_v2", || {
        if place.is_null() {
            return Err(INVALID_VALUE);
        }
        let handle = context::create(ordinal(device)?);
        // SAFETY: the place is the caller's.
        unsafe { put(place, handle) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxDestroy_v2(handle: usize) -> Code {
    gate::initialized("cuCtxDestroy_v2", || context::destroy(handle))
}
