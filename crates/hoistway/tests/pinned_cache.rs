//! Loads to a device from pages of the page cache that are pinned where they lie, on the stand-in driver.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    TestTensor, assert_is_file,
    child::{forbid, in_child},
    in_memory, make_cold,
    on_device::{Devices, Played, chunky, disk, to_device},
    reading::{Warm, until},
    stand_in::STAND_IN,
    tensor, write_model,
};
use hoistway::{
    Checkpoint, DirectIo, Dtype, Error, LoadOptions, Loaded, Route,
    route::fault::{Fault, FaultScript},
};
use hoistway_io::{file::Probe, parallel::cores};
use requirements::{Requirement, skip};
use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

fn pinned() -> LoadOptions {
    to_device().route(Route::PinnedCache)
}

/// By few threads, which do not copy files in memory faster than they are pinned.
fn few_copy() -> LoadOptions {
    to_device().threads(2)
}

/// The share of the tensors' bytes that a route has carried.
fn share(loaded: &Loaded, route: Route) -> f64 {
    let report = loaded.report();
    let carried =
        report.carriers.iter().filter(|carrier| carrier.route == route).map(|carrier| carrier.tensor_bytes);
    carried.sum::<u64>() as f64 / report.tensor_bytes as f64
}

/// Brings a file into the page cache, and keeps it there. `None` if the kernel does not say what that holds, without which pages
/// are not pinned.
fn can_pin(path: &Path) -> Option<Warm> {
    let probe = Probe::find(&File::open(path).unwrap());
    if !matches!(probe, Probe::Cachestat | Probe::Memory) {
        skip(Requirement::Cachestat, format!("what the page cache holds is found out by {probe:?}"));
        return None;
    }
    Some(Warm::make(path))
}

/// Folders of file systems whose pages are those of the page cache: one on a drive, and one in memory.
fn folders() -> Vec<tempfile::TempDir> {
    [disk()].into_iter().chain(in_memory()).collect()
}

#[test]
fn what_is_cached_is_copied_from_where_it_lies() {
    for directory in folders() {
        copied_from_where_it_lies(directory.path());
    }
}

fn copied_from_where_it_lies(directory: &Path) {
    let devices = Devices::take();
    let (path, file) = chunky(directory);
    let Some(_warm) = can_pin(&path) else { return };
    for options in [few_copy(), pinned()] {
        let loaded = hoistway::load(&[&path], &options).unwrap();
        assert_is_file(&loaded, &file);
        // The last read of the file is short, and left to a processor.
        assert!(share(&loaded, Route::PinnedCache) > 0.99, "{}", loaded.report());
        let staged = |carrier: &hoistway::Carrier| carrier.via == Some(Route::Staged);
        assert!(
            loaded
                .report()
                .carriers
                .iter()
                .all(|carrier| staged(carrier) == (carrier.route == Route::Cached)),
            "{}",
            loaded.report()
        );
        let notes = &loaded.report().notes;
        assert!(notes.iter().any(|note| note.contains("were pinned where they lay")), "{notes:?}");
        drop(loaded);
        devices.assert_nothing_left("a load from pinned pages");
    }
}

/// Processors take reads that wait for the thread that pins, unless the route is named.
#[test]
fn processors_copy_beside_the_device() {
    for directory in folders() {
        copied_beside_the_device(directory.path());
    }
}

fn copied_beside_the_device(directory: &Path) {
    let devices = Devices::take();
    let (path, file) = chunky(directory);
    let Some(_warm) = can_pin(&path) else { return };
    for route in [Route::Auto, Route::PinnedCache] {
        let (copies, pins) = (AtomicBool::new(false), AtomicBool::new(false));
        let script = FaultScript::new(move |_, _| {
            // However late the other gets a processor.
            let (own, other) = match thread::current().name() {
                Some("hoistway-copy") => (&copies, &pins),
                Some("hoistway-pages") => (&pins, &copies),
                _ => return None,
            };
            own.store(true, Ordering::Relaxed);
            if route == Route::Auto {
                until("the other has a read", || other.load(Ordering::Relaxed));
            }
            None
        });
        let options = few_copy().route(route).chunk_bytes(256 << 10).faults(script);
        let loaded = hoistway::load(&[&path], &options).unwrap();
        assert_is_file(&loaded, &file);
        let (pinned, copied) = (share(&loaded, Route::PinnedCache), share(&loaded, Route::Cached));
        match route {
            Route::Auto => assert!(pinned > 0.0 && copied > 0.01, "{}", loaded.report()),
            _ => assert!(pinned > 0.98, "{}", loaded.report()),
        }
        assert!(pinned + copied > 0.99, "{}", loaded.report());
        drop(loaded);
        devices.assert_nothing_left("a load by both");
    }
}

