//! Device memory.

use super::{put, stream};
use crate::{
    control::{
        costs::{self, Call},
        settings,
    },
    execution::{
        context::{self, Context},
        operation::Operation,
    },
    gate,
    memory::device::{self, PLAIN_ALIGNMENT, POOL_ALIGNMENT},
    status::{Code, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY},
};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    // SAFETY: the places are the caller's.
    gate::in_context("cuMemGetInfo_v2", |context| unsafe { info(context, free, total) })
}

/// # Safety
/// The places are null or can be written.
pub(crate) unsafe fn info(context: &Context, free: *mut usize, total: *mut usize) -> Result<(), Code> {
    let capacity = settings().memory_bytes;
    let memory = device::of_device(context.owner.device).ok_or(OUT_OF_MEMORY)?;
    let unused = capacity.saturating_sub(memory.used());
    // SAFETY: passed on.
    unsafe { put(free, unused as usize).and_then(|()| put(total, capacity as usize)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(place: *mut u64, bytes: usize) -> Code {
    gate::in_context("cuMemAlloc_v2", |context| {
        costs::call(Call::Allocate, bytes as u64);
        // SAFETY: the place is the caller's.
        unsafe { allocate(context, place, bytes, PLAIN_ALIGNMENT) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFree_v2(address: u64) -> Code {
    gate::ending("cuMemFree_v2", |_| release(address))
}

pub(crate) fn release(address: u64) -> Result<(), Code> {
    let memory = device::of_address(address).ok_or(INVALID_VALUE)?;
    // Before the wait, so that of two calls for the same memory one fails.
    memory.announce_release(address)?;
    if let Some(found) = memory.find(address) {
        context::synchronize_device(found.owner.device);
        costs::call(Call::Free, found.bytes);
    }
    memory.finish_release(address);
    Ok(())
}

/// The memory can be used at once, also by other streams: stricter programs aren't told apart.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(place: *mut u64, bytes: usize, stream: usize) -> Code {
    // SAFETY: the place is the caller's.
    gate::in_context("cuMemAllocAsync", |context| unsafe { allocate_ordered(context, place, bytes, stream) })
}

/// # Safety
/// `place` is null or can be written.
pub(crate) unsafe fn allocate_ordered(
    context: &Context,
    place: *mut u64,
    bytes: usize,
    stream: usize,
) -> Result<(), Code> {
    check_pools()?;
    stream::get(context, stream)?;
    // SAFETY: passed on.
    unsafe { allocate(context, place, bytes, POOL_ALIGNMENT) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeAsync(address: u64, stream: usize) -> Code {
    gate::ending("cuMemFreeAsync", |context| release_ordered(context, address, stream))
}

pub(crate) fn release_ordered(context: &Context, address: u64, stream: usize) -> Result<(), Code> {
    check_pools()?;
    let stream = stream::get(context, stream)?;
    device::of_address(address).ok_or(INVALID_VALUE)?.announce_release(address)?;
    stream.push(Operation::Free(address));
    Ok(())
}

/// # Safety
/// `place` is null or can be written.
pub(crate) unsafe fn allocate(
    context: &Context,
    place: *mut u64,
    bytes: usize,
    alignment: u64,
) -> Result<(), Code> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    let memory = device::of_device(context.owner.device).ok_or(OUT_OF_MEMORY)?;
    let address = memory.allocate(&context.owner, bytes as u64, alignment)?;
    // SAFETY: the caller promised that the place can be written.
    unsafe { put(place, address) }
}

fn check_pools() -> Result<(), Code> {
    if settings().pools { Ok(()) } else { Err(NOT_SUPPORTED) }
}
