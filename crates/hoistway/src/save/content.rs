//! What can be saved: tensors in memory of the host or a device, checked before anything is written.
#![deny(unsafe_code)]

use crate::{
    Dtype, Error, Result, SizeError, Tensor, TensorMemory,
    catalog::safetensors::{MAX_HEADER_BYTES, shown_shape},
    device::Device,
};
use std::{collections::HashSet, marker::PhantomData, sync::Arc};

/// One tensor to save.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TensorData<'a> {
    /// Unique in the save.
    pub name: &'a str,
    /// Type of each element; one that safetensors files have.
    pub dtype: Dtype,
    /// Elements along each dimension, slowest first; empty for a scalar.
    pub shape: &'a [u64],
    /// Its elements in row-major order, little-endian, packed if narrower than a byte.
    pub bytes: TensorBytes<'a>,
}

impl<'a> TensorData<'a> {
    /// A tensor of this name, type, shape and content.
    pub fn new(name: &'a str, dtype: Dtype, shape: &'a [u64], bytes: TensorBytes<'a>) -> Self {
        Self { name, dtype, shape, bytes }
    }
}

/// Where the bytes of a tensor are.
#[derive(Clone, Debug)]
pub enum TensorBytes<'a> {
    /// In host memory.
    Host(&'a [u8]),
    /// In the memory of a device. They are copied to the host piece by piece.
    Device(DeviceBytes<'a>),
}

/// Bytes in the memory of a device.
#[derive(Clone, Debug)]
pub struct DeviceBytes<'a> {
    pub(super) device: Arc<Device>,
    pub(super) address: u64,
    len: u64,
    lives_for: PhantomData<&'a ()>,
}

impl DeviceBytes<'_> {
    /// The `len` bytes at `address`.
    ///
    /// # Safety
    /// They are valid memory of that device for the lifetime of the result.
    #[allow(unsafe_code)]
    pub unsafe fn new(device: Arc<Device>, address: u64, len: u64) -> Self {
        Self { device, address, len, lives_for: PhantomData }
    }
}

impl TensorBytes<'_> {
    /// How many there are.
    pub fn len(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::Device(bytes) => bytes.len,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a Tensor> for TensorData<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        let bytes = match tensor.memory() {
            TensorMemory::Host(block) => TensorBytes::Host(block),
            TensorMemory::Device(block) => TensorBytes::Device(DeviceBytes {
                device: block.device().clone(),
                address: block.address(),
                len: block.len(),
                lives_for: PhantomData,
            }),
        };
        Self { name: tensor.name(), dtype: tensor.dtype(), shape: tensor.shape(), bytes }
    }
}

/// Why tensors cannot be saved as safetensors.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ContentError {
    /// Two tensors have the same name.
    #[error("tensor '{tensor}' cannot be saved: the name is given twice")]
    DuplicateName {
        /// The name.
        tensor: String,
    },
    /// The name that headers keep for metadata.
    #[error("tensor '__metadata__' cannot be saved: the format keeps that name for itself")]
    ReservedName,
    /// A type that the format does not have.
    #[error("tensor '{tensor}' cannot be saved: safetensors files have no type {dtype}")]
    UnsupportedDtype {
        /// Name of the tensor.
        tensor: String,
        /// Its element type.
        dtype: Dtype,
    },
    /// The shape has no size in whole bytes that fits 64 bits.
    #[error(
        "tensor '{tensor}' cannot be saved: type {dtype} and shape {} make no whole number of bytes",
        shown_shape(shape)
    )]
    NoSize {
        /// Name of the tensor.
        tensor: String,
        /// Its element type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The bytes given are not as many as type and shape make.
    #[error(
        "tensor '{tensor}' cannot be saved: type {dtype} and shape {} make {needed} bytes, but it has {given}",
        shown_shape(shape)
    )]
    WrongLength {
        /// Name of the tensor.
        tensor: String,
        /// Its element type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes that type and shape make.
        needed: u64,
        /// Bytes that were given.
        given: u64,
    },
    /// Names, shapes and metadata are too long for one header.
    #[error(
        "the header would have {len} bytes, the format allows {MAX_HEADER_BYTES}: save fewer tensors a file, or less metadata"
    )]
    HeaderTooLarge {
        /// Length of the header in bytes.
        len: u64,
    },
    /// The bytes of all tensors do not fit 64 bits.
    #[error("the tensors are too large for any file")]
    TooLarge,
}

