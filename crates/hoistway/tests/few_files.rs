//! Checkpoints of more files than the process may have open, by every route.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{can_read, make_cold, on_device, reading::Warm, stand_in::Turn, tensor, write_model};
use hoistway::{
    Checkpoint, DirectIo, Dtype, Error, LoadOptions, Loaded, Route,
    plan::Selection,
    read::{BatchReport, Priority, ReadRequest, Reader, ReaderOptions, Target},
    save::SaveOptions,
};
use std::{
    env, fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

const FILES: usize = 300;
/// Set in a child with few descriptors.
const CHILD: &str = "HOISTWAY_TEST_FEW_FILES";

/// Runs a test in a child with such a limit. `false` in the child.
fn with_limit(test: &str, limit: &str) -> bool {
    if env::var_os(CHILD).is_some() {
        return false;
    }
    let mut child = Command::new("sh");
    child.args(["-c", &format!("ulimit {limit}; exec \"$0\" --exact {test}")]);
    assert!(child.arg(env::current_exe().unwrap()).env(CHILD, "1").status().unwrap().success());
    true
}

/// Files with a tensor each, and the bytes of these.
fn shards(folder: &Path) -> (Vec<PathBuf>, Vec<Vec<u8>>) {
    (0..FILES).map(|number| shard(folder, number, 5000)).unzip()
}

fn shard(folder: &Path, number: usize, len: usize) -> (PathBuf, Vec<u8>) {
    let path = folder.join(format!("{number:03}.safetensors"));
    let tensors = [tensor(&format!("t{number:03}"), Dtype::U8, &[len as u64])];
    let file = write_model(&path, &tensors, 0, number as u64);
    (path, file[file.len() - len..].to_vec())
}

fn assert_are(loaded: &Loaded, expected: &[Vec<u8>]) {
    assert_eq!(loaded.tensors().len(), expected.len());
    for (number, bytes) in expected.iter().enumerate() {
        let tensor = loaded.get(&format!("t{number:03}")).unwrap();
        assert!(*tensor.bytes().unwrap() == **bytes, "tensor {number}");
    }
}

fn assert_reads(reader: &Reader, checkpoint: &Checkpoint, expected: &[Vec<u8>]) -> BatchReport {
    let requests = checkpoint.catalog().tensors().iter().map(|entry| {
        let file = checkpoint.read_file(entry.file).unwrap();
        ReadRequest::new(&file, entry.bytes, Target::memory())
    });
    let batch = reader.submit(requests, Priority::Demand).unwrap();
    batch.wait().unwrap();
    for (number, bytes) in expected.iter().enumerate() {
        assert!(batch.take(number).unwrap()[..5000] == **bytes, "read {number}");
    }
    batch.report()
}

/// The soft and the hard limit of open files.
fn limits() -> (u64, u64) {
    let limits = fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap().to_owned();
    let mut numbers = line.split_whitespace().skip(3).map(|number| number.parse::<u64>().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn every_route_loads_more_files_than_may_be_open() {
    if with_limit("every_route_loads_more_files_than_may_be_open", "-n 128") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (paths, expected) = shards(directory.path());
    let checkpoint = Checkpoint::open(&paths).unwrap();
    // Twice: what a load opened is closed.
    for _ in 0..2 {
        for route in [Route::Auto, Route::Threads, Route::Mapped] {
            let loaded = checkpoint.load(&LoadOptions::default().route(route)).unwrap();
            assert_are(&loaded, &expected);
            assert!(open_files() < 100, "{route}: {} files are open", open_files());
        }
    }
    let reader = Reader::new(&ReaderOptions::default()).unwrap();
    let report = assert_reads(&reader, &checkpoint, &expected);
    assert!(report.notes.is_empty(), "{report}");
    // Mappings keep no file.
    let mapped = checkpoint.load(&LoadOptions::default().route(Route::Mapped)).unwrap();
    drop((reader, checkpoint));
    assert!(open_files() < 20, "{} files are open", open_files());
    assert_are(&mapped, &expected);
}

#[test]
fn reads_in_flight_leave_descriptors_over() {
    if with_limit("reads_in_flight_leave_descriptors_over", "-n 128") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (paths, expected) = shards(directory.path());
    let checkpoint = Checkpoint::open(&paths).unwrap();
    let routes = [Route::Auto, Route::Cached, Route::IoUring, Route::Threads];
    for route in routes.into_iter().filter(|&route| can_read(directory.path(), route, DirectIo::Auto)) {
        let options = LoadOptions::default().route(route).chunk_bytes(64 << 10).in_flight_bytes(16 << 20);
        // What `cached` copies must be there, and stay. A mapping takes no descriptor.
        let _warm: Vec<_> = paths.iter().map(|path| Warm::make(path)).collect();
        let loaded = checkpoint.load(&options.threads(200)).unwrap();
        assert_are(&loaded, &expected);
        assert!(loaded.report().notes.iter().any(|note| note.contains("raise ulimit -n")), "{route}");
        let reader = Reader::new(&ReaderOptions::default().route(route).in_flight(256)).unwrap();
        let report = assert_reads(&reader, &checkpoint, &expected);
        assert!(report.notes.iter().any(|note| note.contains("raise ulimit -n")), "{report}");
    }
}

#[test]
fn relative_paths_hold_when_the_working_directory_changes() {
    if with_limit("relative_paths_hold_when_the_working_directory_changes", "-n 128") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (paths, expected) = shards(directory.path());
    let names: Vec<_> = paths.iter().map(|path| path.file_name().unwrap()).collect();
    env::set_current_dir(&directory).unwrap();
    let checkpoint = Checkpoint::open(&names).unwrap();
    env::set_current_dir("/").unwrap();
    for route in [Route::Auto, Route::Threads, Route::Mapped] {
        assert_are(&checkpoint.load(&LoadOptions::default().route(route)).unwrap(), &expected);
    }
    fs::remove_file(paths.last().unwrap()).unwrap();
    let error = checkpoint.load(&LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("299.safetensors"), "{error}");
}

#[test]
fn a_library_of_direct_reads_takes_files_that_do_not_stay_open() {
    if with_limit("a_library_of_direct_reads_takes_files_that_do_not_stay_open", "-n 128") {
        return;
    }
    let _stand_in = Turn::take();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if !can_read(directory.path(), Route::Threads, DirectIo::Always) {
        return;
    }
    // Files of whole blocks, as the library takes no others.
    let (first, _) = shard(directory.path(), 0, 5000);
    let len = 5000 + 4096 - fs::metadata(first).unwrap().len() as usize % 4096;
    let (paths, expected): (Vec<_>, Vec<_>) =
        (0..FILES).map(|number| shard(directory.path(), number, len)).unzip();
    let checkpoint = Checkpoint::open(&paths).unwrap();
    for route in [Route::Gds, Route::Auto, Route::Gds] {
        paths.iter().for_each(|path| make_cold(path));
        let loaded = checkpoint.load(&on_device::to_device().route(route)).unwrap();
        assert_are(&loaded, &expected);
        assert!(open_files() < 100, "{route}: {} files are open", open_files());
        let is_direct = loaded.report().carriers.iter().any(|carrier| carrier.route == Route::Gds);
        assert!(is_direct, "{route}: {}", loaded.report());
    }
}

#[test]
fn reads_that_wait_keep_no_file_open() {
    if with_limit("reads_that_wait_keep_no_file_open", "-n 128") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (paths, expected): (Vec<_>, Vec<_>) =
        (0..FILES).map(|number| shard(directory.path(), number, 1 << 20)).unzip();
    let checkpoint = Checkpoint::open(&paths).unwrap();
    // The page cache holds the first half of each: a copy begins, and hands the rest over.
    for path in &paths {
        make_cold(path);
        let file = fs::File::open(path).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        file.read_exact_at(&mut [0; 512 << 10], 0).unwrap();
    }
    let loaded = checkpoint.load(&LoadOptions::default().threads(1)).unwrap();
    assert_are(&loaded, &expected);
}

#[test]
fn files_are_opened_once_where_no_read_is_direct() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("model.safetensors");
    write_model(&path, &[tensor("large", Dtype::U8, &[8 << 20]), tensor("small", Dtype::U8, &[9])], 0, 1);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let descriptors = || {
        let links = fs::read_dir("/proc/self/fd").unwrap();
        let leads_to = |link: &fs::DirEntry| fs::read_link(link.path()).is_ok_and(|target| target == path);
        links.filter_map(Result::ok).filter(leads_to).count()
    };
    let never = LoadOptions::default().direct(DirectIo::Never);
    drop(checkpoint.load(&never).unwrap());
    drop(checkpoint.load(&never.selection(Selection::all().select("small"))).unwrap());
    assert_eq!(descriptors(), 1);
}

#[test]
fn a_file_that_is_replaced_while_it_is_closed_is_an_error() {
    if with_limit("a_file_that_is_replaced_while_it_is_closed_is_an_error", "-n 128") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (paths, _) = shards(directory.path());
    let checkpoint = Checkpoint::open(&paths).unwrap();
    let last = paths.last().unwrap();
    let other = directory.path().join("other");
    fs::copy(last, &other).unwrap();
    fs::rename(&other, last).unwrap();
    for route in [Route::Auto, Route::Threads, Route::Mapped] {
        let error = checkpoint.load(&LoadOptions::default().route(route)).unwrap_err();
        assert!(
            matches!(&error, Error::Changed { path, change, .. } if path == last && change.contains("another file")),
            "{route}: {error:?}"
        );
    }
    fs::remove_file(last).unwrap();
    let error = checkpoint.load(&LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("299.safetensors"), "{error}");
}

#[test]
fn the_limit_is_raised_to_what_it_may_be() {
    if with_limit("the_limit_is_raised_to_what_it_may_be", "-S -n 64") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (paths, expected) = shards(directory.path());
    assert_eq!(limits().0, 64);
    assert_are(&Checkpoint::open(&paths).unwrap().load(&LoadOptions::default()).unwrap(), &expected);
    let (soft, hard) = limits();
    assert_eq!(soft, hard);
}

/// Children of the program have the same limit.
#[test]
fn a_limit_that_is_enough_stays() {
    // For the reader's reads, as nothing says how many files these are of.
    if limits().1 < 1024 || with_limit("a_limit_that_is_enough_stays", "-S -n 1024") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, expected) = shard(directory.path(), 0, 2 << 20);
    let checkpoint = Checkpoint::open(&[path]).unwrap();
    assert_are(&checkpoint.load(&LoadOptions::default()).unwrap(), &[expected]);
    drop(Reader::new(&ReaderOptions::default()).unwrap());
    assert_eq!(limits().0, 1024);
}

#[test]
fn reads_of_files_that_stay_open_need_no_higher_limit() {
    if with_limit("reads_of_files_that_stay_open_need_no_higher_limit", "-S -n 256") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, expected) = shard(directory.path(), 0, 8 << 20);
    let checkpoint = Checkpoint::open(&[path]).unwrap();
    for options in [LoadOptions::default(), LoadOptions::default().threads(96)] {
        let loaded = checkpoint.load(&options).unwrap();
        assert_are(&loaded, std::slice::from_ref(&expected));
        assert!(!loaded.report().to_string().contains("ulimit"), "{}", loaded.report());
    }
    assert_eq!(limits().0, 256);
}

