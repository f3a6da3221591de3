//! A line of JSON for each copy and kernel that a stream executed.

use super::settings::Unacceptable;
use std::{
    fs::File,
    io::Write,
    path::Path,
    process,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Where the lines go, if anywhere.
#[derive(Default)]
pub(crate) struct Trace {
    active: AtomicBool,
    file: Mutex<Option<File>>,
}

/// One executed operation. Times are those of CLOCK_MONOTONIC.
pub(crate) struct Line<'a> {
    pub(crate) device: usize,
    pub(crate) stream: u64,
    pub(crate) operation: &'a str,
    pub(crate) bytes: u64,
    pub(crate) begin_ns: u64,
    pub(crate) end_ns: u64,
}

fn append_to(path: &Path) -> Result<File, Unacceptable> {
    File::options().append(true).create(true).open(path).map_err(|_| Unacceptable)
}

impl Trace {
    /// Appends to the file at `path` from now on, or to one of this process in the folder there, or writes nowhere if it is
    /// empty.
    pub(crate) fn redirect(&self, path: &str) -> Result<(), Unacceptable> {
        let file = match Path::new(path) {
            _ if path.is_empty() => None,
            folder if folder.is_dir() => Some(append_to(&folder.join(process::id().to_string()))?),
            file => Some(append_to(file)?),
        };
        self.active.store(file.is_some(), Ordering::Relaxed);
        *self.file.lock().unwrap_or_else(PoisonError::into_inner) = file;
        Ok(())
    }

    pub(crate) fn write(&self, line: &Line<'_>) {
        if !self.active.load(Ordering::Relaxed) {
            return;
        }
        let Line { device, stream, operation, bytes, begin_ns, end_ns } = line;
        let text = format!(
            "{{\"stream\":{stream},\"op\":\"{operation}\",\"bytes\":{bytes},\"begin_ns\":{begin_ns},\
             \"end_ns\":{end_ns},\"device\":{device}}}\n"
        );
        if let Some(file) = self.file.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            // A full disk costs the trace a line and the test its proof, but not the copy.
            let _ = file.write_all(text.as_bytes());
        }
    }
}
