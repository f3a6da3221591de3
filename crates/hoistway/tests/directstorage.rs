//! Route `directstorage`, on a stand-in for Microsoft's libraries that fails as it is told.
//!
//! What implementations elsewhere were found to get wrong, and the test here (or in `hoistway-directstorage`) that such a design fails:
//!
//! | fault | test |
//! |---|---|
//! | it takes the first adapter that is no software | `the_adapter_is_that_of_the_cuda_device_wherever_it_is_listed` |
//! | a second device gets the D3D12 device of the first | the same, which loads to `cuda:0`, `cuda:1`, and `cuda:0` again |
//! | the runtime is configured after its factory, which changes nothing | `the_runtime_is_configured_before_its_factory_and_without_telemetry` |
//! | the fence is waited for by the processor alone | `the_stand_in_shows_imported_bytes_to_those_alone_who_wait`, and each load to a device |
//! | a buffer is filled again while the device copies from it | `a_buffer_is_filled_again_only_once_the_copy_from_it_is_done` |
//! | requests as long as a staging buffer that others may have fixed | `a_read_longer_than_a_request_is_cut`, `a_second_copy_of_hoistway_in_the_process_is_refused` |
//! | a failure returns while other reads are in flight | `each_fault_at_each_of_ten_requests_to_a_device_is_an_error_that_names_the_tensor`, `a_queue_that_is_dropped_waits_for_its_reads` |
//! | waits without end, also for a device that was removed | `a_device_that_is_removed_while_requests_are_in_flight_ends_the_load`, `a_fence_that_never_comes_is_an_error_and_what_it_tells_of_is_kept` |
//! | imported memory is destroyed, and what is mapped stays | `OnDevice::assert_nothing_left`, after each of these |
//! | one request after the other, two buffers | `many_requests_to_a_device_are_in_flight_at_a_time`, `reads_pushed_together_are_submitted_together` |
#![cfg(windows)]
#![allow(missing_docs, unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/bytes.rs"]
#[allow(unreachable_pub, reason = "other tests share it")]
mod bytes;

#[path = "common/saving.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod saving;

#[path = "common/stand_in.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod cuda;

use bytes::noise;
use fake_dstorage::stand_in::{self, Turn};
use hoistway::{
    ByteRange, Carrier, Checkpoint, DeviceId, DirectIo, Dtype, Error, LoadOptions, Loaded, Route,
    plan::Layout,
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    route::Access,
};
use saving::{Owned, assert_is, mixed, owned, reference};
use std::{
    fs, mem,
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
    assert_eq!(report.notes.iter().filter(|note| note.starts_with("BypassIO of ")).count(), 1, "{report}");
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
    for stalled in 1..=10 {
        turn.reset();
        turn.set(&format!("stall_at={stalled}"));
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let loading = checkpoint.start(&named().chunk_bytes(CHUNK)).unwrap();
        while turn.count("requests") < stalled {
            std::thread::yield_now();
        }
        // It waits for what the runtime may still write.
        std::thread::scope(|scope| {
            scope.spawn(|| drop((loading, checkpoint)));
            turn.set("stall_at=0");
        });
        assert_eq!(turn.objects(), [1, 0, 0], "{stalled}");
    }
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
fn a_named_route_with_broken_libraries_is_an_error_and_auto_loads_without_it() {
    let (empty, without_core) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let whole = stand_in::folder("broken");
    fs::copy(whole.join("dstorage.dll"), without_core.path().join("dstorage.dll")).unwrap();
    for (folder, settings, named, auto) in [
        (empty.path(), "", "dstorage.dll is not in ", None),
        (without_core.path(), "", "dstoragecore.dll is not beside dstorage.dll", None),
        (&*whole, "staging_locked=1", "(0x8924001f)", Some("was not measured")),
    ] {
        // A process has one runtime.
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "loads_with_the_libraries_that_there_are"])
            .env(hoistway_directstorage::DIRECTORY_VARIABLE, folder)
            .env("FAKE_DSTORAGE", settings)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        let line = |of: &str| said.lines().find_map(|line| line.strip_prefix(of)).unwrap_or_default();
        assert!(line("load: ").contains(named) && line("reader: ").contains(named), "{said}");
        assert_eq!(line("auto: ").is_empty(), auto.is_none(), "{said}");
        assert!(auto.is_none_or(|why| line("auto: ").contains(why)), "{said}");
    }
}

