//! Checkpoints in an object store and on a web server: the right bytes or an error that says why, by route `http`.
#![cfg(feature = "objects")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    assert_is_file, assert_is_gguf,
    child::{case, forbid, in_child, run_again},
    devices, mixed_gguf, mixed_model,
    reading::{LONG, until},
    tensor, write_model,
};
use hoistway::{
    Cancel, Catalog, Checkpoint, Dtype, Error, LoadOptions, Loaded, Order, Route, StreamOptions,
    cache::NodeCache,
    catalog::{OpenOptions, SourceName, index::IndexError},
    objects::StoreOptions,
    plan::{Layout, Selection, TensorSlice},
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
};
use objectd::{Dialect, Fault, Faults, Server, WrongRegion};
use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const CANARY: &str = "canary";
/// How long a server stalls that does not answer any more.
const ENDLESS: Duration = Duration::from_secs(600);

fn options(server: &Server) -> OpenOptions {
    options_for(&server.url())
}

fn options_for(endpoint: &str) -> OpenOptions {
    let mut store = StoreOptions::default();
    for (name, value) in [("endpoint", endpoint), ("access_key_id", "key"), ("secret_access_key", CANARY)] {
        store.set(name, value).unwrap();
    }
    OpenOptions::default().store(store)
}

/// A server with a file, and its URLs.
fn serving(path: &Path) -> (Server, [String; 2]) {
    let server = Server::start().unwrap();
    let name = path.file_name().unwrap().to_str().unwrap();
    server.put(&format!("models/llama/{name}"), &fs::read(path).unwrap());
    let urls = [
        format!("s3://models/llama/{name}"),
        format!("{}/models/llama/{name}?X-Amz-Signature={CANARY}", server.url()),
    ];
    (server, urls)
}

fn open(server: &Server, url: &str) -> hoistway::Result<Checkpoint> {
    Checkpoint::open_with(&[url], &options(server))
}

/// All bytes came by one route.
fn assert_carried_by(loaded: &Loaded, route: Route) {
    let report = loaded.report();
    let bytes: u64 = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
    assert!(
        report.carriers.iter().all(|carrier| carrier.route == route) && bytes == report.tensor_bytes,
        "{report}"
    );
}

fn assert_shows_no_secret(shown: &str) {
    assert!(!shown.contains(CANARY), "{shown}");
}

/// Large enough to be read by several requests on threads of the load's own.
fn large_model(directory: &Path) -> (PathBuf, Vec<u8>) {
    let path = directory.join("model.safetensors");
    let tensors = [
        tensor("a", Dtype::U8, &[5 << 20]),
        tensor("b", Dtype::F16, &[3, 1_000_003]),
        tensor("c", Dtype::U8, &[20 << 20]),
    ];
    let file = write_model(&path, &tensors, 0, 5);
    (path, file)
}

#[test]
fn every_layout_and_target_gets_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = mixed_model(directory.path());
    let (gguf_path, tensors) = mixed_gguf(directory.path());
    let (server, urls) = serving(&path);
    server.put("models/llama/model.gguf", &fs::read(&gguf_path).unwrap());
    for url in &urls {
        let checkpoint = open(&server, url).unwrap();
        for device in devices() {
            for route in [Route::Auto, Route::Http, Route::Threads] {
                for layout in [Layout::File, Layout::Packed, Layout::Tensor] {
                    for chunk_bytes in [64 << 10, 4 << 20] {
                        let options = LoadOptions::default()
                            .route(route)
                            .device(device)
                            .layout(layout)
                            .chunk_bytes(chunk_bytes);
                        let loaded = checkpoint.load(&options).unwrap();
                        assert_is_file(&loaded, &file);
                        assert_carried_by(&loaded, if route == Route::Threads { route } else { Route::Http });
                        assert_shows_no_secret(&format!("{} {:?}", loaded.report(), loaded.report()));
                    }
                }
            }
            let stream = StreamOptions::default().order(Order::File).max_in_flight_bytes(8 << 20);
            let streamed = checkpoint.stream(&LoadOptions::default().device(device), &stream).unwrap();
            assert_is_file(&streamed.wait().unwrap(), &file);
        }
    }
    let gguf = open(&server, "s3://models/llama/model.gguf").unwrap();
    for device in devices() {
        assert_is_gguf(&gguf.load(&LoadOptions::default().device(device)).unwrap(), &tensors);
    }
}

#[test]
fn the_first_answer_brings_the_header_and_connections_stay_open() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = large_model(directory.path());
    let (server, [url, _]) = serving(&path);
    // So long that requests overlap on a busy machine; from the start, so that the client repeats none as too slow.
    server.fail(Faults { latency: Duration::from_secs(1), ..Faults::default() });
    let checkpoint = open(&server, &url).unwrap();
    // One more asks for the checksum, beside the first or later.
    let gets = || {
        let mut requests = server.take_requests();
        requests.retain(|request| request.method == "GET");
        requests
    };
    assert_eq!(gets().len(), 1);
    let options = LoadOptions::default();
    assert_is_file(&checkpoint.load(&options).unwrap(), &file);
    let requests = gets();
    let bytes: usize =
        requests.iter().filter_map(|request| request.range).map(|(first, last)| last + 1 - first).sum();
    assert!(requests.iter().all(|request| request.if_match.is_some()));
    // Requests end at whole blocks.
    let most = file.len() + requests.len() * 4096;
    // One for each 4 MiB of the file and for each of the tensors but the first, and one that asks for the checksum.
    let most_requests = file.len().div_ceil(4 << 20) + 2 + 1;
    assert!(
        bytes <= most && requests.len() <= most_requests,
        "{bytes} bytes for {}: {requests:?}",
        file.len()
    );
    let connections = server.connections();
    assert!(server.most_in_flight() > 1, "requests did not overlap");
    server.fail(Faults::default());
    // Another checkpoint, the same connections.
    assert_is_file(&open(&server, &url).unwrap().load(&options).unwrap(), &file);
    assert!(server.connections() <= connections + 3, "{} after {connections}", server.connections());
}

