//! The command `windlass`, for the package's entry point.

use pyo3::prelude::*;
use std::ffi::OsString;
use windlass_cli::Invocation;

/// Runs the command with these arguments, and returns its exit code. Processes that it starts run `program`. Nothing
/// looks for Ctrl-C meanwhile: the caller leaves SIGINT to the system.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    crate::log::log_as_command();
    let invocation = Invocation { program, arguments };
    py.detach(|| windlass_cli::run(&invocation))
}
