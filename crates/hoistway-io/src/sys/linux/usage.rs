//! CPU time and page faults of this process.
#![allow(unsafe_code)]

pub use crate::sys::common::Usage;
use std::time::Duration;

impl Usage {
    /// Returns the usage up to now.
    pub fn now() -> Self {
        // SAFETY: all-zero is a valid value of this plain structure of integers.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: `usage` outlives the call, which writes nothing else.
        if unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) } != 0 {
            return Self::default();
        }
        let duration = |time: libc::timeval| {
            Duration::from_secs(time.tv_sec.try_into().unwrap_or(0))
                + Duration::from_micros(time.tv_usec.try_into().unwrap_or(0))
        };
        Self {
            cpu: duration(usage.ru_utime) + duration(usage.ru_stime),
            page_faults: u64::try_from(usage.ru_minflt + usage.ru_majflt).unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_memory_shows() {
        let before = Usage::now();
        let memory = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = Usage::now();
        assert!(after.page_faults > before.page_faults && after.cpu > before.cpu);
        drop(memory);
    }
}
