//! Pinned host memory.

use super::put;
use crate::{
    control::{
        costs::{self, Call},
        settings,
    },
    gate,
    memory::host::{self, Driver},
    status::{Code, INVALID_VALUE, NOT_SUPPORTED},
};
use std::ffi::c_uint;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: c_uint) -> Code {
    const READ_ONLY: c_uint = 0x8;
    // PORTABLE, DEVICEMAP, IOMEMORY, READ_ONLY.
    const FLAGS: c_uint = 0x7 | READ_ONLY;
    gate::in_context("cuMemHostRegister_v2", |context| {
        if flags & !FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        let is_read_only = flags & READ_ONLY != 0;
        if is_read_only && settings().refuses_read_only {
            return Err(NOT_SUPPORTED);
        }
        // Before it is pinned: what it costs depends on what was touched.
        costs::call(Call::Register { address }, bytes as u64);
        host::register(&context.owner, address, bytes, is_read_only)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostUnregister(address: usize) -> Code {
    gate::ending("cuMemHostUnregister", |_| {
        costs::call(Call::Unregister, host::unregister(Driver::Cuda, address)? as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(place: *mut usize, bytes: usize, flags: c_uint) -> Code {
    // PORTABLE, DEVICEMAP, WRITECOMBINED.
    const FLAGS: c_uint = 0x7;
    gate::in_context("cuMemHostAlloc", |context| {
        if flags & !FLAGS != 0 || place.is_null() {
            return Err(INVALID_VALUE);
        }
        let address = host::allocate(&context.owner, bytes)?;
        costs::call(Call::HostAllocate, bytes as u64);
        // SAFETY: the place is the caller's.
        unsafe { put(place, address) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeHost(address: usize) -> Code {
    gate::ending("cuMemFreeHost", |_| {
        costs::call(Call::HostFree, host::free(address)? as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(place: *mut u64, address: usize, _flags: c_uint) -> Code {
    gate::in_context("cuMemHostGetDevicePointer_v2", |_| {
        host::pinned().find(Driver::Cuda, address).ok_or(INVALID_VALUE)?;
        // SAFETY: the place is the caller's. With unified addressing both have one address for it.
        unsafe { put(place, address as u64) }
    })
}
