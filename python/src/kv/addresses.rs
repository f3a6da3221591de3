//! Memory that is named by addresses alone.
#![forbid(unsafe_code)]

use super::exported::{Rows, numbers};
use crate::error::IntoPython;
use hoistway::DeviceId;
use hoistway_kv::Piece;
use pyo3::{exceptions::PyValueError, prelude::*};

/// The memory of several blocks: the addresses and lengths of their pieces.
#[pyclass(frozen, module = "hoistway.kv", name = "Addresses")]
pub(crate) struct KvAddresses {
    addresses: Rows,
    sizes: Sizes,
    device: DeviceId,
    owner: Option<Py<PyAny>>,
}

#[derive(Debug)]
enum Sizes {
    /// Of every piece.
    All(u64),
    /// Of the pieces of each block.
    Columns(Vec<u64>),
    /// Of each piece of each block.
    Each(Vec<u64>),
}

#[pymethods]
impl KvAddresses {
    #[new]
    #[pyo3(signature = (addresses, sizes, device=None, owner=None))]
    fn new(
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let device = match device {
            Some(device) => device.str()?.to_str()?.parse::<DeviceId>().into_python(device.py())?,
            None => DeviceId::Cpu,
        };
        let addresses = rows("addresses", addresses)?;
        let sizes = sizes_of(&addresses, sizes)?;
        Ok(Self { addresses, sizes, device, owner })
    }

    /// How many blocks there is memory of.
    fn __len__(&self) -> usize {
        match self.addresses.columns {
            Some(0) => 0,
            columns => self.addresses.values.len() / columns.unwrap_or(1),
        }
    }

    /// The object that owns the memory.
    #[getter]
    fn owner(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.owner.as_ref().map(|owner| owner.clone_ref(py))
    }

    /// Where the memory is: `cpu`, or a device such as `cuda:0`.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }
}

impl KvAddresses {
    /// The pieces of each block.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Vec<Piece>> {
        let columns = self.addresses.columns.unwrap_or(1).max(1);
        self.addresses.values.chunks_exact(columns).enumerate().map(move |(row, addresses)| {
            let piece = |(column, &address): (usize, &u64)| {
                let len = match &self.sizes {
                    Sizes::All(len) => *len,
                    Sizes::Columns(lens) => lens[column],
                    Sizes::Each(lens) => lens[row * columns + column],
                };
                Piece::new(self.device, address, len)
            };
            addresses.iter().enumerate().map(piece).collect()
        })
    }
}

fn sizes_of(addresses: &Rows, sizes: &Bound<'_, PyAny>) -> PyResult<Sizes> {
    if let Ok(size) = sizes.extract::<u64>() {
        return Ok(Sizes::All(size));
    }
    let sizes = rows("sizes", sizes)?;
    match (addresses.columns, sizes.columns) {
        (Some(columns), None) if sizes.values.len() == columns => Ok(Sizes::Columns(sizes.values)),
        (columns, given) if given == columns && sizes.values.len() == addresses.values.len() => {
            Ok(Sizes::Each(sizes.values))
        }
        _ => Err(PyValueError::new_err(
            "sizes must be one number, one for each piece of a block, or an array of the shape of the addresses",
        )),
    }
}

/// Numbers from an array of 64-bit integers, or from lists.
fn rows(what: &str, values: &Bound<'_, PyAny>) -> PyResult<Rows> {
    if let Some(rows) = numbers(values)? {
        return Ok(rows);
    }
    if let Ok(values) = values.extract::<Vec<u64>>() {
        return Ok(Rows { values, columns: None });
    }
    let wrong = |_| {
        let message = format!(
            "{what} must be an array of uint64 with one or two dimensions, or lists of whole numbers"
        );
        PyValueError::new_err(message)
    };
    let lists: Vec<Vec<u64>> = values.extract().map_err(wrong)?;
    let columns = lists.first().map_or(0, Vec::len);
    if lists.iter().any(|list| list.len() != columns) {
        return Err(PyValueError::new_err(format!("{what} must have as many numbers for each block")));
    }
    Ok(Rows { values: lists.concat(), columns: Some(columns) })
}
