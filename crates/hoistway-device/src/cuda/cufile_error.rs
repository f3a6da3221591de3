//! What cuFile's codes mean, and what to do about them.
#![forbid(unsafe_code)]

use super::cufile::Status;
use crate::Unavailable;
use std::{ffi::c_int, io};

/// First code of cuFile's own errors.
const BASE_ERROR: c_int = 5000;

/// A call of cuFile that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{function} returned {code}{}", if *cuda == 0 { String::new() } else { format!(" (CUDA error {cuda})") })]
pub(super) struct CuFileError {
    function: &'static str,
    pub(super) code: c_int,
    cuda: c_int,
}

impl CuFileError {
    pub(super) fn into_unavailable(self) -> Unavailable {
        let (why, fix) = explain(self.code);
        Unavailable::new(format!("{self}: {why}"), fix)
    }
}

pub(super) fn check(function: &'static str, status: Status) -> Result<(), CuFileError> {
    let Status { code, cuda } = status;
    if code == 0 { Ok(()) } else { Err(CuFileError { function, code, cuda }) }
}

/// What a read or write returned: bytes, -1 with the system's error, or the negative code of an error: cuFile's own
/// from 5000 on, the system's below.
pub(super) fn outcome(result: isize, last_error: impl FnOnce() -> io::Error) -> io::Result<usize> {
    match usize::try_from(result) {
        Ok(count) => Ok(count),
        Err(_) if result == -1 => Err(last_error()),
        Err(_) => {
            let code = c_int::try_from(result.unsigned_abs()).unwrap_or(c_int::MAX);
            if code < BASE_ERROR {
                return Err(io::Error::from_raw_os_error(code));
            }
            let (why, fix) = explain(code);
            Err(io::Error::other(Unavailable::new(format!("cuFile error {code}: {why}"), fix).to_string()))
        }
    }
}

/// What a code means, and what to do about it.
pub(super) fn explain(code: c_int) -> (&'static str, &'static str) {
    const UDEV: &str = "in a container, mount /run/udev (-v /run/udev:/run/udev:ro); check gdscheck -p";
    match code - BASE_ERROR {
        1 => ("its driver is not initialised", "check gdscheck -p"),
        2 => ("a property of its driver is invalid", "check /etc/cufile.json"),
        7 => ("the platform does not support GPUDirect Storage", "use route staged"),
        8 => (
            "the file system does not support GPUDirect Storage",
            "use ext4 (data=ordered), xfs, or a file system that gdscheck -p lists; or route staged",
        ),
        11 => ("the CUDA driver failed", "check that nvidia-smi works"),
        12 | 13 => ("it takes no such memory", ""),
        14 | 15 => ("the range leaves what was registered", ""),
        16 => (
            "no more of the device's memory can be registered (BAR1 or max_device_pinned_mem_size_kb)",
            "raise max_device_pinned_mem_size_kb in /etc/cufile.json, or use a GPU with a larger BAR1",
        ),
        19 | 20 => ("the file was opened in a way that it does not take", "open it with O_DIRECT"),
        23 => ("the memory is registered already", ""),
        27 | 28 => ("it does not take the file", UDEV),
        30 => ("it failed on the file system or its block device", UDEV),
        33 => (
            "nvidia-fs is not set up",
            "load the module nvidia-fs; in a container, pass /dev/nvidia-fs* and /run/udev",
        ),
        36 => ("the device's memory could not be pinned", "raise the GPU's BAR1 size"),
        48 => ("nvidia-fs failed", "see dmesg"),
        49 => (
            "there is no direct path, and compatibility mode is off",
            "use route staged, or allow compatibility mode",
        ),
        _ => ("see CUfileOpError in cufile.h", "see cufile.log in the temporary directory"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_bytes_or_the_right_kind_of_error() {
        let none = || io::Error::other("none");
        assert_eq!(outcome(4096, none).unwrap(), 4096);
        assert_eq!(outcome(-5, none).unwrap_err().raw_os_error(), Some(5));
        assert_eq!(outcome(-1, || io::Error::from_raw_os_error(28)).unwrap_err().raw_os_error(), Some(28));
        let text = outcome(-5030, none).unwrap_err().to_string();
        assert!(text.contains("5030") && text.contains("/run/udev"), "{text}");
    }
}
