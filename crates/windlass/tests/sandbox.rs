//! Where the system forbids things: no io_uring (as in containers), too little memory (as in pods), other people's
//! files. Each case runs in a child process of its own, since such limits cannot be taken back.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    assert_is_file,
    child::{forbid, in_child},
    make_cold, make_warm, mixed_model,
    reading::{Kind, Place, TestFile, assert_all_hold, range, submit, until},
    tensor, write_model,
};
use requirements::{Requirement, skip};
use std::{fs, path::PathBuf};
use windlass::{
    Dtype, Error, LoadOptions, Route,
    read::{Priority, Reader, ReaderOptions},
    route::Access,
};

fn disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn without_io_uring_threads_serve_and_the_report_says_why() {
    if !in_child("without_io_uring_threads_serve_and_the_report_says_why") {
        return;
    }
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    forbid(&[libc::SYS_io_uring_setup], libc::EPERM);
    make_cold(&path);
    let loaded = windlass::load(&[&path], &LoadOptions::default()).unwrap();
    assert_is_file(&loaded, &file);
    let report = loaded.report();
    assert!(
        report.carriers.iter().any(|own| (own.route, own.access) == (Route::Threads, Access::Direct)),
        "{report}"
    );
    let refusal = report.refused.iter().find(|own| own.what == "io_uring").expect("the refusal is reported");
    assert!(refusal.why.reason.contains("seccomp") && !refusal.why.fix.is_empty(), "{refusal:?}");

    let named = LoadOptions { route: Route::IoUring, ..LoadOptions::default() };
    match windlass::load(&[&path], &named).unwrap_err() {
        Error::RouteUnavailable { route: Route::IoUring, why, .. } => assert!(why.reason.contains("seccomp")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_io_uring_readers_of_other_routes_serve() {
    if !in_child("without_io_uring_readers_of_other_routes_serve") {
        return;
    }
    let file = TestFile::new(1 << 20);
    for errno in [libc::EPERM, libc::ENOSYS] {
        forbid(&[libc::SYS_io_uring_setup], errno);
        let threads = fs::read_dir("/proc/self/task").unwrap().count();
        let error = Reader::new(&ReaderOptions { route: Route::IoUring, ..Default::default() }).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("route io_uring cannot serve any file: ") && text.contains("seccomp"),
            "{text}"
        );
        until("its thread is gone", || fs::read_dir("/proc/self/task").unwrap().count() == threads);
        for route in [Route::Auto, Route::Threads] {
            make_cold(&file.path);
            let reader = Reader::new(&ReaderOptions { route, ..Default::default() }).unwrap();
            let mut places =
                [Kind::Memory, Kind::Host(1), Kind::Sink].map(|kind| Place::new(kind, range(9, 1 << 19)));
            let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
            batch.wait().unwrap();
            assert_all_hold(&file, &places, &batch);
        }
    }
}

#[test]
fn without_cachestat_the_cache_is_sampled() {
    if !in_child("without_cachestat_the_cache_is_sampled") {
        return;
    }
    const SYS_CACHESTAT: i64 = 451;
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let file = write_model(&path, &[tensor("a", Dtype::U8, &[32 << 20])], 0, 1);
    // What callers get for files that they neither own nor may write.
    forbid(&[SYS_CACHESTAT], libc::EPERM);
    let share = |route: Route| {
        let loaded = windlass::load(&[&path], &LoadOptions::default()).unwrap();
        assert_is_file(&loaded, &file);
        let report = loaded.report();
        let moved: u64 =
            report.carriers.iter().filter(|own| own.route == route).map(|own| own.tensor_bytes).sum();
        moved as f64 / report.tensor_bytes as f64
    };
    make_warm(&path);
    assert_eq!(share(Route::Cached), 1.0);
    make_cold(&path);
    // Each probe of a cold range starts to read a page; that must not make the next load believe it is warm.
    for _ in 0..5 {
        assert!(share(Route::IoUring) > 0.8);
    }
}

#[test]
fn a_load_that_its_cgroup_would_kill_is_refused() {
    if !in_child("a_load_that_its_cgroup_would_kill_is_refused") {
        return;
    }
    const LIMIT: u64 = 96 << 20;
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    write_model(&path, &[tensor("a", Dtype::U8, &[200 << 20])], 0, 1);
    let Some(group) = enter_cgroup(LIMIT) else {
        skip(Requirement::Cgroup, "no control group with a limit on memory can be made and entered");
        return;
    };
    make_cold(&path);
    match windlass::load(&[&path], &LoadOptions::default()).unwrap_err() {
        Error::MemoryBudget { needed, available, limit_name, .. } => {
            assert!(needed > 200 << 20 && available <= LIMIT);
            assert!(
                limit_name.contains("cgroup") && limit_name.contains(group.to_str().unwrap()),
                "{limit_name}"
            );
        }
        other => panic!("{other:?}"),
    }
    leave_cgroup(&group);
}

/// Puts this process into a new cgroup with a limit on memory, if that is possible.
fn enter_cgroup(limit: u64) -> Option<PathBuf> {
    let name = format!("windlass-test-{}", std::process::id());
    for (root, file) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
    {
        let group = PathBuf::from(root).join(&name);
        if fs::create_dir(&group).is_err() {
            continue;
        }
        let entered = fs::write(group.join(file), limit.to_string())
            .and_then(|()| fs::write(group.join("cgroup.procs"), std::process::id().to_string()));
        if entered.is_ok() {
            return Some(group);
        }
        let _ = fs::remove_dir(&group);
    }
    None
}

fn leave_cgroup(group: &std::path::Path) {
    let root = group.parent().unwrap().join("cgroup.procs");
    fs::write(root, std::process::id().to_string()).unwrap();
    fs::remove_dir(group).unwrap();
}
