//! A load in progress, waited for without holding the interpreter.

use crate::{TICK, error::IntoPython, process::Detached, report::NativeReport, tensor::Tensor, tick};
use hoistway::{Arrival, Report};
use pyo3::{exceptions::PyRuntimeError, prelude::*};
use std::{
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    time::Instant,
};

/// A load in progress.
#[pyclass(frozen, module = "hoistway")]
pub(crate) struct Loading {
    // Python objects are shared between threads; a load has one owner at a time.
    state: Mutex<State>,
}

enum State {
    Running(Box<hoistway::Loading>),
    /// Over, with all its memory given back but for the tensors that were handed out.
    Ended(Box<Report>),
}

impl State {
    /// Ends a load that is still running, and waits for its threads.
    fn end(&mut self, py: Python<'_>) {
        if let Self::Running(loading) = self {
            let loading = &mut **loading;
            let report = Box::new(py.detach(|| {
                loading.cancel();
                loading.report()
            }));
            let ended = std::mem::replace(self, Self::Ended(report));
            py.detach(|| drop(ended));
        }
    }
}

impl Loading {
    pub(crate) fn new(loading: hoistway::Loading) -> Self {
        Self { state: Mutex::new(State::Running(Box::new(loading))) }
    }

    /// The load, if no other thread is waiting for it.
    fn lock(&self) -> PyResult<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::Poisoned(poisoned)) => Ok(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => {
                Err(PyRuntimeError::new_err("another thread is waiting for this load"))
            }
        }
    }

    /// Works on the running load. Whatever goes wrong, Ctrl-C and callbacks included, ends it.
    fn with_running<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut hoistway::Loading) -> PyResult<T>,
    ) -> PyResult<T> {
        let mut state = self.lock()?;
        let State::Running(loading) = &mut *state else {
            return Err(PyRuntimeError::new_err("this load has ended"));
        };
        work(loading).inspect_err(|_| state.end(py))
    }
}

#[pymethods]
impl Loading {
    /// The next tensors to be handed out, at most `most`: waits for one, and takes what is there besides. None once there
    /// are no more; `None` if there is none after `patience` seconds.
    #[pyo3(signature = (most=1, patience=None))]
    fn next(&self, py: Python<'_>, most: usize, patience: Option<f64>) -> PyResult<Option<Vec<Tensor>>> {
        self.with_running(py, |loading| {
            loop {
                let arrival = py.detach(|| loading.next_within(tick(patience))).into_python(py)?;
                py.check_signals()?;
                match arrival {
                    Arrival::Tensor(tensor) => {
                        let others =
                            std::iter::from_fn(|| loading.next_arrived()).take(most.saturating_sub(1));
                        let tensors = std::iter::once(tensor).chain(others);
                        return Ok(Some(tensors.map(Tensor::from).collect()));
                    }
                    Arrival::Pending if patience.is_some() => return Ok(None),
                    Arrival::Pending => {}
                    Arrival::Finished => return Ok(Some(Vec::new())),
                }
            }
        })
    }

    /// All tensors that were not handed out yet, in the order of the checkpoint. Calls `progress(bytes_done, bytes_total)` now and then.
    #[pyo3(signature = (progress=None))]
    fn wait(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<Vec<Tensor>> {
        self.with_running(py, |loading| {
            // An interrupt drops them.
            let mut tensors = Detached::new(Vec::new());
            let mut told = u64::MAX;
            loop {
                let finished = py.detach(|| drain(loading, &mut tensors)).into_python(py)?;
                py.check_signals()?;
                if let Some(progress) = &progress {
                    let state = loading.progress();
                    if state.bytes_done != told {
                        told = state.bytes_done;
                        progress.call1(py, (state.bytes_done, state.bytes_total))?;
                    }
                }
                if finished {
                    // The same order in every process: code that iterates a dictionary on many ranks relies on it.
                    tensors.sort_by_key(hoistway::Tensor::id);
                    return Ok(tensors.into_inner().into_iter().map(Tensor::from).collect());
                }
            }
        })
    }

    /// What was loaded so far, in bytes, and in all.
    fn progress(&self) -> PyResult<(u64, u64)> {
        Ok(match &*self.lock()? {
            State::Running(loading) => (loading.progress().bytes_done, loading.progress().bytes_total),
            State::Ended(report) => {
                let done = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
                (done, report.tensor_bytes)
            }
        })
    }

    /// Ends the load early and waits for its threads.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.lock()?.end(py);
        Ok(())
    }

    /// What the load did.
    fn report(&self, py: Python<'_>) -> PyResult<NativeReport> {
        let report = match &mut *self.lock()? {
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
        if let Ok(state) = self.state.get_mut()
            && matches!(state, State::Running(_))
        {
            Python::attach(|py| state.end(py));
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
