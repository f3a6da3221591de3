//! Streams and events.
#![allow(unsafe_code)]

use super::{
    Vendor,
    device::DriverDevice,
    table::{
        Batch, CAPTURE_UNSUPPORTED, Copy2d, EVENT_QUIET, Handle, INVALID_HANDLE, INVALID_VALUE,
        MEMORY_DEVICE, MEMORY_HOST, NOT_READY, NOT_SUPPORTED, STREAM_NON_BLOCKING, SUCCESS, is_not_now,
    },
};
use crate::{
    Error, Fate, Result,
    backend::{Address, Event, Pending, Stream, Work},
};
use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, atomic::Ordering},
};

/// Copies of one call.
const MOST_COPIES: usize = 4096;

/// A stream.
#[derive(Debug)]
pub(super) struct DriverStream<V: Vendor> {
    device: Arc<DriverDevice<V>>,
    handle: Handle,
}

// SAFETY: a stream may be used from any thread, by several at once.
unsafe impl<V: Vendor> Send for DriverStream<V> {}
// SAFETY: as above.
unsafe impl<V: Vendor> Sync for DriverStream<V> {}

impl<V: Vendor> DriverStream<V> {
    pub(super) fn new(device: Arc<DriverDevice<V>>) -> Result<Self> {
        let mut handle = ptr::null_mut();
        {
            let _entered = device.enter()?;
            let create = &device.driver.functions.stream_create;
            // SAFETY: writes one handle; the device is current.
            device.call("making a stream", create.name, || unsafe {
                (create.call)(&mut handle, STREAM_NON_BLOCKING)
            })?;
        }
        Ok(Self { device, handle })
    }

    /// Whether a capture has taken it in; `None` if the driver says that only later. The caller has made the device current.
    fn is_captured(&self, operation: &'static str) -> Result<Option<bool>> {
        let Some(ask) = &self.device.driver.functions.stream_is_capturing else { return Ok(Some(false)) };
        let mut status = 0;
        // SAFETY: writes one integer; the stream is this one.
        let code = unsafe { (ask.call)(self.handle, &mut status) };
        if is_not_now(code) {
            V::forget_error(self.device.driver);
            return Ok(None);
        }
        self.device.check(operation, ask.name, code)?;
        Ok(Some(status != 0))
    }

    /// Waits for its work. The caller has made the device current.
    fn wait(&self) -> Result<()> {
        let synchronize = &self.device.driver.functions.stream_synchronize;
        // SAFETY: a live stream of the current device.
        self.device
            .call("waiting for a stream", synchronize.name, || unsafe { (synchronize.call)(self.handle) })
    }

    /// Makes later work wait for an event. The caller has made the device current.
    ///
    /// # Safety
    /// The event lives.
    unsafe fn wait_for_event(&self, operation: &'static str, event: Handle) -> Result<()> {
        let wait = &self.device.driver.functions.stream_wait_event;
        // SAFETY: the event lives; the stream is this one.
        self.device.call(operation, wait.name, || unsafe { (wait.call)(self.handle, event, 0) })
    }