impl ContentError {
    /// The tensor that is wrong, if it is one of them.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::DuplicateName { tensor }
            | Self::UnsupportedDtype { tensor, .. }
            | Self::NoSize { tensor, .. }
            | Self::WrongLength { tensor, .. } => Some(tensor),
            Self::ReservedName => Some("__metadata__"),
            Self::HeaderTooLarge { .. } | Self::TooLarge => None,
        }
    }
}

/// The lengths in bytes of tensors that can be saved together.
pub(super) fn check(tensors: &[TensorData<'_>]) -> Result<Vec<u64>> {
    let lens = lens(tensors.iter().map(|tensor| (tensor.name, tensor.dtype, tensor.shape)))?;
    for (&TensorData { name, dtype, shape, ref bytes }, &needed) in tensors.iter().zip(&lens) {
        let given = bytes.len();
        if given != needed {
            let (tensor, shape) = (name.to_owned(), shape.to_vec());
            return Err(ContentError::WrongLength { tensor, dtype, shape, needed, given }.into());
        }
    }
    Ok(lens)
}

/// The lengths in bytes of tensors of these names, types and shapes, which can be saved together.
pub(super) fn lens<'a>(tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64])>) -> Result<Vec<u64>> {
    let mut names = HashSet::new();
    let lens = tensors.map(|(name, dtype, shape)| {
        if !names.insert(name) {
            return Err(ContentError::DuplicateName { tensor: name.to_owned() });
        }
        len(name, dtype, shape)
    });
    let lens = lens.collect::<Result<Vec<u64>, _>>().map_err(Error::Content)?;
    lens.iter().try_fold(0u64, |sum, len| sum.checked_add(*len)).ok_or(ContentError::TooLarge)?;
    Ok(lens)
}

fn len(name: &str, dtype: Dtype, shape: &[u64]) -> Result<u64, ContentError> {
    if name == "__metadata__" {
        return Err(ContentError::ReservedName);
    }
    if !dtype.is_of_safetensors() {
        return Err(ContentError::UnsupportedDtype { tensor: name.to_owned(), dtype });
    }
    dtype.size_of(shape).map_err(|problem| match problem {
        SizeError::Overflow | SizeError::PartialByte | SizeError::PartialBlock | SizeError::UnknownType => {
            ContentError::NoSize { tensor: name.to_owned(), dtype, shape: shape.to_vec() }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor<'a>(name: &'a str, dtype: Dtype, shape: &'a [u64], bytes: &'a [u8]) -> TensorData<'a> {
        TensorData { name, dtype, shape, bytes: TensorBytes::Host(bytes) }
    }

    #[test]
    fn what_no_file_can_hold_is_refused_by_name() {
        let q4_k = Dtype::Quantized(crate::GgmlType::Q4K);
        let whole = tensor("a", Dtype::F32, &[2], &[0; 8]);
        for (wrong, said) in [
            (whole.clone(), "given twice"),
            (tensor("__metadata__", Dtype::U8, &[0], &[]), "keeps that name"),
            (tensor("b", Dtype::F32, &[2], &[0; 7]), "make 8 bytes, but it has 7"),
            (tensor("b", Dtype::F4, &[3], &[0; 2]), "no whole number"),
            (tensor("b", Dtype::F32, &[u64::MAX, 2], &[]), "no whole number"),
            (tensor("b", q4_k, &[256], &[0; 144]), "no type Q4_K"),
        ] {
            let name = wrong.name.to_owned();
            match check(&[whole.clone(), wrong]) {
                Err(Error::Content(problem)) => {
                    assert!(problem.to_string().contains(said), "{problem}");
                    assert_eq!(problem.tensor(), Some(&*name));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(check(&[whole]).unwrap(), [8]);
    }
}
