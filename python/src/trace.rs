//! Timelines of what the engine does, for `hoistway.trace`.

use crate::{cancellable, error::IntoPython as _};
use hoistway::{Cancel, Error};
use hoistway_trace::Timeline;
use pyo3::prelude::*;
use std::{
    path::PathBuf,
    sync::{LazyLock, Mutex, PoisonError},
};

/// Records what the subscriber of `log` sees.
static TIMELINE: LazyLock<Timeline> = LazyLock::new(Timeline::new);

pub(crate) fn timeline() -> &'static Timeline {
    &TIMELINE
}

/// A timeline that is recorded.
#[pyclass(frozen)]
pub(crate) struct Recording {
    path: PathBuf,
    recording: Mutex<Option<hoistway_trace::Recording>>,
}

#[pymethods]
impl Recording {
    /// Begins to record to a file.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let cancel = Cancel::default();
        let record = || {
            let recording = TIMELINE.record_while(&path, &|| !cancel.is_cancelled());
            recording.map_err(|source| match cancel.is_cancelled() {
                true => Error::Cancelled,
                false => failed(&path, source),
            })
        };
        let recording = cancellable(py, &cancel, record)?;
        Ok(Self { recording: Mutex::new(Some(recording)), path })
    }

    /// Ends the recording, and completes the file.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner).take();
        let finished = py.detach(|| recording.map_or(Ok(()), hoistway_trace::Recording::finish));
        finished.map_err(|source| failed(&self.path, source)).into_python(py)
    }
}

fn failed(path: &std::path::Path, source: std::io::Error) -> Error {
    Error::Io { operation: "write", path: path.to_owned(), tensor: None, range: None, source }
}
