//! Errors of the store as exceptions of `hoistway.errors`.
#![forbid(unsafe_code)]

use crate::error::{IntoPython, exception_of, named};
use hoistway_kv::Error;
use pyo3::{prelude::*, types::PyDict};

impl<T> IntoPython<T> for hoistway_kv::Result<T> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| match error {
            Error::Device(error) => exception_of(py, &error.into()),
            Error::InvalidOption { option, value, reason } => {
                let error = Error::InvalidOption { option: keyword(option), value, reason };
                exception(py, &error).unwrap_or_else(|broken| broken)
            }
            error => exception(py, &error).unwrap_or_else(|broken| broken),
        })
    }
}

/// The keyword argument of an option of the store. In Rust, names of sizes end with their unit, as they are plain numbers there.
fn keyword(option: &'static str) -> &'static str {
    match option {
        // A size of the files rather than a limit: the same in both.
        "segment_bytes" => option,
        _ => option.strip_suffix("_bytes").unwrap_or(option),
    }
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    let class = match error {
        Error::InvalidOption { .. } => "OptionError",
        Error::InvalidKey { .. } | Error::InvalidRequest(_) => "RequestError",
        Error::NotAStore { path, .. } => {
            fields.set_item("path", path)?;
            "StoreNotFoundError"
        }
        Error::UnknownFormat { path, .. } => {
            fields.set_item("path", path)?;
            "FormatError"
        }
        Error::Io { path, source, .. } => {
            fields.set_item("path", path)?;
            fields.set_item("errno", source.raw_os_error())?;
            "StorageError"
        }
        Error::RouteUnavailable { path, .. } => {
            fields.set_item("path", path)?;
            "RouteUnavailableError"
        }
        Error::Closed { path } => {
            fields.set_item("path", path)?;
            "StoreClosedError"
        }
        Error::ReadOnly { path } => {
            fields.set_item("path", path)?;
            "StoreReadOnlyError"
        }
        Error::FarUnavailable { path } | Error::NotWrittenBack { path, .. } => {
            fields.set_item("path", path)?;
            "StorageError"
        }
        Error::TimedOut { .. } => "WaitTimeoutError",
        _ => "HoistwayError",
    };
    named(class, py, &error.to_string(), &fields)
}
