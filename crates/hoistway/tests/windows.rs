//! What is particular to Windows: its ways of reading, and what other programs may do to a file meanwhile.
//!
//! Wine, under which these tests run where there is no Windows, is more lenient than Windows: what is asserted here holds on
//! both.
#![cfg(windows)]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/bytes.rs"]
#[allow(unreachable_pub, reason = "other tests share it")]
mod bytes;

#[path = "common/saving.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod saving;

#[path = "common/corpus.rs"]
#[allow(unreachable_pub)]
mod corpus;

#[path = "common/stand_in.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod stand_in;

use bytes::noise;
use hoistway::{
    ByteRange, Carrier, Checkpoint, DeviceId, DirectIo, Dtype, Error, LoadOptions, Loaded, Route,
    catalog::{FormatError, OpenOptions},
    plan::{Layout, Selection},
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    route::{
        Access,
        fault::{Fault, FaultScript},
    },
    save::{SaveOptions, Sharding, save, save_sharded, write_whole},
};
use saving::{Owned, assert_is, data, go_on, mixed, names, owned, reference};
use stand_in::Turn;
use std::{
    ffi::{OsString, c_int, c_void},
    fs::{self, OpenOptions as FileOptions},
    io,
    ops::ControlFlow,
    os::windows::{
        ffi::OsStringExt,
        fs::{FileExt, OpenOptionsExt},
        io::{AsRawHandle, FromRawHandle, OwnedHandle},
    },
    path::{Path, PathBuf},
    process::Command,
    ptr,
    sync::{Arc, Barrier, Mutex},
    thread,
    time::{Duration, Instant},
};
use windows_sys::Win32::{
    Foundation::{
        ERROR_LOCK_VIOLATION, ERROR_SHARING_VIOLATION, ERROR_USER_MAPPED_FILE, INVALID_HANDLE_VALUE,
    },
    System::{
        Diagnostics::ToolHelp::{
            CreateToolhelp32Snapshot, TH32CS_SNAPTHREAD, THREADENTRY32, Thread32First, Thread32Next,
        },
        JobObjects::{
            AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_JOB_MEMORY,
            JOB_OBJECT_LIMIT_PROCESS_MEMORY, JOBOBJECT_EXTENDED_LIMIT_INFORMATION,
            JobObjectExtendedLimitInformation, QueryInformationJobObject, SetInformationJobObject,
        },
        Memory::{MEM_COMMIT, MEM_MAPPED, MEM_PRIVATE, MEMORY_BASIC_INFORMATION, VirtualQuery},
        Threading::{GetCurrentProcess, GetProcessHandleCount},
    },
};

/// Files that are made beside those of the corpora.
const GENERATED: u64 = 260;

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
    let refused = report.refused.iter().find(|refusal| refusal.what == "cached").unwrap();
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

/// Names and contents.
type Files = Vec<(String, Vec<u8>)>;

/// Checkpoints of the corpora and generated ones: their files, the one that is opened, and where it begins.
fn checkpoints() -> Vec<(Files, String, u64)> {
    let gguf = corpus::cases("gguf");
    let gguf = gguf.iter().map(|case| {
        (corpus::gguf_files(case), case["open"].as_str().unwrap().to_owned(), corpus::gguf_offset(case))
    });
    let alone = |file: Vec<u8>| (vec![("case".to_owned(), file)], "case".to_owned(), 0);
    let headers = corpus::cases("headers");
    let headers = headers.iter().map(|case| alone(corpus::safetensors_file(case, |at| (at * 7 + 1) as u8)));
    // Each type with tensors that end around sectors and blocks, and where these fall at odd offsets.
    let generated = (0..GENERATED).map(|number| {
        let dtype = Dtype::ALL[number as usize % Dtype::ALL.len()];
        let around = [1, 2, 511, 512, 513, 1023, 4095, 4096, 4097, 65_537];
        let edge = around[number as usize / Dtype::ALL.len() % around.len()];
        let tensors = [
            owned("first", dtype, &[8, edge], number as u8),
            owned("odd", Dtype::U8, &[number + 1], 1),
            owned("empty", dtype, &[0], 2),
            owned("last", dtype, &[number % 7 + 1, 8], 3),
        ];
        alone(reference(&tensors))
    });
    gguf.chain(headers).chain(generated).collect()
}

