//! The native part of the Python package: checkpoints, loads, tensors, pools.
//!
//! Thin: the Python files beside it give these classes their friendly faces, and turn tensors into those of torch,
//! numpy and jax. Waits for storage release the interpreter; loading and saving files, warming and digesting look for Ctrl-C
//! meanwhile.
#![deny(unsafe_code)]

mod bytes;
mod checkpoint;
#[cfg(target_os = "linux")]
mod chunks;
mod command;
mod dlpack;
mod error;
mod experts;
mod filling;
mod holder;
mod key_values;
#[cfg(target_os = "linux")]
mod kv;
mod loading;
mod log;
mod options;
mod process;
mod reader;
mod report;
mod save;
mod tensor;
mod trace;
mod view;

use hoistway::Cancel;
use pyo3::{exceptions::PyRuntimeWarning, prelude::*};
use std::{
    ffi::CString,
    ops::ControlFlow,
    sync::{
        Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

/// Time between two looks for Ctrl-C and two calls of progress callbacks.
const TICK: Duration = Duration::from_millis(50);

/// Bytes of the stack of threads that work for Python. `RUST_MIN_STACK` may give others too little.
const STACK_BYTES: usize = 2 << 20;

/// The native part of hoistway; use `hoistway` itself.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::bytes::{load_bytes, parse_header};
    #[pymodule_export]
    use super::checkpoint::Checkpoint;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use super::chunks::{ChunkReader, mount_point_of_3fs, mount_points_of_3fs, probe_3fs};
    #[pymodule_export]
    use super::command::run_command;
    #[pymodule_export]
    use super::experts::{
        ExpertCatalog, ExpertStore, ExpertTicket, LayerStream, Rows, numbered_layers, policies,
    };
    #[pymodule_export]
    use super::filling::Filling;
    #[pymodule_export]
    use super::key_values::NativeArray;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use super::kv::{
        KvAddresses, KvCompletion, KvNamespace, KvPins, KvRegion, KvStore, KvTicket, join_metrics,
    };
    #[pymodule_export]
    use super::loading::Loading;
    #[pymodule_export]
    use super::log::{pause_log, reset_log, resume_log, start_log, stop_log, take_log};
    #[pymodule_export]
    use super::options::{MemoryPool, check_options};
    #[cfg(feature = "stand-in")]
    #[pymodule_export]
    use super::panic_at_work;
    #[pymodule_export]
    use super::reader::{Reader, Reading};
    #[pymodule_export]
    use super::report::NativeReport;
    #[pymodule_export]
    use super::save::{plan_file, save_bytes, save_file, save_sharded};
    #[pymodule_export]
    use super::tensor::{Tensor, to_torch};
    #[pymodule_export]
    use super::trace::Recording;
    #[pymodule_export]
    use super::{
        doctor, is_remote, load_metrics, memory_limits, release_devices, search_libraries_in, version,
    };
    use pyo3::prelude::*;

    #[pymodule_init]
    fn start(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::holder::find(module.py())
    }
}

use crate::error::IntoPython;

/// What the loads of this process have done, as OpenMetrics text.
#[pyfunction]
fn load_metrics() -> String {
    hoistway::metrics()
}

/// The length of one wait of a caller that waits so many seconds in all, or without limit.
fn tick(patience: Option<f64>) -> Duration {
    patience.map_or(TICK, |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default().min(TICK))
}

/// Does work on another thread while this one looks for Ctrl-C, after which the work is told to break off.
fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&(dyn Fn() -> ControlFlow<()> + Sync)) -> hoistway::Result<T> + Send,
) -> PyResult<T> {
    let cancel = Cancel::default();
    let go_on = || if cancel.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    cancellable(py, &cancel, || work(&go_on))
}

