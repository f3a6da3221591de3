//! Loads into memory that belongs to objects of Python's.
#![allow(unsafe_code)]

use crate::{
    error::{IntoPython, exception_of},
    process::{Attached, Detached, Stepwise},
    report::NativeReport,
    tick,
};
use hoistway::{Checkpoint, DeviceId, Error, FillTarget, Filled, LoadOptions, Order, plan::Selection};
use pyo3::prelude::*;
use std::collections::HashMap;

/// Names of tensors, each with the device, address, size and owner of the memory that it goes to.
pub(crate) type Targets = HashMap<String, (String, u64, u64, Py<PyAny>)>;

/// A load into memory that its caller keeps alive and leaves alone until it has ended.
#[pyclass(frozen, module = "hoistway")]
pub(crate) struct Filling {
    state: Stepwise<State>,
}

struct State {
    filling: Detached<hoistway::Filling>,
    names: Vec<String>,
    /// They keep the memory as long as reads may be under way.
    owners: Vec<Attached>,
}

/// What an ended load leaves.
struct Ended {
    cancelled: Result<(), Error>,
    _owners: Vec<Attached>,
}

impl State {
    /// Ends it, and returns the owners if nothing writes to their memory any more; else they go when the devices tell so. Code of
    /// Python's runs when they are dropped, which may ask for the report: the caller gives the state back first.
    fn end(&mut self, py: Python<'_>) -> Ended {
        let cancelled = py.detach(|| self.filling.cancel());
        let mut owners = std::mem::take(&mut self.owners);
        if cancelled.is_err() && !owners.is_empty() {
            self.filling.set_aside(std::mem::take(&mut owners));
        }
        Ended { cancelled, _owners: owners }
    }
}

impl Filling {
    /// Starts to load what `options` select, which must be the tensors of `targets`.
    ///
    /// # Safety
    /// As for `hoistway::Checkpoint::fill`.
    pub(crate) unsafe fn start(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        mut targets: Targets,
        options: &LoadOptions,
        order: Order,
    ) -> PyResult<Self> {
        let requests = options.selection.resolve(checkpoint.catalog()).into_python(py)?;
        let (mut memory, mut names, mut owners) = (Vec::new(), Vec::new(), Vec::new());
        for request in requests {
            let name = checkpoint.catalog().tensor(request.tensor).name.to_string();
            let Some((device, address, len_bytes, owner)) = targets.remove(&name) else {
                return Err(Error::Internal(format!("tensor '{name}' has no target"))).into_python(py);
            };
            let device = device.parse::<DeviceId>().into_python(py)?;
            memory.push(FillTarget::new(request, device, address, len_bytes));
            owners.push(Attached::new(owner));
            names.push(name);
        }
        let options = options.clone().selection(Selection::all());
        // SAFETY: passed on.
        let fill = || unsafe { checkpoint.fill(&memory, &options, order) };
        let filling = py.detach(fill).into_python(py)?;
        Ok(Self { state: Stepwise::new(State { filling: Detached::new(filling), names, owners }) })
    }
}

#[pymethods]
impl Filling {
    /// The name of the next tensor whose target is filled, in a list that is empty once all are. `None` if none is after
    /// `patience` seconds. Whatever goes wrong ends it.
    #[pyo3(signature = (patience=None))]
    fn next(&self, py: Python<'_>, patience: Option<f64>) -> PyResult<Option<Vec<String>>> {
        let failed = loop {
            let mut state = self.state.lock(py)?;
            let State { filling, names, .. } = &mut *state;
            match py.detach(|| filling.next_or_failure(tick(patience))) {
                Ok(Filled::Target(number)) => {
                    return Ok(Some(names.get(number).cloned().into_iter().collect()));
                }
                Ok(Filled::Finished) => return Ok(Some(Vec::new())),
                Ok(Filled::Pending) => {}
                Err(error) => {
                    // Before code of Python's runs, and signal handlers with it, which may ask for the report.
                    drop(state);
                    break exception_of(py, &error);
                }
            }
            drop(state);
            if let Err(interrupted) = self.state.between(py) {
                break interrupted;
            }
            if patience.is_some() {
                return Ok(None);
            }
        };
        let ended = self.state.lock(py)?.end(py);
        if let Err(error) = &ended.cancelled {
            failed.set_cause(py, Some(exception_of(py, error)));
        }
        Err(failed)
    }

    /// Cancels the load, and waits until no write to the targets is in flight. A child of `fork` has none to wait for.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        if !self.state.is_own() {
            return Ok(());
        }
        let Ended { cancelled, _owners } = self.state.lock(py)?.end(py);
        cancelled.into_python(py)
    }

    /// What was done so far.
    fn report(&self, py: Python<'_>) -> PyResult<NativeReport> {
        let mut state = self.state.lock(py)?;
        let filling = &mut *state.filling;
        Ok(NativeReport { report: py.detach(|| filling.report()) })
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        // Reads that end may take a while, and other Python threads should not have to wait for them.
        if let Err(error) = Python::attach(|py| state.end(py).cancelled) {
            tracing::warn!(%error, "what owns the memory is kept, as it is not known whether a device still writes to it");
        }
    }
}
