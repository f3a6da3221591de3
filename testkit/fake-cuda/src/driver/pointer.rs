//! What the driver knows about an address.

use super::put;
use crate::{
    execution::context::Owner,
    gate,
    memory::{
        device,
        host::{self, Driver},
    },
    status::{Code, INVALID_VALUE},
};
use std::{
    ffi::{c_int, c_uint, c_void},
    sync::Arc,
};

/// An address that the driver knows.
pub(crate) struct Known {
    pub(crate) memory_type: c_uint,
    pub(crate) owner: Arc<Owner>,
    start: u64,
    bytes: u64,
}

const MEMORY_TYPE_HOST: c_uint = 1;
const MEMORY_TYPE_DEVICE: c_uint = 2;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, address: u64) -> Code {
    gate::in_context("cuMemGetAddressRange_v2", |_| {
        let found = device::find(address).ok_or(INVALID_VALUE)?;
        // SAFETY: the places are the caller's, which may leave out either.
        unsafe {
            if !start.is_null() {
                put(start, found.start)?;
            }
            if !bytes.is_null() {
                put(bytes, found.bytes as usize)?;
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(place: *mut c_void, attribute: c_int, address: u64) -> Code {
    const CONTEXT: c_int = 1;
    const MEMORY_TYPE: c_int = 2;
    const DEVICE_POINTER: c_int = 3;
    const HOST_POINTER: c_int = 4;
    const IS_MANAGED: c_int = 8;
    const DEVICE_ORDINAL: c_int = 9;
    const RANGE_START_ADDR: c_int = 11;
    const RANGE_SIZE: c_int = 12;
    gate::initialized("cuPointerGetAttribute", || {
        let known = look_up(Driver::Cuda, address).ok_or(INVALID_VALUE)?;
        // SAFETY: the place is the caller's, who knows which type belongs to the attribute.
        unsafe {
            match attribute {
                CONTEXT => put(place.cast(), known.owner.context),
                MEMORY_TYPE => put(place.cast(), known.memory_type),
                DEVICE_POINTER => put(place.cast(), address),
                HOST_POINTER if known.memory_type == MEMORY_TYPE_HOST => put(place.cast(), address),
                IS_MANAGED => put(place.cast(), 0u8),
                DEVICE_ORDINAL => put(place.cast(), known.owner.ordinal() as c_int),
                RANGE_START_ADDR => put(place.cast(), known.start),
                RANGE_SIZE => put(place.cast(), known.bytes as usize),
                _ => Err(INVALID_VALUE),
            }
        }
    })
}

/// What a driver knows about an address.
pub(crate) fn look_up(driver: Driver, address: u64) -> Option<Known> {
    if let Some(device::Found { start, bytes, owner }) = device::find(address) {
        if owner.driver() != driver {
            return None;
        }
        return Some(Known { memory_type: MEMORY_TYPE_DEVICE, owner, start, bytes });
    }
    let host::Found { start, bytes, owner, .. } = host::pinned().find(driver, address as usize)?;
    Some(Known { memory_type: MEMORY_TYPE_HOST, owner, start: start as u64, bytes: bytes as u64 })
}