/// Does work on another thread while this one looks for Ctrl-C, which cancels the token that the work has.
fn cancellable<T: Send>(
    py: Python<'_>,
    cancel: &Cancel,
    work: impl FnOnce() -> hoistway::Result<T> + Send,
) -> PyResult<T> {
    let work = Mutex::new(Some(work));
    let take_work = || work.lock().unwrap_or_else(PoisonError::into_inner).take();
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::sync_channel(1);
        let take_work = &take_work;
        let started = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, move || {
            if let Some(work) = take_work() {
                let _ = sender.send(work());
            }
        });
        let Ok(worker) = started else {
            // The system gives no thread: this one works, and looks for Ctrl-C afterwards.
            return match take_work() {
                Some(work) => py.detach(work).into_python(py),
                None => panicked(py),
            };
        };
        let (receiver, outcome) = wait_for(py, receiver);
        if outcome.is_err() {
            cancel.cancel();
        }
        // Joined here: the scope would wait with the interpreter held, and would panic after a panic.
        let _ = py.detach(|| worker.join());
        match outcome {
            Ok(Some(result)) => result.into_python(py),
            Ok(None) => panicked(py),
            Err(interrupt) => {
                // What came of the work meanwhile is dropped without the interpreter.
                let late = py.detach(move || receiver.try_recv().ok().and_then(Result::err));
                late.iter().for_each(|error| warn_of(py, error));
                Err(interrupt)
            }
        }
    })
}

/// Warns of what Ctrl-C leaves behind: work that was cancelled for nothing else says no more than that.
fn warn_of(py: Python<'_>, error: &hoistway::Error) {
    if matches!(error, hoistway::Error::Cancelled) {
        return;
    }
    let text = format!("after the interrupt: {error}").replace('\0', " ");
    let Ok(text) = CString::new(text) else { return };
    // A filter may make an error of it; the interrupt is what is raised.
    if let Err(raised) = PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &text, 1) {
        raised.write_unraisable(py, None);
    }
}

/// Waits for what a thread sends, `None` if it ends without, and looks for Ctrl-C. Gives back what receives.
fn wait_for<T: Send>(py: Python<'_>, mut receiver: Receiver<T>) -> (Receiver<T>, PyResult<Option<T>>) {
    loop {
        // Receivers cannot be shared, so this one is lent to the waits one by one.
        let (lent, received) = py.detach(move || {
            let received = receiver.recv_timeout(TICK);
            (receiver, received)
        });
        receiver = lent;
        match received {
            Ok(result) => return (receiver, Ok(Some(result))),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(interrupt) = py.check_signals() {
                    return (receiver, Err(interrupt));
                }
            }
            Err(RecvTimeoutError::Disconnected) => return (receiver, Ok(None)),
        }
    }
}

fn panicked<T>(py: Python<'_>) -> PyResult<T> {
    Err(hoistway::Error::Internal("the work panicked".into())).into_python(py)
}

/// Version of hoistway.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Looks for the libraries of devices' vendors in this directory too.
#[pyfunction]
fn search_libraries_in(directory: std::path::PathBuf) {
    hoistway::device::search_libraries_in(directory);
}

/// Lets the devices go that nothing uses, with their contexts. After Ctrl-C that goes on without the caller.
#[pyfunction]
fn release_devices(py: Python<'_>) -> PyResult<()> {
    process::patiently(py, hoistway::device::release_devices)
}

/// What becomes of work that panics on a thread which looks for Ctrl-C or, if it is not `cancellable`, on one that waits.
#[cfg(feature = "stand-in")]
#[pyfunction]
fn panic_at_work(py: Python<'_>, is_cancellable: bool) -> PyResult<()> {
    let work = || -> hoistway::Result<()> { std::panic::resume_unwind(Box::new("a test wants it so")) };
    if is_cancellable {
        cancellable(py, &Cancel::default(), work)
    } else {
        process::patiently(py, work)?.into_python(py)
    }
}

/// The limits on the memory of this process, as JSON.
#[pyfunction]
fn memory_limits(py: Python<'_>) -> PyResult<String> {
    serde_json::to_string(&py.detach(hoistway::memory::limits)).into_python(py)
}

/// Whether a path lies on a file system that other machines may share.
#[pyfunction]
fn is_remote(py: Python<'_>, path: std::path::PathBuf) -> PyResult<bool> {
    let answer = py.detach(|| hoistway::route::is_remote(&std::fs::File::open(path)?));
    Ok(answer?)
}

/// What this machine offers a load, as JSON.
#[pyfunction]
#[pyo3(signature = (paths, store = None))]
fn doctor(
    py: Python<'_>,
    paths: Vec<std::path::PathBuf>,
    store: Option<std::collections::HashMap<String, String>>,
) -> PyResult<String> {
    let options = bytes::open_options(py, Some(false), 0, store, None)?;
    let checks = process::patiently(py, move || hoistway::doctor::examine_with(&paths, &options))?;
    serde_json::to_string(&checks).into_python(py)
}
