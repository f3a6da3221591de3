//! Sources that are no files: the toy of the tests has a URL and no file descriptor. What needs one refuses it with a reason,
//! and everything else goes its ordinary way.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    assert_is_file, assert_is_gguf, devices,
    gguf::{Item, Writer},
    gguf_tensor, mixed_gguf, mixed_model,
    reading::{no_faults, open_reader, range, reader},
    tensor, write_model,
};
use hoistway::{
    Checkpoint, DirectIo, Dtype, Error, LoadOptions, Loaded, Order, Route, StreamOptions,
    catalog::{OpenOptions, SourceName, gguf::ArrayValues},
    read::{Priority, ReadFile, ReadRequest, ReaderOptions, Target},
};
use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

fn url(path: &Path) -> PathBuf {
    format!("toy://{}", path.display()).into()
}

/// Who carried the bytes of a load.
fn carried_by(loaded: &Loaded) -> Vec<Route> {
    loaded.report().carriers.iter().map(|carrier| carrier.route).collect()
}

#[test]
fn auto_loads_them_by_threads_and_says_why_by_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = mixed_model(directory.path());
    let url = url(&path);
    let [_, device] = devices();
    for options in [LoadOptions::default(), LoadOptions::default().device(device)] {
        let loaded = hoistway::load(&[&url], &options).unwrap();
        assert_is_file(&loaded, &file);
        assert_eq!(carried_by(&loaded), [Route::Threads]);
        for what in ["cached", "io_uring", "direct reads"] {
            let refused = &loaded.report().refused;
            let refusal = refused
                .iter()
                .find(|refusal| refusal.what == what)
                .unwrap_or_else(|| panic!("{what}: {refused:?}"));
            assert_eq!(refusal.path.as_deref(), Some(&*url), "{what}");
            assert!(refusal.why.reason.contains("not a file of this machine"), "{what}: {}", refusal.why);
        }
    }
}

#[test]
fn routes_that_read_any_source_deliver_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = mixed_model(directory.path());
    let (gguf_path, tensors) = mixed_gguf(directory.path());
    let [host, device] = devices();
    for route in [Route::Auto, Route::Threads, Route::Toy] {
        for device in [host, device] {
            let options = LoadOptions::default().route(route).device(device);
            let checkpoint = Checkpoint::open(&[url(&path)]).unwrap();
            assert_is_file(&checkpoint.load(&options).unwrap(), &file);
            let stream = StreamOptions::default().order(Order::File).max_in_flight_bytes(8 << 20);
            let streamed = checkpoint.stream(&options, &stream).unwrap();
            assert_is_file(&streamed.wait().unwrap(), &file);
            assert_is_gguf(&hoistway::load(&[url(&gguf_path)], &options).unwrap(), &tensors);
        }
    }
}

#[test]
fn routes_that_need_a_file_refuse_them_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    write_model(&path, &[tensor("weight", Dtype::U8, &[2 << 20])], 0, 5);
    let url = url(&path);
    let [host, device] = devices();
    for (route, device, direct) in [
        (Route::IoUring, host, DirectIo::Auto),
        (Route::IoUring, host, DirectIo::Never),
        (Route::Cached, host, DirectIo::Auto),
        (Route::Mapped, host, DirectIo::Auto),
        (Route::Usrbio, host, DirectIo::Auto),
        (Route::Gds, device, DirectIo::Auto),
        (Route::GdsCompat, device, DirectIo::Auto),
        (Route::Threads, host, DirectIo::Always),
    ] {
        let options = LoadOptions::default().route(route).device(device).direct(direct);
        match hoistway::load(&[&url], &options).unwrap_err() {
            Error::RouteUnavailable { route: named, path, why } => {
                assert_eq!((named, path.as_deref()), (route, Some(&*url)), "{why}");
                let is_told =
                    why.reason.contains("not a file of this machine") || why.reason.contains("not on a 3FS");
                assert!(is_told && !why.fix.is_empty(), "{route}: {why}");
            }
            other => panic!("{route}: {other:?}"),
        }
    }
    match Checkpoint::open(&[&url]).unwrap().warm(|_| ControlFlow::Continue(())).unwrap_err() {
        Error::RouteUnavailable { path, .. } => assert_eq!(path, Some(url)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_that_belong_together_are_found_beside_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let shard = |name: &str| {
        let path = directory.path().join(format!("{name}.safetensors"));
        write_model(&path, &[tensor(name, Dtype::U8, &[1000])], 0, 5)
    };
    shard("a");
    shard("b");
    let index = directory.path().join("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}"#).unwrap();
    let checkpoint = Checkpoint::open(&[url(&index)]).unwrap();
    let names: Vec<_> = checkpoint.catalog().files().iter().map(|file| file.source.clone()).collect();
    let name = |file: &str| SourceName::Url(format!("toy://{}/{file}", directory.path().display()));
    assert_eq!(names, [name("a.safetensors"), name("b.safetensors")]);
    assert_eq!(checkpoint.load(&LoadOptions::default()).unwrap().tensors().len(), 2);
    // Of a split model, one file stands for all.
    for number in 0..2u16 {
        let mut writer =
            Writer::default().key("split.no", Item::U16(number)).key("split.count", Item::U16(2));
        writer.tensors.push(gguf_tensor(&format!("t{number}"), 0, &[64]).1);
        fs::write(directory.path().join(format!("m-{:05}-of-00002.gguf", number + 1)), writer.finish())
            .unwrap();
    }
    let model = Checkpoint::open(&[url(&directory.path().join("m-00002-of-00002.gguf"))]).unwrap();
    let names: Vec<_> = model.catalog().files().iter().map(|file| file.source.clone()).collect();
    assert_eq!(names, [name("m-00001-of-00002.gguf"), name("m-00002-of-00002.gguf")]);
}

#[test]
fn a_reader_reads_them_by_any_route_that_needs_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = mixed_model(directory.path());
    let source = ReadFile::open(url(&path)).unwrap();
    assert_eq!((source.len(), source.path()), (file.len() as u64, &*url(&path)));
    for route in [Route::Auto, Route::Threads, Route::Toy] {
        let reader = reader(route, DirectIo::Auto, no_faults());
        for wanted in [range(0, file.len() as u64), range(5, 10_002), range(4096, 4096)] {
            let request = ReadRequest::new(&source, wanted, Target::memory());
            let batch = reader.submit(vec![request], Priority::Demand).unwrap();
            batch.wait().unwrap();
            let expected = &file[wanted.start() as usize..wanted.end() as usize];
            assert!(*batch.take(0).unwrap() == *expected, "{route}: {wanted}");
        }
    }
}

#[test]
fn a_reader_by_a_route_that_needs_a_file_refuses_them_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = mixed_model(directory.path());
    let source = ReadFile::open(url(&path)).unwrap();
    for (route, direct) in [
        (Route::IoUring, DirectIo::Auto),
        (Route::Cached, DirectIo::Auto),
        (Route::Usrbio, DirectIo::Auto),
        (Route::Threads, DirectIo::Always),
    ] {
        let options = ReaderOptions::default().route(route).direct(direct);
        let Some(reader) = open_reader(&options) else { continue };
        let request = ReadRequest::new(&source, range(5, 10_002), Target::memory());
        let batch = reader.submit(vec![request], Priority::Demand).unwrap();
        match batch.wait().unwrap_err() {
            Error::RouteUnavailable { route: named, path, why } => {
                assert_eq!((*named, path.as_deref()), (route, Some(source.path())), "{why}");
                let is_told =
                    why.reason.contains("not a file of this machine") || why.reason.contains("not on a 3FS");
                assert!(is_told && !why.fix.is_empty(), "{route}: {why}");
            }
            other => panic!("{route}: {other:?}"),
        }
    }
}