/// Each checkpoint either cannot be opened, or is loaded with the same bytes by each route.
#[test]
fn three_hundred_checkpoints_are_loaded_by_every_route() {
    let folder = tempfile::tempdir().unwrap();
    let (mut loaded_by_all, mut refused) = (0, 0);
    for (number, (files, open, offset)) in checkpoints().into_iter().enumerate() {
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
        // Some cannot be loaded whole, such as tensors of big-endian floats.
        let can_be_loaded = checkpoint.load(&by(Route::Threads)).is_ok();
        let mut routes = 0;
        for route in NAMED {
            let loaded = match checkpoint.load(&by(route)) {
                Ok(loaded) => loaded,
                // What would have to be moved is no view of a file.
                Err(Error::RouteUnavailable { route: Route::Mapped, .. }) => continue,
                Err(_) if !can_be_loaded => continue,
                Err(error) => panic!("{number}: {open}: {route}: {error}"),
            };
            assert!(can_be_loaded, "{number}: {open}: {route}");
            let expected = checkpoint.catalog().tensors().iter().map(|entry| &*entry.name);
            let found: Vec<_> = loaded.tensors().iter().map(|tensor| tensor.name()).collect();
            assert_eq!(found, expected.collect::<Vec<_>>(), "{number}: {open}: {route}");
            for (entry, tensor) in checkpoint.catalog().tensors().iter().zip(loaded.tensors()) {
                let file = fs::read(checkpoint.catalog().file(entry.file).source.as_path()).unwrap();
                let range = entry.bytes.start() as usize..entry.bytes.end() as usize;
                // One without bytes may lie behind the end.
                let expected = file.get(range).unwrap_or_default();
                assert!(*tensor.bytes().unwrap() == *expected, "{number}: {open}: {} by {route}", entry.name);
            }
            routes += 1;
        }
        loaded_by_all += usize::from(routes == NAMED.len());
    }
    assert!(loaded_by_all >= 300 && refused >= 100, "{loaded_by_all} by every route, {refused} refused");
}

/// Whole, as shards, and in place of what was saved before.
#[test]
fn what_is_saved_is_loaded_by_every_route() {
    let folder = tempfile::tempdir().unwrap();
    let generations =
        [mixed(), vec![owned("other", Dtype::U8, &[5 << 20], 9), owned("b", Dtype::F32, &[77], 1)]];
    for (direct, sync) in [(DirectIo::Auto, true), (DirectIo::Always, true), (DirectIo::Never, false)] {
        let options = SaveOptions::default().direct(direct).sync(sync);
        let (file, set) = (folder.path().join("model.safetensors"), folder.path().join("set"));
        for tensors in &generations {
            let report = save(&file, &data(tensors), None, &options, go_on).unwrap();
            assert_eq!(report.direct_bytes == 0, direct == DirectIo::Never, "{report}");
            assert_eq!(report.notes, [""; 0], "{report}");
            let sharding = Sharding::default().max_shard_bytes(4 << 20);
            let report = save_sharded(&set, &data(tensors), None, &sharding, &options, go_on).unwrap();
            assert!(report.files > 1 && report.notes.is_empty(), "{report}");
            for route in NAMED {
                assert_is(&load(&file, &by(route)), tensors);
                assert_is(&load(&set, &by(route)), tensors);
            }
        }
        // A save that is stopped leaves the old one, and nothing else.
        let before = (names(folder.path()), names(&set));
        let stop = |_| ControlFlow::Break(());
        let sharding = Sharding::default();
        for stopped in [
            save(&file, &data(&generations[0]), None, &options, stop),
            save_sharded(&set, &data(&generations[0]), None, &sharding, &options, stop),
        ] {
            assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
        }
        assert_eq!((names(folder.path()), names(&set)), before);
        assert_is(&load(&file, &by(Route::Overlapped)), &generations[1]);
        assert_is(&load(&set, &by(Route::Overlapped)), &generations[1]);
    }
}

/// Manifests, traces and tables of benchmarks are written so.
#[test]
fn small_files_are_written_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("manifest.json");
    for text in [&b"longer than the next"[..], b"shorter", b""] {
        write_whole(&path, text).unwrap();
        assert_eq!(fs::read(&path).unwrap(), text);
        assert_eq!(names(folder.path()), ["manifest.json".to_owned()].into());
    }
}