/// The program has the rest.
#[test]
fn the_limit_is_raised_when_it_is_met() {
    if limits().1 <= 1024 || with_limit("the_limit_is_raised_when_it_is_met", "-S -n 1024") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, _) = shard(directory.path(), 0, 5000);
    let saved = directory.path().join("saved.safetensors");
    let go_on = |_| std::ops::ControlFlow::Continue(());
    let save = || hoistway::save::save(&saved, &[], None, &SaveOptions::default(), go_on).map(drop);
    let works: [&dyn Fn() -> Result<(), Error>; 3] = [
        &|| Checkpoint::open(&[&path]).map(drop),
        &|| Checkpoint::open(&[directory.path()]).map(drop),
        &save,
    ];
    for work in works {
        let (_, hard) = limits();
        let low = rustix::process::Rlimit { current: Some(1024), maximum: Some(hard) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, low).unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
        let done = work();
        drop(taken);
        done.unwrap();
        assert_eq!(limits().0, hard);
    }
}

#[test]
fn an_error_for_want_of_descriptors_says_what_helps() {
    if with_limit("an_error_for_want_of_descriptors_says_what_helps", "-n 64") {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (paths, _) = shards(directory.path());
    let taken: Vec<_> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
    let error = Checkpoint::open(&paths).unwrap_err();
    drop(taken);
    assert!(error.to_string().contains("raise ulimit -n"), "{error}");
}
