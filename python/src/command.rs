//! The command `hoistway`, for the package's entry point.

use hoistway_cli::Invocation;
use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs the command with these arguments, and returns its exit code. Processes that it starts run `program`. Nothing
/// looks for Ctrl-C meanwhile: the caller leaves SIGINT to the system.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, program: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    crate::log::log_as_command();
    let timeline = crate::trace::timeline().clone();
    let invocation = Invocation { program, arguments, timeline };
    py.detach(|| hoistway_cli::run(&invocation))
}
