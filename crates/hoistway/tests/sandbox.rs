//! Where the system forbids things: no io_uring (as in containers), too little memory (as in pods), other people's
//! files. Each case runs in a child process of its own, since such limits cannot be taken back.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout
)]

mod common;

use common::{
    assert_is_file, can_read,
    child::{forbid, in_child, is_case},
    drop_from_cache, make_cold, make_warm, mixed_model,
    on_device::{Played, TOY, chunky},
    reading::{Kind, Place, TestFile, Warm, assert_all_hold, range, submit, until},
    tensor, write_model,
};
use hoistway::{
    Checkpoint, DirectIo, Dtype, Error, LoadOptions, NumaPlacement, Order, Route, StreamOptions,
    read::{Priority, Reader, ReaderOptions},
    route::{Access, Unavailable, fault::FaultScript},
};
use requirements::{Requirement, skip};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
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
    let loaded = hoistway::load(&[&path], &LoadOptions::default()).unwrap();
    assert_is_file(&loaded, &file);
    let report = loaded.report();
    assert!(
        report
            .carriers
            .iter()
            .any(|carrier| (carrier.route, carrier.access) == (Route::Threads, Access::Direct)),
        "{report}"
    );
    let refusal =
        report.refused.iter().find(|refusal| refusal.what == "io_uring").expect("the refusal is reported");
    assert!(refusal.why.reason.contains("seccomp") && !refusal.why.fix.is_empty(), "{refusal:?}");

    let named = LoadOptions::default().route(Route::IoUring);
    match hoistway::load(&[&path], &named).unwrap_err() {
        // No file is to blame.
        Error::RouteUnavailable { route: Route::IoUring, path: None, why } => {
            assert!(why.reason.contains("seccomp"))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_filter_that_refuses_any_call_of_a_ring_is_reported() {
    // Filters add up and cannot be taken back: each in a child of its own.
    let cases = [
        ("io_uring_enter_is_refused", libc::SYS_io_uring_enter, "io_uring_enter"),
        ("io_uring_register_is_refused", libc::SYS_io_uring_register, "io_uring_register"),
        ("fstatfs_is_refused", libc::SYS_fstatfs, "fstatfs"),
    ];
    for (name, call, text) in cases {
        for errno in [libc::EPERM, libc::EACCES, libc::ENOSYS] {
            let case = format!("{name}_{errno}");
            if is_case("a_filter_that_refuses_any_call_of_a_ring_is_reported", &case) {
                loads_without_rings(call, errno, text);
            }
        }
    }
}

/// Route `auto` falls back and says why; the named route fails with the same reason.
fn loads_without_rings(call: i64, errno: i32, text: &str) {
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    forbid(&[call], errno);
    make_cold(&path);
    let loaded = hoistway::load(&[&path], &LoadOptions::default()).unwrap();
    assert_is_file(&loaded, &file);
    let report = loaded.report();
    let refusal =
        report.refused.iter().find(|refusal| refusal.what == "io_uring").expect("the refusal is reported");
    let says_so = |why: &Unavailable| {
        assert!(why.reason.contains(text) && why.fix.contains(text), "{why:?}");
        assert!(why.fix.contains("seccomp"), "{why:?}");
    };
    says_so(&refusal.why);
    let named = LoadOptions::default().route(Route::IoUring);
    match hoistway::load(&[&path], &named).unwrap_err() {
        Error::RouteUnavailable { route: Route::IoUring, why, .. } => says_so(&why),
        other => panic!("{other:?}"),
    }
}

/// What the kernel may still write to is a slot in host memory. What the load has on the device is not kept with it.
#[test]
fn a_load_whose_ring_is_lost_gives_the_device_its_memory_back() {
    if !in_child("a_load_whose_ring_is_lost_gives_the_device_its_memory_back") {
        return;
    }
    let directory = disk();
    if !can_read(directory.path(), Route::IoUring, DirectIo::Never) {
        return;
    }
    let (path, _) = chunky(directory.path());
    make_cold(&path);
    // Called by the thread of the ring, which then cannot wait for the reads that it has.
    let script = FaultScript::new(|number, _| {
        if number == 2 {
            forbid(&[libc::SYS_io_uring_enter], libc::EPERM);
        }
        None
    });
    let options = LoadOptions::default().route(Route::IoUring).direct(DirectIo::Never).device(TOY);
    match hoistway::load(&[&path], &options.chunk_bytes(64 << 10).faults(script)).unwrap_err() {
        Error::Io { path: named, source, .. } => {
            assert_eq!((named, source.raw_os_error()), (path, Some(libc::EPERM)));
        }
        other => panic!("{other:?}"),
    }
    assert!(Played::Toy.pinned_bytes() > 0, "the kernel may still write to a slot");
    until("the device has its memory back", || Played::Toy.device_bytes() == 0);
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
        let error = Reader::new(&ReaderOptions::default().route(Route::IoUring)).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("route io_uring cannot be used: ") && text.contains("seccomp"), "{text}");
        // Threads that ended shortly before may have been counted.
        until("its thread is gone", || fs::read_dir("/proc/self/task").unwrap().count() <= threads);
        for route in [Route::Auto, Route::Threads] {
            make_cold(&file.path);
            let reader = Reader::new(&ReaderOptions::default().route(route)).unwrap();
            let mut places =
                [Kind::Memory, Kind::Host(1), Kind::Sink].map(|kind| Place::new(kind, range(9, 1 << 19)));
            let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
            batch.wait().unwrap();
            assert_all_hold(&file, &places, &batch);
        }
    }
}