#[test]
#[ignore = "another runs it in a process of its own"]
fn loads_with_the_libraries_that_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let why = |error: Error| match error {
        Error::RouteUnavailable { route: Route::DirectStorage, why, .. } => why.reason,
        error => panic!("{error:?}"),
    };
    println!("\nload: {}", why(hoistway::load(&[&path], &named()).unwrap_err()));
    let reader = Reader::new(&ReaderOptions::default().route(Route::DirectStorage));
    println!("reader: {}", why(reader.err().unwrap()));
    let loaded = load(&path, &LoadOptions::default());
    assert_is(&loaded, &tensors);
    let refused = loaded.report().refused.iter().find(|refusal| refusal.what == "directstorage");
    println!("auto: {}", refused.map_or("", |refusal| &refusal.why.reason));
}

/// Both stand-ins, to oneself.
struct OnDevice {
    turn: Turn,
    cuda: cuda::Turn,
    /// What programs have lost by then.
    leaked: u64,
}

impl OnDevice {
    fn take() -> Self {
        let cuda = cuda::Turn::take();
        Self { turn: Turn::take(), leaked: cuda.count("leaked"), cuda }
    }

    /// Fails unless nothing is left of any load.
    fn assert_nothing_left(&self, of: &str) {
        let counted = ["external_memories", "external_semaphores", "destroyed_in_use", "leaked"];
        assert_eq!(counted.map(|name| self.cuda.count(name)), [0, 0, 0, self.leaked], "{of}");
        self.cuda.assert_nothing_left(of);
        assert_eq!((self.turn.graphics(), self.turn.objects()), ([0; 4], [1, 0, 0]), "{of}");
        let violations = [self.turn.count("violations"), self.turn.count_graphics("violations")];
        assert_eq!(violations, [0, 0], "{of}");
    }
}

/// How the bytes of a load to a device have come there: not through pinned memory, or for which reason so.
fn way(loaded: &Loaded) -> Result<(), String> {
    let report = loaded.report();
    let [Carrier { route: Route::DirectStorage, via, tensor_bytes, .. }] = report.carriers[..] else {
        panic!("{report}")
    };
    assert_eq!(tensor_bytes, report.tensor_bytes, "{report}");
    let text = report.to_string();
    assert!(text.contains("directstorage (staged by the runtime)"), "{text}");
    let refusal = report.refused.iter().find(|refusal| refusal.what == "directstorage by D3D12");
    match (via, refusal) {
        (None, None) => {
            assert!(text.contains("to the device through buffers of D3D12"), "{text}");
            Ok(())
        }
        (Some(Route::Staged), Some(refusal)) => {
            assert!(text.contains("to the device through pinned memory"), "{text}");
            Err(refusal.why.reason.clone())
        }
        other => panic!("{other:?}: {text}"),
    }
}

#[test]
fn its_bytes_arrive_on_a_cuda_device_by_buffers_of_d3d12() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    for layout in [Layout::File, Layout::Packed, Layout::Tensor] {
        for (rings, chunk_bytes) in [(1, 256 << 10), (3, 64 << 10)] {
            let options =
                named().device(DeviceId::Cuda(0)).layout(layout).chunk_bytes(chunk_bytes).rings(rings);
            let loaded = load(&path, &options);
            assert_is(&loaded, &tensors);
            assert_eq!(way(&loaded), Ok(()));
            // What is moved out of the device's memory meanwhile would be lost.
            assert!(on.turn.count_graphics("kept_resident") > 0);
        }
    }
    on.assert_nothing_left("loads");
}

