//! Memory that CUDA knows: allocations on a device, and host memory that is pinned for copies.
#![allow(unsafe_code)]

use super::{Device, copies::Stream, driver};
use crate::{Error, Result};
use std::{ffi::c_void, io, sync::Arc};

/// Memory of a device.
///
/// Plain memory is freed after all work on the device, which `cuMemFree` waits for: whoever dropped the last tensor on
/// it may have kernels under way that read it. Memory in the order of a stream is freed after the work of that stream.
#[derive(Debug)]
pub struct Allocation {
    device: Arc<Device>,
    address: u64,
    len: u64,
    /// The stream in whose order it is freed.
    stream: Option<Arc<Stream>>,
}

impl Allocation {
    /// `len` bytes, aligned to 256, in the order of `stream` where the device can do that.
    pub(super) fn ordered(device: &Arc<Device>, len: u64, stream: &Arc<Stream>) -> Result<Self> {
        let functions = &device.driver.functions;
        let (Some(allocate), Some(_), true) =
            (functions.allocate_async, functions.free_async, device.info().has_memory_pools)
        else {
            return Self::plain(device, len);
        };
        let mut ordered = Self::with(device, len, "cuMemAllocAsync", |address, bytes| {
            // SAFETY: writes one address; the stream is the device's.
            unsafe { allocate(address, bytes, stream.handle()) }
        })?;
        ordered.stream = Some(stream.clone());
        Ok(ordered)
    }

    /// `len` bytes, aligned to 256. What they hold is arbitrary.
    pub(super) fn plain(device: &Arc<Device>, len: u64) -> Result<Self> {
        Self::with(device, len, "cuMemAlloc", |address, bytes| {
            // SAFETY: writes one address; `with` has made the context current.
            unsafe { (device.driver.functions.allocate)(address, bytes) }
        })
    }

    fn with(
        device: &Arc<Device>,
        len: u64,
        function: &'static str,
        allocate: impl FnOnce(&mut driver::DevicePointer, usize) -> driver::ResultCode,
    ) -> Result<Self> {
        let _entered = device.enter()?;
        let mut address = 0;
        let code = allocate(&mut address, usize::try_from(len.max(1)).unwrap_or(usize::MAX));
        if code == driver::OUT_OF_MEMORY {
            let (available, _) = device.memory().unwrap_or_default();
            return Err(device.too_little_memory(len, available));
        }
        device.check("allocating memory", function, code)?;
        Ok(Self { device: device.clone(), address, len, stream: None })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Address of the first byte, for the device and its driver.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A child of fork has nothing to free.
        let Ok(_entered) = self.device.enter() else { return };
        let functions = &self.device.driver.functions;
        // A tensor may be dropped, by a garbage collector say, while another thread captures a graph.
        let mut mode = driver::CAPTURE_RELAXED;
        if let Some(exchange) = functions.exchange_capture_mode {
            // SAFETY: swaps this thread's mode with that in `mode`.
            unsafe { exchange(&mut mode) };
        }
        let code = match (&self.stream, functions.free_async) {
            // SAFETY: allocated in this context and freed once. All work that uses it was queued on the stream before.
            (Some(stream), Some(free)) => unsafe { free(self.address, stream.handle()) },
            // SAFETY: allocated in this context and freed once. Work of ours that uses it has ended, or it would be
            // held; for work of others the call waits.
            _ => unsafe { (functions.free)(self.address) },
        };
        if let Some(exchange) = functions.exchange_capture_mode {
            // SAFETY: as above.
            unsafe { exchange(&mut mode) };
        }
        if code != driver::SUCCESS && !driver::ends_context(code) {
            tracing::warn!(bytes = self.len, code, "memory of a device could not be freed");
        }
    }
}

/// Memory of a device for a program to use as it likes. It is freed after all work on the device.
#[derive(Debug)]
pub struct DeviceMemory(Allocation);

impl DeviceMemory {
    /// Allocates `len` bytes, aligned to 256. What they hold is arbitrary.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device has too little memory; [`Error::Device`].
    pub fn new(device: &Arc<Device>, len: u64) -> Result<Self> {
        Allocation::plain(device, len).map(Self)
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.0.device()
    }

    /// Address of the first byte, for the device and its driver.
    pub fn address(&self) -> u64 {
        self.0.address()
    }
}

/// Host memory that a device copies from and to without the driver's help.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    address: usize,
}

impl Pinned {
    /// Pins memory, faulting it in.
    ///
    /// # Errors
    /// [`Error::Allocation`] if the system lets no more be pinned; [`Error::Device`].
    ///
    /// # Safety
    /// `memory` must stay mapped until the result is dropped.
    pub unsafe fn new(device: &Arc<Device>, memory: *mut u8, len: usize) -> Result<Self> {
        let _entered = device.enter()?;
        let flags = driver::HOST_REGISTER_PORTABLE;
        // SAFETY: the caller keeps the memory mapped; pinning changes none of its bytes.
        let code = unsafe { (device.driver.functions.host_register)(memory.cast::<c_void>(), len, flags) };
        if code == driver::OUT_OF_MEMORY {
            let source = io::Error::from(io::ErrorKind::OutOfMemory);
            return Err(Error::Allocation { bytes: len as u64, kind: "pinned memory", source });
        }
        device.check("pinning host memory", "cuMemHostRegister", code)?;
        Ok(Self { device: device.clone(), address: memory.addr() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            let memory = std::ptr::with_exposed_provenance_mut::<c_void>(self.address);
            // SAFETY: pinned by `new`, still mapped by its promise, and released once.
            unsafe { (self.device.driver.functions.host_unregister)(memory) };
        }
    }
}
