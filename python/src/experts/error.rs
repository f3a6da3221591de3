//! Errors of experts, rows and layers as exceptions of `hoistway.errors`.
#![forbid(unsafe_code)]

use crate::error::{IntoPython, exception_of, exception_saying, named};
use hoistway_experts::{Error, policy::PolicyError, policy::ShapeError, trace::TraceError};
use pyo3::{prelude::*, types::PyDict};

impl<T> IntoPython<T> for hoistway_experts::Result<T> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| match &error {
            Error::Engine(engine) => exception_of(py, engine),
            Error::Read { source, .. } => exception_saying(py, source.error(), &error.to_string()),
            error => exception(py, error).unwrap_or_else(|broken| broken),
        })
    }
}

impl<T> IntoPython<T> for Result<T, PolicyError> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| plain("OptionError", py, &error))
    }
}

impl<T> IntoPython<T> for Result<T, ShapeError> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| plain("FormatError", py, &error))
    }
}

impl<T> IntoPython<T> for Result<T, TraceError> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| {
            let exception = || {
                let fields = PyDict::new(py);
                let class = match &error {
                    TraceError::Io { name, source, .. } => {
                        fields.set_item("path", name)?;
                        fields.set_item("errno", source.raw_os_error())?;
                        "StorageError"
                    }
                    TraceError::Invalid { name, .. } => {
                        fields.set_item("path", name)?;
                        "FormatError"
                    }
                    _ => "HoistwayError",
                };
                named(class, py, &error.to_string(), &fields)
            };
            exception().unwrap_or_else(|broken| broken)
        })
    }
}

fn plain(class: &str, py: Python<'_>, error: &impl ToString) -> PyErr {
    named(class, py, &error.to_string(), &PyDict::new(py)).unwrap_or_else(|broken| broken)
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    let class = match error {
        Error::InvalidExperts { path, tensor, .. } => {
            fields.set_item("path", path)?;
            fields.set_item("tensor", tensor)?;
            "FormatError"
        }
        Error::InvalidConfig { path, .. } | Error::InvalidPack { path, .. } => {
            fields.set_item("path", path)?;
            "FormatError"
        }
        Error::InvalidExpert { .. } => "FormatError",
        Error::NoSuchLayer { .. } | Error::NoSuchExpert { .. } => "ExpertNotFoundError",
        Error::NoSuchTensor { name, .. } => {
            fields.set_item("tensor", name)?;
            "TensorNotFoundError"
        }
        Error::NoSuchRow { table, .. } => {
            fields.set_item("tensor", table)?;
            "SliceError"
        }
        Error::BudgetTooSmall { .. }
        | Error::BatchTooLarge { .. }
        | Error::NoRoom { .. }
        | Error::NoMemory { .. } => "MemoryBudgetError",
        Error::TimedOut { .. } => "WaitTimeoutError",
        Error::Closed { .. } => "StoreClosedError",
        Error::InvalidOption { .. } => "OptionError",
        _ => "HoistwayError",
    };
    let text = match error {
        Error::InvalidOption { option, value, reason } => {
            Error::InvalidOption { option: keyword(option), value: value.clone(), reason: reason.clone() }
                .to_string()
        }
        other => other.to_string(),
    };
    named(class, py, &text, &fields)
}

/// What Python calls an option of a store.
fn keyword(option: &'static str) -> &'static str {
    match option {
        "batch_bytes" => "batch",
        "dense_bytes" => "dense",
        "host_level_bytes" => "host_level",
        "pad_slices" => "pad",
        other => other,
    }
}
