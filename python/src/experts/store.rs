//! Experts and dense tensors that are leased.
#![allow(unsafe_code)]

use super::catalog::ExpertCatalog;
use crate::{
    TICK,
    checkpoint::Checkpoint,
    error::IntoPython,
    options::{bytes_of, count_of, reader_options, seconds},
    process::{Owned, patiently},
    tensor::Tensor,
    view::{KeptTensor, Place},
};
use hoistway::{Cancel, DeviceId};
use hoistway_experts::{
    Error, ExpertId,
    backing::Backing,
    catalog::{ExpertCatalog as Catalog, UnitId},
    policy::{self, CatalogShape, LayerShape, PolicyInput, Profile},
    store::{Change, LeasedPart, Store, StoreOptions, Ticket},
    trace::{Trace, TraceOptions},
};
use pyo3::{prelude::*, types::PyDict};
use std::{
    fmt::Display,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// What happened to a layer's expert, or to the dense tensor of a name.
type Event = (String, Option<(u32, u32)>, Option<String>);

/// The slot of an expert, and role, component and tensor of each of its parts.
type Leased = (Option<u32>, Vec<(String, String, Tensor)>);

/// A store of experts. `hoistway.experts.ExpertStore` shows it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct ExpertStore {
    store: Owned<Store>,
    timeout: Duration,
}

#[pymethods]
impl ExpertStore {
    #[new]
    #[pyo3(signature = (checkpoint, catalog, **options))]
    fn new(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        catalog: &ExpertCatalog,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let (options, policy) = store_options(py, options)?;
        let (checkpoint, catalog) = (checkpoint.shared(), catalog.catalog.clone());
        let shape = if catalog.experts().is_empty() {
            // No policy is ever asked, so any shape serves.
            CatalogShape::new(1, vec![LayerShape { experts: 1, expert_bytes: 0 }])
        } else {
            CatalogShape::try_from(&*catalog)
        };
        let shape = shape.into_python(py)?;
        if let Some(path) = policy.profile.as_ref().filter(|_| catalog.experts().is_empty()) {
            let reason = "this model has no experts".to_owned();
            return Err(invalid_option("profile", path.display(), reason)).into_python(py);
        }
        let profile = policy.profile.as_deref().map(|path| profile_of(py, path, &shape)).transpose()?;
        let input = PolicyInput { shape: &shape, profile: profile.as_ref(), future: None };
        let policy = policy::by_name(&policy.name, input).into_python(py)?;
        let timeout = options.timeout;
        let cancel = Cancel::default();
        let ends = cancel.clone();
        let open =
            move || Store::open_until(&ends, catalog, Catalog::open_files(&checkpoint), policy, &options);
        // After Ctrl-C, a driver that allocates is not waited for: what it gives is given back.
        let opened = patiently(py, open).inspect_err(|_| cancel.cancel())?;
        Ok(Self { store: Owned::new(opened.into_python(py)?), timeout })
    }

    /// Starts to make experts of a layer resident.
    fn ensure(&self, py: Python<'_>, layer: u32, experts: Vec<u32>) -> PyResult<ExpertTicket> {
        let store = self.store.get(py)?;
        let ticket = py.detach(|| store.ensure_async(layer, &experts)).into_python(py)?;
        Ok(ExpertTicket::new(ticket, self.timeout))
    }

    /// Starts to make dense tensors resident.
    fn ensure_tensors(&self, py: Python<'_>, names: Vec<String>) -> PyResult<ExpertTicket> {
        let store = self.store.get(py)?;
        let ticket = py.detach(|| store.ensure_tensors_async(&names)).into_python(py)?;
        Ok(ExpertTicket::new(ticket, self.timeout))
    }

    /// Tells the policy what the router of a layer chose.
    fn observe(&self, py: Python<'_>, layer: u32, experts: Vec<(u32, f32)>) -> PyResult<()> {
        let store = self.store.get(py)?;
        py.detach(|| store.observe(layer, &experts)).into_python(py)
    }

