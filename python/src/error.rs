//! Errors as Python exceptions: those of `hoistway.errors`, with file, tensor and offset as attributes.

use hoistway::{
    Error,
    catalog::{FormatError, SourceName},
    plan::PlanError,
    save::ContentError,
};
use pyo3::{prelude::*, types::PyDict};
use std::path::PathBuf;

/// Turns an error into the exception that Python code catches.
pub(crate) trait IntoPython<T> {
    /// The value, or the exception.
    fn into_python(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> IntoPython<T> for hoistway::Result<T> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception_of(py, &error))
    }
}

impl<T> IntoPython<T> for Result<T, hoistway::device::Error> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(Error::from).into_python(py)
    }
}

impl<T> IntoPython<T> for serde_json::Result<T> {
    fn into_python(self, _py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))
    }
}

/// The exception that Python code catches for an error.
pub(crate) fn exception_of(py: Python<'_>, error: &Error) -> PyErr {
    exception_saying(py, error, &error.to_string())
}

/// The same with another message, which says what the error kept from being done.
pub(crate) fn exception_saying(py: Python<'_>, error: &Error, message: &str) -> PyErr {
    let exception = || {
        let fields = PyDict::new(py);
        named(class_of(error, &fields)?, py, message, &fields)
    };
    exception().unwrap_or_else(|broken| broken)
}

/// The class of the exception for an error, whose fields are added to `fields`.
fn class_of(error: &Error, fields: &Bound<'_, PyDict>) -> PyResult<&'static str> {
    let set_path = |path: &PathBuf| match SourceName::from(&**path) {
        // A path of Python's would make one slash of two.
        SourceName::Url(url) => fields.set_item("path", url),
        SourceName::Path(path) => fields.set_item("path", path),
    };
    let class = match error {
        Error::NotFound { path, .. } => {
            set_path(path)?;
            "CheckpointNotFoundError"
        }
        Error::InvalidFile { path, problem } => {
            set_path(path)?;
            fields.set_item("tensor", problem.tensor())?;
            match problem.truncated_at() {
                Some(file_len) => {
                    fields.set_item("offset", file_len)?;
                    "TruncatedError"
                }
                None => {
                    if let FormatError::Gguf(problem) = problem {
                        fields.set_item("offset", problem.offset())?;
                    }
                    "FormatError"
                }
            }
        }
        Error::InvalidIndex { path, .. } | Error::InvalidManifest { path, .. } => {
            set_path(path)?;
            "FormatError"
        }
        Error::DuplicateTensor { tensor, second, .. } => {
            set_path(second)?;
            fields.set_item("tensor", tensor)?;
            "FormatError"
        }
        Error::Truncated { path, tensor, needed, file_len } => {
            set_path(path)?;
            fields.set_item("tensor", tensor)?;
            fields.set_item("offset", needed.start().max(*file_len).min(needed.end()))?;
            "TruncatedError"
        }
        Error::Changed { path, tensor, .. } => {
            set_path(path)?;
            fields.set_item("tensor", tensor)?;
            "FileChangedError"
        }
        Error::Io { path, tensor, range, source, .. } => {
            set_path(path)?;
            fields.set_item("tensor", tensor)?;
            fields.set_item("offset", range.map(|range| range.start()))?;
            fields.set_item("errno", error.errno())?;
            storage_class(source)
        }
        Error::System { source, .. } => {
            fields.set_item("errno", error.errno())?;
            storage_class(source)
        }
        Error::NotSynced { path, source } => {
            set_path(path)?;
            fields.set_item("errno", source.raw_os_error())?;
            storage_class(source)
        }
        Error::RouteUnavailable { path, .. } => {
            path.as_ref().map(set_path).transpose()?;
            "RouteUnavailableError"
        }
        Error::DeviceUnavailable { device, .. } => {
            fields.set_item("device", device)?;
            "DeviceUnavailableError"
        }
        Error::Device { device, .. } => {
            fields.set_item("device", device)?;
            "DeviceError"
        }
        Error::NoSuchTensor { pattern, .. } => {
            fields.set_item("tensor", pattern)?;
            "TensorNotFoundError"
        }
        Error::Plan(
            PlanError::Cast { tensor, .. }
            | PlanError::UnknownType { tensor, .. }
            | PlanError::ByteOrder { tensor, .. },
        ) => {
            fields.set_item("tensor", tensor)?;
            "UnsupportedDtypeError"
        }
        Error::Plan(PlanError::Slice { tensor, .. }) => {
            fields.set_item("tensor", tensor)?;
            "SliceError"
        }
        Error::Plan(_) => "SliceError",
        Error::Content(problem) => {
            fields.set_item("tensor", problem.tensor())?;
            match problem {
                ContentError::UnsupportedDtype { .. } => "UnsupportedDtypeError",
                _ => "FormatError",
            }
        }
        Error::InvalidOption { .. } => "OptionError",
        Error::MemoryBudget { .. } | Error::Allocation { .. } => "MemoryBudgetError",
        Error::DigestMismatch { tensor, path, .. } => {
            set_path(path)?;
            fields.set_item("tensor", tensor)?;
            "DigestMismatchError"
        }
        Error::ChecksumMismatch { path, .. } => {
            set_path(path)?;
            "DigestMismatchError"
        }
        Error::Cancelled => "CancelledError",
        Error::Forked => "ForkedError",
        _ => "HoistwayError",
    };
    Ok(class)
}

/// The class of an error of the system's or of a store's.
fn storage_class(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::PermissionDenied => "StoragePermissionError",
        _ => "StorageError",
    }
}

/// The exception for a tensor whose type a framework lacks.
pub(crate) fn unsupported_dtype(py: Python<'_>, message: &str, tensor: &str) -> PyErr {
    let exception = || {
        let fields = PyDict::new(py);
        fields.set_item("tensor", tensor)?;
        named("UnsupportedDtypeError", py, message, &fields)
    };
    exception().unwrap_or_else(|broken| broken)
}

/// An exception of `hoistway.errors`, by the name of its class.
pub(crate) fn named(
    class: &str,
    py: Python<'_>,
    message: &str,
    fields: &Bound<'_, PyDict>,
) -> PyResult<PyErr> {
    let class = py.import("hoistway.errors")?.getattr(class)?;
    Ok(PyErr::from_value(class.call((message,), Some(fields))?))
}
