//! The buffer protocol: where an object's bytes are.
//!
//! It is declared here because the stable ABI has it from Python 3.11 on alone. Interpreters of 3.10 export the same
//! functions, and the structure is that of all versions since 3.0.
#![allow(unsafe_code)]

use pyo3::{ffi, prelude::*, types::PyMemoryView};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem::MaybeUninit,
    ptr, slice,
};

#[repr(C)]
struct Buffer {
    start: *mut c_void,
    owner: *mut ffi::PyObject,
    len: isize,
    item_len: isize,
    is_read_only: c_int,
    dimensions: c_int,
    format: *const c_char,
    shape: *const isize,
    strides: *const isize,
    suboffsets: *const isize,
    internal: *mut c_void,
}

const WRITABLE: c_int = 0x1;
const FORMAT: c_int = 0x4;
const SHAPE: c_int = 0x8;
const C_CONTIGUOUS: c_int = 0x20 | 0x10 | SHAPE;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, buffer: *mut Buffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(buffer: *mut Buffer);
}

/// The access to an object's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// Whether an object has bytes to show.
pub(super) fn is_buffer(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the object is alive, and the interpreter is held.
    unsafe { PyObject_CheckBuffer(object.as_ptr()) == 1 }
}

/// A buffer that is looked at; given back when dropped.
struct Seen<'a, 'py> {
    buffer: Buffer,
    /// Keeps the interpreter held: it is needed to give the buffer back.
    _object: &'a Bound<'py, PyAny>,
}

impl<'a, 'py> Seen<'a, 'py> {
    fn of(object: &'a Bound<'py, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut buffer = MaybeUninit::<Buffer>::uninit();
        // SAFETY: the object is alive, the interpreter is held, and the buffer is a place for the structure.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), buffer.as_mut_ptr(), flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the call has succeeded, so it has filled the structure in.
        Ok(Self { buffer: unsafe { buffer.assume_init() }, _object: object })
    }
}

impl Drop for Seen<'_, '_> {
    fn drop(&mut self) {
        // SAFETY: it was got by `PyObject_GetBuffer` and is released once; the interpreter is held.
        unsafe { PyBuffer_Release(&raw mut self.buffer) }
    }
}

/// Address and length of an object's bytes, and a memory view of it: as long as that lives, the object neither frees
/// nor moves them.
pub(super) fn bytes_of(object: &Bound<'_, PyAny>, access: Access) -> PyResult<(u64, u64, Py<PyAny>)> {
    let view = PyMemoryView::from(object)?.into_any();
    let flags = match access {
        Access::Read => C_CONTIGUOUS,
        Access::Write => C_CONTIGUOUS | WRITABLE,
    };
    let seen = Seen::of(&view, flags)?;
    let address = seen.buffer.start.expose_provenance() as u64;
    let len = seen.buffer.len.unsigned_abs() as u64;
    drop(seen);
    Ok((address, len, view.unbind()))
}

/// An array of whole numbers of 64 bits in one or two dimensions, as rows; `None` if the object is no such buffer.
pub(super) fn numbers(object: &Bound<'_, PyAny>) -> PyResult<Option<Rows>> {
    if !is_buffer(object) {
        return Ok(None);
    }
    let seen = Seen::of(object, C_CONTIGUOUS | FORMAT)?;
    let Buffer { start, len, item_len, dimensions, format, shape, .. } = seen.buffer;
    let format = if format.is_null() {
        c"B"
    } else {
        // SAFETY: a format is a string of C's that lives as long as the buffer is held.
        unsafe { CStr::from_ptr(format) }
    };
    let is_native = matches!(format.to_bytes(), b"Q" | b"L" | b"q" | b"l" | b"=Q" | b"@Q" | b"N" | b"P");
    if !is_native || item_len != 8 || !(1..=2).contains(&dimensions) || shape.is_null() {
        return Ok(None);
    }
    // SAFETY: there are as many lengths as dimensions while the buffer is held.
    let shape = unsafe { slice::from_raw_parts(shape, dimensions.unsigned_abs() as usize) };
    let count = len.unsigned_abs() / 8;
    let mut values = vec![0u64; count];
    // SAFETY: a contiguous buffer has `len` bytes at its start; the vector has room for them, and any bytes are numbers.
    unsafe { ptr::copy_nonoverlapping(start.cast::<u8>(), values.as_mut_ptr().cast::<u8>(), count * 8) };
    let columns = shape.get(1).map(|columns| columns.unsigned_abs());
    Ok(Some(Rows { values, columns }))
}

/// Numbers in rows of equal length.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) values: Vec<u64>,
    /// How long a row is; `None` where there is one dimension alone.
    pub(super) columns: Option<usize>,
}