/// One thread pins beside them; more than that is what the caller asks for. Once no read waits to be pinned, more may copy the last ones.
#[test]
fn no_more_threads_copy_beside_the_device_than_half_of_the_cores() {
    let devices = Devices::take();
    let directory = disk();
    let path = directory.path().join("large.safetensors");
    let file = write_model(&path, &[tensor("t", Dtype::U8, &[65 << 20])], 0, 3);
    let Some(_warm) = can_pin(&path) else { return };
    for (threads, most) in [(None, (cores() / 2).max(1)), (Some(3), 3)] {
        // The number of reads that had begun before the first of each thread that copies.
        let (reads, copiers) = (AtomicUsize::new(0), Arc::new(Mutex::new(HashMap::new())));
        let seen = copiers.clone();
        let script = FaultScript::new(move |_, _| {
            let (before, thread) = (reads.fetch_add(1, Ordering::Relaxed), thread::current());
            match thread.name() {
                Some("hoistway-copy") => {
                    seen.lock().unwrap().entry(thread.id()).or_insert(before);
                    // So that the device has nothing to do for a while, and asks for more.
                    Some(Fault::Delay(Duration::from_millis(2)))
                }
                Some("hoistway-pages") => {
                    until("another copies", || !seen.lock().unwrap().is_empty());
                    None
                }
                _ => None,
            }
        });
        let mut options = to_device().chunk_bytes(1 << 20).faults(script);
        options.threads = threads;
        let loaded = hoistway::load(&[&path], &options).unwrap();
        assert_is_file(&loaded, &file);
        let report = loaded.report();
        let all: u64 = report.carriers.iter().map(|carrier| carrier.reads).sum();
        // Each thread may have one in hand that has not begun.
        let last = all as usize - 1 - most - 1;
        let copiers = copiers.lock().unwrap().values().filter(|&&before| before < last).count();
        // Where little memory is free, no more may be pinned, and then as many threads copy as may.
        let is_full = report.notes.iter().any(|note| note.contains("were copied by processors"));
        let most = if is_full { cores().max(most) } else { most };
        assert!((1..=most).contains(&copiers), "{copiers}: {report}");
        assert!(report.to_string().contains("copied to slots"), "{report}");
        drop(loaded);
        devices.assert_nothing_left("a load by some of the cores");
    }
}

#[test]
fn files_in_memory_are_left_to_many_threads() {
    let devices = Devices::take();
    let Some(directory) = in_memory() else { return };
    let path = directory.path().join("large.safetensors");
    let file = write_model(&path, &[tensor("t", Dtype::U8, &[40 << 20])], 0, 3);
    let loaded = hoistway::load(&[&path], &to_device().threads(8)).unwrap();
    assert_is_file(&loaded, &file);
    assert_eq!(share(&loaded, Route::Cached), 1.0, "{}", loaded.report());
    let refused = &loaded.report().refused;
    assert!(
        refused.iter().any(|refusal| refusal.why.reason.contains("many threads copy faster")),
        "{refused:?}"
    );
    drop(loaded);
    devices.assert_nothing_left("a load from memory by many threads");
}

#[test]
fn what_is_not_cached_comes_another_way_or_is_an_error() {
    let devices = Devices::take();
    let directory = disk();
    let path = directory.path().join("large.safetensors");
    let tensors: Vec<TestTensor> = (0..8).map(|i| tensor(&format!("t{i}"), Dtype::U8, &[8 << 20])).collect();
    let file = write_model(&path, &tensors, 0, 5);
    let Some(warm) = can_pin(&path) else { return };
    drop(warm);
    make_cold(&path);
    let half = file.len() / 2;
    File::open(&path).unwrap().read_exact_at(&mut vec![0; half], 0).unwrap();
    let loaded = hoistway::load(&[&path], &few_copy()).unwrap();
    assert_is_file(&loaded, &file);
    let by_pages = share(&loaded, Route::PinnedCache);
    assert!(by_pages > 0.2 && by_pages < 1.0, "{}", loaded.report());
    make_cold(&path);
    match hoistway::load(&[&path], &pinned()).unwrap_err() {
        Error::RouteUnavailable { route: Route::PinnedCache, path: Some(named), why } => {
            assert_eq!(named, path);
            assert!(why.reason.contains("the page cache does not hold all of bytes "), "{why}");
        }
        other => panic!("{other:?}"),
    }
    drop(loaded);
    devices.assert_nothing_left("a load of a file that is half cached");
}