/// Each waits for the lock of the folder while another names its files, and what stays is one of the checkpoints.
#[test]
fn saves_to_one_folder_at_a_time_leave_one_whole_checkpoint() {
    const SAVES: u8 = 6;
    let folder = tempfile::tempdir().unwrap();
    let set = folder.path().join("set");
    let checkpoints: Vec<Vec<Owned>> = (0..SAVES)
        .map(|save| (0..4).map(|shard| owned(&format!("{shard}"), Dtype::U8, &[70_000], save * 40)).collect())
        .collect();
    let barrier = Barrier::new(SAVES.into());
    thread::scope(|scope| {
        for tensors in &checkpoints {
            let (barrier, set) = (&barrier, &set);
            scope.spawn(move || {
                let sharding = Sharding::default().max_shard_bytes(80_000);
                barrier.wait();
                for _ in 0..3 {
                    let report =
                        save_sharded(set, &data(tensors), None, &sharding, &SaveOptions::default(), go_on)
                            .unwrap();
                    assert_eq!(report.files, 4, "{report}");
                    // A wait of more than a second is noted.
                    let others = report.notes.iter().filter(|note| !note.contains("the save waited"));
                    assert_eq!(others.count(), 0, "{report}");
                }
            });
        }
    });
    let loaded = load(&set, &by(Route::Threads));
    let bytes = |tensors: &[Owned]| tensors[0].bytes.clone();
    let first = loaded.get("0").unwrap().bytes().unwrap().to_vec();
    let whole = checkpoints.iter().find(|tensors| bytes(tensors) == first).unwrap();
    assert_is(&loaded, whole);
    // Its shards and its index.
    assert_eq!(names(&set).len(), 5, "{:?}", names(&set));
}

/// The stand-in driver's memory is out of the host's reach, so that only its copies bring bytes there.
#[test]
fn what_is_read_arrives_on_a_cuda_device() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let device = by(Route::Auto).device(DeviceId::Cuda(0));
    for (route, direct) in
        [(Route::Auto, DirectIo::Auto), (Route::Staged, DirectIo::Always), (Route::Staged, DirectIo::Never)]
    {
        for (layout, chunk_bytes) in
            [(Layout::File, 4 << 20), (Layout::Packed, 256 << 10), (Layout::Tensor, 256 << 10)]
        {
            let options = device.clone().route(route).direct(direct).layout(layout).chunk_bytes(chunk_bytes);
            let loaded = load(&path, &options);
            assert_is(&loaded, &tensors);
            let report = loaded.report();
            assert!(report.carriers.iter().all(|carrier| carrier.via == Some(Route::Staged)), "{report}");
        }
    }
    // Floats are converted on the device.
    let selection = Selection::all().select("large");
    let options = device.clone().route(Route::Staged).dtype(Dtype::F32).selection(selection);
    let loaded = load(&path, &options);
    assert_eq!(loaded.get("large").unwrap().dtype(), Dtype::F32);
    drop(loaded);
    // A broken read, and a copy that fails.
    let broken = FaultScript::new(|number, _| (number == 0).then_some(Fault::Broken));
    let error = hoistway::load(&[&path], &device.clone().faults(broken)).unwrap_err();
    assert!(matches!(&error, Error::Io { tensor: Some(_), .. }), "{error:?}");
    turn.set("FAULTS=copy:2=719");
    let error = hoistway::load(&[&path], &device).unwrap_err();
    assert!(matches!(&error, Error::Device { .. }), "{error:?}");
    turn.reset();
    for route in [Route::Gds, Route::GdsCompat] {
        let error = hoistway::load(&[&path], &device.clone().route(route)).unwrap_err();
        let Error::RouteUnavailable { route: refused, why, .. } = error else { panic!("{error:?}") };
        assert!(refused == route && !why.reason.is_empty(), "{route}: {why}");
    }
    turn.assert_nothing_left("loads to a device");
}

