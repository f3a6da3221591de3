//! Reports on their way to Python.

use crate::error::IntoPython;
use pyo3::prelude::*;

/// What a load did. `hoistway.Report` shows it.
#[pyclass(frozen, module = "hoistway._native", name = "Report")]
pub(crate) struct NativeReport {
    pub(crate) report: hoistway::Report,
}

#[pymethods]
impl NativeReport {
    /// Everything, as JSON.
    fn json(&self, py: Python<'_>) -> PyResult<String> {
        serde_json::to_string(&self.report).into_python(py)
    }

    /// The same for people.
    fn text(&self) -> String {
        self.report.to_string()
    }

    /// This report and that of a later load of the same checkpoint, as one.
    fn merged(&self, later: &Self) -> Self {
        let mut report = self.report.clone();
        report.merge(&later.report);
        Self { report }
    }
}
