//! The corpora of good and bad files, in stores of each kind: the same tensors and bytes as from disk, or the same error.
#![cfg(feature = "objects")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/corpus.rs"]
#[allow(unreachable_pub, reason = "other tests share it")]
mod corpus;

use hoistway::{
    Checkpoint, Error, LoadOptions,
    catalog::{FormatError, OpenOptions},
    objects::StoreOptions,
};
use objectd::{Dialect, Server};
use std::{collections::BTreeMap, fs, path::Path};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const MODEL: &str = "org/model";

/// Files, and the one of them that is opened.
struct Case {
    name: String,
    files: Vec<(String, Vec<u8>)>,
    open: String,
    offset: u64,
}

fn cases() -> Vec<Case> {
    let headers = corpus::cases("headers");
    let headers = headers.iter().map(|case| {
        let file = corpus::safetensors_file(case, |place| (place * 7 % 251) as u8);
        let open = "case.safetensors".to_owned();
        let name = case["name"].as_str().unwrap().to_owned();
        Case { name, files: vec![(open.clone(), file)], open, offset: 0 }
    });
    let gguf = corpus::cases("gguf");
    let gguf = gguf.iter().map(|case| Case {
        name: case["name"].as_str().unwrap().to_owned(),
        files: corpus::gguf_files(case),
        open: case["open"].as_str().unwrap().to_owned(),
        offset: corpus::gguf_offset(case),
    });
    headers.chain(gguf).collect()
}

/// What comes of a case: tensors with their type, shape and bytes, or what is wrong with which file.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Loaded(BTreeMap<String, (String, Vec<u64>, Vec<u8>)>),
    Wrong { file: String, problem: String },
}

fn outcome(path: &str, options: &OpenOptions) -> Outcome {
    let loaded = Checkpoint::open_with(&[path], options)
        .and_then(|checkpoint| checkpoint.load(&LoadOptions::default().memory_budget_bytes(256 << 20)));
    let error = match loaded {
        Ok(loaded) => {
            let described = loaded.tensors().iter().map(|tensor| {
                let bytes = tensor.bytes().unwrap().into_owned();
                (tensor.name().to_owned(), (tensor.dtype().to_string(), tensor.shape().to_vec(), bytes))
            });
            return Outcome::Loaded(described.collect());
        }
        Err(error) => error,
    };
    let file = |path: &Path| path.to_string_lossy().rsplit('/').next().unwrap().to_owned();
    match &error {
        Error::InvalidFile { path, problem } => {
            let problem = match problem {
                FormatError::Safetensors(problem) => format!("{problem:?}"),
                FormatError::Gguf(problem) => format!("{problem:?}"),
                other => format!("{other:?}"),
            };
            Outcome::Wrong { file: file(path), problem }
        }
        Error::NotFound { path, .. } => Outcome::Wrong { file: file(path), problem: "not found".into() },
        other => {
            let problem = format!("{other:?}").split([' ', '(', '{']).next().unwrap().to_owned();
            Outcome::Wrong { file: String::new(), problem }
        }
    }
}

/// Compares each case from a store with the same from disk.
fn compare(url_of: impl Fn(&str) -> String, store: &StoreOptions, mut put: impl FnMut(&str, &[u8])) {
    let directory = tempfile::tempdir().unwrap();
    let (mut good, mut bad, mut wrong) = (0, 0, Vec::new());
    for (number, case) in cases().iter().enumerate() {
        let folder = directory.path().join(number.to_string());
        fs::create_dir(&folder).unwrap();
        for (name, file) in &case.files {
            fs::write(folder.join(name), file).unwrap();
            put(&format!("{number}/{name}"), file);
        }
        let on_disk = folder.join(&case.open);
        let url = url_of(&format!("{number}/{}", case.open));
        for lenient in [false, true] {
            let options = OpenOptions::default().lenient(lenient).offset(case.offset);
            let expected = outcome(on_disk.to_str().unwrap(), &options);
            let found = outcome(&url, &options.store(store.clone()));
            match &expected {
                Outcome::Loaded(_) => good += 1,
                Outcome::Wrong { .. } => bad += 1,
            }
            if found != expected {
                let shown = format!("{found:?}, not {expected:?}");
                let shown: String = shown.chars().take(500).collect();
                wrong.push(format!("{}, lenient {lenient}: {shown}", case.name));
            }
        }
        fs::remove_dir_all(&folder).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(good >= 100 && bad >= 400, "{good} good, {bad} bad");
}

fn store(settings: &[(&str, &str)]) -> StoreOptions {
    let mut options = StoreOptions::default();
    for (name, value) in settings {
        options.set(name, value).unwrap();
    }
    options
}

/// Compares by the dialect of a bucket.
fn compare_buckets(dialect: Dialect, scheme: &str, account: &str) {
    let server = Server::start().unwrap();
    server.speak(dialect);
    let endpoint = format!("{}{account}", server.url());
    let prefix = format!("{account}/models").trim_start_matches('/').to_owned();
    compare(
        |path| format!("{scheme}://models/{path}"),
        &store(&[("endpoint", &endpoint), ("anonymous", "true")]),
        |path, bytes| server.put(&format!("{prefix}/{path}"), bytes),
    );
}

#[test]
fn files_in_s3_are_what_they_are_on_disk() {
    compare_buckets(Dialect::S3, "s3", "");
}

#[test]
fn files_in_google_are_what_they_are_on_disk() {
    compare_buckets(Dialect::Google, "gs", "");
}

#[test]
fn files_in_azure_are_what_they_are_on_disk() {
    compare_buckets(Dialect::Azure, "az", "/account");
}

#[test]
fn files_of_a_web_server_are_what_they_are_on_disk() {
    let server = Server::start().unwrap();
    let base = server.url();
    let put = |path: &str, bytes: &[u8]| server.put(path, bytes);
    compare(|path| format!("{base}/{path}"), &StoreOptions::default(), put);
}

#[test]
fn files_of_the_hub_are_what_they_are_on_disk() {
    let (server, elsewhere) = (Server::start().unwrap(), Server::start().unwrap());
    server.lead_to(&elsewhere);
    server.put_model(MODEL, COMMIT);
    compare(
        |path| format!("hf://{MODEL}@{COMMIT}/{path}"),
        &store(&[("endpoint", &server.url()), ("anonymous", "true")]),
        // Large files lie on another server.
        |path, bytes| server.put_file(MODEL, path, bytes, path.ends_with(".safetensors")),
    );
}

#[test]
fn a_split_model_whose_other_files_are_absent_takes_few_requests() {
    let cases = corpus::cases("gguf");
    let case = cases.iter().find(|case| case["name"] == "a split model of 65535 files that are not there");
    let case = case.unwrap();
    let server = Server::start().unwrap();
    server.speak(Dialect::S3);
    for (name, file) in corpus::gguf_files(case) {
        server.put(&format!("models/{name}"), &file);
    }
    let store = store(&[("endpoint", &server.url()), ("anonymous", "true")]);
    let url = format!("s3://models/{}", case["open"].as_str().unwrap());
    let found = outcome(&url, &OpenOptions::default().store(store));
    let file = "m-00002-of-65535.gguf".to_owned();
    assert_eq!(found, Outcome::Wrong { file, problem: "not found".into() });
    // A few for each of the files that are asked for side by side.
    let requests = server.take_requests().len();
    assert!((2..1000).contains(&requests), "{requests} requests");
}
