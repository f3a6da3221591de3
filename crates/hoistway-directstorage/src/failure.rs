//! What the runtime answers when something fails, in words.
#![forbid(unsafe_code)]

use crate::abi::{self, HResult};
use hoistway_device::Unavailable;
use std::{fmt, io};

/// The part of a result that says whose number it is: here, those of Windows itself.
const OF_WINDOWS: u32 = 0x8007_0000;
/// Whose operations these are, unless another interface is named.
const DIRECT_STORAGE: &str = "DirectStorage";

/// A function of the runtime, or a request, that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Whose operation it is.
    of: &'static str,
    operation: &'static str,
    code: HResult,
    more: String,
}

impl Failure {
    /// The failure of an operation with this result.
    pub fn new(operation: &'static str, code: HResult) -> Self {
        Self { of: DIRECT_STORAGE, operation, code, more: String::new() }
    }

    /// The same of an operation of another interface.
    #[must_use]
    pub fn of(self, of: &'static str) -> Self {
        Self { of, ..self }
    }

    /// The same, with what else is known.
    #[must_use]
    pub fn with(self, more: impl Into<String>) -> Self {
        Self { more: more.into(), ..self }
    }

    /// Returns the result.
    pub fn code(&self) -> HResult {
        self.code
    }

    /// Returns the number of Windows that the result stands for, if it is one.
    pub fn windows_code(&self) -> Option<u32> {
        let code = self.code.cast_unsigned();
        (code & 0xFFFF_0000 == OF_WINDOWS).then_some(code & 0xFFFF)
    }

    /// Returns what to do about it; empty if nothing is known.
    pub fn fix(&self) -> &'static str {
        words(self.of, self.code).map_or("", |(_, fix)| fix)
    }

    /// Fails with this operation if the result is an error.
    ///
    /// # Errors
    /// That it is one.
    pub fn check(operation: &'static str, code: HResult) -> Result<(), Self> {
        if code < 0 { Err(Self::new(operation, code)) } else { Ok(()) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}'s {} failed: ", self.of, self.operation)?;
        match (words(self.of, self.code), self.windows_code()) {
            (Some((words, _)), _) => f.write_str(words)?,
            (None, Some(number)) => {
                let error = io::Error::from_raw_os_error(number.cast_signed());
                let text = error.to_string();
                // The number that the standard library adds is said below.
                let text = text.split(" (os error").next().unwrap_or_default();
                write!(f, "{}, error {number} of Windows", text.trim_end_matches('.'))?;
            }
            (None, None) => f.write_str("the result has no name here")?,
        }
        write!(f, " (0x{:08x})", self.code)?;
        if !self.more.is_empty() {
            write!(f, "; {}", self.more)?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        let kind = match (failure.code, failure.windows_code()) {
            (abi::E_DSTORAGE_END_OF_FILE, _) => io::ErrorKind::UnexpectedEof,
            (IO_TIMEOUT, _) => io::ErrorKind::TimedOut,
            (_, Some(number)) => Self::from_raw_os_error(number.cast_signed()).kind(),
            _ => io::ErrorKind::Other,
        };
        // What this says of the system's state is no request for another attempt.
        let kind = match kind {
            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => io::ErrorKind::Other,
            kind => kind,
        };
        Self::new(kind, failure)
    }
}

impl From<Failure> for Unavailable {
    fn from(failure: Failure) -> Self {
        Self::new(failure.to_string(), failure.fix())
    }
}

const IO_TIMEOUT: HResult = 0x8924_0016_u32.cast_signed();

