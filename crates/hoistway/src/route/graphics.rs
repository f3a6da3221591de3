//! `directstorage` to a CUDA device: buffers of D3D12 that the device has imported, and the fences that tell of their bytes.
#![allow(unsafe_code)]

use super::Unavailable;
use crate::{Error, Result, device::Device};
use hoistway_device::{ExternalKind, ExternalMemory, ExternalSemaphore};
use hoistway_directstorage::{GraphicsDevice, SharedFence, Sharing};
use std::{fmt, sync::Arc};

/// Bytes of the buffer that is imported to find out whether one can be.
const TRIAL_BYTES: u64 = 64 << 10;

/// The device of D3D12 that is a CUDA device, too.
#[derive(Debug)]
pub(super) struct Graphics {
    device: Arc<Device>,
    graphics: Arc<GraphicsDevice>,
    /// What the CUDA device imports.
    sharing: Sharing,
}

impl Graphics {
    /// Opens it, and has the CUDA device import a buffer and a fence.
    ///
    /// # Errors
    /// Why that cannot be.
    pub(super) fn open(device: &Arc<Device>) -> Result<Self, Unavailable> {
        let name = device.name();
        let Some(luid) = device.info().luid else {
            let reason = format!("{name} has no identifier (LUID) of its own that D3D12 knows");
            let fix = "set its driver to the mode for graphics (WDDM), with adapters that are not linked";
            return Err(Unavailable::new(reason, fix));
        };
        let graphics = GraphicsDevice::open(luid, &name)?;
        let mut refused = Vec::new();
        for sharing in [Sharing::Heap, Sharing::Resource] {
            let opened = Self { device: device.clone(), graphics: graphics.clone(), sharing };
            let tried = opened.memory(TRIAL_BYTES).map_err(|error| opened.refused(error)).and_then(|_| {
                let fence = opened.graphics.fence()?;
                opened.semaphore(&fence).map_err(|error| opened.refused(error))
            });
            match tried {
                Ok(_) => return Ok(opened),
                Err(why) => refused.push(format!("a buffer that is {sharing}: {}", why.reason)),
            }
        }
        Err(Unavailable::new(format!("{name} imports none: {}", refused.join("; ")), "update its driver"))
    }

    fn refused(&self, error: Error) -> Unavailable {
        match error {
            Error::DeviceUnavailable { why, .. } => why,
            error => Unavailable::new(error.to_string(), ""),
        }
    }

    /// Returns the device of D3D12.
    pub(super) fn device(&self) -> &Arc<GraphicsDevice> {
        &self.graphics
    }

    /// Makes a buffer of `len` bytes, or somewhat more, that the CUDA device has imported.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn memory(&self, len: u64) -> Result<ExternalMemory> {
        let unavailable = |why| Error::DeviceUnavailable { device: self.device.name(), why };
        let buffer = Arc::new(self.graphics.buffer(self.sharing, len).map_err(unavailable)?);
        let kind = match self.sharing {
            Sharing::Heap => ExternalKind::D3d12Heap,
            Sharing::Resource => ExternalKind::D3d12Resource,
        };
        let (handle, len) = (buffer.handle(), buffer.len());
        // SAFETY: the handle is of that kind and length, on this device by its LUID, and the buffer keeps it.
        Ok(unsafe { ExternalMemory::import(&self.device, kind, handle, len, buffer)? })
    }

    /// Has the CUDA device import a fence of its device of D3D12.
    ///
    /// # Errors
    /// Why it does not.
    pub(super) fn semaphore(&self, fence: &SharedFence) -> Result<ExternalSemaphore> {
        // SAFETY: the handle is one of a fence on this device by its LUID.
        Ok(unsafe { ExternalSemaphore::import(&self.device, fence.handle())? })
    }
}

impl fmt::Display for Graphics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "buffers of D3D12 {} on {}", self.sharing, self.graphics.adapter())
    }
}
