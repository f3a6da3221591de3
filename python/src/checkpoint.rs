//! Open checkpoints.
#![allow(unsafe_code)]

use crate::{
    bytes::open_options,
    cancellable,
    error::IntoPython,
    filling::{Filling, Targets},
    interruptible,
    key_values::{self, KeyValues},
    loading::Loading,
    options::{fill_options, load_options, map_options, order_of, stream_options},
    process::Detached,
    report::NativeReport,
    tensor::{Tensor, quantized_shape},
};
use hoistway::{
    Cancel, Route,
    catalog::SourceName,
    plan::{Plan, PlanOptions, PlannedTensor},
    verify::Manifest,
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    ffi::OsStr,
    ops::ControlFlow,
    path::PathBuf,
    sync::Arc,
};

/// Path, length, version of an object, and device, inode and modification time of a file of this machine.
type FileFacts<'a> = (&'a OsStr, u64, Option<&'a str>, Option<(u64, u64, i128)>);

/// Name, element type, shape, shape of the bytes of quantised elements, and size in bytes.
type Planned = (String, Cow<'static, str>, Vec<u64>, Option<Vec<u64>>, u64);

/// A checkpoint with its files open.
#[pyclass(frozen, module = "hoistway")]
pub(crate) struct Checkpoint {
    // Files that a device's library knows are made unknown to it.
    checkpoint: Detached<Arc<hoistway::Checkpoint>>,
}

impl Checkpoint {
    /// The open files, for what reads them as long as it likes.
    pub(crate) fn shared(&self) -> Arc<hoistway::Checkpoint> {
        Arc::clone(&self.checkpoint)
    }
}

#[pymethods]
impl Checkpoint {
    #[new]
    #[pyo3(signature = (paths, *, lenient=None, offset=0, store=None, cache=None))]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        lenient: Option<bool>,
        offset: u64,
        store: Option<HashMap<String, String>>,
        cache: Option<PathBuf>,
    ) -> PyResult<Self> {
        let options = open_options(py, lenient, offset, store, cache)?;
        let cancel = Cancel::default();
        let options = options.cancel(cancel.clone());
        let open = || hoistway::Checkpoint::open_with(&paths, &options);
        let is_url = |path: &PathBuf| matches!(SourceName::from(path.as_path()), SourceName::Url(_));
        // Only a server is waited for long enough that it matters.
        let checkpoint = match paths.iter().any(is_url) {
            true => cancellable(py, &cancel, open)?,
            false => py.detach(open).into_python(py)?,
        };
        Ok(Self { checkpoint: Detached::new(Arc::new(checkpoint)) })
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

    /// Element type and shape of a tensor, and how many elements along the last dimension belong together.
    fn info<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<(Cow<'static, str>, Bound<'py, PyTuple>, u64)> {
        let catalog = self.checkpoint.catalog();
        let Some(id) = catalog.find(name) else {
            return Err(catalog.no_such_tensor(name)).into_python(py);
        };
        let entry = catalog.tensor(id);
        Ok((entry.dtype.name(), PyTuple::new(py, &*entry.shape)?, entry.dtype.block_len()))
    }

    /// Fails if the file of a tensor has changed since it was opened.
    fn check_unchanged(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let catalog = self.checkpoint.catalog();
        let check = || match catalog.find(name) {
            Some(tensor) => self.checkpoint.check_unchanged(tensor),
            None => Err(catalog.no_such_tensor(name)),
        };
        py.detach(check).into_python(py)
    }

    /// The files, in order.
    fn files(&self) -> Vec<&OsStr> {
        self.checkpoint.catalog().files().iter().map(|file| file.source.as_path().as_os_str()).collect()
    }

    /// Of each file the name, the length, the version if it is an object (see `hoistway::Checkpoint::version`), and of a file of
    /// this machine the device, the inode and the modification time, as they were when it was opened.
    fn file_facts(&self) -> Vec<FileFacts<'_>> {
        let catalog = self.checkpoint.catalog();
        let facts = |id| {
            let file = catalog.file(id);
            let identity = self.checkpoint.read_file(id).and_then(|file| file.identity());
            let identity = identity.map(|file| (file.device(), file.inode(), file.modified_ns()));
            (file.source.as_path().as_os_str(), file.len, self.checkpoint.version(id), identity)
        };
        catalog.file_ids().map(facts).collect()
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
    /// takes them. Without either, its owner waits for all of them. Not for route `mapped`.
    #[pyo3(signature = (*, order=None, max_in_flight=None, **options))]
    fn start(
        &self,
        py: Python<'_>,
        order: Option<&str>,
        max_in_flight: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Loading> {
        let options = load_options(py, options)?;
        let is_loop = order.is_some() || max_in_flight.is_some();
        let stream = stream_options(order.unwrap_or("arrival"), max_in_flight).into_python(py)?;
        let start = || match is_loop {
            true => self.checkpoint.stream(&options, &stream),
            false => self.checkpoint.start(&options),
        };
        let loading = py.detach(start).into_python(py)?;
        Ok(Loading::new(loading))
    }

    /// What a load would deliver: of each tensor the name, the element type, the shape, that of its bytes if it is
    /// quantised, and the size in bytes.
    #[pyo3(signature = (**options))]
    fn planned(&self, py: Python<'_>, options: Option<&Bound<'_, PyDict>>) -> PyResult<Vec<Planned>> {
        let selection = load_options(py, options)?.selection;
        let catalog = self.checkpoint.catalog();
        let plan = || -> hoistway::Result<Vec<PlannedTensor>> {
            let requests = selection.resolve(catalog)?;
            let plan = Plan::new(catalog, &requests, &PlanOptions::default())?;
            let mut planned: Vec<_> = plan.tensors().to_vec();
            planned.sort_unstable_by_key(|planned| planned.tensor);
            Ok(planned)
        };
        let planned = py.detach(plan).into_python(py)?;
        let described = planned.into_iter().map(|planned| {
            let name = catalog.tensor(planned.tensor).name.to_string();
            let bytes_shape = quantized_shape(planned.dtype, &planned.shape);
            (name, planned.dtype.name(), planned.shape.into_vec(), bytes_shape, planned.place.len())
        });
        Ok(described.collect())
    }

    /// Starts a load into memory of the caller's: of each tensor that is selected, the device, address, size and
    /// owner of its target. The caller must not use the memory until the target is reported filled or the load has ended.
    #[pyo3(signature = (targets, *, order="arrival", **options))]
    fn fill(
        &self,
        py: Python<'_>,
        targets: Targets,
        order: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Filling> {
        let options = fill_options(py, options)?;
        let order = order_of(order).into_python(py)?;
        // SAFETY: only the package calls this, with addresses of what the owners hold, who live until the load has ended;
        // the documentation tells the caller not to use them.
        unsafe { Filling::start(py, &self.checkpoint, targets, &options, order) }
    }

    /// Maps tensors, and says how.
    #[pyo3(signature = (**options))]
    fn map(
        &self,
        py: Python<'_>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<(Vec<Tensor>, NativeReport)> {
        let mut options = map_options(py, options)?;
        options.route = Route::Mapped;
        let loaded = if options.populate {
            let cancel = Cancel::default();
            options.cancel = Some(cancel.clone());
            cancellable(py, &cancel, || self.checkpoint.load(&options))?
        } else {
            py.detach(|| self.checkpoint.load(&options)).into_python(py)?
        };
        let report = NativeReport { report: loaded.report().clone() };
        Ok((loaded.into_tensors().into_iter().map(Tensor::from).collect(), report))
    }

    /// Brings the files into the page cache. Says how, as JSON.
    fn warm(&self, py: Python<'_>) -> PyResult<String> {
        let report = interruptible(py, |go_on| self.checkpoint.warm(|_| go_on()))?;
        serde_json::to_string(&report).into_python(py)
    }

    /// Digest of each tensor, read a second way, as JSON.
    fn manifest(&self, py: Python<'_>) -> PyResult<String> {
        let cancel = Cancel::default();
        let go_on = |_| ControlFlow::Continue(());
        let manifest = cancellable(py, &cancel, || Manifest::of_until(&cancel, &self.checkpoint, go_on))?;
        serde_json::to_string(&manifest).into_python(py)
    }
}
