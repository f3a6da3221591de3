//! Route `directstorage`, on a stand-in for Microsoft's libraries that fails as it is told.
#![cfg(windows)]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/saving.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod saving;

#[path = "common/stand_in.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod cuda;

use fake_dstorage::stand_in::{self, Turn};
use hoistway::{
    ByteRange, Carrier, Checkpoint, DeviceId, DirectIo, Dtype, Error, LoadOptions, Loaded, Route,
    plan::Layout,
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    route::Access,
};
use saving::{Owned, assert_is, mixed, owned, reference};
use std::{
    fs,
    os::windows::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

fn model(folder: &Path) -> (PathBuf, Vec<Owned>) {
    let (path, tensors) = (folder.join("model.safetensors"), mixed());
    fs::write(&path, reference(&tensors)).unwrap();
    (path, tensors)
}

/// A model that is read by ten requests of [`CHUNK`] bytes, and too large for a load on the caller's thread.
fn ten(folder: &Path) -> (PathBuf, Vec<Owned>) {
    let path = folder.join("ten.safetensors");
    let tensors: Vec<_> = (0..10).map(|at| owned(&format!("t{at}"), Dtype::U8, &[CHUNK], at)).collect();
    fs::write(&path, reference(&tensors)).unwrap();
    (path, tensors)
}

const CHUNK: u64 = 256 << 10;

fn named() -> LoadOptions {
    LoadOptions::default().route(Route::DirectStorage)
}

fn load(path: &Path, options: &LoadOptions) -> Loaded {
    hoistway::load(&[path], options).unwrap()
}

/// Fails unless DirectStorage has carried all bytes.
fn assert_carried(loaded: &Loaded) {
    let report = loaded.report();
    let [Carrier { route, access, tensor_bytes, .. }] = report.carriers[..] else { panic!("{report}") };
    assert_eq!(
        (route, access, tensor_bytes),
        (Route::DirectStorage, Access::Direct, report.tensor_bytes),
        "{report}"
    );
    assert!(report.to_string().contains("directstorage (staged by the runtime)"), "{report}");
}

#[test]
fn it_delivers_the_file_in_every_layout() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    for (layout, chunk_bytes) in [
        (Layout::File, 4 << 20),
        (Layout::File, 32 << 10),
        (Layout::Packed, 256 << 10),
        (Layout::Tensor, 256 << 10),
    ] {
        for direct in [DirectIo::Auto, DirectIo::Always] {
            let loaded = load(&path, &named().direct(direct).layout(layout).chunk_bytes(chunk_bytes));
            assert_is(&loaded, &tensors);
            assert_carried(&loaded);
        }
    }
    // Several queues; and on the caller's thread.
    assert_is(&load(&path, &named().rings(3).chunk_bytes(64 << 10)), &tensors);
    let small = vec![owned("small", Dtype::F32, &[1000], 3)];
    let path = folder.path().join("small.safetensors");
    fs::write(&path, reference(&small)).unwrap();
    let loaded = load(&path, &named());
    assert_is(&loaded, &small);
    assert_carried(&loaded);
    assert_eq!((turn.count("violations"), turn.objects()[1..].to_vec()), (0, vec![0, 0]));
}

#[test]
fn a_reader_reads_by_it() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    let content: Vec<u8> = (0..3_000_001).map(|at| (at / 5 % 253) as u8).collect();
    fs::write(&path, &content).unwrap();
    let reader = Reader::new(&ReaderOptions::default().route(Route::DirectStorage)).unwrap();
    let file = ReadFile::open(&path).unwrap();
    for (start, len) in [(0, 1), (1, 4096), (4095, 1_000_003), (2_999_999, 2)] {
        let range = ByteRange::at(start, len as u64).unwrap();
        let request = ReadRequest::new(&file, range, Target::memory());
        let batch = reader.submit([request], Priority::Demand).unwrap();
        batch.wait().unwrap();
        let memory = batch.take(0).unwrap();
        let start = start as usize;
        assert!(memory[..] == content[start..start + len], "at {start}");
    }
    drop((reader, file));
    assert_eq!((turn.count("violations"), turn.objects()[1..].to_vec()), (0, vec![0, 0]));
}

#[test]
fn each_fault_at_each_of_ten_requests_is_an_error_that_names_the_tensor() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = ten(folder.path());
    let options = named().layout(Layout::Packed).chunk_bytes(CHUNK);
    assert_is(&load(&path, &options), &tensors);
    let requests = turn.count("requests");
    assert!(requests >= 10, "{requests}");
    for (setting, words) in [
        ("fail_at", "past the end of the file (0x89240007)"),
        ("fail_at code=0x89240008", "larger than the staging buffer"),
        ("fail_at code=0x80070017", "error 23 of Windows (0x80070017)"),
        ("fail_at code=0x89240016", "did not answer in time (0x89240016)"),
        ("remove_at", "was removed"),
    ] {
        for at in 1..=requests {
            turn.reset();
            let (kind, code) = setting.split_once(' ').unwrap_or((setting, "code=0"));
            turn.set(code);
            turn.set("spoil=1");
            turn.set(&format!("{kind}={at}"));
            let error = hoistway::load(&[&path], &options).unwrap_err();
            let Error::Io { path: found, tensor, range, source, .. } = &error else { panic!("{error:?}") };
            assert_eq!(*found, path);
            assert!(source.to_string().contains(words), "{setting} at {at}: {error}");
            let number: usize = tensor.as_ref().unwrap().trim_start_matches('t').parse().unwrap();
            assert!(number < 10 && range.is_some(), "{error:?}");
            // Of each tensor's own place.
            assert_eq!(turn.objects()[1..], [0, 0], "{setting} at {at}");
            assert_eq!(turn.objects()[0], 1, "{setting} at {at}: the runtime keeps one queue");
        }
    }
    turn.reset();
    for setting in ["early=1", "reverse=1"] {
        turn.set(setting);
        turn.set("delay_ms=1");
        assert_is(&load(&path, &options), &tensors);
        turn.reset();
    }
    assert_eq!(turn.count("violations"), 0);
}

