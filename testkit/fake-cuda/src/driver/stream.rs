//! Streams.

use super::put;
use crate::{
    execution::{
        context::Context,
        event::EVENTS,
        operation::{HostFunction, Operation},
        stream::{STREAMS, Stream},
    },
    gate,
    status::{Code, INVALID_HANDLE, INVALID_VALUE, NOT_READY, OPERATING_SYSTEM},
};
use std::{
    cell::Cell,
    ffi::{c_int, c_uint, c_void},
    ops::Range,
    sync::Arc,
};

/// Up to here, a handle means a default stream: none, the legacy one, and that of each thread.
const DEFAULT_MAX: usize = 2;

/// The stream of a handle, which must belong to the context.
pub(crate) fn get(context: &Context, handle: usize) -> Result<Arc<Stream>, Code> {
    if handle <= DEFAULT_MAX {
        return context.default_stream();
    }
    STREAMS.get(handle).filter(|stream| Arc::ptr_eq(&stream.owner, &context.owner)).ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(place: *mut usize, flags: c_uint) -> Code {
    // SAFETY: the place is the caller's.
    gate::in_context("cuStreamCreate", |context| unsafe { create(context, place, flags) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(place: *mut usize, flags: c_uint, _priority: c_int) -> Code {
    // SAFETY: the place is the caller's.
    gate::in_context("cuStreamCreateWithPriority", |context| unsafe { create(context, place, flags) })
}

/// # Safety
/// `place` is null or can be written.
pub(crate) unsafe fn create(context: &Context, place: *mut usize, flags: c_uint) -> Result<(), Code> {
    const NON_BLOCKING: c_uint = 1;
    if flags & !NON_BLOCKING != 0 || place.is_null() {
        return Err(INVALID_VALUE);
    }
    let stream = Stream::start(&context.owner).map_err(|_| OPERATING_SYSTEM)?;
    // SAFETY: the caller promised that the place can be written.
    unsafe { put(place, STREAMS.insert(stream)) }
}

/// Returns at once: the stream ends when its work is done.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamDestroy_v2(handle: usize) -> Code {
    gate::ending("cuStreamDestroy_v2", |_| {
        STREAMS.remove(handle).ok_or(INVALID_HANDLE)?.close();
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamQuery(handle: usize) -> Code {
    gate::in_context("cuStreamQuery", |context| {
        if !get(context, handle)?.is_idle() {
            return Err(NOT_READY);
        }
        // Again, since the last operation may have failed in between.
        context.owner.health()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamSynchronize(handle: usize) -> Code {
    gate::ending("cuStreamSynchronize", |context| {
        get(context, handle)?.synchronize();
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWaitEvent(handle: usize, event: usize, _flags: c_uint) -> Code {
    gate::in_context("cuStreamWaitEvent", |context| wait_for_event(context, handle, event))
}

pub(crate) fn wait_for_event(context: &Context, handle: usize, event: usize) -> Result<(), Code> {
    let stream = get(context, handle)?;
    let event = EVENTS.get(event).ok_or(INVALID_HANDLE)?;
    let generation = event.latest();
    stream.push(Operation::Wait(event, generation));
    Ok(())
}

/// Swaps the calling thread's mode of stream capture. Nothing is ever captured here, so that it changes nothing.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(place: *mut c_int) -> Code {
    // SAFETY: null or the caller's.
    gate::initialized("cuThreadExchangeStreamCaptureMode", || unsafe { exchange_capture_mode(place) })
}

/// # Safety
/// `place` is null or can be read and written.
pub(crate) unsafe fn exchange_capture_mode(place: *mut c_int) -> Result<(), Code> {
    /// Global, of this thread, and relaxed.
    const MODES: Range<c_int> = 0..3;
    thread_local! {
        static MODE: Cell<c_int> = const { Cell::new(0) };
    }
    // SAFETY: passed on.
    let place = unsafe { place.as_mut() }.ok_or(INVALID_VALUE)?;
    if !MODES.contains(place) {
        return Err(INVALID_VALUE);
    }
    *place = MODE.replace(*place);
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchHostFunc(
    handle: usize,
    function: Option<HostFunction>,
    argument: *mut c_void,
) -> Code {
    gate::in_context("cuLaunchHostFunc", |context| {
        let function = function.ok_or(INVALID_VALUE)?;
        get(context, handle)?.push(Operation::Call { function, argument: argument as usize });
        Ok(())
    })
}