/// Pages that go after a read was given to the thread that pins, which found them in the page cache, and before it pins them.
#[test]
fn pages_that_are_evicted_before_they_are_pinned_come_another_way_or_are_an_error() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let routes = [Route::Auto, Route::PinnedCache];
    for (route, window) in routes.into_iter().flat_map(|route| [(route, 1), (route, 2)]) {
        let Some(warm) = can_pin(&path) else { return };
        let (warm, seen) = (Arc::new(Mutex::new(Some(warm))), Arc::new(AtomicUsize::new(0)));
        let (own_path, own_warm, own_seen) = (path.clone(), warm.clone(), seen.clone());
        let script = FaultScript::new(|_, _| None).before_reads(move || {
            let pins = thread::current().name() == Some("hoistway-pages");
            if pins && own_seen.fetch_add(1, Ordering::Relaxed) + 1 == window {
                drop(own_warm.lock().unwrap().take());
                // What is pinned already stays, and so does the folio that it ends in.
                evict(&own_path, if window == 1 { 0 } else { 20 << 20 });
            }
        });
        // Half of the reads are pinned at once.
        let options = few_copy().route(route).chunk_bytes(1 << 20).faults(script);
        let loaded = hoistway::load(&[&path], &options);
        assert!(warm.lock().unwrap().is_none(), "{route}: nothing was evicted before window {window}");
        match (route, loaded) {
            (Route::Auto, Ok(loaded)) => {
                assert_is_file(&loaded, &file);
                let report = loaded.report();
                let pinned = share(&loaded, Route::PinnedCache);
                // The reads of the window came by routes that the report names.
                assert!(pinned < 0.9 && (window == 1 || pinned > 0.1), "{report}");
            }
            (Route::PinnedCache, Err(Error::RouteUnavailable { route: named, path: Some(of), why })) => {
                assert_eq!((named, of), (route, path.clone()));
                // The last read is short, and fails first where processors get to it before.
                assert!(why.reason.contains("the page cache does not hold "), "{why}");
                assert!(why.reason.contains("(tensor 't"), "{why}");
            }
            (_, other) => panic!("{route}, window {window}: {other:?}"),
        }
        devices.assert_nothing_left("a load whose pages were evicted");
    }
}

/// Drops a file from the page cache, until it says that it holds nothing of the file from `start` on.
fn evict(path: &Path, start: u64) {
    let file = File::open(path).unwrap();
    let (probe, len) = (Probe::find(&file), file.metadata().unwrap().len());
    let held = |end| probe.cached_bytes(&file, end).unwrap();
    until("the pages are out of the page cache", || {
        make_cold(path);
        held(len) == held(start)
    });
}