/// Of the other device, or of the one that is loaded to; or none.
#[test]
fn the_context_that_another_library_has_current_stays_so() {
    let turn = Turn::take();
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let to = |ordinal| by(Route::Auto).device(DeviceId::Cuda(ordinal));
    // Initialises the driver.
    assert_is(&load(&path, &to(0)), &tensors);
    let retain: unsafe extern "C" fn(*mut Handle, c_int) -> c_int = turn.function("cuDevicePrimaryCtxRetain");
    let release: unsafe extern "C" fn(c_int) -> c_int = turn.function("cuDevicePrimaryCtxRelease_v2");
    let set: unsafe extern "C" fn(Handle) -> c_int = turn.function("cuCtxSetCurrent");
    let current: unsafe extern "C" fn(*mut Handle) -> c_int = turn.function("cuCtxGetCurrent");
    for theirs_of in [Some(1), Some(0), None] {
        let mut theirs: Handle = ptr::null_mut();
        // SAFETY: functions of these types, of a driver that is initialised, with places that outlive the calls.
        unsafe {
            let retained = theirs_of.map_or(0, |device| retain(&raw mut theirs, device));
            assert_eq!((retained, set(theirs)), (0, 0));
        }
        let assert_current = |after: &str| {
            let mut found: Handle = ptr::null_mut();
            // SAFETY: as above.
            assert_eq!((unsafe { current(&raw mut found) }, found), (0, theirs), "{theirs_of:?}: {after}");
        };
        for options in [to(0), to(0).route(Route::Staged).chunk_bytes(64 << 10)] {
            let loaded = load(&path, &options);
            assert_current("a load");
            assert_is(&loaded, &tensors);
            assert_current("a read back");
            drop(loaded);
            assert_current("memory that was freed");
        }
        assert!(hoistway::load(&[&path], &to(9)).is_err());
        assert_current("a device that is not there");
        let reader = Reader::new(&ReaderOptions::default()).unwrap();
        assert_current("a reader");
        let (file, range) = (ReadFile::open(&path).unwrap(), ByteRange::at(5, 100_000).unwrap());
        let request = ReadRequest::new(&file, range, Target::scratch(DeviceId::Cuda(0)));
        let batch = reader.submit([request], Priority::Demand).unwrap();
        assert_current("a batch");
        batch.wait().unwrap();
        assert_current("its end");
        drop((batch, reader));
        assert_current("a reader that is closed");
        // SAFETY: as above.
        unsafe {
            let released = theirs_of.map_or(0, |device| release(device));
            assert_eq!((set(ptr::null_mut()), released), (0, 0));
        }
    }
    turn.assert_nothing_left("contexts of others");
}

/// A context, as the driver has it.
type Handle = *mut c_void;

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

/// Verbatim paths, and names with half of a surrogate pair, where the file system takes these.
#[test]
fn paths_may_be_verbatim_and_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let mut verbatim = OsString::from(r"\\?\");
    verbatim.push(std::path::absolute(&path).unwrap());
    let unpaired = folder.path().join(OsString::from_wide(&[0x61, 0xD800, 0x62]));
    // Wine refuses such a name.
    let takes_unpaired = fs::copy(&path, &unpaired).is_ok();
    for path in [Some(PathBuf::from(verbatim)), takes_unpaired.then_some(unpaired)].into_iter().flatten() {
        for route in NAMED {
            assert_is(&load(&path, &by(route)), &tensors);
        }
        save(&path, &data(&tensors[1..]), None, &SaveOptions::default(), go_on).unwrap();
        assert_is(&load(&path, &by(Route::Threads)), &tensors[1..]);
        let error = hoistway::load(&[&path], &by(Route::Threads).memory_budget_bytes(1 << 10)).unwrap_err();
        assert!(matches!(error, Error::MemoryBudget { .. }), "{error:?}");
        fs::write(&path, reference(&tensors)).unwrap();
    }
}

/// The old file stays what it was for those who read it.
#[test]
fn a_save_replaces_a_file_that_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let old = Checkpoint::open(&[&path]).unwrap();
    let new = [owned("other", Dtype::U8, &[3 << 20], 9)];
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

/// A file of one tensor of 8 MiB, read in small parts, so that something can happen meanwhile.
fn large(folder: &Path) -> (PathBuf, Vec<Owned>) {
    let (path, tensors) = (folder.join("large.safetensors"), vec![owned("large", Dtype::U8, &[8 << 20], 5)]);
    fs::write(&path, reference(&tensors)).unwrap();
    (path, tensors)
}

