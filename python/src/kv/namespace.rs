//! Requests to a namespace.
#![allow(unsafe_code)]

use super::{
    exported::Access,
    keys::{KeyBytes, keys},
    memory::Memory,
    ticket::KvTicket,
};
use crate::{
    error::IntoPython,
    options::seconds,
    process::{Owned, patiently},
};
use hoistway_kv::{Error, Fingerprint, Item, Key, Namespace, Notify, PinGuard, Priority, Request};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    intern,
    prelude::*,
};
use std::sync::{Mutex, PoisonError};

/// Keys that are looked up in some microseconds.
const FEW_KEYS: usize = 64;

/// A namespace of an open store. `hoistway.kv.Namespace` shows it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct KvNamespace {
    namespace: Owned<Namespace>,
}

impl KvNamespace {
    pub(super) fn new(namespace: Namespace) -> Self {
        Self { namespace: Owned::new(namespace) }
    }

    fn asked<T: Send>(
        &self,
        py: Python<'_>,
        names: &Bound<'_, PyAny>,
        ask: impl FnOnce(&Namespace, &[KeyBytes]) -> hoistway_kv::Result<T> + Send,
    ) -> PyResult<T> {
        let namespace = self.namespace.get(py)?;
        let keys = keys(names)?;
        py.detach(|| ask(namespace, &keys)).into_python(py)
    }

    /// For lookups: those of few keys take less than others may keep this thread waiting for the interpreter.
    fn looked_up<T: Send>(
        &self,
        py: Python<'_>,
        names: &Bound<'_, PyAny>,
        ask: impl FnOnce(&Namespace, &[KeyBytes]) -> hoistway_kv::Result<T> + Send,
    ) -> PyResult<T> {
        let namespace = self.namespace.get(py)?;
        let keys = keys(names)?;
        if keys.len() <= FEW_KEYS && !namespace.lookups_wait() {
            ask(namespace, &keys).into_python(py)
        } else {
            py.detach(|| ask(namespace, &keys)).into_python(py)
        }
    }
}

#[pymethods]
impl KvNamespace {
    /// Its identity.
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.namespace.get(py)?.id().to_string())
    }

    /// What a block is called in listings.
    fn fingerprint(&self, py: Python<'_>, key: KeyBytes) -> PyResult<String> {
        Ok(Fingerprint::of(self.namespace.get(py)?.id(), key.as_ref()).to_string())
    }

    /// Whether blocks are there.
    fn lookup(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        self.looked_up(py, keys, |namespace, keys| namespace.lookup(keys))
    }

    /// How many of them, from the first on, are there without a gap.
    fn lookup_prefix(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.looked_up(py, keys, |namespace, keys| namespace.lookup_prefix(keys))
    }

    /// The last that is there, by its place.
    fn lookup_reverse(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        self.looked_up(py, keys, |namespace, keys| namespace.lookup_reverse(keys))
    }

    /// Notes that blocks were used.
    fn touch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        self.asked(py, keys, |namespace, keys| namespace.touch(keys))
    }

    /// Keeps blocks until the pins are released.
    fn pin(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<KvPins> {
        let guard = self.asked(py, keys, |namespace, keys| namespace.pin(keys))?;
        let pinned = guard.pinned().to_vec();
        Ok(KvPins { guard: Owned::new(Mutex::new(Some(guard))), pinned })
    }

    /// Removes blocks.
    fn delete(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.asked(py, keys, |namespace, keys| namespace.delete(keys))
    }

    /// Removes all blocks.
    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        let namespace = self.namespace.get(py)?.clone();
        patiently(py, move || namespace.clear())?.into_python(py)
    }

    /// Stores shards of blocks.
    #[pyo3(signature = (keys, buffers, *, shard=None, shards=1, shard_bytes=None, timeout=None, ttl=None, wait_event=None, priority=None, notify=false))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn store(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        shard: Option<&Bound<'_, PyAny>>,
        shards: u32,
        shard_bytes: Option<u64>,
        timeout: Option<f64>,
        ttl: Option<f64>,
        wait_event: Option<&Bound<'_, PyAny>>,
        priority: Option<&str>,
        notify: bool,
    ) -> PyResult<KvTicket> {
        let namespace = self.namespace.get(py)?;
        let mut request = request(keys, buffers, shard, wait_event, Access::Read)?;
        request.shards = shards;
        request.shard_len = shard_bytes;
        request.ttl = ttl.map(|ttl| seconds("ttl", ttl)).transpose().into_python(py)?;
        let request = with_manner(py, request, timeout, priority, notify)?;
        // SAFETY: the request keeps what the memory belongs to; callers are told to leave it alone.
        let ticket = py.detach(|| unsafe { namespace.store(request) }).into_python(py)?;
        Ok(KvTicket::new(ticket))
    }

    /// Loads shards of blocks.
    #[pyo3(signature = (keys, buffers, *, shard=None, timeout=None, wait_event=None, priority=None, notify=false))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn load(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        shard: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        wait_event: Option<&Bound<'_, PyAny>>,
        priority: Option<&str>,
        notify: bool,
    ) -> PyResult<KvTicket> {
        let namespace = self.namespace.get(py)?;
        let request = request(keys, buffers, shard, wait_event, Access::Write)?;
        let request = with_manner(py, request, timeout, priority, notify)?;
        // SAFETY: as in `store`; buffers that are read-only were refused.
        let ticket = py.detach(|| unsafe { namespace.load(request) }).into_python(py)?;
        Ok(KvTicket::new(ticket))
    }
}