/// A page that is pinned in a hole would have to be made: it takes memory that the file does not have.
#[test]
fn holes_of_files_in_memory_are_left_to_processors_and_stay_holes() {
    let devices = Devices::take();
    let Some(directory) = in_memory() else { return };
    let (path, mut file) = chunky(directory.path());
    let (start, end) = (9 << 20, 10 << 20);
    file[start..end].fill(0);
    let sparse = OpenOptions::new().write(true).open(&path).unwrap();
    punch(&sparse, start as u64, (end - start) as u64);
    let blocks = || sparse.metadata().unwrap().blocks();
    let before = blocks();
    let loaded = hoistway::load(&[&path], &few_copy()).unwrap();
    assert_is_file(&loaded, &file);
    let (shown, copied) = (share(&loaded, Route::PinnedCache), share(&loaded, Route::Cached));
    assert!(shown > 0.5 && copied > 0.1, "{}", loaded.report());
    match hoistway::load(&[&path], &pinned()).unwrap_err() {
        Error::RouteUnavailable { route: Route::PinnedCache, path: Some(named), why } => {
            assert_eq!(named, path);
            assert!(why.reason.contains("the page cache does not hold all of bytes "), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(blocks(), before);
    drop(loaded);
    devices.assert_nothing_left("loads of a file with a hole");
}

/// Whatever of the memory that may be pinned the pages take: staging memory gets some.
#[test]
fn pages_are_unpinned_where_staging_memory_cannot_be_pinned_beside_them() {
    let devices = Devices::take();
    let Some(directory) = in_memory() else { return };
    let (path, mut file) = chunky(directory.path());
    let (start, end) = (20 << 20, 21 << 20);
    file[start..end].fill(0);
    let sparse = OpenOptions::new().write(true).open(&path).unwrap();
    punch(&sparse, start as u64, (end - start) as u64);
    for most in [2, 12, 20, 21, 22, 23, 24] {
        STAND_IN.set(&format!("PINNED_MIB={most}"));
        let loaded = hoistway::load(&[&path], &few_copy().chunk_bytes(1 << 20));
        STAND_IN.reset();
        let loaded = loaded.unwrap_or_else(|error| panic!("{most} MiB: {error}"));
        assert_is_file(&loaded, &file);
        drop(loaded);
        devices.assert_nothing_left("a load that may pin little");
    }
}

/// The first load that tries a file system meets that moment.
#[test]
fn a_moment_in_which_nothing_can_be_pinned_says_nothing_of_the_file_system() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let Some(_warm) = can_pin(&path) else { return };
    // No memory, no reason, and a device that is not available.
    for moment in ["PINNED_MIB=0", "FAULTS=cuMemHostRegister_v2:*=999", "FAULTS=cuMemHostRegister_v2:*=46"] {
        STAND_IN.set(moment);
        hoistway::load(&[&path], &pinned()).unwrap_err();
        STAND_IN.reset();
    }
    let loaded = hoistway::load(&[&path], &pinned()).unwrap();
    assert_is_file(&loaded, &file);
    drop(loaded);
    devices.assert_nothing_left("loads that pin pages");
}

/// A driver holds calls up now and then. The trial goes on meanwhile.
#[test]
fn a_long_moment_says_nothing_of_the_file_system_once_it_is_over() {
    if !in_child("a_long_moment_says_nothing_of_the_file_system_once_it_is_over") {
        return;
    }
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let Some(_warm) = can_pin(&path) else { return };
    STAND_IN.configure("BLOCKS=cuMemHostRegister_v2");
    let error = hoistway::load(&[&path], &pinned()).unwrap_err();
    assert!(error.to_string().contains("could not be pinned within 5 seconds"), "{error}");
    STAND_IN.configure("BLOCKS=");
    until("pages are pinned", || match hoistway::load(&[&path], &pinned()) {
        Ok(loaded) => {
            assert_is_file(&loaded, &file);
            true
        }
        Err(_) => false,
    });
    devices.assert_nothing_left("loads that pin pages");
}

/// What an error advises helps.
#[test]
fn conversions_that_the_device_has_no_memory_for_say_what_to_do() {
    let devices = Devices::take();
    let directory = disk();
    let path = directory.path().join("singles.safetensors");
    let tensors: Vec<TestTensor> =
        (0..20).map(|i| tensor(&format!("t{i}"), Dtype::F32, &[2 << 20])).collect();
    write_model(&path, &tensors, 0, 2);
    let Some(_warm) = can_pin(&path) else { return };
    // 80 MiB of tensors.
    STAND_IN.set("MEMORY_MIB=110");
    let named = pinned().dtype(Dtype::Bf16);
    let error = hoistway::load(&[&path], &named).unwrap_err().to_string();
    assert!(error.contains("set a smaller memory_budget, or use route=auto"), "{error}");
    for options in [named.memory_budget_bytes(16 << 20), few_copy().dtype(Dtype::Bf16)] {
        hoistway::load(&[&path], &options).unwrap();
    }
    STAND_IN.reset();
    devices.assert_nothing_left("loads that convert");
}

fn punch(file: &File, start: u64, len: u64) {
    try_to_punch(file, start, len).unwrap();
}

fn try_to_punch(file: &File, start: u64, len: u64) -> rustix::io::Result<()> {
    use rustix::fs::FallocateFlags;
    rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, len)
}

#[test]
fn headers_of_any_length_and_many_small_tensors_arrive() {
    let devices = Devices::take();
    let directory = disk();
    for padding in [0, 1, 7, 4095] {
        let path = directory.path().join(format!("padded{padding}.safetensors"));
        let tensors: Vec<TestTensor> =
            (0..300).map(|i| tensor(&format!("t{i}"), Dtype::U8, &[16 << 10])).collect();
        let file = write_model(&path, &tensors, padding, 9);
        let Some(_warm) = can_pin(&path) else { return };
        // Reads of 64 KiB are short enough to be left to processors.
        for (chunk, least) in [(64 << 10, 0.0), (256 << 10, 0.8), (4 << 20, 0.8)] {
            let loaded = hoistway::load(&[&path], &pinned().chunk_bytes(chunk)).unwrap();
            assert_is_file(&loaded, &file);
            assert!(share(&loaded, Route::PinnedCache) >= least, "{}", loaded.report());
        }
    }
    devices.assert_nothing_left("loads of small tensors");
}

#[test]
fn conversions_read_pinned_pages_too() {
    let devices = Devices::take();
    let directory = disk();
    let path = directory.path().join("floats.safetensors");
    write_model(&path, &[tensor("a", Dtype::Bf16, &[3 << 20]), tensor("b", Dtype::F32, &[999])], 0, 2);
    let Some(_warm) = can_pin(&path) else { return };
    let staged = hoistway::load(&[&path], &to_device().route(Route::Staged).dtype(Dtype::F32)).unwrap();
    let by_pages = hoistway::load(&[&path], &pinned().dtype(Dtype::F32)).unwrap();
    assert!(share(&by_pages, Route::PinnedCache) > 0.5, "{}", by_pages.report());
    for name in ["a", "b"] {
        let bytes = |loaded: &Loaded| loaded.get(name).unwrap().bytes().unwrap().into_owned();
        assert_eq!(bytes(&staged), bytes(&by_pages), "{name}");
    }
    drop((staged, by_pages));
    devices.assert_nothing_left("conversions from pinned pages");
}

/// A file that is changed after its pages were pinned, and before they are copied.
#[test]
fn files_that_change_before_they_are_copied_are_noticed() {
    for directory in folders() {
        changes_are_noticed(directory.path());
    }
}

fn changes_are_noticed(directory: &Path) {
    let devices = Devices::take();
    let (path, file) = chunky(directory);
    if can_pin(&path).is_none() {
        return;
    }
    type Change = fn(&Path, u64);
    let cut: Change =
        |path, len| OpenOptions::new().write(true).open(path).unwrap().set_len(len / 2).unwrap();
    let overwrite: Change = |path, len| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[0x11; 4096], len - 8192).unwrap();
    };
    let replace: Change = |path, len| {
        let other = path.with_extension("other");
        std::fs::write(&other, vec![0x22; len as usize]).unwrap();
        std::fs::rename(other, path).unwrap();
    };
    let punch: Change =
        |path, len| punch(&OpenOptions::new().write(true).open(path).unwrap(), len / 2, len / 4);
    let changes = [(cut, "cut"), (overwrite, "overwritten"), (punch, "punched"), (replace, "replaced")];
    let spare = File::create(directory.join("spare")).unwrap();
    spare.set_len(1 << 20).unwrap();
    let can_punch = try_to_punch(&spare, 0, 1 << 19).is_ok();
    for (change, what) in changes.into_iter().filter(|(_, what)| can_punch || *what != "punched") {
        std::fs::write(&path, &file).unwrap();
        let _warm = Warm::make(&path);
        common::let_file_time_pass(&path);
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        // No copy ends before this is taken back.
        STAND_IN.set("COPY_LATENCY_US=60000000");
        let loading = checkpoint.start(&pinned()).unwrap();
        until("a copy is queued", || Played::Cuda.pinned_bytes() > 0);
        change(&path, file.len() as u64);
        STAND_IN.reset();
        match (loading.wait(), what) {
            (Err(Error::Truncated { path: named, .. } | Error::Changed { path: named, .. }), "cut") => {
                assert_eq!(named, path);
            }
            (Err(Error::Changed { path: named, .. }), "overwritten" | "punched") => assert_eq!(named, path),
            // The file that was opened is as it was.
            (Ok(loaded), "replaced") => assert_is_file(&loaded, &file),
            (other, _) => panic!("{what}: {other:?}"),
        }
        devices.assert_nothing_left(what);
    }
}

