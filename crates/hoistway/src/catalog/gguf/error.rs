//! Why bytes are not a GGUF file, or not one of its set.
#![forbid(unsafe_code)]

use super::{MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_TEXT_BYTES, ValueType};
use crate::{ByteRange, Dtype, catalog::format::foreign, counted};
use std::{fmt, io, sync::Arc};

/// The part of a header that an error is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderPart {
    /// The fixed fields at its start.
    Start,
    /// One of the keys, by its position.
    Key(u64),
    /// The value of a key.
    Value(Arc<str>),
    /// One of the tensors' names, by its position.
    TensorName(u64),
    /// The description of a tensor.
    Tensor(Arc<str>),
}

impl fmt::Display for HeaderPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => f.write_str("the start of the header"),
            Self::Key(position) => write!(f, "key number {position}"),
            Self::Value(key) => write!(f, "the value of key '{key}'"),
            Self::TensorName(position) => write!(f, "the name of tensor number {position}"),
            Self::Tensor(name) => write!(f, "the description of tensor '{name}'"),
        }
    }
}

/// The first bytes of a file without magic, for people.
fn beginning(found: &[u8]) -> String {
    if found.is_empty() {
        return "the file ends before it".into();
    }
    let shown = found.get(..super::MAGIC.len() * 2).unwrap_or(found);
    foreign(found)
        .map_or_else(|| format!("instead of 'GGUF' there is '{}'", shown.escape_ascii()), Into::into)
}