/// What a result means, and what to do about it.
fn words(of: &str, code: HResult) -> Option<(&'static str, &'static str)> {
    const OTHER_ROUTE: &str = "choose route overlapped";
    const CLOSE_PROGRAMS: &str = "close other programs that use DirectStorage, or choose route overlapped";
    const UPDATE_DRIVER: &str = "update the driver of the graphics card";
    const DRIVER: &str =
        "load again; if it stays, update the driver of the graphics card, or choose route overlapped";
    let is_of_graphics = of != DIRECT_STORAGE;
    Some(match code.cast_unsigned() {
        0x8000_4001 if is_of_graphics => ("it does not have that", UPDATE_DRIVER),
        0x8000_4002 if is_of_graphics => ("it does not have the interface", UPDATE_DRIVER),
        0x8000_4005 if is_of_graphics => ("it does not say why", UPDATE_DRIVER),
        0x8000_4001 => (
            "it does not have that; dstoragecore.dll is not loaded, or is of another version",
            "put dstorage.dll and dstoragecore.dll of one release into one folder",
        ),
        0x8000_4002 => (
            "this release does not have the interface",
            "use DirectStorage 1.2 or later; 1.3.0 is the one that was tried",
        ),
        0x8000_4005 => ("it does not say why", ""),
        0x8000_000A => ("it has not ended", ""),
        0x8924_0002 => ("the runtime is not running", ""),
        0x8924_0003 => ("a queue of that many entries cannot be", ""),
        0x8924_0005 => ("it does not read from this volume", OTHER_ROUTE),
        0x8924_0007 => ("the request goes past the end of the file", ""),
        0x8924_0008 => (
            "the request is larger than the staging buffer, whose size another library of this process has changed",
            "start hoistway's loads before that library, or choose route overlapped",
        ),
        0x8924_0009 => ("the memory to read into cannot be written", ""),
        0x8924_000A => ("it does not read this kind of file", OTHER_ROUTE),
        0x8924_000B => ("the file was closed", ""),
        0x8924_000C => ("a reserved field is not zero", "use DirectStorage 1.3.0"),
        0x8924_000F => ("the destination has another length than the source", ""),
        0x8924_0010 => ("the queue was closed", ""),
        0x8924_0012 => ("the process has too many queues", CLOSE_PROGRAMS),
        0x8924_0014 => ("the process has too many files open by it", CLOSE_PROGRAMS),
        0x8924_0016 => ("the drive did not answer in time", "look at the drive's health"),
        0x8924_0017 => ("the file is not open", ""),
        0x8924_001A => ("the offset cannot be", ""),
        0x8924_001B => ("the queue is not one for files", ""),
        0x8924_001D => ("this system does not support it", OTHER_ROUTE),
        0x8924_001F => (
            "another library of this process, which may be another copy of hoistway, has made queues or opened files, so the size \
             of the staging buffer is fixed, and it cannot be asked for",
            "start hoistway's loads before that library, or choose route overlapped",
        ),
        0x8924_0020 | 0x8924_0021 => ("the staging buffer has a size that cannot be", ""),
        0x8924_0022 => ("the fence is not one, or was freed", ""),
        0x8924_0023 => ("the array of results is not one, or was freed", ""),
        0x8924_0038 => {
            ("the file is in too many pieces on the drive", "defragment it, or choose route overlapped")
        }
        0x8924_0041 => ("reads through the cache need BypassIO switched off", ""),
        0x887A_0004 => ("the system or the driver of the graphics card does not support it", UPDATE_DRIVER),
        0x887A_0005 => {
            ("the graphics device was removed: its driver was updated, crashed, or was reset", DRIVER)
        }
        0x887A_0006 => ("the graphics device hangs", DRIVER),
        0x887A_0007 => ("the graphics device was reset", DRIVER),
        0x887A_0020 => ("the driver of the graphics device failed", DRIVER),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_its_number_in_words_and_what_helps() {
        let failure = Failure::new("request", abi::E_DSTORAGE_REQUEST_TOO_LARGE);
        assert!(failure.to_string().ends_with("has changed (0x89240008)"), "{failure}");
        assert!(failure.fix().contains("before that library"));
        let unknown = Failure::new("request", 0x8924_00FF_u32.cast_signed()).with("of 3");
        assert!(unknown.to_string().ends_with("no name here (0x892400ff); of 3"), "{unknown}");
        assert_eq!(unknown.fix(), "");
    }

    #[test]
    fn a_failure_of_another_interface_names_no_library_of_the_runtime() {
        let failure = Failure::new("CreateSharedHandle", 0x8000_4001_u32.cast_signed()).of("D3D12");
        assert_eq!(
            failure.to_string(),
            "D3D12's CreateSharedHandle failed: it does not have that (0x80004001)"
        );
        assert_eq!(failure.fix(), "update the driver of the graphics card");
    }

    #[test]
    fn numbers_of_windows_keep_their_kind() {
        let failure = Failure::new("OpenFile", 0x8007_0002_u32.cast_signed());
        assert_eq!(failure.windows_code(), Some(2));
        assert!(failure.to_string().contains("error 2 of Windows (0x80070002)"), "{failure}");
        assert_eq!(io::Error::from(failure).kind(), io::ErrorKind::NotFound);
        let eof = Failure::new("request", abi::E_DSTORAGE_END_OF_FILE);
        assert_eq!(io::Error::from(eof).kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn only_negative_results_are_errors() {
        assert_eq!(Failure::check("Submit", 0), Ok(()));
        assert_eq!(Failure::check("Submit", 1), Ok(()));
        assert!(Failure::check("Submit", abi::E_FAIL).is_err());
    }
}
