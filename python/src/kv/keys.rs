//! Keys as Python has them: bytes or text, borrowed without a copy.
#![forbid(unsafe_code)]

use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    pybacked::{PyBackedBytes, PyBackedStr},
    types::{PyBytes, PyString},
};

/// A key, which keeps the object alive that its bytes belong to. Text counts as UTF-8.
pub(super) enum KeyBytes {
    Bytes(PyBackedBytes),
    Text(PyBackedStr),
}

impl AsRef<[u8]> for KeyBytes {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Text(text) => text.as_bytes(),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for KeyBytes {
    type Error = PyErr;

    fn extract(key: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = key.cast::<PyBytes>() {
            return Ok(Self::Bytes(PyBackedBytes::from(bytes.to_owned())));
        }
        if let Ok(text) = key.cast::<PyString>() {
            return Ok(Self::Text(text.to_owned().try_into()?));
        }
        let kind = key.get_type().qualname()?;
        Err(PyTypeError::new_err(format!("a key is bytes or str, not {kind}")))
    }
}

/// The keys of a sequence, which must not be a key itself.
pub(super) fn keys(keys: &Bound<'_, PyAny>) -> PyResult<Vec<KeyBytes>> {
    if keys.is_instance_of::<PyBytes>() || keys.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err("keys are a list; for a single one write [key]"));
    }
    let mut found = Vec::with_capacity(keys.len().unwrap_or_default());
    for key in keys.try_iter()? {
        found.push(key?.extract()?);
    }
    Ok(found)
}
