//! What a store is told, and what it tells: visits, hints, the budget, residency, statistics.
#![allow(unsafe_code)]

use super::hoistway_experts;
use crate::{
    handle::{self, check_place, held},
    read::timeout,
    status::{Failure, call, hoistway_status},
    text,
};
use ::hoistway_experts::{ExpertId, catalog::UnitId, store::Change};
use std::{
    ffi::{c_char, c_void},
    ptr,
    time::Instant,
};

/// Tells the eviction policy which `count` experts the router of a layer chose, with their weights. `weights` may be
/// NULL: all weigh the same. Call it at each visit of the layer, before `hoistway_experts_ensure`. For several tokens,
/// list the experts of the first token, then those of the next, and so on; list an expert as often as it was chosen.
///
/// From the first call for a layer on, requests for that layer no longer inform the policy. For a layer that is never
/// observed, each request counts as a visit.
///
/// # Safety
/// `store` must be live, `experts` be `count` numbers, `weights` NULL or `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_observe(
    store: *const hoistway_experts,
    layer: u32,
    experts: *const u32,
    weights: *const f32,
    count: u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let store = unsafe { held(store, "store of experts")? };
        // SAFETY: as many, as the caller says.
        let experts = unsafe { handle::list(experts, count, "experts")? };
        let weights = if weights.is_null() {
            None
        } else {
            // SAFETY: as many, as the caller says.
            Some(unsafe { handle::list(weights, count, "weights")? })
        };
        let equal = 1.0 / experts.len().max(1) as f32;
        let weight = |place: usize| weights.and_then(|weights| weights.get(place)).copied().unwrap_or(equal);
        let chosen = experts.iter().enumerate().map(|(place, expert)| (*expert, weight(place)));
        Ok(store.store.observe(layer, &chosen.collect::<Vec<_>>())?)
    })
}

/// Starts to read experts that will probably be requested. This is a hint: reads begin only while no request waits for
/// a read, and take at most a quarter of the budget. A read that has not begun is dropped when a request has to read,
/// or when its turn comes later than `deadline_ms` milliseconds after the call. `UINT64_MAX` sets no deadline.
///
/// # Safety
/// `store` must be live, `experts` be `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_prefetch(
    store: *const hoistway_experts,
    layer: u32,
    experts: *const u32,
    count: u64,
    deadline_ms: u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, and as many, as the caller says.
        let (store, experts) =
            unsafe { (held(store, "store of experts")?, handle::list(experts, count, "experts")?) };
        let deadline = Instant::now().checked_add(timeout(deadline_ms));
        Ok(store.store.prefetch(layer, experts, deadline)?)
    })
}

/// Drops the prefetches of all layers below `layer` that have not begun. This includes prefetches of the first layers
/// for the next token: call this function before you start those.
///
/// # Safety
/// `store` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_cancel_before(
    store: *const hoistway_experts,
    layer: u32,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        unsafe { held(store, "store of experts")? }.store.cancel_before(layer);
        Ok(())
    })
}

/// Sets the budget in bytes, and evicts what exceeds it and is not leased. `HOISTWAY_MEMORY` if the budget does not
/// hold the largest expert.
///
/// # Safety
/// `store` must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_set_budget(
    store: *const hoistway_experts,
    budget_bytes: u64,
) -> hoistway_status {
    // SAFETY: live, as the caller says.
    call(|| Ok(unsafe { held(store, "store of experts")? }.store.set_budget(budget_bytes)?))
}

/// Sets `resident` to whether an expert is in memory.
///
/// # Safety
/// `store` must be live, `resident` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_is_resident(
    store: *const hoistway_experts,
    layer: u32,
    expert: u32,
    resident: *mut bool,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let store = unsafe { held(store, "store of experts")? };
        let answer = store.store.is_resident(ExpertId { layer, expert })?;
        // SAFETY: writable, as the caller says.
        unsafe { handle::tell(resident, answer, "answer") }
    })
}

/// Sets `resident` to whether the dense tensor called `name` is in memory.
///
/// # Safety
/// `store` must be live, `name` a string, `resident` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_is_tensor_resident(
    store: *const hoistway_experts,
    name: *const c_char,
    resident: *mut bool,
) -> hoistway_status {
    call(|| {
        // SAFETY: live and a string, as the caller says.
        let (store, name) = unsafe { (held(store, "store of experts")?, text::required(name, "name")?) };
        let answer = store.store.is_tensor_resident(name)?;
        // SAFETY: writable, as the caller says.
        unsafe { handle::tell(resident, answer, "answer") }
    })
}