    /// Starts to read experts that will probably be requested, unless they have not begun after so many seconds.
    #[pyo3(signature = (layer, experts, deadline=None))]
    fn prefetch(&self, py: Python<'_>, layer: u32, experts: Vec<u32>, deadline: Option<f64>) -> PyResult<()> {
        let store = self.store.get(py)?;
        let patience = deadline.map(|value| seconds("deadline", value)).transpose().into_python(py)?;
        let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
        py.detach(|| store.prefetch(layer, &experts, deadline)).into_python(py)
    }

    /// Drops prefetches of lower layers that have not begun.
    fn cancel_before(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        let store = self.store.get(py)?;
        py.detach(|| store.cancel_before(layer));
        Ok(())
    }

    /// Sets the budget.
    fn set_budget(&self, py: Python<'_>, budget: &Bound<'_, PyAny>) -> PyResult<()> {
        let store = self.store.get(py)?;
        let budget = bytes_of("budget", budget).into_python(py)?;
        py.detach(|| store.set_budget(budget)).into_python(py)
    }

    /// Whether an expert is resident.
    fn is_resident(&self, py: Python<'_>, layer: u32, expert: u32) -> PyResult<bool> {
        let store = self.store.get(py)?;
        py.detach(|| store.is_resident(ExpertId { layer, expert })).into_python(py)
    }

    /// Whether a dense tensor is resident.
    fn is_tensor_resident(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        let store = self.store.get(py)?;
        py.detach(|| store.is_tensor_resident(name)).into_python(py)
    }

    /// Evicts experts that are resident and not leased. Says how many.
    fn evict(&self, py: Python<'_>, layer: u32, experts: Vec<u32>) -> PyResult<usize> {
        let store = self.store.get(py)?;
        py.detach(|| store.evict(layer, &experts)).into_python(py)
    }

    /// Evicts dense tensors that are resident and not leased. Says how many.
    fn evict_tensors(&self, py: Python<'_>, names: Vec<String>) -> PyResult<usize> {
        let store = self.store.get(py)?;
        py.detach(|| store.evict_tensors(&names)).into_python(py)
    }

    /// Changes of residency since the last call, and how many older ones were lost.
    fn take_events(&self, py: Python<'_>) -> PyResult<(Vec<Event>, u64)> {
        let store = self.store.get(py)?;
        let (events, lost) = py.detach(|| store.take_events());
        let dense = store.catalog().dense();
        let described = events.into_iter().map(|event| {
            let change = match event.change {
                Change::Resident => "resident",
                Change::Evicted => "evicted",
            };
            let (expert, tensor) = match event.unit {
                UnitId::Expert(ExpertId { layer, expert }) => (Some((layer, expert)), None),
                UnitId::Dense(number) => {
                    let part = dense.get(number as usize).and_then(|unit| unit.parts().first());
                    (None, part.map(|part| part.tensor.to_string()))
                }
                _ => (None, None),
            };
            (change.to_owned(), expert, tensor)
        });
        Ok((described.collect(), lost))
    }

    /// The address of the first byte of a stacked tensor, with the backings `host_sparse` and `device_sparse`.
    fn tensor_address(&self, py: Python<'_>, name: &str) -> PyResult<Option<u64>> {
        Ok(self.store.get(py)?.tensor_address(name))
    }

    /// Bytes from one expert of a stacked tensor to the next.
    fn tensor_stride(&self, py: Python<'_>, name: &str) -> PyResult<Option<u64>> {
        Ok(self.store.get(py)?.tensor_stride(name))
    }

    /// What it has done and holds, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let store = self.store.get(py)?;
        let stats = py.detach(|| store.stats());
        let mut values = serde_json::to_value(&stats).into_python(py)?;
        if let Some(values) = values.as_object_mut() {
            values.insert("hit_rate".into(), stats.hit_rate().into());
            values.insert("faults_per_token".into(), stats.faults_per_token().into());
            values.insert("bytes_per_token".into(), stats.bytes_per_token().into());
            values.insert("stall_seconds".into(), stats.stall.as_secs_f64().into());
            values.remove("stall");
        }
        serde_json::to_string(&values).into_python(py)
    }
}

