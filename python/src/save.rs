//! Saving: tensors as Python hands them over, by the address of their bytes.
#![allow(unsafe_code)]

use crate::{bytes::store_options, error::IntoPython, interruptible, process::Detached};
use hoistway::{
    DeviceId, Dtype, Error,
    device::Device,
    save::{DeviceBytes, Encoded, FileLayout, SaveOptions, SaveReport, Sharding, TensorBytes, TensorData},
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict},
};
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    slice,
};

/// A tensor as the package describes it, which keeps it alive meanwhile.
#[derive(FromPyObject)]
pub(crate) struct Described {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    address: usize,
    nbytes: usize,
    device: String,
}

impl Described {
    fn data(&self) -> hoistway::Result<TensorData<'_>> {
        let dtype = dtype_named(&self.dtype)?;
        let bytes = match self.device.parse::<DeviceId>()? {
            DeviceId::Cpu if self.nbytes == 0 => TensorBytes::Host(&[]),
            DeviceId::Cpu => {
                let start = std::ptr::with_exposed_provenance::<u8>(self.address);
                // SAFETY: the package alone calls this: `_save` describes tensors that it holds until the call is over,
                // by the addresses and lengths that their frameworks give.
                TensorBytes::Host(unsafe { slice::from_raw_parts(start, self.nbytes) })
            }
            device => {
                let device = Device::open(device)?;
                // SAFETY: as above; frameworks number devices as the driver does.
                let bytes = unsafe { DeviceBytes::new(device, self.address as u64, self.nbytes as u64) };
                TensorBytes::Device(bytes)
            }
        };
        Ok(TensorData::new(&self.name, dtype, &self.shape, bytes))
    }
}

fn data(described: &[Described]) -> hoistway::Result<Vec<TensorData<'_>>> {
    described.iter().map(Described::data).collect()
}

/// Saves tensors to one file. Says how, as JSON and for people.
#[pyfunction]
#[pyo3(signature = (tensors, path, metadata, *, store=None, **options))]
pub(crate) fn save_file(
    py: Python<'_>,
    tensors: Vec<Described>,
    path: PathBuf,
    metadata: Option<BTreeMap<String, String>>,
    store: Option<HashMap<String, String>>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<(String, String)> {
    let options = with_store(py, options, store)?;
    let report = interruptible(py, |go_on| {
        hoistway::save::save(&path, &data(&tensors)?, metadata.as_ref(), &options, |_| go_on())
    })?;
    told(py, &report)
}

/// Saves tensors to shards and an index. Says how, as JSON and for people.
#[pyfunction]
#[pyo3(signature = (tensors, directory, metadata, *, max_shard_size, filename, store=None, **options))]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
pub(crate) fn save_sharded(
    py: Python<'_>,
    tensors: Vec<Described>,
    directory: PathBuf,
    metadata: Option<BTreeMap<String, String>>,
    max_shard_size: &Bound<'_, PyAny>,
    filename: String,
    store: Option<HashMap<String, String>>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<(String, String)> {
    let options = with_store(py, options, store)?;
    let mut sharding = Sharding::default().file_name(filename);
    sharding.set_max_shard_size(&max_shard_size.str()?.to_string()).into_python(py)?;
    let report = interruptible(py, |go_on| {
        let tensors = data(&tensors)?;
        let metadata = metadata.as_ref();
        hoistway::save::save_sharded(&directory, &tensors, metadata, &sharding, &options, |_| go_on())
    })?;
    told(py, &report)
}

/// The bytes of the file of these tensors.
#[pyfunction]
pub(crate) fn save_bytes<'py>(
    py: Python<'py>,
    tensors: Vec<Described>,
    metadata: Option<BTreeMap<String, String>>,
) -> PyResult<Bound<'py, PyBytes>> {
    // Dropped without the interpreter, too: it has streams of the devices.
    let tensors = Detached::new(py.detach(|| data(&tensors)).into_python(py)?);
    let encoded = py.detach(|| Encoded::new(&tensors, metadata.as_ref())).into_python(py)?;
    let encoded = Detached::new(encoded);
    let len = usize::try_from(encoded.len_bytes())?;
    PyBytes::new_with(py, len, |bytes| py.detach(|| encoded.write_to(bytes)).into_python(py))
}

/// The header of a file, where the bytes of each tensor begin and end, and the file's length.
type PlannedFile<'py> = (Bound<'py, PyBytes>, Vec<(u64, u64)>, u64);

/// Plans the file of tensors of these names, types and shapes.
#[pyfunction]
#[pyo3(signature = (tensors, metadata, **options))]
pub(crate) fn plan_file<'py>(
    py: Python<'py>,
    tensors: Vec<(String, String, Vec<u64>)>,
    metadata: Option<BTreeMap<String, String>>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<PlannedFile<'py>> {
    let options = save_options(py, options)?;
    let layout = py.detach(|| {
        let known = tensors.iter().map(|(name, dtype, shape)| Ok((&**name, dtype_named(dtype)?, &**shape)));
        FileLayout::new(&known.collect::<hoistway::Result<Vec<_>>>()?, metadata.as_ref(), &options)
    });
    let layout = layout.into_python(py)?;
    let ranges = layout.tensors.iter().map(|range| (range.start(), range.end())).collect();
    let header = PyBytes::new_with(py, layout.header.len(), |bytes| {
        bytes.copy_from_slice(&layout.header);
        Ok(())
    })?;
    Ok((header, ranges, layout.len))
}

fn dtype_named(name: &str) -> hoistway::Result<Dtype> {
    serde_json::from_value(name.into())
        .map_err(|_| Error::Internal(format!("'{name}' is not the name of a type")))
}

fn save_options(py: Python<'_>, arguments: Option<&Bound<'_, PyDict>>) -> PyResult<SaveOptions> {
    let mut options = SaveOptions::default();
    for (name, value) in arguments.into_iter().flatten() {
        if !value.is_none() {
            let name: String = name.extract()?;
            options.set(&name, &value.str()?.to_string()).into_python(py)?;
        }
    }
    Ok(options)
}

/// Options with those of a store, if the caller gives any.
fn with_store(
    py: Python<'_>,
    arguments: Option<&Bound<'_, PyDict>>,
    store: Option<HashMap<String, String>>,
) -> PyResult<SaveOptions> {
    let mut options = save_options(py, arguments)?;
    options.store = store.map(|store| store_options(py, Some(store))).transpose()?;
    Ok(options)
}

fn told(py: Python<'_>, report: &SaveReport) -> PyResult<(String, String)> {
    Ok((serde_json::to_string(report).into_python(py)?, report.to_string()))
}
