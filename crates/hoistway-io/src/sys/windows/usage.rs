//! CPU time and page faults of this process.
#![allow(unsafe_code)]

pub use crate::sys::common::Usage;
use std::time::Duration;
use windows_sys::Win32::{
    Foundation::FILETIME,
    System::{
        ProcessStatus::{K32GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS},
        Threading::{GetCurrentProcess, GetProcessTimes},
    },
};

impl Usage {
    /// Returns the usage up to now.
    pub fn now() -> Self {
        Self { cpu: cpu().unwrap_or_default(), page_faults: page_faults().unwrap_or_default() }
    }
}

fn cpu() -> Option<Duration> {
    let [mut created, mut exited, mut kernel, mut user] = [FILETIME::default(); 4];
    // SAFETY: the four structures outlive the call.
    let is_told = unsafe {
        GetProcessTimes(
            GetCurrentProcess(),
            &raw mut created,
            &raw mut exited,
            &raw mut kernel,
            &raw mut user,
        )
    };
    (is_told != 0).then(|| duration(kernel) + duration(user))
}

/// A duration that is counted in units of 100 nanoseconds.
fn duration(time: FILETIME) -> Duration {
    let units = u64::from(time.dwHighDateTime) << 32 | u64::from(time.dwLowDateTime);
    Duration::from_micros(units / 10) + Duration::from_nanos(units % 10 * 100)
}

fn page_faults() -> Option<u64> {
    let bytes = size_of::<PROCESS_MEMORY_COUNTERS>() as u32;
    let mut counters = PROCESS_MEMORY_COUNTERS { cb: bytes, ..Default::default() };
    // SAFETY: the structure has as many bytes as the call is told, and outlives it.
    let is_told = unsafe { K32GetProcessMemoryInfo(GetCurrentProcess(), &raw mut counters, bytes) };
    (is_told != 0).then(|| counters.PageFaultCount.into())
}
