//! Events.

use super::{put, stream};
use crate::{
    execution::{
        capture,
        context::Context,
        event::{EVENTS, Event},
        operation::Operation,
    },
    gate,
    status::{CAPTURED_EVENT, Code, INVALID_HANDLE, INVALID_VALUE, NOT_READY},
};
use std::{ffi::c_uint, sync::Arc};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(place: *mut usize, flags: c_uint) -> Code {
    // SAFETY: the place is the caller's.
    gate::in_context("cuEventCreate", |context| unsafe { create(context, place, flags) })
}

/// # Safety
/// `place` is null or can be written.
pub(crate) unsafe fn create(context: &Context, place: *mut usize, flags: c_uint) -> Result<(), Code> {
    // BLOCKING_SYNC, DISABLE_TIMING. Processes don't share a stand-in, so INTERPROCESS isn't accepted.
    const FLAGS: c_uint = 0x3;
    if flags & !FLAGS != 0 || place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: passed on.
    unsafe { put(place, EVENTS.insert(Event::new(&context.owner))) }
}

/// An event and the stream that it is recorded in are of one context.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventRecord(handle: usize, stream: usize) -> Code {
    gate::in_context("cuEventRecord", |context| record(context, handle, stream))
}

pub(crate) fn record(context: &Context, handle: usize, stream: usize) -> Result<(), Code> {
    let stream = stream::get(context, stream)?;
    let event =
        EVENTS.get(handle).filter(|event| Arc::ptr_eq(&event.owner, &stream.owner)).ok_or(INVALID_HANDLE)?;
    let generation = event.record();
    stream.push(Operation::Record(event, generation));
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventQuery(handle: usize) -> Code {
    gate::initialized("cuEventQuery", || query(handle))
}

pub(crate) fn query(handle: usize) -> Result<(), Code> {
    let event = EVENTS.get(handle).ok_or(INVALID_HANDLE)?;
    if event.is_captured() {
        capture::invalidate(&event);
        return Err(CAPTURED_EVENT);
    }
    let is_complete = event.is_complete();
    event.owner.health()?;
    if is_complete { passed(&event) } else { Err(NOT_READY) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventSynchronize(handle: usize) -> Code {
    gate::initialized("cuEventSynchronize", || synchronize(handle))
}

pub(crate) fn synchronize(handle: usize) -> Result<(), Code> {
    let event = EVENTS.get(handle).ok_or(INVALID_HANDLE)?;
    if event.is_captured() {
        return Err(CAPTURED_EVENT);
    }
    event.wait(event.latest());
    event.owner.health()?;
    passed(&event)
}

/// The context that an event was recorded in may have ended, and the event with it.
fn passed(event: &Event) -> Result<(), Code> {
    if event.is_lost() { Err(INVALID_HANDLE) } else { Ok(()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventDestroy_v2(handle: usize) -> Code {
    gate::initialized("cuEventDestroy_v2", || destroy(handle))
}

pub(crate) fn destroy(handle: usize) -> Result<(), Code> {
    EVENTS.remove(handle).ok_or(INVALID_HANDLE)?.owner.health()
}
