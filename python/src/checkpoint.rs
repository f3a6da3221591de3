//! Open checkpoints.

use crate::{
    error::IntoPython,
    interruptible,
    key_values::{self, KeyValues},
    loading::Loading,
    options::{load_options, stream_options},
    report::NativeReport,
    tensor::Tensor,
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};
use std::{borrow::Cow, collections::BTreeMap, path::PathBuf};
use windlass::{Route, catalog::OpenOptions, verify::Manifest};

/// A checkpoint with its files open.
#[pyclass(frozen, module = "windlass")]
pub(crate) struct Checkpoint {
    checkpoint: windlass::Checkpoint,
}

#[pymethods]
impl Checkpoint {
    #[new]
    #[pyo3(signature = (paths, *, lenient=None, offset=0))]
    fn new(py: Python<'_>, paths: Vec<PathBuf>, lenient: Option<bool>, offset: u64) -> PyResult<Self> {
        let lenient = match lenient {
            Some(lenient) => lenient,
            None => OpenOptions::from_env().into_python(py)?.lenient,
        };
        let options = OpenOptions { lenient, offset };
        let open = || windlass::Checkpoint::open_with(&paths, &options);
        let checkpoint = py.detach(open).into_python(py)?;
        Ok(Self { checkpoint })
    }

    /// Names of the tensors, in the order of the checkpoint.
    fn keys(&self) -> Vec<&str> {
        self.checkpoint.catalog().tensors().iter().map(|tensor| &*tensor.name).collect()
    }

    /// Whether there is a tensor of this name.
    fn __contains__(&self, name: &str) -> bool {
        self.checkpoint.catalog().find(name).is_some()
    }

    fn __len__(&self) -> usize {
        self.checkpoint.catalog().tensors().len()
    }

    /// Element type, shape and file of a tensor, and how many elements along the last dimension belong together.
    fn info<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<(Cow<'static, str>, Bound<'py, PyTuple>, PathBuf, u64)> {
        let catalog = self.checkpoint.catalog();
        let Some(id) = catalog.find(name) else {
            return Err(catalog.no_such_tensor(name)).into_python(py);
        };
        let entry = catalog.tensor(id);
        let path = catalog.file(entry.file).path.clone();
        Ok((entry.dtype.name(), PyTuple::new(py, &*entry.shape)?, path, entry.dtype.block_len()))
    }

    /// The files, in order.
    fn files(&self) -> Vec<PathBuf> {
        self.checkpoint.catalog().files().iter().map(|file| file.path.clone()).collect()
    }

    /// The files' `__metadata__`; `None` if there is none.
    fn metadata(&self) -> Option<BTreeMap<String, String>> {
        self.checkpoint.catalog().metadata()
    }

    /// Keys and values of GGUF files; `None` if there is no such file.
    fn key_values<'py>(&self, py: Python<'py>) -> PyResult<Option<KeyValues<'py>>> {
        key_values::key_values(py, &self.checkpoint)
    }

    /// Starts a load whose tensors are handed out in an order, `arrival` or `file`, at most so many bytes ahead of who
    /// takes them. Not for route `mapped`.
    #[pyo3(signature = (*, order="arrival", max_in_flight=None, **options))]
    fn start(
        &self,
        py: Python<'_>,
        order: &str,
        max_in_flight: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Loading> {
        let options = load_options(py, options)?;
        let stream = stream_options(order, max_in_flight).into_python(py)?;
        let loading = py.detach(|| self.checkpoint.stream(&options, &stream)).into_python(py)?;
        Ok(Loading::new(loading))
    }

    /// Maps tensors, and says how.
    #[pyo3(signature = (**options))]
    fn map(
        &self,
        py: Python<'_>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<(Vec<Tensor>, NativeReport)> {
        let mut options = load_options(py, options)?;
        options.route = Route::Mapped;
        let loaded = py.detach(|| self.checkpoint.load(&options)).into_python(py)?;
        let report = NativeReport { report: loaded.report().clone() };
        Ok((loaded.into_tensors().into_iter().map(|tensor| Tensor { tensor }).collect(), report))
    }

    /// Brings the files into the page cache. Says how, as JSON.
    fn warm(&self, py: Python<'_>) -> PyResult<String> {
        let report = interruptible(py, |go_on| self.checkpoint.warm(|_| go_on()))?;
        serde_json::to_string(&report).into_python(py)
    }

    /// Digest of each tensor, read a second way, as JSON.
    fn manifest(&self, py: Python<'_>) -> PyResult<String> {
        let manifest = interruptible(py, |go_on| Manifest::of(&self.checkpoint, |_| go_on()))?;
        serde_json::to_string(&manifest).into_python(py)
    }
}