#[test]
fn a_report_says_which_region_a_server_said() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = large_model(directory.path());
    let (server, [url, _]) = serving(&path);
    server.lie_in("eu-west-1", WrongRegion::Redirect);
    let loaded = open(&server, &url).unwrap().load(&LoadOptions::default()).unwrap();
    assert_is_file(&loaded, &file);
    let told = format!("objects came from {}, whose bucket is in region eu-west-1", server.url());
    assert!(loaded.report().to_string().contains(&told), "{}", loaded.report());
}

#[test]
fn a_load_survives_what_may_pass() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = large_model(directory.path());
    let (server, [url, _]) = serving(&path);
    let checkpoint = open(&server, &url).unwrap();
    for fault in [
        Fault::Status(503),
        Fault::Status(429),
        Fault::Status(500),
        Fault::Reset,
        Fault::Truncate,
        Fault::Garbage,
        Fault::Short,
        Fault::Chunked,
        Fault::UntilClose,
        Fault::Stall(ENDLESS),
        Fault::StallInside(ENDLESS),
    ] {
        for device in devices() {
            server.fail(Faults::every(6, fault));
            let begun = Instant::now();
            let loaded = checkpoint.load(&LoadOptions::default().device(device).chunk_bytes(1 << 20));
            let loaded = loaded.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
            assert_is_file(&loaded, &file);
            assert_carried_by(&loaded, Route::Http);
            assert!(begun.elapsed() < ENDLESS / 4, "{fault:?}: {:?}", begun.elapsed());
        }
    }
}

#[test]
fn a_load_of_what_is_wrong_fails_and_leaves_nothing_behind() {
    // Of other tests there are threads.
    if !in_child("a_load_of_what_is_wrong_fails_and_leaves_nothing_behind") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = large_model(directory.path());
    let (server, urls) = serving(&path);
    for url in &urls {
        for fault in [
            Fault::Shift,
            Fault::LyingRange,
            Fault::Whole,
            Fault::LongBody,
            Fault::ShortBody,
            Fault::Encoded,
            Fault::Redirect,
            Fault::Status(403),
            Fault::Swap,
            Fault::OtherETag,
        ] {
            server.fail(Faults::default());
            server.put("models/llama/model.safetensors", &file);
            let checkpoint = open(&server, url).unwrap();
            for ignores_preconditions in [false, true] {
                server.fail(Faults { ignores_preconditions, ..Faults::every(2, fault) });
                let begun = Instant::now();
                let error = checkpoint.load(&LoadOptions::default()).unwrap_err();
                assert!(begun.elapsed() < LONG, "{fault:?}: {:?}", begun.elapsed());
                let is_told = match &error {
                    Error::Changed { tensor, .. } => {
                        matches!(fault, Fault::Swap | Fault::OtherETag) && tensor.is_some()
                    }
                    Error::Io { path, tensor, range, .. } => {
                        let is_named = path.to_str().is_some_and(|path| url.starts_with(path));
                        is_named && tensor.is_some() && range.is_some()
                    }
                    _ => false,
                };
                assert!(is_told, "{fault:?}: {error:?}");
                assert_shows_no_secret(&format!("{error} {error:?}"));
            }
        }
    }
    // One that was joined may be listed for a moment more.
    #[cfg(target_os = "linux")]
    until("its threads are gone", || http_threads() == 0);
}

/// Threads of this process that make requests.
#[cfg(target_os = "linux")]
fn http_threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
    let is_of_loads = |name: &String| {
        ["hoistway-http", "hoistway-names", "hoistway-creden"].iter().any(|prefix| name.starts_with(prefix))
    };
    names.filter(is_of_loads).count()
}

/// Descriptors of this process that are no connections: those are kept for the next load.
#[cfg(target_os = "linux")]
fn file_descriptors() -> usize {
    let entries = fs::read_dir("/proc/self/fd").unwrap();
    let targets = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    targets.filter(|target| !target.to_string_lossy().starts_with("socket:")).count()
}

/// A server for each kind of stores, all with one file.
struct Stores {
    servers: Vec<Server>,
    /// The file's URL by each scheme, and the endpoint there.
    urls: Vec<(String, String)>,
}

