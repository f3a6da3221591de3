//! The safetensors header: parsed from bytes, validated, nothing believed.
//!
//! Accepts exactly what the reference crate `safetensors` 0.8 accepts, less files that name a tensor twice.
//! `tests/headers.rs` and the fuzz target `header` hold it to that. Opened leniently, a file may have padding after its
//! last tensor.
#![forbid(unsafe_code)]

use super::OpenOptions;
use crate::{ByteRange, Dtype, dtype::SizeError};
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::{
    collections::{BTreeMap, HashSet},
    fmt,
};

/// Bytes in front of the header that hold its length, little-endian.
pub const LENGTH_PREFIX_BYTES: u64 = 8;

/// Longest header that the format allows: 100 MB, as in the reference implementation.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Free-form text that a file carries about itself (`__metadata__`).
pub type Metadata = BTreeMap<String, String>;

/// What one header says, checked against itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The tensors in the order of their bytes; no gap, no overlap.
    pub tensors: Vec<HeaderTensor>,
    /// The `__metadata__` entry, if there is one.
    pub metadata: Option<Metadata>,
    /// Where the first tensor's bytes begin in the file.
    pub data_start: u64,
}

/// One tensor as the header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Unique in its file.
    pub name: String,
    /// Type of each element.
    pub dtype: Dtype,
    /// Elements along each dimension, slowest first.
    pub shape: Vec<u64>,
    /// Position of its bytes, counted from the end of the header.
    pub data: ByteRange,
}

/// A shape for people: a header may give a tensor as many dimensions as it has room for.
pub(crate) fn shown_shape(shape: &[u64]) -> String {
    match shape.get(..8).filter(|_| shape.len() > 8) {
        None => format!("{shape:?}"),
        Some(first) => {
            let first: Vec<_> = first.iter().map(u64::to_string).collect();
            format!("[{}, … {} dimensions in all]", first.join(", "), shape.len())
        }
    }
}

/// Why bytes are not a safetensors file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Not even room for the header's length.
    #[error("the file has {}, too few for the 8 that give the header's length", crate::counted(*file_len, "byte", "bytes"))]
    TooShort {
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// The length prefix exceeds what the format allows.
    #[error(
        "the header claims {header_len} bytes, the format allows {MAX_HEADER_BYTES}; is this a safetensors file?"
    )]
    TooLarge {
        /// Length that the prefix claims, in bytes.
        header_len: u64,
    },
    /// The header does not fit the file.
    #[error("the header claims {header_len} bytes but the file has only {file_len} in all")]
    PastEnd {
        /// Length that the prefix claims, in bytes.
        header_len: u64,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// The header is not text.
    #[error("the header is not UTF-8: byte {offset} of the file is wrong")]
    NotUtf8 {
        /// Offset in the file of the first byte that is not UTF-8.
        offset: u64,
    },
    /// The header is not JSON of the expected form.
    #[error("the header is not what the format asks for: {0}")]
    Json(#[from] serde_json::Error),
    /// Two tensors have the same name.
    #[error("tensor '{tensor}' is given twice")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// The bytes of the tensors do not follow each other without gap or overlap.
    #[error(
        "tensor '{tensor}' claims data bytes {claimed_start}..{claimed_end}, but the bytes before it end at {expected_start}"
    )]
    Misplaced {
        /// Name of the tensor.
        tensor: String,
        /// Start that the header gives.
        claimed_start: u64,
        /// End that the header gives.
        claimed_end: u64,
        /// Where the tensor before it ends.
        expected_start: u64,
    },
    /// The number of elements or of bytes does not fit 64 bits.
    #[error("tensor '{tensor}' of type {dtype} and shape {} is larger than any memory", shown_shape(shape))]
    Overflow {
        /// Name of the tensor.
        tensor: String,
        /// Its element type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A packed type whose elements do not fill whole bytes.
    #[error("tensor '{tensor}' of type {dtype} and shape {} does not fill whole bytes", shown_shape(shape))]
    PartialByte {
        /// Name of the tensor.
        tensor: String,
        /// Its element type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The byte range and the shape disagree.
    #[error(
        "tensor '{tensor}' of type {dtype} and shape {} needs {needed} bytes, but the header gives it {given}",
        shown_shape(shape)
    )]
    SizeMismatch {
        /// Name of the tensor.
        tensor: String,
        /// Its element type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes that type and shape make.
        needed: u64,
        /// Bytes between the two offsets.
        given: u64,
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
    /// The file goes on after its last tensor.
    #[error(
        "the last tensor ends at byte {expected_len} but the file has {file_len}; if the rest is padding, open it with lenient"
    )]
    TrailingBytes {
        /// Length that the header makes, in bytes.
        expected_len: u64,
        /// Length of the file in bytes.
        file_len: u64,
    },
}

