//! Open stores.
#![allow(unsafe_code)]

use super::{
    exported::Access,
    memory::Memory,
    namespace::KvNamespace,
    options::{namespace, store_options},
    ticket::KvCompletion,
};
use crate::{
    error::IntoPython,
    options::seconds,
    process::{Owned, patiently},
};
use hoistway::DeviceId;
use hoistway_kv::{Evicted, KeepAlive, Region, Store};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList},
};
use std::{os::fd::AsRawFd, path::PathBuf, ptr};

/// An open store. `hoistway.kv.Store` shows it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct KvStore {
    store: Owned<Store>,
}

#[pymethods]
impl KvStore {
    #[new]
    #[pyo3(signature = (root, **options))]
    fn new(py: Python<'_>, root: PathBuf, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let options = store_options(py, root, options)?;
        let store = patiently(py, || Store::open(options))?.into_python(py)?;
        Ok(Self { store: Owned::new(store) })
    }

    /// Its directory.
    #[getter]
    fn root(&self, py: Python<'_>) -> PyResult<PathBuf> {
        Ok(self.store.get(py)?.root().to_owned())
    }

    /// Opens a namespace.
    #[pyo3(signature = (**description))]
    fn namespace(&self, py: Python<'_>, description: Option<&Bound<'_, PyDict>>) -> PyResult<KvNamespace> {
        let (description, options) = namespace(py, description)?;
        let store = self.store.get(py)?;
        let namespace = py.detach(|| store.namespace(&description, options)).into_python(py)?;
        Ok(KvNamespace::new(namespace))
    }

    /// Identity and description of each namespace that the store has; the description as JSON.
    fn namespaces(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        let store = self.store.get(py)?;
        let namespaces = py.detach(|| store.namespaces()).into_python(py)?;
        Ok(namespaces.into_iter().map(|(id, description)| (id.to_string(), description)).collect())
    }

    /// Makes memory known ahead, and holds it until the region is dropped.
    fn register(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<KvRegion> {
        let store = self.store.get(py)?;
        let memory = Memory::of(PyList::new(py, [buffer])?.as_any(), 1, Access::Write)?;
        let (items, owner) = memory.into_parts();
        let mut regions = Vec::new();
        for piece in items.into_iter().flatten() {
            let region = match piece.device {
                DeviceId::Cpu => {
                    let (start, len) = (usize::try_from(piece.address)?, usize::try_from(piece.len)?);
                    py.detach(|| {
                        let start = ptr::with_exposed_provenance_mut(start);
                        // SAFETY: the region holds what the memory belongs to, and drops it after the registration.
                        unsafe { store.register_host(start, len) }
                    })
                }
                device => {
                    // SAFETY: as above.
                    py.detach(|| unsafe { store.register_device(device, piece.address, piece.len) })
                }
            };
            regions.push(region.into_python(py)?);
        }
        Ok(KvRegion { memory: Owned::new((regions, owner)) })
    }

    /// A descriptor that can be read while completions wait.
    fn event_fd(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.store.get(py)?.event_fd().as_raw_fd())
    }

    /// The completions of requests with `notify` since the last call.
    fn drain_completions(&self, py: Python<'_>) -> PyResult<Vec<KvCompletion>> {
        let store = self.store.get(py)?;
        let completions = py.detach(|| store.drain_completions());
        Ok(completions.into_iter().map(KvCompletion::from).collect())
    }

    /// What it holds and did, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let store = self.store.get(py)?;
        let stats = py.detach(|| store.stats()).into_python(py)?;
        serde_json::to_string(&stats).into_python(py)
    }

    /// The same, as Prometheus wants it.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let store = self.store.get(py)?;
        py.detach(|| store.metrics()).into_python(py)
    }

    /// How it works, as JSON.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        let store = self.store.get(py)?;
        let report = py.detach(|| store.report()).into_python(py)?;
        serde_json::to_string(&report).into_python(py)
    }

    /// What happened since the last call, as JSON.
    fn events(&self, py: Python<'_>) -> PyResult<String> {
        let store = self.store.get(py)?;
        let events = py.detach(|| store.events());
        serde_json::to_string(&events).into_python(py)
    }

    /// Waits for all requests to store that were made before.
    #[pyo3(signature = (timeout=None))]
    fn flush(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = timeout.map(|value| seconds("timeout", value)).transpose().into_python(py)?;
        let store = self.store.get(py)?.clone();
        patiently(py, move || store.flush(timeout))?.into_python(py)
    }

    /// Ends it.
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = timeout.map(|value| seconds("timeout", value)).transpose().into_python(py)?;
        let store = self.store.get(py)?.clone();
        patiently(py, move || store.close(timeout))?.into_python(py)
    }

    /// Fingerprints of blocks of this process that were evicted, or have expired, since the last call; and how many
    /// others there were.
    fn evicted(&self, py: Python<'_>) -> PyResult<(Vec<String>, u64)> {
        let store = self.store.get(py)?;
        let named =
            |evicted: Evicted| (evicted.blocks.iter().map(ToString::to_string).collect(), evicted.forgotten);
        py.detach(|| store.evicted().map(named)).into_python(py)
    }

    /// Looks for blocks that other processes have stored.
    fn follow(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.store.get(py)?;
        py.detach(|| store.follow_now()).into_python(py)
    }

    /// Does now what is done now and then.
    fn maintain(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.store.get(py)?.clone();
        patiently(py, move || store.maintain_now())?.into_python(py)
    }
}

/// Memory that is registered with a store.
#[pyclass(frozen, module = "hoistway.kv", name = "Region")]
pub(crate) struct KvRegion {
    /// The registrations, then what the memory belongs to: fields of a tuple are dropped in this order.
    memory: Owned<(Vec<Region>, KeepAlive)>,
}

#[pymethods]
impl KvRegion {
    /// Whether its bytes move between the device and the drive without passing through host memory.
    #[getter]
    fn is_direct(&self, py: Python<'_>) -> PyResult<bool> {
        let (regions, _) = self.memory.get(py)?;
        Ok(!regions.is_empty() && py.detach(|| regions.iter().all(Region::is_direct)))
    }
}
