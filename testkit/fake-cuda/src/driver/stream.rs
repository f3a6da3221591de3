//! Streams.

use super::put;
use crate::{
    execution::{
        capture::{self, GRAPHS, Mode},
        context::Context,
        event::EVENTS,
        operation::{HostFunction, Operation},
        stream::{Kind, STREAMS, Stream},
    },
    gate,
    status::{Code, INVALID_HANDLE, INVALID_VALUE, NOT_READY, OPERATING_SYSTEM},
};
use std::{
    ffi::{c_int, c_uint, c_void},
    sync::Arc,
};

/// Up to here, a handle means a default stream: none, the legacy one, and that of each thread.
const DEFAULT_MAX: usize = 2;

/// The stream of a handle, which must belong to the context, for work to be queued.
pub(crate) fn get(context: &Context, handle: usize) -> Result<Arc<Stream>, Code> {
    let stream = find(context, handle)?;
    capture::check_use(&stream)?;
    Ok(stream)
}

/// The stream of a handle, to wait for it or ask after it.
fn to_wait_for(context: &Context, handle: usize) -> Result<Arc<Stream>, Code> {
    let stream = find(context, handle)?;
    capture::check_wait(&stream)?;
    Ok(stream)
}

fn find(context: &Context, handle: usize) -> Result<Arc<Stream>, Code> {
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
    let kind = if flags & NON_BLOCKING == 0 { Kind::Blocking } else { Kind::NonBlocking };
    let stream = Stream::start(&context.owner, kind).map_err(|_| OPERATING_SYSTEM)?;
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
        if !to_wait_for(context, handle)?.is_idle() {
            return Err(NOT_READY);
        }
        // Again, since the last operation may have failed in between.
        context.owner.health()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamSynchronize(handle: usize) -> Code {
    gate::ending("cuStreamSynchronize", |context| {
        to_wait_for(context, handle)?.synchronize();
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
    if event.is_captured() {
        return capture::join(&stream, &event);
    }
    let generation = event.latest();
    stream.push(Operation::Wait(event, generation));
    Ok(())
}

/// Swaps the calling thread's mode of stream capture.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(place: *mut c_int) -> Code {
    // SAFETY: null or the caller's.
    gate::initialized("cuThreadExchangeStreamCaptureMode", || unsafe { exchange_capture_mode(place) })
}

/// # Safety
/// `place` is null or can be read and written.
pub(crate) unsafe fn exchange_capture_mode(place: *mut c_int) -> Result<(), Code> {
    // SAFETY: passed on.
    let place = unsafe { place.as_mut() }.ok_or(INVALID_VALUE)?;
    *place = capture::exchange_mode(Mode::of(*place).ok_or(INVALID_VALUE)?) as c_int;
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamBeginCapture_v2(handle: usize, mode: c_int) -> Code {
    gate::in_context("cuStreamBeginCapture_v2", |context| {
        capture::begin(find(context, handle)?, Mode::of(mode).ok_or(INVALID_VALUE)?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(handle: usize, graph: *mut usize) -> Code {
    gate::in_context("cuStreamEndCapture", |context| {
        let ended = capture::end(&find(context, handle)?);
        // SAFETY: the place is the caller's.
        unsafe { put(graph, ended.unwrap_or(0))? };
        ended.map(drop)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(handle: usize, status: *mut c_int) -> Code {
    gate::in_context("cuStreamIsCapturing", |context| {
        let found = capture::status(&find(context, handle)?)?;
        // SAFETY: the place is the caller's.
        unsafe { put(status, found) }
    })
}

/// A graph is executable as it is.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(place: *mut usize, graph: usize, _flags: u64) -> Code {
    gate::in_context("cuGraphInstantiateWithFlags", |_| {
        let graph = GRAPHS.get(graph).ok_or(INVALID_HANDLE)?;
        // SAFETY: the place is the caller's.
        unsafe { put(place, GRAPHS.insert(graph)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphLaunch(graph: usize, handle: usize) -> Code {
    gate::in_context("cuGraphLaunch", |context| {
        let graph = GRAPHS.get(graph).ok_or(INVALID_HANDLE)?;
        graph.launch(&*get(context, handle)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphDestroy(graph: usize) -> Code {
    gate::initialized("cuGraphDestroy", || GRAPHS.remove(graph).map(drop).ok_or(INVALID_HANDLE))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphExecDestroy(graph: usize) -> Code {
    gate::initialized("cuGraphExecDestroy", || GRAPHS.remove(graph).map(drop).ok_or(INVALID_HANDLE))
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