#[test]
fn pages_that_cannot_be_pinned_are_staged_and_the_report_says_why() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let Some(_warm) = can_pin(&path) else { return };
    STAND_IN.set("PINS_READ_ONLY=0");
    let loaded = hoistway::load(&[&path], &few_copy()).unwrap();
    assert_is_file(&loaded, &file);
    let refused = &loaded.report().refused;
    let told = refused.iter().find(|refusal| refusal.what == "pinned-cache").expect("a refusal");
    assert!(told.why.reason.contains("pins no memory that cannot be written"), "{told:?}");
    assert!(matches!(
        hoistway::load(&[&path], &pinned()),
        Err(Error::RouteUnavailable { route: Route::PinnedCache, .. })
    ));
    drop(loaded);
    STAND_IN.reset();
    // Its file system was tried before.
    STAND_IN.set("REFUSES_READ_ONLY=1");
    let loaded = hoistway::load(&[&path], &few_copy()).unwrap();
    assert_is_file(&loaded, &file);
    assert_eq!(share(&loaded, Route::PinnedCache), 0.0, "{}", loaded.report());
    let told =
        loaded.report().refused.iter().find(|refusal| refusal.what == "pinned-cache").expect("a refusal");
    assert!(told.why.reason.contains("pinning host memory"), "{told:?}");
    drop(loaded);
    devices.assert_nothing_left("loads without pinned pages");
}

