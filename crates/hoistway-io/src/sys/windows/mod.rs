//! Windows: `windows-sys`.

pub mod block_device;
pub mod files;
pub mod folders;
pub mod limits;
pub mod machine;
pub mod numa;
pub mod pages;
pub mod permissions;
pub mod port;
mod privilege;
pub mod threads;
mod transfer;
pub mod usage;

use std::{ffi::OsStr, io, os::windows::ffi::OsStrExt, path::Path};
use windows_sys::Win32::Foundation::{
    ERROR_CALL_NOT_IMPLEMENTED, ERROR_INVALID_FUNCTION, ERROR_INVALID_PARAMETER, ERROR_NOT_SUPPORTED,
};

/// Cores that a processor group has numbers for.
const CORES_A_GROUP: usize = 64;

/// The system's number of an error.
fn code(error: &io::Error) -> Option<u32> {
    error.raw_os_error().map(i32::cast_unsigned)
}

/// Whether an error says that the system or the file system has no such thing.
fn is_lack(error: &io::Error) -> bool {
    let numbers =
        [ERROR_CALL_NOT_IMPLEMENTED, ERROR_INVALID_FUNCTION, ERROR_INVALID_PARAMETER, ERROR_NOT_SUPPORTED];
    code(error).is_some_and(|number| numbers.contains(&number))
}

/// A path as the system takes it at any length: absolute, with the prefix that keeps it as it is, and a zero at its end.
fn verbatim(path: &Path) -> io::Result<Vec<u16>> {
    let absolute: Vec<u16> = std::path::absolute(path)?.as_os_str().encode_wide().collect();
    let units = |text: &str| OsStr::new(text).encode_wide().collect::<Vec<_>>();
    let (share, device, prefix) = (units(r"\\"), units(r"\\.\"), units(r"\\?\"));
    let mut verbatim = if absolute.starts_with(&prefix) || absolute.starts_with(&device) {
        absolute
    } else if let Some(rest) = absolute.strip_prefix(&share[..]) {
        [units(r"\\?\UNC\"), rest.to_vec()].concat()
    } else {
        [prefix, absolute].concat()
    };
    verbatim.push(0);
    Ok(verbatim)
}
