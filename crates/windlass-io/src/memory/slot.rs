//! Staging slots: the bounded memory through which bytes pass that cannot be read in place.
#![allow(unsafe_code)]

use super::{Mapping, PageKind};
use crate::{Error, Result, sys};
use std::{
    any::Any,
    fmt,
    ptr::NonNull,
    slice,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use windlass_device::{Address, Device, DirectBuffer, Pinned};

/// A fixed number of slots of equal size. A slot is free, or it is owned by whoever took it.
#[derive(Debug)]
pub struct Slots {
    shared: Arc<SlotsInner>,
}

/// What slots are made of.
#[derive(Clone, Copy, Debug)]
pub enum SlotKind<'a> {
    /// Host memory.
    Host,
    /// Host memory that is pinned for a device, slot by slot as they are first used: pinning takes a quarter of a
    /// millisecond a MiB, and a load that needs few slots should not wait for all. On the node that is given.
    Pinned(&'a Arc<Device>, Option<u32>),
    /// Memory of a device that cuFile reads into, of at least as many bytes as all slots.
    Device(&'a Arc<DirectBuffer>),
    /// Host memory that another process writes to. Pinned as they are first used, if a device copies from them.
    Shared {
        /// The memory: as many slots as are made, of the same length.
        memory: &'a Arc<dyn SharedMemory>,
        /// The device.
        device: Option<&'a Arc<Device>>,
    },
}

/// Host memory in slots of one length that another process writes to, so that its bytes are copied in and out.
///
/// # Safety
/// The address of an offset up to [`len`](Self::len) is valid for as long as this lives, and so are the bytes before it.
pub unsafe trait SharedMemory: Any + fmt::Debug + Send + Sync {
    /// Length in bytes of all slots.
    fn len(&self) -> usize;

    /// Whether there is no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of byte `offset`, at most [`len`](Self::len).
    fn address(&self, offset: usize) -> NonNull<u8>;

    /// Copies bytes of a slot out, from `offset` on. `false` if they are not in it, or it is lent.
    fn copy_to(&self, slot: usize, offset: usize, bytes: &mut [u8]) -> bool;

    /// Overwrites bytes of a slot, from `offset` on. `false` if they are not in it, or it is lent.
    fn copy_from(&self, slot: usize, offset: usize, bytes: &[u8]) -> bool;

    /// Whether a slot is lent to the other process and has not come back.
    fn is_lent(&self, slot: usize) -> bool;
}

#[derive(Debug)]
struct SlotsInner {
    memory: SlotMemory,
    slot_bytes: usize,
    count: usize,
    free: Mutex<Free>,
    returned: Condvar,
    /// Time that threads waited for slots, in nanoseconds.
    waited: AtomicU64,
}

#[derive(Debug)]
enum SlotMemory {
    Host {
        // Unpinned before it is unmapped: fields are dropped in this order.
        pins: Box<[OnceLock<Pinned>]>,
        device: Option<Arc<Device>>,
        backing: Backing,
    },
    Device(Arc<DirectBuffer>),
}

/// Where host memory comes from.
#[derive(Debug)]
enum Backing {
    Own(Mapping),
    Shared(Arc<dyn SharedMemory>),
}

#[derive(Debug)]
struct Free {
    slots: Vec<usize>,
    /// Slots that will not come back.
    lost: usize,
    closed: bool,
}

impl Slots {
    /// `count` slots of `slot_bytes` each, block-aligned; somewhat longer if whole pages have to be pinned.
    ///
    /// # Errors
    /// [`Error::Allocation`]; [`Error::Internal`] if shared memory is too short.
    pub fn new(count: usize, slot_bytes: usize, kind: SlotKind<'_>) -> Result<Self> {
        let slot_bytes = match kind {
            // Slots are pinned one by one, and pages may be longer than blocks.
            SlotKind::Pinned(..) => slot_bytes.next_multiple_of(sys::pages::page_size()),
            SlotKind::Host | SlotKind::Device(_) | SlotKind::Shared { .. } => slot_bytes,
        };
        let bytes = count.saturating_mul(slot_bytes);
        let memory = match kind {
            SlotKind::Shared { memory, device } => Self::shared_memory(memory, count, slot_bytes, device)?,
            SlotKind::Device(buffer) if buffer.len() < bytes as u64 => {
                return Err(Error::Internal("a buffer of a device is too short for its slots".into()));
            }
            SlotKind::Device(buffer) => SlotMemory::Device(buffer.clone()),
            SlotKind::Host => Self::host_memory(bytes, None, None)?,
            SlotKind::Pinned(device, node) => Self::host_memory(bytes, Some((device, count)), node)?,
        };
        let free = Mutex::new(Free { slots: (0..count).rev().collect(), lost: 0, closed: false });
        let (returned, waited) = (Condvar::new(), AtomicU64::new(0));
        Ok(Self { shared: Arc::new(SlotsInner { memory, slot_bytes, count, free, returned, waited }) })
    }

    fn host_memory(
        bytes: usize,
        pin: Option<(&Arc<Device>, usize)>,
        node: Option<u32>,
    ) -> Result<SlotMemory> {
        let mut mapping = Mapping::anonymous(bytes, PageKind::TransparentHuge)
            .map_err(|source| Error::Allocation { bytes: bytes as u64, kind: "staging memory", source })?;
        // A child of fork has no use for them, and a page that a read is filling must not become a copy.
        mapping.hide_from_children();
        if let Some(node) = node {
            // A refusal costs speed, no bytes.
            let _ = mapping.prefer(node);
        }
        let (device, pins) = pin.map_or((None, 0), |(device, count)| (Some(device.clone()), count));
        let backing = Backing::Own(mapping);
        Ok(SlotMemory::Host { pins: (0..pins).map(|_| OnceLock::new()).collect(), device, backing })
    }

    fn shared_memory(
        memory: &Arc<dyn SharedMemory>,
        count: usize,
        slot_bytes: usize,
        device: Option<&Arc<Device>>,
    ) -> Result<SlotMemory> {
        if memory.len() < count.saturating_mul(slot_bytes) {
            return Err(Error::Internal("shared memory is too short for its slots".into()));
        }
        let pins = if device.is_some() { count } else { 0 };
        Ok(SlotMemory::Host {
            pins: (0..pins).map(|_| OnceLock::new()).collect(),
            device: device.cloned(),
            backing: Backing::Shared(memory.clone()),
        })
    }

    /// A free slot, if there is one now.
    pub fn try_take(&self) -> Option<Slot> {
        let index = self.shared.free().slots.pop()?;
        Some(Slot { shared: self.shared.clone(), index })
    }

    /// A free slot. Waits for one; whoever waits must not hold slots itself. `None` once [`Slots::close`] was
    /// called.
    pub fn take(&self) -> Option<Slot> {
        let mut waiting: Option<Instant> = None;
        let mut free = self.shared.free();
        loop {
            if free.closed {
                return None;
            }
            if let Some(index) = free.slots.pop() {
                if let Some(since) = waiting {
                    let nanoseconds = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    self.shared.waited.fetch_add(nanoseconds, Ordering::Relaxed);
                }
                return Some(Slot { shared: self.shared.clone(), index });
            }
            waiting.get_or_insert_with(Instant::now);
            free = self.shared.returned.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Pins slots that nobody has used yet, one after the other, until `count` are or the load is over. Best effort: whoever takes a slot
    /// that cannot be pinned is told why.
    pub fn pin_ahead(&self, count: usize, is_over: impl Fn() -> bool) {
        let SlotMemory::Host { pins, device: Some(_), .. } = &self.shared.memory else { return };
        while !is_over() && pins.iter().filter(|pin| pin.get().is_some()).count() < count {
            let slot = {
                let mut free = self.shared.free();
                let unused = free.slots.iter().rposition(|&index| pins[index].get().is_none());
                let Some(index) = unused.filter(|_| !free.closed).map(|position| free.slots.remove(position))
                else {
                    return;
                };
                Slot { shared: self.shared.clone(), index }
            };
            if slot.pin().is_err() {
                return;
            }
        }
    }

    /// Nobody waits for a slot any more.
    pub fn close(&self) {
        self.shared.free().closed = true;
        self.shared.returned.notify_all();
    }

    /// A slot was forgotten, for somebody may still use its memory. With the last one, nobody may wait for slots any more.
    pub fn give_one_up(&self) {
        self.shared.lose_one();
    }

    /// Whether all slots were given up.
    pub fn is_exhausted(&self) -> bool {
        self.shared.free().lost == self.shared.count
    }

    /// Bytes of all slots, if they are host memory.
    pub fn host_bytes(&self) -> u64 {
        match &self.shared.memory {
            SlotMemory::Host { backing, .. } => backing.len() as u64,
            SlotMemory::Device(_) => 0,
        }
    }

    /// Bytes of all slots, if they are memory of a device.
    pub fn device_bytes(&self) -> u64 {
        match &self.shared.memory {
            SlotMemory::Host { .. } => 0,
            SlotMemory::Device(buffer) => buffer.len(),
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// How long threads have waited for slots.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.shared.waited.load(Ordering::Relaxed))
    }
}

impl Backing {
    fn len(&self) -> usize {
        match self {
            Self::Own(mapping) => mapping.len(),
            Self::Shared(memory) => memory.len(),
        }
    }

    /// Address of byte `offset`, which is inside.
    fn pointer(&self, offset: usize) -> NonNull<u8> {
        match self {
            Self::Own(mapping) => mapping.pointer(offset),
            Self::Shared(memory) => {
                assert!(offset <= memory.len(), "offset {offset} of shared memory of {} bytes", memory.len());
                memory.address(offset)
            }
        }
    }
}

impl SlotsInner {
    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lose_one(&self) {
        let mut free = self.free();
        free.lost += 1;
        free.closed |= free.lost == self.count;
        drop(free);
        self.returned.notify_all();
    }
}

/// One slot, owned. Goes back when dropped.
#[derive(Debug)]
pub struct Slot {
    shared: Arc<SlotsInner>,
    index: usize,
}

impl Slot {
    /// The slot's bytes, if the host can reach them and no other process can; else none. They hold what its last user
    /// left.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let SlotsInner {
            memory: SlotMemory::Host { backing: Backing::Own(mapping), .. }, slot_bytes, ..
        } = &*self.shared
        else {
            return &mut [];
        };
        // SAFETY: each index is in the free list or in one `Slot`, so no other reference to these bytes exists;
        // the mapping is held by the slot and initialised by the kernel.
        unsafe { slice::from_raw_parts_mut(mapping.pointer(self.index * slot_bytes).as_ptr(), *slot_bytes) }
    }

    /// Copies bytes of host memory out, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Internal`] if they are not in the slot.
    pub fn copy_to(&mut self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len();
        let is_copied = match self.shared_backing() {
            Some(memory) => memory.copy_to(self.index, offset, bytes),
            None => {
                let end = offset.checked_add(len);
                let source = end.and_then(|end| self.as_mut_slice().get(offset..end));
                source.map(|source| bytes.copy_from_slice(source)).is_some()
            }
        };
        self.check_inside(is_copied, offset, len)
    }

    /// Overwrites bytes of memory that is shared, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Internal`] if they are not in the slot, or it is not shared.
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        let is_copied =
            self.shared_backing().is_some_and(|memory| memory.copy_from(self.index, offset, bytes));
        self.check_inside(is_copied, offset, bytes.len())
    }

    fn check_inside(&self, is_copied: bool, offset: usize, len: usize) -> Result<()> {
        let outside = || Error::Internal(format!("{len} bytes at {offset} are not in a slot"));
        is_copied.then_some(()).ok_or_else(outside)
    }

    fn shared_backing(&self) -> Option<&Arc<dyn SharedMemory>> {
        match &self.shared.memory {
            SlotMemory::Host { backing: Backing::Shared(memory), .. } => Some(memory),
            SlotMemory::Host { .. } | SlotMemory::Device(_) => None,
        }
    }

    /// The memory that it shares with another process, if that is memory of type `M`.
    pub fn shared_memory<M: SharedMemory>(&self) -> Option<&M> {
        let memory: &dyn Any = &**self.shared_backing()?;
        memory.downcast_ref()
    }

    /// Where its bytes are, for copies to a device.
    pub fn source(&self) -> Address {
        let start = self.index * self.shared.slot_bytes;
        match &self.shared.memory {
            SlotMemory::Host { backing, .. } => Address::Host(backing.pointer(start).as_ptr()),
            SlotMemory::Device(buffer) => Address::Device(buffer.address() + start as u64),
        }
    }

    /// Its number among the slots.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether its memory is shared with another process.
    pub fn is_shared(&self) -> bool {
        self.shared_backing().is_some()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.shared.slot_bytes
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of its first byte, if that is memory of a device.
    pub fn device_address(&self) -> Option<u64> {
        match self.source() {
            Address::Host(_) => None,
            Address::Device(address) => Some(address),
        }
    }

    /// The buffer of a device that it is a part of, and where it begins there.
    pub fn direct_buffer(&self) -> Option<(&DirectBuffer, u64)> {
        match &self.shared.memory {
            SlotMemory::Host { .. } => None,
            SlotMemory::Device(buffer) => Some((buffer, (self.index * self.shared.slot_bytes) as u64)),
        }
    }

    /// Pins the slot, if its kind is pinned and this is its first use.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn pin(&self) -> Result<()> {
        let SlotsInner {
            memory: SlotMemory::Host { pins, device: Some(device), backing }, slot_bytes, ..
        } = &*self.shared
        else {
            return Ok(());
        };
        if pins[self.index].get().is_none() {
            let start = backing.pointer(self.index * slot_bytes).as_ptr();
            // SAFETY: the memory is unmapped after the pins are dropped.
            let pinned = unsafe { Pinned::new(device, start, *slot_bytes)? };
            // Only the slot's owner gets here, so nobody else has pinned it meanwhile.
            let _ = pins[self.index].set(pinned);
        }
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // What another process may still write to is never used again.
        if self.shared_backing().is_some_and(|memory| memory.is_lent(self.index)) {
            return self.shared.lose_one();
        }
        self.shared.free().slots.push(self.index);
        self.shared.returned.notify_one();
    }
}