/// Loads by a route while `act` is done once, after some reads.
fn load_during(path: &Path, route: Route, act: impl FnOnce() + Send + 'static) -> hoistway::Result<Loaded> {
    let act = Arc::new(Mutex::new(Some(act)));
    let left = act.clone();
    let script = FaultScript::new(move |number, _| {
        if number == 3
            && let Some(act) = left.lock().unwrap().take()
        {
            act();
        }
        None
    });
    let loaded = hoistway::load(&[path], &by(route).chunk_bytes(64 << 10).faults(script));
    assert!(act.lock().unwrap().is_none(), "it ended before the fourth read: {loaded:?}");
    loaded
}

#[test]
fn a_file_that_its_writer_cuts_short_is_an_error_that_says_where() {
    let folder = tempfile::tempdir().unwrap();
    for route in [Route::Overlapped, Route::Threads] {
        let (path, _) = large(folder.path());
        let writer = FileOptions::new().write(true).open(&path).unwrap();
        let cut = writer.try_clone().unwrap();
        let error = load_during(&path, route, move || cut.set_len(1 << 20).unwrap()).unwrap_err();
        match &error {
            Error::Truncated { path: at, needed, file_len, .. } => {
                assert!(*at == path && *file_len == 1 << 20 && needed.end() > *file_len, "{error}");
            }
            // Reads of what is left had ended before the cut.
            Error::Changed { path: at, .. } => {
                assert!(*at == path && error.to_string().contains("1048576"), "{error}")
            }
            _ => panic!("{error:?}"),
        }
        assert!(error.to_string().contains("tensor 'large'"), "{error}");
    }
}

#[test]
fn a_file_that_its_writer_rewrites_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    for route in [Route::Overlapped, Route::Threads] {
        let (path, _) = large(folder.path());
        let writer = FileOptions::new().write(true).open(&path).unwrap();
        // Closed, as NTFS may have the times of an open file late.
        let begin = fs::metadata(&path).unwrap().modified().unwrap();
        let rewrite = move || {
            let later = begin + Duration::from_secs(2);
            assert_eq!(writer.seek_write(b"other bytes", 7 << 20).unwrap(), 11);
            writer.set_modified(later).unwrap();
        };
        let error = load_during(&path, route, rewrite).unwrap_err();
        assert!(matches!(&error, Error::Changed { path: at, .. } if *at == path), "{error:?}");
    }
}

/// Where another file may take the name of an open one, what was opened is read; Wine refuses that.
#[test]
fn a_file_that_is_replaced_meanwhile_is_read_as_it_was_opened() {
    let folder = tempfile::tempdir().unwrap();
    for route in [Route::Overlapped, Route::Threads] {
        let (path, tensors) = large(folder.path());
        let new = folder.path().join("new");
        fs::write(&new, "another file").unwrap();
        let to = path.clone();
        let replace = move || {
            if let Err(error) = fs::rename(&new, &to) {
                assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
            }
        };
        assert_is(&load_during(&path, route, replace).unwrap(), &tensors);
    }
}

/// Wine forgets a file under its new name: it cannot be opened again, and looks as if it had been rewritten.
#[test]
fn a_file_that_gets_another_name_is_read_or_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for route in NAMED {
        let (path, tensors) = large(folder.path());
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        fs::rename(&path, folder.path().join("renamed")).unwrap();
        match checkpoint.load(&by(route)) {
            Ok(loaded) => assert_is(&loaded, &tensors),
            Err(Error::Changed { path: at, .. }) => assert_eq!(at, path, "{route}"),
            Err(error) => assert!(error.to_string().contains("(os error 2)"), "{route}: {error}"),
        }
    }
}

/// Windows fails reads of what another handle has locked; Wine reads it.
#[test]
fn a_file_that_is_locked_is_read_or_is_an_error_with_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let owner = FileOptions::new().read(true).write(true).open(&path).unwrap();
    owner.lock().unwrap();
    for route in [Route::Overlapped, Route::Threads] {
        match hoistway::load(&[&path], &by(route)) {
            Ok(loaded) => assert_is(&loaded, &tensors),
            Err(Error::Io { path: at, source, .. }) => {
                let number = source.raw_os_error().map(i32::cast_unsigned);
                assert_eq!((at, number), (path.clone(), Some(ERROR_LOCK_VIOLATION)), "{route}");
            }
            Err(error) => panic!("{route}: {error:?}"),
        }
    }
}

