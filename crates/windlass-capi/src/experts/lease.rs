//! What callers hold: experts and dense tensors that stay where they are.
#![allow(unsafe_code)]

use super::{
    describe::{self, Strings, no_such_part, windlass_part},
    windlass_experts,
};
use crate::{
    handle::{self, held},
    status::{Failure, call, windlass_status},
    text,
};
use ::windlass_experts::store::{Lease, LeasedUnit};
use std::{ffi::c_char, sync::Arc};

/// Experts or dense tensors that are resident, and stay where they are until it is freed.
pub struct windlass_lease {
    lease: Lease,
    strings: Arc<Strings>,
}

/// Makes experts of a layer resident, waits for them, and leases them. What is missing is read at once, all experts side by
/// side. An expert that is named twice is in the lease twice, and read once.
///
/// On failure nothing is leased: `WINDLASS_NOT_FOUND` if there is no such layer or expert; `WINDLASS_REFUSED` if leases held
/// the room for as long as the option `timeout_ms` says; `WINDLASS_TIMED_OUT` if reads took longer; `WINDLASS_MEMORY` if
/// the request needs more than all slots of a device; `WINDLASS_TRUNCATED`, `WINDLASS_CHANGED` or `WINDLASS_IO` if a part
/// could not be read.
///
/// # Safety
/// `store` must be live, `experts` be `count` numbers, `lease` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlass_experts_ensure(
    store: *const windlass_experts,
    layer: u32,
    experts: *const u32,
    count: u64,
    lease: *mut *mut windlass_lease,
) -> windlass_status {
    let ensure = || {
        // SAFETY: live, and as many, as the caller says.
        let (store, experts) =
            unsafe { (held(store, "store of experts")?, handle::list(experts, count, "experts")?) };
        Ok(windlass_lease { lease: store.store.ensure(layer, experts)?, strings: store.strings.clone() })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(lease, ensure) }
}

/// Makes dense tensors resident, waits for them, and leases them. Fails as `windlass_experts_ensure` does. They are evicted by
/// `windlass_experts_evict_tensors`, or when no expert is left to evict.
///
/// # Safety
/// `store` must be live, `names` be `count` strings, `lease` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlass_experts_ensure_tensors(
    store: *const windlass_experts,
    names: *const *const c_char,
    count: u64,
    lease: *mut *mut windlass_lease,
) -> windlass_status {
    let ensure = || {
        // SAFETY: live and strings, as the caller says.
        let (store, names) = unsafe { (held(store, "store of experts")?, text::borrow_all(names, count)?) };
        Ok(windlass_lease { lease: store.store.ensure_tensors(&names)?, strings: store.strings.clone() })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(lease, ensure) }
}

/// Releases what a lease holds: it may be evicted from then on. NULL is fine.
///
/// # Safety
/// `lease` must come from [`windlass_experts_ensure`] or [`windlass_experts_ensure_tensors`], and not be in use nor have been
/// freed. Nothing that it holds may be used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlass_lease_free(lease: *mut windlass_lease) {
    // SAFETY: as the caller says.
    unsafe { handle::free(lease) }
}

/// How many experts or dense tensors a lease holds; 0 if `lease` is NULL.
///
/// # Safety
/// `lease` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlass_lease_count(lease: *const windlass_lease) -> u64 {
    // SAFETY: live, as the caller says.
    unsafe { lease.as_ref() }.map_or(0, |lease| lease.lease.len() as u64)
}

/// How many parts the expert at a position of the request has; 0 if there is none. A dense tensor is one part.
///
/// # Safety
/// `lease` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlass_lease_part_count(lease: *const windlass_lease, position: u64) -> u64 {
    // SAFETY: live, as the caller says.
    let lease = unsafe { lease.as_ref() };
    lease.and_then(|lease| lease.unit(position)).map_or(0, |unit| unit.parts().len() as u64)
}

/// Tells where a part lies: of the expert at `position` of the request, the part at `index`. Parts have the order of
/// `windlass_experts_part`.
///
/// # Safety
/// `lease` must be live, `part` writable as far as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlass_lease_part(
    lease: *const windlass_lease,
    position: u64,
    index: u64,
    part: *mut windlass_part,
) -> windlass_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let lease = unsafe { held(lease, "lease")? };
        let unit = lease.unit(position).ok_or_else(|| {
            let count = lease.lease.len();
            Failure::not_found(format!("there is no expert or tensor at {position}: the lease has {count}"))
        })?;
        let found = usize::try_from(index).ok().and_then(|index| unit.parts().nth(index));
        let found = found.ok_or_else(|| no_such_part(unit.unit(), index))?;
        // SAFETY: writable, as the caller says.
        unsafe { describe::tell(part, lease.strings.describe_leased(found, unit.slot())) }
    })
}

impl windlass_lease {
    fn unit(&self, position: u64) -> Option<LeasedUnit<'_>> {
        self.lease.get(usize::try_from(position).ok()?)
    }
}
