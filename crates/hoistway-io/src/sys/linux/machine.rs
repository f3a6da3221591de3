//! The system, and its grants to this process.
#![allow(unsafe_code)]

use super::read_number;
pub use crate::sys::common::ProcessLimit;
use rustix::process::{Resource, Rlimit, setrlimit};
use std::{fs, io};

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
///
/// # Errors
/// The system's, as where a filter of system calls forbids to ask.
pub fn locked_memory() -> io::Result<ProcessLimit> {
    // SAFETY: the call writes to `limit`, which outlives it.
    told(|limit| unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, limit) })
}

/// Files that this process may have open.
///
/// # Errors
/// As [`locked_memory`].
pub fn open_files() -> io::Result<ProcessLimit> {
    // SAFETY: as above.
    told(|limit| unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, limit) })
}

/// Lets this process have as many files open as it may.
pub fn raise_open_files() {
    let raised = open_files().and_then(|ProcessLimit { current, maximum }| {
        if current != maximum {
            setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
        }
        Ok(())
    });
    if let Err(error) = raised {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// Returns whether an error means that this process, or the system, has as many files open as it may.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    let codes = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].map(rustix::io::Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// The limit that a call tells. Not by `rustix`, which takes it that the call cannot fail; the type of the limit's name differs between C
/// libraries.
fn told(by: impl FnOnce(&mut libc::rlimit) -> libc::c_int) -> io::Result<ProcessLimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    if by(&mut limit) != 0 {
        return Err(io::Error::last_os_error());
    }
    let finite = |value| (value != libc::RLIM_INFINITY).then_some(value);
    Ok(ProcessLimit { current: finite(limit.rlim_cur), maximum: finite(limit.rlim_max) })
}
