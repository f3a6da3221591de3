//! Files that are in memory already.

use crate::{error::IntoPython, tensor::Tensor};
use pyo3::{prelude::*, types::PyBytes};
use windlass::catalog::OpenOptions;

/// The tensors of a file, in its order, as copies.
#[pyfunction]
pub(crate) fn load_bytes(py: Python<'_>, data: &Bound<'_, PyBytes>) -> PyResult<Vec<Tensor>> {
    let options = OpenOptions::from_env().into_python(py)?;
    // Bytes objects do not change, and the caller holds this one.
    let bytes = data.as_bytes();
    let tensors = py.detach(|| windlass::load_bytes(bytes, &options)).into_python(py)?;
    Ok(tensors.into_iter().map(|tensor| Tensor { tensor }).collect())
}