impl Stores {
    fn serving(file: &[u8]) -> Self {
        let servers: Vec<_> = (0..4).map(|_| Server::start().unwrap()).collect();
        let [plain, google, azure, hub] = &servers[..] else { unreachable!() };
        google.speak(Dialect::Google);
        azure.speak(Dialect::Azure);
        plain.put("models/a.safetensors", file);
        google.put("models/a.safetensors", file);
        azure.put("account/models/a.safetensors", file);
        hub.put_model("org/model", COMMIT);
        hub.put_file("org/model", "a.safetensors", file, false);
        let urls = vec![
            ("s3://models/a.safetensors".to_owned(), plain.url()),
            (format!("{}/models/a.safetensors", plain.url()), plain.url()),
            ("gs://models/a.safetensors".into(), google.url()),
            ("az://models/a.safetensors".into(), format!("{}/account", azure.url())),
            (format!("hf://org/model@{COMMIT}/a.safetensors"), hub.url()),
        ];
        Self { servers, urls }
    }

    /// The URL by a scheme, and how it is opened.
    fn named(&self, number: usize) -> (&str, OpenOptions) {
        let (url, endpoint) = &self.urls[number % self.urls.len()];
        let mut store = StoreOptions::default();
        for (name, value) in [("endpoint", &**endpoint), ("anonymous", "true")] {
            store.set(name, value).unwrap();
        }
        (url, OpenOptions::default().store(store))
    }

    fn fail(&self, faults: Faults) {
        self.servers.iter().for_each(|server| server.fail(faults));
    }
}

#[test]
fn every_store_may_send_parts_and_holds_up_no_load_that_is_cancelled() {
    let directory = tempfile::tempdir().unwrap();
    let (_, file) = large_model(directory.path());
    let stores = Stores::serving(&file);
    for number in 0..stores.urls.len() {
        let (url, options) = stores.named(number);
        for fault in [Fault::Short, Fault::Chunked, Fault::UntilClose] {
            stores.fail(Faults::every(2, fault));
            let loaded = Checkpoint::open_with(&[url], &options).unwrap().load(&LoadOptions::default());
            let loaded = loaded.unwrap_or_else(|error| panic!("{url}, {fault:?}: {error}"));
            assert_is_file(&loaded, &file);
            assert_carried_by(&loaded, Route::Http);
        }
        stores.fail(Faults::default());
        let checkpoint = Checkpoint::open_with(&[url], &options).unwrap();
        for fault in [Fault::Stall(ENDLESS), Fault::Trickle] {
            stores.fail(Faults::always(fault));
            stores.servers.iter().for_each(|server| drop(server.take_requests()));
            let cancel = Cancel::default();
            let load = LoadOptions::default().cancel(cancel.clone());
            let mut loading = checkpoint.start(&load).unwrap();
            until("the server is asked", || {
                stores.servers.iter().any(|server| !server.take_requests().is_empty())
            });
            cancel.cancel();
            let begun = Instant::now();
            let ended = loading.by_ref().find_map(Result::err);
            drop(loading);
            assert!(matches!(ended, Some(Error::Cancelled)), "{url}, {fault:?}: {ended:?}");
            // The library gives such a server up after a minute.
            assert!(begun.elapsed() < Duration::from_secs(40), "{url}, {fault:?}: {:?}", begun.elapsed());
        }
    }
}

/// Whether a load has to succeed where one answer is wrong in this way. With other faults it may: the answer may be to a request that
/// was made twice, or a store tells versions by more than an ETag.
fn may_pass(fault: Fault) -> bool {
    matches!(
        fault,
        Fault::Status(429 | 500 | 503)
            | Fault::Truncate
            | Fault::Reset
            | Fault::Short
            | Fault::Chunked
            | Fault::UntilClose
            | Fault::Garbage
            | Fault::LongHead
            | Fault::StallInside(_)
    )
}

#[test]
fn every_fault_at_every_request_of_a_load_gives_the_file_or_an_error() {
    const FAULTS: [Fault; 26] = [
        Fault::Status(403),
        Fault::Status(429),
        Fault::Status(500),
        Fault::Status(503),
        Fault::Redirect,
        Fault::RedirectWithin,
        Fault::Truncate,
        Fault::Reset,
        Fault::Short,
        Fault::Chunked,
        Fault::UntilClose,
        Fault::LongChunks,
        Fault::Shift,
        Fault::LyingRange,
        Fault::Whole,
        Fault::LongBody,
        Fault::ShortBody,
        Fault::NoETag,
        Fault::WeakETag,
        Fault::OtherETag,
        Fault::Encoded,
        Fault::NoRange,
        Fault::Garbage,
        Fault::LongHead,
        Fault::StallInside(ENDLESS),
        Fault::Swap,
    ];
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let tensors = [tensor("a", Dtype::U8, &[1 << 20]), tensor("b", Dtype::F16, &[5, 1 << 17])];
    let file = write_model(&path, &tensors, 0, 5);
    let load = |stores: &Stores, scheme: usize| -> hoistway::Result<Loaded> {
        let (url, options) = stores.named(scheme);
        let checkpoint = Checkpoint::open_with(&[url], &options)?;
        checkpoint.load(&LoadOptions::default().chunk_bytes(256 << 10))
    };
    let stores = Stores::serving(&file);
    assert_is_file(&load(&stores, 0).unwrap(), &file);
    let requests = stores.servers[0].take_requests();
    let requests = requests.iter().filter(|request| request.range.is_some()).count();
    assert!(requests >= 10, "{requests}");
    // Each fault meets each scheme at two requests.
    let cases: Vec<_> = (0..FAULTS.len() * requests)
        .map(|case| (FAULTS[case / requests], case % requests + 1, case / requests + case % requests))
        .collect();
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        // Most of the time they wait.
        for _ in 0..16 {
            scope.spawn(|| {
                while let Some(&(fault, number, scheme)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let stores = Stores::serving(&file);
                    stores.fail(Faults::only(number, fault));
                    let url = stores.named(scheme).0.to_owned();
                    let loaded = load(&stores, scheme);
                    if let Ok(loaded) = &loaded {
                        assert_is_file(loaded, &file);
                    }
                    if may_pass(fault) && loaded.is_err() {
                        let told = format!("{fault:?} at request {number} of {url}: {:?}", loaded.err());
                        wrong.lock().unwrap().push(told);
                    }
                }
            });
        }
    });
    assert!(wrong.lock().unwrap().is_empty(), "{:#?}", wrong.lock().unwrap());
}