#[test]
fn it_leads_to_devices_and_from_the_page_cache_alone() {
    let _devices = Devices::take();
    let directory = disk();
    let (path, _) = chunky(directory.path());
    for (options, option) in [
        (LoadOptions::default().route(Route::PinnedCache), "route"),
        (pinned().direct(DirectIo::Always), "direct"),
    ] {
        match hoistway::load(&[&path], &options).unwrap_err() {
            Error::InvalidOption { option: named, .. } => assert_eq!(named, option),
            other => panic!("{other:?}"),
        }
    }
    let always = hoistway::load(&[&path], &to_device().direct(DirectIo::Always)).unwrap();
    assert_eq!(share(&always, Route::PinnedCache), 0.0);
    let rocm = hoistway::load(&[&path], &Played::Rocm.options()).unwrap();
    assert_eq!(share(&rocm, Route::PinnedCache), 0.0);
}

#[test]
fn a_load_that_is_cancelled_or_dropped_leaves_nothing_pinned() {
    let devices = Devices::take();
    let directory = disk();
    let (path, _) = chunky(directory.path());
    let Some(_warm) = can_pin(&path) else { return };
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    for cancels in [true, false] {
        STAND_IN.set("COPY_LATENCY_US=60000000");
        let mut loading = checkpoint.start(&pinned()).unwrap();
        until("pages are pinned", || Played::Cuda.pinned_bytes() > 0);
        if cancels {
            loading.cancel();
        }
        STAND_IN.reset();
        drop(loading);
        devices.assert_nothing_left("a load that ended early");
    }
}

#[test]
fn loads_within_small_budgets_take_pinned_pages_too() {
    let devices = Devices::take();
    let directory = disk();
    let (path, file) = chunky(directory.path());
    let Some(_warm) = can_pin(&path) else { return };
    for budget in [8 << 20, 64 << 20] {
        let loaded = hoistway::load(&[&path], &pinned().memory_budget_bytes(budget)).unwrap();
        assert_is_file(&loaded, &file);
        assert!(loaded.report().memory.staging_bytes <= budget, "{}", loaded.report());
        assert!(share(&loaded, Route::PinnedCache) > 0.99, "{}", loaded.report());
    }
    devices.assert_nothing_left("loads within small budgets");
}

/// As Linux before 5.14 answers.
#[test]
fn pages_are_pinned_where_the_system_does_not_fault_ahead() {
    if !in_child("pages_are_pinned_where_the_system_does_not_fault_ahead") {
        return;
    }
    // Of such files, windows are read in before the driver is asked.
    let Some(directory) = in_memory() else { return };
    let _devices = Devices::take();
    let (path, file) = chunky(directory.path());
    let Some(_warm) = can_pin(&path) else { return };
    forbid(&[libc::SYS_madvise], libc::EINVAL);
    let loaded = hoistway::load(&[&path], &pinned()).unwrap();
    assert_is_file(&loaded, &file);
    assert!(share(&loaded, Route::PinnedCache) > 0.99, "{}", loaded.report());
}
