//! The formats of files, as far as they differ.
#![forbid(unsafe_code)]

use super::{
    gguf::{self, Gguf, GgufError},
    safetensors::{self, HeaderError, Metadata},
};
use crate::{ByteRange, Dtype, Error, Result};
use std::sync::Arc;

/// The format of a file, and what the file says about itself.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum FileFormat {
    /// Safetensors.
    Safetensors {
        /// Its `__metadata__`, if it has one.
        metadata: Option<Metadata>,
    },
    /// GGUF.
    Gguf(Arc<gguf::Header>),
}

impl FileFormat {
    /// Its name: `safetensors` or `gguf`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Safetensors { .. } => "safetensors",
            Self::Gguf(_) => "gguf",
        }
    }
}

/// Why a file is not what its format allows.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// It is no valid safetensors file.
    #[error(transparent)]
    Safetensors(#[from] HeaderError),
    /// It is no valid GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// It is neither, but something else.
    #[error("{what}")]
    Foreign {
        /// What it is, and what to do about it.
        what: &'static str,
    },
    /// It is no regular file, so it holds no bytes that can be read at any offset.
    #[error("it is {kind}, not a regular file")]
    NotRegular {
        /// What it is: a directory, a FIFO, a socket or a device.
        kind: &'static str,
    },
    /// It is longer than files of its kind are.
    #[error("it has {len} bytes; at most {most} are read")]
    TooLong {
        /// Its length in bytes.
        len: u64,
        /// The most bytes that are read.
        most: u64,
    },
}

/// What a file is that is often met where a model should be, judged by its first bytes, and what to do about it.
pub(super) fn foreign(beginning: &[u8]) -> Option<&'static str> {
    let begins_with = |text: &[u8]| {
        beginning.get(..text.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(text))
    };
    if begins_with(b"version https://git-lfs") {
        Some("the file is a pointer of Git LFS; get what it points to, with 'git lfs pull'")
    } else if begins_with(b"<!doctype html") || begins_with(b"<html") {
        Some("the file is a web page; download the model again, perhaps it needs a login")
    } else if begins_with(b"PK\x03\x04") || begins_with(b"\x80\x02") {
        Some("the file is an archive or a pickle, such as torch saves; save the model as safetensors")
    } else {
        None
    }
}

impl FormatError {
    /// The tensor that is wrong, if it is one of them.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::Safetensors(problem) => problem.tensor(),
            Self::Gguf(problem) => problem.tensor(),
            Self::Foreign { .. } | Self::NotRegular { .. } | Self::TooLong { .. } => None,
        }
    }

    /// Where the file ends, if it ends before one of its tensors does.
    pub fn truncated_at(&self) -> Option<u64> {
        match self {
            Self::Safetensors(HeaderError::Truncated { file_len, .. })
            | Self::Gguf(GgufError::Truncated { file_len, .. }) => Some(*file_len),
            _ => None,
        }
    }
}

/// A header that was parsed and checked.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum FileHeader {
    /// Of a safetensors file.
    Safetensors(safetensors::Header),
    /// Of a GGUF file.
    Gguf(Gguf),
}

impl From<safetensors::Header> for FileHeader {
    fn from(header: safetensors::Header) -> Self {
        Self::Safetensors(header)
    }
}

impl From<Gguf> for FileHeader {
    fn from(header: Gguf) -> Self {
        Self::Gguf(header)
    }
}

/// A tensor and its bytes in its file.
pub(super) struct Located {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: ByteRange,
}

impl FileHeader {
    pub(super) fn gguf(&self) -> Option<&Gguf> {
        match self {
            Self::Safetensors(_) => None,
            Self::Gguf(gguf) => Some(gguf),
        }
    }

    /// Where the bytes of tensors begin.
    pub(super) fn data_start(&self) -> u64 {
        match self {
            Self::Safetensors(header) => header.data_start,
            Self::Gguf(gguf) => gguf.header.data_start,
        }
    }

    /// What it says about its file, and its tensors in the order of their bytes.
    pub(super) fn into_parts(self) -> Result<(FileFormat, Vec<Located>)> {
        match self {
            Self::Safetensors(safetensors::Header { tensors, metadata, data_start }) => {
                let located = tensors.into_iter().map(|tensor| {
                    let safetensors::HeaderTensor { name, dtype, shape, data } = tensor;
                    let start = data_start.checked_add(data.start());
                    match start.and_then(|start| ByteRange::at(start, data.len())) {
                        Some(bytes) => Ok(Located { name, dtype, shape, bytes }),
                        None => Err(Error::Internal(format!("tensor '{name}' ends past 2^64"))),
                    }
                });
                Ok((FileFormat::Safetensors { metadata }, located.collect::<Result<_>>()?))
            }
            Self::Gguf(Gguf { header, tensors }) => {
                let located = tensors.into_iter().map(|tensor| {
                    let gguf::GgufTensor { name, dtype, shape, bytes } = tensor;
                    Located { name, dtype, shape, bytes }
                });
                Ok((FileFormat::Gguf(Arc::new(header)), located.collect()))
            }
        }
    }
}
