//! Streams, events, copies, modules and kernels.

use crate::{
    driver::{
        copy::{self, Memcpy2D, at_device, at_host},
        event, module, put, stream,
    },
    execution::{
        context::Context,
        kernel::{MODULES, Module},
        stream::{STREAMS, Stream},
    },
    gate,
    status::{CONTEXT_IS_DESTROYED, Code, INVALID_HANDLE, INVALID_VALUE, NOT_READY},
};
use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    sync::Arc,
};

/// What the runtime returns for streams that it does not know, and where an event that it does not know is destroyed.
fn of_unknown(code: Code) -> Code {
    if code == INVALID_HANDLE { CONTEXT_IS_DESTROYED } else { code }
}

fn known(context: &Context, stream: usize) -> Result<Arc<Stream>, Code> {
    stream::get(context, stream).map_err(of_unknown)
}

/// A call that needs a stream of the current device.
fn on_stream(
    name: &'static str,
    stream: usize,
    body: impl FnOnce(&Arc<Context>) -> Result<(), Code>,
) -> Code {
    gate::on_hip_device(name, |context| {
        known(context, stream)?;
        body(context)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipStreamCreateWithFlags(place: *mut usize, flags: c_uint) -> Code {
    // SAFETY: the place is the caller's.
    gate::on_hip_device("hipStreamCreateWithFlags", |context| unsafe {
        stream::create(context, place, flags)
    })
}

/// Forgets what has not begun: no program may count on more.
#[unsafe(no_mangle)]
extern "C" fn hipStreamDestroy(handle: usize) -> Code {
    gate::ending_on_hip_device("hipStreamDestroy", |_| {
        STREAMS.remove(handle).ok_or(CONTEXT_IS_DESTROYED)?.abandon();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamSynchronize(handle: usize) -> Code {
    gate::ending_on_hip_device("hipStreamSynchronize", |context| {
        known(context, handle)?.synchronize();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamQuery(handle: usize) -> Code {
    on_stream("hipStreamQuery", handle, |context| {
        if !known(context, handle)?.is_idle() {
            return Err(NOT_READY);
        }
        // Again, since the last operation may have failed in between.
        context.owner.health()
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamWaitEvent(handle: usize, event: usize, _flags: c_uint) -> Code {
    on_stream("hipStreamWaitEvent", handle, |context| stream::wait_for_event(context, handle, event))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipThreadExchangeStreamCaptureMode(place: *mut c_int) -> Code {
    // SAFETY: null or the caller's.
    gate::hip("hipThreadExchangeStreamCaptureMode", || unsafe { stream::exchange_capture_mode(place) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipEventCreateWithFlags(place: *mut usize, flags: c_uint) -> Code {
    // SAFETY: the place is the caller's.
    gate::on_hip_device("hipEventCreateWithFlags", |context| unsafe { event::create(context, place, flags) })
}

#[unsafe(no_mangle)]
extern "C" fn hipEventRecord(handle: usize, stream: usize) -> Code {
    on_stream("hipEventRecord", stream, |context| event::record(context, handle, stream))
}

#[unsafe(no_mangle)]
extern "C" fn hipEventQuery(handle: usize) -> Code {
    gate::hip("hipEventQuery", || event::query(handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipEventSynchronize(handle: usize) -> Code {
    gate::hip("hipEventSynchronize", || event::synchronize(handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipEventDestroy(handle: usize) -> Code {
    gate::hip("hipEventDestroy", || event::destroy(handle).map_err(of_unknown))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipMemcpyHtoDAsync(
    destination: u64,
    source: *const c_void,
    bytes: usize,
    stream: usize,
) -> Code {
    on_stream("hipMemcpyHtoDAsync", stream, |context| {
        // SAFETY: the source is the caller's, with as many bytes as it says.
        unsafe { copy::enqueue(context, stream, at_host(source.addr()), at_device(destination), bytes, 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipMemcpyDtoHAsync(
    destination: *mut c_void,
    source: u64,
    bytes: usize,
    stream: usize,
) -> Code {
    on_stream("hipMemcpyDtoHAsync", stream, |context| {
        // SAFETY: the destination is the caller's, with as many bytes as it says.
        unsafe { copy::enqueue(context, stream, at_device(source), at_host(destination.addr()), bytes, 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipMemcpyDtoDAsync(destination: u64, source: u64, bytes: usize, stream: usize) -> Code {
    on_stream("hipMemcpyDtoDAsync", stream, |context| {
        // SAFETY: neither side is the host's.
        unsafe { copy::enqueue(context, stream, at_device(source), at_device(destination), bytes, 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipMemcpyParam2DAsync(parameters: *const Memcpy2D, stream: usize) -> Code {
    on_stream("hipMemcpyParam2DAsync", stream, |context| {
        // SAFETY: the structure is the caller's, and so are the bytes that it speaks of.
        unsafe { copy::enqueue_rows(context, parameters, stream) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipModuleLoadData(place: *mut usize, image: *const c_void) -> Code {
    gate::on_hip_device("hipModuleLoadData", |context| {
        if place.is_null() || image.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the image is the caller's, and whole.
        let module = unsafe { Module::of_code_object(&context.owner, image.cast()) }?;
        // SAFETY: the place is the caller's.
        unsafe { put(place, MODULES.insert(module)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipModuleUnload(handle: usize) -> Code {
    gate::ending_on_hip_device("hipModuleUnload", |_| module::unload(handle))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipModuleGetFunction(place: *mut usize, handle: usize, name: *const c_char) -> Code {
    // SAFETY: both are the caller's.
    gate::on_hip_device("hipModuleGetFunction", |_| unsafe { module::function(place, handle, name) })
}

/// The parameters are those of the engine's kernels: one device address.
#[unsafe(no_mangle)]
unsafe extern "C" fn hipModuleLaunchKernel(
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
    on_stream("hipModuleLaunchKernel", stream, |context| {
        if !extra.is_null() {
            return Err(INVALID_VALUE);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the parameters are the caller's.
        unsafe { module::start(context, function, grid, block, stream, parameters) }
    })
}
