//! Memory of the caller's that is made known to the kernel or a device ahead.
#![allow(unsafe_code, reason = "the caller answers for the memory of regions")]

use super::Store;
use crate::{Error, Result};

/// Memory that was registered. It is unregistered when this is dropped, after the transfers that use it.
#[derive(Debug)]
pub struct Region {}

impl Store {
    /// Makes host memory known ahead, so that transfers from and to it cost less. Optional.
    ///
    /// # Safety
    /// The memory stays valid until the region is dropped.
    ///
    /// # Errors
    /// [`Error::Engine`], [`Error::Closed`].
    pub unsafe fn register_host(&self, address: *mut u8, len: usize) -> Result<Region> {
        let _ = (address, len);
        Err(Error::Internal("not yet".into()))
    }

    /// Makes memory of the CUDA device `ordinal` known, so that storage can be read to it and written from it directly.
    /// Without, bytes go by way of pinned host memory, or are refused where
    /// [`DirectPath::Require`](crate::DirectPath::Require) was asked for.
    ///
    /// # Safety
    /// The memory stays valid until the region is dropped.
    ///
    /// # Errors
    /// [`Error::Engine`], [`Error::Closed`].
    pub unsafe fn register_device(&self, ordinal: u32, address: u64, len: u64) -> Result<Region> {
        let _ = (ordinal, address, len);
        Err(Error::Internal("not yet".into()))
    }
}
