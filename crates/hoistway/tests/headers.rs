//! The corpus of headers: each gives the error that it should, the reference crate agrees, and nothing crashes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/corpus.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod corpus;

use hoistway::{
    Catalog, Error,
    catalog::{FormatError, OpenOptions},
};
use serde_json::Value;
use std::fs;

struct Case {
    name: String,
    file: Vec<u8>,
    error: Option<String>,
    reference_accepts: bool,
}

fn corpus() -> Vec<Case> {
    let of = |case: &Value| {
        let error = case["error"].as_str().map(str::to_owned);
        let reference_accepts = error.is_none() || case["reference"] == "accept";
        let (name, file) = (case["name"].as_str().unwrap().into(), corpus::safetensors_file(case, |_| 0));
        Case { name, file, error, reference_accepts }
    };
    corpus::cases("headers").iter().map(of).collect()
}

#[test]
fn each_header_gives_its_error_or_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("case.safetensors");
    let cases = corpus();
    assert!(cases.iter().filter(|case| case.error.is_some()).count() >= 60);
    for case in cases {
        fs::write(&path, &case.file).unwrap();
        let found = match Catalog::open(&[&path]) {
            Ok(_) => None,
            Err(Error::InvalidFile { path: at, problem }) => {
                assert_eq!(at, path, "{}", case.name);
                let message = problem.to_string();
                assert!(
                    message.len() > 20 && !message.ends_with('.'),
                    "{}: '{message}' is no sentence part",
                    case.name
                );
                let variant = match &problem {
                    FormatError::Safetensors(problem) => format!("{problem:?}"),
                    FormatError::Gguf(problem) => format!("{problem:?}"),
                    other => format!("{other:?}"),
                };
                Some(variant.split([' ', '(', '{']).next().unwrap().to_owned())
            }
            Err(other) => panic!("{}: {other:?}", case.name),
        };
        assert_eq!(found, case.error, "{}", case.name);
    }
}

#[test]
fn lenient_takes_padding_after_the_last_tensor_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("case.safetensors");
    let lenient = OpenOptions::default().lenient(true);
    for case in corpus() {
        fs::write(&path, &case.file).unwrap();
        let opened = Catalog::open_with(&[&path], &lenient);
        let is_harmless = matches!(case.error.as_deref(), None | Some("TrailingBytes"));
        assert_eq!(opened.is_ok(), is_harmless, "{}: {:?}", case.name, opened.as_ref().err());
        if let Ok(catalog) = opened {
            let header_len = u64::from_le_bytes(case.file[..8].try_into().unwrap());
            let first = catalog.tensors().first().map_or(8 + header_len, |tensor| tensor.bytes.start());
            assert_eq!(first, 8 + header_len, "{}", case.name);
        }
    }
}

#[test]
fn the_reference_crate_agrees_with_the_corpus() {
    for case in corpus() {
        let accepted = safetensors::SafeTensors::read_metadata(&case.file);
        assert_eq!(accepted.is_ok(), case.reference_accepts, "{}: {:?}", case.name, accepted.err());
    }
}

#[test]
fn accepted_headers_are_read_as_the_reference_reads_them() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("case.safetensors");
    for case in corpus().into_iter().filter(|case| case.error.is_none()) {
        fs::write(&path, &case.file).unwrap();
        let catalog = Catalog::open(&[&path]).unwrap();
        let (header_len, reference) = safetensors::SafeTensors::read_metadata(&case.file).unwrap();
        assert_eq!(catalog.tensors().len(), reference.tensors().len(), "{}", case.name);
        for tensor in catalog.tensors() {
            let info = reference.info(&tensor.name).unwrap();
            let shape: Vec<u64> = info.shape.iter().map(|&dim| dim as u64).collect();
            assert_eq!(tensor.dtype.to_string(), info.dtype.to_string(), "{}", case.name);
            assert_eq!(*tensor.shape, *shape, "{}", case.name);
            let start = (8 + header_len + info.data_offsets.0) as u64;
            assert_eq!(
                (tensor.bytes.start(), tensor.bytes.len()),
                (start, (info.data_offsets.1 - info.data_offsets.0) as u64)
            );
        }
        let metadata = reference.metadata().as_ref().map(|map| map.clone().into_iter().collect());
        assert_eq!(catalog.metadata(), metadata, "{}", case.name);
    }
}

#[test]
fn what_is_no_model_is_called_what_it_is() {
    let directory = tempfile::tempdir().unwrap();
    for (bytes, hint) in [
        (&b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"[..], "git lfs pull"),
        (b"<!DOCTYPE html><html lang=\"en\">", "web page"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl", "safetensors"),
    ] {
        // Whatever it is called.
        for name in ["model.safetensors", "model.bin", "model.gguf"] {
            let path = directory.path().join(name);
            fs::write(&path, bytes).unwrap();
            let error = Catalog::open(&[&path]).unwrap_err();
            assert!(error.to_string().contains(hint), "{name}: {error}");
        }
    }
}
