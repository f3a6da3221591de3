//! Registered buffers, and what a buffer of a read or write means.

use super::{
    abi::{
        CUDA_DRIVER_ERROR, CUDA_MEMORY_TYPE_INVALID, CUDA_POINTER_INVALID, CUDA_POINTER_RANGE_ERROR, Error,
        INVALID_MAPPING_RANGE, INVALID_VALUE, MEMORY_ALREADY_REGISTERED, Status,
    },
    answer, session,
};
use crate::memory::{device, host};
use std::{
    collections::BTreeMap,
    ffi::c_int,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Length by start.
static BUFFERS: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

/// Device memory that a read writes, or a write reads.
pub(super) struct Target {
    pub(super) device: usize,
    pub(super) address: u64,
    /// Where the host finds it.
    pub(super) shadow: *mut u8,
}

/// How many buffers are registered.
pub(crate) fn count() -> u64 {
    buffers().len() as u64
}

/// Forgets what is registered, and says how much that was.
pub(super) fn release_all() -> u64 {
    std::mem::take(&mut *buffers()).len() as u64
}

/// Finds `size` bytes of device memory, not 0. Of a registered buffer no byte beyond it is touched.
pub(super) fn target(base: u64, offset: i64, size: u64) -> Result<Target, Error> {
    let offset = u64::try_from(offset).map_err(|_| INVALID_VALUE)?;
    let end = offset.checked_add(size).ok_or(INVALID_VALUE)?;
    if buffers().get(&base).is_some_and(|len| end > *len) {
        return Err(INVALID_MAPPING_RANGE);
    }
    let found = find(base, end)?;
    if found.owner.health().is_err() {
        return Err(CUDA_DRIVER_ERROR);
    }
    let address = base + offset;
    let memory = device::of_address(address).ok_or(CUDA_POINTER_INVALID)?;
    let shadow = memory.shadow(address, size).map_err(|_| CUDA_POINTER_RANGE_ERROR)?;
    Ok(Target { device: found.owner.ordinal(), address, shadow })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBufRegister(base: u64, len: usize, _flags: c_int) -> Status {
    answer("cuFileBufRegister", || {
        session::mode()?;
        if base == 0 || len == 0 {
            return Err(INVALID_VALUE);
        }
        find(base, len as u64)?;
        let mut buffers = buffers();
        let overlaps = |(start, other): (&u64, &u64)| start + other > base;
        if buffers.range(..base + len as u64).next_back().is_some_and(overlaps) {
            return Err(MEMORY_ALREADY_REGISTERED);
        }
        buffers.insert(base, len as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBufDeregister(base: u64) -> Status {
    answer("cuFileBufDeregister", || {
        session::mode()?;
        buffers().remove(&base).map(|_| ()).ok_or(INVALID_VALUE)
    })
}

/// The allocation that holds `len` bytes from `base` on.
fn find(base: u64, len: u64) -> Result<device::Found, Error> {
    let Some(found) = device::find(base).filter(|found| found.owner.is_of_cuda()) else {
        let is_pinned = host::pinned().find(host::Driver::Cuda, base as usize).is_some();
        return Err(if is_pinned { CUDA_MEMORY_TYPE_INVALID } else { CUDA_POINTER_INVALID });
    };
    if len > found.bytes - (base - found.start) {
        return Err(CUDA_POINTER_RANGE_ERROR);
    }
    Ok(found)
}

fn buffers() -> MutexGuard<'static, BTreeMap<u64, u64>> {
    BUFFERS.lock().unwrap_or_else(PoisonError::into_inner)
}
