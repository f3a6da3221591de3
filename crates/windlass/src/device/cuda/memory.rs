//! Memory that CUDA knows: allocations on a device, and host memory that is pinned for copies.
#![allow(unsafe_code)]

use super::{Device, copies::Stream, driver};
use crate::{Error, Result};
use std::{ffi::c_void, io, sync::Arc};

/// Memory of a device. Freed when dropped, after all work on the device: whoever dropped the last tensor on it may
/// have kernels under way that read it.
#[derive(Debug)]
pub(crate) struct Allocation {
    device: Arc<Device>,
    address: u64,
    len: u64,
}

impl Allocation {
    /// `len` bytes, aligned to 256, in the order of `stream` where the device can do that.
    pub(super) fn ordered(device: &Arc<Device>, len: u64, stream: &Stream) -> Result<Self> {
        let allocate = device.driver.functions.allocate_async.filter(|_| device.info().has_memory_pools);
        let Some(allocate) = allocate else {
            return Self::plain(device, len);
        };
        Self::with(device, len, "cuMemAllocAsync", |address, bytes| {
            // SAFETY: writes one address; the stream is the device's.
            unsafe { allocate(address, bytes, stream.handle()) }
        })
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
        Ok(Self { device: device.clone(), address, len })
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Address of the first byte, for the device and its driver.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A child of fork has nothing to free.
        let Ok(_entered) = self.device.enter() else { return };
        let functions = &self.device.driver.functions;
        // SAFETY: the context is current.
        let waited = unsafe { (functions.context_synchronize)() };
        if waited != driver::SUCCESS && !driver::ends_context(waited) {
            // Work may still be under way: rather no memory than memory that changes under its next owner.
            tracing::warn!(bytes = self.len, code = waited, "memory of a device was leaked");
            return;
        }
        // SAFETY: allocated in this context and freed once. Nobody uses it any more: work was waited for, or ended
        // with the context.
        unsafe { (functions.free)(self.address) };
    }
}

/// Host memory that a device copies from and to without the driver's help.
#[derive(Debug)]
pub(crate) struct Pinned {
    device: Arc<Device>,
    address: usize,
}

impl Pinned {
    /// Pins memory, faulting it in.
    ///
    /// # Safety
    /// `memory` must stay mapped until the result is dropped.
    pub(crate) unsafe fn new(device: &Arc<Device>, memory: *mut u8, len: usize) -> Result<Self> {
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
