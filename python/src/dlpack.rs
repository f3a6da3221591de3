//! DLPack: tensors that other frameworks see without a copy, and that live as long as any of them looks.
//!
//! Layouts and codes are those of `dlpack.h` 1.1.
#![allow(unsafe_code)]

use crate::{process::Detached, view::View};
use hoistway::{DeviceId, Dtype};
use pyo3::{ffi, prelude::*};
use std::{any::Any, ffi::CStr, ffi::c_void};

/// DLPack's name of the tensor's device, such as 1 and 0 for host memory.
pub(crate) fn device(tensor: &View) -> (i32, i32) {
    tensor.device().dlpack()
}

/// Why a consumer's stream means nothing on a device, if it does not. The numbers below 3 are no handles, and which of
/// them mean a stream depends on the kind of the device.
pub(crate) fn refused_stream(device: DeviceId, stream: i64) -> Option<&'static str> {
    /// `kDLCUDA` and `kDLROCM`.
    const CUDA: i32 = 2;
    const ROCM: i32 = 10;
    match (device.dlpack().0, stream) {
        (CUDA, 0) => Some(
            "stream 0 is ambiguous in DLPack: pass 1 for CUDA's legacy default stream, 2 for the per-thread one",
        ),
        (ROCM, 1 | 2) => Some("streams 1 and 2 are CUDA's alone in DLPack: pass 0 for ROCm's default stream"),
        _ => None,
    }
}

const VERSIONED: &CStr = c"dltensor_versioned";
const LEGACY: &CStr = c"dltensor";

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct DlManagedTensorVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

/// The element type for a consumer.
pub(crate) struct Exported {
    dtype: DlDataType,
    /// `None`: the tensor's own.
    shape: Option<Vec<u64>>,
}

impl Exported {
    /// The tensor's own type, if DLPack up to `max_version` has it. Types of 1.1 only for those who know them.
    pub(crate) fn as_is(dtype: Dtype, max_version: Option<(u32, u32)>) -> Option<Self> {
        const INT: u8 = 0;
        const UINT: u8 = 1;
        const FLOAT: u8 = 2;
        const BFLOAT: u8 = 4;
        const COMPLEX: u8 = 5;
        const BOOL: u8 = 6;
        let newer = max_version.is_some_and(|version| version >= (1, 1));
        let (code, bits) = match dtype {
            Dtype::Bool => (BOOL, 8),
            Dtype::I8 => (INT, 8),
            Dtype::I16 => (INT, 16),
            Dtype::I32 => (INT, 32),
            Dtype::I64 => (INT, 64),
            Dtype::U8 => (UINT, 8),
            Dtype::U16 => (UINT, 16),
            Dtype::U32 => (UINT, 32),
            Dtype::U64 => (UINT, 64),
            Dtype::F16 => (FLOAT, 16),
            Dtype::F32 => (FLOAT, 32),
            Dtype::F64 => (FLOAT, 64),
            Dtype::Bf16 => (BFLOAT, 16),
            Dtype::C64 => (COMPLEX, 64),
            Dtype::F8E4M3 if newer => (10, 8),
            Dtype::F8E4M3Fnuz if newer => (11, 8),
            Dtype::F8E5M2 if newer => (12, 8),
            Dtype::F8E5M2Fnuz if newer => (13, 8),
            Dtype::F8E8M0 if newer => (14, 8),
            _ => return None,
        };
        Some(Self { dtype: DlDataType { code, bits, lanes: 1 }, shape: None })
    }

    /// Bytes of this shape.
    pub(crate) fn bytes(shape: Vec<u64>) -> Self {
        Self { dtype: DlDataType { code: 1, bits: 8, lanes: 1 }, shape: Some(shape) }
    }
}

/// The contents of a capsule: the memory, and the arrays that its descriptor points to.
struct Owner {
    _memory: Detached<Box<dyn Any + Send + Sync>>,
    /// Shape, then strides.
    dimensions: Box<[i64]>,
}

