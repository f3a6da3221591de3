//! What is particular to Windows: its ways of reading, and what other programs may do to a file meanwhile.
//!
//! Wine, under which these tests run where there is no Windows, is more lenient than Windows: what is asserted here holds on
//! both.
#![cfg(windows)]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/saving.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod saving;

use hoistway::{
    Carrier, Checkpoint, DirectIo, Error, LoadOptions, Loaded, Route,
    catalog::{FormatError, OpenOptions},
    plan::Layout,
    read::ReadFile,
    route::{
        Access,
        fault::{Fault, FaultScript},
    },
    save::{SaveOptions, save},
};
use saving::{Owned, assert_is, data, go_on, mixed, owned, reference};
use serde_json::Value;
use std::{
    fs::{self, OpenOptions as FileOptions},
    io,
    os::windows::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use windows_sys::Win32::{
    Foundation::{ERROR_SHARING_VIOLATION, ERROR_USER_MAPPED_FILE},
    System::Threading::{GetCurrentProcess, GetProcessHandleCount},
};

/// Routes that are named, and carry everything.
const NAMED: [Route; 3] = [Route::Overlapped, Route::Threads, Route::Mapped];

/// A file of every kind of tensor, and what is in it.
fn model(folder: &Path) -> (PathBuf, Vec<Owned>) {
    let (path, tensors) = (folder.join("model.safetensors"), mixed());
    fs::write(&path, reference(&tensors)).unwrap();
    (path, tensors)
}

fn load(path: &Path, options: &LoadOptions) -> Loaded {
    hoistway::load(&[path], options).unwrap()
}

fn by(route: Route) -> LoadOptions {
    LoadOptions::default().route(route)
}

/// Fails unless one route has carried all bytes, in one way.
fn assert_carried(loaded: &Loaded, route: Route, access: Access) {
    let report = loaded.report();
    let [Carrier { route: found, access: way, tensor_bytes, .. }] = report.carriers[..] else {
        panic!("{report}")
    };
    assert_eq!((found, way, tensor_bytes), (route, access, report.tensor_bytes), "{report}");
}

#[test]
fn every_route_delivers_the_file_in_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    for (route, direct, carrier, access) in [
        (Route::Auto, DirectIo::Auto, Route::Overlapped, Access::Direct),
        (Route::Auto, DirectIo::Always, Route::Overlapped, Access::Direct),
        (Route::Auto, DirectIo::Never, Route::Threads, Access::Buffered),
        (Route::Overlapped, DirectIo::Auto, Route::Overlapped, Access::Direct),
        (Route::Overlapped, DirectIo::Never, Route::Overlapped, Access::Buffered),
        (Route::Threads, DirectIo::Always, Route::Threads, Access::Direct),
        (Route::Threads, DirectIo::Never, Route::Threads, Access::Buffered),
    ] {
        for (layout, chunk_bytes) in [
            (Layout::File, 4 << 20),
            (Layout::File, 32 << 10),
            (Layout::Packed, 256 << 10),
            (Layout::Tensor, 256 << 10),
        ] {
            let options = by(route).direct(direct).layout(layout).chunk_bytes(chunk_bytes);
            let loaded = load(&path, &options);
            assert_is(&loaded, &tensors);
            assert_carried(&loaded, carrier, access);
        }
    }
    for populate in [false, true] {
        let loaded = load(&path, &by(Route::Mapped).populate(populate));
        assert_is(&loaded, &tensors);
        assert_carried(&loaded, Route::Mapped, Access::Buffered);
    }
    // Several ports, each with handles of its own.
    let loaded = load(&path, &by(Route::Overlapped).rings(3).chunk_bytes(64 << 10));
    assert_is(&loaded, &tensors);
}

#[test]
fn what_windows_cannot_tell_is_in_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = model(folder.path());
    let loaded = load(&path, &by(Route::Auto));
    let report = loaded.report();
    let refused = report.refused.iter().find(|own| own.what == "cached").unwrap();
    assert!(refused.why.reason.contains("Windows does not say"), "{report}");
    assert!(!report.to_string().contains("RWF_NOWAIT"), "{report}");
    // There are no transparent huge pages.
    assert_eq!(report.memory.huge_pages, hoistway::memory::HugePages::Never);
}

#[test]
fn routes_of_other_systems_are_refused_where_they_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = model(folder.path());
    for route in [Route::IoUring, Route::Usrbio, Route::Cached] {
        let error = hoistway::load(&[&path], &by(route)).unwrap_err();
        let Error::RouteUnavailable { route: refused, why, .. } = error else { panic!("{error:?}") };
        assert!(refused == route && !why.reason.is_empty(), "{route}: {why}");
    }
}

