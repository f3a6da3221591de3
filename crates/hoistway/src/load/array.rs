//! Arrays among the keys and values of GGUF files, ready to be read.
#![forbid(unsafe_code)]

use crate::{
    Cancel, Result,
    catalog::{
        gguf::{Array, ArrayValues, ByteSource, GgufError},
        gguf_error,
    },
    source::{Latency, Source},
};
use std::sync::Arc;

/// An array of a GGUF file, and that file: it stays open until this is dropped, whether or not its checkpoint is.
///
/// Every reading fails with [`Error::Changed`](crate::Error::Changed) or
/// [`Error::Truncated`](crate::Error::Truncated) if the file is no longer what it was when its header was read.
#[derive(Clone, Debug)]
pub struct OpenArray {
    source: Arc<dyn Source>,
    array: Array,
    cancel: Cancel,
}

impl OpenArray {
    pub(super) fn new(source: Arc<dyn Source>, array: Array) -> Self {
        Self { source, array, cancel: Cancel::default() }
    }

    /// The same array, whose readings `cancel` ends.
    pub fn until(&self, cancel: &Cancel) -> Self {
        Self { cancel: cancel.clone(), ..self.clone() }
    }

    fn with(&self, array: Array) -> Self {
        Self { array, ..self.clone() }
    }

    /// Whether its readings wait for a server, which may take any time.
    pub fn is_remote(&self) -> bool {
        self.source.latency() == Latency::Remote
    }

    /// Its type, length and place.
    pub fn array(&self) -> &Array {
        &self.array
    }

    /// Its first `len` elements; see [`Array::first`].
    pub fn first(&self, len: u64) -> Self {
        self.with(self.array.first(len))
    }

    /// Reads all elements. Arrays in it are better found by [`arrays`](Self::arrays), which keeps their file.
    ///
    /// # Errors
    /// [`Error::InvalidFile`](crate::Error::InvalidFile) for strings that are not UTF-8;
    /// [`Error::Io`](crate::Error::Io).
    pub fn read(&self) -> Result<ArrayValues> {
        self.checked(|source| self.array.read(source))
    }

    /// Reads numbers or booleans into `buffer`; see [`Array::read_into`].
    ///
    /// # Errors
    /// [`Error::InvalidFile`](crate::Error::InvalidFile) if the elements are others, or the buffer is of another length;
    /// [`Error::Io`](crate::Error::Io).
    pub fn read_into(&self, buffer: &mut [u8]) -> Result<()> {
        self.checked(|source| self.array.read_into(source, buffer))
    }

    /// Reads strings, whether or not they are text; see [`Array::byte_strings`].
    ///
    /// # Errors
    /// [`Error::InvalidFile`](crate::Error::InvalidFile) if the elements are others; [`Error::Io`](crate::Error::Io).
    pub fn byte_strings(&self) -> Result<Vec<Vec<u8>>> {
        self.checked(|source| self.array.byte_strings(source)?.collect())
    }

    /// The arrays of an array of arrays.
    ///
    /// # Errors
    /// [`Error::InvalidFile`](crate::Error::InvalidFile) if the elements are others; [`Error::Io`](crate::Error::Io).
    pub fn arrays(&self) -> Result<Vec<Self>> {
        let arrays = self.checked(|source| self.array.arrays(source))?;
        Ok(arrays.into_iter().map(|array| self.with(array)).collect())
    }

    fn checked<T>(&self, read: impl FnOnce(&dyn ByteSource) -> Result<T, GgufError>) -> Result<T> {
        let source = &*self.source;
        let values = read(&source.until(&self.cancel));
        // First: what a file says that has changed is no reason for anything.
        source.check_unchanged(self.array.bytes(), |_| None)?;
        values.map_err(|problem| gguf_error(source, problem, &self.cancel))
    }
}