#[test]
fn holes_of_a_file_are_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse.safetensors");
    let mut tensors = vec![owned("a", Dtype::U8, &[40 << 20], 0), owned("b", Dtype::U8, &[5000], 3)];
    tensors[0].bytes.fill(0);
    let whole = reference(&tensors);
    let (start, end) = (whole.len() - 5000 - (40 << 20), whole.len() - 5000);
    let file = fs::File::create(&path).unwrap();
    let is_last = whole[end..] == tensors[1].bytes[..];
    assert!(is_last, "the reference puts them in this order");
    assert_eq!(file.seek_write(&whole[..start], 0).unwrap(), start);
    assert_eq!(file.seek_write(&whole[end..], end as u64).unwrap(), 5000);
    drop(file);
    for route in NAMED {
        assert_is(&load(&path, &by(route)), &tensors);
    }
}

#[test]
fn a_load_larger_than_its_memory_is_refused_before_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = large(folder.path());
    for route in [Route::Overlapped, Route::Threads] {
        let error = hoistway::load(&[&path], &by(route).memory_budget_bytes(1 << 20)).unwrap_err();
        assert!(matches!(error, Error::MemoryBudget { .. }), "{error:?}");
    }
    // The limit on what is committed is one of those that a load is compared with.
    let limits = hoistway::memory::limits();
    assert!(limits.iter().any(|limit| limit.name.contains("commit")), "{limits:?}");
}

#[test]
fn a_job_that_limits_memory_refuses_what_it_would_fail() {
    // In a process of its own, which puts itself into a job.
    let program = std::env::current_exe().unwrap();
    let arguments = ["--ignored", "--exact", "--nocapture", "limits_itself_by_a_job"];
    assert!(Command::new(program).args(arguments).status().unwrap().success());
}

/// Wine takes the limits of a job, and keeps none.
#[test]
#[ignore = "another runs it in a process of its own"]
fn limits_itself_by_a_job() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) =
        (folder.path().join("large.safetensors"), vec![owned("large", Dtype::U8, &[200 << 20], 5)]);
    fs::write(&path, reference(&tensors)).unwrap();
    let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
    limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_PROCESS_MEMORY | JOB_OBJECT_LIMIT_JOB_MEMORY;
    limits.ProcessMemoryLimit = Held::now().private_bytes + (100 << 20);
    limits.JobMemoryLimit = limits.ProcessMemoryLimit + (1 << 20);
    let wanted = (limits.ProcessMemoryLimit, limits.JobMemoryLimit);
    // SAFETY: structures of these kinds and lengths, which outlive the calls; the job lives as long as the process.
    let kept = unsafe {
        let job = CreateJobObjectW(ptr::null(), ptr::null());
        let (kind, bytes) = (JobObjectExtendedLimitInformation, size_of_val(&limits) as u32);
        let is_set = SetInformationJobObject(job, kind, (&raw const limits).cast(), bytes) != 0
            && AssignProcessToJobObject(job, GetCurrentProcess()) != 0;
        let own = ptr::null_mut();
        let is_told =
            QueryInformationJobObject(own, kind, (&raw mut limits).cast(), bytes, ptr::null_mut()) != 0;
        is_set && is_told && (limits.ProcessMemoryLimit, limits.JobMemoryLimit) == wanted
    };
    let of_job: Vec<_> =
        hoistway::memory::limits().into_iter().filter(|limit| limit.name.contains("job object")).collect();
    println!("the limits of a job are kept: {kept}");
    if !kept {
        assert!(of_job.is_empty(), "{of_job:?}");
        assert_is(&load(&path, &by(Route::Threads)), &tensors);
        return;
    }
    assert_eq!(
        of_job.iter().map(|limit| limit.total_bytes as usize).collect::<Vec<_>>(),
        [wanted.0, wanted.1]
    );
    for route in [Route::Overlapped, Route::Threads] {
        match hoistway::load(&[&path], &by(route)).unwrap_err() {
            Error::MemoryBudget { limit_name, .. } => {
                assert!(limit_name.contains("job object"), "{limit_name}")
            }
            error => panic!("{error:?}"),
        }
    }
}