/// The files of the corpora that can be loaded, with the offset where they begin.
fn corpora() -> Vec<(Vec<(String, Vec<u8>)>, String, u64)> {
    let read = |name: &str| -> Vec<Value> {
        let path = format!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testkit/corpus/{}"), name);
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    };
    let hex = |text: &str| -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    };
    let part = |part: &Value| match part.as_str() {
        Some(text) => hex(text),
        None => hex(part[0].as_str().unwrap()).repeat(part[1].as_u64().unwrap() as usize),
    };
    let gguf = read("gguf.json").into_iter().map(|case| {
        let files =
            case["files"].as_object().unwrap().iter().map(|(name, parts)| {
                (name.clone(), parts.as_array().unwrap().iter().flat_map(part).collect())
            });
        let offset = case.get("offset").map_or(0, |offset| offset.as_u64().unwrap());
        (files.collect(), case["open"].as_str().unwrap().to_owned(), offset)
    });
    gguf.collect()
}

/// Each file of the corpora either cannot be opened, or is loaded with the same bytes by each route.
#[test]
fn the_corpora_are_loaded_by_every_route() {
    let folder = tempfile::tempdir().unwrap();
    let (mut opened, mut refused) = (0, 0);
    for (number, (files, open, offset)) in corpora().into_iter().enumerate() {
        let folder = folder.path().join(number.to_string());
        fs::create_dir(&folder).unwrap();
        for (name, bytes) in files {
            fs::write(folder.join(name), bytes).unwrap();
        }
        let options = OpenOptions::default().lenient(true).offset(offset);
        let Ok(checkpoint) = Checkpoint::open_with(&[folder.join(&open)], &options) else {
            refused += 1;
            continue;
        };
        opened += 1;
        // Some cannot be loaded whole, such as tensors of big-endian floats.
        let can_be_loaded = checkpoint.load(&by(Route::Threads)).is_ok();
        for route in NAMED {
            let loaded = match checkpoint.load(&by(route)) {
                Ok(loaded) => loaded,
                // What would have to be moved is no view of a file.
                Err(Error::RouteUnavailable { route: Route::Mapped, .. }) => continue,
                Err(_) if !can_be_loaded => continue,
                Err(error) => panic!("{open}: {route}: {error}"),
            };
            assert!(can_be_loaded, "{open}: {route}");
            for (entry, tensor) in checkpoint.catalog().tensors().iter().zip(loaded.tensors()) {
                let file = fs::read(checkpoint.catalog().file(entry.file).source.as_path()).unwrap();
                let range = entry.bytes.start() as usize..entry.bytes.end() as usize;
                // One without bytes may lie behind the end.
                let expected = file.get(range).unwrap_or_default();
                assert!(*tensor.bytes().unwrap() == *expected, "{open}: {} by {route}", entry.name);
            }
        }
    }
    assert!(opened >= 50 && opened + refused >= 200, "{opened} opened, {refused} refused");
}

#[test]
fn devices_are_no_files() {
    for name in ["NUL", "CON", r"\\.\NUL"] {
        let error = hoistway::load(&[name], &LoadOptions::default()).unwrap_err();
        let Error::InvalidFile { problem: FormatError::NotRegular { kind }, .. } = &error else {
            panic!("{name}: {error:?}")
        };
        assert_eq!(*kind, "a device", "{name}");
    }
    let folder = tempfile::tempdir().unwrap();
    let error = ReadFile::open(folder.path()).unwrap_err();
    let Error::InvalidFile { problem: FormatError::NotRegular { kind }, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(*kind, "a directory");
}

/// Times of a file may be late as long as its writer has it open, so that a rewrite may go unseen.
#[test]
fn no_writer_comes_in_while_a_file_is_read_and_one_that_was_there_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let write = || FileOptions::new().write(true).open(&path);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let code = |result: io::Result<fs::File>| result.unwrap_err().raw_os_error().map(i32::cast_unsigned);
    assert_eq!(code(write()), Some(ERROR_SHARING_VIOLATION));
    drop(checkpoint);
    let writer = write().unwrap();
    for route in NAMED {
        let loaded = load(&path, &by(route));
        assert_is(&loaded, &tensors);
        let notes = &loaded.report().notes;
        assert!(notes.iter().any(|note| note.contains("has a writer")), "{notes:?}");
    }
    drop(writer);
    let loaded = load(&path, &by(Route::Threads));
    assert!(!loaded.report().notes.iter().any(|note| note.contains("has a writer")));
}