/// Loads over servers of every scheme that reset, stall, trickle, refuse, send parts, restart and forget connections at
/// random. `HOISTWAY_SOAK_LOADS` says how many: `just soak-objects`.
#[test]
fn soak_of_loads_over_servers_that_fail_at_random() {
    if !in_child("soak_of_loads_over_servers_that_fail_at_random") {
        return;
    }
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (loads, seed) = (number("HOISTWAY_SOAK_LOADS", 10), number("HOISTWAY_SOAK_SEED", 5));
    let directory = tempfile::tempdir().unwrap();
    let (_, file) = large_model(directory.path());
    let stores = Stores::serving(&file);
    let servers = &stores.servers;
    let cache = NodeCache::open(directory.path().join("cache"), Some(1 << 30)).unwrap();
    #[cfg(target_os = "linux")]
    let before = file_descriptors();
    let (next, failed, is_over) = (AtomicU64::new(0), Mutex::new(Vec::new()), AtomicBool::new(false));
    for (at, server) in servers.iter().enumerate() {
        server.fail(Faults { spares_first: at % 2 == 0, ..Faults::random(seed + at as u64) });
    }
    // Each request of 1 MiB brings a quarter of it in each minute, or the load fails.
    let bound = Duration::from_secs(60 * 5 * 30);
    let one = |number: u64| {
        let (url, mut options) = stores.named(number as usize);
        if number % 3 == 2 {
            options = options.cache(cache.clone());
        }
        let begun = Instant::now();
        let loaded = Checkpoint::open_with(&[url], &options)
            .and_then(|checkpoint| checkpoint.load(&LoadOptions::default().chunk_bytes(1 << 20)));
        assert!(begun.elapsed() < bound, "{url} took {:?}", begun.elapsed());
        match loaded {
            Ok(loaded) => assert_is_file(&loaded, &file),
            Err(error) => {
                let told = error.to_string();
                assert!(
                    told.contains("less than 256 KiB") || told.contains("times in a row"),
                    "{url}: {error:?}"
                );
                failed.lock().unwrap().push(told);
            }
        }
    };
    thread::scope(|scope| {
        let disturbing = scope.spawn(|| {
            for number in 0.. {
                thread::sleep(Duration::from_millis(700));
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let server = &servers[number % servers.len()];
                match number % 3 {
                    0 => server.forget_connections(),
                    _ => {
                        server.go_away(true);
                        thread::sleep(Duration::from_secs(number as u64 % 4));
                        server.go_away(false);
                    }
                }
            }
        });
        let loading: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    while let number = next.fetch_add(1, Ordering::Relaxed)
                        && number < loads
                    {
                        one(number);
                    }
                })
            })
            .collect();
        let ends: Vec<_> = loading.into_iter().map(thread::ScopedJoinHandle::join).collect();
        is_over.store(true, Ordering::Relaxed);
        disturbing.join().unwrap();
        ends.into_iter().for_each(|end| end.unwrap());
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.len() as u64 <= loads / 10, "of {loads} loads failed: {failed:#?}");
    cache.flush();
    #[cfg(target_os = "linux")]
    {
        until("their threads are gone", || http_threads() == 0);
        until("their descriptors are closed", || file_descriptors() <= before);
    }
    let temporary = directory.path().join("cache/temporary");
    assert_eq!(fs::read_dir(temporary).map_or(0, Iterator::count), 0, "temporary files are left");
    assert_eq!(cache.verify().unwrap().damaged_blocks, 0);
}

#[test]
fn requests_grow_with_what_they_are_worth_and_are_bounded_by_bytes_in_flight() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = large_model(directory.path());
    // So long that threads that wait for a processor overlap all the same. One more request may ask for the checksum.
    for (options, latency_ms, bounds) in [
        (LoadOptions::default().chunk_bytes(64 << 10), 3000, 17..129),
        (LoadOptions::default().chunk_bytes(64 << 10).in_flight_bytes(256 << 10), 10, 1..6),
    ] {
        let (server, [url, _]) = serving(&path);
        server.fail(Faults { latency: Duration::from_millis(latency_ms), ..Faults::default() });
        let checkpoint = open(&server, &url).unwrap();
        assert_is_file(&checkpoint.load(&options).unwrap(), &file);
        assert!(
            bounds.contains(&server.most_in_flight()),
            "{} is not in {bounds:?}",
            server.most_in_flight()
        );
    }
}