#[test]
#[ignore = "copies 20 GiB"]
fn a_gigabyte_arrives_twenty_times_in_a_row() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.safetensors");
    let tensors: Vec<_> =
        (0..4).map(|at| owned(&format!("t{at}"), Dtype::U8, &[(256 << 20) + u64::from(at)], at)).collect();
    fs::write(&path, reference(&tensors)).unwrap();
    for run in 0..20 {
        let loaded = load(&path, &named().device(DeviceId::Cuda(0)));
        assert_is(&loaded, &tensors);
        assert_eq!(way(&loaded), Ok(()), "{run}");
        drop(loaded);
        on.assert_nothing_left(&format!("run {run}"));
    }
}

#[test]
fn a_buffer_is_filled_again_only_once_the_copy_from_it_is_done() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = ten(folder.path());
    // Two buffers for ten reads, and copies that take their time: a read that came earlier would spoil them.
    on.cuda.set("COPY_LATENCY_US=3000");
    let options = named().device(DeviceId::Cuda(0)).in_flight_bytes(2 * CHUNK);
    let options = options.layout(Layout::Packed).chunk_bytes(CHUNK);
    let loaded = load(&path, &options);
    assert_is(&loaded, &tensors);
    assert_eq!(way(&loaded), Ok(()));
    drop(loaded);
    on.assert_nothing_left("reuse");
}

#[test]
fn many_requests_to_a_device_are_in_flight_at_a_time() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = ten(folder.path());
    let options = named().device(DeviceId::Cuda(0)).layout(Layout::Packed).chunk_bytes(CHUNK);
    on.turn.set("stall_at=1");
    let loaded = std::thread::scope(|scope| {
        let loading = scope.spawn(|| load(&path, &options));
        while on.turn.count("enqueued") < 5 {
            assert!(!loading.is_finished());
            std::thread::yield_now();
        }
        on.turn.set("stall_at=0");
        loading.join().unwrap()
    });
    assert_is(&loaded, &tensors);
}

#[test]
fn the_adapter_is_that_of_the_cuda_device_wherever_it_is_listed() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = ten(folder.path());
    // The first adapter is none of CUDA's, and the others are listed the other way round.
    for ordinal in [0, 1, 0] {
        let loaded = load(&path, &named().device(DeviceId::Cuda(ordinal)));
        assert_is(&loaded, &tensors);
        assert_eq!(way(&loaded), Ok(()));
        // No host memory is allocated and pinned for nothing.
        assert_eq!(loaded.report().memory.staging_bytes, 0, "{}", loaded.report());
        let name = format!("on Stand-in {ordinal} (LUID 00004857:0000000{})", ordinal + 1);
        assert!(loaded.report().to_string().contains(&name), "{}", loaded.report());
    }
    drop(on);
}

#[test]
fn doctor_lists_adapters_beside_cuda_devices() {
    let on = OnDevice::take();
    let findings = || -> Vec<String> {
        let checks = hoistway::doctor::examine(&[] as &[&Path]);
        checks.into_iter().filter(|check| check.name == "D3D12").map(|check| check.finding).collect()
    };
    assert_eq!(
        findings(),
        ["Stand-in 1 (LUID 00004857:00000002) is cuda:1", "Stand-in 0 (LUID 00004857:00000001) is cuda:0"]
    );
    on.turn.set("dxgi_hidden=4");
    on.cuda.set("LUIDS=1");
    assert_eq!(
        findings(),
        [
            "Stand-in 1 (LUID 00004857:00000002) is cuda:1",
            "no adapter is cuda:0 (LUID 00004857:00000001): route directstorage pins memory for it"
        ]
    );
    on.turn.reset();
    on.cuda.set("DEVICES=1");
    assert!(findings().contains(&"Stand-in 1 (LUID 00004857:00000002) is no CUDA device".to_owned()));
}