impl HeaderError {
    /// The tensor that is wrong, if it is one of them.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::DuplicateTensor { tensor }
            | Self::Misplaced { tensor, .. }
            | Self::Overflow { tensor, .. }
            | Self::PartialByte { tensor, .. }
            | Self::SizeMismatch { tensor, .. }
            | Self::Truncated { tensor, .. } => Some(tensor),
            Self::TooShort { .. }
            | Self::TooLarge { .. }
            | Self::PastEnd { .. }
            | Self::NotUtf8 { .. }
            | Self::Json(_)
            | Self::TrailingBytes { .. } => None,
        }
    }
}

/// The length of the header, from the first 8 bytes of a file of `file_len` bytes.
///
/// The answer is at most [`MAX_HEADER_BYTES`] and fits the file, so a caller may allocate it.
///
/// # Errors
/// [`HeaderError::TooShort`], [`HeaderError::TooLarge`] or [`HeaderError::PastEnd`].
pub fn header_len(prefix: [u8; 8], file_len: u64) -> Result<u64, HeaderError> {
    let header_len = u64::from_le_bytes(prefix);
    if file_len < LENGTH_PREFIX_BYTES {
        return Err(HeaderError::TooShort { file_len });
    }
    if header_len > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLarge { header_len });
    }
    if header_len > file_len - LENGTH_PREFIX_BYTES {
        return Err(HeaderError::PastEnd { header_len, file_len });
    }
    Ok(header_len)
}

impl Header {
    /// Parses and validates the JSON text of a header (the bytes after the length prefix) of a file of
    /// `file_len` bytes.
    ///
    /// ```
    /// use hoistway::catalog::safetensors::Header;
    /// let text = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    /// let header = Header::parse(text, 8 + text.len() as u64 + 2)?;
    /// assert_eq!(header.tensors[0].name, "a");
    /// # Ok::<(), hoistway::catalog::safetensors::HeaderError>(())
    /// ```
    ///
    /// # Errors
    /// Any [`HeaderError`] but those of [`header_len`].
    pub fn parse(text: &[u8], file_len: u64) -> Result<Self, HeaderError> {
        Self::parse_with(text, file_len, &OpenOptions::default())
    }

    /// Parses a header as [`parse`](Self::parse) does, as strictly as `options` say.
    ///
    /// ```
    /// use hoistway::catalog::{OpenOptions, safetensors::Header};
    /// let text = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    /// let padded_len = 8 + text.len() as u64 + 4096;
    /// assert!(Header::parse(text, padded_len).is_err());
    /// let lenient = OpenOptions::default().lenient(true);
    /// assert!(Header::parse_with(text, padded_len, &lenient).is_ok());
    /// ```
    ///
    /// # Errors
    /// Any [`HeaderError`] but those of [`header_len`]; no [`HeaderError::TrailingBytes`] of files opened leniently.
    pub fn parse_with(text: &[u8], file_len: u64, options: &OpenOptions) -> Result<Self, HeaderError> {
        let text_utf8 = std::str::from_utf8(text).map_err(|error| HeaderError::NotUtf8 {
            offset: LENGTH_PREFIX_BYTES + error.valid_up_to() as u64,
        })?;
        let RawHeader { mut tensors, metadata } = serde_json::from_str(text_utf8)?;
        if let Some(tensor) = duplicate_name(&tensors) {
            return Err(HeaderError::DuplicateTensor { tensor });
        }
        // The order in the text is free; the order of the bytes is what the checks below are about.
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        let data_start = LENGTH_PREFIX_BYTES + text.len() as u64;
        let mut header = Self { tensors: Vec::with_capacity(tensors.len()), metadata, data_start };
        let mut data_len = 0;
        for (name, info) in tensors {
            let tensor = check_tensor(name, info, data_len)?;
            data_len = tensor.data.end();
            header.tensors.push(tensor);
        }
        match header.check_file_len(data_len, file_len) {
            Err(HeaderError::TrailingBytes { .. }) if options.lenient => Ok(header),
            checked => checked.map(|()| header),
        }
    }