/// Why bytes are not a GGUF file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The header could not be read.
    #[error("reading bytes {range} failed: {source}")]
    Io {
        /// The bytes.
        range: ByteRange,
        /// The system's own error.
        #[source]
        source: io::Error,
    },
    /// There was no memory for a part of the header.
    #[error("there is no memory for bytes {range}: {source}")]
    Allocation {
        /// The bytes.
        range: ByteRange,
        /// The system's own error.
        #[source]
        source: io::Error,
    },
    /// The first bytes are others.
    #[error("no GGUF magic at byte {offset}: {}", beginning(found))]
    NoMagic {
        /// Where it was looked for.
        offset: u64,
        /// The bytes there, as far as they tell what the file is.
        found: Vec<u8>,
    },
    /// A version that is no longer, or not yet, supported.
    #[error(
        "GGUF version {version} is not supported, only 2 and 3 are; {}",
        if *version > 3 { "reading it needs a newer hoistway" } else { "convert the model again" }
    )]
    Version {
        /// The version.
        version: u32,
    },
    /// The file ends before its header does, or the header claims more than the file has.
    #[error(
        "{part} needs {needed} bytes from byte {offset} on, but the file ends at {file_len}: it is truncated, or its header \
         is damaged; copy or download it again"
    )]
    PastEnd {
        /// What needs them.
        part: HeaderPart,
        /// Where they begin.
        offset: u64,
        /// How many there must be, at least.
        needed: u64,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// More of something than any real file has.
    #[error("{part}, at byte {offset}, has {count} {what}; at most {limit} are read")]
    TooMany {
        /// Where.
        part: HeaderPart,
        /// The counted items, such as `tensors`.
        what: &'static str,
        /// How many are claimed.
        count: u64,
        /// How many may be.
        limit: u64,
        /// Where the number stands in the file.
        offset: u64,
    },
    /// A header that goes on for longer than any real one: a file of holes can claim to be of any length.
    #[error(
        "{part} needs {needed} bytes from byte {offset} on, and then the header has more than {MAX_HEADER_BYTES}, the most \
         that is read"
    )]
    LongHeader {
        /// What needs them.
        part: HeaderPart,
        /// Where they begin.
        offset: u64,
        /// How many there must be, at least.
        needed: u64,
    },
    /// More text than any real header has.
    #[error(
        "with {part}, at byte {offset}, the keys, strings and names of the header have more than {MAX_TEXT_BYTES} bytes \
         together, the most that is read"
    )]
    TooMuchText {
        /// The string that is too much.
        part: HeaderPart,
        /// Where it stands in the file.
        offset: u64,
    },
    /// A string that is not text.
    #[error("{part} is not UTF-8: byte {offset} of the file is wrong")]
    NotUtf8 {
        /// Where.
        part: HeaderPart,
        /// Offset in the file of the first byte that is not UTF-8.
        offset: u64,
    },
    /// A number that stands for no type of values.
    #[error("{part}, at byte {offset}, is of type {id}, which GGUF does not have")]
    ValueType {
        /// Where.
        part: HeaderPart,
        /// The number.
        id: u32,
        /// Where it stands in the file.
        offset: u64,
    },
    /// A boolean that is neither true nor false.
    #[error(
        "{part}, at byte {offset}, is the boolean {value}, which is neither 0 nor 1; open the file leniently to take it for true"
    )]
    Boolean {
        /// Where.
        part: HeaderPart,
        /// The byte.
        value: u8,
        /// Where it stands in the file.
        offset: u64,
    },
    /// Arrays in an array.
    #[error(
        "{part}, at byte {offset}, has arrays in arrays, {depth} deep; {limit} are allowed, {lenient_limit} if the file is opened leniently"
    )]
    Nested {
        /// Where.
        part: HeaderPart,
        /// How deep, at least.
        depth: u32,
        /// How deep they may be.
        limit: u32,
        /// How deep they may be in lenient files.
        lenient_limit: u32,
        /// Where the inner one begins in the file.
        offset: u64,
    },
    /// An array that was read as something that it does not hold.
    #[error("{} is an array of elements of type {element}, not of {wanted}", HeaderPart::Value(key.clone()))]
    ElementType {
        /// The array's key.
        key: Arc<str>,
        /// Type of its elements.
        element: ValueType,
        /// What was to be read.
        wanted: &'static str,
    },
    /// Memory that an array was to be read into, of another length.
    #[error("{} has {needed} bytes, not {len}, as many as there is memory for", HeaderPart::Value(key.clone()))]
    BufferLen {
        /// The array's key.
        key: Arc<str>,
        /// Bytes of its elements.
        needed: u64,
        /// Bytes of the memory.
        len: u64,
    },
    /// A key of no characters. Where a header claims more keys than it has, this is how padding reads.
    #[error("key number {position}, at byte {offset}, is empty; open the file leniently to take it")]
    EmptyKey {
        /// Its position among the keys.
        position: u64,
        /// Where it stands in the file.
        offset: u64,
    },
    /// Two keys are the same.
    #[error("key '{key}' is given twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// Two tensors have the same name.
    #[error("tensor '{tensor}' is given twice")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// `general.alignment` is of another type.
    #[error("general.alignment is of type {found}; it must be of type u32")]
    AlignmentType {
        /// The type.
        found: ValueType,
    },
    /// `general.alignment` is not what the format allows.
    #[error(
        "general.alignment is {alignment}; it must be a power of two and, unless the file is opened leniently, a multiple of 8"
    )]
    Alignment {
        /// The value.
        alignment: u32,
    },
    /// A name that ggml has no room for.
    #[error(
        "the name of tensor '{tensor}' has {len} bytes; {MAX_NAME_BYTES} are allowed unless the file is opened leniently"
    )]
    LongName {
        /// The name.
        tensor: String,
        /// Its length in bytes.
        len: u64,
    },
    /// More dimensions than the format allows.
    #[error(
        "tensor '{tensor}' has {count} dimensions; at most {limit} are allowed, {lenient_limit} if the file is opened leniently"
    )]
    Dimensions {
        /// Name of the tensor.
        tensor: String,
        /// Its dimensions.
        count: u32,
        /// How many there may be.
        limit: u32,
        /// How many there may be in lenient files.
        lenient_limit: u32,
    },
    /// A type that ggml has given up.
    #[error("tensor '{tensor}' is of ggml type {id}, which ggml has removed; convert the model again")]
    RemovedType {
        /// Name of the tensor.
        tensor: String,
        /// The type's number.
        id: u32,
    },
    /// A row of a quantised tensor that is not made of whole blocks.
    #[error("tensor '{tensor}' of type {dtype} and shape {shape:?} has rows that are no multiple of {} elements", dtype.block_len())]
    PartialBlock {
        /// Name of the tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its shape, slowest first.
        shape: Vec<u64>,
    },
    /// The number of elements or of bytes does not fit 64 bits.
    #[error(
        "tensor '{tensor}' of type {dtype} and shape {shape:?} at data offset {offset} is larger than any memory"
    )]
    Overflow {
        /// Name of the tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its shape, slowest first.
        shape: Vec<u64>,
        /// Where it begins, from the start of the data.
        offset: u64,
    },
    /// A tensor that does not begin on the file's alignment.
    #[error(
        "tensor '{tensor}' begins at data offset {offset}, no multiple of the alignment, {alignment}; open the file leniently to take it"
    )]
    Misaligned {
        /// Name of the tensor.
        tensor: String,
        /// Where it begins, from the start of the data.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors '{first}' and '{second}' overlap at byte {offset} of the file")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins inside it.
        second: String,
        /// The first byte that both claim.
        offset: u64,
    },
    /// The file ends before its tensors do.
    #[error(
        "the file is truncated: tensor '{tensor}' needs bytes {needed} of the file, which ends at {file_len}"
    )]
    Truncated {
        /// The first tensor that is not whole.
        tensor: String,
        /// Its bytes in the file.
        needed: ByteRange,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// A key of a split model that does not fit what the others say.
    #[error("it is not a file of a split model of {count}: key '{key}' is {found}, expected {expected}")]
    Split {
        /// Files of the model, as its name or first file says.
        count: u64,
        /// The key.
        key: &'static str,
        /// What it says.
        found: String,
        /// What it should say.
        expected: u64,
    },
    /// A split model of more files than fit the number that counts them.
    #[error("key 'split.count' is {count}; a split model has at most {limit} files")]
    SplitCount {
        /// Files of the model, as this one says.
        count: u64,
        /// How many there may be.
        limit: u64,
    },
    /// The files of a model have more or fewer tensors than its first one says.
    #[error(
        "the header promises {} in all (key 'split.tensors.count'), but {} {found}",
        counted(*promised, "tensor", "tensors"),
        if *count == 1 { "the file has" } else { "the files of the model have" }
    )]
    SplitTensors {
        /// Files of the model.
        count: u64,
        /// Tensors that there should be.
        promised: u64,
        /// Tensors that there are.
        found: u64,
    },
    /// A file of a split model whose name does not tell the names of the others.
    #[error(
        "it is one of {count} files of a split model, but its name does not tell those of the others: it should end in \
         -{:05}-of-{count:05}.gguf", number.saturating_add(1)
    )]
    SplitName {
        /// Its position among the files, from 0 on.
        number: u64,
        /// Files of the model.
        count: u64,
    },
}

