//! The caller's memory that is registered ahead of requests.
#![allow(unsafe_code, reason = "the caller answers for the memory of regions")]

use super::Store;
use crate::{Result, io::DeviceRegion};
use hoistway_device::{DeviceId, DeviceMemory};
use std::sync::Arc;

/// Memory that was registered. It is known as long as this lives.
#[derive(Debug)]
pub struct Region {
    /// `None` for host memory.
    device: Option<DeviceRegion>,
    /// What has to outlive it, if the store knows. Dropped after it.
    _memory: Option<Arc<DeviceMemory>>,
}

impl Region {
    /// Whether it is memory of a device whose bytes go past the host's memory. If they do not, [`Store::report`] says
    /// why.
    pub fn is_direct(&self) -> bool {
        self.device.as_ref().is_some_and(DeviceRegion::is_direct)
    }

    /// The same, with the memory that it is of.
    pub(crate) fn keeping(self, memory: Arc<DeviceMemory>) -> Self {
        Self { _memory: Some(memory), ..self }
    }
}

impl Store {
    /// Makes host memory known, for callers that treat all memory alike: the system reads and writes host memory as it
    /// is, so nothing is done with it.
    ///
    /// # Safety
    /// The memory stays valid until the region is dropped.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed).
    pub unsafe fn register_host(&self, _address: *mut u8, _len: usize) -> Result<Region> {
        self.core().check_open()?;
        Ok(Region { device: None, _memory: None })
    }

    /// Makes memory of the device `id` known, so that storage can be read to it and written from it directly.
    /// Without, bytes go by way of pinned host memory, or are refused where
    /// [`DirectPath::Require`](crate::DirectPath::Require) was asked for.
    ///
    /// # Safety
    /// It is memory of this device, and stays allocated until the region is dropped.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`](crate::Error::RouteUnavailable) if the direct path is required and cannot be had;
    /// [`Error::Device`](crate::Error::Device) if the device cannot be used at all;
    /// [`Error::Closed`](crate::Error::Closed).
    pub unsafe fn register_device(&self, id: DeviceId, address: u64, len: u64) -> Result<Region> {
        let core = self.core();
        core.check_open()?;
        let transfers = core.transfers().ok_or_else(|| core.closed())?;
        // SAFETY: passed on.
        let region = unsafe { transfers.register_device(id, address, len)? };
        Ok(Region { device: Some(region), _memory: None })
    }
}
