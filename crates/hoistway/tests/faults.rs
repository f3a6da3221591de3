//! Faults on every route: the load ends in the right error or in the right bytes, and leaves nothing behind.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    Footprint, HAS_DIRECT_PATH, QUEUED, assert_is_file, assert_nothing_left, can_read, devices,
    let_file_time_pass, make_cold, make_warm, mixed_model,
    on_device::{ROCM, TOY},
    reading::Warm,
    system::write_all_at,
    tensor, write_model,
};
use hoistway::{
    Checkpoint, DirectIo, Dtype, Error, LoadOptions, Report, Result, Route,
    plan::Layout,
    route::fault::{Fault, FaultScript},
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

/// Footprints are of the whole process, so these tests take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Model {
    _directory: tempfile::TempDir,
    path: PathBuf,
    file: Vec<u8>,
}

fn model() -> Model {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, file) = mixed_model(directory.path());
    Model { _directory: directory, path, file }
}

/// Every lane: its options, and whether the file must be cached for it.
fn lanes() -> Vec<(LoadOptions, bool)> {
    let [_, device] = devices();
    let mut lanes = Vec::new();
    for layout in [Layout::File, Layout::Packed] {
        for (route, direct, warm) in [
            (Route::Staged, DirectIo::Auto, false),
            (Route::Staged, DirectIo::Auto, true),
            (Route::Gds, DirectIo::Auto, false),
            (QUEUED, DirectIo::Auto, false),
            (QUEUED, DirectIo::Never, false),
            (Route::Threads, DirectIo::Always, false),
            (Route::Threads, DirectIo::Never, false),
            (Route::Auto, DirectIo::Auto, false),
            (Route::Auto, DirectIo::Auto, true),
        ] {
            if !HAS_DIRECT_PATH && route == Route::Gds {
                continue;
            }
            let only_device = matches!(route, Route::Staged | Route::Gds);
            let (readable_by, directly) =
                if only_device { (Route::Threads, DirectIo::Always) } else { (route, direct) };
            if !can_read(Path::new(env!("CARGO_TARGET_TMPDIR")), readable_by, directly) {
                continue;
            }
            let options =
                LoadOptions::default().route(route).direct(direct).layout(layout).chunk_bytes(64 << 10);
            // To a device everything is copied, whatever the layout.
            if layout == Layout::File || only_device {
                lanes.push((options.clone().device(device), warm));
                // It has no direct path.
                if route != Route::Gds {
                    lanes.extend([ROCM, TOY].map(|device| (options.clone().device(device), warm)));
                }
            }
            if !only_device {
                lanes.push((options, warm));
            }
        }
    }
    start_threads_that_stay();
    lanes
}

/// cuFile starts threads when it is first used: before a test counts them.
fn start_threads_that_stay() {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        let model = model();
        let [_, device] = devices();
        let options = LoadOptions::default().device(device).route(Route::GdsCompat);
        // Where the file system has no direct reads, there is no cuFile either.
        let _ = hoistway::load(&[&model.path], &options);
    });
}

/// A program that writes to the model. Windows lets it in before hoistway has the file open, and may have the times of the file
/// late until it is closed.
fn writer(model: &Model) -> fs::File {
    fs::OpenOptions::new().write(true).open(&model.path).unwrap()
}

/// Lets a writer change the file after some reads, and closes it.
fn after_reads(writer: fs::File, change: impl Fn(&fs::File) + Send + Sync + 'static) -> FaultScript {
    let writer = Mutex::new(Some(writer));
    FaultScript::new(move |number, _| {
        if number == 3
            && let Some(writer) = writer.lock().unwrap().take()
        {
            change(&writer);
        }
        None
    })
}

/// Loads under a script of faults, and checks that nothing is left behind.
fn load_with(
    model: &Model,
    options: &LoadOptions,
    warm: bool,
    script: FaultScript,
) -> Result<hoistway::Loaded> {
    if warm {
        make_warm(&model.path)
    } else {
        make_cold(&model.path)
    }
    let before = Footprint::now();
    let options = options.clone().faults(script);
    let outcome = hoistway::load(&[&model.path], &options);
    if outcome.is_err() {
        assert_nothing_left(&before);
    }
    outcome
}