#[test]
fn a_load_from_a_far_server_begins_with_many_requests() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = large_model(directory.path());
    let (server, [url, _]) = serving(&path);
    server.fail(Faults { latency: Duration::from_secs(5), ..Faults::default() });
    let checkpoint = open(&server, &url).unwrap();
    // As many as there are, before any of them is answered.
    assert_is_file(&checkpoint.load(&LoadOptions::default().chunk_bytes(512 << 10)).unwrap(), &file);
    assert!(server.most_in_flight() > 32, "{}", server.most_in_flight());
}

/// A server far away with a model whose requests are longer than 4 MiB, and the model.
fn far_model() -> (Server, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let tensors = [
        tensor("a", Dtype::U8, &[3 << 20]),
        tensor("b", Dtype::U8, &[200 << 20]),
        tensor("c", Dtype::U8, &[5000]),
        tensor("d", Dtype::U8, &[100 << 20]),
    ];
    let file = write_model(&directory.path().join("model.safetensors"), &tensors, 0, 5);
    let server = Server::start().unwrap();
    server.put_tagged("models/model.safetensors", file.clone(), "\"one\"");
    (server, file)
}

/// Opens objects of a server that takes 10 ms for an answer. Its first answers take longer, so that the client waits 10 s for each
/// of the next ones rather than one: on a busy machine, a short request may take that long.
fn open_far<U: AsRef<str>>(server: &Server, urls: &[U]) -> Checkpoint {
    let urls: Vec<&str> = urls.iter().map(AsRef::as_ref).collect();
    server.fail(Faults { latency: Duration::from_millis(1250), ..Faults::default() });
    let checkpoint = Checkpoint::open_with(&urls, &options(server)).unwrap();
    server.fail(Faults { latency: Duration::from_millis(10), ..Faults::default() });
    checkpoint
}

/// By any order, the first tensor takes one round of short requests, whatever becomes of the long ones.
#[test]
fn the_first_tensor_from_a_far_server_waits_for_no_long_request() {
    let (server, file) = far_model();
    for (order, name) in [(Order::Arrival, "c"), (Order::File, "a")] {
        let checkpoint = open_far(&server, &["s3://models/model.safetensors"]);
        server.hold_longer_answers(Some(1 << 20));
        let stream = StreamOptions::default().order(order);
        let mut loading = checkpoint.stream(&LoadOptions::default(), &stream).unwrap();
        let first = loading.next().unwrap().unwrap();
        assert_eq!(first.name(), name, "{order:?}");
        server.hold_longer_answers(None);
        let mut tensors = vec![first];
        tensors.extend(loading.by_ref().map(Result::unwrap));
        assert_is_file(&loading.into_loaded(tensors), &file);
    }
}

/// What the caller says of reads counts, and who waits for all tensors pays for no short requests.
#[test]
fn only_a_loop_without_bounds_has_short_requests_for_its_first_tensor() {
    let (server, file) = far_model();
    let checkpoint = open_far(&server, &["s3://models/model.safetensors"]);
    let plain = LoadOptions::default();
    let bounded = StreamOptions::default().max_in_flight_bytes(64 << 20);
    for (options, stream, is_cut) in [
        (&plain, Some(StreamOptions::default()), true),
        (&plain, None, false),
        (&plain, Some(bounded), false),
        (&plain.clone().in_flight_bytes(64 << 20), Some(StreamOptions::default()), false),
        (&plain.clone().chunk_bytes(8 << 20), Some(StreamOptions::default()), false),
    ] {
        server.take_requests();
        let loading =
            stream.map_or_else(|| checkpoint.start(options), |stream| checkpoint.stream(options, &stream));
        assert_is_file(&loading.unwrap().wait().unwrap(), &file);
        // The step that holds tensor `c`, which the header moves by less.
        let start = 203 << 20;
        let cut = (start, start + (256 << 10) - 1);
        let requests = server.take_requests();
        let is_found = requests.iter().any(|request| request.range == Some(cut));
        assert_eq!(is_found, is_cut, "{options:?}, {stream:?}");
    }
}

/// The first tensor is asked for before as many other reads as are in flight, also if it is the last of the last file. All files are
/// read whole, as they are without it.
#[test]
fn the_first_tensor_is_asked_for_before_all_others() {
    let directory = tempfile::tempdir().unwrap();
    let many: Vec<_> =
        (0..100).map(|number| tensor(&format!("a{number}"), Dtype::U8, &[3_000_000])).collect();
    let few = [tensor("y", Dtype::U8, &[2 << 20]), tensor("z", Dtype::U8, &[5000])];
    let server = Server::start().unwrap();
    let urls = [("one", &many[..]), ("two", &few)].map(|(name, tensors)| {
        let file = write_model(&directory.path().join(name), tensors, 0, 5);
        server.put(&format!("models/{name}.safetensors"), &file);
        format!("s3://models/{name}.safetensors")
    });
    let checkpoint = open_far(&server, &urls);
    server.hold_longer_answers(Some(256 << 10));
    // Each of the others is a read, or two.
    let load = LoadOptions::default().layout(Layout::Tensor);
    let mut loading = checkpoint.stream(&load, &StreamOptions::default()).unwrap();
    assert_eq!(loading.next().unwrap().unwrap().name(), "z");
    server.hold_longer_answers(None);
    assert_eq!(loading.by_ref().map(Result::unwrap).count(), 101);
    let report = loading.report();
    let uncompared = &report.checksums.as_ref().unwrap().uncompared;
    assert!(uncompared.iter().all(|own| !own.reason.contains("in part")), "{report}");
}

