//! The GGUF header: parsed through a small window, validated, nothing believed.
//!
//! [`Gguf::parse`] is the door. It walks the header (`parse`) by a window over a [`ByteSource`] (`reader`), keeps
//! scalars and leaves arrays where they are (`value`), and then checks the tensors' places (`tensors`). `split` knows
//! how the files of one model find each other.
//!
//! Refused is anything that makes bytes ambiguous (overlaps, bytes past the end, names given twice), numbers that
//! promise more than the file can hold, and what the specification forbids. [`OpenOptions::lenient`] lets through what
//! other programs let through and is harmless: any power of two as alignment, tensors at unaligned places, names of 64
//! bytes and more, up to 8 dimensions, booleans other than 0 and 1, empty keys, and arrays in arrays.
//!
//! As in llama.cpp, a tensor of no dimension is a scalar, one element; and one with a dimension of size 0 has no bytes.
#![forbid(unsafe_code)]

mod error;
mod parse;
mod reader;
pub(super) mod split;
mod tensors;
mod value;

pub(super) use parse::no_magic;

pub use error::{GgufError, HeaderPart};
pub use reader::ByteSource;
pub use value::{Array, ArrayValues, ByteStrings, KeyValues, Strings, Value, ValueType};

use super::OpenOptions;
use crate::{ByteRange, Dtype};

/// The magic of a GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// Longest string, in bytes.
pub const MAX_STRING_BYTES: u64 = 16 << 20;
/// Longest key, in bytes.
pub const MAX_KEY_BYTES: u64 = 65_535;
/// Longest tensor name, in bytes, unless lenient: what stable-diffusion.cpp can be built to have room for.
pub const MAX_NAME_BYTES: u64 = 255;
/// Longest tensor name that ggml itself has room for.
pub(super) const GGML_NAME_BYTES: usize = 63;
/// Elements of one array, at most.
pub const MAX_ARRAY_LEN: u64 = 64 << 20;
/// Arrays inside an array, all levels together, at most; such arrays are read only if lenient.
pub const MAX_NESTED_ARRAYS: u64 = 64 << 10;
/// Bytes of one file's keys, strings and names together, at most: what is kept in memory. Strings in arrays are not.
pub const MAX_TEXT_BYTES: u64 = 256 << 20;
/// Length of one header in bytes, at most.
pub const MAX_HEADER_BYTES: u64 = 4 << 30;
/// Keys of one file, at most.
pub const MAX_KEYS: u64 = 1 << 20;
/// Tensors of one file, at most.
pub const MAX_TENSORS: u64 = 1 << 20;

/// One GGUF header, checked against itself and the length of its file.
#[derive(Clone, Debug, PartialEq)]
pub struct Gguf {
    /// All but the tensors.
    pub header: Header,
    /// The tensors in the order of their bytes: no overlap, but there may be gaps.
    pub tensors: Vec<GgufTensor>,
}

/// The format data of a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// Order of the bytes in its numbers.
    pub byte_order: ByteOrder,
    /// Multiple that the places of tensors are of, in bytes.
    pub alignment: u64,
    /// Where the GGUF begins in its file: 0 unless it is embedded in another.
    pub offset: u64,
    /// Where the tensors' bytes begin in the file.
    pub data_start: u64,
    /// The keys and their values, in the order of the file.
    pub metadata: KeyValues,
}

/// Order of the bytes in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteOrder {
    /// Lowest byte first.
    Little,
    /// Highest byte first. Keys and values are read; tensors are listed, but only those of single bytes load.
    Big,
}

/// One tensor as the header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Unique in its file.
    pub name: String,
    /// Type of each element.
    pub dtype: Dtype,
    /// Elements along each dimension, slowest first: the reverse of the file.
    pub shape: Vec<u64>,
    /// Its bytes in the file. Of [`Dtype::UnknownGgml`], whose size is not known, all up to the next tensor or the end of
    /// the file.
    pub bytes: ByteRange,
}

impl Gguf {
    /// Parses and validates the header of the GGUF that begins at `options.offset` of `source`.
    ///
    /// Time and memory are bounded by the length of the header, whatever its numbers claim, and that by
    /// [`MAX_HEADER_BYTES`] and [`MAX_TEXT_BYTES`], whatever length a file of holes claims. Arrays stay in the file.
    ///
    /// ```
    /// use hoistway::catalog::{OpenOptions, gguf::Gguf};
    /// let file = [b"GGUF".as_slice(), &3u32.to_le_bytes(), &0u64.to_le_bytes(), &0u64.to_le_bytes()].concat();
    /// let gguf = Gguf::parse(&file.as_slice(), &OpenOptions::default())?;
    /// assert_eq!((gguf.header.version, gguf.tensors.len()), (3, 0));
    /// # Ok::<(), hoistway::catalog::gguf::GgufError>(())
    /// ```
    ///
    /// # Errors
    /// Any [`GgufError`].
    pub fn parse(source: &dyn ByteSource, options: &OpenOptions) -> Result<Self, GgufError> {
        parse::parse(source, options)
    }
}

#[cfg(test)]
mod tests;
