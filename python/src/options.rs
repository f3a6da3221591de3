//! Options, memory pools and allocators, as Python hands them over.
#![allow(unsafe_code)]

use crate::{
    error::IntoPython,
    process::{Attached, patiently},
};
use hoistway::{
    DeviceAllocator, Error, LoadOptions, Order, StreamOptions,
    memory::LentMemory,
    plan::{Selection, TensorSlice},
    read::ReaderOptions,
};
use pyo3::{
    exceptions::{PyOverflowError, PyTypeError},
    prelude::*,
    types::PyDict,
};
use std::{io, ops::Range, time::Duration};

/// Host memory that loads reuse for tensors. It is touched once, when the pool is made.
///
/// A child of `fork` keeps the tensors in it, and needs a pool of its own for its loads.
#[pyclass(frozen, module = "hoistway")]
pub(crate) struct MemoryPool {
    pub(crate) pool: hoistway::memory::MemoryPool,
}

#[pymethods]
impl MemoryPool {
    #[new]
    fn new(py: Python<'_>, size: &Bound<'_, PyAny>) -> PyResult<Self> {
        let bytes = bytes_of("size", size).into_python(py)?;
        // After Ctrl-C, what was being touched is touched and freed without the caller.
        let pool = patiently(py, move || hoistway::memory::MemoryPool::new(bytes))?.into_python(py)?;
        Ok(Self { pool })
    }

    /// Size of the pool in bytes.
    #[getter]
    fn capacity_bytes(&self) -> u64 {
        self.pool.capacity_bytes()
    }

    /// Bytes that no tensor holds.
    #[getter]
    fn free_bytes(&self) -> u64 {
        self.pool.free_bytes()
    }

    fn __repr__(&self) -> String {
        format!("MemoryPool({} of {} bytes free)", self.pool.free_bytes(), self.pool.capacity_bytes())
    }
}

/// Bytes from an int or from text such as `8GiB`.
pub(crate) fn bytes_of(option: &'static str, size: &Bound<'_, PyAny>) -> hoistway::Result<u64> {
    let mut options = LoadOptions::default();
    let text = size.str().map(|text| text.to_string()).unwrap_or_default();
    options.set("memory_budget", &text).map_err(|error| match error {
        Error::InvalidOption { value, reason, .. } => Error::InvalidOption { option, value, reason },
        other => other,
    })?;
    Ok(options.memory_budget_bytes.unwrap_or_default())
}

/// A number that an option counts. What none can be is an error of the option.
pub(crate) fn count_of<T: TryFrom<u64>>(option: &'static str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    let number = match value.extract::<u64>() {
        Ok(number) => T::try_from(number).ok(),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => None,
        Err(error) => return Err(error),
    };
    let number = number.ok_or_else(|| {
        let text = value.str().map(|text| text.to_string()).unwrap_or_default();
        let reason = if text.starts_with('-') { "it must not be negative" } else { "it is too large" };
        Error::InvalidOption { option, value: text, reason: reason.into() }
    });
    number.into_python(value.py())
}

/// Fails where a load with these options would.
#[pyfunction]
#[pyo3(signature = (**options))]
pub(crate) fn check_options(py: Python<'_>, options: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
    load_options(py, options).map(|_| ())
}

/// The options of a load: the environment's, changed by keyword arguments.
pub(crate) fn load_options(py: Python<'_>, arguments: Option<&Bound<'_, PyDict>>) -> PyResult<LoadOptions> {
    changed(LoadOptions::from_env().into_python(py)?, arguments, py)
}

/// The same for a load into memory of the caller's: what the environment says of memory of hoistway's own is about others.
pub(crate) fn fill_options(py: Python<'_>, arguments: Option<&Bound<'_, PyDict>>) -> PyResult<LoadOptions> {
    let LoadOptions { device, rings, populate, .. } = LoadOptions::default();
    let mut options = LoadOptions::from_env().into_python(py)?.without_memory();
    options.rings = rings;
    changed(options.device(device).populate(populate), arguments, py)
}

/// The same for a mapping, which allocates none.
pub(crate) fn map_options(py: Python<'_>, arguments: Option<&Bound<'_, PyDict>>) -> PyResult<LoadOptions> {
    changed(LoadOptions::from_env().into_python(py)?.without_memory(), arguments, py)
}

