//! Address space of a device, and memory that is mapped into it by granules.
#![allow(unsafe_code)]

use crate::{Device, Error, Fate, Result, backend::Virtual};
use std::{fmt, sync::Arc};

/// Addresses of a device that have memory only where some is [mapped](AddressSpace::map).
///
/// They are given back as it is dropped, after all that is mapped there.
pub struct AddressSpace {
    device: Arc<Device>,
    address: u64,
    len: u64,
}

/// Memory of a device that has no address until it is mapped. It is freed as this is dropped.
pub struct DeviceBlock {
    device: Arc<Device>,
    memory: u64,
    len: u64,
}

/// A block that is mapped. It is unmapped as this is dropped, after all work of the device.
#[derive(Debug)]
pub struct Mapped {
    space: Arc<AddressSpace>,
    offset: u64,
    /// `None` once it was unmapped.
    block: Option<DeviceBlock>,
}

impl AddressSpace {
    /// Bytes of a granule of a device: addresses and blocks are multiples of it.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if memory of the device cannot be mapped; [`Error::Device`].
    pub fn granule_of(device: &Device) -> Result<u64> {
        virtual_memory(device)?.granule()
    }

    /// Reserves `len` bytes of addresses, a multiple of the granule.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if memory of the device cannot be mapped; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn reserve(device: &Arc<Device>, len: u64) -> Result<Arc<Self>> {
        let calls = virtual_memory(device)?;
        let address = calls.reserve(len, calls.granule()?)?;
        Ok(Arc::new(Self { device: device.clone(), address, len }))
    }

    /// Address of the first byte.
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

    /// Maps a block at `offset`, a multiple of the granule, and takes it. No work may use it until [`Mapped::allow`] was called.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Device`], also if something is mapped there; [`Error::Internal`] without a block, or if it
    /// does not fit. Then the block is not taken.
    pub fn map(self: &Arc<Self>, offset: u64, taken: &mut Option<DeviceBlock>) -> Result<Mapped> {
        let Some(block) = &*taken else {
            return Err(Error::Internal("no block was to be mapped".into()));
        };
        let fits = offset.checked_add(block.len).is_some_and(|end| end <= self.len);
        if !fits || !Arc::ptr_eq(&self.device, &block.device) {
            return Err(Error::Internal("a block was to be mapped outside its address space".into()));
        }
        let (address, len) = (self.address + offset, block.len);
        let calls = virtual_memory(&self.device)?;
        // SAFETY: the block is not mapped, or it would be in a `Mapped`. The driver refuses addresses where something is.
        unsafe { calls.map(block.memory, address, len)? };
        Ok(Mapped { space: self.clone(), offset, block: taken.take() })
    }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        // SAFETY: reserved once and given back once; what is mapped there holds this.
        let given_back =
            virtual_memory(&self.device).and_then(|calls| unsafe { calls.unreserve(self.address, self.len) });
        warn(given_back, "addresses of a device could not be given back");
    }
}

impl DeviceBlock {
    /// Allocates `len` bytes, a multiple of the granule. What they hold is arbitrary.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if memory of the device cannot be mapped; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn new(device: &Arc<Device>, len: u64) -> Result<Self> {
        let calls = virtual_memory(device)?;
        let memory = device.with_room(|| calls.create(len))?;
        Ok(Self { device: device.clone(), memory, len })
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

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        // SAFETY: made once and freed once. It was unmapped, or the device does nothing more.
        let freed = virtual_memory(&self.device).and_then(|calls| unsafe { calls.destroy(self.memory) });
        warn(freed, "memory of a device could not be freed");
    }
}

impl Mapped {
    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.space.address + self.offset
    }

    /// Length in bytes; 0 once it was unmapped.
    pub fn len(&self) -> u64 {
        self.block.as_ref().map_or(0, DeviceBlock::len)
    }

    /// Whether it was unmapped.
    pub fn is_empty(&self) -> bool {
        self.block.is_none()
    }

    /// Lets its device, and no other, read and write the block.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`]. It stays mapped, and this may be tried again.
    pub fn allow(&self) -> Result<()> {
        if self.is_empty() {
            return Err(Error::Internal("a block was unmapped before it was used".into()));
        }
        // SAFETY: mapped by `map`.
        unsafe { virtual_memory(&self.space.device)?.allow(self.address(), self.len()) }
    }

    /// Unmaps the block, and returns it. Waits for nothing: the device fails work that uses the block and has not ended.
    ///
    /// # Errors
    /// [`Error::Device`]. Then it is mapped still, and may be tried again.
    pub fn unmap(&mut self) -> Result<DeviceBlock> {
        let calls = virtual_memory(&self.space.device)?;
        let Some(block) = self.block.take() else {
            return Err(Error::Internal("a block was unmapped twice".into()));
        };
        // SAFETY: mapped by `map`, and unmapped once. No work uses it, as the caller says; the device fails such work.
        match unsafe { calls.unmap(self.address(), block.len) } {
            Fate::Done => Ok(block),
            // A child of fork has a copy, which is the parent's to unmap.
            Fate::Failed(Error::Forked) => Err(Error::Forked),
            // A block that is mapped is not freed, whatever has become of its device.
            Fate::Failed(error) | Fate::Unknown(error) => {
                self.block = Some(block);
                Err(error)
            }
        }
    }

    /// Unmaps the block after all work of the device. `false` if it is mapped still.
    fn end(&mut self) -> bool {
        if self.block.is_none() {
            return true;
        }
        if self.space.device.settle().is_ok()
            && let Err(error) = self.unmap()
        {
            tracing::warn!(bytes = self.len(), %error, "memory of a device could not be unmapped");
        }
        self.block.is_none()
    }
}

/// A block whose release was refused, which this tries once more.
struct Unmapped(Mapped);

impl Drop for Mapped {
    fn drop(&mut self) {
        if !self.end() {
            let left = Self { space: self.space.clone(), offset: self.offset, block: self.block.take() };
            self.space.device.set_aside(Unmapped(left));
        }
    }
}

impl Drop for Unmapped {
    fn drop(&mut self) {
        if !self.0.end() {
            // Its memory stays as it is to the end of the process, and the addresses with it.
            std::mem::forget(self.0.block.take());
            std::mem::forget(self.0.space.clone());
        }
    }
}

fn virtual_memory(device: &Device) -> Result<&dyn Virtual> {
    let unavailable = |why| Error::DeviceUnavailable { device: device.name(), why };
    device.backend().virtual_memory().map_err(unavailable)
}

fn warn(given_back: Result<()>, message: &str) {
    match given_back {
        // A child of fork has copies, which are the parent's to give back.
        Ok(()) | Err(Error::Forked) => {}
        Err(error) => tracing::warn!(%error, "{message}"),
    }
}

impl fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace").field("len", &self.len).finish_non_exhaustive()
    }
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBlock").field("len", &self.len).finish_non_exhaustive()
    }
}