#[test]
fn errors_of_reads_by_ports_name_the_tensor_or_are_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let short = FaultScript::new(|number, _| (number % 3 == 0).then_some(Fault::Short(4096)));
    assert_is(&load(&path, &by(Route::Overlapped).faults(short)), &tensors);
    let broken = FaultScript::new(|number, _| (number == 0).then_some(Fault::Broken));
    let error = hoistway::load(&[&path], &by(Route::Overlapped).faults(broken)).unwrap_err();
    let Error::Io { tensor, source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(source.raw_os_error(), Fault::Broken.errno(), "{error}");
    assert!(tensor.is_some(), "{error}");
}

#[test]
fn no_handle_thread_or_memory_is_left() {
    // Other tests of this program open and close handles of the same process.
    let program = std::env::current_exe().unwrap();
    let status =
        Command::new(program).args(["--ignored", "--exact", "counts_what_is_held"]).status().unwrap();
    assert!(status.success());
}

#[test]
#[ignore = "no_handle_thread_or_memory_is_left runs it in a process of its own"]
fn counts_what_is_held() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = model(folder.path());
    let broken = FaultScript::new(|number, _| (number == 1).then_some(Fault::Broken));
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
    let before = Held::now();
    for _ in 0..5 {
        everything();
    }
    // The allocator may keep some; what is left by each of the five rounds is more.
    let most = Held { private_bytes: before.private_bytes + 2 * reference(&tensors).len(), ..before };
    let begin = Instant::now();
    // The system ends a thread a little after it was joined.
    while Held::now().exceeds(&most) {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}, {before:?} before", Held::now());
        thread::yield_now();
    }
}

/// What this process holds of the system's.
#[derive(Clone, Copy, Debug)]
struct Held {
    handles: u32,
    threads: usize,
    /// Views of files.
    views: usize,
    /// Bytes of memory that count against the commit limit, but for views.
    private_bytes: usize,
}

impl Held {
    fn now() -> Self {
        let mut handles = 0;
        // SAFETY: the handle of this process needs no closing, and the number outlives the call.
        assert_ne!(unsafe { GetProcessHandleCount(GetCurrentProcess(), &raw mut handles) }, 0);
        let (mut views, mut private_bytes) = (0, 0);
        let mut region = MEMORY_BASIC_INFORMATION::default();
        let mut next = ptr::null_mut::<c_void>();
        // SAFETY: only asks about addresses; the structure has the length that the call is told, and outlives it.
        while unsafe { VirtualQuery(next, &raw mut region, size_of_val(&region)) } != 0 {
            // A view is of regions that differ in what is allowed. The first begins where the view does.
            let is_first = region.BaseAddress == region.AllocationBase;
            views += usize::from(region.Type == MEM_MAPPED && is_first);
            if region.Type == MEM_PRIVATE && region.State == MEM_COMMIT {
                private_bytes += region.RegionSize;
            }
            next = region.BaseAddress.wrapping_byte_add(region.RegionSize);
        }
        Self { handles, threads: threads(), views, private_bytes }
    }

    fn exceeds(&self, most: &Self) -> bool {
        self.handles > most.handles
            || self.threads > most.threads
            || self.views > most.views
            || self.private_bytes > most.private_bytes
    }
}

/// Counts the threads of this process.
fn threads() -> usize {
    // SAFETY: takes numbers.
    let snapshot = unsafe { CreateToolhelp32Snapshot(TH32CS_SNAPTHREAD, 0) };
    assert_ne!(snapshot, INVALID_HANDLE_VALUE);
    // SAFETY: a new handle, which has no other owner.
    let snapshot = unsafe { OwnedHandle::from_raw_handle(snapshot) };
    let mut entry = THREADENTRY32 { dwSize: size_of::<THREADENTRY32>() as u32, ..Default::default() };
    let mut count = 0;
    // SAFETY: the handle is open, and the structure says its size and outlives the call.
    let mut is_there = unsafe { Thread32First(snapshot.as_raw_handle(), &raw mut entry) } != 0;
    while is_there {
        count += usize::from(entry.th32OwnerProcessID == std::process::id());
        // SAFETY: as above.
        is_there = unsafe { Thread32Next(snapshot.as_raw_handle(), &raw mut entry) } != 0;
    }
    count
}
