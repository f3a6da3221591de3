//! Modules and kernels.

use super::{put, stream};
use crate::{
    execution::{
        context::Context,
        kernel::{FUNCTIONS, Function, Launch, MODULES, Module},
        operation::Operation,
    },
    gate,
    status::{Code, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED},
};
use std::{
    ffi::{CStr, c_char, c_uint, c_void},
    sync::Arc,
};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(place: *mut usize, image: *const c_char) -> Code {
    gate::in_context("cuModuleLoadData", |context| {
        if place.is_null() || image.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the image is the caller's, and whole; PTX ends with a NUL.
        let module = unsafe { Module::load(&context.owner, image)? };
        // SAFETY: the place is the caller's.
        unsafe { put(place, MODULES.insert(module)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleUnload(handle: usize) -> Code {
    gate::ending("cuModuleUnload", |_| unload(handle))
}

pub(crate) fn unload(handle: usize) -> Result<(), Code> {
    MODULES.remove(handle).ok_or(INVALID_HANDLE)?;
    FUNCTIONS.remove_if(|function| function.module == handle);
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(place: *mut usize, module: usize, name: *const c_char) -> Code {
    // SAFETY: both are the caller's.
    gate::in_context("cuModuleGetFunction", |_| unsafe { function(place, module, name) })
}

/// # Safety
/// `place` is null or can be written; `name` is null or ends with a NUL.
pub(crate) unsafe fn function(place: *mut usize, module: usize, name: *const c_char) -> Result<(), Code> {
    if place.is_null() || name.is_null() {
        return Err(INVALID_VALUE);
    }
    let of = MODULES.get(module).ok_or(INVALID_HANDLE)?;
    // SAFETY: passed on.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| INVALID_VALUE)?;
    // SAFETY: passed on.
    unsafe { put(place, Function::get(module, &of, name)?) }
}

/// The parameters are those of the engine's kernels: one device address.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared_bytes: c_uint,
    stream: usize,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> Code {
    gate::in_context("cuLaunchKernel", |context| {
        if !extra.is_null() {
            return Err(NOT_SUPPORTED);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the parameters are the caller's.
        unsafe { start(context, function, grid, block, stream, parameters) }
    })
}

/// Gives a kernel to a stream.
///
/// # Safety
/// `parameters` is null, or leads to as many values as the kernel has parameters.
pub(crate) unsafe fn start(
    context: &Context,
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    stream: usize,
    parameters: *const *const c_void,
) -> Result<(), Code> {
    let function = FUNCTIONS.get(function).ok_or(INVALID_HANDLE)?;
    if !Arc::ptr_eq(&function.owner, &context.owner) {
        return Err(INVALID_HANDLE);
    }
    check_shape(grid, block)?;
    if parameters.is_null() {
        return Err(INVALID_VALUE);
    }
    let stream = stream::get(context, stream)?;
    // SAFETY: the kernel has one parameter, so that the caller gave the address of at least one value,
    // which is read before this returns.
    let argument = unsafe { (*parameters).cast::<u64>().as_ref() }.ok_or(INVALID_VALUE)?;
    stream.push(Operation::Launch(Launch { function, argument: *argument, grid, block }));
    Ok(())
}

/// The limits of every device of the last ten years.
fn check_shape(grid: [u32; 3], block: [u32; 3]) -> Result<(), Code> {
    const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
    const BLOCK_MAX: [u32; 3] = [1024, 1024, 64];
    const THREADS_MAX: u64 = 1024;
    let within = |sizes: [u32; 3], most: [u32; 3]| {
        sizes.iter().zip(most).all(|(size, most)| (1..=most).contains(size))
    };
    let threads: u64 = block.iter().map(|size| u64::from(*size)).product();
    if within(grid, GRID_MAX) && within(block, BLOCK_MAX) && threads <= THREADS_MAX {
        Ok(())
    } else {
        Err(INVALID_VALUE)
    }
}