#[test]
fn a_file_is_taken_or_refused_as_it_is_on_a_disk() {
    let (server, directory) = (Server::start().unwrap(), tempfile::tempdir().unwrap());
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testkit/corpus/gguf.json");
    let cases: Vec<serde_json::Value> = serde_json::from_slice(&fs::read(corpus).unwrap()).unwrap();
    for (number, case) in cases.iter().enumerate() {
        let folder = directory.path().join(number.to_string());
        fs::create_dir(&folder).unwrap();
        for (name, parts) in case["files"].as_object().unwrap() {
            let bytes: Vec<u8> = parts.as_array().unwrap().iter().flat_map(part).collect();
            fs::write(folder.join(name), &bytes).unwrap();
            server.put(&format!("models/{number}/{name}"), &bytes);
        }
        let name = case["open"].as_str().unwrap();
        let (path, url) = (folder.join(name), format!("s3://models/{number}/{name}"));
        // A server has no range of an empty object, nor its ETag.
        let lengths = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
        if lengths.min() == Some(0) {
            continue;
        }
        let offset = case["offset"].as_u64().unwrap_or(0);
        let here = Catalog::open_with(&[&path], &OpenOptions::default().offset(offset));
        let there = Catalog::open_with(&[&url], &options(&server).offset(offset));
        match (here, there) {
            (Ok(here), Ok(there)) => {
                assert_eq!(format!("{:?}", here.tensors()), format!("{:?}", there.tensors()))
            }
            (Err(here), Err(there)) => {
                let folder = folder.to_str().unwrap();
                let here = here.to_string().replace(folder, &format!("s3://models/{number}"));
                // What is missing is told in other words.
                let cut = |text: String| text.split(": ").next().unwrap_or_default().to_owned();
                let is_missing = matches!(there, Error::NotFound { .. });
                let there = there.to_string();
                assert!(
                    here == there || is_missing && cut(here.clone()) == cut(there.clone()),
                    "{here} != {there}"
                );
            }
            (here, there) => panic!("{}: {here:?} here, {there:?} there", case["name"]),
        }
    }
}

/// A part of a file of the corpus: hexadecimal text, or such text and how often it comes.
fn part(part: &serde_json::Value) -> Vec<u8> {
    let (text, times) = match part.as_str() {
        Some(text) => (text, 1),
        None => (part[0].as_str().unwrap(), part[1].as_u64().unwrap() as usize),
    };
    let bytes: Vec<u8> =
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect();
    bytes.repeat(times)
}

#[test]
#[cfg(target_os = "linux")]
fn without_threads_the_caller_asks_itself() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = large_model(directory.path());
    // The server needs threads, and stays in the parent.
    let Some(endpoint) = case() else {
        let (server, _) = serving(&path);
        return run_again("without_threads_the_caller_asks_itself", &server.url());
    };
    let url = "s3://models/llama/model.safetensors";
    let checkpoint = Checkpoint::open_with(&[url], &options_for(&endpoint)).unwrap();
    forbid(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN);
    let loaded = checkpoint.load(&LoadOptions::default()).unwrap();
    assert_is_file(&loaded, &file);
    assert_carried_by(&loaded, Route::Http);
}

#[test]
fn a_load_that_is_dropped_ends_soon() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = large_model(directory.path());
    let (server, [url, _]) = serving(&path);
    // A server that answers late is waited for longer: reads that went on would try it more than 20 times for 8 s each.
    let latency = Duration::from_secs(1);
    server.fail(Faults { latency, ..Faults::default() });
    let checkpoint = open(&server, &url).unwrap();
    server.take_requests();
    server.fail(Faults { latency, ..Faults::every(1, Fault::StallInside(ENDLESS)) });
    let loading = checkpoint.start(&LoadOptions::default()).unwrap();
    until("requests are under way", || !server.take_requests().is_empty());
    // By then most answers have begun. The test holds for requests without an answer too.
    thread::sleep(latency + Duration::from_millis(300));
    let begun = Instant::now();
    drop(loading);
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
}

