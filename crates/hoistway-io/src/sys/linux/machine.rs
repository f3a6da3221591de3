//! The system, and its grants to this process.
#![forbid(unsafe_code)]

use super::read_number;
pub use crate::sys::common::ProcessLimit;
use rustix::process::{Resource, getrlimit, setrlimit};
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

/// Lets this process have as many files open as it may.
pub fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// Returns whether an error means that this process, or the system, has as many files open as it may.
pub fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    let codes = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].map(rustix::io::Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

fn limit(of: Resource) -> ProcessLimit {
    let limit = getrlimit(of);
    ProcessLimit { current: limit.current, maximum: limit.maximum }
}
