//! The memory of a device: what is allocated in its window, and by whom.

use super::{ranges::Ranges, window::Window};
use crate::{
    control::settings,
    execution::context::{Owner, SLOTS},
    status::{Code, ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY},
};
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
};

/// What memory holds that was never written.
pub(crate) const POISON: u8 = 0xA5;
/// The driver's promises for `cuMemAlloc` and for `cuMemAllocAsync`.
pub(crate) const PLAIN_ALIGNMENT: u64 = 512;
pub(crate) const POOL_ALIGNMENT: u64 = 256;

const PAGE: u64 = 4096;
/// Freed bytes that stay poisoned before their pages go back to the system: code that still writes or reads
/// there meets poison for a while, and a long run doesn't grow.
const QUARANTINE_MAX: u64 = 64 << 20;

/// One device's memory.
pub(crate) struct DeviceMemory {
    window: Window,
    state: Mutex<State>,
    freed: Condvar,
}

struct State {
    free: Ranges,
    /// By start address.
    live: BTreeMap<u64, Allocation>,
    used: u64,
    /// Of `used`, what is going to be freed.
    leaving: u64,
    /// Offsets in the window, oldest first.
    quarantine: VecDeque<Range<u64>>,
    quarantined: u64,
    serial: u64,
}

struct Allocation {
    bytes: u64,
    kind: Kind,
    /// The pages in the window that only this allocation uses, with those that keep its neighbours away.
    reserved: Range<u64>,
    owner: Arc<Owner>,
    leaving: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Allocated,
    /// Mapped, and perhaps not yet for use.
    Mapped {
        is_allowed: bool,
    },
}

/// A live allocation, as found by an address in it.
pub(crate) struct Found {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) owner: Arc<Owner>,
}

static DEVICES: [OnceLock<Option<DeviceMemory>>; SLOTS] = [const { OnceLock::new() }; SLOTS];

/// The memory of a device, or `None` if this machine can't provide its window.
pub(crate) fn of_device(device: usize) -> Option<&'static DeviceMemory> {
    DEVICES.get(device)?.get_or_init(DeviceMemory::new).as_ref()
}

/// The memory in whose window an address lies.
pub(crate) fn of_address(address: u64) -> Option<&'static DeviceMemory> {
    existing().find(|memory| memory.window.offset(address).is_some())
}

/// The allocation that holds an address, on any device.
pub(crate) fn find(address: u64) -> Option<Found> {
    of_address(address)?.find(address)
}

/// Frees what a context left behind, and says how much that was.
pub(crate) fn release_all(owner: &Arc<Owner>) -> u64 {
    existing().map(|memory| memory.release_all(owner)).sum()
}

/// Bytes allocated on devices, by their slots.
pub(crate) fn used_by(is_meant: impl Fn(usize) -> bool) -> u64 {
    let of = |slot: usize| DEVICES[slot].get().and_then(Option::as_ref);
    (0..SLOTS).filter(|slot| is_meant(*slot)).filter_map(of).map(DeviceMemory::used).sum()
}

fn existing() -> impl Iterator<Item = &'static DeviceMemory> {
    DEVICES.iter().filter_map(|memory| memory.get()?.as_ref())
}

impl DeviceMemory {
    fn new() -> Option<DeviceMemory> {
        let window = Window::new().ok()?;
        let state = State {
            free: Ranges::new(window.len()),
            live: BTreeMap::new(),
            used: 0,
            leaving: 0,
            quarantine: VecDeque::new(),
            quarantined: 0,
            serial: 0,
        };
        Some(DeviceMemory { window, state: Mutex::new(state), freed: Condvar::new() })
    }

    pub(crate) fn used(&self) -> u64 {
        self.state().used
    }

    /// Allocates at an address that is a multiple of `alignment` and, unless the settings ask for more, of
    /// nothing greater: so that no code comes to rely on more than the driver promises.
    pub(crate) fn allocate(&self, owner: &Arc<Owner>, bytes: u64, alignment: u64) -> Result<u64, Code> {
        let settings = settings();
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let mut state = self.with_room(bytes)?;
        state.serial += 1;
        let stagger = match settings.alignment {
            0 => alignment * (2 * (state.serial % (PAGE / alignment / 2)) + 1),
            _ => 0,
        };
        let wanted = settings.alignment.max(PAGE);
        let reserved = (stagger + bytes + wanted).next_multiple_of(PAGE) + PAGE;
        let offset = state.free.take(reserved).ok_or(OUT_OF_MEMORY)?;
        if self.window.provide(offset, reserved).is_err() {
            state.free.give(offset, reserved);
            return Err(OUT_OF_MEMORY);
        }
        let address = self.window.address(offset).next_multiple_of(wanted) + stagger;
        let allocation = Allocation {
            bytes,
            kind: Kind::Allocated,
            reserved: offset..offset + reserved,
            owner: Arc::clone(owner),
            leaving: false,
        };
        state.live.insert(address, allocation);
        state.used += bytes;
        drop(state);
        if settings.poison {
            self.poison(address, bytes);
        }
        Ok(address)
    }

