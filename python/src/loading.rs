//! A load in progress, waited for without holding the interpreter.

use crate::{
    TICK,
    error::IntoPython,
    process::{Detached, Stepwise},
    report::NativeReport,
    tensor::Tensor,
    tick,
};
use hoistway::{Arrival, Error, Report};
use pyo3::prelude::*;
use std::time::Instant;

/// A load in progress.
#[pyclass(frozen, module = "hoistway")]
pub(crate) struct Loading {
    state: Stepwise<State>,
}

enum State {
    Running(Box<hoistway::Loading>),
    /// Over, with all its memory given back but for the tensors that were handed out.
    Ended(Box<Report>),
}

impl State {
    /// Ends a load that is still running, and waits for its threads. Returns what is left of it, which the caller drops once it has
    /// given the state back: that may let objects of Python's go, and run their code.
    #[must_use]
    fn end(&mut self, py: Python<'_>) -> Option<Detached<Self>> {
        let Self::Running(loading) = self else { return None };
        let loading = &mut **loading;
        let report = Box::new(py.detach(|| {
            loading.cancel();
            loading.report()
        }));
        Some(Detached::new(std::mem::replace(self, Self::Ended(report))))
    }
}

impl Loading {
    pub(crate) fn new(loading: hoistway::Loading) -> Self {
        Self { state: Stepwise::new(State::Running(Box::new(loading))) }
    }

    /// Takes a step of the running load. Whatever goes wrong ends it.
    fn step<T: Send>(
        &self,
        py: Python<'_>,
        step: impl FnOnce(&mut hoistway::Loading) -> hoistway::Result<T> + Send,
    ) -> PyResult<T> {
        let mut state = self.state.lock(py)?;
        let stepped = match &mut *state {
            State::Running(loading) => py.detach(|| step(loading)),
            State::Ended(_) => Err(Error::Cancelled),
        };
        let ended = if stepped.is_err() { state.end(py) } else { None };
        // Before code of Python's runs, and signal handlers with it, which may ask for the report.
        drop(state);
        drop(ended);
        stepped.into_python(py)
    }

    /// Ends the load if something went wrong between its steps: Ctrl-C, or a callback.
    fn ended_by<T>(&self, py: Python<'_>, result: PyResult<T>) -> PyResult<T> {
        result.inspect_err(|_| {
            let ended = self.state.lock(py).map(|mut state| state.end(py));
            drop(ended);
        })
    }
}

#[pymethods]
impl Loading {
    /// The next tensors to be handed out, at most `most`: waits for one, and takes what is there besides. None once there
    /// are no more; `None` if there is none after `patience` seconds.
    #[pyo3(signature = (most=1, patience=None))]
    fn next(&self, py: Python<'_>, most: usize, patience: Option<f64>) -> PyResult<Option<Vec<Tensor>>> {
        loop {
            let arrived = self.step(py, |loading| {
                Ok(match loading.next_within(tick(patience))? {
                    Arrival::Tensor(tensor) => {
                        let others =
                            std::iter::from_fn(|| loading.next_arrived()).take(most.saturating_sub(1));
                        Some(std::iter::once(tensor).chain(others).collect())
                    }
                    Arrival::Pending => None,
                    Arrival::Finished => Some(Vec::new()),
                })
            })?;
            // An interrupt drops them.
            let arrived: Option<Detached<Vec<_>>> = arrived.map(Detached::new);
            self.ended_by(py, self.state.between(py))?;
            match arrived {
                Some(tensors) => {
                    return Ok(Some(tensors.into_inner().into_iter().map(Tensor::from).collect()));
                }
                None if patience.is_some() => return Ok(None),
                None => {}
            }
        }
    }

    /// All tensors that were not handed out yet, in the order of the checkpoint. Calls `progress(bytes_done, bytes_total)` now and then.
    #[pyo3(signature = (progress=None))]
    fn wait(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<Vec<Tensor>> {
        // An interrupt drops them.
        let mut tensors = Detached::new(Vec::new());
        let mut told = u64::MAX;
        loop {
            let arrived = &mut *tensors;
            let (finished, state) =
                self.step(py, |loading| Ok((drain(loading, arrived)?, loading.progress())))?;
            self.ended_by(py, self.state.between(py))?;
            if let Some(progress) = &progress
                && state.bytes_done != told
            {
                told = state.bytes_done;
                self.ended_by(py, progress.call1(py, (state.bytes_done, state.bytes_total)))?;
            }
            if finished {
                // The same order in every process: code that iterates a dictionary on many ranks relies on it.
                tensors.sort_by_key(hoistway::Tensor::id);
                return Ok(tensors.into_inner().into_iter().map(Tensor::from).collect());
            }
        }
    }

    /// What was loaded so far, in bytes, and in all.
    fn progress(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        Ok(match &*self.state.lock(py)? {
            State::Running(loading) => (loading.progress().bytes_done, loading.progress().bytes_total),
            State::Ended(report) => {
                let done = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
                (done, report.tensor_bytes)
            }
        })
    }

    /// Ends the load early and waits for its threads. A child of `fork` has none to wait for.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        if !self.state.is_own() {
            return Ok(());
        }
        let ended = self.state.lock(py)?.end(py);
        drop(ended);
        Ok(())
    }

    /// What the load did.
    fn report(&self, py: Python<'_>) -> PyResult<NativeReport> {
        let report = match &mut *self.state.lock(py)? {
            // It may ask a device's library what it has counted.
            State::Running(loading) => {
                let loading = &mut **loading;
                py.detach(|| loading.report())
            }
            State::Ended(report) => (**report).clone(),
        };
        Ok(NativeReport { report })
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        // Threads that end may take a while, and other Python threads should not have to wait for them.
        let state = self.state.get_mut();
        if matches!(state, State::Running(_)) {
            Python::attach(|py| drop(state.end(py)));
        }
    }
}

/// Collects tensors for up to a tick. `true` once there are no more.
fn drain(loading: &mut hoistway::Loading, tensors: &mut Vec<hoistway::Tensor>) -> hoistway::Result<bool> {
    let started = Instant::now();
    loop {
        let left = TICK.saturating_sub(started.elapsed());
        match loading.next_within(left)? {
            Arrival::Tensor(tensor) => tensors.push(tensor),
            Arrival::Pending => return Ok(false),
            Arrival::Finished => return Ok(true),
        }
        if left.is_zero() {
            return Ok(false);
        }
    }
}