/// Names of policies that a store can have, the default first, and what each does.
#[pyfunction]
pub(crate) fn policies() -> Vec<(&'static str, &'static str)> {
    policy::names().filter_map(|name| Some((name, policy::about(name)?))).collect()
}

/// Experts or dense tensors that are being read, or leased. What shows their bytes keeps it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct ExpertTicket {
    ticket: Arc<Owned<Ticket>>,
    /// How long callers wait that do not say so.
    timeout: Duration,
    asked: Instant,
}

impl ExpertTicket {
    fn new(ticket: Ticket, timeout: Duration) -> Self {
        Self { ticket: Arc::new(Owned::new(ticket)), timeout, asked: Instant::now() }
    }

    /// Waits for units of the request until the store's timeout, or for so many seconds from now.
    fn wait_for(
        &self,
        py: Python<'_>,
        ticket: &Ticket,
        positions: Range<usize>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let timeout = timeout.map(|value| seconds("timeout", value)).transpose().into_python(py)?;
        let (start, timeout) = match timeout {
            Some(timeout) => (Instant::now(), timeout),
            None => (self.asked, self.timeout),
        };
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            let until = Instant::now() + left.min(TICK);
            let wait = || -> hoistway_experts::Result<()> {
                for position in positions.clone() {
                    ticket.wait_one(position, until.saturating_duration_since(Instant::now()))?;
                }
                Ok(())
            };
            match py.detach(wait) {
                Err(Error::TimedOut { .. } | Error::NoRoom { .. }) if left > TICK => py.check_signals()?,
                answer => return answer.into_python(py),
            }
        }
    }
}

#[pymethods]
impl ExpertTicket {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.ticket.get(py)?.len())
    }

    /// Whether the expert at a position of the request is resident.
    fn is_ready(&self, py: Python<'_>, position: usize) -> PyResult<bool> {
        let ticket = self.ticket.get(py)?;
        Ok(py.detach(|| ticket.is_ready(position)))
    }

    /// Waits until all are resident.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let ticket = self.ticket.get(py)?;
        self.wait_for(py, ticket, 0..ticket.len(), timeout)
    }

    /// Waits for the expert at a position of the request, and shows its parts.
    #[pyo3(signature = (position, timeout=None))]
    fn unit(&self, py: Python<'_>, position: usize, timeout: Option<f64>) -> PyResult<Leased> {
        let ticket = self.ticket.get(py)?;
        self.wait_for(py, ticket, position..position.saturating_add(1), timeout)?;
        let ready = ticket.wait_one(position, Duration::ZERO).into_python(py)?;
        let unit = ready.get();
        let part = |leased: LeasedPart<'_>| {
            let part = leased.part();
            (part.role.to_string(), part.component.to_string(), kept(leased, &self.ticket))
        };
        Ok((unit.slot(), unit.parts().map(part).collect()))
    }
}

/// A tensor that holds the request that its part is leased by.
fn kept(leased: LeasedPart<'_>, ticket: &Arc<Owned<Ticket>>) -> Tensor {
    let part = leased.part();
    let (device, address) = (leased.memory(), leased.address());
    let place = Place { device, address, len_bytes: part.bytes.len() };
    let (name, shape) = (part.tensor.clone(), part.shape.clone());
    // SAFETY: the part is resident, and the request pins it: its bytes stay as they are until the ticket is dropped. All that
    // lease the expert see the same ones.
    unsafe { KeptTensor::new(name, part.dtype, shape, place, true, ticket.clone()) }.into()
}

