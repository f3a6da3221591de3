//! Arenas in the memory of a device. Their bytes are out of reach here: only copies write them, and whether a tensor
//! is whole is a matter of which copies are done.
#![forbid(unsafe_code)]

use super::coverage::Coverage;
use crate::{
    ByteRange, Result,
    device::{self, CopyStream, Device, DeviceMemory, ReusedMemory},
    parallel::lock,
};
use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Memory of a device that several tensors share. Freed when the last of them is dropped.
#[derive(Debug)]
pub(crate) struct DeviceArena {
    memory: DeviceBacking,
}

enum DeviceBacking {
    Own(DeviceMemory),
    Reused(Reused),
    /// Memory of someone else's, kept as long as its owner lives.
    Lent {
        device: Arc<Device>,
        memory: LentMemory,
    },
}

impl fmt::Debug for DeviceBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own(allocation) => allocation.fmt(f),
            Self::Reused(reused) => reused.memory.fmt(f),
            Self::Lent { memory, .. } => memory.fmt(f),
        }
    }
}

/// Memory that goes back to its stream, while that keeps some for its next arenas.
struct Reused {
    device: Arc<Device>,
    address: u64,
    /// Until this is dropped.
    memory: Option<DeviceMemory>,
    source: Weak<ReusedMemory>,
}

impl Drop for Reused {
    fn drop(&mut self) {
        if let (Some(memory), Some(source)) = (self.memory.take(), self.source.upgrade()) {
            source.give_back(memory);
        }
    }
}

/// Memory of a device that an allocator of the caller's has given.
#[non_exhaustive]
pub struct LentMemory {
    /// Address of the first byte, a multiple of 256.
    pub address: u64,
    /// A stream of the device whose queued work may still use the memory; 0 is the default stream.
    pub stream: usize,
    /// Gives the memory back when it is dropped.
    pub owner: Box<dyn Any + Send + Sync>,
}

impl LentMemory {
    /// The memory at `address`, whose earlier uses are queued on `stream`, and what gives it back.
    pub fn new(address: u64, stream: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { address, stream, owner }
    }
}

impl fmt::Debug for LentMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentMemory").field("address", &self.address).finish_non_exhaustive()
    }
}

impl DeviceArena {
    /// From what the device has free as it is: see [`Device::with_room`].
    pub(crate) fn allocate(queue: &CopyStream, len: u64) -> Result<Arc<Self>, device::Error> {
        Ok(Arc::new(Self { memory: DeviceBacking::Own(DeviceMemory::as_it_is(queue.device(), len)?) }))
    }

    /// Memory that `source` has, or that is allocated as above, and that `source` gets once the arena is dropped.
    pub(crate) fn reused(
        queue: &CopyStream,
        len: u64,
        source: &Arc<ReusedMemory>,
    ) -> Result<Arc<Self>, device::Error> {
        let memory = match source.take(len) {
            Some(memory) => memory,
            None => DeviceMemory::as_it_is(queue.device(), len)?,
        };
        let (device, address, source) = (queue.device().clone(), memory.address(), Arc::downgrade(source));
        let reused = Reused { device, address, memory: Some(memory), source };
        Ok(Arc::new(Self { memory: DeviceBacking::Reused(reused) }))
    }

    pub(crate) fn lent(queue: &CopyStream, memory: LentMemory) -> Arc<Self> {
        Arc::new(Self { memory: DeviceBacking::Lent { device: queue.device().clone(), memory } })
    }

    /// Address of the first byte.
    pub(crate) fn address(&self) -> u64 {
        match &self.memory {
            DeviceBacking::Own(allocation) => allocation.address(),
            DeviceBacking::Reused(reused) => reused.address,
            DeviceBacking::Lent { memory, .. } => memory.address,
        }
    }

    fn device(&self) -> &Arc<Device> {
        match &self.memory {
            DeviceBacking::Own(allocation) => allocation.device(),
            DeviceBacking::Reused(reused) => &reused.device,
            DeviceBacking::Lent { device, .. } => device,
        }
    }
}

