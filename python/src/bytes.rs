//! Files and headers that are in memory already.

use crate::{error::IntoPython, tensor::Tensor};
use hoistway::{
    Error,
    cache::NodeCache,
    catalog::{
        OpenOptions,
        safetensors::{Header, Metadata},
    },
    objects::StoreOptions,
};
use pyo3::{prelude::*, pybacked::PyBackedBytes, types::PyBytes};
use std::{borrow::Cow, collections::HashMap, path::PathBuf};

/// Name, element type, shape, and first and last offset of a tensor of a header.
type ParsedTensor = (String, Cow<'static, str>, Vec<u64>, (u64, u64));

/// The tensors of a file, in its order, as copies.
#[pyfunction]
pub(crate) fn load_bytes(py: Python<'_>, data: &Bound<'_, PyBytes>) -> PyResult<Vec<Tensor>> {
    let options = OpenOptions::default().lenient(OpenOptions::lenient_from_env().into_python(py)?);
    let bytes = PyBackedBytes::from(data.clone());
    let tensors = py.detach(|| hoistway::load_bytes(bytes, &options)).into_python(py)?;
    Ok(tensors.into_iter().map(Tensor::from).collect())
}

/// The tensors of the header of a safetensors file of `file_len` bytes, in the order of their bytes, and its metadata.
#[pyfunction]
#[pyo3(signature = (text, file_len, path, *, lenient=None))]
pub(crate) fn parse_header(
    py: Python<'_>,
    text: &[u8],
    file_len: u64,
    path: PathBuf,
    lenient: Option<bool>,
) -> PyResult<(Vec<ParsedTensor>, Option<Metadata>)> {
    let options = OpenOptions::default().lenient(chosen_lenient(py, lenient)?);
    let header = Header::parse_with(text, file_len, &options)
        .map_err(|problem| Error::InvalidFile { path, problem: problem.into() })
        .into_python(py)?;
    let tensors = header.tensors.into_iter().map(|tensor| {
        let offsets = (tensor.data.start(), tensor.data.end());
        (tensor.name, tensor.dtype.name(), tensor.shape, offsets)
    });
    Ok((tensors.collect(), header.metadata))
}

/// How a file is opened; the environment decides what the caller leaves open.
pub(crate) fn open_options(
    py: Python<'_>,
    lenient: Option<bool>,
    offset: u64,
    store: Option<HashMap<String, String>>,
    cache: Option<PathBuf>,
) -> PyResult<OpenOptions> {
    let lenient = chosen_lenient(py, lenient)?;
    let cache = py.detach(|| NodeCache::chosen(cache.as_deref(), None)).into_python(py)?;
    let mut options = OpenOptions::default().lenient(lenient).offset(offset).store(store_options(py, store)?);
    options.cache = cache;
    Ok(options)
}

/// The endpoint and the credentials of a store.
pub(crate) fn store_options(
    py: Python<'_>,
    store: Option<HashMap<String, String>>,
) -> PyResult<StoreOptions> {
    let mut options = StoreOptions::default();
    for (name, value) in store.iter().flatten() {
        // Values may be secret.
        let invalid = |error: hoistway::objects::Error| Error::InvalidOption {
            option: "store",
            value: name.clone(),
            reason: error.problem.to_string(),
        };
        options.set(name, value).map_err(invalid).into_python(py)?;
    }
    Ok(options)
}

/// What the caller says, or else the environment.
fn chosen_lenient(py: Python<'_>, lenient: Option<bool>) -> PyResult<bool> {
    lenient.map_or_else(|| OpenOptions::lenient_from_env().into_python(py), Ok)
}