#[test]
fn short_reads_are_continued() {
    let _turn = turn();
    let model = model();
    for (options, warm) in lanes() {
        for bytes in [1, 511, 4096, 5000] {
            let script = FaultScript::new(move |number, _| (number % 3 == 0).then_some(Fault::Short(bytes)));
            let loaded = load_with(&model, &options, warm, script.clone()).unwrap();
            assert_is_file(&loaded, &model.file);
            assert!(script.reads() > 0);
            let moved: u64 = loaded.report().carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
            assert_eq!(moved, loaded.report().tensor_bytes, "{}", loaded.report());
        }
    }
}

#[test]
fn bytes_that_are_copied_for_nothing_are_counted() {
    let _turn = turn();
    let model = model();
    if !can_read(Path::new(env!("CARGO_TARGET_TMPDIR")), Route::Cached, DirectIo::Auto) {
        return;
    }
    let [_, device] = devices();
    let _warm = Warm::make(&model.path);
    let options = LoadOptions::default().route(Route::Staged).device(device).chunk_bytes(64 << 10);
    let report = |fault: Option<Fault>| {
        let script = FaultScript::new(move |number, _| fault.clone().filter(|_| number == 0));
        load_with(&model, &options, true, script).unwrap().report().clone()
    };
    let (whole, again) = (report(None), report(Some(Fault::Short(1))));
    let reads = |report: &Report| report.carriers.iter().map(|carrier| carrier.reads).sum::<u64>();
    assert_eq!(reads(&again), reads(&whole) + 1, "{again}");
    assert!(again.read_bytes > whole.read_bytes, "{whole}{again}");
}

/// Direct reads go on at whole blocks, so a short one may spoil what the one before it had brought of a block.
#[test]
fn what_a_short_read_spoils_is_read_again() {
    let _turn = turn();
    let model = model();
    for last in [Fault::Short(0), Fault::Refused] {
        let (faults, reads) = ([Fault::Short(5000), Fault::Short(100), last], AtomicU32::new(0));
        let script = FaultScript::new(move |_, offset| {
            let is_there = (1 << 20..(1 << 20) + (64 << 10)).contains(&offset);
            is_there.then(|| faults.get(reads.fetch_add(1, Ordering::Relaxed) as usize).cloned())?
        });
        let options = LoadOptions::default().route(Route::Threads).chunk_bytes(64 << 10);
        assert_is_file(&load_with(&model, &options, false, script).unwrap(), &model.file);
    }
}

#[test]
fn interruptions_are_repeated_and_counted() {
    let _turn = turn();
    let model = model();
    for (options, warm) in lanes() {
        for fault in [Fault::Interrupted, Fault::Again] {
            let script = FaultScript::new(move |number, _| (number % 2 == 0).then(|| fault.clone()));
            let loaded = load_with(&model, &options, warm, script).unwrap();
            assert_is_file(&loaded, &model.file);
            if !warm {
                assert!(loaded.report().retries.interrupted > 0, "{}", loaded.report());
            }
        }
    }
}

