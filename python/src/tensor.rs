//! Tensors, and how they reach torch in bulk.

use crate::{
    dlpack::{self, Exported},
    error::{IntoPython, unsupported_dtype},
    process::Detached,
    view::View,
};
use hoistway::{DeviceId, Dtype};
use pyo3::{
    exceptions::{PyAttributeError, PyBufferError, PyValueError},
    prelude::*,
    types::{PyBytes, PyDict, PyList, PySlice, PyTuple},
};
use std::borrow::Cow;

/// One tensor in memory. A view of its bytes keeps them alive.
#[pyclass(frozen, module = "hoistway")]
pub(crate) struct Tensor {
    pub(crate) tensor: Detached<View>,
}

impl<T: Into<View>> From<T> for Tensor {
    fn from(tensor: T) -> Self {
        Self { tensor: Detached::new(tensor.into()) }
    }
}

#[pymethods]
impl Tensor {
    /// Its name in the checkpoint.
    #[getter]
    fn name(&self) -> &str {
        self.tensor.name()
    }

    /// Its element type, by its name in safetensors or ggml.
    #[getter]
    fn dtype(&self) -> Cow<'static, str> {
        self.tensor.dtype().name()
    }

    /// Elements along each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.tensor.shape())
    }

    /// Shape of a quantised tensor in bytes: only the last dimension differs. `None` for other tensors.
    #[getter]
    fn bytes_shape<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        quantized_shape(self.tensor.dtype(), self.tensor.shape())
            .map(|shape| PyTuple::new(py, shape))
            .transpose()
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.tensor.len_bytes()
    }

    /// Where it is: `cpu`, or a device such as `cuda:0`.
    #[getter]
    fn device(&self) -> String {
        self.tensor.device().to_string()
    }

    /// Address of the first byte, in the memory of its device.
    #[getter]
    fn data_ptr(&self) -> u64 {
        self.tensor.address()
    }

    /// A copy of the bytes in host memory.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        // Not by `PyBytes::new`, which panics where memory is short.
        let bytes = Detached::new(py.detach(|| self.tensor.bytes()).into_python(py)?);
        PyBytes::new_with(py, bytes.len(), |copy| {
            py.detach(|| copy.copy_from_slice(&bytes));
            Ok(())
        })
    }

    /// The bytes as a flat array of `uint8`, for `numpy.asarray`.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !self.tensor.is_in_host_memory() {
            return Err(PyAttributeError::new_err("this tensor is in the memory of a device"));
        }
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("shape", (self.nbytes(),))?;
        interface.set_item("data", (self.data_ptr(), self.tensor.is_read_only()))?;
        Ok(interface)
    }

    /// DLPack's device type, such as 1 for host memory, and the number of the device.
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::device(&self.tensor)
    }

    /// A capsule that shares the bytes.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // A tensor is handed out when the copies to it are done, so no stream has to wait for anything.
        let number = stream.and_then(|stream| stream.extract::<i64>().ok());
        if let Some(why) = number.and_then(|number| dlpack::refused_stream(self.tensor.device(), number)) {
            return Err(PyValueError::new_err(why));
        }
        if dl_device.is_some_and(|device| device != dlpack::device(&self.tensor)) {
            let message = format!("this tensor is on {}; copy it in the framework", self.tensor.device());
            return Err(PyBufferError::new_err(message));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("hoistway does not copy; copy in the framework"));
        }
        let Some(exported) = exported(&self.tensor, max_version) else {
            return Err(PyBufferError::new_err(format!(
                "DLPack of this version has no type for {}; view the bytes instead",
                self.tensor.dtype()
            )));
        };
        dlpack::capsule(py, &self.tensor, exported, max_version)
    }

    fn __repr__(&self) -> String {
        let at = match self.tensor.device() {
            DeviceId::Cpu => String::new(),
            device => format!(", {device}"),
        };
        format!("Tensor({}, {}, {:?}{at})", self.tensor.name(), self.tensor.dtype(), self.tensor.shape())
    }
}