/// The items of a request, and the event to wait for.
fn request(
    names: &Bound<'_, PyAny>,
    buffers: &Bound<'_, PyAny>,
    shard: Option<&Bound<'_, PyAny>>,
    wait_event: Option<&Bound<'_, PyAny>>,
    access: Access,
) -> PyResult<Request> {
    let py = names.py();
    let keys = keys(names)?;
    let shards = shards(shard, keys.len())?;
    let mut memory = Memory::of(buffers, keys.len(), access)?;
    let event = event(py, wait_event, &mut memory)?;
    let (pieces, keep) = memory.into_parts();
    let items = keys
        .iter()
        .zip(pieces)
        .enumerate()
        .map(|(number, (key, pieces))| Ok(Item::new(Key::new(key.as_ref())?, shards.of(number), pieces)));
    let items = items.collect::<hoistway_kv::Result<_>>().into_python(py)?;
    let mut request = Request::new(items, keep);
    request.wait_event = event;
    Ok(request)
}

fn with_manner(
    py: Python<'_>,
    mut request: Request,
    timeout: Option<f64>,
    priority: Option<&str>,
    notify: bool,
) -> PyResult<Request> {
    request.timeout = timeout.map(|value| seconds("timeout", value)).transpose().into_python(py)?;
    request.priority = priority.map(priority_of).transpose().into_python(py)?;
    request.notify = if notify { Notify::EventFd } else { Notify::Ticket };
    Ok(request)
}

fn priority_of(name: &str) -> hoistway_kv::Result<Priority> {
    match name {
        "demand" => Ok(Priority::Demand),
        "prefetch" => Ok(Priority::Prefetch),
        "background" => Ok(Priority::Background),
        _ => Err(Error::InvalidOption {
            option: "priority",
            value: name.to_owned(),
            reason: "it must be one of demand, prefetch, background".into(),
        }),
    }
}

/// The shards of the items.
enum Shards {
    Same(u32),
    Each(Vec<u32>),
}

impl Shards {
    fn of(&self, item: usize) -> u32 {
        match self {
            Self::Same(shard) => *shard,
            Self::Each(shards) => shards[item],
        }
    }
}

fn shards(shard: Option<&Bound<'_, PyAny>>, count: usize) -> PyResult<Shards> {
    let Some(shard) = shard else { return Ok(Shards::Same(0)) };
    if let Ok(shard) = shard.extract::<u32>() {
        return Ok(Shards::Same(shard));
    }
    let shards: Vec<u32> = shard.extract().map_err(|_| {
        PyTypeError::new_err("shard is the number of a shard, or a list of them: one for each key")
    })?;
    if shards.len() != count {
        let message = format!("there are {count} keys, and shards for {} of them", shards.len());
        return Err(PyValueError::new_err(message));
    }
    Ok(Shards::Each(shards))
}

/// The event that was given, or one that says when torch's work on the memory is done.
fn event(py: Python<'_>, given: Option<&Bound<'_, PyAny>>, memory: &mut Memory) -> PyResult<Option<u64>> {
    if let Some(event) = given {
        if let Ok(handle) = event.extract::<u64>() {
            return Ok(Some(handle));
        }
        let handle = event.getattr(intern!(py, "cuda_event"))?.extract()?;
        memory.keep_also(event.clone().unbind());
        return Ok(Some(handle));
    }
    let devices: Vec<i32> = memory.torch_devices().iter().copied().collect();
    if devices.is_empty() {
        return Ok(None);
    }
    let cuda = py.import("torch")?.getattr("cuda")?;
    let stream_of = |device: i32| cuda.call_method1("current_stream", (device,));
    if let [device] = devices[..] {
        let event = stream_of(device)?.call_method0("record_event")?;
        let handle = event.getattr(intern!(py, "cuda_event"))?.extract()?;
        memory.keep_also(event.unbind());
        return Ok(Some(handle));
    }
    for device in devices {
        stream_of(device)?.call_method0("synchronize")?;
    }
    Ok(None)
}

/// Pinned blocks: they are neither evicted nor deleted until this is released.
#[pyclass(frozen, module = "hoistway.kv", name = "Pins")]
pub(crate) struct KvPins {
    guard: Owned<Mutex<Option<PinGuard>>>,
    pinned: Vec<bool>,
}

#[pymethods]
impl KvPins {
    /// For each key, whether its block is pinned: the store had it.
    #[getter]
    fn pinned(&self) -> Vec<bool> {
        self.pinned.clone()
    }

    /// Unpins the blocks. A second call does nothing.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let guard = self.guard.get(py)?;
        py.detach(|| drop(guard.lock().unwrap_or_else(PoisonError::into_inner).take()));
        Ok(())
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.release(py)
    }
}