impl GgufError {
    /// The tensor that is wrong, if it is one of them.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::DuplicateTensor { tensor }
            | Self::LongName { tensor, .. }
            | Self::Dimensions { tensor, .. }
            | Self::RemovedType { tensor, .. }
            | Self::PartialBlock { tensor, .. }
            | Self::Overflow { tensor, .. }
            | Self::Misaligned { tensor, .. }
            | Self::Overlap { second: tensor, .. }
            | Self::Truncated { tensor, .. } => Some(tensor),
            Self::PastEnd { part: HeaderPart::Tensor(tensor), .. }
            | Self::TooMany { part: HeaderPart::Tensor(tensor), .. } => Some(tensor),
            _ => None,
        }
    }

    /// The byte of the file where it was noticed, if there is one.
    pub fn offset(&self) -> Option<u64> {
        match self {
            Self::Io { range, .. } | Self::Allocation { range, .. } => Some(range.start()),
            Self::NoMagic { offset, .. }
            | Self::PastEnd { offset, .. }
            | Self::TooMany { offset, .. }
            | Self::LongHeader { offset, .. }
            | Self::TooMuchText { offset, .. }
            | Self::NotUtf8 { offset, .. }
            | Self::EmptyKey { offset, .. }
            | Self::ValueType { offset, .. }
            | Self::Boolean { offset, .. }
            | Self::Nested { offset, .. }
            | Self::Overlap { offset, .. } => Some(*offset),
            Self::Truncated { file_len, .. } => Some(*file_len),
            _ => None,
        }
    }
}