    fn check_file_len(&self, data_len: u64, file_len: u64) -> Result<(), HeaderError> {
        let data_start = self.data_start;
        let available = file_len.saturating_sub(data_start);
        if data_len > available {
            for tensor in &self.tensors {
                if tensor.data.end() > available {
                    let needed = ByteRange::new(
                        data_start.saturating_add(tensor.data.start()),
                        data_start.saturating_add(tensor.data.end()),
                    )
                    .unwrap_or(tensor.data);
                    return Err(HeaderError::Truncated { tensor: tensor.name.clone(), needed, file_len });
                }
            }
        }
        if data_len < available {
            return Err(HeaderError::TrailingBytes { expected_len: data_start + data_len, file_len });
        }
        Ok(())
    }
}

fn duplicate_name(tensors: &[(String, TensorInfo)]) -> Option<String> {
    let mut names = HashSet::with_capacity(tensors.len());
    tensors.iter().find(|(name, _)| !names.insert(name.as_str())).map(|(name, _)| name.clone())
}

/// A tensor must begin where the one before it ends, and be as long as its type and shape make it.
fn check_tensor(tensor: String, info: TensorInfo, expected_start: u64) -> Result<HeaderTensor, HeaderError> {
    let TensorInfo { dtype, shape, data_offsets: (claimed_start, claimed_end) } = info;
    let data = match ByteRange::new(claimed_start, claimed_end) {
        Some(data) if claimed_start == expected_start => data,
        _ => {
            return Err(HeaderError::Misplaced { tensor, claimed_start, claimed_end, expected_start });
        }
    };
    match dtype.size_of(&shape) {
        Ok(needed) if needed == data.len() => Ok(HeaderTensor { name: tensor, dtype, shape, data }),
        Ok(needed) => Err(HeaderError::SizeMismatch { tensor, dtype, shape, needed, given: data.len() }),
        Err(SizeError::Overflow) => Err(HeaderError::Overflow { tensor, dtype, shape }),
        Err(SizeError::PartialByte | SizeError::PartialBlock | SizeError::UnknownType) => {
            Err(HeaderError::PartialByte { tensor, dtype, shape })
        }
    }
}

/// The header as the text gives it: form checked, contents not.
struct RawHeader {
    tensors: Vec<(String, TensorInfo)>,
    metadata: Option<Metadata>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut tensors = Vec::new();
                let mut metadata: Option<Option<Metadata>> = None;
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        set_once(&mut metadata, "__metadata__", || map.next_value())?;
                    } else {
                        let info = map.next_value()?;
                        tensors.push((name, info));
                    }
                }
                Ok(RawHeader { tensors, metadata: metadata.flatten() })
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct TensorInfo {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for TensorInfo {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TensorInfoVisitor;
        impl<'de> Visitor<'de> for TensorInfoVisitor {
            type Value = TensorInfo;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a tensor's dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TensorInfo, A::Error> {
                let mut dtype = None;
                let mut shape = None;
                let mut data_offsets = None;
                while let Some(field) = map.next_key()? {
                    match field {
                        Field::Dtype => {
                            set_once(&mut dtype, "dtype", || map.next_value().map(|OwnDtype(dtype)| dtype))?
                        }
                        Field::Shape => set_once(&mut shape, "shape", || map.next_value())?,
                        Field::DataOffsets => {
                            set_once(&mut data_offsets, "data_offsets", || map.next_value())?
                        }
                        Field::Other => {
                            map.next_value::<Discarded>()?;
                        }
                    }
                }
                Ok(TensorInfo {
                    dtype: dtype.ok_or_else(|| de::Error::missing_field("dtype"))?,
                    shape: shape.ok_or_else(|| de::Error::missing_field("shape"))?,
                    data_offsets: data_offsets.ok_or_else(|| de::Error::missing_field("data_offsets"))?,
                })
            }

            /// The reference implementation also takes `[dtype, shape, data_offsets]`.
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TensorInfo, A::Error> {
                let missing = |position| de::Error::invalid_length(position, &self);
                let OwnDtype(dtype) = seq.next_element()?.ok_or_else(|| missing(0))?;
                let shape = seq.next_element()?.ok_or_else(|| missing(1))?;
                let data_offsets = seq.next_element()?.ok_or_else(|| missing(2))?;
                Ok(TensorInfo { dtype, shape, data_offsets })
            }
        }
        deserializer.deserialize_struct("tensor", &["dtype", "shape", "data_offsets"], TensorInfoVisitor)
    }
}

