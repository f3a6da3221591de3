//! Whether a thread holds the interpreter. Every CPython tells, by a function that its stable ABI lacks.
//!
//! What counts the calls of this module cannot tell: another library may have let the interpreter go within one of them, and
//! drop a tensor of ours.
#![allow(unsafe_code)]

use pyo3::prelude::*;
use std::ffi::c_int;

/// Whether this thread holds the interpreter.
pub(crate) fn holds_interpreter() -> bool {
    system::is_held() == 1
}

/// Looks for the function, as this module is imported.
pub(crate) fn find(py: Python<'_>) -> PyResult<()> {
    system::find(py)
}

#[cfg(not(windows))]
mod system {
    use super::{PyResult, Python, c_int};

    unsafe extern "C" {
        /// A module of Linux takes what the process has, in the stable ABI or not.
        safe fn PyGILState_Check() -> c_int;
    }

    pub(super) fn is_held() -> c_int {
        PyGILState_Check()
    }

    pub(super) fn find(_py: Python<'_>) -> PyResult<()> {
        Ok(())
    }
}

/// `python3.dll` has the stable ABI alone. The library of the version, such as `python313.dll`, has the function.
#[cfg(windows)]
mod system {
    use super::{PyResult, Python, c_int};
    use libloading::os::windows::Library;
    use pyo3::{exceptions::PyImportError, prelude::*};
    use std::sync::OnceLock;

    static CHECK: OnceLock<extern "C" fn() -> c_int> = OnceLock::new();

    pub(super) fn is_held() -> c_int {
        // Nothing of this module exists before it is imported.
        CHECK.get().map_or(0, |check| check())
    }

    pub(super) fn find(py: Python<'_>) -> PyResult<()> {
        let handle = py.import("sys")?.getattr("dllhandle")?.extract()?;
        // SAFETY: the library that runs this interpreter, which Python names and nothing unloads.
        let library = unsafe { Library::from_raw(handle) };
        // SAFETY: all versions of CPython declare the function so.
        let found = unsafe { library.get::<extern "C" fn() -> c_int>("PyGILState_Check") };
        let found = found.map(|check| *check);
        // It is Python's own: not closed here.
        _ = library.into_raw();
        let check = found.map_err(|cause| {
            PyImportError::new_err(format!(
                "this Python does not tell which thread holds its interpreter, as CPython does by PyGILState_Check: {cause}"
            ))
        })?;
        CHECK.get_or_init(|| check);
        Ok(())
    }
}
