//! Streams and events.
#![allow(unsafe_code)]

use super::{
    CudaDevice,
    driver::{self, Copy2d, Handle},
};
use crate::{
    Error, Result,
    backend::{Address, Event, Stream, Work},
};
use std::{ffi::c_void, ptr, sync::Arc};

/// A stream.
#[derive(Debug)]
pub(super) struct CudaStream {
    device: Arc<CudaDevice>,
    handle: Handle,
}

// SAFETY: a stream may be used from any thread, by several at once.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn new(device: Arc<CudaDevice>) -> Result<Self> {
        let mut handle = ptr::null_mut();
        {
            let _entered = device.enter()?;
            // SAFETY: writes one handle; the context is current.
            let code =
                unsafe { (device.driver.functions.stream_create)(&mut handle, driver::STREAM_NON_BLOCKING) };
            device.check("making a stream", "cuStreamCreate", code)?;
        }
        Ok(Self { device, handle })
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// Records an event on a stream. The caller has made the context current.
    fn record(&self, stream: Handle) -> Result<CudaEvent> {
        let functions = &self.device.driver.functions;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle; the context is current.
        let code = unsafe { (functions.event_create)(&mut handle, driver::EVENT_QUIET) };
        self.device.check("making an event", "cuEventCreate", code)?;
        let event = CudaEvent { device: self.device.clone(), handle };
        // SAFETY: both are live and of this device.
        let code = unsafe { (functions.event_record)(handle, stream) };
        self.device.check("recording an event", "cuEventRecord", code)?;
        Ok(event)
    }

    /// # Safety
    /// As for [`Stream::queue`]; the context is current.
    unsafe fn queue_one(&self, work: &Work) -> Result<()> {
        let (functions, stream) = (&self.device.driver.functions, self.handle);
        match *work {
            Work::WaitForEvent(event) => {
                let event = ptr::with_exposed_provenance_mut::<c_void>(event as usize);
                // SAFETY: the caller's event lives; the stream is this one.
                let code = unsafe { (functions.stream_wait_event)(stream, event, 0) };
                self.device.check("waiting for an event", "cuStreamWaitEvent", code)
            }
            Work::Copy { from, to, len } => {
                let len = len as usize;
                // SAFETY: the caller vouches for both sides.
                let (operation, function, code) = unsafe {
                    match (from, to) {
                        (Address::Host(from), Address::Device(to)) => (
                            "copying to it",
                            "cuMemcpyHtoDAsync",
                            (functions.copy_to_device)(to, from.cast(), len, stream),
                        ),
                        (Address::Device(from), Address::Device(to)) => (
                            "copying to it",
                            "cuMemcpyDtoDAsync",
                            (functions.copy_on_device)(to, from, len, stream),
                        ),
                        (Address::Device(from), Address::Host(to)) => (
                            "copying from it",
                            "cuMemcpyDtoHAsync",
                            (functions.copy_to_host)(to.cast(), from, len, stream),
                        ),
                        (Address::Host(_), Address::Host(_)) => return Err(no_device()),
                    }
                };
                self.device.check(operation, function, code)
            }
            Work::CopyRows { from, from_pitch, to, to_pitch, width, height } => {
                let (source_type, source_host, source_device) = side(from);
                let (destination_type, destination_host, destination_device) = side(to);
                let copy = Copy2d {
                    source_x: 0,
                    source_y: 0,
                    source_type,
                    source_host,
                    source_device,
                    source_array: ptr::null_mut(),
                    source_pitch: from_pitch as usize,
                    destination_x: 0,
                    destination_y: 0,
                    destination_type,
                    destination_host,
                    destination_device,
                    destination_array: ptr::null_mut(),
                    destination_pitch: to_pitch as usize,
                    width: width as usize,
                    height: height as usize,
                };
                // SAFETY: the driver copies the description; the caller vouches for the rows.
                let code = unsafe { (functions.copy_2d)(&copy, stream) };
                self.device.check("copying rows", "cuMemcpy2DAsync", code)
            }
            Work::Run { kernel, table, segments, longest } => {
                let kernels = self.device.kernels()?;
                // SAFETY: the context is current; the caller vouches for the table and what it refers to.
                unsafe { kernels.launch(&self.device, self, kernel, table, segments, longest) }
            }
        }
    }
}

/// The type of a side of a copy of rows, and its place in host memory or the device's.
fn side(address: Address) -> (u32, *mut c_void, u64) {
    match address {
        Address::Host(start) => (driver::MEMORY_HOST, start.cast(), 0),
        Address::Device(start) => (driver::MEMORY_DEVICE, ptr::null_mut(), start),
    }
}

fn no_device() -> Error {
    Error::Internal("a copy has no device on either side".into())
}

impl Stream for CudaStream {
    unsafe fn queue(&self, work: &[Work]) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: passed on.
        work.iter().try_for_each(|work| unsafe { self.queue_one(work) })
    }

    unsafe fn wait_for(&self, stream: usize) -> Result<()> {
        let _entered = self.device.enter()?;
        let event = self.record(ptr::with_exposed_provenance_mut(stream))?;
        // SAFETY: both are live and of this device; the wait refers to the record that was just made.
        let code = unsafe { (self.device.driver.functions.stream_wait_event)(self.handle, event.handle, 0) };
        self.device.check("waiting for a stream", "cuStreamWaitEvent", code)
    }

    fn mark(&self) -> Result<Box<dyn Event>> {
        let _entered = self.device.enter()?;
        Ok(Box::new(self.record(self.handle)?))
    }

    fn synchronize(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: a live stream of the current context.
        let code = unsafe { (self.device.driver.functions.stream_synchronize)(self.handle) };
        self.device.check("copying to it", "cuStreamSynchronize", code)
    }

    fn allocate(&self, len: u64) -> Result<Option<u64>> {
        let functions = &self.device.driver.functions;
        let (Some(allocate), Some(_), true) =
            (functions.allocate_async, functions.free_async, self.device.info.has_memory_pools)
        else {
            return Ok(None);
        };
        let address = self.device.allocate_by("cuMemAllocAsync", len, |address, bytes| {
            // SAFETY: writes one address; the stream is the device's.
            unsafe { allocate(address, bytes, self.handle) }
        })?;
        Ok(Some(address))
    }

    unsafe fn free(&self, address: u64, len: u64) {
        let Some(free) = self.device.driver.functions.free_async else { return };
        // SAFETY: allocated on this stream and freed once. All work that uses it was queued before.
        self.device.free_by(len, || unsafe { free(address, self.handle) });
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: made by `new`, destroyed once. What is still queued on it goes on.
            unsafe { (self.device.driver.functions.stream_destroy)(self.handle) };
        }
    }
}

/// An event that was recorded.
#[derive(Debug)]
struct CudaEvent {
    device: Arc<CudaDevice>,
    handle: Handle,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for CudaEvent {}

impl Event for CudaEvent {
    fn wait(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: a live event that was recorded.
        let code = unsafe { (self.device.driver.functions.event_synchronize)(self.handle) };
        self.device.check("copying to it", "cuEventSynchronize", code)
    }

    fn is_over(&self) -> bool {
        let Ok(_entered) = self.device.enter() else { return true };
        // SAFETY: a live event that was recorded.
        let code = unsafe { (self.device.driver.functions.event_query)(self.handle) };
        code != driver::NOT_READY
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: made by `record`, destroyed once; the driver keeps what waits for it.
            unsafe { (self.device.driver.functions.event_destroy)(self.handle) };
        }
    }
}
