//! What is tied to the process that opened it, and may take a while to end.
#![allow(unsafe_code)]

use crate::error::{IntoPython, named};
use pyo3::{ffi, prelude::*, types::PyDict};
use std::{
    process,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
};

/// A part of a store or reader, which a child of `fork` cannot use.
pub(crate) struct Tied<T> {
    process: u32,
    part: T,
}

impl<T> Tied<T> {
    pub(crate) fn new(part: T) -> Self {
        Self { process: process::id(), part }
    }

    /// The part, in the process that it belongs to.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        if self.process == process::id() {
            Ok(&self.part)
        } else {
            Err(forked(py).unwrap_or_else(|broken| broken))
        }
    }
}

/// The same of a part whose end may take a while: the thread that drops it does not hold the interpreter meanwhile, as threads
/// and transfers may have to end, and locks may be taken. Any thread may drop it, also while the interpreter ends.
pub(crate) struct Owned<T: Send> {
    /// `None` in `drop` alone.
    part: Option<Tied<T>>,
}

impl<T: Send> Owned<T> {
    pub(crate) fn new(part: T) -> Self {
        Self { part: Some(Tied::new(part)) }
    }

    /// The part, in the process that it belongs to.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        match &self.part {
            Some(part) => part.get(py),
            None => Err(forked(py).unwrap_or_else(|broken| broken)),
        }
    }
}

impl<T: Send> Drop for Owned<T> {
    fn drop(&mut self) {
        let part = self.part.take();
        if has_interpreter() {
            // Where it cannot attach, the closure is not called and drops the part.
            _ = Python::try_attach(move |py| py.detach(move || drop(part)));
        }
    }
}

/// Whether this thread may hold the interpreter. A thread that Python has not seen does not, so it need not wait for it.
fn has_interpreter() -> bool {
    // SAFETY: both may be called by any thread, at any time, before and after the life of the interpreter.
    unsafe { ffi::Py_IsInitialized() != 0 && !ffi::PyGILState_GetThisThreadState().is_null() }
}

fn forked(py: Python<'_>) -> PyResult<PyErr> {
    let message = "this was opened before the process was forked off: open it again in this one";
    named("ForkedError", py, message, &PyDict::new(py))
}

/// Waits for what cannot be broken off, on a thread of its own, and looks for Ctrl-C: after one, the work goes on.
pub(crate) fn patiently<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, mut receiver) = mpsc::sync_channel(1);
    // After an interrupt no thread receives it.
    let thread = thread::Builder::new().name("hoistway-wait".into()).stack_size(crate::STACK_BYTES);
    thread.spawn(move || sender.send(work()))?;
    loop {
        // Receivers cannot be shared, so this one is lent to the waits one by one.
        let (lent, received) = py.detach(move || {
            let received = receiver.recv_timeout(crate::TICK);
            (receiver, received)
        });
        receiver = lent;
        match received {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(hoistway::Error::Internal("the work panicked".into())).into_python(py);
            }
        }
    }
}