/// An element type that this format has.
struct OwnDtype(Dtype);

impl<'de> Deserialize<'de> for OwnDtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let dtype = Dtype::deserialize_of_header(deserializer)?;
        if !dtype.is_of_safetensors() {
            return Err(de::Error::custom(format_args!("{dtype} is not a type of safetensors files")));
        }
        Ok(Self(dtype))
    }
}

#[derive(serde::Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Dtype,
    Shape,
    DataOffsets,
    #[serde(other)]
    Other,
}

fn set_once<T, E: de::Error>(
    slot: &mut Option<T>,
    field: &'static str,
    value: impl FnOnce() -> Result<T, E>,
) -> Result<(), E> {
    if slot.is_some() {
        return Err(E::duplicate_field(field));
    }
    *slot = Some(value()?);
    Ok(())
}

/// Any JSON value, parsed as strictly as a used one and then thrown away.
///
/// `serde::de::IgnoredAny` would skip it without checks of nesting depth, numbers and surrogates, and so
/// accept files that the reference implementation rejects.
struct Discarded;

impl<'de> Deserialize<'de> for Discarded {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DiscardedVisitor;
        impl<'de> Visitor<'de> for DiscardedVisitor {
            type Value = Discarded;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any JSON value")
            }

            fn visit_bool<E>(self, _: bool) -> Result<Discarded, E> {
                Ok(Discarded)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Discarded, E> {
                Ok(Discarded)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Discarded, E> {
                Ok(Discarded)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Discarded, E> {
                Ok(Discarded)
            }

            fn visit_str<E>(self, _: &str) -> Result<Discarded, E> {
                Ok(Discarded)
            }

            fn visit_unit<E>(self) -> Result<Discarded, E> {
                Ok(Discarded)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Discarded, A::Error> {
                while seq.next_element::<Discarded>()?.is_some() {}
                Ok(Discarded)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Discarded, A::Error> {
                while map.next_entry::<Discarded, Discarded>()?.is_some() {}
                Ok(Discarded)
            }
        }
        deserializer.deserialize_any(DiscardedVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, data_len: u64) -> Result<Header, HeaderError> {
        Header::parse(text.as_bytes(), LENGTH_PREFIX_BYTES + text.len() as u64 + data_len)
    }

    #[test]
    fn tensors_come_in_the_order_of_their_bytes() {
        let header = parse(
            r#"{"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#,
            5,
        )
        .unwrap();
        let names: Vec<_> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
    }

    #[test]
    fn a_short_file_names_the_first_tensor_that_is_cut() {
        let text = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
        match parse(text, 6) {
            Err(HeaderError::Truncated { tensor, needed, .. }) => {
                assert_eq!(tensor, "b");
                assert_eq!(needed.len(), 4);
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(parse(text, 9), Err(HeaderError::TrailingBytes { .. })));
    }

    #[test]
    fn an_error_counts_a_single_byte() {
        let error = HeaderError::TooShort { file_len: 1 };
        assert_eq!(error.to_string(), "the file has 1 byte, too few for the 8 that give the header's length");
    }

    #[test]
    fn a_name_given_twice_is_refused() {
        let text = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        assert!(matches!(parse(text, 1), Err(HeaderError::DuplicateTensor { tensor }) if tensor == "a"));
    }

    #[test]
    fn a_hundred_thousand_tensors_parse() {
        let mut text = String::from("{");
        for i in 0..100_000u64 {
            let separator = if i == 0 { "" } else { "," };
            text += &format!(
                r#"{separator}"layer.{i}.weight":{{"dtype":"U8","shape":[1,1],"data_offsets":[{i},{}]}}"#,
                i + 1
            );
        }
        text.push('}');
        assert_eq!(parse(&text, 100_000).unwrap().tensors.len(), 100_000);
    }
}
