//! Objects that belong to the process that opened them, and may take a while to end.
#![allow(unsafe_code)]

use crate::{
    error::{IntoPython, named},
    holder::holds_interpreter,
};
use hoistway::Error;
use pyo3::{exceptions::PyRuntimeError, ffi, prelude::*, sync::MutexExt, types::PyDict};
use std::{
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
    process, ptr,
    sync::{
        Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

/// How long a thread that takes step after step leaves a state to those that wait for it.
const TURN: Duration = Duration::from_millis(1);

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

/// A part whose end may take a while: the thread that drops it does not hold the interpreter meanwhile, as threads,
/// transfers and devices may have to be waited for, and locks may be taken. Any thread may drop it, also one that holds the
/// interpreter outside of the calls of this module, and while the interpreter ends.
pub(crate) struct Detached<T: Send>(ManuallyDrop<T>);

impl<T: Send> Detached<T> {
    pub(crate) fn new(part: T) -> Self {
        Self(ManuallyDrop::new(part))
    }

    pub(crate) fn into_inner(self) -> T {
        let mut guard = ManuallyDrop::new(self);
        // SAFETY: taken once, as `own` is not dropped.
        unsafe { ManuallyDrop::take(&mut guard.0) }
    }
}

impl<T: Send> DerefMut for Detached<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, and not used any more.
        let part = unsafe { ManuallyDrop::take(&mut self.0) };
        if has_interpreter() && holds_interpreter() {
            // Where it cannot attach, the closure is not called and drops the part.
            _ = Python::try_attach(move |py| py.detach(move || drop(part)));
        }
    }
}

/// A part that is tied to its process and dropped without the interpreter.
pub(crate) struct Owned<T: Send>(Detached<Tied<T>>);

impl<T: Send> Owned<T> {
    pub(crate) fn new(part: T) -> Self {
        Self(Detached::new(Tied::new(part)))
    }

    /// The part, in the process that it belongs to.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        self.0.get(py)
    }

    /// The part, if this is the process that it belongs to.
    pub(crate) fn here(&self) -> Option<&T> {
        Some(&self.0.part).filter(|_| self.0.process == process::id())
    }
}

/// A state that threads work on in short steps, so that each lets the others in: one that waits for a load, and those that
/// ask for its report meanwhile. Signal handlers, which may ask too, run [`between`](Self::between) steps. No step should run code of
/// Python's, as one that lets objects go does.
pub(crate) struct Stepwise<T> {
    state: Mutex<T>,
    /// The [`thread_mark`] of the thread that has the state, or 0.
    holder: AtomicUsize,
    /// Threads that wait for their turn.
    waiting: AtomicUsize,
    process: u32,
}

impl<T> Stepwise<T> {
    pub(crate) fn new(state: T) -> Self {
        let (holder, waiting) = Default::default();
        Self { state: Mutex::new(state), holder, waiting, process: process::id() }
    }

    /// Whether this process has the threads that work on it: a child of `fork` does not.
    pub(crate) fn is_own(&self) -> bool {
        self.process == process::id()
    }

    /// The state, once no other thread works on it. Fails in a thread that works on it already, further up.
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<Held<'_, T>> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The thread that has it is none of this process.
            Err(TryLockError::WouldBlock) if !self.is_own() => {
                return Err(forked(py).unwrap_or_else(|broken| broken));
            }
            Err(TryLockError::WouldBlock) if self.holder.load(Ordering::Relaxed) == thread_mark() => {
                return Err(PyRuntimeError::new_err("this load is in use by the call that this one runs in"));
            }
            Err(TryLockError::WouldBlock) => {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                let state = self.state.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                state
            }
        };
        self.holder.store(thread_mark(), Ordering::Relaxed);
        Ok(Held { state, holder: &self.holder })
    }

    /// Called between two steps, without the state: looks for Ctrl-C, and lets other threads in.
    pub(crate) fn between(&self, py: Python<'_>) -> PyResult<()> {
        py.check_signals()?;
        if self.waiting.load(Ordering::Relaxed) > 0 {
            py.detach(|| thread::sleep(TURN));
        }
        Ok(())
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A state that this thread works on.
pub(crate) struct Held<'a, T> {
    state: MutexGuard<'a, T>,
    holder: &'a AtomicUsize,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.state
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.state
    }
}

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        self.holder.store(0, Ordering::Relaxed);
    }
}

/// A number other than 0 that no other living thread has.
fn thread_mark() -> usize {
    thread_local! { static MARK: u8 = const { 0 }; }
    MARK.with(|mark| ptr::from_ref(mark).addr())
}

/// An object of Python's that any thread may drop: it is let go at once. That of `Py` alone would wait for the next call of
/// this module where a thread holds the interpreter outside of such calls, as those that drop other libraries' tensors do.
pub(crate) struct Attached(ManuallyDrop<Py<PyAny>>);

impl Attached {
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(ManuallyDrop::new(object))
    }

    pub(crate) fn get(&self) -> &Py<PyAny> {
        &self.0
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // SAFETY: taken once, and not used any more.
        let object = unsafe { ManuallyDrop::take(&mut self.0) };
        if !has_interpreter() {
            // A thread that Python does not know. Where it cannot attach, no interpreter is left to which the object belongs.
            _ = Python::try_attach(move |_py| drop(object));
            return;
        }
        // SAFETY: the interpreter runs. Its own count is asked, not that of this module's calls.
        let state = unsafe { ffi::PyGILState_Ensure() };
        // SAFETY: this thread holds the interpreter now; the reference is given up once.
        unsafe { ffi::Py_DecRef(object.into_ptr()) };
        // SAFETY: what was returned above.
        unsafe { ffi::PyGILState_Release(state) };
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
    let (sender, receiver) = mpsc::sync_channel(1);
    // After an interrupt no thread receives it.
    let thread = thread::Builder::new().name("hoistway-wait".into()).stack_size(crate::STACK_BYTES);
    let started = thread.spawn(move || sender.send(work()));
    started.map_err(|source| Error::System { operation: "starting a thread", source }).into_python(py)?;
    match crate::wait_for(py, receiver).1? {
        Some(result) => Ok(result),
        None => crate::panicked(py),
    }
}