#[test]
fn a_reader_that_gets_no_thread_blames_no_file() {
    if !in_child("a_reader_that_gets_no_thread_blames_no_file") {
        return;
    }
    forbid(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN);
    let error = Reader::new(&ReaderOptions::default()).unwrap_err();
    assert!(matches!(error, Error::System { operation: "starting a thread", .. }), "{error:?}");
    assert_eq!(error.errno(), Some(libc::EAGAIN));
    assert!(error.to_string().starts_with("starting a thread failed: "), "{error}");
}

#[test]
fn files_are_opened_where_no_limit_is_told() {
    if !in_child("files_are_opened_where_no_limit_is_told") {
        return;
    }
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    forbid(&[libc::SYS_prlimit64], libc::EPERM);
    assert_is_file(&hoistway::load(&[&path], &LoadOptions::default()).unwrap(), &file);
    let checks = hoistway::doctor::examine(&[&path]);
    for name in ["locked memory", "open files"] {
        let check = checks.iter().find(|check| check.name == name).unwrap();
        assert!(check.finding.contains("does not tell") && check.fix.contains("prlimit64"), "{check:?}");
    }
}

/// Those that this process has made by calls, not by faults.
fn bytes_of_reads() -> u64 {
    let counts = fs::read_to_string("/proc/self/io").unwrap();
    counts.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// As Linux before 5.14 answers.
#[test]
fn mapped_files_are_read_in_where_the_system_does_not_fault_ahead() {
    if !in_child("mapped_files_are_read_in_where_the_system_does_not_fault_ahead") {
        return;
    }
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let file = write_model(&path, &[tensor("a", Dtype::U8, &[3 << 20])], 0, 1);
    forbid(&[libc::SYS_madvise], libc::EINVAL);
    let options = LoadOptions::default().route(Route::Mapped).populate(true);
    let before = bytes_of_reads();
    let loaded = hoistway::load(&[&path], &options).unwrap();
    assert!(bytes_of_reads() - before >= 3 << 20);
    assert_is_file(&loaded, &file);
    let notes = &loaded.report().notes;
    assert!(notes.iter().any(|note| note.contains("Linux 5.14")), "{notes:?}");
}

#[test]
fn memory_is_on_any_node_where_none_may_be_named() {
    if !in_child("memory_is_on_any_node_where_none_may_be_named") {
        return;
    }
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    let nodes = hoistway_io::sys::numa::nodes();
    let Some(node) = nodes.first().map(|node| node.id) else {
        eprintln!("skipped: the system tells of no NUMA node");
        return;
    };
    forbid(&[libc::SYS_mbind], libc::EPERM);
    let loaded = hoistway::load(&[&path], &LoadOptions::default().numa(NumaPlacement::Node(node))).unwrap();
    assert_is_file(&loaded, &file);
    let notes = &loaded.report().notes;
    assert!(
        notes.iter().any(|note| note.contains("any node") && note.contains("--cap-add SYS_NICE")),
        "{notes:?}"
    );
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
        let loaded = hoistway::load(&[&path], &LoadOptions::default()).unwrap();
        assert_is_file(&loaded, &file);
        let report = loaded.report();
        let moved: u64 = report
            .carriers
            .iter()
            .filter(|carrier| carrier.route == route)
            .map(|carrier| carrier.tensor_bytes)
            .sum();
        moved as f64 / report.tensor_bytes as f64
    };
    let warm = Warm::make(&path);
    assert_eq!(share(Route::Cached), 1.0);
    drop(warm);
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
    match hoistway::load(&[&path], &LoadOptions::default()).unwrap_err() {
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

/// Four processes load into one cgroup that has room for two of them, and keep what they loaded.
#[test]
fn loads_that_a_cgroup_has_no_room_for_fail_rather_than_kill() {
    const TEST: &str = "loads_that_a_cgroup_has_no_room_for_fail_rather_than_kill";
    if let Some(group) = std::env::var_os(GROUP) {
        return load_into(Path::new(&group));
    }
    let Some(group) = make_cgroup(256 << 20) else {
        skip(Requirement::Cgroup, "no control group with a limit on memory can be made");
        return;
    };
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    write_model(&path, &[tensor("a", Dtype::U8, &[87 << 20])], 0, 1);
    for is_cold in [true, false] {
        if is_cold {
            make_cold(&path)
        } else {
            make_warm(&path)
        }
        let mut children: Vec<_> = (0..4)
            .map(|_| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", TEST, "--nocapture"])
                    .env(GROUP, &group)
                    .env(MODEL, &path)
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let mut said: Vec<_> =
            children.iter_mut().map(|child| BufReader::new(child.stdout.take().unwrap()).lines()).collect();
        let mut answer = |child: usize| {
            let answer = said[child]
                .by_ref()
                .find_map(|line| line.unwrap().strip_prefix("child: ").map(str::to_owned));
            answer.unwrap_or_else(|| "killed".into())
        };
        assert!((0..4).all(|child| answer(child) == "ready"));
        let say = |children: &mut Vec<Child>| {
            for child in children {
                let _ = child.stdin.as_mut().unwrap().write_all(b"\n");
            }
        };
        say(&mut children);
        let answers: Vec<_> = (0..4).map(answer).collect();
        say(&mut children);
        let ended = children.iter_mut().all(|child| child.wait().unwrap().success());
        let loaded = answers.iter().filter(|answer| *answer == "loaded").count();
        assert!(ended && (1..=2).contains(&loaded), "cold: {is_cold}, {answers:?}");
        assert!(
            answers.iter().all(|answer| answer == "loaded" || answer.contains("cgroup limit")),
            "{answers:?}"
        );
    }
    remove_cgroup(&group);
}

/// Names the cgroup that a child is to enter.
const GROUP: &str = "HOISTWAY_TEST_GROUP";
/// Names the model that it is to load.
const MODEL: &str = "HOISTWAY_TEST_MODEL";

/// Loads, and keeps the tensors as long as the parent wants.
fn load_into(group: &Path) {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let checkpoint = Checkpoint::open(&[std::env::var_os(MODEL).unwrap()]).unwrap();
    let wait = || std::io::stdin().read_line(&mut String::new()).unwrap();
    println!("\nchild: ready");
    wait();
    let loaded = checkpoint.load(&LoadOptions::default());
    match &loaded {
        Ok(_) => println!("\nchild: loaded"),
        Err(error @ Error::MemoryBudget { .. }) => println!("\nchild: {error}"),
        Err(error) => panic!("{error}"),
    }
    wait();
}

#[test]
fn without_threads_a_load_goes_on_with_the_callers() {
    if !in_child("without_threads_a_load_goes_on_with_the_callers") {
        return;
    }
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let parts: Vec<_> = (0..12).map(|n| tensor(&format!("t{n}"), Dtype::U8, &[3 << 20])).collect();
    let file = write_model(&path, &parts, 0, 1);
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    forbid(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN);
    for route in [Route::Auto, Route::Threads, Route::IoUring, Route::Auto] {
        make_cold(&path);
        let loaded = checkpoint.load(&LoadOptions::default().route(route)).unwrap();
        assert_is_file(&loaded, &file);
        let refused = &loaded.report().refused;
        let refusal =
            refused.iter().find(|refusal| refusal.what.contains("threads")).expect("it is reported");
        assert!(
            refusal.why.reason.contains("no thread") && refusal.why.fix.contains("ulimit -u"),
            "{refusal:?}"
        );
    }
    let stream = StreamOptions::default().order(Order::File).max_in_flight_bytes(7 << 20);
    let mut loading = checkpoint.stream(&LoadOptions::default(), &stream).unwrap();
    let names: Vec<_> = loading.by_ref().map(|tensor| tensor.unwrap().name().to_owned()).collect();
    assert_eq!(names, (0..12).map(|n| format!("t{n}")).collect::<Vec<_>>());
    assert_eq!(loading.report().tensor_bytes, 36 << 20);
}

#[test]
fn a_stack_of_64_kib_is_enough() {
    const STACK: (&str, &str) = ("RUST_MIN_STACK", "65536");
    if std::env::var_os(STACK.0).is_none() {
        // Threads of the test harness take it too, and all that do not set another.
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_stack_of_64_kib_is_enough"])
            .env(STACK.0, STACK.1)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        return;
    }
    let directory = disk();
    let small = mixed_model(directory.path());
    let large = directory.path().join("large.safetensors");
    let file = write_model(&large, &[tensor("a", Dtype::U8, &[24 << 20])], 0, 1);
    for (path, file) in [small, (large, file)] {
        for route in [Route::Auto, Route::Threads, Route::IoUring] {
            make_cold(&path);
            load_and_verify(&path, &file, route);
        }
    }
}

/// A function of its own, so that what else the test has on its stack is not there.
fn load_and_verify(path: &Path, file: &[u8], route: Route) {
    let checkpoint = Checkpoint::open(&[path]).unwrap();
    let mut loaded = checkpoint.load(&LoadOptions::default().route(route)).unwrap();
    assert_is_file(&loaded, file);
    checkpoint.verify(&mut loaded, None).unwrap();
}

#[test]
fn a_load_takes_as_many_threads_as_it_gets() {
    if !in_child("a_load_takes_as_many_threads_as_it_gets") {
        return;
    }
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let file = write_model(&path, &[tensor("a", Dtype::U8, &[32 << 20])], 0, 1);
    let here = threads_of(|process| process == std::process::id());
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    // The limited user may have no right to look into the folders above.
    let opened = fs::File::open(&path).unwrap();
    become_limited_user();
    let mut told = 0;
    for more in 1..=4 {
        drop_from_cache(&opened);
        limit_threads(here + more);
        let loaded = checkpoint.load(&LoadOptions::default()).unwrap();
        assert_is_file(&loaded, &file);
        told += usize::from(loaded.report().refused.iter().any(|refusal| refusal.what.contains("threads")));
    }
    // Threads that end early make room for others, not for all.
    assert!(told > 0, "no report tells that threads were lacking");
}

/// Gives up the rights of root, who may have as many threads as there is room for.
fn become_limited_user() {
    // A user of its own, who runs nothing else.
    let user = 1_000_000 + std::process::id();
    if rustix::process::geteuid().is_root() {
        // SAFETY: changes the user of all threads of this process, and touches no memory.
        assert_eq!(unsafe { libc::setresuid(user, user, user) }, 0);
    }
}

/// Lets this process have so many threads, whatever else its user runs. It counts from what the process began with: threads that
/// are about to end would leave room for others.
fn limit_threads(threads: u64) {
    let beside = threads_of(|process| process != std::process::id());
    let limit = Rlimit { current: Some(beside + threads), ..getrlimit(Resource::Nproc) };
    setrlimit(Resource::Nproc, limit).unwrap();
}

/// How many threads some processes of this process's user have.
fn threads_of(process: impl Fn(u32) -> bool) -> u64 {
    let user = rustix::process::geteuid().as_raw().to_string();
    let threads_of = |status: String| {
        let number_of = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.split_whitespace().next().map(str::to_owned)
        };
        if number_of("Uid:")? == user { number_of("Threads:")?.parse::<u64>().ok() } else { None }
    };
    let statuses = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let folder = entry.ok()?.path();
        folder.file_name()?.to_str()?.parse().ok().filter(|id| process(*id))?;
        fs::read_to_string(folder.join("status")).ok()
    });
    statuses.filter_map(threads_of).sum()
}

/// Puts this process into a new cgroup with a limit on memory, if that is possible.
fn enter_cgroup(limit: u64) -> Option<PathBuf> {
    let group = make_cgroup(limit)?;
    fs::write(group.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    Some(group)
}

/// Makes a cgroup with a limit on memory, if that is possible.
fn make_cgroup(limit: u64) -> Option<PathBuf> {
    let name = format!("hoistway-test-{}", std::process::id());
    for (root, file) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
    {
        let group = PathBuf::from(root).join(&name);
        if fs::create_dir(&group).is_err() {
            continue;
        }
        if fs::write(group.join(file), limit.to_string()).is_ok() {
            return Some(group);
        }
        let _ = fs::remove_dir(&group);
    }
    None
}

fn leave_cgroup(group: &Path) {
    let root = group.parent().unwrap().join("cgroup.procs");
    fs::write(root, std::process::id().to_string()).unwrap();
    remove_cgroup(group);
}

/// Removes a cgroup once the kernel has taken the last process out of it, which can be after that process was waited for.
fn remove_cgroup(group: &Path) {
    until("the cgroup is empty", || fs::remove_dir(group).is_ok());
}
