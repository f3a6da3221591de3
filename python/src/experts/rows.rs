//! Rows of tables larger than memory.
#![allow(unsafe_code)]

use crate::{
    checkpoint::Checkpoint,
    error::IntoPython,
    options::reader_options,
    process::{Owned, patiently},
    tensor::Tensor,
    view::{KeptTensor, Place},
};
use hoistway::{
    DeviceId, Dtype,
    read::{Reader, ReaderOptions},
};
use pyo3::{prelude::*, types::PyDict};
use std::sync::Arc;

/// Reads of rows of which each may be a few KiB: many at a time hide how long one takes.
const IN_FLIGHT: usize = 64;

/// A table in a checkpoint. `hoistway.experts.Rows` shows it.
#[pyclass(frozen, module = "hoistway._native")]
pub(crate) struct Rows {
    rows: Owned<hoistway_experts::rows::Rows>,
    name: Arc<str>,
    dtype: Dtype,
    /// The shape of one row.
    row_shape: Vec<u64>,
}

#[pymethods]
impl Rows {
    #[new]
    #[pyo3(signature = (checkpoint, table, **options))]
    fn new(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        table: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let options = reader_options(ReaderOptions::default().in_flight(IN_FLIGHT), options, py)?;
        let checkpoint = checkpoint.shared();
        let open = || {
            let reader = Arc::new(Reader::new(&options)?);
            hoistway_experts::rows::Rows::of_tensor(&reader, &checkpoint, table)
        };
        let rows = py.detach(open).into_python(py)?;
        let catalog = checkpoint.catalog();
        let id = catalog.find(table).ok_or_else(|| catalog.no_such_tensor(table)).into_python(py)?;
        let entry = catalog.tensor(id);
        let row_shape = entry.shape.get(1..).unwrap_or_default().to_vec();
        Ok(Self { rows: Owned::new(rows), name: entry.name.clone(), dtype: entry.dtype, row_shape })
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(usize::try_from(self.rows.get(py)?.len())?)
    }

    /// Bytes of a row.
    #[getter]
    fn row_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.rows.get(py)?.row_bytes())
    }

    /// Reads rows, as one tensor whose slowest dimension counts them in the order in which they were named.
    fn gather(&self, py: Python<'_>, rows: Vec<u64>) -> PyResult<Tensor> {
        let table = self.rows.get(py)?.clone();
        let count = rows.len() as u64;
        let gathered = patiently(py, move || -> hoistway_experts::Result<Vec<u8>> {
            let gathered = table.gather(&rows)?;
            let mut bytes = Vec::new();
            let len = gathered.iter().map(<[u8]>::len).sum();
            let no_memory = |_| hoistway::Error::Allocation {
                bytes: len as u64,
                kind: "memory for rows",
                source: std::io::ErrorKind::OutOfMemory.into(),
            };
            bytes.try_reserve_exact(len).map_err(no_memory)?;
            gathered.iter().for_each(|row| bytes.extend_from_slice(row));
            Ok(bytes)
        });
        let mut bytes = gathered?.into_python(py)?.into_boxed_slice();
        let mut shape = vec![count];
        shape.extend(&self.row_shape);
        let place = Place {
            device: DeviceId::Cpu,
            address: bytes.as_mut_ptr().expose_provenance() as u64,
            len_bytes: bytes.len() as u64,
        };
        // SAFETY: the box holds its bytes, which nothing else uses: a box that is moved leaves them where they are.
        let tensor = unsafe {
            KeptTensor::new(self.name.clone(), self.dtype, shape.into(), place, false, Arc::new(bytes))
        };
        Ok(tensor.into())
    }
}
