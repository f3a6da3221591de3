//! The system, and its grants to this process.
#![allow(unsafe_code)]

use super::privilege;
pub use crate::sys::common::ProcessLimit;
use std::io;
use windows_sys::{
    Wdk::System::SystemServices::RtlGetVersion,
    Win32::System::{
        Memory::GetLargePageMinimum,
        SystemInformation::OSVERSIONINFOW,
        Threading::{GetCurrentProcess, GetProcessWorkingSetSize},
    },
};

/// The system's version, such as `10.0.22631`.
pub fn kernel_release() -> String {
    let mut version =
        OSVERSIONINFOW { dwOSVersionInfoSize: size_of::<OSVERSIONINFOW>() as u32, ..Default::default() };
    // SAFETY: the structure says its size and outlives the call.
    unsafe { RtlGetVersion(&raw mut version) };
    format!("{}.{}.{}", version.dwMajorVersion, version.dwMinorVersion, version.dwBuildNumber)
}

/// When the kernel makes huge pages by itself: never.
pub fn transparent_huge_pages() -> Option<String> {
    None
}

/// Free pages of the reserve of huge pages: there is no reserve.
pub fn free_huge_pages() -> u64 {
    0
}

/// Length of a large page in bytes.
///
/// # Errors
/// [`PermissionDenied`](io::ErrorKind::PermissionDenied) if the user lacks the right `SeLockMemoryPrivilege`,
/// [`Unsupported`](io::ErrorKind::Unsupported) if the processor has no large pages.
pub fn large_pages() -> io::Result<usize> {
    // SAFETY: takes nothing.
    let page = unsafe { GetLargePageMinimum() };
    if page == 0 {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "the processor has no large pages"));
    }
    privilege::enable_large_pages()?;
    Ok(page)
}

/// Bytes that this process may lock in memory: its minimum working set.
///
/// # Errors
/// The system's.
pub fn locked_memory() -> io::Result<ProcessLimit> {
    let (mut minimum, mut maximum) = (0usize, 0usize);
    // SAFETY: both numbers outlive the call.
    let is_told =
        unsafe { GetProcessWorkingSetSize(GetCurrentProcess(), &raw mut minimum, &raw mut maximum) } != 0;
    if !is_told {
        return Err(io::Error::last_os_error());
    }
    Ok(ProcessLimit { current: Some(minimum as u64), maximum: None })
}

/// Files that this process may have open: as many as memory allows.
///
/// # Errors
/// None on Windows.
pub fn open_files() -> io::Result<ProcessLimit> {
    Ok(ProcessLimit { current: None, maximum: None })
}

/// Lets this process have as many files open as it may: it may already.
pub fn raise_open_files() {}

/// Returns whether an error means that this process has as many files open as it may.
pub fn is_out_of_descriptors(_: &io::Error) -> bool {
    false
}