    /// Waits until there is room for `bytes`, if what is about to be free makes it: the driver, too, does so before it gives up.
    fn with_room(&self, bytes: u64) -> Result<MutexGuard<'_, State>, Code> {
        let capacity = settings().memory_bytes;
        let mut state = self.state();
        while state.used.saturating_add(bytes) > capacity {
            if state.used - state.leaving + bytes.min(capacity + 1) > capacity {
                return Err(OUT_OF_MEMORY);
            }
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state)
    }

    /// Takes memory that has no address yet.
    pub(super) fn charge(&self, bytes: u64) -> Result<(), Code> {
        self.with_room(bytes)?.used += bytes;
        Ok(())
    }

    /// Gives it back.
    pub(super) fn discharge(&self, bytes: u64) {
        self.state().used -= bytes;
        self.freed.notify_all();
    }

    /// Takes addresses, a multiple of `alignment`, and returns the first, and what of the window they take.
    pub(super) fn reserve(&self, bytes: u64, alignment: u64) -> Result<(u64, Range<u64>), Code> {
        // Pages beside it keep its neighbours away.
        let len = bytes.checked_add(2 * alignment).ok_or(OUT_OF_MEMORY)?;
        let offset = self.state().free.take(len).ok_or(OUT_OF_MEMORY)?;
        Ok((self.window.address(offset).next_multiple_of(alignment), offset..offset + len))
    }

    pub(super) fn unreserve(&self, range: Range<u64>) {
        self.state().free.give(range.start, range.end - range.start);
    }

    /// Puts memory at addresses that are reserved and have none.
    pub(super) fn map(&self, owner: &Arc<Owner>, address: u64, bytes: u64) -> Result<(), Code> {
        let offset = self.window.offset(address).ok_or(INVALID_VALUE)?;
        self.window.provide(offset, bytes).map_err(|_| OUT_OF_MEMORY)?;
        let (kind, owner) = (Kind::Mapped { is_allowed: false }, Arc::clone(owner));
        let allocation = Allocation { bytes, kind, reserved: offset..offset + bytes, owner, leaving: false };
        self.state().live.insert(address, allocation);
        if settings().poison {
            self.poison(address, bytes);
        }
        Ok(())
    }

    /// Lets the device use memory that was mapped.
    pub(super) fn allow(&self, address: u64) {
        if let Some(allocation) = self.state().live.get_mut(&address) {
            allocation.kind = Kind::Mapped { is_allowed: true };
        }
    }

    /// Takes memory away from its addresses. What it held is lost, which programs must not count on.
    pub(super) fn unmap(&self, address: u64) {
        let Some(allocation) = self.state().live.remove(&address) else { return };
        let Range { start, end } = allocation.reserved;
        self.window.discard(start, end - start);
    }

    /// Says that an allocation is going to be freed: from now on no other call may.
    pub(crate) fn announce_release(&self, address: u64) -> Result<(), Code> {
        let mut state = self.state();
        let may_leave =
            |allocation: &&mut Allocation| !allocation.leaving && allocation.kind == Kind::Allocated;
        let allocation = state.live.get_mut(&address).filter(may_leave).ok_or(INVALID_VALUE)?;
        allocation.leaving = true;
        state.leaving += allocation.bytes;
        Ok(())
    }

    /// Frees an allocation whose release was announced.
    pub(crate) fn finish_release(&self, address: u64) {
        let mut state = self.state();
        // A context that is destroyed frees what is announced as well.
        let Some(allocation) = state.live.remove(&address) else { return };
        state.used -= allocation.bytes;
        if allocation.leaving {
            state.leaving -= allocation.bytes;
        }
        drop(state);
        self.freed.notify_all();
        self.retire(address, allocation);
    }

    fn release_all(&self, owner: &Arc<Owner>) -> u64 {
        // What is mapped is no context's.
        let owned = |allocation: &Allocation| {
            Arc::ptr_eq(&allocation.owner, owner) && allocation.kind == Kind::Allocated
        };
        let addresses: Vec<u64> =
            self.state().live.iter().filter(|entry| owned(entry.1)).map(|entry| *entry.0).collect();
        for address in &addresses {
            self.finish_release(*address);
        }
        addresses.len() as u64
    }

    /// The allocation that holds an address.
    pub(crate) fn find(&self, address: u64) -> Option<Found> {
        let state = self.state();
        let (start, allocation) = state.live.range(..=address).next_back()?;
        if allocation.kind == (Kind::Mapped { is_allowed: false }) {
            return None;
        }
        (address - start < allocation.bytes).then(|| Found {
            start: *start,
            bytes: allocation.bytes,
            owner: Arc::clone(&allocation.owner),
        })
    }

    /// Where the host finds `len` bytes at a device address, all in one allocation.
    pub(crate) fn shadow(&self, address: u64, len: u64) -> Result<*mut u8, Code> {
        let found = self.find(address).ok_or(ILLEGAL_ADDRESS)?;
        if len > found.bytes - (address - found.start) {
            return Err(ILLEGAL_ADDRESS);
        }
        self.window.offset(address).map(|offset| self.window.shadow(offset)).ok_or(ILLEGAL_ADDRESS)
    }

    /// Poisons what was freed, and discards it once enough was freed after it.
    fn retire(&self, address: u64, allocation: Allocation) {
        let len = allocation.reserved.end - allocation.reserved.start;
        let mut discarded = Vec::new();
        let mut state = self.state();
        if settings().poison && len <= QUARANTINE_MAX {
            self.poison(address, allocation.bytes);
            state.quarantine.push_back(allocation.reserved);
            state.quarantined += len;
            while state.quarantined > QUARANTINE_MAX
                && let Some(oldest) = state.quarantine.pop_front()
            {
                state.quarantined -= oldest.end - oldest.start;
                discarded.push(oldest);
            }
        } else {
            discarded.push(allocation.reserved);
        }
        drop(state);
        for range in discarded {
            // Before the range is free for others, whose contents this would erase.
            self.window.discard(range.start, range.end - range.start);
            self.state().free.give(range.start, range.end - range.start);
        }
    }

    /// Only for addresses that are not in use: before an allocation's is known, or after it was freed.
    fn poison(&self, address: u64, bytes: u64) {
        if let Some(offset) = self.window.offset(address) {
            // SAFETY: the shadow can be written to where it was provided, as in the whole reserved range.
            unsafe { self.window.shadow(offset).write_bytes(POISON, bytes as usize) };
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