#[test]
fn a_file_that_its_owner_does_not_share_is_an_error_with_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = model(folder.path());
    let _owner = FileOptions::new().read(true).share_mode(0).open(&path).unwrap();
    let error = hoistway::load(&[&path], &LoadOptions::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("model.safetensors") && text.contains("os error 32"), "{text}");
}

#[test]
fn a_mapped_file_cannot_shrink() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    // It was open for writing before it is mapped: later it could not be.
    let writer = FileOptions::new().write(true).open(&path).unwrap();
    let loaded = load(&path, &by(Route::Mapped));
    let error = writer.set_len(10).unwrap_err();
    assert_eq!(error.raw_os_error().map(i32::cast_unsigned), Some(ERROR_USER_MAPPED_FILE));
    assert_is(&loaded, &tensors);
}

#[test]
fn paths_may_be_long_and_of_any_script() {
    let folder = tempfile::tempdir().unwrap();
    let mut long = folder.path().to_owned();
    for part in 0..4 {
        long.push(format!("{part} 日本語 模型 🎈 {}", "ü".repeat(80)));
    }
    fs::create_dir_all(&long).unwrap();
    assert!(long.as_os_str().len() > 400);
    let (path, tensors) = model(&long);
    for route in NAMED {
        assert_is(&load(&path, &by(route)), &tensors);
    }
    let copy = long.join("copy.safetensors");
    save(&copy, &data(&tensors), None, &SaveOptions::default(), go_on).unwrap();
    assert!(fs::read(&copy).unwrap() == reference(&tensors));
}

/// The old file stays what it was for those who read it.
#[test]
fn a_save_replaces_a_file_that_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let old = Checkpoint::open(&[&path]).unwrap();
    let new = [owned("other", hoistway::Dtype::U8, &[3 << 20], 9)];
    for (direct, threads) in [(DirectIo::Auto, None), (DirectIo::Always, Some(3)), (DirectIo::Never, Some(1))]
    {
        let mut options = SaveOptions::default();
        (options.direct, options.threads) = (direct, threads);
        let report = save(&path, &data(&new), None, &options, go_on).unwrap();
        assert_eq!(report.direct_bytes == 0, direct == DirectIo::Never, "{report}");
        for route in NAMED {
            assert_is(&load(&path, &by(route)), &new);
        }
    }
    assert_is(&old.load(&by(Route::Threads)).unwrap(), &tensors);
}

#[test]
fn errors_of_reads_by_ports_name_the_tensor_or_are_repeated() {
    const BROKEN: i32 = 1117;
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let short = FaultScript::new(|number, _| (number % 3 == 0).then_some(Fault::Short(4096)));
    assert_is(&load(&path, &by(Route::Overlapped).faults(short)), &tensors);
    let broken = FaultScript::new(|number, _| (number == 0).then_some(Fault::Errno(BROKEN)));
    let error = hoistway::load(&[&path], &by(Route::Overlapped).faults(broken)).unwrap_err();
    let Error::Io { tensor, source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(source.raw_os_error(), Some(BROKEN), "{error}");
    assert!(tensor.is_some(), "{error}");
}

#[test]
fn no_handle_is_left() {
    // Other tests of this program open and close handles of the same process.
    let program = std::env::current_exe().unwrap();
    let status = Command::new(program).args(["--ignored", "--exact", "counts_handles"]).status().unwrap();
    assert!(status.success());
}

#[test]
#[ignore = "no_handle_is_left runs it in a process of its own"]
fn counts_handles() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let broken = FaultScript::new(|number, _| (number == 1).then_some(Fault::Errno(1117)));
    let everything = || {
        for route in NAMED {
            assert_is(&load(&path, &by(route).chunk_bytes(64 << 10)), &tensors);
        }
        let failing = by(Route::Overlapped).chunk_bytes(64 << 10).faults(broken.clone());
        drop(hoistway::load(&[&path], &failing));
        drop(Checkpoint::open(&[&path]).unwrap().start(&by(Route::Overlapped)).unwrap());
        save(&folder.path().join("saved"), &data(&tensors), None, &SaveOptions::default(), go_on).unwrap();
    };
    // What is made once for a process.
    everything();
    let before = handles();
    for _ in 0..5 {
        everything();
    }
    let begin = Instant::now();
    // The system ends a thread a little after it was joined.
    while handles() > before {
        assert!(begin.elapsed() < Duration::from_secs(60), "{} handles, {before} before", handles());
        std::thread::yield_now();
    }
}

fn handles() -> u32 {
    let mut count = 0;
    // SAFETY: the handle of this process needs no closing, and the number outlives the call.
    assert_ne!(unsafe { GetProcessHandleCount(GetCurrentProcess(), &raw mut count) }, 0);
    count
}