/// Evicts those of the named experts of a layer that are resident and not leased. Sets `evicted` to their number; it
/// may be NULL.
///
/// # Safety
/// `store` must be live, `experts` be `count` numbers, `evicted` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_evict(
    store: *const hoistway_experts,
    layer: u32,
    experts: *const u32,
    count: u64,
    evicted: *mut u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, and as many, as the caller says.
        let (store, experts) =
            unsafe { (held(store, "store of experts")?, handle::list(experts, count, "experts")?) };
        let count = store.store.evict(layer, experts)?;
        // SAFETY: NULL or writable, as the caller says.
        unsafe { handle::tell_if_asked(evicted, count as u64) };
        Ok(())
    })
}

/// Evicts those of the named dense tensors that are resident and not leased. Sets `evicted` to their number; it may be
/// NULL.
///
/// # Safety
/// `store` must be live, `names` be `count` strings, `evicted` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_evict_tensors(
    store: *const hoistway_experts,
    names: *const *const c_char,
    count: u64,
    evicted: *mut u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live and strings, as the caller says.
        let (store, names) = unsafe { (held(store, "store of experts")?, text::borrow_all(names, count)?) };
        let count = store.store.evict_tensors(&names)?;
        // SAFETY: NULL or writable, as the caller says.
        unsafe { handle::tell_if_asked(evicted, count as u64) };
        Ok(())
    })
}

/// Sets `address` to the start of a tensor in the address space of the backings "host_sparse" (all tensors) and "device_sparse"
/// (stacked tensors). In a stacked tensor, expert `e` begins `e` slices later. Only slices of leased experts may be read. The
/// address space is the library's, and is valid as long as the store and its leases. `HOISTWAY_NOT_FOUND` for other backings and
/// tensors, for a tensor without bytes, and if there is no such tensor.
///
/// # Safety
/// `store` must be live, `name` a string, `address` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_tensor_address(
    store: *const hoistway_experts,
    name: *const c_char,
    address: *mut *mut c_void,
) -> hoistway_status {
    call(|| {
        // SAFETY: live and a string, as the caller says.
        let (store, name) = unsafe { (held(store, "store of experts")?, text::required(name, "name")?) };
        let found = store.store.tensor_address(name).ok_or_else(|| {
            Failure::not_found(format!(
                "tensor '{name}' has no address: with the backing host_sparse tensors have one, and with device_sparse stacked tensors"
            ))
        })?;
        // SAFETY: writable, as the caller says.
        unsafe { handle::tell(address, ptr::with_exposed_provenance_mut(found as usize), "address") }
    })
}

/// Sets `json` to statistics of the store: what it has done, and what is resident. Free it with
/// `hoistway_string_free`.
///
/// # Safety
/// `store` must be live, `json` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_stats(
    store: *const hoistway_experts,
    json: *mut *mut c_char,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let stats = unsafe { held(store, "store of experts")? }.store.stats();
        let mut told = serde_json::to_value(&stats)?;
        told["stall"] = stats.stall.as_secs_f64().into();
        told["hit_rate"] = stats.hit_rate().into();
        told["faults_per_token"] = stats.faults_per_token().into();
        told["bytes_per_token"] = stats.bytes_per_token().into();
        // SAFETY: writable, as the caller says.
        unsafe { text::give(&told.to_string(), json) }
    })
}

/// Sets `json` to the residency changes since the last call: `events`, the oldest first, and `lost`, the number of
/// older changes that were dropped because the option `events` is smaller. Free it with `hoistway_string_free`.
///
/// # Safety
/// `store` must be live, `json` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_experts_events(
    store: *const hoistway_experts,
    json: *mut *mut c_char,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let store = &unsafe { held(store, "store of experts")? }.store;
        // Before events are taken: they come once.
        check_place(json, "json")?;
        let (events, lost) = store.take_events();
        let told = events.iter().map(|event| {
            let change = match event.change {
                Change::Resident => "resident",
                Change::Evicted => "evicted",
            };
            match event.unit {
                UnitId::Expert(ExpertId { layer, expert }) => {
                    serde_json::json!({ "layer": layer, "expert": expert, "change": change })
                }
                UnitId::Dense(number) => {
                    let unit = store.catalog().dense().get(number as usize);
                    let tensor = unit.and_then(|unit| unit.parts().first()).map(|part| &*part.tensor);
                    serde_json::json!({ "tensor": tensor, "change": change })
                }
                _ => serde_json::json!({ "change": change }),
            }
        });
        let told = serde_json::json!({ "events": told.collect::<Vec<_>>(), "lost": lost });
        // SAFETY: writable, as the caller says.
        unsafe { text::give(&told.to_string(), json) }
    })
}
