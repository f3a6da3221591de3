//! Memory of devices for programs that have none of their own, and need no `unsafe` this way.
#![allow(unsafe_code, reason = "copies and regions are given addresses of memory that is owned here")]

use crate::{Buffer, Piece, Region, Result, Store, buffer::sealed::Piecewise};
use hoistway_device::{CopyStream, Device, DeviceId, DeviceMemory, Error};
use std::sync::Arc;

/// What direct transfers want the addresses of memory to be multiples of.
const ALIGNMENT: u64 = 4096;

/// Memory of a device of a fixed length, aligned for direct transfers.
#[derive(Debug)]
pub struct DeviceBuffer {
    /// That of several buffers. It is freed with the last of them.
    memory: Arc<DeviceMemory>,
    address: u64,
    len: usize,
}

impl DeviceBuffer {
    /// Allocates `count` buffers of `len` bytes each on the device `id`. What they hold is arbitrary.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the device cannot be used, or has too little memory.
    pub fn allocate(id: DeviceId, len: usize, count: usize) -> Result<Vec<Self>> {
        let device = Device::open(id)?;
        let too_much = || {
            let (free, _) = device.memory().unwrap_or_default();
            Error::OutOfMemory { device: device.name(), needed: u64::MAX, available: free }
        };
        let distance = (len as u64).checked_next_multiple_of(ALIGNMENT).ok_or_else(too_much)?;
        let bytes = distance.checked_mul(count as u64).and_then(|bytes| bytes.checked_add(ALIGNMENT));
        let memory = Arc::new(DeviceMemory::new(&device, bytes.ok_or_else(too_much)?)?);
        // Below the end of the allocation: `ALIGNMENT` bytes were added for this.
        let first = memory.address().next_multiple_of(ALIGNMENT);
        let buffer = |number| Self { memory: Arc::clone(&memory), address: first + distance * number, len };
        Ok((0..count as u64).map(buffer).collect())
    }

    /// Copies bytes to its beginning, as many as it has room for.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the device fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let bytes = &bytes[..bytes.len().min(self.len)];
        let copies = CopyStream::new(self.memory.device())?;
        // SAFETY: they are allocated, and this buffer's alone.
        Ok(unsafe { copies.write(self.address, bytes) }?)
    }

    /// Copies its first `len` bytes, or all of them if there are fewer.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the device fails.
    pub fn read(&self, len: usize) -> Result<Buffer> {
        let mut bytes = Buffer::zeroed(len.min(self.len));
        let copies = CopyStream::new(self.memory.device())?;
        copies.read_back(self.address, &mut bytes)?;
        Ok(bytes)
    }
}

impl Piecewise for DeviceBuffer {
    fn piece(&mut self) -> Piece {
        let device = self.memory.device().id();
        Piece { address: self.address, len: self.len as u64, device }
    }
}

impl Store {
    /// Makes the memory of buffers known, so that storage can be read to it and written from it directly: see
    /// [`Store::register_device`]. Buffers that were not allocated together have a region each.
    ///
    /// # Errors
    /// As [`Store::register_device`].
    pub fn register_buffers(&self, buffers: &[DeviceBuffer]) -> Result<Vec<Region>> {
        let mut regions = Vec::new();
        for together in buffers.chunk_by(|one, other| Arc::ptr_eq(&one.memory, &other.memory)) {
            let Some(first) = together.first() else { continue };
            // They come in any order.
            let start = together.iter().map(|piece| piece.address).min().unwrap_or(first.address);
            let end = together.iter().map(|piece| piece.address + piece.len as u64).max().unwrap_or(start);
            let len = (end - start).next_multiple_of(ALIGNMENT);
            let id = first.memory.device().id();
            // SAFETY: memory of one allocation of this device, which the region keeps: the end of its last buffer, rounded up,
            // is in it.
            let region = unsafe { self.register_device(id, start, len)? };
            regions.push(region.keeping(Arc::clone(&first.memory)));
        }
        Ok(regions)
    }
}
