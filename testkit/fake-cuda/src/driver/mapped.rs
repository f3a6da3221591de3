//! Address space, and memory that is mapped into it.

use super::{device::ordinal, put};
use crate::{
    control::settings,
    gate,
    memory::mapped::{self, BLOCKS, GRANULE},
    status::{Code, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED},
};
use std::ffi::{c_int, c_void};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE` and `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
const PINNED: c_int = 1;
const DEVICE: c_int = 1;
const READ_WRITE: c_int = 3;

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    device: c_int,
}

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: c_int,
    handle_kinds: c_int,
    location: Location,
    security: *const c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy)]
struct Access {
    location: Location,
    flags: c_int,
}

/// # Safety
/// `properties` is null or can be read.
unsafe fn device_of(properties: *const Properties) -> Result<usize, Code> {
    check()?;
    // SAFETY: passed on.
    let properties = unsafe { properties.as_ref() }.ok_or(INVALID_VALUE)?;
    if properties.kind != PINNED || properties.location.kind != DEVICE || properties.handle_kinds != 0 {
        return Err(INVALID_VALUE);
    }
    ordinal(properties.location.device)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(
    place: *mut usize,
    properties: *const Properties,
    option: c_int,
) -> Code {
    gate::initialized("cuMemGetAllocationGranularity", || {
        // SAFETY: the places are the caller's.
        unsafe { device_of(properties) }?;
        if !matches!(option, 0 | 1) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as above.
        unsafe { put(place, GRANULE as usize) }
    })
}

/// Stricter than the driver's, which needs no context and has one address space for all devices.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(
    place: *mut u64,
    bytes: usize,
    alignment: usize,
    _wanted: u64,
    flags: u64,
) -> Code {
    gate::in_context("cuMemAddressReserve", |context| {
        check()?;
        if place.is_null() || flags != 0 || alignment as u64 > GRANULE {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the place is the caller's.
        unsafe { put(place, mapped::reserve(context.owner.device, bytes as u64)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressFree(address: u64, bytes: usize) -> Code {
    gate::initialized("cuMemAddressFree", || mapped::unreserve(address, bytes as u64))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(
    place: *mut u64,
    bytes: usize,
    properties: *const Properties,
    flags: u64,
) -> Code {
    gate::in_context("cuMemCreate", |_| {
        // SAFETY: the places are the caller's.
        let device = unsafe { device_of(properties) }?;
        if place.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as above.
        unsafe { put(place, mapped::create(device, bytes as u64)? as u64) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRelease(handle: u64) -> Code {
    gate::initialized("cuMemRelease", || BLOCKS.remove(handle as usize).map(drop).ok_or(INVALID_VALUE))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) -> Code {
    gate::in_context("cuMemMap", |context| {
        if offset != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        mapped::map(&context.owner, address, bytes as u64, handle as usize)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(address: u64, bytes: usize, access: *const Access, count: usize) -> Code {
    gate::in_context("cuMemSetAccess", |context| {
        // SAFETY: the place is the caller's.
        let access = unsafe { access.as_ref() }.filter(|_| count == 1).ok_or(INVALID_VALUE)?;
        let Access { location: Location { kind, device }, flags } = *access;
        if kind != DEVICE || flags != READ_WRITE {
            return Err(INVALID_VALUE);
        }
        if ordinal(device)? != context.owner.device {
            return Err(INVALID_DEVICE);
        }
        mapped::allow(address, bytes as u64)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemUnmap(address: u64, bytes: usize) -> Code {
    gate::initialized("cuMemUnmap", || mapped::unmap(address, bytes as u64))
}

fn check() -> Result<(), Code> {
    if settings().maps { Ok(()) } else { Err(NOT_SUPPORTED) }
}