#[test]
fn a_source_that_was_replaced_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = mixed_model(directory.path());
    let checkpoint = Checkpoint::open(&[url(&path)]).unwrap();
    let mut loaded = checkpoint.load(&LoadOptions::default()).unwrap();
    checkpoint.verify(&mut loaded, None).unwrap();
    fs::write(&path, &file[..file.len() / 2]).unwrap();
    for error in [
        checkpoint.load(&LoadOptions::default()).unwrap_err(),
        checkpoint.verify(&mut loaded, None).unwrap_err(),
    ] {
        let is_told = matches!(
            &error,
            Error::Truncated { tensor: Some(_), .. } | Error::Changed { tensor: Some(_), .. }
        );
        assert!(is_told && error.to_string().contains("toy://"), "{error:?}");
    }
}

#[test]
fn a_scheme_that_no_source_has_is_refused_with_those_there_are() {
    for text in
        ["ftp://bucket/model.gguf", "ftp://bucket/*.safetensors", "ftp://bucket/model.safetensors.index.json"]
    {
        match Checkpoint::open(&[text]).unwrap_err() {
            Error::InvalidOption { option: "path", value, reason } => {
                // The rest may hold a secret at a place that only the scheme knows.
                assert_eq!(value, "ftp://...");
                assert!(reason.contains("'ftp'") && reason.contains("toy://"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
    let missing = Checkpoint::open(&["toy:///none/at/all.safetensors"]).unwrap_err();
    assert!(matches!(&missing, Error::NotFound { path, .. } if path.starts_with("toy://")), "{missing:?}");
}

#[test]
fn bytes_in_memory_are_loaded_as_files_are() {
    let directory = tempfile::tempdir().unwrap();
    let (_, file) = mixed_model(directory.path());
    let tensors = hoistway::load_bytes(file.clone(), &OpenOptions::default()).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.len(), reference.len());
    for tensor in tensors {
        assert!(
            *tensor.bytes().unwrap() == *reference.tensor(tensor.name()).unwrap().data(),
            "{}",
            tensor.name()
        );
    }
    let (path, expected) = mixed_gguf(directory.path());
    let tensors = hoistway::load_bytes(fs::read(path).unwrap(), &OpenOptions::default()).unwrap();
    assert_eq!(tensors.len(), expected.len());
    for wanted in expected {
        let tensor = tensors.iter().find(|tensor| tensor.name() == wanted.name).unwrap();
        assert!(*tensor.bytes().unwrap() == *wanted.bytes, "{}", wanted.name);
    }
    match hoistway::load_bytes(file[..file.len() - 1].to_vec(), &OpenOptions::default()).unwrap_err() {
        error @ Error::InvalidFile { .. } => assert!(error.to_string().starts_with("<bytes>: "), "{error}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn arrays_of_metadata_are_read_from_the_source() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keys.gguf");
    let writer = Writer::default().key("tokens", Item::strings(["a", "bc"]));
    fs::write(&path, writer.finish()).unwrap();
    let checkpoint = Checkpoint::open(&[url(&path)]).unwrap();
    let first = checkpoint.catalog().file_ids().next().unwrap();
    let found = checkpoint.metadata_array(first, "tokens").unwrap();
    assert_eq!(found, Some(ArrayValues::String(vec!["a".into(), "bc".into()])));
}
