//! Memory and fences of a device that another interface to it has made, such as D3D12.
#![allow(unsafe_code)]

use crate::{
    CopyStream, Device, Error, Fate, Result,
    backend::{Backend, External},
};
use std::{any::Any, ffi::c_void, sync::Arc};

/// What a handle of another interface's memory is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExternalKind {
    /// `ID3D12Heap`
    D3d12Heap,
    /// `ID3D12Resource` that is committed.
    D3d12Resource,
}

/// Memory that another interface has made, mapped for this device.
///
/// What the other interface writes there is not there for copies until their stream has waited for an [`ExternalSignal`].
#[derive(Debug)]
pub struct ExternalMemory {
    device: Arc<Device>,
    import: Option<Import>,
    len: u64,
}

#[derive(Debug)]
struct Import {
    backend: Arc<dyn Backend>,
    memory: usize,
    address: u64,
    /// Dropped after the import.
    owner: Arc<dyn Any + Send + Sync>,
}

/// An import whose release was refused, which this tries once more.
struct Unreleased(Import);

impl ExternalMemory {
    /// Imports all `len` bytes of what a handle is of. `owner` is dropped after the import, and may be asked for.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if devices of this kind import none; [`Error::Device`].
    ///
    /// # Safety
    /// The handle is one of an object of this kind and length, on this device. What `owner` owns keeps the memory.
    pub unsafe fn import(
        device: &Arc<Device>,
        kind: ExternalKind,
        handle: *mut c_void,
        len: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        // SAFETY: passed on.
        let (memory, address) = unsafe { external(device)?.import_memory(kind, handle, len)? };
        let backend = device.backend().clone();
        Ok(Self { device: device.clone(), import: Some(Import { backend, memory, address, owner }), len })
    }

    /// Address of the first byte, for the device and its driver.
    pub fn address(&self) -> u64 {
        self.import.as_ref().map_or(0, |import| import.address)
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What owns the memory, if that is a `T`.
    pub fn owner<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.import.as_ref()?.owner.clone().downcast().ok()
    }
}

impl Drop for ExternalMemory {
    fn drop(&mut self) {
        let Some(import) = self.import.take() else { return };
        match import.release() {
            Fate::Done => {}
            Fate::Failed(error) => warn_of_memory(&error),
            Fate::Unknown(_) => self.device.set_aside(Unreleased(import)),
        }
    }
}

impl Drop for Unreleased {
    fn drop(&mut self) {
        if let Fate::Failed(error) | Fate::Unknown(error) = self.0.release() {
            warn_of_memory(&error);
        }
    }
}

fn warn_of_memory(error: &Error) {
    tracing::warn!(%error, "imported memory of a device could not be released");
}

impl Import {
    fn release(&self) -> Fate {
        match self.backend.external() {
            // SAFETY: imported by the same; a release of unknown fate may be tried again, others are not. Copies that use it hold it.
            Ok(external) => unsafe { external.release_memory(self.memory, self.address) },
            Err(_) => Fate::Done,
        }
    }
}

/// A fence of another interface's, which streams of this device wait for.
#[derive(Debug)]
pub struct ExternalSemaphore {
    device: Arc<Device>,
    semaphore: usize,
}

impl ExternalSemaphore {
    /// Imports the fence (`ID3D12Fence`) that a handle is of.
    ///
    /// # Errors
    /// As [`ExternalMemory::import`].
    ///
    /// # Safety
    /// The handle is one of a fence on this device.
    pub unsafe fn import(device: &Arc<Device>, handle: *mut c_void) -> Result<Self> {
        // SAFETY: passed on.
        let semaphore = unsafe { external(device)?.import_semaphore(handle)? };
        Ok(Self { device: device.clone(), semaphore })
    }
}

impl Drop for ExternalSemaphore {
    fn drop(&mut self) {
        if let Ok(external) = self.device.backend().external() {
            // SAFETY: imported once, released once. Who waits for it keeps it.
            unsafe { external.release_semaphore(self.semaphore) };
        }
    }
}

/// A value of another interface's fence, which tells that its work is done.
#[derive(Clone, Debug)]
pub struct ExternalSignal {
    /// The fence.
    pub semaphore: Arc<ExternalSemaphore>,
    /// The value.
    pub value: u64,
}

impl ExternalSignal {
    /// Makes later copies of `copies` wait for it. It must be kept until they are over.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn order(&self, copies: &CopyStream) -> Result<()> {
        if !Arc::ptr_eq(&self.semaphore.device, copies.device()) {
            return Err(Error::Internal("a stream was to wait for a fence of another device".into()));
        }
        // SAFETY: a semaphore of this device.
        unsafe { copies.stream().wait_for_external(self.semaphore.semaphore, self.value) }
    }
}

fn external(device: &Device) -> Result<&dyn External> {
    let unavailable = |why| Error::DeviceUnavailable { device: device.name(), why };
    device.backend().external().map_err(unavailable)
}
