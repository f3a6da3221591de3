//! The memory of a request: pieces of buffers, tensors and addresses, and what keeps them.
#![forbid(unsafe_code)]

use super::{
    addresses::KvAddresses,
    exported::{Access, bytes_of, is_buffer},
};
use crate::tensor::Tensor;
use hoistway::DeviceId;
use hoistway_kv::{KeepAlive, Piece};
use pyo3::{
    exceptions::{PyBufferError, PyTypeError, PyValueError},
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyList, PyTuple, PyType},
};
use std::{collections::BTreeSet, sync::Arc};

/// The memory of a request.
pub(super) struct Memory {
    /// The pieces of each item.
    pub(super) items: Vec<Vec<Piece>>,
    owners: Vec<Py<PyAny>>,
    /// Devices of torch's that have tensors of it: work on them may be under way.
    torch_devices: BTreeSet<i32>,
}

/// The objects that keep memory of Python's. An I/O thread that lets it go never waits for the interpreter: `Py` leaves the
/// decrement to the next thread that holds it in a call of this module.
struct Owners {
    _objects: Vec<Py<PyAny>>,
}

impl Memory {
    /// The memory of `count` items.
    pub(super) fn of(buffers: &Bound<'_, PyAny>, count: usize, access: Access) -> PyResult<Self> {
        let mut memory =
            Self { items: Vec::with_capacity(count), owners: Vec::new(), torch_devices: BTreeSet::new() };
        if let Ok(addresses) = buffers.cast::<KvAddresses>() {
            memory.items.extend(addresses.get().blocks());
            memory.owners.push(buffers.clone().unbind());
        } else {
            let finder = Finder::new(buffers.py(), access)?;
            for (number, buffer) in buffers.try_iter()?.enumerate() {
                let buffer = buffer?;
                let mut pieces = Vec::with_capacity(1);
                let found = if buffer.is_instance_of::<PyList>() || buffer.is_instance_of::<PyTuple>() {
                    buffer.try_iter()?.try_for_each(|piece| finder.add(&piece?, &mut pieces, &mut memory))
                } else {
                    finder.add(&buffer, &mut pieces, &mut memory)
                };
                found.map_err(|error| at(buffers.py(), number, error))?;
                memory.items.push(pieces);
            }
        }
        if memory.items.len() != count {
            let message = format!("there are {count} keys, and memory for {} of them", memory.items.len());
            return Err(PyValueError::new_err(message));
        }
        Ok(memory)
    }

    /// Devices whose streams torch may still have work on, for this memory.
    pub(super) fn torch_devices(&self) -> &BTreeSet<i32> {
        &self.torch_devices
    }

    /// Keeps something else as long as the memory.
    pub(super) fn keep_also(&mut self, owner: Py<PyAny>) {
        self.owners.push(owner);
    }

    /// The pieces of each item, and what keeps them.
    pub(super) fn into_parts(self) -> (Vec<Vec<Piece>>, KeepAlive) {
        (self.items, KeepAlive::new(Arc::new(Owners { _objects: self.owners })))
    }
}

/// Finds where bytes are.
struct Finder<'py> {
    /// The class of torch's tensors, if the process has imported torch: else there are none.
    torch: Option<Bound<'py, PyAny>>,
    /// The class of numpy's arrays, likewise.
    numpy: Option<Bound<'py, PyAny>>,
    access: Access,
}

impl<'py> Finder<'py> {
    fn new(py: Python<'py>, access: Access) -> PyResult<Self> {
        // Half imported, they have no such class yet.
        let class = |module: &str, name: &str| -> PyResult<_> {
            modules(py)?.call_method1("get", (module,))?.getattr_opt(name)
        };
        Ok(Self { torch: class("torch", "Tensor")?, numpy: class("numpy", "ndarray")?, access })
    }
    fn add(&self, object: &Bound<'_, PyAny>, pieces: &mut Vec<Piece>, memory: &mut Memory) -> PyResult<()> {
        let is_a = |class: Option<&Bound<'_, PyAny>>| {
            class.is_some_and(|class| object.is_instance(class).unwrap_or(false))
        };
        let (piece, owner) = if is_a(self.torch.as_ref()) {
            let (piece, owner) = torch_memory(object)?;
            if !piece.device.is_host() {
                memory.torch_devices.insert(piece.device.dlpack().1);
            }
            (piece, owner)
        } else if is_buffer(object) {
            if is_a(self.numpy.as_ref()) {
                check_backing(object)?;
            }
            let (address, len, owner) = bytes_of(object, self.access)?;
            (Piece::new(DeviceId::Cpu, address, len), owner)
        } else if let Ok(tensor) = object.cast::<Tensor>() {
            if self.access == Access::Write {
                return Err(PyBufferError::new_err("a tensor of hoistway's own is read-only"));
            }
            let tensor = &tensor.get().tensor;
            let piece = Piece::new(tensor.device(), tensor.address(), tensor.len_bytes());
            (piece, object.clone().unbind())
        } else if let Some(interface) = object.getattr_opt("__cuda_array_interface__")? {
            (self.cuda_array(object, &interface)?, object.clone().unbind())
        } else {
            let kind = object.get_type().qualname()?;
            let message = format!("an object of type {kind} is neither a buffer nor a tensor");
            return Err(PyTypeError::new_err(message));
        };
        if piece.len > 0 && piece.address == 0 {
            let kind = object.get_type().qualname()?;
            return Err(PyValueError::new_err(format!("a {kind} has no memory that holds its values")));
        }
        pieces.push(piece);
        memory.owners.push(owner);
        Ok(())
    }

    /// Memory of a device, as CuPy and others describe it.
    fn cuda_array(&self, object: &Bound<'_, PyAny>, interface: &Bound<'_, PyAny>) -> PyResult<Piece> {
        let interface = interface.cast::<PyDict>()?;
        let field = |name: &str| {
            interface.get_item(name)?.ok_or_else(|| {
                PyTypeError::new_err(format!("its __cuda_array_interface__ has no field '{name}'"))
            })
        };
        if interface.get_item("strides")?.is_some_and(|strides| !strides.is_none()) {
            return Err(PyBufferError::new_err("it is not contiguous"));
        }
        let (address, is_read_only): (u64, bool) = field("data")?.extract()?;
        if is_read_only && self.access == Access::Write {
            return Err(PyBufferError::new_err("it is read-only"));
        }
        let shape: Vec<u64> = field("shape")?.extract()?;
        let typestr: String = field("typestr")?.extract()?;
        let item_len = typestr.get(2..).and_then(|digits| digits.parse::<u64>().ok());
        let len = item_len
            .and_then(|item_len| shape.iter().try_fold(item_len, |product, &size| product.checked_mul(size)))
            .ok_or_else(|| PyTypeError::new_err("its __cuda_array_interface__ has no size in bytes"))?;
        let Some(device) = object.getattr_opt("__dlpack_device__")? else {
            return Err(PyTypeError::new_err("it does not say by __dlpack_device__ on which device it is"));
        };
        Ok(Piece::new(dlpack_device(&device.call0()?)?, address, len))
    }
}

