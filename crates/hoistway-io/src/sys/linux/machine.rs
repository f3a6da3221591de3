//! What the system is, and what it grants this process.
#![forbid(unsafe_code)]

use super::read_number;
pub use crate::sys::common::ProcessLimit;
use rustix::process::{Resource, getrlimit};
use std::fs;

/// The kernel's release, such as `6.8.0-31-generic`.
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// When the kernel makes huge pages by itself: `always`, `madvise` or `never`; `None` if it cannot.
pub fn transparent_huge_pages() -> Option<String> {
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    setting.split(['[', ']']).nth(1).map(str::to_owned)
}

/// Free pages of the reserve of huge pages.
pub fn free_huge_pages() -> u64 {
    read_number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").unwrap_or(0)
}

/// Bytes that this process may lock in memory.
pub fn locked_memory() -> ProcessLimit {
    limit(Resource::Memlock)
}

/// Files that this process may have open.
pub fn open_files() -> ProcessLimit {
    limit(Resource::Nofile)
}

fn limit(of: Resource) -> ProcessLimit {
    let limit = getrlimit(of);
    ProcessLimit { current: limit.current, maximum: limit.maximum }
}
