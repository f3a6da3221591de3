//! The corpora of good and bad files, as bytes. See `testkit/corpus`.

use serde_json::Value;
use std::fs;

/// The cases of one of the corpora, `gguf` or `headers`.
pub fn cases(name: &str) -> Vec<Value> {
    let path = format!("{}/../../testkit/corpus/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A case's files of the corpus `gguf`, by their names.
pub fn gguf_files(case: &Value) -> Vec<(String, Vec<u8>)> {
    let part = |part: &Value| match part.as_str() {
        Some(text) => hex(text),
        None => hex(part[0].as_str().unwrap()).repeat(part[1].as_u64().unwrap() as usize),
    };
    let files = case["files"].as_object().unwrap().iter();
    files
        .map(|(name, parts)| (name.clone(), parts.as_array().unwrap().iter().flat_map(part).collect()))
        .collect()
}

/// Where the GGUF begins in the file that a case opens.
pub fn gguf_offset(case: &Value) -> u64 {
    case["offset"].as_u64().unwrap_or(0)
}

/// A case's file of the corpus `headers`; its tensors have the bytes that `byte` gives by their number.
pub fn safetensors_file(case: &Value, byte: impl Fn(usize) -> u8) -> Vec<u8> {
    if let Some(file) = case["file_hex"].as_str() {
        return hex(file);
    }
    let header = match case["header_hex"].as_str() {
        Some(header) => hex(header),
        None => header_text(&case["header"]).into_bytes(),
    };
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend((0..case["data_bytes"].as_u64().unwrap() as usize).map(byte));
    file
}

fn header_text(header: &Value) -> String {
    match header {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(header_text).collect(),
        part => part["repeat"].as_str().unwrap().repeat(part["times"].as_u64().unwrap() as usize),
    }
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}
