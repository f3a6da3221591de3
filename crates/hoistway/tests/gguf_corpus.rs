//! The corpus of GGUF files: each gives the error that it should, or holds the tensors that it should.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/corpus.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod corpus;

use hoistway::{
    Catalog, Error,
    catalog::{FormatError, OpenOptions, gguf::Gguf},
};
use serde_json::Value;
use std::{fs, path::PathBuf};

struct Case {
    name: String,
    files: Vec<(String, Vec<u8>)>,
    open: String,
    offset: u64,
    /// What happens strictly, and leniently.
    errors: [Option<String>; 2],
    tensors: Option<Vec<Tensor>>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    start: u64,
    len: u64,
}

fn options(lenient: bool, offset: u64) -> OpenOptions {
    OpenOptions::default().lenient(lenient).offset(offset)
}

fn corpus() -> Vec<Case> {
    corpus::cases("gguf").iter().map(case).collect()
}

fn case(case: &Value) -> Case {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let strict = text(&case["error"]);
    let lenient = case.get("lenient").map_or_else(|| strict.clone(), text);
    Case {
        name: text(&case["name"]).unwrap(),
        files: corpus::gguf_files(case),
        open: text(&case["open"]).unwrap(),
        offset: corpus::gguf_offset(case),
        errors: [strict, lenient],
        tensors: case.get("tensors").map(|list| list.as_array().unwrap().iter().map(tensor).collect()),
    }
}

fn tensor(tensor: &Value) -> Tensor {
    Tensor {
        name: tensor[0].as_str().unwrap().to_owned(),
        dtype: tensor[1].as_str().unwrap().to_owned(),
        shape: tensor[2].as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).collect(),
        start: tensor[3].as_u64().unwrap(),
        len: tensor[4].as_u64().unwrap(),
    }
}

fn variant(error: &dyn std::fmt::Debug) -> String {
    format!("{error:?}").split([' ', '(', '{']).next().unwrap().to_owned()
}

/// The name of an error's variant, once it is sure that the error says where and what.
fn checked_variant(error: &Error, case: &Case) -> String {
    let message = error.to_string();
    assert!(message.len() > 20 && !message.ends_with('.'), "{}: '{message}'", case.name);
    assert!(message.len() < 70_000, "{}: {} bytes of message", case.name, message.len());
    match error {
        Error::InvalidFile { path, problem } => {
            let file = path.file_name().unwrap().to_str().unwrap();
            assert!(case.files.iter().any(|(name, _)| name == file), "{}: {file}", case.name);
            match problem {
                FormatError::Gguf(problem) => variant(problem),
                FormatError::Safetensors(problem) => variant(problem),
                other => panic!("{}: {other:?}", case.name),
            }
        }
        other => variant(other),
    }
}

#[test]
fn each_file_gives_its_error_or_holds_its_tensors() {
    let directory = tempfile::tempdir().unwrap();
    let cases = corpus();
    assert!(cases.iter().filter(|case| case.errors[0].is_some()).count() >= 150);
    assert!(cases.iter().filter(|case| case.errors[0].is_none()).count() >= 50);
    let mut wrong = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let directory = directory.path().join(number.to_string());
        fs::create_dir(&directory).unwrap();
        for (name, file) in &case.files {
            fs::write(directory.join(name), file).unwrap();
        }
        let path: PathBuf = directory.join(&case.open);
        for (expected, lenient) in case.errors.iter().zip([false, true]) {
            let opened = Catalog::open_with(&[&path], &options(lenient, case.offset));
            let found = opened.as_ref().err().map(|error| checked_variant(error, case));
            if &found != expected {
                wrong.push(format!("{}, lenient {lenient}: {found:?}, not {expected:?}", case.name));
            }
            let (Ok(catalog), Some(tensors)) = (opened, &case.tensors) else { continue };
            let mut found: Vec<Tensor> = catalog
                .tensors()
                .iter()
                .map(|tensor| Tensor {
                    name: tensor.name.to_string(),
                    dtype: tensor.dtype.to_string(),
                    shape: tensor.shape.to_vec(),
                    start: tensor.bytes.start(),
                    len: tensor.bytes.len(),
                })
                .collect();
            let mut expected = tensors.clone();
            found.sort();
            expected.sort();
            if found != expected {
                wrong.push(format!("{}, lenient {lenient}: {found:?}, not {expected:?}", case.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The files of the corpus that are good, small, and one each.
fn small_good_files() -> impl Iterator<Item = (String, Vec<u8>, Vec<Tensor>)> {
    corpus().into_iter().filter(|case| case.offset == 0 && case.files.len() == 1).filter_map(|mut case| {
        let (_, file) = case.files.pop()?;
        (case.errors[0].is_none() && file.len() < 2000).then_some(())?;
        Some((case.name, file, case.tensors?))
    })
}

#[test]
fn a_good_file_that_is_cut_anywhere_is_refused() {
    let mut cuts = 0;
    for (name, file, tensors) in small_good_files() {
        // The end of a value of unknown type is unknown.
        if tensors.iter().any(|tensor| tensor.dtype.starts_with("UNKNOWN")) {
            continue;
        }
        let with_bytes = tensors.iter().filter(|tensor| tensor.len > 0);
        let Some(end) = with_bytes.map(|tensor| tensor.start + tensor.len).max() else { continue };
        for len in 0..file.len() {
            let parsed = Gguf::parse(&&file[..len], &OpenOptions::default());
            assert_eq!(parsed.is_ok(), len as u64 >= end, "{name}, cut at {len}: {parsed:?}");
            cuts += 1;
        }
    }
    assert!(cuts > 5000);
}

#[test]
fn a_good_file_with_any_byte_changed_is_refused_or_stays_inside_itself() {
    let mut accepted = 0;
    for (name, mut file, _) in small_good_files() {
        for position in 0..file.len().min(600) {
            let before = file[position];
            for value in [0, 1, 0x7f, 0x80, 0xff, before ^ 1, before.wrapping_add(1)] {
                file[position] = value;
                for lenient in [false, true] {
                    let Ok(parsed) = Gguf::parse(&file.as_slice(), &options(lenient, 0)) else { continue };
                    accepted += 1;
                    let mut end = parsed.header.data_start;
                    for tensor in parsed.tensors.iter().filter(|tensor| !tensor.bytes.is_empty()) {
                        assert!(tensor.bytes.start() >= end, "{name}, byte {position} is {value}");
                        end = tensor.bytes.end();
                    }
                    assert!(
                        end <= file.len() as u64 || parsed.tensors.is_empty(),
                        "{name}, byte {position} is {value}"
                    );
                }
            }
            file[position] = before;
        }
    }
    assert!(accepted > 5000);
}