/// What a recorded trace says of the experts of a model.
fn profile_of(py: Python<'_>, path: &Path, shape: &CatalogShape) -> PyResult<Profile> {
    // Its sizes do not matter: the catalog says those.
    let options = TraceOptions { expert_bytes: Some(1) };
    let trace = py.detach(|| Trace::open(path, &options)).into_python(py)?;
    let experts_of = |layer: usize| shape.layers().get(layer).map_or(0, |layer| layer.experts);
    for (layer, LayerShape { experts, .. }) in trace.shape().layers().iter().enumerate() {
        let (traced, own) = (*experts, experts_of(layer));
        // A trace may lack layers, and those without a head may lack experts that no token used.
        if traced > own || traced > 0 && traced < own && trace.states_experts() {
            let reason =
                format!("it is a trace of another model: layer {layer} has {traced} experts, not {own}");
            return Err(invalid_option("profile", path.display(), reason)).into_python(py);
        }
    }
    Ok(Profile::new(shape, trace.visits().map(|visit| (visit.layer, visit.experts))))
}

fn invalid_option(option: &'static str, value: impl Display, reason: String) -> hoistway::Error {
    hoistway::Error::InvalidOption { option, value: value.to_string(), reason }
}

/// A policy by name, and the trace of `static-profile`.
struct PolicyChoice {
    name: String,
    profile: Option<PathBuf>,
}

fn store_options(
    py: Python<'_>,
    arguments: Option<&Bound<'_, PyDict>>,
) -> PyResult<(StoreOptions, PolicyChoice)> {
    let mut options = StoreOptions::default();
    let mut policy = PolicyChoice { name: policy::DEFAULT.to_owned(), profile: None };
    let (mut backing, mut device) = (None::<String>, DeviceId::Cpu);
    let reader = PyDict::new(py);
    for (name, value) in arguments.into_iter().flatten() {
        if value.is_none() {
            continue;
        }
        let key: String = name.extract()?;
        match key.as_str() {
            "budget" => options.budget_bytes = bytes_of("budget", &value).into_python(py)?,
            "policy" => policy.name = value.extract()?,
            "profile" => policy.profile = Some(value.extract()?),
            "backing" => backing = Some(value.extract()?),
            "device" => device = value.extract::<String>()?.parse::<DeviceId>().into_python(py)?,
            "batch" => options.batch_bytes = Some(bytes_of("batch", &value).into_python(py)?),
            "host_level" => {
                options.host_level_bytes = Some(bytes_of("host_level", &value).into_python(py)?);
            }
            "pad" => options.pad_slices = value.extract()?,
            "dense" => options.dense_bytes = Some(bytes_of("dense", &value).into_python(py)?),
            "timeout" => options.timeout = seconds("timeout", value.extract()?).into_python(py)?,
            "events" => options.events = count_of("events", &value)?,
            _ => reader.set_item(name, value)?,
        }
    }
    if let Some(profile) = policy.profile.as_ref().filter(|_| policy.name != "static-profile") {
        let reason = format!("policy {} has no use for it: leave it out", policy.name);
        return Err(invalid_option("profile", profile.display(), reason)).into_python(py);
    }
    options.reader = reader_options(options.reader, Some(&reader), py)?;
    options.backing = backing_of(backing.as_deref(), device).into_python(py)?;
    Ok((options, policy))
}

fn backing_of(name: Option<&str>, device: DeviceId) -> hoistway::Result<Backing> {
    let reason = match (name, device.is_host()) {
        (None | Some("host_slots"), true) => return Ok(Backing::HostSlots),
        (Some("host_sparse"), true) => return Ok(Backing::HostSparse),
        (None | Some("device_slots"), false) => return Ok(Backing::DeviceSlots(device)),
        (Some("device_sparse"), false) => return Ok(Backing::DeviceSparse(device)),
        (Some("host_slots" | "host_sparse"), false) => {
            format!("it is host memory, and the device is {device}")
        }
        (Some("device_slots" | "device_sparse"), true) => "it is memory of a device: name one".into(),
        _ => "it must be one of host_slots, host_sparse, device_slots, device_sparse".into(),
    };
    let value = name.unwrap_or_default().to_owned();
    Err(hoistway::Error::InvalidOption { option: "backing", value, reason })
}