#[test]
fn what_refuses_buffers_of_d3d12_is_told_and_pinned_memory_serves() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = ten(folder.path());
    let options = named().device(DeviceId::Cuda(0)).chunk_bytes(CHUNK);
    for (dstorage, cuda, parts) in [
        // No adapter has the identifier of the device.
        (
            &["dxgi_hidden=4"][..],
            "",
            &[
                "no adapter of D3D12 is cuda:0 (LUID 00004857:00000001)",
                "Stand-in 1 (LUID 00004857:00000002)",
            ][..],
        ),
        (&["dxgi_hidden=7"], "", &["there are: none"]),
        (&[], "LUIDS=0", &["cuda:0 has no identifier (LUID)"]),
        // One of two that are linked as one adapter: which of them D3D12 writes to is not known.
        (&[], "LUID_NODES=2", &["cuda:0 has no identifier (LUID)"]),
        (&["d3d12_refuse_device=0x887a0004"], "", &["D3D12's D3D12CreateDevice failed", "0x887a0004"]),
        (
            &["d3d12_refuse_heap=0x8007000e", "d3d12_refuse_committed=0x80070057"],
            "",
            &["placed on a shared heap: D3D12's CreateHeap failed", "D3D12's CreateCommittedResource failed"],
        ),
        (&["d3d12_refuse_handle=0x80004001"], "", &["CreateSharedHandle failed"]),
        (&["d3d12_refuse_fence=0x8007000e"], "", &["D3D12's CreateFence failed"]),
        (
            &[],
            "FAULTS=cuImportExternalMemory:*=801",
            &["cuImportExternalMemory returned CUDA_ERROR_NOT_SUPPORTED"],
        ),
        (&[], "FAULTS=cuExternalMemoryGetMappedBuffer:*=1", &["cuExternalMemoryGetMappedBuffer returned"]),
        (&[], "FAULTS=cuImportExternalSemaphore:*=801", &["cuImportExternalSemaphore returned"]),
    ] {
        on.turn.reset();
        dstorage.iter().for_each(|setting| on.turn.set(setting));
        if !cuda.is_empty() {
            on.cuda.set(cuda);
        }
        let loaded = load(&path, &options);
        assert_is(&loaded, &tensors);
        let why = way(&loaded).unwrap_err();
        assert!(parts.iter().all(|part| why.contains(part)), "{why}");
        drop(loaded);
        on.cuda.reset();
        on.assert_nothing_left(&why);
    }
    // One kind of buffers is enough.
    for (setting, faults) in
        [("d3d12_refuse_heap=0x80070057", "FAULTS="), ("early=0", "FAULTS=cuImportExternalMemory:1=1")]
    {
        on.turn.reset();
        on.turn.set(setting);
        on.cuda.set(faults);
        let loaded = load(&path, &options);
        assert_is(&loaded, &tensors);
        assert_eq!(way(&loaded), Ok(()));
        assert!(loaded.report().to_string().contains("committed and shared"), "{}", loaded.report());
        drop(loaded);
        on.cuda.reset();
        on.assert_nothing_left(setting);
    }
}

#[test]
fn a_reader_says_that_its_bytes_go_to_the_device_by_pinned_memory() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = ten(folder.path());
    let reader = Reader::new(&ReaderOptions::default().route(Route::DirectStorage)).unwrap();
    let file = ReadFile::open(&path).unwrap();
    let refusals = |target: fn() -> Target| {
        let requests =
            [0, 5000].map(|start| ReadRequest::new(&file, ByteRange::at(start, CHUNK).unwrap(), target()));
        let batch = reader.submit(requests, Priority::Demand).unwrap();
        batch.wait().unwrap();
        let report = batch.report();
        let [Carrier { route: Route::DirectStorage, via, .. }] = report.carriers[..] else {
            panic!("{report}")
        };
        let refused: Vec<_> =
            report.refused.iter().map(|refusal| (refusal.what.clone(), refusal.why.reason.clone())).collect();
        (via, refused)
    };
    let refused = ("directstorage by D3D12".to_owned(), "readers read into pinned memory".to_owned());
    assert_eq!(refusals(|| Target::scratch(DeviceId::Cuda(0))), (Some(Route::Staged), vec![refused]));
    assert_eq!(refusals(Target::memory), (None, Vec::new()));
    drop((reader, file));
    on.assert_nothing_left("a reader");
}

