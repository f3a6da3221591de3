//! From the first byte of a header to its last: fields in the order in which they stand in the file.
#![forbid(unsafe_code)]

use super::{
    Array, ByteOrder, ByteSource, Gguf, GgufError, Header, HeaderPart, KeyValues, MAGIC, MAX_ARRAY_LEN,
    MAX_KEY_BYTES, MAX_KEYS, MAX_NESTED_ARRAYS, MAX_STRING_BYTES, MAX_TENSORS, OpenOptions, Value, ValueType,
    reader::{Reader, read},
    tensors::{self, Described},
};
use crate::{Alignment, ByteRange, Dtype};
use std::{collections::HashSet, sync::Arc};

/// Bytes of a key and its value, at least: the key's length, the type, and a value of one byte.
const LEAST_KEY_BYTES: u64 = 8 + 4 + 1;
/// Bytes of a tensor's description, at least: the name's length, the number of dimensions, type and offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;
/// Bytes of an array in an array, at least: type and length.
const LEAST_ARRAY_BYTES: u64 = 4 + 8;
/// Arrays in each other.
const MAX_DEPTH: u32 = 1;
const MAX_LENIENT_DEPTH: u32 = 4;
/// Dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;
const MAX_LENIENT_DIMENSIONS: u32 = 8;
/// Bytes that tell what a file is that is no GGUF.
const BEGINNING_BYTES: usize = 24;
/// The alignment of files that do not give one.
const DEFAULT_ALIGNMENT: Alignment = match Alignment::new(32) {
    Some(alignment) => alignment,
    None => Alignment::BYTE,
};

pub(super) fn parse(source: &dyn ByteSource, options: &OpenOptions) -> Result<Gguf, GgufError> {
    let io_error = |error| GgufError::Io { range: ByteRange::default(), source: error };
    let file_len = source.len_bytes().map_err(io_error)?;
    let range = ByteRange::new(options.offset, file_len).ok_or_else(|| no_magic(source, options.offset))?;
    let mut reader = Reader::new(source, range, ByteOrder::Little);
    match reader.array() {
        Ok(MAGIC) => {}
        Ok(_) | Err(GgufError::PastEnd { .. }) => return Err(no_magic(source, options.offset)),
        Err(error) => return Err(error),
    }
    let version = version(&mut reader)?;
    let tensor_count = reader.u64()?;
    reader.check_limit("tensors", tensor_count, MAX_TENSORS, 8)?;
    let key_count = reader.u64()?;
    reader.check_limit("keys", key_count, MAX_KEYS, 8)?;
    reader.require(key_count, LEAST_KEY_BYTES)?;
    reader.require(tensor_count, LEAST_TENSOR_BYTES)?;

    let mut metadata = KeyValues::default();
    for position in 0..key_count {
        let (key, value) = key_and_value(&mut reader, position, options)?;
        if metadata.contains(&key) {
            return Err(GgufError::DuplicateKey { key: key.to_string() });
        }
        metadata.push(key, value);
    }
    let alignment = alignment(&metadata, options)?;
    reader.enter(HeaderPart::Start);
    reader.require(tensor_count, LEAST_TENSOR_BYTES)?;
    let described = describe_tensors(&mut reader, tensor_count, options)?;

    // Padding counts from the start of the GGUF, also if that is not the start of the file.
    let header_len = reader.position() - options.offset;
    let data_start = alignment.up(header_len).and_then(|len| options.offset.checked_add(len));
    let data_start = data_start.ok_or_else(|| GgufError::PastEnd {
        part: HeaderPart::Start,
        offset: reader.position(),
        needed: alignment.bytes(),
        file_len,
    })?;
    let tensors = tensors::place(described, data_start, file_len, alignment, options)?;
    let header = Header {
        version,
        byte_order: reader.byte_order(),
        alignment: alignment.bytes(),
        offset: options.offset,
        data_start,
        metadata,
    };
    Ok(Gguf { header, tensors })
}

