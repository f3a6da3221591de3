//! A load in progress, waited for without holding the interpreter.

use crate::{error::IntoPython, report::NativeReport, tensor::Tensor};
use pyo3::{exceptions::PyRuntimeError, prelude::*};
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use windlass::Arrival;

/// Time between two looks for Ctrl-C and two calls of the progress callback.
const TICK: Duration = Duration::from_millis(50);

/// A load in progress.
#[pyclass(frozen, module = "windlass")]
pub(crate) struct Loading {
    // Python objects are shared between threads; a load has one owner at a time.
    loading: Mutex<windlass::Loading>,
}

impl Loading {
    pub(crate) fn new(loading: windlass::Loading) -> Self {
        Self { loading: Mutex::new(loading) }
    }

    /// The load, if no other thread is waiting for it.
    fn lock(&self) -> PyResult<MutexGuard<'_, windlass::Loading>> {
        match self.loading.try_lock() {
            Ok(loading) => Ok(loading),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Ok(PoisonError::into_inner(poisoned)),
            Err(std::sync::TryLockError::WouldBlock) => {
                Err(PyRuntimeError::new_err("another thread is waiting for this load"))
            }
        }
    }

    /// Waits one tick; passes on Ctrl-C, after having stopped the load.
    fn tick(py: Python<'_>, loading: &mut windlass::Loading) -> PyResult<Arrival> {
        let arrival = py.detach(|| loading.next_within(TICK)).into_python(py)?;
        if let Err(interrupt) = py.check_signals() {
            py.detach(|| loading.cancel());
            return Err(interrupt);
        }
        Ok(arrival)
    }
}

#[pymethods]
impl Loading {
    /// The next tensor to become complete; `None` once all are.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Tensor>> {
        let loading = &mut *self.lock()?;
        loop {
            match Self::tick(py, loading)? {
                Arrival::Tensor(tensor) => return Ok(Some(Tensor { tensor })),
                Arrival::Pending => {}
                Arrival::Finished => return Ok(None),
            }
        }
    }

    /// All tensors that were not handed out yet. Calls `progress(bytes_done, bytes_total)` now and then.
    #[pyo3(signature = (progress=None))]
    fn wait(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<Vec<Tensor>> {
        let loading = &mut *self.lock()?;
        let mut tensors = Vec::new();
        let mut told = u64::MAX;
        loop {
            let arrival = match &progress {
                // Nothing to do between tensors: one wait for many.
                None => py.detach(|| Self::drain(loading, &mut tensors)).into_python(py)?,
                Some(_) => Self::tick(py, loading)?,
            };
            py.check_signals().inspect_err(|_| py.detach(|| loading.cancel()))?;
            let finished = matches!(arrival, Arrival::Finished);
            if let Arrival::Tensor(tensor) = arrival {
                tensors.push(Tensor { tensor });
            }
            if let Some(progress) = &progress {
                let state = loading.progress();
                if state.bytes_done != told {
                    told = state.bytes_done;
                    progress.call1(py, (state.bytes_done, state.bytes_total))?;
                }
            }
            if finished {
                return Ok(tensors);
            }
        }
    }

    /// What was loaded so far, in bytes, and in all.
    fn progress(&self) -> PyResult<(u64, u64)> {
        let progress = self.lock()?.progress();
        Ok((progress.bytes_done, progress.bytes_total))
    }

    /// Ends the load early and waits for its threads.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let loading = &mut *self.lock()?;
        py.detach(|| {
            loading.cancel();
            while let Ok(Arrival::Tensor(_) | Arrival::Pending) = loading.next_within(TICK) {}
        });
        Ok(())
    }

    /// What the load did.
    fn report(&self) -> PyResult<NativeReport> {
        Ok(NativeReport { report: self.lock()?.report() })
    }
}

impl Loading {
    /// Collects tensors for up to a tick.
    fn drain(loading: &mut windlass::Loading, tensors: &mut Vec<Tensor>) -> windlass::Result<Arrival> {
        let started = std::time::Instant::now();
        loop {
            let left = TICK.saturating_sub(started.elapsed());
            match loading.next_within(left)? {
                Arrival::Tensor(tensor) if !left.is_zero() => tensors.push(Tensor { tensor }),
                other => return Ok(other),
            }
        }
    }
}