/// Tensors as `{name: torch.Tensor}`, or those of a framework that mirrors torch. `types` gives its types by the names of
/// ours, at least of those that DLPack cannot carry. If `is_lender`, memory that the framework has lent is handed back as views
/// of what owns it. So it is the framework's own in every way: given back with the last of them, and kept for the streams that
/// it is recorded for.
#[pyfunction]
pub(crate) fn to_torch<'py>(
    py: Python<'py>,
    tensors: &Bound<'py, PyList>,
    from_dlpack: &Bound<'py, PyAny>,
    types: &Bound<'py, PyDict>,
    is_lender: bool,
    into: &Bound<'py, PyDict>,
) -> PyResult<()> {
    for tensor in tensors {
        let tensor = &tensor.cast::<Tensor>()?.get().tensor;
        let exported = exported(tensor, None);
        let is_bytes = matches!(tensor.dtype(), Dtype::Quantized(_) | Dtype::U8);
        let dtype = if is_bytes { None } else { types.get_item(&*tensor.dtype().name())? };
        if exported.is_none() && dtype.is_none() {
            let message = format!(
                "torch has no type for {}, which tensor '{}' is made of; load it with framework='raw'",
                tensor.dtype(),
                tensor.name()
            );
            return Err(unsupported_dtype(py, &message, tensor.name()));
        }
        let lent = tensor.lent_by().filter(|_| is_lender && (is_bytes || dtype.is_some()));
        let converted = match (lent, exported) {
            (Some((owner, start)), _) => view_of(owner.bind(py), start, tensor, dtype)?,
            (None, Some(exported)) => from_dlpack.call1((dlpack::capsule(py, tensor, exported, None)?,))?,
            (None, None) => {
                let bytes = from_dlpack.call1((dlpack::capsule(py, tensor, bytes_of(tensor), None)?,))?;
                bytes.call_method1(pyo3::intern!(py, "view"), (dtype,))?
            }
        };
        into.set_item(tensor.name(), converted)?;
    }
    Ok(())
}

/// A tensor as a view of the bytes that it lies in. Autograd knows nothing of what it shares with others there.
fn view_of<'py>(
    owner: &Bound<'py, PyAny>,
    start: u64,
    tensor: &View,
    dtype: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, view) = (owner.py(), pyo3::intern!(owner.py(), "view"));
    let place =
        |offset: u64| isize::try_from(offset).map_err(|_| PyBufferError::new_err("memory is too long"));
    let slice = PySlice::new(py, place(start)?, place(start + tensor.len_bytes())?, 1);
    let bytes = owner.get_item(slice)?;
    let elements = match dtype {
        Some(dtype) => bytes.call_method1(view, (dtype,))?,
        None => bytes,
    };
    let shape = quantized_shape(tensor.dtype(), tensor.shape()).unwrap_or_else(|| shape_of_bytes(tensor));
    elements.call_method1(view, (PyTuple::new(py, shape)?,))?.getattr(pyo3::intern!(py, "data"))
}

/// A tensor as DLPack up to `max_version` can carry it: elements, or blocks of elements as bytes.
fn exported(tensor: &View, max_version: Option<(u32, u32)>) -> Option<Exported> {
    match quantized_shape(tensor.dtype(), tensor.shape()) {
        Some(shape) => Some(Exported::bytes(shape)),
        None => Exported::as_is(tensor.dtype(), max_version),
    }
}

/// The shape of a quantised tensor's bytes: its last dimension holds those of its blocks.
pub(crate) fn quantized_shape(dtype: Dtype, shape: &[u64]) -> Option<Vec<u64>> {
    let Dtype::Quantized(block) = dtype else { return None };
    let mut shape = shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = *last / block.block_len() * block.block_bytes();
    }
    Some(shape)
}

/// The bytes of a tensor.
fn bytes_of(tensor: &View) -> Exported {
    Exported::bytes(shape_of_bytes(tensor))
}

/// The shape of a tensor's elements, but for packed ones, whose last dimension shrinks.
fn shape_of_bytes(tensor: &View) -> Vec<u64> {
    let mut shape = tensor.shape().to_vec();
    if let Some(last) = shape.last_mut()
        && tensor.dtype() == Dtype::F4
    {
        *last /= 2;
    }
    shape
}