fn changed(
    mut options: LoadOptions,
    arguments: Option<&Bound<'_, PyDict>>,
    py: Python<'_>,
) -> PyResult<LoadOptions> {
    for (name, value) in arguments.into_iter().flatten() {
        let name: String = name.extract()?;
        if value.is_none() {
            continue;
        }
        match name.as_str() {
            "select" => options.selection = add_all(options.selection.none(), &value, Selection::select)?,
            "exclude" => options.selection = add_all(options.selection, &value, Selection::exclude)?,
            "slices" => {
                for (tensor, ranges) in value.cast::<PyDict>()? {
                    let ranges: Vec<(u64, u64)> = ranges.extract()?;
                    let ranges: Vec<Range<u64>> = ranges.into_iter().map(|(start, end)| start..end).collect();
                    options.selection =
                        options.selection.slice(tensor.extract::<String>()?, TensorSlice::new(ranges));
                }
            }
            "usrbio_directories" => options.usrbio_directories = value.extract()?,
            "allocator" => options.allocator = Some(allocator(value.unbind())),
            "pool" => options.pool = Some(value.cast::<MemoryPool>()?.get().pool.clone()),
            _ => options.set(&name, &value.str()?.to_string()).into_python(py)?,
        }
    }
    Ok(options)
}

/// The options of a reader: those given, changed by keyword arguments that are not `None`.
pub(crate) fn reader_options(
    mut options: ReaderOptions,
    arguments: Option<&Bound<'_, PyDict>>,
    py: Python<'_>,
) -> PyResult<ReaderOptions> {
    // Parses the options that loads have too.
    let mut parsed = LoadOptions::default();
    for (name, value) in arguments.into_iter().flatten() {
        let name: String = name.extract()?;
        if value.is_none() {
            continue;
        }
        match name.as_str() {
            "in_flight" => options.in_flight = value.extract()?,
            "usrbio_directories" => options.usrbio_directories = value.extract()?,
            "route" | "direct" | "usrbio" | "chunk" | "memory_budget" => {
                parsed.set(&name, &value.str()?.to_string()).into_python(py)?;
                match name.as_str() {
                    "route" => options.route = parsed.route,
                    "direct" => options.direct = parsed.direct,
                    "usrbio" => options.usrbio = parsed.usrbio,
                    "chunk" => options.chunk_bytes = parsed.chunk_bytes,
                    _ => options.memory_budget_bytes = parsed.memory_budget_bytes.unwrap_or_default(),
                }
            }
            _ => return Err(PyTypeError::new_err(format!("a reader has no option '{name}'"))),
        }
    }
    Ok(options)
}

/// A time in seconds that is not negative.
pub(crate) fn seconds(option: &'static str, seconds: f64) -> hoistway::Result<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| Error::InvalidOption {
        option,
        value: seconds.to_string(),
        reason: format!("it must be a time in seconds: {error}"),
    })
}

/// An order by its name.
pub(crate) fn order_of(name: &str) -> hoistway::Result<Order> {
    match name {
        "arrival" => Ok(Order::Arrival),
        "file" => Ok(Order::File),
        other => Err(Error::Internal(format!("the package asks for the order '{other}'"))),
    }
}

/// How a load hands its tensors out.
pub(crate) fn stream_options(
    order: &str,
    max_in_flight: Option<&Bound<'_, PyAny>>,
) -> hoistway::Result<StreamOptions> {
    let order = order_of(order)?;
    let mut options = StreamOptions::default().order(order);
    options.max_in_flight_bytes = max_in_flight.map(|size| bytes_of("max_in_flight", size)).transpose()?;
    Ok(options)
}

/// An allocator that calls `allocate(bytes)`, which returns an address, a stream, and what owns the memory.
fn allocator(allocate: Py<PyAny>) -> DeviceAllocator {
    let lend = move |bytes: u64| {
        Python::attach(|py| {
            let (address, stream, owner): (u64, usize, Py<PyAny>) =
                allocate.call1(py, (bytes,))?.extract(py)?;
            Ok(LentMemory::new(address, stream, Box::new(Attached::new(owner))))
        })
        .map_err(|error: PyErr| Error::Allocation {
            bytes,
            kind: "memory of the device by the allocator given",
            source: io::Error::other(error.to_string()),
        })
    };
    // SAFETY: the package passes functions of its own alone: `_frameworks` has that of torch, whose tensors are
    // memory of the device that the load goes to, own it, and follow the current stream.
    unsafe { DeviceAllocator::new(lend) }
}

fn add_all(
    selection: Selection,
    names: &Bound<'_, PyAny>,
    add: fn(Selection, String) -> Selection,
) -> PyResult<Selection> {
    Ok(names.extract::<Vec<String>>()?.into_iter().fold(selection, add))
}
