//! Requests under way, and how they ended.
#![forbid(unsafe_code)]

use crate::{TICK, error::IntoPython, options::seconds, process::Tied};
use hoistway::counted;
use hoistway_kv::{Completion, Error, Ticket};
use pyo3::prelude::*;
use std::{collections::BTreeMap, time::Instant};

/// A request under way. `hoistway.kv.Ticket` shows it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct KvTicket {
    /// Nothing happens when it is dropped: the request goes on.
    ticket: Tied<Ticket>,
}

impl KvTicket {
    pub(super) fn new(ticket: Ticket) -> Self {
        Self { ticket: Tied::new(ticket) }
    }
}

#[pymethods]
impl KvTicket {
    /// Its number.
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.ticket.get(py)?.id())
    }

    /// How it ended; `None` if it has not.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<KvCompletion>> {
        let ticket = self.ticket.get(py)?;
        // Engines ask often, and who lets the interpreter go may wait long for it. This never does.
        Ok(ticket.poll().map(KvCompletion::from))
    }

    /// Whether nothing reads or writes the memory any more.
    fn released(&self, py: Python<'_>) -> PyResult<bool> {
        let ticket = self.ticket.get(py)?;
        Ok(ticket.is_released())
    }

    /// Whether it will stay unknown if the memory is free.
    fn lost(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.ticket.get(py)?.is_lost())
    }

    /// Ends it now. Whether it had not ended before.
    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        let ticket = self.ticket.get(py)?;
        Ok(py.detach(|| ticket.cancel()))
    }

    /// Waits for its end.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<KvCompletion> {
        let ticket = self.ticket.get(py)?;
        let timeout = timeout.map(|value| seconds("timeout", value)).transpose().into_python(py)?;
        let start = Instant::now();
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            let tick = left.map_or(TICK, |left| left.min(TICK));
            match py.detach(|| ticket.wait(Some(tick))) {
                Ok(completion) => return Ok(completion.into()),
                Err(Error::TimedOut { what, .. }) => {
                    py.check_signals()?;
                    if left.is_some_and(|left| left <= TICK) {
                        let waited_ms = start.elapsed().as_millis();
                        return Err(Error::TimedOut { what, waited_ms }).into_python(py);
                    }
                }
                Err(error) => return Err(error).into_python(py),
            }
        }
    }
}

/// How a request ended.
#[pyclass(frozen, module = "hoistway.kv", name = "Completion")]
pub(crate) struct KvCompletion {
    completion: Completion,
}

impl From<Completion> for KvCompletion {
    fn from(completion: Completion) -> Self {
        Self { completion }
    }
}

#[pymethods]
impl KvCompletion {
    /// The number of the ticket.
    #[getter]
    fn ticket(&self) -> u64 {
        self.completion.ticket
    }

    /// How each item ended, by name.
    #[getter]
    fn statuses(&self) -> Vec<String> {
        self.completion.items.iter().map(ToString::to_string).collect()
    }

    /// For each item, whether it was delivered or is in the store.
    #[getter]
    fn succeeded(&self) -> Vec<bool> {
        self.completion.items.iter().map(|status| status.is_ok()).collect()
    }

    /// Whether all items succeeded.
    #[getter]
    fn ok(&self) -> bool {
        self.completion.is_ok()
    }

    /// Bytes that were delivered or stored.
    #[getter]
    fn bytes(&self) -> u64 {
        self.completion.bytes
    }

    /// Bytes that its transfers moved, by route.
    #[getter]
    fn carried(&self) -> BTreeMap<String, u64> {
        self.completion.carried.iter().map(|(carrier, bytes)| (carrier.to_string(), *bytes)).collect()
    }

    /// The part of `bytes` that a load read from the far tier.
    #[getter]
    fn far_bytes(&self) -> u64 {
        self.completion.far_bytes
    }

    /// Number of blocks that a store did not write to the far tier.
    #[getter]
    fn far_missing(&self) -> u64 {
        self.completion.far_missing
    }

    /// Bytes that passed through staging memory of the store.
    #[getter]
    fn bounced_bytes(&self) -> u64 {
        self.completion.bounced_bytes
    }

    /// Seconds before the first byte moved.
    #[getter]
    fn queued(&self) -> f64 {
        self.completion.queued.as_secs_f64()
    }

    /// Seconds from the first byte to the end.
    #[getter]
    fn moving(&self) -> f64 {
        self.completion.moving.as_secs_f64()
    }

    fn __repr__(&self) -> String {
        let Completion { ticket, items, bytes, .. } = &self.completion;
        let succeeded = items.iter().filter(|status| status.is_ok()).count();
        let (count, bytes) = (items.len(), counted(*bytes, "byte", "bytes"));
        match items.iter().find(|status| !status.is_ok()) {
            None => format!("Completion(ticket {ticket}: {count} ok, {bytes})"),
            Some(status) => {
                format!(
                    "Completion(ticket {ticket}: {succeeded} of {count} ok, the first other {status}, {bytes})"
                )
            }
        }
    }
}
