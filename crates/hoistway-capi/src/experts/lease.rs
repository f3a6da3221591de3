//! What callers hold: experts and dense tensors that stay where they are.
#![allow(unsafe_code)]

use super::{
    describe::{self, Strings, hoistway_part, no_such_part},
    hoistway_experts,
};
use crate::{
    handle::{self, held},
    status::{Failure, call, hoistway_status},
    text,
};
use ::hoistway_experts::store::{Lease, LeasedUnit};
use std::{ffi::c_char, sync::Arc};

/// A lease: its experts or dense tensors stay at their addresses until it is freed.
pub struct hoistway_lease {
    lease: Lease,
    strings: Arc<Strings>,
}

/// Makes `count` experts of a layer resident, waits for them, and leases them. Missing experts are read in parallel.
/// An expert that is named twice is in the lease twice, and read once. Free `lease` with `hoistway_lease_free`.
///
/// On failure nothing is leased. `HOISTWAY_NOT_FOUND` if there is no such layer or expert; `HOISTWAY_REFUSED` if other
/// leases left no room within the option `timeout_ms`; `HOISTWAY_TIMED_OUT` if reads took longer than that;
/// `HOISTWAY_MEMORY` if the request needs more than all slots of a device; `HOISTWAY_TRUNCATED`, `HOISTWAY_CHANGED` or
/// `HOISTWAY_IO` if a part could not be read.
///
/// # Safety
/// `store` must be live, `experts` be `count` numbers, `lease` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_ensure(
    store: *const hoistway_experts,
    layer: u32,
    experts: *const u32,
    count: u64,
    lease: *mut *mut hoistway_lease,
) -> hoistway_status {
    let ensure = || {
        // SAFETY: live, and as many, as the caller says.
        let (store, experts) =
            unsafe { (held(store, "store of experts")?, handle::list(experts, count, "experts")?) };
        Ok(hoistway_lease { lease: store.store.ensure(layer, experts)?, strings: store.strings.clone() })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(lease, ensure) }
}

/// Makes `count` dense tensors resident, waits for them, and leases them. Fails as `hoistway_experts_ensure` does.
/// Dense tensors that are not leased are evicted by `hoistway_experts_evict_tensors`, or when no expert is left to
/// evict. Free `lease` with `hoistway_lease_free`.
///
/// # Safety
/// `store` must be live, `names` be `count` strings, `lease` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_ensure_tensors(
    store: *const hoistway_experts,
    names: *const *const c_char,
    count: u64,
    lease: *mut *mut hoistway_lease,
) -> hoistway_status {
    let ensure = || {
        // SAFETY: live and strings, as the caller says.
        let (store, names) = unsafe { (held(store, "store of experts")?, text::borrow_all(names, count)?) };
        Ok(hoistway_lease { lease: store.store.ensure_tensors(&names)?, strings: store.strings.clone() })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(lease, ensure) }
}

/// Frees a lease: its experts and dense tensors may be evicted from then on. NULL is allowed.
///
/// # Safety
/// `lease` must be NULL or come from [`hoistway_experts_ensure`] or [`hoistway_experts_ensure_tensors`], and neither
/// be in use nor have been freed. The addresses of its parts must not be used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_lease_free(lease: *mut hoistway_lease) {
    // SAFETY: as the caller says.
    unsafe { handle::free(lease) }
}

/// Returns the number of experts or dense tensors of a lease; 0 if `lease` is NULL.
///
/// # Safety
/// `lease` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_lease_count(lease: *const hoistway_lease) -> u64 {
    // SAFETY: live, as the caller says.
    unsafe { lease.as_ref() }.map_or(0, |lease| lease.lease.len() as u64)
}

/// Returns the number of parts of the expert or dense tensor at `position` of the request; 0 if there is none. A dense
/// tensor has one part.
///
/// # Safety
/// `lease` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_lease_part_count(lease: *const hoistway_lease, position: u64) -> u64 {
    // SAFETY: live, as the caller says.
    let lease = unsafe { lease.as_ref() };
    lease.and_then(|lease| lease.unit(position)).map_or(0, |unit| unit.parts().len() as u64)
}

/// Describes the part at position `index` of the expert or dense tensor at `position` of the request, with its
/// address. Parts have the order of `hoistway_experts_part`. `HOISTWAY_NOT_FOUND` if there is no such part.
///
/// # Safety
/// `lease` must be live, `part` writable for its `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_lease_part(
    lease: *const hoistway_lease,
    position: u64,
    index: u64,
    part: *mut hoistway_part,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let lease = unsafe { held(lease, "lease")? };
        let unit = lease.unit(position).ok_or_else(|| {
            let count = lease.lease.len();
            Failure::not_found(format!(
                "there is no expert or tensor at position {position}: the lease has {count}"
            ))
        })?;
        let found = usize::try_from(index).ok().and_then(|index| unit.parts().nth(index));
        let found = found.ok_or_else(|| no_such_part(unit.unit(), index))?;
        // SAFETY: writable, as the caller says.
        unsafe { describe::tell(part, lease.strings.describe_leased(found, unit.slot())) }
    })
}

impl hoistway_lease {
    fn unit(&self, position: u64) -> Option<LeasedUnit<'_>> {
        self.lease.get(usize::try_from(position).ok()?)
    }
}