/// A tensor of torch's and its storage, so that setting other memory for the tensor does not take this away.
fn torch_memory(tensor: &Bound<'_, PyAny>) -> PyResult<(Piece, Py<PyAny>)> {
    let py = tensor.py();
    let device = tensor.getattr(intern!(py, "device"))?;
    let kind: String = device.getattr(intern!(py, "type"))?.extract()?;
    let is_so = |question| -> PyResult<bool> { tensor.call_method0(question)?.extract() };
    if tensor.getattr(intern!(py, "layout"))?.str()?.to_str()? != "torch.strided"
        || !is_so("is_contiguous")?
        || is_so("is_conj")?
        || is_so("is_neg")?
    {
        return Err(PyBufferError::new_err("the tensor is not contiguous"));
    }
    let owner = tensor.call_method0(intern!(py, "untyped_storage"))?;
    let device = match kind.as_str() {
        "cpu" => DeviceId::Cpu,
        // Builds of torch for other devices than CUDA's have the same name for theirs, and DLPack's kind of their own.
        "cuda" => dlpack_device(&tensor.call_method0(intern!(py, "__dlpack_device__"))?)?,
        _ => return Err(PyBufferError::new_err(format!("the tensor is on device {device}"))),
    };
    let len: u64 = tensor.getattr(intern!(py, "nbytes"))?.extract()?;
    let offset: u64 = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
    let item_len: u64 = tensor.getattr(intern!(py, "itemsize"))?.extract()?;
    let found: u64 = owner.call_method0(intern!(py, "nbytes"))?.extract()?;
    let needed = offset.checked_mul(item_len).and_then(|start| start.checked_add(len));
    if len > 0 && needed.is_none_or(|needed| needed > found) {
        return Err(PyBufferError::new_err(format!(
            "the tensor's storage has {found} bytes, fewer than the tensor needs: it was resized or freed"
        )));
    }
    let address = if len == 0 { 0 } else { tensor.call_method0(intern!(py, "data_ptr"))?.extract()? };
    Ok((Piece::new(device, address, len), owner.unbind()))
}

/// The device that `__dlpack_device__` says.
fn dlpack_device(told: &Bound<'_, PyAny>) -> PyResult<DeviceId> {
    // The kind may be an enumeration of Python's, which is a number.
    let (kind, ordinal): (i32, i32) = told.extract()?;
    DeviceId::from_dlpack(kind, ordinal)
        .filter(|id| !id.is_host())
        .ok_or_else(|| PyBufferError::new_err(format!("it is on device {kind}:{ordinal} of DLPack's")))
}

/// The modules that the process has imported.
fn modules(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static MODULES: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let modules =
        MODULES.get_or_try_init(py, || Ok::<_, PyErr>(py.import("sys")?.getattr("modules")?.unbind()))?;
    Ok(modules.bind(py))
}

/// Fails if an array of numpy is a view of more memory than there is.
fn check_backing(array: &Bound<'_, PyAny>) -> PyResult<()> {
    static SHORTFALL: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = array.py();
    let shortfall = SHORTFALL.get_or_try_init(py, || {
        Ok::<_, PyErr>(py.import("hoistway._backing")?.getattr("numpy_shortfall")?.unbind())
    })?;
    match shortfall.bind(py).call1((array,))?.extract::<Option<String>>()? {
        Some(problem) => Err(PyBufferError::new_err(problem)),
        None => Ok(()),
    }
}

/// The same error with the number of the buffer in it.
fn at(py: Python<'_>, number: usize, error: PyErr) -> PyErr {
    let class: Bound<'_, PyType> = error.get_type(py);
    let message = format!("buffer {number}: {}", error.value(py));
    PyErr::from_type(class, message)
}
