//! The functions of the KV store on systems without one: programs link with all of them, and each returns an error.
//!
//! The header is generated from the module `kv`; `testkit/windows/capi.sh` compares it with what the library exports. As no
//! handle ever exists, functions that end or free one do nothing.
#![allow(unsafe_code)]

use crate::status::{Failure, call, hoistway_status};
use std::{ffi::c_void, ptr};

/// A handle that does not exist, or a structure that is not looked at.
type Unused = *const c_void;

fn absent() -> Result<(), Failure> {
    let reason = "stores of KV-cache blocks are available on Linux only";
    Err(Failure::new(hoistway_status::HOISTWAY_ROUTE_UNAVAILABLE, reason))
}

/// Functions that answer with a status and give nothing.
macro_rules! refused {
    ($($name:ident($($argument:ty),*);)*) => {
        $(#[unsafe(no_mangle)]
        extern "C" fn $name($(_: $argument),*) -> hoistway_status {
            call(absent)
        })*
    };
}

/// Functions that would give a handle by their last argument.
macro_rules! makes_nothing {
    ($($name:ident($($argument:ty),*);)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C" fn $name($(_: $argument,)* place: *mut *mut c_void) -> hoistway_status {
            // SAFETY: NULL or writable, as the caller says.
            if let Some(place) = unsafe { place.as_mut() } {
                *place = ptr::null_mut();
            }
            call(absent)
        })*
    };
}

/// Functions that answer without a status.
macro_rules! answers {
    ($($name:ident() -> $type:ty = $answer:expr;)*) => {
        $(#[unsafe(no_mangle)]
        extern "C" fn $name(_: Unused) -> $type {
            $answer
        })*
    };
}

makes_nothing! {
    hoistway_kv_open(Unused);
    hoistway_kv_namespace_open(Unused, Unused);
    hoistway_kv_register(Unused, Unused);
    hoistway_kv_load(Unused, Unused, u64, i32, Unused);
    hoistway_kv_store(Unused, Unused, u64, i32, Unused);
    hoistway_kv_stats(Unused);
    hoistway_kv_metrics(Unused);
    hoistway_kv_report(Unused);
    hoistway_kv_events(Unused);
    hoistway_kv_ticket_report(Unused);
}

refused! {
    hoistway_kv_close(Unused, u64);
    hoistway_kv_flush(Unused, u64);
    hoistway_kv_drain(Unused, *mut u64, u64, *mut u64);
    hoistway_kv_lookup(Unused, Unused, u64, *mut bool);
    hoistway_kv_lookup_prefix(Unused, Unused, u64, *mut u64);
    hoistway_kv_lookup_reverse(Unused, Unused, u64, *mut u64);
    hoistway_kv_delete(Unused, Unused, u64, *mut u64);
    hoistway_kv_ticket_wait(Unused, u64);
    hoistway_kv_ticket_poll(Unused);
    hoistway_kv_ticket_outcomes(Unused, *mut c_void, u64);
    hoistway_kv_ticket_cancel(Unused);
    hoistway_kv_ticket_wait_released(Unused, u64);
}

answers! {
    hoistway_kv_free() -> () = ();
    hoistway_kv_namespace_free() -> () = ();
    hoistway_kv_region_free() -> () = ();
    hoistway_kv_ticket_free() -> () = ();
    hoistway_kv_event_fd() -> i32 = -1;
    hoistway_kv_region_is_direct() -> bool = false;
    hoistway_kv_ticket_is_released() -> bool = true;
    hoistway_kv_ticket_id() -> u64 = 0;
}