#[test]
fn a_folder_holds_what_a_directory_would() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start().unwrap();
    for name in ["a", "b"] {
        let path = directory.path().join(name);
        let file = write_model(&path, &[tensor(name, Dtype::U8, &[1000])], 0, 5);
        server.put(&format!("models/sharded/{name}.safetensors"), &file);
        server.put(&format!("models/plain/{name}.safetensors"), &file);
        server.put("models/plain/deeper/c.safetensors", &file);
        server.put(&format!("models/plain/._{name}.safetensors"), b"\0\x05\x16\x07");
    }
    let index = br#"{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}"#;
    server.put("models/sharded/model.safetensors.index.json", index);
    server.put("models/sharded/config.json", b"{}");
    let names = |url: &str| {
        let catalog =
            Catalog::open_with(&[url], &options(&server)).unwrap_or_else(|error| panic!("{url}: {error}"));
        catalog.files().iter().map(|file| file.source.clone()).collect::<Vec<_>>()
    };
    for (folder, base) in [
        ("sharded/", "s3://models".to_owned()),
        ("plain/", "s3://models".into()),
        ("sharded/", format!("{}/models", server.url())),
    ] {
        let name = |file: &str| SourceName::Url(format!("{base}/{folder}{file}"));
        assert_eq!(names(&format!("{base}/{folder}")), [name("a.safetensors"), name("b.safetensors")]);
    }
    // Servers deny an index that is not there to who may not list.
    let file = server.object("models/plain/a.safetensors").unwrap();
    server.put("models/single/model.safetensors", &file);
    server.fail(Faults::only(1, Fault::Status(403)));
    let single = format!("{}/models/single/", server.url());
    assert_eq!(names(&single), [SourceName::Url(format!("{single}model.safetensors"))]);
    server.fail(Faults::default());
    let index = br#"{"weight_map": {"a": "./a.safetensors", "b": ".//b.safetensors"}}"#;
    server.put("models/sharded/model.safetensors.index.json", index);
    let plain = ["a", "b"].map(|name| SourceName::Url(format!("s3://models/sharded/{name}.safetensors")));
    assert_eq!(names("s3://models/sharded/"), plain);
    let index = br#"{"weight_map": {"a": "a.safetensors", "c": "gone.safetensors"}}"#;
    server.put("models/sharded/model.safetensors.index.json", index);
    match Catalog::open_with(&["s3://models/sharded/"], &options(&server)).unwrap_err() {
        Error::NotFound { path, reason } => {
            assert!(
                path.ends_with("gone.safetensors") && reason.contains("has tensor 'c' there"),
                "{reason}"
            );
        }
        error => panic!("{error:?}"),
    }
    let none = Catalog::open_with(&["s3://models/none/"], &options(&server)).unwrap_err();
    assert!(matches!(none, Error::NotFound { .. }), "{none:?}");
    for name in
        ["../plain/a.safetensors", "a.safetensors?versionId=5", "%2e%2e/a", "https://else/a.safetensors"]
    {
        let index = serde_json::json!({"weight_map": {"a": name}}).to_string();
        server.put("models/bad/model.safetensors.index.json", index.as_bytes());
        match Catalog::open_with(&["s3://models/bad/"], &options(&server)).unwrap_err() {
            Error::InvalidIndex { problem: IndexError::UnsafePath { file, .. }, .. } => {
                assert_eq!(file, name)
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn what_cannot_be_opened_is_told_by_kind_and_without_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = mixed_model(directory.path());
    let (server, [url, presigned]) = serving(&path);
    let missing = open(&server, "s3://models/none.safetensors").unwrap_err();
    assert!(matches!(missing, Error::NotFound { .. }), "{missing:?}");
    let option = open(&server, "s3://").unwrap_err();
    assert!(matches!(option, Error::InvalidOption { option: "path", .. }), "{option:?}");
    server.fail(Faults::always(Fault::NoETag));
    let unpinned = open(&server, &presigned).unwrap_err();
    assert!(unpinned.to_string().contains("unpinned=true"), "{unpinned}");
    let mut options = options(&server);
    options.store.as_mut().unwrap().unpinned = true;
    let loaded =
        Checkpoint::open_with(&[&presigned], &options).unwrap().load(&LoadOptions::default()).unwrap();
    assert_is_file(&loaded, &file);
    assert!(loaded.report().notes.iter().any(|note| note.contains("no strong ETag")), "{}", loaded.report());
    server.fail(Faults::always(Fault::Whole));
    let whole = open(&server, &url).unwrap_err();
    assert!(whole.to_string().contains("status 200 for a range"), "{whole}");
    let one_file = format!("{}/dl?sig={CANARY}&name=.json", server.url());
    server.put("dl", b"{}");
    let one_file = Catalog::open(&[one_file]).unwrap_err();
    let folder = Catalog::open(&[format!("{}/none?sig={CANARY}&list=/", server.url())]).unwrap_err();
    assert!(matches!(folder, Error::NotFound { .. }), "{folder:?}");
    let no_scheme = Catalog::open(&[format!("ftp://me:{CANARY}@host/a?sig={CANARY}")]).unwrap_err();
    for error in [missing, option, unpinned, whole, one_file, folder, no_scheme] {
        assert_shows_no_secret(&format!("{error} {error:?}"));
    }
    assert_shows_no_secret(&format!("{loaded:?} {:?}", loaded.report()));
}

#[test]
fn routes_that_need_a_file_refuse_objects_and_http_refuses_files() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = large_model(directory.path());
    let (server, [url, _]) = serving(&path);
    let checkpoint = open(&server, &url).unwrap();
    for route in [Route::IoUring, Route::Cached, Route::Usrbio] {
        match checkpoint.load(&LoadOptions::default().route(route)).unwrap_err() {
            Error::RouteUnavailable { route: named, why, .. } => {
                assert_eq!(named, route);
                let is_told =
                    why.reason.contains("not a file of this machine") || why.reason.contains("not on a 3FS");
                assert!(is_told, "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
    match hoistway::load(&[&path], &LoadOptions::default().route(Route::Http)).unwrap_err() {
        Error::RouteUnavailable { route: Route::Http, path: Some(found), why } => {
            assert_eq!(found, path);
            assert!(why.reason.contains("not in an object store"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(checkpoint.warm(|_| ControlFlow::Continue(())), Err(Error::RouteUnavailable { .. })));
    // Side by side each goes its own way.
    let local = directory.path().join("local.safetensors");
    write_model(&local, &[tensor("local", Dtype::U8, &[2 << 20])], 0, 5);
    let both = Checkpoint::open_with(&[PathBuf::from(&url), local], &options(&server)).unwrap();
    let loaded = both.load(&LoadOptions::default()).unwrap();
    let by_http: u64 = loaded
        .report()
        .carriers
        .iter()
        .filter(|carrier| carrier.route == Route::Http)
        .map(|carrier| carrier.tensor_bytes)
        .sum();
    assert_eq!(by_http, loaded.report().tensor_bytes - (2 << 20), "{}", loaded.report());
}

#[test]
fn a_reader_reads_objects() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = mixed_model(directory.path());
    let (_server, [_, url]) = serving(&path);
    let source = ReadFile::open(&url).unwrap();
    assert_shows_no_secret(&format!("{source:?}"));
    for route in [Route::Auto, Route::Http, Route::Threads] {
        let reader = Reader::new(&ReaderOptions::default().route(route)).unwrap();
        for (start, end) in [(0, file.len() as u64), (5, 10_002), (4096, 4096)] {
            let wanted = hoistway::ByteRange::new(start, end).unwrap();
            let request = ReadRequest::new(&source, wanted, Target::memory());
            let batch = reader.submit(vec![request], Priority::Demand).unwrap();
            batch.wait().unwrap();
            assert!(*batch.take(0).unwrap() == file[start as usize..end as usize], "{route}: {wanted}");
        }
    }
}

#[test]
fn what_stands_before_the_last_at_sign_is_not_shown() {
    for url in [
        "http://user:word@canary@127.0.0.1:1/a.safetensors",
        "http://user:canary@127.0.0.1:1/@/a.safetensors",
    ] {
        let error = Catalog::open(&[url]).unwrap_err();
        assert_shows_no_secret(&format!("{error} {error:?}"));
        assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    }
}

#[test]
fn a_path_that_was_a_url_shows_no_secret() {
    for path in
        ["https:/me:canary@host/a.safetensors?sig=canary", r"https:\me:canary@host\a.safetensors?sig=canary"]
    {
        let error = Catalog::open(&[path]).unwrap_err();
        assert_shows_no_secret(&format!("{error} {error:?}"));
        assert!(error.to_string().contains("https://host/a.safetensors"), "{error}");
    }
}

#[test]
fn where_an_object_is_not_found_it_is_told_how_a_folder_is_written() {
    let server = Server::start().unwrap();
    let error = open(&server, "s3://models/none").unwrap_err();
    assert!(
        error.to_string().contains("(status 404, NoSuchKey); the URL of a folder ends with '/'"),
        "{error}"
    );
}

/// Requests to a far server are longer, and so would be the memory that they pass through.
#[test]
fn a_budget_that_is_enough_for_a_near_server_is_enough_for_a_far_one() {
    const ROW: u64 = 4096;
    const ROWS: u64 = (600 << 20) / ROW;
    let server = Server::start().unwrap();
    let header =
        format!(r#"{{"t":{{"dtype":"U8","shape":[{ROWS},{ROW}],"data_offsets":[0,{}]}}}}"#, ROWS * ROW);
    let head = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    // Nearly all of it is never touched.
    let mut file = vec![0; head.len() + (ROWS * ROW) as usize];
    file[..head.len()].copy_from_slice(&head);
    let rows = 8192;
    for (number, row) in file[head.len()..].chunks_mut(ROW as usize).take(rows).enumerate() {
        row.fill((number % 251) as u8);
    }
    server.put_tagged("models/llama/t.safetensors", file, "\"t\"");
    let half = TensorSlice::new(vec![0..rows as u64, 0..ROW / 2]);
    let tensor_bytes = rows as u64 * ROW / 2;
    let budget = tensor_bytes + (6 << 20);
    let options =
        LoadOptions::default().selection(Selection::all().slice("t", half)).memory_budget_bytes(budget);
    for latency in [Duration::ZERO, Duration::from_millis(20)] {
        server.fail(Faults { latency, ..Faults::default() });
        let loaded = open(&server, "s3://models/llama/t.safetensors").unwrap().load(&options).unwrap();
        assert_carried_by(&loaded, Route::Http);
        let bytes = loaded.get("t").unwrap().bytes().unwrap().to_vec();
        let is_row = |(number, row): (usize, &[u8])| row.iter().all(|byte| *byte == (number % 251) as u8);
        assert!(bytes.chunks(ROW as usize / 2).enumerate().all(is_row), "{latency:?}");
        let memory = &loaded.report().memory;
        assert!(memory.arena_bytes + memory.staging_bytes <= budget, "{}", loaded.report());
    }
}
