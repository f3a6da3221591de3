//! Errors of the store as exceptions of `hoistway.errors`.
#![forbid(unsafe_code)]

use crate::error::{IntoPython, exception_of, named};
use hoistway_kv::Error;
use pyo3::{prelude::*, types::PyDict};

impl<T> IntoPython<T> for hoistway_kv::Result<T> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| match error {
            Error::Device(error) => exception_of(py, &error.into()),
            error => exception(py, &error).unwrap_or_else(|broken| broken),
        })
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
