//! Keys and values of GGUF files as Python's own. Arrays are read when asked for.

use crate::{cancellable, error::IntoPython};
use hoistway::{
    Cancel, OpenArray, Result,
    catalog::{
        FileId,
        gguf::{ArrayValues, Value},
    },
};
use pyo3::{
    IntoPyObjectExt,
    prelude::*,
    types::{PyBytes, PyList},
};

/// An array in the header of a GGUF file, which it keeps open, and no other.
#[pyclass(frozen, module = "hoistway._native", name = "Array")]
pub(crate) struct NativeArray {
    array: OpenArray,
}

#[pymethods]
impl NativeArray {
    /// Type of its elements, such as `u32` or `string`.
    #[getter]
    fn element(&self) -> &'static str {
        self.array.array().element().name()
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.array.array().len()).unwrap_or(usize::MAX)
    }

    /// The bytes of all numbers, lowest first in each.
    fn numbers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let len = usize::try_from(self.array.array().bytes().len()).unwrap_or(usize::MAX);
        // Into the object itself, to which no other reference exists yet.
        PyBytes::new_with(py, len, |buffer| self.read(py, |array| array.read_into(buffer)))
    }

    /// All strings as text.
    fn strings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        match self.read(py, OpenArray::read)? {
            ArrayValues::String(strings) => PyList::new(py, strings),
            _ => Ok(PyList::empty(py)),
        }
    }

    /// All strings as bytes.
    fn byte_strings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let strings = self.read(py, OpenArray::byte_strings)?;
        let bytes_of = |string: &Vec<u8>| {
            // Not by `PyBytes::new`, which panics where memory is short.
            PyBytes::new_with(py, string.len(), |copy| {
                copy.copy_from_slice(string);
                Ok(())
            })
        };
        PyList::new(py, strings.iter().map(bytes_of).collect::<PyResult<Vec<_>>>()?)
    }

    /// All arrays of an array of arrays.
    fn arrays(&self, py: Python<'_>) -> PyResult<Vec<Self>> {
        let arrays = self.read(py, OpenArray::arrays)?;
        Ok(arrays.into_iter().map(|array| Self { array }).collect())
    }
}

impl NativeArray {
    /// Reads the array, from a server until Ctrl-C.
    fn read<T: Send>(
        &self,
        py: Python<'_>,
        read: impl FnOnce(&OpenArray) -> Result<T> + Send,
    ) -> PyResult<T> {
        if !self.array.is_remote() {
            return py.detach(|| read(&self.array)).into_python(py);
        }
        let cancel = Cancel::default();
        cancellable(py, &cancel, || read(&self.array.until(&cancel)))
    }
}

/// Keys, and values of Python.
pub(crate) type KeyValues<'py> = Vec<(String, Bound<'py, PyAny>)>;

/// Keys and values of all GGUF files, in order; `None` if there is no such file.
pub(crate) fn key_values<'py>(
    py: Python<'py>,
    checkpoint: &hoistway::Checkpoint,
) -> PyResult<Option<KeyValues<'py>>> {
    let catalog = checkpoint.catalog();
    if catalog.files().iter().all(|file| file.gguf().is_none()) {
        return Ok(None);
    }
    let of_python = |(key, value, file): (&str, &Value, FileId)| {
        let value = match value {
            Value::U8(number) => number.into_bound_py_any(py),
            Value::I8(number) => number.into_bound_py_any(py),
            Value::U16(number) => number.into_bound_py_any(py),
            Value::I16(number) => number.into_bound_py_any(py),
            Value::U32(number) => number.into_bound_py_any(py),
            Value::I32(number) => number.into_bound_py_any(py),
            Value::F32(number) => number.into_bound_py_any(py),
            Value::U64(number) => number.into_bound_py_any(py),
            Value::I64(number) => number.into_bound_py_any(py),
            Value::F64(number) => number.into_bound_py_any(py),
            Value::Bool(truth) => truth.into_bound_py_any(py),
            Value::String(text) => text.into_bound_py_any(py),
            Value::Array(_) => {
                let array = checkpoint.array(file, key).into_python(py)?;
                array.map(|array| NativeArray { array }).into_bound_py_any(py)
            }
        };
        Ok((key.to_owned(), value?))
    };
    catalog.key_values().into_iter().map(of_python).collect::<PyResult<_>>().map(Some)
}
