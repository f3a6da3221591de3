//! The keys and values of GGUF files, for people and for scripts.

use crate::output;
use hoistway::{
    Checkpoint, OpenArray,
    catalog::{
        FileId,
        gguf::{ArrayValues, ByteOrder, Header, Value, ValueType},
    },
};
use serde_json::json;
use std::fmt::Write;

/// Values of an array that are shown, at most.
const SHOWN_VALUES: u64 = 8;
/// Characters of a text that are shown unless all is.
const SHOWN_CHARACTERS: usize = 100;

/// Writes a line about the header and one for each key. With `all`, whole keys and texts and the first values of arrays.
pub(crate) fn write(
    text: &mut String,
    checkpoint: &Checkpoint,
    file: FileId,
    header: &Header,
    all: bool,
) -> hoistway::Result<()> {
    let byte_order = if header.byte_order == ByteOrder::Big { ", big-endian" } else { "" };
    let _ = writeln!(text, "  GGUF version {}{byte_order}, alignment {}", header.version, header.alignment);
    for (key, value) in header.metadata.iter() {
        let array = if all { checkpoint.array(file, key)? } else { None };
        let shown = match (value, array) {
            (_, Some(array)) => format!("{value} {}", first_values(&array)?),
            (Value::String(whole), None) if !all => shortened(whole),
            (value, None) => value.to_string(),
        };
        let key = if all { key.to_owned() } else { shortened(key) };
        let _ = writeln!(text, "  {}: {}", output::printable(&key), output::printable(&shown));
    }
    Ok(())
}

/// What [`write`] writes, for scripts.
pub(crate) fn as_json(
    checkpoint: &Checkpoint,
    file: FileId,
    header: &Header,
    all: bool,
) -> hoistway::Result<serde_json::Value> {
    let key_value = |(key, value): (&str, &Value)| {
        let mut entry = json!({ "key": key, "type": value.value_type().name() });
        match value {
            Value::Array(array) => {
                entry["element"] = json!(array.element().name());
                entry["len"] = json!(array.len());
                if all && let Some(array) = checkpoint.array(file, key)? {
                    entry["first"] = first_values(&array)?;
                }
            }
            scalar => entry["value"] = scalar_as_json(scalar),
        }
        Ok(entry)
    };
    let key_values = header.metadata.iter().map(key_value).collect::<hoistway::Result<Vec<_>>>()?;
    let is_big = header.byte_order == ByteOrder::Big;
    Ok(json!({
        "version": header.version,
        "byte_order": if is_big { "big" } else { "little" },
        "alignment": header.alignment,
        "offset": header.offset,
        "data_start": header.data_start,
        "key_values": key_values,
    }))
}

fn shortened(whole: &str) -> String {
    match whole.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}... ({} bytes)", &whole[..end], whole.len()),
        None => whole.to_owned(),
    }
}

fn scalar_as_json(value: &Value) -> serde_json::Value {
    match value {
        Value::U8(number) => json!(number),
        Value::I8(number) => json!(number),
        Value::U16(number) => json!(number),
        Value::I16(number) => json!(number),
        Value::U32(number) => json!(number),
        Value::I32(number) => json!(number),
        Value::F32(number) => f32_as_json(*number),
        Value::U64(number) => json!(number),
        Value::I64(number) => json!(number),
        Value::F64(number) => f64_as_json(*number),
        Value::Bool(truth) => json!(truth),
        Value::String(text) => json!(text),
        Value::Array(_) => serde_json::Value::Null,
    }
}

/// A number as short as its type allows: of 32 bits as text has it, not as its 64 bits are. JSON has none for infinity
/// and for what is no number: these are text.
fn float_as_json(shortest: &str, number: f64) -> serde_json::Value {
    match shortest.parse::<f64>() {
        Ok(same) if number.is_finite() => json!(same),
        _ => json!(shortest),
    }
}

fn f32_as_json(number: f32) -> serde_json::Value {
    float_as_json(&number.to_string(), number.into())
}

fn f64_as_json(number: f64) -> serde_json::Value {
    float_as_json(&number.to_string(), number)
}

/// The first few values of an array, as a list. Of a quarter of a million tokens only these are read.
fn first_values(array: &OpenArray) -> hoistway::Result<serde_json::Value> {
    let first = array.first(SHOWN_VALUES);
    if first.array().element() == ValueType::Array {
        return first.arrays()?.iter().map(first_values).collect();
    }
    Ok(match first.read()? {
        ArrayValues::U8(values) => json!(values),
        ArrayValues::I8(values) => json!(values),
        ArrayValues::U16(values) => json!(values),
        ArrayValues::I16(values) => json!(values),
        ArrayValues::U32(values) => json!(values),
        ArrayValues::I32(values) => json!(values),
        ArrayValues::F32(values) => values.into_iter().map(f32_as_json).collect(),
        ArrayValues::U64(values) => json!(values),
        ArrayValues::I64(values) => json!(values),
        ArrayValues::F64(values) => values.into_iter().map(f64_as_json).collect(),
        ArrayValues::Bool(values) => json!(values),
        ArrayValues::String(values) => json!(values),
        ArrayValues::Array(_) => serde_json::Value::Null,
    })
}
