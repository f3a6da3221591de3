//! Memory of devices that files are read into, and written from, past the host's memory.
#![allow(unsafe_code)]

use crate::{
    CopyDirection, CopyStream, Device, DeviceMemory, Error, RegisteredFile, Result, backend::Direct,
};
use std::{io, sync::Arc};

/// Alignment of buffers: that of direct reads.
const BLOCK_BYTES: u64 = 4096;

/// What people are told of a library that moves bytes between files and devices past the host's memory.
#[derive(Debug)]
pub struct DirectLibrary {
    /// Its name.
    pub name: &'static str,
    /// How to find out what it can do on a file system.
    pub check: &'static str,
    /// Where a failed read or write of its own is explained.
    pub log: &'static str,
    /// Which version counts reads and writes by path.
    pub counting_version: &'static str,
}

/// Reads into a device, or writes from it, as its library counts them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathCounts {
    /// Those past the host's memory, by the name of each way.
    pub direct: Vec<(&'static str, u64)>,
    /// Those through the host's memory.
    pub through_host: u64,
}

/// Memory of a device that is registered for direct reads and writes.
#[derive(Debug)]
pub struct DirectBuffer {
    device: Arc<Device>,
    address: u64,
    len: u64,
    /// What it lies in; `None` if that is the caller's.
    _memory: Option<DeviceMemory>,
}

impl DirectBuffer {
    /// `len` bytes on a device, registered.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::OutOfMemory`]; [`Error::DeviceUnavailable`] if the device has no direct path, or it
    /// does not take the memory.
    pub fn new(device: &Arc<Device>, len: u64) -> Result<Self> {
        // Before anything is allocated.
        direct(device)?;
        // Memory of a stream-ordered pool cannot be registered.
        let memory = DeviceMemory::new(device, len.saturating_add(BLOCK_BYTES))?;
        // The driver promises less than a block's alignment.
        let address = memory.address().checked_next_multiple_of(BLOCK_BYTES).unwrap_or(memory.address());
        Self::register(device, address, len, Some(memory))
    }

    /// Memory that the caller has allocated, registered.
    ///
    /// # Errors
    /// As [`DirectBuffer::new`].
    ///
    /// # Safety
    /// It must be memory of this device, and stay allocated until the result is dropped.
    pub unsafe fn of_callers(device: &Arc<Device>, address: u64, len: u64) -> Result<Self> {
        Self::register(device, address, len, None)
    }

    fn register(device: &Arc<Device>, address: u64, len: u64, memory: Option<DeviceMemory>) -> Result<Self> {
        // SAFETY: the memory is the device's, and stays until this is dropped.
        unsafe { direct(device)?.register(address, len)? };
        Ok(Self { device: device.clone(), address, len, _memory: memory })
    }

    /// Address of the first byte, a multiple of 4096 unless it is the caller's.
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

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// A copy of its first bytes in host memory.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn read_back(&self, into: &mut [u8]) -> Result<()> {
        if into.len() as u64 > self.len {
            return Err(Error::Internal(format!("{} bytes of a buffer of {}", into.len(), self.len)));
        }
        CopyStream::new(&self.device)?.read_back(self.address, into)
    }

    /// Copies bytes of the host to its beginning.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        if bytes.len() as u64 > self.len {
            return Err(Error::Internal(format!("{} bytes for a buffer of {}", bytes.len(), self.len)));
        }
        // SAFETY: the buffer has so many bytes; requests that use it are the caller's to order.
        unsafe { CopyStream::new(&self.device)?.write(self.address, bytes) }
    }

    /// Offsets as libraries take them, if the range lies inside the buffer.
    fn check(&self, file_offset: u64, buffer_offset: u64, len: usize) -> io::Result<(i64, i64)> {
        let inside = buffer_offset.checked_add(len as u64).is_some_and(|end| end <= self.len);
        match (i64::try_from(file_offset), i64::try_from(buffer_offset)) {
            (Ok(file_offset), Ok(buffer_offset)) if inside => Ok((file_offset, buffer_offset)),
            _ => Err(io::Error::other("a request does not fit its buffer")),
        }
    }
}

impl Drop for DirectBuffer {
    fn drop(&mut self) {
        if let Ok(direct) = self.device.backend().direct() {
            // SAFETY: registered once, deregistered once; requests hold the buffer.
            unsafe { direct.deregister(self.address) };
        }
    }
}

impl RegisteredFile {
    /// Reads from the file into a device's memory: `len` bytes from `file_offset` to `buffer_offset` of `buffer`.
    /// Returns how many came; fewer at the end of the file.
    ///
    /// # Errors
    /// The file's or the library's error.
    pub fn read_at(
        &self,
        buffer: &DirectBuffer,
        buffer_offset: u64,
        len: usize,
        file_offset: u64,
    ) -> io::Result<usize> {
        self.transfer(CopyDirection::ToDevice, buffer, buffer_offset, len, file_offset)
    }

    /// Writes from a device's memory to the file: `len` bytes from `buffer_offset` of `buffer` to `file_offset`.
    /// Returns how many were written.
    ///
    /// # Errors
    /// The file's or the library's error.
    pub fn write_at(
        &self,
        buffer: &DirectBuffer,
        buffer_offset: u64,
        len: usize,
        file_offset: u64,
    ) -> io::Result<usize> {
        self.transfer(CopyDirection::ToHost, buffer, buffer_offset, len, file_offset)
    }

    fn transfer(
        &self,
        direction: CopyDirection,
        buffer: &DirectBuffer,
        buffer_offset: u64,
        len: usize,
        file_offset: u64,
    ) -> io::Result<usize> {
        let direct = direct(&buffer.device).map_err(io::Error::other)?;
        let (file_offset, offset) = buffer.check(file_offset, buffer_offset, len)?;
        // SAFETY: both are registered, and the range lies inside the buffer.
        unsafe { direct.transfer(direction, self, file_offset, buffer.address, offset, len) }
    }
}

fn direct(device: &Device) -> Result<&dyn Direct> {
    let unavailable = |why| Error::DeviceUnavailable { device: device.name(), why };
    device.backend().direct().map_err(unavailable)
}
