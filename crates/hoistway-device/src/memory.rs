//! Memory of devices, and host memory that is pinned for them.
#![allow(unsafe_code)]

use crate::{
    Device, Fate, Result,
    backend::{Backend, Stream},
};
use std::sync::Arc;

/// Memory of a device.
///
/// It is freed after all work on the device: kernels of the program may still read the last tensor on it. Memory in the
/// order of a stream is freed after the work of that stream.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    allocation: Allocation,
}

/// What was allocated, and how it is freed.
#[derive(Debug)]
struct Allocation {
    backend: Arc<dyn Backend>,
    address: u64,
    len: u64,
    /// The stream in whose order it is freed.
    stream: Option<Arc<dyn Stream>>,
}

/// Memory whose release was refused, which this tries once more.
struct Unfreed(Allocation);

impl DeviceMemory {
    /// Allocates `len` bytes, aligned to 256. What they hold is arbitrary.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::Device`](crate::Error::Device).
    pub fn new(device: &Arc<Device>, len: u64) -> Result<Self> {
        device.with_room(|| Self::as_it_is(device, len))
    }

    /// The same, from what the device has free as it is: see [`Device::with_room`].
    ///
    /// # Errors
    /// Those of [`DeviceMemory::new`].
    pub fn as_it_is(device: &Arc<Device>, len: u64) -> Result<Self> {
        Ok(Self::of(device, device.backend().allocate(len)?, len, None))
    }

    fn of(device: &Arc<Device>, address: u64, len: u64, stream: Option<Arc<dyn Stream>>) -> Self {
        let backend = device.backend().clone();
        Self { device: device.clone(), allocation: Allocation { backend, address, len, stream } }
    }

    /// Allocates `len` bytes, aligned to 256, in the order of `stream` where the device can do that.
    pub(crate) fn ordered(device: &Arc<Device>, len: u64, stream: &Arc<dyn Stream>) -> Result<Self> {
        match device.with_room(|| stream.allocate(len))? {
            Some(address) => Ok(Self::of(device, address, len, Some(stream.clone()))),
            None => Self::new(device, len),
        }
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Address of the first byte, for the device and its driver.
    pub fn address(&self) -> u64 {
        self.allocation.address
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.allocation.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.allocation.len == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: work of hoistway that uses it has ended or is queued on its stream, or it would be held.
        if !unsafe { self.allocation.free() }.is_known() {
            let Allocation { backend, address, len, stream } = &self.allocation;
            let (backend, stream) = (backend.clone(), stream.clone());
            let left = Allocation { backend, address: *address, len: *len, stream };
            self.device.set_aside(Unfreed(left));
        }
    }
}

impl Drop for Unfreed {
    fn drop(&mut self) {
        // SAFETY: it was not freed, and is not used: the device has ended its work.
        if let Fate::Unknown(error) = unsafe { self.0.free() } {
            tracing::warn!(bytes = self.0.len, %error, "memory of a device could not be freed");
        }
    }
}

impl Allocation {
    /// # Safety
    /// Nothing of hoistway uses it any more, and it was not freed.
    unsafe fn free(&self) -> Fate {
        // SAFETY: allocated by the same.
        unsafe {
            match &self.stream {
                Some(stream) => stream.free(self.address, self.len),
                None => self.backend.free(self.address, self.len),
            }
        }
    }
}

/// Host memory that a device copies from and to without the driver's help.
///
/// Where the driver refuses to unpin it, it may be pinned still: see [`Pinned::unpin`]. Dropping it does not tell.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    address: usize,
}

impl Pinned {
    /// Pins memory, faulting it in.
    ///
    /// # Errors
    /// [`Error::Allocation`](crate::Error::Allocation) if the system lets no more be pinned;
    /// [`Error::Device`](crate::Error::Device).
    ///
    /// # Safety
    /// `memory` must stay mapped until the result was [unpinned](Self::unpin).
    pub unsafe fn new(device: &Arc<Device>, memory: *mut u8, len: usize) -> Result<Self> {
        // SAFETY: passed on.
        unsafe { Self::pin(device, memory, len, false) }
    }

    /// The same for memory that cannot be written, such as a view of a file. Only devices whose
    /// [`DeviceInfo::pins_read_only`](crate::DeviceInfo::pins_read_only) says so can.
    ///
    /// # Errors
    /// Those of [`Pinned::new`].
    ///
    /// # Safety
    /// That of [`Pinned::new`].
    pub unsafe fn read_only(device: &Arc<Device>, memory: *mut u8, len: usize) -> Result<Self> {
        // SAFETY: passed on.
        device.turns().take(|| unsafe { Self::pin(device, memory, len, true) })
    }

    /// # Safety
    /// That of [`Pinned::new`].
    unsafe fn pin(device: &Arc<Device>, memory: *mut u8, len: usize, is_read_only: bool) -> Result<Self> {
        // SAFETY: the caller keeps the memory mapped.
        unsafe { device.backend().pin(memory, len, is_read_only)? };
        Ok(Self { device: device.clone(), address: memory.expose_provenance() })
    }
}

impl Pinned {
    /// The device that it was pinned by.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Unpins the memory. `false` if it may be pinned still, so that it must stay mapped.
    pub fn unpin(self) -> bool {
        let pinned = std::mem::ManuallyDrop::new(self);
        // SAFETY: neither is used again: what is left of `pinned` is not dropped.
        let device = unsafe { std::ptr::read(&pinned.device) };
        let memory = std::ptr::with_exposed_provenance_mut(pinned.address);
        // SAFETY: pinned by `new`, still mapped by its promise, and unpinned once.
        unsafe { device.backend().unpin(memory) }
    }

    /// Unpins pieces of some memory, all of them whatever becomes of one. `false` if one may be pinned still.
    pub fn unpin_all(pieces: impl IntoIterator<Item = Self>) -> bool {
        let mut are_unpinned = true;
        for piece in pieces {
            are_unpinned &= piece.unpin();
        }
        are_unpinned
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let memory = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: pinned by `new`, still mapped by its promise, and unpinned once.
        let _ = unsafe { self.device.backend().unpin(memory) };
    }
}
