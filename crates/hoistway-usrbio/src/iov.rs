//! Buffers that the daemon reads into and writes from, and the slots that they are cut into.
#![allow(unsafe_code)]

use crate::{
    Client, Error, Result,
    copy::copy,
    key::Key,
    mount::{Inner, Registered},
    setters::setters,
    shm::SharedMemory,
    vendor,
};
use std::{
    io,
    ops::Range,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use uuid::Uuid;

/// Options of a buffer.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct IovOptions {
    /// Length in bytes.
    pub len: usize,
    /// The NUMA node whose memory is preferred. [`Iov::off_node`] says if the system refuses that.
    pub numa_node: Option<u32>,
    /// The daemon registers blocks of this length with InfiniBand, one by one. No transfer may straddle two. 0 is the
    /// whole buffer, and right but for very large ones.
    pub block_bytes: usize,
}

setters! {
    IovOptions {
        len: usize,
        numa_node: u32 => Some,
        block_bytes: usize,
    }
}

/// A buffer shared with the daemon.
///
/// Its address stays the same, so that it can be pinned for a device. The owner of the pin holds the `Arc`, and unpins
/// the buffer before dropping it.
#[derive(Debug)]
pub struct Iov {
    registered: Registered,
    id: Uuid,
    block_bytes: usize,
    vendor: Option<vendor::WrappedIov>,
    /// The start of the part that is not cut into slots yet.
    cut: AtomicUsize,
}

impl Iov {
    pub(crate) fn create(mount: &Arc<Inner>, options: &IovOptions) -> Result<Self> {
        let IovOptions { len, numa_node, block_bytes } = *options;
        if block_bytes > len {
            return Err(Error::Invalid(format!(
                "a buffer of {len} bytes cannot have blocks of {block_bytes}"
            )));
        }
        mount.check_process()?;
        let memory = SharedMemory::create(len, numa_node)?;
        let id = Uuid::new_v4();
        let registered = mount.register(memory, Key { id, block_bytes, ring: None })?;
        let vendor = match &mount.client {
            Client::Native => None,
            Client::Vendor(library) => {
                Some(library.wrap_iov(&mount.point, &registered.memory, id, block_bytes)?)
            }
        };
        Ok(Self { registered, id, block_bytes, vendor, cut: AtomicUsize::new(0) })
    }

    /// Returns the address of the first byte. What lies there may be read and written through slots, or by devices that it is pinned for.
    pub fn base(&self) -> NonNull<u8> {
        self.registered.memory.base()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.registered.memory.len()
    }

    /// Whether it is empty. It never is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The NUMA node that was asked for, and why the system does not prefer it.
    pub fn off_node(&self) -> Option<(u32, &io::Error)> {
        self.registered.memory.off_node()
    }

    /// The name under which the daemon knows it, in `3fs-virt/iovs`.
    pub fn key(&self) -> &str {
        &self.registered.name
    }

    /// Cuts a slot off what is left; `None` if less is left than `len`.
    ///
    /// A range is handed out once. A slot that is dropped is gone, so no two transfers can ever meet in memory; slots
    /// that are to be used again are kept.
    #[must_use]
    pub fn cut(self: &Arc<Self>, len: usize) -> Option<IovSlot> {
        let mut start = self.cut.load(Ordering::Relaxed);
        loop {
            let end = start.checked_add(len).filter(|&end| end <= self.len() && len > 0)?;
            match self.cut.compare_exchange_weak(start, end, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(IovSlot { iov: self.clone(), range: start..end }),
                Err(now) => start = now,
            }
        }
    }

    /// Cuts what is left into slots of `len` bytes.
    #[must_use]
    pub fn slots(self: &Arc<Self>, len: usize) -> Vec<IovSlot> {
        std::iter::from_fn(|| self.cut(len)).collect()
    }

    pub(crate) fn id(&self) -> Uuid {
        self.id
    }

    pub(crate) fn mount(&self) -> &Arc<Inner> {
        &self.registered.mount
    }

    pub(crate) fn vendor(&self) -> Option<&vendor::WrappedIov> {
        self.vendor.as_ref()
    }
}

/// A part of a buffer that belongs to its holder alone: moved into a transfer, and back with the completion.
///
/// The daemon is another process, which could write to the memory at any time. So bytes are copied in and out, or
/// reached by address; there is no slice of them.
#[derive(Debug)]
pub struct IovSlot {
    iov: Arc<Iov>,
    range: Range<usize>,
}

impl IovSlot {
    /// The buffer that it is part of.
    pub fn iov(&self) -> &Arc<Iov> {
        &self.iov
    }

    /// Where in the buffer it begins.
    pub fn offset(&self) -> usize {
        self.range.start
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether it is empty. It never is.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The address of its first byte. Valid as long as the slot.
    pub fn as_ptr(&self) -> NonNull<u8> {
        // SAFETY: `cut` made the range inside the buffer.
        unsafe { self.iov.base().add(self.range.start) }
    }

    /// Copies bytes out, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are more than there are.
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let source = self.part(offset, bytes.len())?;
        // SAFETY: `part` is inside this slot; `bytes` cannot be memory of a slot, of which there are no slices.
        unsafe { copy(source.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are more than there is room for.
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        let target = self.part(offset, bytes.len())?;
        // SAFETY: as in `copy_to`; the slot is the holder's alone.
        unsafe { target.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn part(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        self.check(offset, len)?;
        // SAFETY: `check` says that it is inside the slot.
        Ok(unsafe { self.as_ptr().add(offset) })
    }

    /// Checks that `len` bytes at `offset` are inside, and inside one block of the buffer.
    pub(crate) fn check(&self, offset: usize, len: usize) -> Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.len()) {
            let slot_len = self.len();
            return Err(Error::Invalid(format!(
                "{len} bytes at {offset} are not inside a slot of {slot_len} bytes"
            )));
        }
        Ok(())
    }

    pub(crate) fn check_block(&self, offset: usize, len: usize) -> Result<()> {
        let (first, last) = (self.range.start + offset, self.range.start + offset + len.saturating_sub(1));
        match self.iov.block_bytes {
            0 => Ok(()),
            block if first / block == last / block => Ok(()),
            block => Err(Error::Invalid(format!(
                "a transfer of {len} bytes would straddle two of the buffer's blocks of {block} bytes"
            ))),
        }
    }
}