    /// Queues copies of bytes in a row, which are in no order with each other, by as few calls as the driver allows.
    ///
    /// # Safety
    /// As for [`Stream::queue`]; the device is current.
    unsafe fn queue_copies(&self, copies: &[Work]) -> Result<()> {
        // SAFETY: passed on.
        let one_by_one = || copies.iter().try_for_each(|copy| unsafe { self.queue_one(copy) });
        if copies.len() < 2 || self.device.has_no_batches.load(Ordering::Relaxed) {
            return one_by_one();
        }
        for some in copies.chunks(MOST_COPIES) {
            let mut batch = Batch::default();
            for copy in some {
                let &Work::Copy { from, to, len } = copy else { return one_by_one() };
                if matches!((from, to), (Address::Host(_), Address::Host(_))) {
                    return Err(no_device());
                }
                if len > 0 {
                    batch.from.push(bare(from));
                    batch.to.push(bare(to));
                    batch.lens.push(len as usize);
                }
            }
            if batch.lens.is_empty() {
                continue;
            }
            let mut name = "";
            let code = self.device.driver.repeat(|| {
                // SAFETY: passed on; no copy is empty.
                let called = unsafe { V::copy_batch(self.device.driver, self.handle, &mut batch) };
                let (function, code) = called.unwrap_or((name, NOT_SUPPORTED));
                name = function;
                code
            });
            if matches!(code, NOT_SUPPORTED | INVALID_VALUE) {
                self.device.forget(code);
                // What was queued is copied again, which changes nothing. An address that is not valid is an error of that copy.
                one_by_one()?;
                self.device.has_no_batches.store(true, Ordering::Relaxed);
                return Ok(());
            }
            self.device.check("copying to or from it", name, code)?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Stream::queue`]; the device is current.
    unsafe fn queue_one(&self, work: &Work) -> Result<()> {
        let (functions, stream) = (&self.device.driver.functions, self.handle);
        match *work {
            Work::Copy { from, to, len } => {
                let len = len as usize;
                let (to_device, on_device, to_host) =
                    (&functions.copy_to_device, &functions.copy_on_device, &functions.copy_to_host);
                match (from, to) {
                    (Address::Host(from), Address::Device(to)) => {
                        // SAFETY: the caller vouches for both sides.
                        self.device.call("copying to it", to_device.name, || unsafe {
                            (to_device.call)(to, from.cast(), len, stream)
                        })
                    }
                    (Address::Device(from), Address::Device(to)) => {
                        // SAFETY: as above.
                        self.device.call("copying within it", on_device.name, || unsafe {
                            (on_device.call)(to, from, len, stream)
                        })
                    }
                    (Address::Device(from), Address::Host(to)) => {
                        // SAFETY: as above.
                        self.device.call("copying from it", to_host.name, || unsafe {
                            (to_host.call)(to.cast(), from, len, stream)
                        })
                    }
                    (Address::Host(_), Address::Host(_)) => Err(no_device()),
                }
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
                let call = || unsafe { (functions.copy_2d.call)(&copy, stream) };
                self.device.call("copying rows", functions.copy_2d.name, call)
            }
            Work::Run { kernel, table, segments, longest } => {
                let kernels = self.device.kernels()?;
                // SAFETY: the device is current; the caller vouches for the table and what it refers to.
                unsafe { kernels.launch(&self.device, stream, kernel, table, segments, longest) }
            }
        }
    }
}

/// Either memory's address, as drivers tell them apart.
fn bare(address: Address) -> u64 {
    match address {
        Address::Host(start) => start.expose_provenance() as u64,
        Address::Device(start) => start,
    }
}

/// The type of a side of a copy of rows, and its place in host memory or the device's.
fn side(address: Address) -> (u32, *mut c_void, u64) {
    match address {
        Address::Host(start) => (MEMORY_HOST, start.cast(), 0),
        Address::Device(start) => (MEMORY_DEVICE, ptr::null_mut(), start),
    }
}

fn no_device() -> Error {
    Error::Internal("a copy has no device on either side".into())
}

impl<V: Vendor> Stream for DriverStream<V> {
    unsafe fn queue(&self, work: &[Work]) -> Result<()> {
        let _entered = self.device.enter()?;
        let is_copy = |work: &Work| matches!(work, Work::Copy { .. });
        work.chunk_by(|one, next| is_copy(one) && is_copy(next)).try_for_each(|part| {
            // SAFETY: passed on.
            unsafe { self.queue_copies(part) }
        })
    }

    unsafe fn wait_for(&self, stream: usize) -> Result<()> {
        let _entered = self.device.enter()?;
        let stream = ptr::with_exposed_provenance_mut(stream);
        // SAFETY: the caller's stream lives.
        unsafe { check_not_captured(&self.device, stream)? };
        let event = DriverEvent::record(&self.device, stream)?;
        // SAFETY: the event lives; the wait refers to the record that was just made.
        unsafe { self.wait_for_event("waiting for a stream", event.handle) }
    }

    unsafe fn wait_for_event(&self, event: u64) -> Result<()> {
        let _entered = self.device.enter()?;
        let event = ptr::with_exposed_provenance_mut::<c_void>(event as usize);
        // One that was captured is refused here. To wait for it would make the stream a part of the capture.
        // SAFETY: passed on.
        unsafe { self.device.query(event)? };
        // SAFETY: passed on.
        unsafe { DriverStream::wait_for_event(self, "waiting for an event", event) }
    }

    unsafe fn wait_for_external(&self, semaphore: usize, value: u64) -> Result<()> {
        let unavailable = |why| Error::DeviceUnavailable { device: self.device.info.id.to_string(), why };
        let external = V::external(&self.device).map_err(unavailable)?;
        // SAFETY: passed on; the stream is this one.
        unsafe { external.wait(self.handle, semaphore, value) }
    }

    fn mark(&self) -> Result<Box<dyn Event>> {
        let _entered = self.device.enter()?;
        Ok(Box::new(DriverEvent::record(&self.device, self.handle)?))
    }

    fn synchronize(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        self.wait()
    }

    fn can_be_kept(&self) -> bool {
        self.device.tells_contexts_apart()
    }

    fn pending(&self) -> Result<Pending> {
        const OPERATION: &str = "asking whether a stream has work";
        let _entered = self.device.enter()?;
        // To ask for its work would invalidate the capture.
        match self.is_captured(OPERATION)? {
            Some(false) => {}
            Some(true) => return Ok(Pending::Capture),
            None => return Ok(Pending::Work),
        }
        let query = &self.device.driver.functions.stream_query;
        // SAFETY: a live stream of the current device.
        let code = unsafe { (query.call)(self.handle) };
        if code == NOT_READY || is_not_now(code) {
            V::forget_error(self.device.driver);
            return Ok(Pending::Work);
        }
        self.device.check(OPERATION, query.name, code).map(|()| Pending::Nothing)
    }

    fn allocate(&self, len: u64) -> Result<Option<u64>> {
        let functions = &self.device.driver.functions;
        let (Some(allocate), Some(_), true) =
            (&functions.allocate_async, &functions.free_async, self.device.info.has_memory_pools)
        else {
            return Ok(None);
        };
        let address = self.device.allocate_by(allocate.name, len, |address, bytes| {
            // SAFETY: writes one address; the stream is the device's.
            unsafe { (allocate.call)(address, bytes, self.handle) }
        })?;
        Ok(Some(address))
    }

    unsafe fn free(&self, address: u64, _len: u64) -> Fate {
        let Some(free) = &self.device.driver.functions.free_async else { return Fate::Done };
        // SAFETY: allocated on this stream and freed once. All work that uses it was queued before.
        self.device.free_by("freeing memory", free.name, || unsafe { (free.call)(address, self.handle) })
    }
}

impl<V: Vendor> Drop for DriverStream<V> {
    fn drop(&mut self) {
        // Where its context is gone, the handle means nothing, or a stream of the program.
        let Ok(_entered) = self.device.enter_to_give_back() else { return };
        if let Ok(Some(true)) = self.is_captured("giving a stream back") {
            tracing::warn!(device = %self.device.info.id, "a stream stays: a capture has taken it in");
            return;
        }
        let functions = &self.device.driver.functions;
        // Work of unknown fate keeps its stream, so that this does not wait for such.
        if !V::STREAMS_OUTLIVE_HANDLES && !Fate::of(self.wait()).is_known() {
            tracing::warn!(device = %self.device.info.id, "a stream stays: its work may be in flight");
            return;
        }
        // SAFETY: made by `new`, destroyed once. What is still queued on it goes on.
        let code = self.device.driver.repeat(|| unsafe { (functions.stream_destroy.call)(self.handle) });
        self.device.forget(code);
    }
}

/// An event behind what is queued so far on a stream of the caller's.
///
/// # Safety
/// The stream lives.
pub(super) unsafe fn mark<V: Vendor>(device: &Arc<DriverDevice<V>>, stream: usize) -> Result<Box<dyn Event>> {
    let _entered = device.enter()?;
    let stream = ptr::with_exposed_provenance_mut(stream);
    // SAFETY: passed on.
    unsafe { check_not_captured(device, stream)? };
    Ok(Box::new(DriverEvent::record(device, stream)?))
}

/// Checks that a stream of the caller's is not captured: what waits for it would become a part of the graph. Waits
/// while the legacy default stream must not be used. The caller has made the device current.
///
/// # Safety
/// The stream lives.
unsafe fn check_not_captured<V: Vendor>(device: &DriverDevice<V>, stream: Handle) -> Result<()> {
    let Some(ask) = &device.driver.functions.stream_is_capturing else { return Ok(()) };
    const OPERATION: &str = "waiting for a stream";
    let mut status = 0;
    // SAFETY: writes one integer; the stream lives.
    device.call(OPERATION, ask.name, || unsafe { (ask.call)(stream, &mut status) })?;
    let code = if status == 0 { SUCCESS } else { CAPTURE_UNSUPPORTED };
    device.check(OPERATION, ask.name, code)
}

/// An event that was recorded.
#[derive(Debug)]
struct DriverEvent<V: Vendor> {
    device: Arc<DriverDevice<V>>,
    handle: Handle,
}

// SAFETY: an event may be used from any thread.
unsafe impl<V: Vendor> Send for DriverEvent<V> {}

impl<V: Vendor> DriverEvent<V> {
    /// Records an event on a stream. The caller has made the device current.
    fn record(device: &Arc<DriverDevice<V>>, stream: Handle) -> Result<Self> {
        let functions = &device.driver.functions;
        let (create, record) = (&functions.event_create, &functions.event_record);
        let mut spare = device.spare_event();
        loop {
            let is_spare = spare.is_some();
            let handle = match spare.take() {
                Some(handle) => handle,
                None => {
                    let mut handle = ptr::null_mut();
                    // SAFETY: writes one handle; the device is current.
                    let make = || unsafe { (create.call)(&mut handle, EVENT_QUIET) };
                    device.call("making an event", create.name, make)?;
                    handle
                }
            };
            // SAFETY: both are live and of this device.
            let code = device.driver.repeat(|| unsafe { (record.call)(handle, stream) });
            if code == SUCCESS {
                return Ok(Self { device: device.clone(), handle });
            }
            if is_spare && code == INVALID_HANDLE {
                // The program has reset the device since: all that were kept went with its context.
                device.forget_spare_events();
            } else {
                device.destroy_event(handle);
                device.check("recording an event", record.name, code)?;
            }
        }
    }
}

impl<V: Vendor> Event for DriverEvent<V> {
    fn wait(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        let synchronize = &self.device.driver.functions.event_synchronize;
        // SAFETY: a live event that was recorded.
        self.device
            .call("waiting for copies", synchronize.name, || unsafe { (synchronize.call)(self.handle) })
    }

    fn handle(&self) -> u64 {
        self.handle.expose_provenance() as u64
    }

    fn is_reached(&self) -> Result<bool> {
        let _entered = self.device.enter()?;
        // SAFETY: a live event that was recorded.
        unsafe { self.device.query(self.handle) }
    }
}

impl<V: Vendor> Drop for DriverEvent<V> {
    fn drop(&mut self) {
        // What waits for it keeps to the record that it was told to wait for, also if it is recorded again.
        self.device.give_event_back(self.handle);
    }
}