#[test]
fn each_fault_at_each_of_ten_requests_to_a_device_is_an_error_that_names_the_tensor() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = ten(folder.path());
    let options = named().device(DeviceId::Cuda(0)).layout(Layout::Packed).chunk_bytes(CHUNK);
    let loaded = load(&path, &options);
    assert_is(&loaded, &tensors);
    assert_eq!(way(&loaded), Ok(()));
    drop(loaded);
    let requests = on.turn.count("requests");
    assert!(requests >= 10, "{requests}");
    for (setting, words) in [
        ("fail_at", "past the end of the file (0x89240007)"),
        ("fail_at code=0x89240008", "larger than the staging buffer"),
        ("fail_at code=0x80070017", "error 23 of Windows (0x80070017)"),
        ("fail_at code=0x89240016", "did not answer in time (0x89240016)"),
        ("remove_at", "was removed"),
    ] {
        for at in 1..=requests {
            on.turn.reset();
            let (kind, code) = setting.split_once(' ').unwrap_or((setting, "code=0"));
            on.turn.set(code);
            on.turn.set("spoil=1");
            on.turn.set(&format!("{kind}={at}"));
            let error = hoistway::load(&[&path], &options).unwrap_err();
            let Error::Io { path: found, tensor: Some(_), range: Some(_), source, .. } = &error else {
                panic!("{error:?}")
            };
            assert_eq!(*found, path);
            assert!(source.to_string().contains(words), "{setting} at {at}: {error}");
            on.assert_nothing_left(&format!("{setting} at {at}"));
        }
    }
    for setting in ["early=1", "reverse=1"] {
        on.turn.reset();
        on.turn.set(setting);
        on.turn.set("delay_ms=1");
        let loaded = load(&path, &options);
        assert_is(&loaded, &tensors);
        assert_eq!(way(&loaded), Ok(()));
    }
}

/// Each call of CUDA's driver for a buffer, a fence or a request, and each copy. The trial before the load makes the first calls of
/// those that import: if these fail, bytes go through pinned memory.
#[test]
fn each_call_that_the_device_refuses_during_a_load_is_an_error() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = ten(folder.path());
    let options = named().device(DeviceId::Cuda(0)).layout(Layout::Packed).chunk_bytes(CHUNK);
    let functions = [
        ("cuImportExternalMemory", 2),
        ("cuExternalMemoryGetMappedBuffer", 2),
        ("cuImportExternalSemaphore", 2),
        ("cuWaitExternalSemaphoresAsync", 1),
        ("cuMemcpyDtoDAsync_v2", 1),
    ];
    let calls = || functions.map(|(function, _)| on.cuda.count(&format!("calls.{function}")));
    let (calls_before, copies_before) = (calls(), on.cuda.count("copies"));
    let loaded = load(&path, &options);
    assert_eq!(way(&loaded), Ok(()));
    let (calls, copies) = (calls(), on.cuda.count("copies") - copies_before);
    assert_is(&loaded, &tensors);
    drop(loaded);
    assert!(copies >= 10, "{copies}");
    let faults = functions.iter().zip(calls).zip(calls_before);
    let faults = faults.map(|((&(function, first), after), before)| (function, first, after - before));
    for (subject, first, last) in faults.chain([("copy", 1, copies)]) {
        assert!(first <= last, "{subject}: {last}");
        for at in first..=last {
            // Whether a copy that ends with an unknown error still writes is not known, so what it uses would be kept.
            let (code, name) = if subject == "copy" {
                (719, "CUDA_ERROR_LAUNCH_FAILED")
            } else {
                (999, "CUDA_ERROR_UNKNOWN")
            };
            on.cuda.set(&format!("FAULTS={subject}:{at}={code}"));
            let error = hoistway::load(&[&path], &options).unwrap_err();
            let is_typed = match &error {
                Error::Device { device, .. } => device == "cuda:0",
                // The queue of the route cannot be made without its fence.
                Error::RouteUnavailable { route: Route::DirectStorage, .. } => {
                    subject == "cuImportExternalSemaphore"
                }
                _ => false,
            };
            assert!(is_typed, "{subject} at {at}: {error:?}");
            let is_named = subject == "copy" || error.to_string().contains(subject.trim_end_matches("_v2"));
            assert!(is_named && error.to_string().contains(name), "{subject} at {at}: {error}");
            on.cuda.reset();
            on.assert_nothing_left(&format!("{subject} at {at}"));
        }
    }
    // The runtime makes no queue to the device.
    on.turn.set("refuse_queue=0x80004001");
    let error = hoistway::load(&[&path], &options).unwrap_err();
    let Error::RouteUnavailable { route: Route::DirectStorage, why, .. } = &error else {
        panic!("{error:?}")
    };
    assert!(why.reason.contains("CreateQueue failed") && why.reason.contains("(0x80004001)"), "{why}");
    on.turn.reset();
    on.assert_nothing_left("a queue that is refused");
    assert_is(&load(&path, &options), &tensors);
}

