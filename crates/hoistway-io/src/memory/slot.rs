//! Staging slots: the bounded memory through which bytes pass that cannot be read in place.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
use super::PinnedView;
use super::{
    Mapping, PageKind, off_node,
    staging::{self, Staging, release_idle_staging},
};
#[cfg(target_os = "linux")]
use crate::ByteRange;
use crate::{
    Error, Result,
    sync::{Condvar, Mutex, MutexGuard},
    sys,
};
use hoistway_device::{
    Address, CopyStream, Device, DirectBuffer, ExternalMemory, ExternalSignal, HostCopy, Pinned,
};
use std::{
    any::Any,
    fmt, mem,
    ptr::NonNull,
    slice,
    sync::{
        Arc, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// A fixed number of slots of equal size. A slot is free, or a [`Slot`] owns it.
#[derive(Debug)]
pub struct Slots {
    shared: Arc<SlotsInner>,
}

/// The memory of slots.
#[derive(Clone, Copy, Debug)]
pub enum SlotKind<'a> {
    /// Host memory.
    Host,
    /// Host memory on a NUMA node, or where the system has some.
    HostOn(u32),
    /// Host memory that is pinned for a device as slots are first used, many slots by one call, and kept for later slots. On the
    /// node that is given.
    Pinned(&'a Arc<Device>, Option<u32>),
    /// Pages of a file, pinned where they lie, once a slot [shows](Slot::show) some. Slots have no other memory.
    #[cfg(target_os = "linux")]
    Views,
    /// Memory of a device that its library reads files into, of at least as many bytes as all slots.
    Device(&'a Arc<DirectBuffer>),
    /// Memory of a device that another interface to it fills, of at least as many bytes as all slots.
    External(&'a Arc<ExternalMemory>),
    /// Host memory that another process writes to. Pinned as they are first used, if a device copies from them.
    Shared {
        /// The memory: as many slots as are made, of the same length.
        memory: &'a Arc<dyn SharedMemory>,
        /// The device.
        device: Option<&'a Arc<Device>>,
    },
}

/// Bytes of a device, and where they belong in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePart {
    /// Where they begin in the slot.
    pub offset: usize,
    /// Where they begin in the memory of the device.
    pub address: u64,
    /// Length in bytes.
    pub len: usize,
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

    /// What a report says if it is not on the NUMA node that was asked for.
    fn off_node(&self) -> Option<String> {
        None
    }

    /// Copies bytes of a slot out, from `offset` on. `false` if they are not in it, or it is lent.
    fn copy_to(&self, slot: usize, offset: usize, bytes: &mut [u8]) -> bool;

    /// Overwrites bytes of a slot, from `offset` on. `false` if they are not in it, or it is lent.
    fn copy_from(&self, slot: usize, offset: usize, bytes: &[u8]) -> bool;

    /// Whether a slot is lent to the other process and has not come back.
    fn is_lent(&self, slot: usize) -> bool;
}

/// Whether a slot that should be pinned can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pinning {
    /// It is pinned, or the platform pins no memory.
    Ready,
    /// The system lets no more memory be pinned. Other slots are pinned; [withdraw](Slot::withdraw) this one.
    Short,
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
    /// Why slots are not pinned that should be.
    unpinned: OnceLock<String>,
}

#[derive(Debug)]
enum SlotMemory {
    Host {
        pins: Box<[OnceLock<Pinned>]>,
        device: Option<Arc<Device>>,
        backing: Arc<Backing>,
        /// What a report says if it is not on the NUMA node that was asked for.
        off_node: Option<String>,
        /// Why no more of them can be pinned. Held while the driver pins, which it does for one thread at a time.
        limit: Mutex<Option<String>>,
    },
    Staging(Staging),
    Device(Arc<DirectBuffer>),
    External {
        /// What tells that the bytes of each slot are there. Dropped before the memory.
        signals: Box<[Mutex<Vec<ExternalSignal>>]>,
        memory: Arc<ExternalMemory>,
    },
    /// The pages that each slot shows.
    #[cfg(target_os = "linux")]
    Views(Box<[Mutex<Option<Shown>>]>),
}

impl Drop for SlotMemory {
    fn drop(&mut self) {
        let Self::Host { pins, backing, .. } = self else { return };
        if !Pinned::unpin_all(pins.iter_mut().filter_map(OnceLock::take)) {
            // Memory that may be pinned still keeps its address, so that no other memory gets it.
            mem::forget(backing.clone());
        }
    }
}

/// Bytes of a view that a slot shows.
#[cfg(target_os = "linux")]
#[derive(Debug)]
struct Shown {
    view: Arc<PinnedView>,
    range: ByteRange,
}

/// The source of host memory.
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
    /// Threads that wait for a slot.
    waiting: usize,
    closed: bool,
}

impl Slots {
    /// `count` slots of `slot_bytes` each, block-aligned; somewhat longer if whole pages have to be pinned.
    ///
    /// # Errors
    /// [`Error::Allocation`]; [`Error::Internal`] if shared memory is too short.
    pub fn new(count: usize, slot_bytes: usize, kind: SlotKind<'_>) -> Result<Self> {
        let slot_bytes = match kind {
            // Whole pages are pinned, which may be longer than blocks.
            SlotKind::Pinned(..) => slot_bytes.next_multiple_of(sys::pages::page_size()),
            _ => slot_bytes,
        };
        let bytes = count.saturating_mul(slot_bytes);
        let too_short = |memory| Error::Internal(format!("{memory} is too short for its slots"));
        let host = |(backing, off_node), device: Option<&Arc<Device>>| SlotMemory::Host {
            pins: (0..if device.is_some() { count } else { 0 }).map(|_| OnceLock::new()).collect(),
            device: device.cloned(),
            backing: Arc::new(backing),
            off_node,
            limit: Mutex::default(),
        };
        let memory = match kind {
            SlotKind::Host => host(Self::own_memory(bytes, None)?, None),
            SlotKind::HostOn(node) => host(Self::own_memory(bytes, Some(node))?, None),
            SlotKind::Pinned(device, node) => {
                SlotMemory::Staging(Staging::new(device, node, count, slot_bytes)?)
            }
            SlotKind::Shared { memory, .. } if memory.len() < bytes => {
                return Err(too_short("shared memory"));
            }
            SlotKind::Shared { memory, device } => {
                host((Backing::Shared(memory.clone()), memory.off_node()), device)
            }
            SlotKind::Device(buffer) if buffer.len() < bytes as u64 => {
                return Err(too_short("a buffer of a device"));
            }
            SlotKind::Device(buffer) => SlotMemory::Device(buffer.clone()),
            SlotKind::External(memory) if memory.len() < bytes as u64 => {
                return Err(too_short("a buffer of another interface"));
            }
            SlotKind::External(memory) => SlotMemory::External {
                signals: (0..count).map(|_| Mutex::default()).collect(),
                memory: memory.clone(),
            },
            #[cfg(target_os = "linux")]
            SlotKind::Views => SlotMemory::Views((0..count).map(|_| Mutex::default()).collect()),
        };
        let free = Mutex::new(Free { slots: (0..count).rev().collect(), lost: 0, waiting: 0, closed: false });
        let (returned, waited) = (Condvar::new(), AtomicU64::new(0));
        let unpinned = OnceLock::new();
        let inner = SlotsInner { memory, slot_bytes, count, free, returned, waited, unpinned };
        Ok(Self { shared: Arc::new(inner) })
    }

    /// Memory, and why it is not on the node.
    fn own_memory(bytes: usize, node: Option<u32>) -> Result<(Backing, Option<String>)> {
        let (mut mapping, refusal) = Mapping::anonymous_near(bytes, PageKind::TransparentHuge, node)
            .map_err(|source| Error::Allocation { bytes: bytes as u64, kind: "staging memory", source })?;
        // A child of fork has no use for them, and a page that a read is filling must not become a copy.
        mapping.hide_from_children();
        let off_node = node.zip(refusal).map(|(node, error)| off_node("staging memory", node, &error));
        Ok((Backing::Own(mapping), off_node))
    }

    /// Drops free slots for good, as many as there are up to `count`.
    pub fn withdraw(&self, count: usize) {
        (0..count).map_while(|_| self.try_take()).for_each(Slot::withdraw);
    }

    /// Takes a free slot, if there is one now.
    pub fn try_take(&self) -> Option<Slot> {
        let index = self.shared.free().slots.pop()?;
        Some(Slot::new(&self.shared, index))
    }

    /// Waits for a free slot and takes it. The caller must not hold slots itself. `None` once [`Slots::close`] was called.
    pub fn take(&self) -> Option<Slot> {
        self.take_of(1)
    }

    /// Waits until so many slots are free, and takes one of them. Otherwise as [`Slots::take`].
    pub fn take_of(&self, count: usize) -> Option<Slot> {
        let mut waiting: Option<Instant> = None;
        let mut free = self.shared.free();
        loop {
            if free.closed {
                return None;
            }
            if free.slots.len() >= count
                && let Some(index) = free.slots.pop()
            {
                if let Some(since) = waiting {
                    let nanoseconds = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    self.shared.waited.fetch_add(nanoseconds, Ordering::Relaxed);
                }
                return Some(Slot::new(&self.shared, index));
            }
            waiting.get_or_insert_with(Instant::now);
            free.waiting += 1;
            free = self.shared.returned.wait(free).unwrap_or_else(PoisonError::into_inner);
            free.waiting -= 1;
        }
    }

    /// Pins unused slots one after the other, until `count` are pinned or `is_over`. Threads that call this at once share the work.
    /// Best effort: [`Slot::pin`] reports why one cannot be pinned.
    pub fn pin_ahead(&self, count: usize, is_over: impl Fn() -> bool) {
        if let SlotMemory::Staging(staging) = &self.shared.memory {
            let mut slots = 0..count.min(self.shared.count);
            let _ = slots.find(|&slot| is_over() || !matches!(staging.pin(slot), Ok(Pinning::Ready)));
            return;
        }
        let SlotMemory::Host { pins, device: Some(_), .. } = &self.shared.memory else { return };
        while !is_over() && pins.iter().filter(|pin| pin.get().is_some()).count() < count {
            let slot = {
                let mut free = self.shared.free();
                let unused = free.slots.iter().rposition(|&index| pins[index].get().is_none());
                let Some(index) = unused.filter(|_| !free.closed).map(|position| free.slots.remove(position))
                else {
                    return;
                };
                Slot::new(&self.shared, index)
            };
            if !matches!(slot.pin(), Ok(Pinning::Ready)) {
                return;
            }
        }
    }

    /// How much of them is pinned, if the system has refused to pin as much as was asked for.
    pub fn pinned_short(&self) -> Option<String> {
        match &self.shared.memory {
            SlotMemory::Staging(staging) => staging.shortage(),
            SlotMemory::Host { pins, limit, .. } => {
                let why = limit.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
                let slots = pins.iter().filter(|pin| pin.get().is_some()).count();
                Some(staging::shortage_of(slots * self.shared.slot_bytes, Some(&why)))
            }
            _ => None,
        }
    }

    /// Why some of them are not on the NUMA node that was asked for.
    pub fn off_node(&self) -> Option<String> {
        match &self.shared.memory {
            SlotMemory::Staging(staging) => staging.off_node(),
            SlotMemory::Host { off_node, .. } => off_node.clone(),
            _ => None,
        }
    }

    /// Ends all waits for slots.
    pub fn close(&self) {
        self.shared.free().closed = true;
        self.shared.returned.notify_all();
    }

    /// Returns whether all slots were lost: another process may still write to them. That is nothing of a device's, whose copies
    /// keep their slots until their [fate](hoistway_device::Fate) is known.
    pub fn is_exhausted(&self) -> bool {
        self.shared.free().lost == self.shared.count
    }

    /// Why slots are used that are not pinned and should be: the platform pins no memory, or too little.
    pub fn why_unpinned(&self) -> Option<&str> {
        self.shared.unpinned.get().map(String::as_str)
    }

    /// Returns whether any slot is pinned.
    pub fn has_pinned(&self) -> bool {
        match &self.shared.memory {
            SlotMemory::Host { pins, .. } => pins.iter().any(|pin| pin.get().is_some()),
            SlotMemory::Staging(staging) => (0..self.shared.count).any(|slot| staging.pinned(slot).is_some()),
            _ => false,
        }
    }

    /// Returns whether all slots are pinned that should be.
    pub fn are_pinned(&self) -> bool {
        match &self.shared.memory {
            SlotMemory::Host { pins, .. } => pins.iter().all(|pin| pin.get().is_some()),
            SlotMemory::Staging(staging) => (0..self.shared.count).all(|slot| staging.pinned(slot).is_some()),
            _ => true,
        }
    }

    /// Returns the memory of all slots, if it is the host's and in one piece, for a device to pin.
    pub fn host_memory(&self) -> Option<(NonNull<u8>, usize)> {
        match &self.shared.memory {
            SlotMemory::Host { backing, .. } => Some((backing.pointer(0), backing.len())),
            _ => None,
        }
    }

    /// Returns the bytes of all slots, if they are host memory.
    pub fn host_bytes(&self) -> u64 {
        match &self.shared.memory {
            SlotMemory::Host { backing, .. } => backing.len() as u64,
            SlotMemory::Staging(_) => (self.shared.count * self.shared.slot_bytes) as u64,
            _ => 0,
        }
    }

    /// Returns the bytes of all slots, if they are memory of a device.
    pub fn device_bytes(&self) -> u64 {
        match &self.shared.memory {
            SlotMemory::Device(buffer) => buffer.len(),
            SlotMemory::External { memory, .. } => memory.len(),
            _ => 0,
        }
    }

    /// Returns the number of slots.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// Returns how long threads have waited for slots.
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

/// A slot, which returns to its [`Slots`] when it is dropped.
#[derive(Debug)]
pub struct Slot {
    shared: Arc<SlotsInner>,
    index: usize,
    /// Whether it does not return.
    is_withdrawn: bool,
}

impl Slot {
    fn new(shared: &Arc<SlotsInner>, index: usize) -> Self {
        Self { shared: shared.clone(), index, is_withdrawn: false }
    }

    /// Drops the slot for good: nothing uses it again.
    pub fn withdraw(mut self) {
        self.is_withdrawn = true;
    }

    /// Returns the slot's bytes, if the host can reach them and no other process can; else none. They hold what the slot's
    /// last owner left.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.shared.slot_bytes;
        let start = match &self.shared.memory {
            SlotMemory::Host { backing, .. } => match &**backing {
                Backing::Own(mapping) => mapping.pointer(self.index * len),
                Backing::Shared(_) => return &mut [],
            },
            SlotMemory::Staging(staging) => staging.pointer(self.index),
            _ => return &mut [],
        };
        // SAFETY: each index is in the free list or in one `Slot`, so no other reference to these bytes exists;
        // the mapping is held by the slot and initialised by the kernel.
        unsafe { slice::from_raw_parts_mut(start.as_ptr(), len) }
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
        let SlotMemory::Host { backing, .. } = &self.shared.memory else { return None };
        match &**backing {
            Backing::Own(_) => None,
            Backing::Shared(memory) => Some(memory),
        }
    }

    /// The memory that it shares with another process, if that is memory of type `M`.
    pub fn shared_memory<M: SharedMemory>(&self) -> Option<&M> {
        let memory: &dyn Any = &**self.shared_backing()?;
        memory.downcast_ref()
    }

    /// Returns where its bytes are, for copies to a device.
    pub fn source(&self) -> Address {
        let start = self.index * self.shared.slot_bytes;
        match &self.shared.memory {
            SlotMemory::Host { backing, .. } => Address::Host(backing.pointer(start).as_ptr()),
            SlotMemory::Staging(staging) => Address::Host(staging.pointer(self.index).as_ptr()),
            SlotMemory::Device(buffer) => Address::Device(buffer.address() + start as u64),
            SlotMemory::External { memory, .. } => Address::Device(memory.address() + start as u64),
            // One that shows nothing is not copied from.
            #[cfg(target_os = "linux")]
            SlotMemory::Views(_) => Address::Host(self.shown().unwrap_or(std::ptr::null_mut())),
        }
    }

    /// The start of the bytes that it shows, if any.
    #[cfg(target_os = "linux")]
    fn shown(&self) -> Option<*mut u8> {
        let SlotMemory::Views(places) = &self.shared.memory else { return None };
        let shown = places[self.index].lock().unwrap_or_else(PoisonError::into_inner);
        shown.as_ref().and_then(|shown| shown.view.address(shown.range))
    }

    /// Has it show bytes of a view, until it is free again.
    ///
    /// # Errors
    /// [`Error::Internal`] if the slot has memory, or the bytes are not in the view.
    #[cfg(target_os = "linux")]
    pub fn show(&mut self, view: &Arc<PinnedView>, range: ByteRange) -> Result<()> {
        let SlotMemory::Views(places) = &self.shared.memory else {
            return Err(Error::Internal("a slot with memory of its own was to show other memory".into()));
        };
        if view.address(range).is_none() || range.len() > self.shared.slot_bytes as u64 {
            return Err(Error::Internal(format!("bytes {range} are not in a view of a file")));
        }
        let shown = Shown { view: view.clone(), range };
        *places[self.index].lock().unwrap_or_else(PoisonError::into_inner) = Some(shown);
        Ok(())
    }

    /// Whether its bytes are those of a file itself, which may change until they are copied.
    pub fn is_view(&self) -> bool {
        #[cfg(target_os = "linux")]
        return matches!(self.shared.memory, SlotMemory::Views(_));
        #[cfg(not(target_os = "linux"))]
        false
    }

    /// Returns its number among the slots.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns whether its memory is shared with another process.
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
            SlotMemory::Device(buffer) => Some((buffer, (self.index * self.shared.slot_bytes) as u64)),
            _ => None,
        }
    }

    /// The memory of another interface that it is a part of, and where it begins there.
    pub fn external_memory(&self) -> Option<(&ExternalMemory, u64)> {
        match &self.shared.memory {
            SlotMemory::External { memory, .. } => {
                Some((memory, (self.index * self.shared.slot_bytes) as u64))
            }
            _ => None,
        }
    }

    /// Notes what tells that bytes are there which the other interface has filled, until the slot is free again.
    pub fn add_signal(&self, signal: ExternalSignal) {
        if let Some(mut signals) = self.signals() {
            signals.push(signal);
        }
    }

    /// Makes later copies of `copies` wait until its bytes are there.
    ///
    /// # Errors
    /// The device's; [`Internal`](hoistway_device::Error::Internal) if another interface fills it, and nothing tells when.
    pub fn order(&self, copies: &CopyStream) -> hoistway_device::Result<()> {
        let Some(signals) = self.signals() else { return Ok(()) };
        if signals.is_empty() {
            let text = "nothing tells when the bytes of a slot are there";
            return Err(hoistway_device::Error::Internal(text.into()));
        }
        signals.iter().try_for_each(|signal| signal.order(copies))
    }

    fn signals(&self) -> Option<MutexGuard<'_, Vec<ExternalSignal>>> {
        match &self.shared.memory {
            SlotMemory::External { signals, .. } => {
                Some(signals[self.index].lock().unwrap_or_else(PoisonError::into_inner))
            }
            _ => None,
        }
    }

    /// Fills parts of the slot with bytes of a device, and waits for them. If copies may still be going on after an error, the slot is
    /// set aside.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn read_from(mut self, copies: &CopyStream, parts: &[DevicePart]) -> Result<Self> {
        self.pin_if_possible()?;
        let is_pinned = self.is_pinned_for(copies.device());
        let bytes = self.as_mut_slice();
        let outside = || Error::Internal("a part of a slot does not fit it".into());
        let fits =
            |part: &DevicePart| part.offset.checked_add(part.len).is_some_and(|end| end <= bytes.len());
        if !parts.iter().all(fits) {
            return Err(outside());
        }
        if is_pinned {
            let start = bytes.as_mut_ptr().expose_provenance();
            let copy = |part: &DevicePart| HostCopy {
                host: start + part.offset,
                device: part.address,
                len: part.len,
            };
            let all: Vec<HostCopy> = parts.iter().map(copy).collect();
            // SAFETY: the slot has these bytes alone, which stay where they are; they are pinned.
            return Ok(unsafe { copies.fill(self, &all)? });
        }
        let (mut rest, mut start, mut pieces) = (bytes, 0, Vec::new());
        for part in parts {
            let skipped = part.offset.checked_sub(start).ok_or_else(outside)?;
            let (piece, after) = rest.split_at_mut(skipped).1.split_at_mut(part.len);
            pieces.push((part.address, piece));
            (rest, start) = (after, part.offset + part.len);
        }
        copies.read_back_all(pieces)?;
        Ok(self)
    }

    /// Whether this device, as all of its kind, reaches the slot without the driver's help.
    fn is_pinned_for(&self, device: &Device) -> bool {
        let pin = match &self.shared.memory {
            SlotMemory::Host { pins, .. } => pins.get(self.index).and_then(|pin| pin.get()),
            SlotMemory::Staging(staging) => staging.pinned(self.index),
            _ => None,
        };
        pin.is_some_and(|pin| mem::discriminant(&pin.device().id()) == mem::discriminant(&device.id()))
    }

    /// Pins the slot if the system lets it. If too little memory may be pinned, the slot is used as it is, and
    /// [`Slots::why_unpinned`] tells.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn pin_if_possible(&self) -> Result<()> {
        let unpinned = &self.shared.unpinned;
        match self.pin() {
            Ok(Pinning::Ready) => {}
            Ok(Pinning::Short) => {
                let shortage = Slots { shared: self.shared.clone() }.pinned_short();
                unpinned.get_or_init(|| shortage.unwrap_or_default());
            }
            Err(Error::Device(error @ hoistway_device::Error::Allocation { .. })) => {
                unpinned.get_or_init(|| error.to_string());
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Pins the slot, if its kind is pinned and it is not. Where the platform pins no memory, it stays as it is.
    ///
    /// # Errors
    /// [`Error::Device`], also if the system lets not even one slot be pinned.
    pub fn pin(&self) -> Result<Pinning> {
        let SlotsInner { memory, slot_bytes, unpinned, .. } = &*self.shared;
        let pinned = match memory {
            SlotMemory::Staging(staging) if unpinned.get().is_none() => staging.pin(self.index),
            SlotMemory::Host { pins, device: Some(device), backing, limit, .. }
                if pins[self.index].get().is_none() =>
            {
                let start = backing.pointer(self.index * slot_bytes).as_ptr();
                // SAFETY: it is unmapped after it was unpinned.
                let pin = || unsafe { Pinned::new(device, start, *slot_bytes) };
                // Only the slot's owner gets here: no other thread has pinned it in the meantime.
                pin_one(pins, limit, pin).map(|pinned| match pinned {
                    None => Pinning::Short,
                    Some(pinned) => {
                        let _ = pins[self.index].set(pinned);
                        Pinning::Ready
                    }
                })
            }
            _ => Ok(Pinning::Ready),
        };
        match pinned {
            // The driver then copies through its memory.
            Err(error) if error.is_unsupported() => {
                let _ = unpinned.set(error.to_string());
                Ok(Pinning::Ready)
            }
            pinned => Ok(pinned?),
        }
    }
}

/// What `pin` gives; `None` if the system lets no more be pinned, and some of `pins` is.
fn pin_one(
    pins: &[OnceLock<Pinned>],
    limit: &Mutex<Option<String>>,
    pin: impl Fn() -> hoistway_device::Result<Pinned>,
) -> hoistway_device::Result<Option<Pinned>> {
    let mut limit = limit.lock().unwrap_or_else(PoisonError::into_inner);
    let has_pinned = || pins.iter().any(|pin| pin.get().is_some());
    if limit.is_some() && has_pinned() {
        return Ok(None);
    }
    let mut pinned = pin();
    // What is kept for later loads counts too.
    if pinned.as_ref().is_err_and(staging::is_shortage) && release_idle_staging() {
        pinned = pin();
    }
    match pinned {
        Err(error) if staging::is_shortage(&error) && has_pinned() => {
            *limit = Some(error.to_string());
            Ok(None)
        }
        pinned => pinned.map(Some),
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Memory that another process may still write to is never used again.
        if self.is_withdrawn || self.shared_backing().is_some_and(|memory| memory.is_lent(self.index)) {
            return self.shared.lose_one();
        }
        #[cfg(target_os = "linux")]
        if let SlotMemory::Views(places) = &self.shared.memory {
            let shown = places[self.index].lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(shown);
        }
        // What copies wait for is kept until they are over.
        if let Some(mut signals) = self.signals() {
            signals.clear();
        }
        let mut free = self.shared.free();
        free.slots.push(self.index);
        let is_awaited = free.waiting > 0;
        drop(free);
        // To notify is a system call even if no thread waits.
        if is_awaited {
            self.shared.returned.notify_one();
        }
    }
}
