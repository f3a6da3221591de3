//! Places of tensors: sizes by type and shape, no overlap, all inside the file.
#![forbid(unsafe_code)]

use super::{GgufError, GgufTensor, OpenOptions};
use crate::{Alignment, ByteRange, Dtype, SizeError};
use std::sync::Arc;

/// Largest size of a dimension: ggml's own numbers are signed.
const MAX_DIMENSION: u64 = i64::MAX as u64;

/// A tensor as the file describes it, but for the order of its dimensions.
pub(super) struct Described {
    pub(super) name: Arc<str>,
    pub(super) dtype: Dtype,
    /// Slowest first.
    pub(super) shape: Vec<u64>,
    /// From the start of the data.
    pub(super) offset: u64,
}

impl Described {
    fn overflow(&self) -> GgufError {
        let Self { name, dtype, shape, offset } = self;
        GgufError::Overflow { tensor: name.to_string(), dtype: *dtype, shape: shape.clone(), offset: *offset }
    }

    /// Its size in bytes, or `None` if that is not known.
    fn size(&self) -> Result<Option<u64>, GgufError> {
        if self.shape.iter().any(|&dimension| dimension > MAX_DIMENSION) {
            return Err(self.overflow());
        }
        match self.dtype.size_of(&self.shape) {
            Ok(size) => Ok(Some(size)),
            Err(SizeError::UnknownType) if self.shape.contains(&0) => Ok(Some(0)),
            Err(SizeError::UnknownType) => Ok(None),
            Err(SizeError::PartialBlock) => Err(GgufError::PartialBlock {
                tensor: self.name.to_string(),
                dtype: self.dtype,
                shape: self.shape.clone(),
            }),
            Err(SizeError::Overflow | SizeError::PartialByte) => Err(self.overflow()),
        }
    }
}

/// The tensors in the order of their bytes.
pub(super) fn place(
    described: Vec<Described>,
    data_start: u64,
    file_len: u64,
    alignment: Alignment,
    options: &OpenOptions,
) -> Result<Vec<GgufTensor>, GgufError> {
    let mut sized = Vec::with_capacity(described.len());
    for tensor in described {
        if !alignment.divides(tensor.offset) && !options.lenient {
            return Err(GgufError::Misaligned {
                tensor: tensor.name.to_string(),
                offset: tensor.offset,
                alignment: alignment.bytes(),
            });
        }
        let start = data_start.checked_add(tensor.offset).ok_or_else(|| tensor.overflow())?;
        sized.push((start, tensor.size()?, tensor));
    }
    // Of those that begin together the empty ones come first, and one of unknown size last.
    sized.sort_by_key(|(start, size, _)| (*start, size.unwrap_or(u64::MAX)));
    // A tensor without bytes may claim to begin in the middle of another.
    let starts: Vec<u64> =
        sized.iter().filter(|(_, size, _)| *size != Some(0)).map(|(start, ..)| *start).collect();

    let mut placed: Vec<GgufTensor> = Vec::with_capacity(sized.len());
    let mut end = 0;
    let mut last_with_bytes: Option<usize> = None;
    for (start, size, tensor) in sized {
        let size = match size {
            Some(size) => size,
            // All up to where the next tensor begins; of nothing, one byte, so that the end of the file is noticed.
            None => {
                let next = starts.get(starts.partition_point(|&other| other <= start));
                next.map_or(file_len, |&next| next.min(file_len)).saturating_sub(start).max(1)
            }
        };
        let bytes = ByteRange::at(start, size).ok_or_else(|| tensor.overflow())?;
        if size > 0 {
            if let Some(last) = last_with_bytes.and_then(|last| placed.get(last))
                && start < end
            {
                let (first, second) = (last.name.clone(), tensor.name.to_string());
                return Err(GgufError::Overlap { first, second, offset: start });
            }
            if bytes.end() > file_len {
                let tensor = tensor.name.to_string();
                return Err(GgufError::Truncated { tensor, needed: bytes, file_len });
            }
            end = bytes.end();
            last_with_bytes = Some(placed.len());
        }
        let Described { name, dtype, shape, .. } = tensor;
        placed.push(GgufTensor { name: name.to_string(), dtype, shape, bytes });
    }
    Ok(placed)
}
