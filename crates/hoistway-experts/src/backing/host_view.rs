//! Host memory of units: where reads go, and the bytes that leases show.
#![allow(unsafe_code)]

use super::{PartPlace, UnitRoom};
use hoistway::{DeviceId, read::Target};
use std::{
    ptr::{self, NonNull},
    slice,
};

/// Where the read of a part goes. `None` if the place has no address.
///
/// # Safety
/// The place must be of a room that was reserved and is not released before the read has ended, and nothing else may use
/// its bytes until then.
pub(crate) unsafe fn target(memory: DeviceId, place: &PartPlace) -> Option<Target> {
    if memory.is_host() {
        let start = NonNull::new(ptr::with_exposed_provenance_mut(place.target as usize))?;
        // SAFETY: the room has as many bytes as the place reads, and is initialised memory; the rest is the caller's promise.
        Some(unsafe { Target::host(start) })
    } else {
        // SAFETY: as above, of that device.
        Some(unsafe { Target::device(memory, place.target) })
    }
}

/// The bytes of a part, or `None` if they are not in host memory.
///
/// # Safety
/// The room must be of a unit whose reads have delivered all bytes, and must stay reserved for `'a`.
pub(crate) unsafe fn bytes<'a>(room: &UnitRoom, place: &PartPlace, len: u64) -> Option<&'a [u8]> {
    if !room.memory.is_host() {
        return None;
    }
    if len == 0 {
        return Some(&[]);
    }
    let start: *const u8 = ptr::with_exposed_provenance(place.address as usize);
    // SAFETY: the room has `len` initialised bytes at the place, which nothing writes while the unit is leased.
    Some(unsafe { slice::from_raw_parts(start, len as usize) })
}