/// The tensors of one arena of a device while copies to it are under way.
#[derive(Debug)]
pub(crate) struct DeviceFill {
    /// Only while copies go to it: its tensors keep it afterwards.
    arena: Mutex<Option<Arc<DeviceArena>>>,
    /// Tensors that are not whole.
    missing: AtomicUsize,
    coverage: Coverage,
}

impl DeviceFill {
    /// As [`Fill::new`](super::Fill::new), for an arena of `len` bytes that is given later.
    pub(crate) fn new(
        len: u64,
        tensors: impl IntoIterator<Item = (usize, ByteRange)>,
        writes: &[ByteRange],
    ) -> Result<Self> {
        let coverage = Coverage::new(len, tensors, writes)?;
        Ok(Self { arena: Mutex::default(), missing: coverage.places().count().into(), coverage })
    }

    /// Gives it its memory, before the first copy to it.
    pub(crate) fn set_arena(&self, arena: Arc<DeviceArena>) {
        *lock(&self.arena) = Some(arena);
    }

    /// Its memory, while copies go to it.
    pub(crate) fn arena(&self) -> Option<Arc<DeviceArena>> {
        lock(&self.arena).clone()
    }

    /// The copies to `region` are done. Calls `ready` with the tag and block of each tensor that this completes.
    pub(crate) fn complete(&self, region: ByteRange, mut ready: impl FnMut(usize, DeviceBlock)) {
        let mut arena = lock(&self.arena);
        let mut whole = 0;
        for (tag, place) in self.coverage.complete(region) {
            if let Some(arena) = &*arena {
                ready(tag, DeviceBlock { arena: arena.clone(), place });
                whole += 1;
            }
        }
        if self.missing.fetch_sub(whole, Ordering::Relaxed) == whole {
            *arena = None;
        }
    }
}

/// The bytes of one tensor in the memory of a device, complete. Keeps its arena alive.
pub struct DeviceBlock {
    arena: Arc<DeviceArena>,
    place: ByteRange,
}

impl DeviceBlock {
    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.arena.device()
    }

    /// Address of the first byte: for the device and its driver, not for the host.
    pub fn address(&self) -> u64 {
        self.arena.address() + self.place.start()
    }

    /// What owns the memory that an allocator of the caller's gave, and where the block begins in it. `None` for memory of
    /// hoistway's own.
    pub fn lent_by(&self) -> Option<(&(dyn Any + Send + Sync), u64)> {
        match &self.arena.memory {
            DeviceBacking::Own(_) | DeviceBacking::Reused(_) => None,
            DeviceBacking::Lent { memory, .. } => Some((&*memory.owner, self.place.start())),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.place.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.place.is_empty()
    }

    /// A copy of the bytes in host memory.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device), [`Error::Allocation`](crate::Error::Allocation), [`Error::Forked`](crate::Error::Forked).
    pub fn read_back(&self) -> Result<Vec<u8>> {
        let mut bytes = super::zeroed(self.len(), "memory for a copy of a tensor")?;
        if !bytes.is_empty() {
            CopyStream::new(self.device())?.read_back(self.address(), &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Calls `came` with copies of the bytes in host memory, `step` of them at a time.
    pub(crate) fn read_back_in_steps(&self, step: usize, mut came: impl FnMut(&[u8])) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let mut buffer =
            super::zeroed(self.len().min(step as u64), "memory for a copy of a part of a tensor")?;
        let copies = CopyStream::new(self.device())?;
        let mut at = 0;
        while at < self.len() {
            let len = buffer.len().min(usize::try_from(self.len() - at).unwrap_or(step));
            copies.read_back(self.address() + at, &mut buffer[..len])?;
            came(&buffer[..len]);
            at += len as u64;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBlock")
            .field("device", &self.device().name())
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}
