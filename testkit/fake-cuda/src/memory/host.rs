//! Host memory that devices may reach: registered ranges of the program's own, and ranges allocated for it.

use crate::{
    control::settings,
    execution::context::Owner,
    status::{
        Code, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY,
    },
    system,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

/// All pinned ranges by driver and start: what one driver has pinned, the other does not know, and may pin too. Streams
/// hold it for reading while they copy from or to pinned memory: so a range stays in place until the copy that is under
/// way has ended.
pub(crate) struct Pinned(BTreeMap<(Driver, usize), Range>);

/// Whose pins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Driver {
    Cuda,
    Hip,
}

struct Range {
    bytes: usize,
    origin: Origin,
    /// Whether it may be a view of a file, whose pages go from the view when the file is cut, but not from the device.
    is_view: bool,
    owner: Arc<Owner>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Registered,
    Allocated,
}

/// A pinned range, as found by an address in it.
pub(crate) struct Found {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    pub(crate) is_view: bool,
    pub(crate) owner: Arc<Owner>,
}

static PINNED: RwLock<Pinned> = RwLock::new(Pinned(BTreeMap::new()));

/// Holds all pinned ranges where they are.
pub(crate) fn pinned() -> RwLockReadGuard<'static, Pinned> {
    PINNED.read().unwrap_or_else(PoisonError::into_inner)
}

impl Pinned {
    /// The range of a driver's that holds an address.
    pub(crate) fn find(&self, driver: Driver, address: usize) -> Option<Found> {
        let ((_, start), range) = self.0.range((driver, 0)..=(driver, address)).next_back()?;
        (address - start < range.bytes).then(|| Found {
            start: *start,
            bytes: range.bytes,
            is_view: range.is_view,
            owner: Arc::clone(&range.owner),
        })
    }

    /// Whether `bytes` from `address` on are all in one range of a driver's.
    pub(crate) fn covers(&self, driver: Driver, address: usize, bytes: usize) -> bool {
        self.find(driver, address).is_some_and(|found| bytes <= found.bytes - (address - found.start))
    }

    pub(crate) fn bytes_of(&self, is_meant: impl Fn(&Owner) -> bool) -> u64 {
        self.0.values().filter(|range| is_meant(&range.owner)).map(|range| range.bytes as u64).sum()
    }
}

/// Pins memory of the program's own, for reads alone or as it is.
pub(crate) fn register(
    owner: &Arc<Owner>,
    address: usize,
    bytes: usize,
    is_read_only: bool,
) -> Result<(), Code> {
    let end =
        address.checked_add(bytes).filter(|end| address != 0 && *end != address).ok_or(INVALID_VALUE)?;
    // The driver refuses what it can't pin.
    if !system::is_mapped(address, bytes) || is_read_only && !system::is_shared_view(address, bytes) {
        return Err(INVALID_VALUE);
    }
    let mut pinned = pinned_mut();
    let driver = owner.driver();
    let overlaps = |((_, start), range): (&(Driver, usize), &Range)| start + range.bytes > address;
    if pinned.0.range((driver, 0)..(driver, end)).next_back().is_some_and(overlaps) {
        return Err(HOST_MEMORY_ALREADY_REGISTERED);
    }
    if pinned.bytes_of(|_| true) + bytes as u64 > settings().pinned_bytes {
        return Err(OUT_OF_MEMORY);
    }
    let (origin, owner) = (Origin::Registered, Arc::clone(owner));
    pinned.0.insert((driver, address), Range { bytes, origin, is_view: is_read_only, owner });
    Ok(())
}

/// Undoes `register`, once no copy uses the range. Returns its length.
pub(crate) fn unregister(driver: Driver, address: usize) -> Result<usize, Code> {
    remove(driver, address, Origin::Registered).map(|range| range.bytes).ok_or(HOST_MEMORY_NOT_REGISTERED)
}

/// Allocates pinned memory.
pub(crate) fn allocate(owner: &Arc<Owner>, bytes: usize) -> Result<usize, Code> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let address = system::allocate(bytes).map_err(|_| OUT_OF_MEMORY)?;
    let range = Range { bytes, origin: Origin::Allocated, is_view: false, owner: Arc::clone(owner) };
    pinned_mut().0.insert((owner.driver(), address), range);
    Ok(address)
}

/// Undoes `allocate` of CUDA's driver, once no copy uses the range. Returns its length.
pub(crate) fn free(address: usize) -> Result<usize, Code> {
    let range = remove(Driver::Cuda, address, Origin::Allocated).ok_or(INVALID_VALUE)?;
    unmap(address, &range);
    Ok(range.bytes)
}

/// Unpins what a context left behind, and says how many ranges that were.
pub(crate) fn release_all(owner: &Arc<Owner>) -> u64 {
    let mut pinned = pinned_mut();
    let left: Vec<_> = pinned.0.extract_if(.., |_, range| Arc::ptr_eq(&range.owner, owner)).collect();
    for ((_, address), range) in &left {
        if range.origin == Origin::Allocated {
            unmap(*address, range);
        }
    }
    left.len() as u64
}

fn remove(driver: Driver, address: usize, origin: Origin) -> Option<Range> {
    let (mut pinned, key) = (pinned_mut(), (driver, address));
    pinned.0.get(&key).filter(|range| range.origin == origin)?;
    pinned.0.remove(&key)
}

fn unmap(address: usize, range: &Range) {
    // SAFETY: the range was mapped by `allocate`, is no longer listed, and the caller that frees it promised,
    // as the driver demands, not to use it any more.
    unsafe { system::free(address, range.bytes) };
}

fn pinned_mut() -> RwLockWriteGuard<'static, Pinned> {
    PINNED.write().unwrap_or_else(PoisonError::into_inner)
}