#[test]
fn an_io_error_in_the_middle_names_file_tensor_and_bytes() {
    let _turn = turn();
    let model = model();
    let middle = model.file.len() as u64 / 2;
    for (options, warm) in lanes() {
        let script = FaultScript::new(move |_, offset| (offset >= middle).then_some(Fault::Broken));
        match load_with(&model, &options, warm, script).unwrap_err() {
            Error::Io { operation: "read", path, tensor, range, source } => {
                assert_eq!(path, model.path);
                assert!(tensor.is_some());
                assert!(range.unwrap().end() > middle);
                assert_eq!(source.raw_os_error(), Fault::Broken.errno());
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn reads_that_never_progress_end_in_an_error() {
    let _turn = turn();
    let model = model();
    for (options, warm) in lanes().into_iter().filter(|(_, warm)| !warm) {
        let forever_empty = FaultScript::new(|_, _| Some(Fault::Short(0)));
        let error = load_with(&model, &options, warm, forever_empty).unwrap_err();
        assert!(
            matches!(&error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::UnexpectedEof),
            "{error:?}"
        );
        let forever_interrupted = FaultScript::new(|_, _| Some(Fault::Interrupted));
        let error = load_with(&model, &options, warm, forever_interrupted).unwrap_err();
        assert!(
            matches!(&error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::Interrupted
                && source.raw_os_error() == Fault::Interrupted.errno()),
            "{error:?}"
        );
    }
}

#[test]
fn a_lane_that_fails_names_the_file_and_a_tensor_of_a_read_that_it_had() {
    let _turn = turn();
    let model = model();
    for (options, warm) in lanes() {
        let script = FaultScript::new(|number, _| (number == 2).then_some(Fault::Lost));
        match load_with(&model, &options, warm, script).unwrap_err() {
            Error::Io { path, tensor: Some(_), range: Some(_), source, .. } => {
                assert_eq!(path, model.path);
                assert_eq!(source.to_string(), "the lane tells nothing any more");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn direct_reads_refused_midway_fall_back_only_where_allowed() {
    let _turn = turn();
    let model = model();
    for (options, _) in
        lanes().into_iter().filter(|(options, warm)| !warm && options.direct != DirectIo::Never)
    {
        let refusals = AtomicU32::new(0);
        let script = FaultScript::new(move |number, _| {
            (number >= 5 && refusals.fetch_add(1, Ordering::Relaxed) < 1).then_some(Fault::Refused)
        });
        let outcome = load_with(&model, &options, false, script);
        if matches!(options.route, Route::Auto | Route::Staged) {
            let loaded = outcome.unwrap();
            assert_is_file(&loaded, &model.file);
            assert!(
                loaded
                    .report()
                    .refused
                    .iter()
                    .any(|refusal| ["direct reads", "gds"].contains(&refusal.what.as_str())),
                "{}",
                loaded.report()
            );
        } else {
            // What cuFile says of a read is not that the file has no direct reads.
            let refused = matches!(outcome, Err(Error::RouteUnavailable { .. }));
            let failed = matches!(outcome, Err(Error::Io { .. })) && options.route == Route::Gds;
            assert!(refused || failed, "{outcome:?}");
        }
    }
}

#[test]
fn a_file_cut_while_it_is_read_names_the_tensor() {
    let _turn = turn();
    for (options, warm) in lanes() {
        let model = model();
        let script = after_reads(writer(&model), |file| file.set_len(1 << 20).unwrap());
        match load_with(&model, &options, warm, script).unwrap_err() {
            Error::Truncated { path, tensor: Some(_), file_len, .. } => {
                assert_eq!((path, file_len), (model.path.clone(), 1 << 20));
            }
            // Extents that end before the cut notice only that the file changed.
            Error::Changed { path, tensor: Some(_), .. } => assert_eq!(path, model.path),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_file_rewritten_while_it_is_read_is_noticed() {
    let _turn = turn();
    for (options, warm) in lanes() {
        let model = model();
        let_file_time_pass(&model.path);
        let script = after_reads(writer(&model), |file| write_all_at(file, b"other bytes", 2 << 20));
        let error = load_with(&model, &options, warm, script).unwrap_err();
        assert!(matches!(&error, Error::Changed { tensor: Some(_), .. }), "{error:?}");
    }
}

/// As `cp -p` does over a file of the same length and modification time.
#[test]
fn a_file_rewritten_with_its_modification_time_set_back_is_noticed() {
    let _turn = turn();
    for (options, warm) in lanes() {
        let model = model();
        let_file_time_pass(&model.path);
        let modified = fs::metadata(&model.path).unwrap().modified().unwrap();
        let script = after_reads(writer(&model), move |file| {
            write_all_at(file, b"other bytes", 2 << 20);
            file.set_modified(modified).unwrap();
        });
        let error = load_with(&model, &options, warm, script).unwrap_err();
        assert!(matches!(&error, Error::Changed { tensor: Some(_), .. }), "{error:?}");
    }
    let model = model();
    let file = writer(&model);
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    let_file_time_pass(&model.path);
    let modified = fs::metadata(&model.path).unwrap().modified().unwrap();
    write_all_at(&file, b"other bytes", 2 << 20);
    file.set_modified(modified).unwrap();
    drop(file);
    let selection = hoistway::plan::Selection::all().select("odd");
    let options = LoadOptions::default().route(Route::Mapped).selection(selection);
    let error = checkpoint.load(&options).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error:?}");
}

#[test]
fn whether_a_file_was_cut_is_told_without_a_load() {
    let _turn = turn();
    let model = model();
    let file = writer(&model);
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    let tensor = checkpoint.catalog().find("odd").unwrap();
    checkpoint.check_unchanged(tensor).unwrap();
    file.set_len(9).unwrap();
    match checkpoint.check_unchanged(tensor).unwrap_err() {
        Error::Truncated { path, tensor: Some(name), file_len: 9, .. } => {
            assert_eq!((path, name.as_str()), (model.path.clone(), "odd"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_replaced_while_it_is_read_is_read_to_its_end() {
    let _turn = turn();
    for (options, warm) in lanes() {
        let model = model();
        let_file_time_pass(&model.path);
        let (path, replaced) = (model.path.clone(), AtomicBool::new(false));
        let script = FaultScript::new(move |number, _| {
            if number == 3 && !replaced.swap(true, Ordering::Relaxed) {
                let new = path.with_extension("new");
                write_model(&new, &[tensor("other", Dtype::U8, &[4])], 0, 9);
                fs::rename(new, &path).unwrap();
            }
            None
        });
        assert_is_file(&load_with(&model, &options, warm, script).unwrap(), &model.file);
    }
}

#[test]
fn a_file_cut_or_grown_between_header_and_load_is_noticed() {
    let _turn = turn();
    for (options, _) in lanes() {
        for len in [1 << 20, 64 << 20] {
            let model = model();
            let file = writer(&model);
            let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
            file.set_len(len).unwrap();
            drop(file);
            let error = checkpoint.load(&options).unwrap_err();
            assert!(matches!(error, Error::Truncated { .. } | Error::Changed { .. }), "{error:?}");
        }
    }
    let model = model();
    let file = writer(&model);
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    file.set_len(1 << 20).unwrap();
    drop(file);
    let selection = hoistway::plan::Selection::all().select("odd");
    let options = LoadOptions::default().route(Route::Mapped).selection(selection);
    assert!(matches!(checkpoint.load(&options), Err(Error::Truncated { .. } | Error::Changed { .. })));
}

#[test]
fn a_file_replaced_after_opening_is_still_the_one_that_was_opened() {
    let _turn = turn();
    let model = model();
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    fs::rename(&model.path, model.path.with_extension("old")).unwrap();
    write_model(&model.path, &[tensor("other", Dtype::U8, &[4])], 0, 9);
    for (options, _) in lanes() {
        assert_is_file(&checkpoint.load(&options).unwrap(), &model.file);
    }
}

#[test]
fn cancelled_and_dropped_loads_leave_nothing_behind() {
    let _turn = turn();
    let model = model();
    let before = Footprint::now();
    for (options, warm) in lanes() {
        if warm {
            make_warm(&model.path)
        } else {
            make_cold(&model.path)
        }
        let slow = FaultScript::new(|_, _| Some(Fault::Delay(Duration::from_millis(2))));
        let options = options.faults(slow);
        let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
        let mut loading = checkpoint.start(&options).unwrap();
        let first = loading.next().unwrap().unwrap();
        loading.cancel();
        let ended = loading.find_map(|tensor| tensor.err());
        assert!(matches!(ended, Some(Error::Cancelled)), "{ended:?}");
        assert!(loading.next().is_none(), "nothing comes after the error");
        drop(loading);
        drop(checkpoint.start(&options).unwrap());
        drop(checkpoint);
        assert!(first.len_bytes() < model.file.len() as u64, "a tensor that was handed out stays valid");
    }
    assert_nothing_left(&before);
}
