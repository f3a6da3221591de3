//! Several copies by one call.

use super::copy::{at_device, at_host, enqueue};
use crate::{
    execution::context::Context,
    gate,
    memory::device,
    status::{Code, INVALID_VALUE},
};
use std::{
    ffi::{c_int, c_uint},
    slice,
};

/// `CUmemcpyAttributes`.
#[repr(C)]
struct Attributes {
    source_order: c_int,
    source_place: [c_int; 2],
    destination_place: [c_int; 2],
    flags: c_uint,
}

const _: () = assert!(size_of::<Attributes>() == 24);

/// The arrays of a call.
struct Arrays {
    destinations: *const u64,
    sources: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const Attributes,
    /// The first copy of each of the attributes.
    firsts: *const usize,
    attribute_count: usize,
}

/// That of CUDA 12.8, which says which copy was refused.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyBatchAsync(
    destinations: *const u64,
    sources: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const Attributes,
    firsts: *const usize,
    attribute_count: usize,
    refused: *mut usize,
    stream: usize,
) -> Code {
    let arrays = Arrays { destinations, sources, sizes, count, attributes, firsts, attribute_count };
    gate::in_context("cuMemcpyBatchAsync", |context| {
        // SAFETY: the arrays are the caller's.
        unsafe { enqueue_all(context, &arrays, stream) }.map_err(|(number, code)| {
            // SAFETY: null or the caller's.
            if let Some(place) = unsafe { refused.as_mut() } {
                *place = number;
            }
            code
        })
    })
}

/// That of CUDA 13.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    destinations: *const u64,
    sources: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const Attributes,
    firsts: *const usize,
    attribute_count: usize,
    stream: usize,
) -> Code {
    let arrays = Arrays { destinations, sources, sizes, count, attributes, firsts, attribute_count };
    gate::in_context("cuMemcpyBatchAsync_v2", |context| {
        // SAFETY: the arrays are the caller's.
        unsafe { enqueue_all(context, &arrays, stream) }.map_err(|(_, code)| code)
    })
}

/// Gives the copies to a stream, the last first: no caller may count on their order. The error names the copy that was refused.
///
/// # Safety
/// The arrays are null or as long as they say; the host's bytes are those of the caller.
unsafe fn enqueue_all(context: &Context, arrays: &Arrays, stream: usize) -> Result<(), (usize, Code)> {
    /// The legacy default stream, under both of its names.
    const LEGACY: [usize; 2] = [0, 1];
    const ORDERS: std::ops::RangeInclusive<c_int> = 1..=3;
    let of_none = (usize::MAX, INVALID_VALUE);
    let Arrays { count, attribute_count, .. } = *arrays;
    let is_null = arrays.destinations.is_null()
        || arrays.sources.is_null()
        || arrays.sizes.is_null()
        || arrays.attributes.is_null()
        || arrays.firsts.is_null();
    if is_null || !(1..=count).contains(&attribute_count) || LEGACY.contains(&stream) {
        return Err(of_none);
    }
    // SAFETY: not null, so as long as they say.
    let (destinations, sources, sizes, attributes, firsts) = unsafe {
        (
            slice::from_raw_parts(arrays.destinations, count),
            slice::from_raw_parts(arrays.sources, count),
            slice::from_raw_parts(arrays.sizes, count),
            slice::from_raw_parts(arrays.attributes, attribute_count),
            slice::from_raw_parts(arrays.firsts, attribute_count),
        )
    };
    let ascend =
        firsts[0] == 0 && firsts.is_sorted_by(|one, next| one < next) && firsts[attribute_count - 1] < count;
    if !ascend || attributes.iter().any(|attributes| !ORDERS.contains(&attributes.source_order)) {
        return Err(of_none);
    }
    let side = |address: u64| match device::of_address(address) {
        Some(_) => at_device(address),
        None => at_host(address as usize),
    };
    for number in (0..count).rev() {
        if sizes[number] == 0 {
            return Err((number, INVALID_VALUE));
        }
        let (source, destination) = (side(sources[number]), side(destinations[number]));
        // SAFETY: the caller's bytes.
        unsafe { enqueue(context, stream, source, destination, sizes[number], 1) }
            .map_err(|code| (number, code))?;
    }
    Ok(())
}
