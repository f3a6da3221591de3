//! The native part of the Python package: checkpoints, loads, tensors, pools.
//!
//! Thin: the Python files beside it give these classes their friendly faces, and turn tensors into those of torch,
//! numpy and jax. Every wait releases the interpreter and looks for Ctrl-C.
#![deny(unsafe_code)]

mod checkpoint;
mod dlpack;
mod error;
mod loading;
mod options;
mod report;
mod tensor;

use pyo3::prelude::*;

/// The native part of windlass; use `windlass` itself.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::checkpoint::Checkpoint;
    #[pymodule_export]
    use super::loading::Loading;
    #[pymodule_export]
    use super::options::MemoryPool;
    #[pymodule_export]
    use super::report::NativeReport;
    #[pymodule_export]
    use super::tensor::{Tensor, to_torch};
    #[pymodule_export]
    use super::{doctor, version};
}

use crate::error::IntoPython;

/// Version of windlass.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// What this machine offers a load, as JSON.
#[pyfunction]
fn doctor(py: Python<'_>, paths: Vec<std::path::PathBuf>) -> PyResult<String> {
    let checks = py.detach(|| windlass::doctor::examine(&paths));
    serde_json::to_string(&checks).into_python(py)
}
