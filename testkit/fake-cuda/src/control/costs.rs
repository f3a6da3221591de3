//! What calls and copies cost on a machine that was measured, so that a run without a GPU tells which design calls and copies less.
//!
//! Times are those of an H100 (PCIe 5 x16). There is one bus for all copies between host and devices, and the driver pins for one thread
//! at a time. What the processor does by itself costs what it costs here.

use super::settings;
use crate::system::{self, now_ns};
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Nanoseconds for so many bytes at so many bytes a nanosecond, which are GB/s, and what each call takes besides.
struct Cost {
    each_ns: u64,
    gb_s: f64,
}

impl Cost {
    const fn new(each_us: u64, gb_s: f64) -> Cost {
        Cost { each_ns: each_us * 1000, gb_s }
    }

    fn of(&self, bytes: u64) -> u64 {
        self.each_ns + (bytes as f64 / self.gb_s) as u64
    }
}

/// Pinned copies: 47.7 GB/s in pieces of 1 MiB, 52.8 of 4 MiB, 54.9 of 64 MiB.
const COPY: Cost = Cost { each_ns: 2700, gb_s: 55.0 };
const PAGEABLE_COPY: Cost = Cost { each_ns: 2700, gb_s: 8.0 };
/// Memory in huge pages, or in the page cache, that was touched before.
const REGISTER: Cost = Cost::new(0, 60.0);
/// What the driver has to fault in.
const FAULT: Cost = Cost::new(0, 8.4);
const UNREGISTER: Cost = Cost::new(0, 123.0);
const HOST_ALLOCATE: Cost = Cost::new(0, 3.1);
const HOST_FREE: Cost = Cost::new(0, 13.0);
const ALLOCATE: Cost = Cost::new(100, 20_000.0);
const FREE: Cost = Cost::new(75, 1300.0);

/// A call that takes its time.
#[derive(Clone, Copy)]
pub(crate) enum Call {
    /// Pins memory from this address on.
    Register {
        address: usize,
    },
    Unregister,
    HostAllocate,
    HostFree,
    Allocate,
    Free,
}

/// When the bus is free again.
static BUS: Mutex<u64> = Mutex::new(0);
/// Held by the call that the driver works on.
static DRIVER: Mutex<()> = Mutex::new(());

/// Takes as long as a call on so many bytes does.
pub(crate) fn call(call: Call, bytes: u64) {
    if !settings().costs {
        return;
    }
    let _driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    let time = match call {
        Call::Register { address } => {
            let untouched = system::untouched_bytes(address, bytes as usize);
            REGISTER.of(bytes) + FAULT.of(untouched)
        }
        Call::Unregister => {
            // It waits for copies that are under way.
            let free = *bus();
            UNREGISTER.of(bytes) + free.saturating_sub(now_ns())
        }
        Call::HostAllocate => HOST_ALLOCATE.of(bytes),
        Call::HostFree => HOST_FREE.of(bytes),
        Call::Allocate => ALLOCATE.of(bytes),
        Call::Free => FREE.of(bytes),
    };
    sleep_until(now_ns() + time);
}

/// Takes as long as the bus does for a copy that was queued at `queued_ns`. What the thread of a stream is late by is not counted.
pub(crate) fn copy(bytes: u64, is_pinned: bool, queued_ns: u64) {
    if !settings().costs {
        return;
    }
    let end = {
        let mut free = bus();
        let cost = if is_pinned { &COPY } else { &PAGEABLE_COPY };
        *free = queued_ns.max(*free) + cost.of(bytes);
        *free
    };
    sleep_until(end);
}

fn sleep_until(end_ns: u64) {
    system::sleep(Duration::from_nanos(end_ns.saturating_sub(now_ns())));
}

fn bus() -> MutexGuard<'static, u64> {
    BUS.lock().unwrap_or_else(PoisonError::into_inner)
}