/// A capsule that shares the bytes of `tensor`. Versioned if the consumer takes that.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    tensor: &View,
    exported: Exported,
    max_version: Option<(u32, u32)>,
) -> PyResult<Bound<'py, PyAny>> {
    let shape = exported.shape.as_deref().unwrap_or(tensor.shape());
    let rank = shape.len();
    let mut dimensions = vec![0i64; 2 * rank].into_boxed_slice();
    let mut stride = 1i64;
    for (position, &size) in shape.iter().enumerate().rev() {
        let too_large =
            || pyo3::exceptions::PyBufferError::new_err("a dimension does not fit DLPack's 63 bits");
        dimensions[position] = i64::try_from(size).map_err(|_| too_large())?;
        dimensions[rank + position] = stride;
        // Strides of an empty tensor mean nothing, and those of any other fit: its bytes do.
        stride = stride.saturating_mul(dimensions[position].max(1));
    }
    let ndim =
        i32::try_from(rank).map_err(|_| pyo3::exceptions::PyBufferError::new_err("too many dimensions"))?;
    let mut owner = Box::new(Owner { _memory: Detached::new(tensor.owner()), dimensions });
    let shape = owner.dimensions.as_mut_ptr();
    let (device_type, device_id) = device(tensor);
    let flags = if tensor.is_read_only() { READ_ONLY } else { 0 };
    let tensor = DlTensor {
        data: address(tensor),
        device_type,
        device_id,
        ndim,
        dtype: exported.dtype,
        shape,
        strides: shape.wrapping_add(rank),
        byte_offset: 0,
    };
    let context = Box::into_raw(owner).cast::<c_void>();
    if max_version.is_some_and(|(major, _)| major >= 1) {
        let managed = DlManagedTensorVersioned {
            major: 1,
            minor: 1,
            context,
            deleter: Some(delete_versioned),
            flags,
            tensor,
        };
        new_capsule(py, managed, VERSIONED, drop_unused_versioned, delete_versioned)
    } else {
        let managed = DlManagedTensor { tensor, context, deleter: Some(delete_legacy) };
        new_capsule(py, managed, LEGACY, drop_unused_legacy, delete_legacy)
    }
}

/// Where the bytes begin; nowhere, if there are none on a device.
fn address(tensor: &View) -> *mut c_void {
    if tensor.len_bytes() == 0 && tensor.device() != DeviceId::Cpu {
        return std::ptr::null_mut();
    }
    std::ptr::with_exposed_provenance_mut(tensor.address() as usize)
}

fn new_capsule<'py, T>(
    py: Python<'py>,
    managed: T,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
    delete: unsafe extern "C" fn(*mut T),
) -> PyResult<Bound<'py, PyAny>> {
    let managed = Box::into_raw(Box::new(managed));
    // SAFETY: `managed` is a live box of the type that `destructor` expects under `name`, which is static; the
    // result is a new reference or null with an exception set.
    let capsule = unsafe {
        let capsule = ffi::PyCapsule_New(managed.cast(), name.as_ptr(), Some(destructor));
        Bound::from_owned_ptr_or_err(py, capsule)
    };
    if capsule.is_err() {
        // SAFETY: no capsule took the box over, so it is still ours to free.
        unsafe { delete(managed) };
    }
    capsule
}

/// Frees a versioned tensor. Called once, by the consumer or by an unused capsule, from any thread.
unsafe extern "C" fn delete_versioned(managed: *mut DlManagedTensorVersioned) {
    // SAFETY: made by `capsule` from two boxes, and DLPack calls the deleter once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Owner>()));
    }
}

/// Frees a tensor of the older layout. Called once, by the consumer or by an unused capsule, from any thread.
unsafe extern "C" fn delete_legacy(managed: *mut DlManagedTensor) {
    // SAFETY: made by `capsule` from two boxes, and DLPack calls the deleter once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Owner>()));
    }
}

unsafe extern "C" fn drop_unused_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule that it was given to. A consumer renames the capsule when it
    // takes the tensor over; under the old name the tensor is still the capsule's.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

unsafe extern "C" fn drop_unused_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `drop_unused_versioned`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            delete_legacy(ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr()).cast());
        }
    }
}