#[test]
fn a_device_that_is_removed_while_requests_are_in_flight_ends_the_load() {
    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = ten(folder.path());
    let options = named().device(DeviceId::Cuda(0)).chunk_bytes(CHUNK);
    for removed in 1..=10 {
        on.turn.set(&format!("stall_at={removed}"));
        let error = std::thread::scope(|scope| {
            let loading = scope.spawn(|| hoistway::load(&[&path], &options).unwrap_err());
            while on.turn.count("requests") < removed {
                std::thread::yield_now();
            }
            on.turn.set("d3d12_remove=1");
            // The load is told by the fence, and waits for the runtime as it ends.
            on.turn.set("stall_at=0");
            loading.join().unwrap()
        });
        assert!(error.to_string().contains("was removed"), "{error}");
        let is_named = matches!(&error, Error::Io { path: found, tensor: Some(_), .. } if *found == path);
        assert!(is_named, "{error:?}");
        on.turn.reset();
        on.assert_nothing_left(&format!("removal at {removed}"));
    }
}

#[test]
fn the_stand_in_shows_imported_bytes_to_those_alone_who_wait() {
    use hoistway_device::{
        CopyStream, Device, ExternalKind, ExternalMemory, ExternalSemaphore, ExternalSignal,
    };
    use hoistway_directstorage::{GraphicsDevice, Read, Runtime, Sharing, Target};
    use std::{sync::Arc, time::Duration};

    let on = OnDevice::take();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let content: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8).collect();
    fs::write(&path, &content).unwrap();
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    let graphics = GraphicsDevice::open(device.info().luid.unwrap(), "cuda:0").unwrap();
    for (sharing, kind, other) in [
        (Sharing::Heap, ExternalKind::D3d12Heap, ExternalKind::D3d12Resource),
        (Sharing::Resource, ExternalKind::D3d12Resource, ExternalKind::D3d12Heap),
    ] {
        let buffer = Arc::new(graphics.buffer(sharing, 100_000).unwrap());
        // SAFETY: a handle of the buffer's, which this keeps.
        let import = |kind, len| unsafe {
            ExternalMemory::import(&device, kind, buffer.handle(), len, buffer.clone())
        };
        // As what it is, and whole.
        assert!(import(other, buffer.len()).is_err() && import(kind, buffer.len() - 1).is_err());
        let memory = import(kind, buffer.len()).unwrap();
        let runtime = Runtime::get().unwrap();
        let file = Arc::new(runtime.open_file(&path).unwrap());
        let mut queue = runtime.queue_to(&graphics, 1, Duration::from_secs(60), mem::forget).unwrap();
        let target = Target::Buffer { buffer: buffer.clone(), offset: 0 };
        // SAFETY: nothing else uses the buffer.
        unsafe { queue.push((), Read { file, offset: 0, target, len: content.len() }) };
        let mut ended = Vec::new();
        queue.wait(&mut ended, Duration::from_secs(60)).unwrap();
        assert_eq!(ended[0].result, Ok(content.len()));
        let copies = CopyStream::new(&device).unwrap();
        let seen = || {
            let mut bytes = vec![0; content.len()];
            copies.read_back(memory.address(), &mut bytes).unwrap();
            bytes == content
        };
        assert!(!seen());
        // SAFETY: a handle of the queue's fence.
        let semaphore =
            Arc::new(unsafe { ExternalSemaphore::import(&device, queue.fence().unwrap().handle()) }.unwrap());
        // It is kept until the stream has waited for it.
        let signal = ExternalSignal { semaphore, value: ended[0].signal };
        signal.order(&copies).unwrap();
        assert!(seen());
    }
    drop((device, graphics));
    on.assert_nothing_left("imports");
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
