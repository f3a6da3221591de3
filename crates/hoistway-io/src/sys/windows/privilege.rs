//! Rights of the user, which are of use only once the process has switched them on.
#![allow(unsafe_code)]

use super::code;
use std::{
    io,
    os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle},
    ptr,
};
use windows_sys::Win32::{
    Foundation::{ERROR_NOT_ALL_ASSIGNED, LUID},
    Security::{
        AdjustTokenPrivileges, LUID_AND_ATTRIBUTES, LookupPrivilegeValueW, SE_LOCK_MEMORY_NAME,
        SE_PRIVILEGE_ENABLED, TOKEN_ADJUST_PRIVILEGES, TOKEN_PRIVILEGES, TOKEN_QUERY,
    },
    System::Threading::{GetCurrentProcess, OpenProcessToken},
};

/// Switches on what large pages need.
///
/// # Errors
/// [`PermissionDenied`](io::ErrorKind::PermissionDenied) if the user lacks the right; the system's.
pub(super) fn enable_large_pages() -> io::Result<()> {
    let mut token = ptr::null_mut();
    let access = TOKEN_ADJUST_PRIVILEGES | TOKEN_QUERY;
    // SAFETY: the handle of this process needs no closing, and the place of the new one outlives the call.
    if unsafe { OpenProcessToken(GetCurrentProcess(), access, &raw mut token) } == 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new handle, which has no other owner.
    let token = unsafe { OwnedHandle::from_raw_handle(token) };
    let mut luid = LUID::default();
    // SAFETY: the name ends with a zero, and the place of the number outlives the call.
    if unsafe { LookupPrivilegeValueW(ptr::null(), SE_LOCK_MEMORY_NAME, &raw mut luid) } == 0 {
        return Err(io::Error::last_os_error());
    }
    let privilege = LUID_AND_ATTRIBUTES { Luid: luid, Attributes: SE_PRIVILEGE_ENABLED };
    let wanted = TOKEN_PRIVILEGES { PrivilegeCount: 1, Privileges: [privilege] };
    let (handle, nothing) = (token.as_raw_handle(), ptr::null_mut());
    // SAFETY: the handle is open, the structure outlives the call, and the state before is not asked for.
    let is_done =
        unsafe { AdjustTokenPrivileges(handle, 0, &raw const wanted, 0, nothing, ptr::null_mut()) } != 0;
    // The call also succeeds if it has done nothing.
    let error = io::Error::last_os_error();
    match code(&error) {
        Some(ERROR_NOT_ALL_ASSIGNED) => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "this user lacks the right 'Lock pages in memory' (SeLockMemoryPrivilege), which secpol.msc gives",
        )),
        _ if is_done => Ok(()),
        _ => Err(error),
    }
}