#[test]
fn a_load_that_fails_is_no_failure_of_others() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (good, tensors) = model(folder.path());
    let (bad, _) = ten(folder.path());
    turn.set(&format!("fail_len={}", fs::metadata(&bad).unwrap().len()));
    let options = named().chunk_bytes(64 << 10);
    std::thread::scope(|scope| {
        let failing = scope.spawn(|| {
            for _ in 0..10 {
                let error = hoistway::load(&[&bad], &options).unwrap_err();
                assert!(matches!(&error, Error::Io { path, .. } if *path == bad), "{error:?}");
            }
        });
        while !failing.is_finished() {
            assert_is(&load(&good, &options), &tensors);
        }
        failing.join().unwrap();
    });
    assert_eq!((turn.count("violations"), turn.objects()), (0, [1, 0, 0]));
}

#[test]
fn a_load_that_is_dropped_leaves_nothing() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = ten(folder.path());
    turn.set("stall_at=4");
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let loading = checkpoint.start(&named().chunk_bytes(CHUNK)).unwrap();
    while turn.count("requests") < 4 {
        std::thread::yield_now();
    }
    // It waits for what the runtime may still write.
    std::thread::scope(|scope| {
        scope.spawn(|| drop((loading, checkpoint)));
        turn.set("stall_at=0");
    });
    assert_eq!(turn.objects(), [1, 0, 0]);
}

#[test]
fn auto_says_that_it_leaves_it_out() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let loaded = load(&path, &LoadOptions::default());
    assert_is(&loaded, &tensors);
    let report = loaded.report();
    assert!(report.carriers.iter().all(|carrier| carrier.route != Route::DirectStorage), "{report}");
    let refusal = report.refused.iter().find(|refusal| refusal.what == "directstorage").unwrap();
    assert!(refusal.why.reason.contains("was not measured"), "{report}");
    assert_eq!(turn.count("requests"), 0);
}

#[test]
fn a_named_route_that_cannot_read_a_file_is_an_error() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());

    let error = hoistway::load(&[&path], &named().direct(DirectIo::Never)).unwrap_err();
    assert!(matches!(&error, Error::InvalidOption { option: "direct", .. }), "{error:?}");

    // A program writes to it.
    let share = 7;
    let writer = fs::OpenOptions::new().write(true).share_mode(share).open(&path).unwrap();
    let error = hoistway::load(&[&path], &named()).unwrap_err();
    let Error::RouteUnavailable { route: Route::DirectStorage, path: Some(_), why } = &error else {
        panic!("{error:?}")
    };
    assert!(why.reason.contains("error 32 of Windows"), "{why}");
    drop(writer);
    assert_is(&load(&path, &named()), &tensors);

    // Its name leads to another file by now. Windows itself tells the new name, by which the right one is read.
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    fs::rename(&path, folder.path().join("old.safetensors")).unwrap();
    fs::write(&path, reference(&[owned("other", Dtype::U8, &[5 << 20], 9)])).unwrap();
    match checkpoint.load(&named()) {
        Ok(loaded) => assert_is(&loaded, &tensors),
        Err(Error::RouteUnavailable { route: Route::DirectStorage, why, .. }) => {
            assert!(why.reason.contains("is another file now"), "{why}");
        }
        Err(error) => panic!("{error:?}"),
    }
    drop(checkpoint);
    assert_eq!((turn.count("violations"), turn.objects()), (0, [1, 0, 0]));
}

#[test]
fn its_bytes_arrive_on_a_cuda_device_by_pinned_memory() {
    let _cuda = cuda::Turn::take();
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    for layout in [Layout::File, Layout::Packed] {
        let loaded = load(&path, &named().device(DeviceId::Cuda(0)).layout(layout).chunk_bytes(256 << 10));
        assert_is(&loaded, &tensors);
        let report = loaded.report();
        let [Carrier { route: Route::DirectStorage, via: Some(Route::Staged), .. }] = report.carriers[..]
        else {
            panic!("{report}")
        };
    }
    assert_eq!((turn.count("violations"), turn.objects()), (0, [1, 0, 0]));
}

#[test]
fn handles_return_to_where_they_were() {
    // Other tests of this program open and close handles of the same process.
    let program = std::env::current_exe().unwrap();
    let arguments = ["--ignored", "--exact", "counts_handles"];
    assert!(std::process::Command::new(program).args(arguments).status().unwrap().success());
}

#[test]
#[ignore = "another runs it in a process of its own"]
fn counts_handles() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = ten(folder.path());
    let everything = || {
        turn.reset();
        assert_is(&load(&path, &named().chunk_bytes(CHUNK)), &tensors);
        turn.reset();
        turn.set("fail_at=3");
        assert!(hoistway::load(&[&path], &named().chunk_bytes(CHUNK)).is_err());
    };
    (0..3).for_each(|_| everything());
    let before = stand_in::handles();
    (0..10).for_each(|_| everything());
    let begin = std::time::Instant::now();
    while stand_in::handles() > before {
        assert!(begin.elapsed().as_secs() < 60, "{} handles, {before} before", stand_in::handles());
        std::thread::yield_now();
    }
}