/// The error of bytes that are no GGUF.
pub(in crate::catalog) fn no_magic(source: &dyn ByteSource, offset: u64) -> GgufError {
    let file_len = source.len_bytes().unwrap_or_default();
    let start = offset.min(file_len);
    let mut found = vec![0; usize::try_from(file_len - start).unwrap_or(usize::MAX).min(BEGINNING_BYTES)];
    match read(source, &mut found, start) {
        Ok(()) => GgufError::NoMagic { offset, found },
        Err(error) => error,
    }
}

fn version(reader: &mut Reader<'_>) -> Result<u32, GgufError> {
    let version = reader.u32()?;
    // Small numbers whose low half is empty are those of the other byte order.
    let (version, byte_order) = if version & 0xFFFF == 0 && version != 0 {
        (version.swap_bytes(), ByteOrder::Big)
    } else {
        (version, ByteOrder::Little)
    };
    reader.set_byte_order(byte_order);
    if matches!(version, 2 | 3) { Ok(version) } else { Err(GgufError::Version { version }) }
}

fn key_and_value(
    reader: &mut Reader<'_>,
    position: u64,
    options: &OpenOptions,
) -> Result<(Arc<str>, Value), GgufError> {
    reader.enter(HeaderPart::Key(position));
    let offset = reader.position();
    let key: Arc<str> = reader.kept_string(MAX_KEY_BYTES)?.into();
    if key.is_empty() && !options.lenient {
        return Err(GgufError::EmptyKey { position, offset });
    }
    reader.enter(HeaderPart::Value(key.clone()));
    let value = match value_type(reader)? {
        ValueType::U8 => Value::U8(u8::from_le_bytes(reader.number()?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(reader.number()?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(reader.number()?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(reader.number()?)),
        ValueType::U32 => Value::U32(reader.u32()?),
        ValueType::I32 => Value::I32(i32::from_le_bytes(reader.number()?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(reader.number()?)),
        ValueType::U64 => Value::U64(reader.u64()?),
        ValueType::I64 => Value::I64(i64::from_le_bytes(reader.number()?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(reader.number()?)),
        ValueType::Bool => Value::Bool(boolean(reader, options)?),
        ValueType::String => Value::String(reader.kept_string(MAX_STRING_BYTES)?.into()),
        ValueType::Array => Value::Array(array(reader, &key, &mut Nesting::default(), options)?),
    };
    Ok((key, value))
}

fn value_type(reader: &mut Reader<'_>) -> Result<ValueType, GgufError> {
    let offset = reader.position();
    let id = reader.u32()?;
    ValueType::from_id(id).ok_or_else(|| GgufError::ValueType { part: reader.part(), id, offset })
}

fn boolean(reader: &mut Reader<'_>, options: &OpenOptions) -> Result<bool, GgufError> {
    let offset = reader.position();
    let [value] = reader.array()?;
    if value > 1 && !options.lenient {
        return Err(GgufError::Boolean { part: reader.part(), value, offset });
    }
    Ok(value != 0)
}

/// The nesting of an array in other arrays.
#[derive(Default)]
struct Nesting {
    /// Arrays around it.
    depth: u32,
    /// Arrays in the outermost one, as far as they are known.
    arrays: u64,
}

/// Walks over an array, so that its end is known, and keeps where it lies.
fn array(
    reader: &mut Reader<'_>,
    key: &Arc<str>,
    nesting: &mut Nesting,
    options: &OpenOptions,
) -> Result<Array, GgufError> {
    let offset = reader.position();
    let limit = if options.lenient { MAX_LENIENT_DEPTH } else { MAX_DEPTH };
    if nesting.depth >= limit {
        let (part, depth, lenient_limit) = (reader.part(), nesting.depth + 1, MAX_LENIENT_DEPTH);
        return Err(GgufError::Nested { part, depth, limit, lenient_limit, offset });
    }
    let element = value_type(reader)?;
    let len = reader.u64()?;
    reader.check_limit("elements", len, MAX_ARRAY_LEN, 8)?;
    let start = reader.position();
    match element {
        ValueType::String => {
            reader.require(len, 8)?;
            for _ in 0..len {
                reader.skip_string()?;
            }
        }
        ValueType::Array => {
            nesting.arrays += len;
            reader.check_limit("arrays in arrays", nesting.arrays, MAX_NESTED_ARRAYS, 8)?;
            reader.require(len, LEAST_ARRAY_BYTES)?;
            nesting.depth += 1;
            for _ in 0..len {
                array(reader, key, nesting, options)?;
            }
            nesting.depth -= 1;
        }
        ValueType::Bool if !options.lenient => {
            reader.require(len, 1)?;
            for _ in 0..len {
                boolean(reader, options)?;
            }
        }
        _ => {
            let bytes = reader.require(len, element.width().unwrap_or(1))?;
            reader.skip(bytes)?;
        }
    }
    let bytes = ByteRange::new(start, reader.position()).unwrap_or_default();
    Ok(Array { key: key.clone(), element, len, bytes, byte_order: reader.byte_order() })
}

/// The next array inside another one, whose depth was checked when that was found.
pub(super) fn array_of_array(reader: &mut Reader<'_>, key: &Arc<str>) -> Result<Array, GgufError> {
    array(reader, key, &mut Nesting::default(), &OpenOptions { lenient: true, ..OpenOptions::default() })
}

fn alignment(metadata: &KeyValues, options: &OpenOptions) -> Result<Alignment, GgufError> {
    let alignment = match metadata.get("general.alignment") {
        None => return Ok(DEFAULT_ALIGNMENT),
        Some(Value::U32(alignment)) => *alignment,
        Some(other) => return Err(GgufError::AlignmentType { found: other.value_type() }),
    };
    Alignment::new(alignment.into())
        .filter(|found| options.lenient || found.bytes().is_multiple_of(8))
        .ok_or(GgufError::Alignment { alignment })
}

fn describe_tensors(
    reader: &mut Reader<'_>,
    count: u64,
    options: &OpenOptions,
) -> Result<Vec<Described>, GgufError> {
    let mut described = Vec::new();
    let mut names: HashSet<Arc<str>> = HashSet::new();
    for position in 0..count {
        reader.enter(HeaderPart::TensorName(position));
        let name: Arc<str> = reader.kept_string(MAX_KEY_BYTES)?.into();
        reader.enter(HeaderPart::Tensor(name.clone()));
        let tensor = describe_tensor(reader, name.clone(), options)?;
        if !names.insert(name) {
            return Err(GgufError::DuplicateTensor { tensor: tensor.name.to_string() });
        }
        described.push(tensor);
    }
    Ok(described)
}

fn describe_tensor(
    reader: &mut Reader<'_>,
    name: Arc<str>,
    options: &OpenOptions,
) -> Result<Described, GgufError> {
    let len = name.len() as u64;
    if len > super::MAX_NAME_BYTES && !options.lenient {
        return Err(GgufError::LongName { tensor: name.to_string(), len });
    }
    let count = reader.u32()?;
    let limit = if options.lenient { MAX_LENIENT_DIMENSIONS } else { MAX_DIMENSIONS };
    if count > limit {
        let (tensor, lenient_limit) = (name.to_string(), MAX_LENIENT_DIMENSIONS);
        return Err(GgufError::Dimensions { tensor, count, limit, lenient_limit });
    }
    let mut shape = (0..count).map(|_| reader.u64()).collect::<Result<Vec<u64>, _>>()?;
    // Files give the fastest dimension first.
    shape.reverse();
    let id = reader.u32()?;
    let Some(dtype) = Dtype::from_ggml(id) else {
        return Err(GgufError::RemovedType { tensor: name.to_string(), id });
    };
    let offset = reader.u64()?;
    Ok(Described { name, dtype, shape, offset })
}
