//! The node's cache: what came from a store comes from the drive the next time, and is right whatever became of the cache.
#![cfg(all(feature = "objects", unix))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    assert_is_file, devices,
    reading::{LONG, until},
    tensor, write_model,
};
use hoistway::{
    ByteRange, Checkpoint, DeviceId, Dtype, Error, FillTarget, Filled, LoadOptions, Order, Report, Route,
    StreamOptions,
    cache::NodeCache,
    catalog::OpenOptions,
    objects::StoreOptions,
    plan::{Layout, Selection},
    read::{Priority, ReadRequest, Reader, ReaderOptions, Target},
};
use objectd::{Fault, Faults, Server};
use requirements::Requirement;
use std::{
    env, fs,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// More than one read, and an end inside of a block.
const TENSORS: [(&str, u64); 3] = [("a", 5 << 20), ("b", 3_000_003), ("c", 20 << 20)];
const URL: &str = "s3://models/llama/model.safetensors";

/// A server with a checkpoint, its bytes, and a folder for caches.
struct Node {
    server: Server,
    folder: tempfile::TempDir,
    file: Vec<u8>,
}

impl Node {
    fn new() -> Self {
        let (server, folder) = (Server::start().unwrap(), tempfile::tempdir().unwrap());
        let node = Self { server, folder, file: Vec::new() };
        let file = node.model(5);
        node.server.put("models/llama/model.safetensors", &file);
        Self { file, ..node }
    }

    /// For tests that count what the server is asked for. It answers late at first, so that the client waits for seconds before
    /// it repeats a request: on a busy machine, none is repeated.
    fn patient() -> Self {
        let node = Self::new();
        node.server.fail(Faults { latency: Duration::from_secs(1), ..Faults::default() });
        Checkpoint::open_with(&[URL], &options(&node.server.url())).unwrap();
        node.server.fail(Faults::default());
        node
    }

    /// The bytes of a checkpoint, others for each seed.
    fn model(&self, seed: u64) -> Vec<u8> {
        let path = self.folder.path().join("model.safetensors");
        let tensors: Vec<_> = TENSORS.iter().map(|(name, len)| tensor(name, Dtype::U8, &[*len])).collect();
        let file = write_model(&path, &tensors, 0, seed);
        fs::remove_file(path).unwrap();
        file
    }

    fn directory(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn cache(&self) -> NodeCache {
        // However full the drive is.
        NodeCache::open(self.directory(), Some(1 << 30)).unwrap()
    }

    fn open(&self, cache: NodeCache) -> hoistway::Result<Checkpoint> {
        open(&self.server.url(), cache)
    }

    /// A whole load, whose bytes are right.
    fn load(&self, options: &LoadOptions) -> Report {
        self.load_of(self.cache(), options)
    }

    /// A load when all is in the cache. Blocks that the backlog of a slow drive has no room for are kept the next time.
    fn load_kept(&self, options: &LoadOptions) -> Report {
        let loads = (0..5).map(|_| self.load(options));
        let is_kept = |report: &Report| carried(report, Route::NodeCache) == report.tensor_bytes;
        loads.into_iter().find(is_kept).unwrap_or_else(|| self.load(options))
    }

    fn load_of(&self, cache: NodeCache, options: &LoadOptions) -> Report {
        let loaded = self.open(cache.clone()).unwrap().load(options).unwrap();
        assert_is_file(&loaded, &self.file);
        // Ends of loads wait for it, but not for long.
        cache.flush();
        loaded.report().clone()
    }

    /// The bytes of the model that are in the cache.
    fn data(&self) -> PathBuf {
        let folder = fs::read_dir(self.directory().join("objects")).unwrap().next().unwrap().unwrap().path();
        folder.join("data")
    }
}

fn options(endpoint: &str) -> OpenOptions {
    let mut store = StoreOptions::default();
    for (name, value) in [("endpoint", endpoint), ("access_key_id", "key"), ("secret_access_key", "canary")] {
        store.set(name, value).unwrap();
    }
    OpenOptions::default().store(store)
}

fn open(endpoint: &str, cache: NodeCache) -> hoistway::Result<Checkpoint> {
    Checkpoint::open_with(&[URL], &options(endpoint).cache(cache))
}

/// Bytes of tensors that a route carried.
fn carried(report: &Report, route: Route) -> u64 {
    report.carriers.iter().filter(|carrier| carrier.route == route).map(|carrier| carrier.tensor_bytes).sum()
}

fn assert_all_by(report: &Report, route: Route) {
    assert_eq!(carried(report, route), report.tensor_bytes, "{report}");
}

fn assert_all_counted(report: &Report) {
    let counted = carried(report, Route::NodeCache) + carried(report, Route::Http);
    assert_eq!(counted, report.tensor_bytes, "{report}");
}

/// Bytes that the server was asked for, less those of the openings.
fn asked_for(server: &Server) -> usize {
    let ranges = server.take_requests().into_iter().filter_map(|request| request.range);
    ranges.filter(|(first, _)| *first > 0).map(|(first, last)| last + 1 - first).sum()
}

fn auto() -> LoadOptions {
    LoadOptions::default()
}

#[test]
fn a_second_load_comes_from_the_drive() {
    let node = Node::patient();
    let first = node.load(&auto());
    assert_all_counted(&first);
    assert!(carried(&first, Route::Http) > first.tensor_bytes / 2, "{first}");
    assert!(asked_for(&node.server) < node.file.len());
    for _ in 0..2 {
        let second = node.load(&auto());
        assert_all_by(&second, Route::NodeCache);
        assert_eq!(asked_for(&node.server), 0, "the store was read again");
    }
    assert_all_by(&node.load(&auto().route(Route::NodeCache)), Route::NodeCache);
    // A route that is named carries all.
    assert_all_by(&node.load(&auto().route(Route::Http)), Route::Http);
    let entries = node.cache().entries().unwrap();
    assert_eq!((entries.len(), &*entries[0].url, entries[0].len), (1, URL, node.file.len() as u64));
    assert!(entries[0].taken_bytes >= entries[0].len);
}

#[test]
fn what_waits_for_the_cache_is_part_of_the_budget() {
    let node = Node::new();
    let needed = |options: &LoadOptions| match node.open(node.cache()).unwrap().load(options).unwrap_err() {
        Error::MemoryBudget { needed, .. } => needed,
        other => panic!("{other:?}"),
    };
    let packed = || auto().layout(Layout::Packed).selection(Selection::all().select("b"));
    for options in [auto(), packed(), auto().route(Route::Threads)] {
        fs::remove_dir_all(node.directory()).unwrap_or_default();
        let least = needed(&options.clone().memory_budget_bytes(1 << 20));
        let load = |budget| {
            let cache = node.cache();
            let loaded = node.open(cache.clone()).unwrap();
            let loaded = loaded.load(&options.clone().memory_budget_bytes(budget)).unwrap();
            cache.flush();
            let memory = &loaded.report().memory;
            assert!(memory.arena_bytes + memory.staging_bytes <= budget, "{}", loaded.report());
            loaded.report().clone()
        };
        // What nothing can wait for comes from the store again, and again.
        for _ in 0..2 {
            let report = load(least);
            // But for its first bytes, which came when it was opened.
            assert!(carried(&report, Route::NodeCache) <= 1 << 20, "{report}");
            assert!(noted(&report, "memory_budget leaves no room"), "{report}");
        }
        load(least + (64 << 20));
        if options.route == Route::Auto {
            let kept = load(least);
            assert_all_by(&kept, Route::NodeCache);
        } else {
            assert!(node.cache().verify().unwrap().bytes > 2 << 20);
        }
    }
}

/// Eight blocks are written at once, if all of them may wait.
#[test]
fn as_many_blocks_of_a_read_are_kept_as_there_is_memory_for() {
    const BLOCK: u64 = 256 << 10;
    let node = Node::new();
    let options = auto().layout(Layout::Packed).selection(Selection::all().select("c"));
    let load = |budget| {
        let cache = node.cache();
        let loaded = node.open(cache.clone()).unwrap().load(&options.clone().memory_budget_bytes(budget));
        cache.flush();
        loaded
    };
    let least = match load(1 << 20).unwrap_err() {
        Error::MemoryBudget { needed, .. } => needed,
        other => panic!("{other:?}"),
    };
    let report = load(least + 3 * BLOCK - 1).unwrap().report().clone();
    assert!(noted(&report, "memory_budget leaves no room"), "{report}");
    // Beside the first bytes, which came when it was opened. Reads of the same time share the memory, and one that ends inside of a
    // block takes a block of it.
    let kept = node.cache().verify().unwrap().bytes;
    assert!(kept >= (1 << 20) + BLOCK && kept < TENSORS[2].1, "{kept} bytes");
}

#[test]
fn what_a_copy_into_memory_has_wait_for_the_cache_is_part_of_its_budget() {
    let node = Node::new();
    let fill = |budget| {
        let cache = node.cache();
        let checkpoint = node.open(cache.clone()).unwrap();
        let mut memory = vec![0u8; TENSORS[2].1 as usize];
        let catalog = checkpoint.catalog();
        let request = Selection::all().select("c").resolve(catalog).unwrap().remove(0);
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        let target = FillTarget::new(request, DeviceId::Cpu, address, memory.len() as u64);
        let options = auto().memory_budget_bytes(budget);
        // SAFETY: the memory outlives the load, and is not looked at before its end.
        let mut filling = unsafe { checkpoint.fill(&[target], &options, Order::Arrival) }.unwrap();
        while filling.next_within(LONG).unwrap() != Filled::Finished {}
        let report = filling.report();
        drop(filling);
        cache.flush();
        let file = safetensors::SafeTensors::deserialize(&node.file).unwrap();
        assert!(memory == file.tensor("c").unwrap().data());
        assert!(report.memory.staging_bytes <= budget, "{report}");
        (report, node.cache().verify().unwrap().bytes)
    };
    let (report, kept_bytes) = fill(2 << 20);
    assert!(noted(&report, "memory_budget leaves no room"), "{report}");
    // The first bytes came when it was opened.
    assert!(kept_bytes <= 1 << 20, "{kept_bytes} bytes");
    let (_, kept_bytes) = fill(128 << 20);
    assert!(kept_bytes > 2 << 20, "{kept_bytes} bytes");
}

#[test]
fn every_device_and_layout_gets_the_bytes_from_the_drive() {
    for device in devices() {
        let node = Node::new();
        for layout in [Layout::File, Layout::Packed, Layout::Tensor] {
            for chunk_bytes in [64 << 10, 4 << 20] {
                let options = auto().device(device).layout(layout).chunk_bytes(chunk_bytes);
                let report = node.load(&options);
                assert_all_counted(&report);
                assert_all_by(&node.load_kept(&options), Route::NodeCache);
            }
        }
    }
}

#[test]
fn loads_that_wait_for_each_other_end_also_where_they_hold_slots() {
    // A claim that nothing comes of lasts longer than any of the loads.
    const CLAIM: Duration = Duration::from_secs(300);
    NodeCache::set_claim_time(CLAIM);
    for device in devices() {
        let node = Node::new();
        let options = auto().device(device).layout(Layout::Packed).chunk_bytes(1 << 20);
        let begun = Instant::now();
        thread::scope(|scope| {
            let loading: Vec<_> = (0..3).map(|_| scope.spawn(|| node.load(&options))).collect();
            loading.into_iter().for_each(|thread| assert_all_counted(&thread.join().unwrap()));
        });
        assert!(begun.elapsed() < CLAIM, "{:?}", begun.elapsed());
    }
}

#[test]
fn parts_are_kept_and_make_a_whole() {
    let node = Node::patient();
    for name in ["c", "a"] {
        let cache = node.cache();
        let checkpoint = node.open(cache.clone()).unwrap();
        let loaded = checkpoint.load(&auto().selection(Selection::all().select(name))).unwrap();
        assert_all_counted(loaded.report());
        cache.flush();
    }
    asked_for(&node.server);
    let rest = node.load(&auto());
    assert_all_counted(&rest);
    assert!(carried(&rest, Route::NodeCache) > 20 << 20, "{rest}");
    assert!(asked_for(&node.server) < 12 << 20);
    assert_all_by(&node.load_kept(&auto()), Route::NodeCache);
}

#[test]
fn the_route_of_the_cache_fails_where_it_holds_nothing() {
    let node = Node::new();
    let error = node.open(node.cache()).unwrap().load(&auto().route(Route::NodeCache)).unwrap_err();
    assert!(matches!(&error, Error::RouteUnavailable { route: Route::NodeCache, .. }), "{error:?}");
    assert!(error.to_string().contains("the node's cache does not hold byte"), "{error}");
}

#[test]
fn readers_read_from_the_cache_if_it_is_named() {
    let node = Node::patient();
    let cache = node.cache();
    let checkpoint = node.open(cache.clone()).unwrap();
    let source = checkpoint.read_file(checkpoint.catalog().tensors()[0].file).unwrap();
    let read = || {
        let reader = Reader::new(&ReaderOptions::default().route(Route::NodeCache)).unwrap();
        let requests = [(100, 5000), (3 << 20, 11 << 20)].map(|(start, end)| {
            ReadRequest::new(&source, ByteRange::new(start, end).unwrap(), Target::memory())
        });
        let batch = reader.submit(requests, Priority::Demand).unwrap();
        batch.wait().map_err(ToString::to_string)?;
        Ok::<_, String>([0, 1].map(|read| batch.take(read).unwrap().to_vec()))
    };
    let refused = read().unwrap_err();
    assert!(refused.contains("the node's cache does not hold byte"), "{refused}");
    checkpoint.load(&auto()).unwrap();
    cache.flush();
    asked_for(&node.server);
    let [short, long] = read().unwrap();
    assert!(short == node.file[100..5000] && long == node.file[3 << 20..11 << 20]);
    assert_eq!(asked_for(&node.server), 0);
}

#[test]
fn damaged_blocks_come_from_the_store_again() {
    let node = Node::new();
    node.load(&auto());
    for damage in ["a bit", "a hole", "the map"] {
        let path = node.data();
        let data = File::options().read(true).write(true).open(&path).unwrap();
        match damage {
            "a bit" => {
                let mut byte = [0];
                data.read_exact_at(&mut byte, 9_000_000).unwrap();
                data.write_all_at(&[byte[0] ^ 4], 9_000_000).unwrap();
            }
            "a hole" => data.write_all_at(&[0; 4096], 20_000_000 / 4096 * 4096).unwrap(),
            _ => {
                let map = File::options().write(true).open(path.with_file_name("map")).unwrap();
                map.write_all_at(&[7; 3], 16 * 50).unwrap();
            }
        }
        drop(data);
        let report = node.load(&auto());
        assert_all_counted(&report);
        assert!(carried(&report, Route::Http) > 0, "{damage}: {report}");
        assert!(report.notes.iter().any(|note| note.contains("damaged")), "{damage}: {report}");
        assert_all_by(&node.load_kept(&auto()), Route::NodeCache);
    }
    fs::write(node.data().with_file_name("meta.json"), "{").unwrap();
    assert_all_counted(&node.load(&auto()));
    assert_all_by(&node.load_kept(&auto()), Route::NodeCache);
}

#[test]
fn verification_finds_what_is_damaged() {
    let node = Node::new();
    node.load(&auto());
    let whole = node.cache().verify().unwrap();
    assert_eq!((whole.bytes, whole.damaged_blocks), (node.file.len() as u64, 0));
    File::options().write(true).open(node.data()).unwrap().write_all_at(&[1, 2, 3], 5_000_000).unwrap();
    let damaged = node.cache().verify().unwrap();
    assert_eq!((damaged.damaged_blocks, &*damaged.damaged), (1, &[URL.to_owned()][..]));
    assert_eq!(node.cache().verify().unwrap().damaged_blocks, 0, "it is not there any more");
}

#[test]
fn an_object_that_changed_has_another_entry() {
    let mut node = Node::new();
    node.load(&auto());
    node.file = node.model(6);
    node.server.put("models/llama/model.safetensors", &node.file);
    let report = node.load(&auto());
    assert!(carried(&report, Route::Http) > 0, "{report}");
    assert_all_by(&node.load_kept(&auto()), Route::NodeCache);
    assert_eq!(node.cache().entries().unwrap().len(), 2);
    // One that changes while it is loaded is an error, and not mixed with what was kept.
    let other = node.model(7);
    let checkpoint = node.open(node.cache()).unwrap();
    fs::remove_dir_all(node.directory().join("objects")).unwrap();
    let checkpoint_of_nothing_kept = node.open(node.cache()).unwrap();
    node.server.put("models/llama/model.safetensors", &other);
    let error = checkpoint_of_nothing_kept.load(&auto()).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error:?}");
    // What is open stays readable though it is evicted.
    assert_is_file(&checkpoint.load(&auto()).unwrap(), &node.file);
}

#[test]
fn files_that_a_server_names_and_versions_alike_have_entries_of_their_own() {
    let node = Node::new();
    let (first, second) = (node.model(5), node.model(6));
    let cache = node.cache();
    // As a program answers that names its release in place of the file, by a parameter that signatures have too.
    for name in ["st", "policy", "sv", "Expires", "sig"] {
        for (number, file) in [(1, &first), (2, &second)] {
            node.server.put_tagged(&format!("get?{name}={number}"), file.as_slice(), "\"release-7\"");
        }
        for (number, file) in [(1, &first), (2, &second), (1, &first)] {
            let url = format!("{}/get?{name}={number}", node.server.url());
            let options = OpenOptions::default().cache(cache.clone());
            let loaded = Checkpoint::open_with(&[url], &options).unwrap().load(&auto()).unwrap();
            assert_is_file(&loaded, file);
            cache.flush();
        }
    }
    // Where a signature hides what is named, the first bytes tell the files apart.
    let signature = "Expires=1&Key-Pair-Id=k&Signature=0123456789abcdef";
    for (number, file) in [(1, &first), (2, &second)] {
        node.server.put_tagged(&format!("get?{signature}{number}"), file.as_slice(), "\"release-7\"");
        let url = format!("{}/get?{signature}{number}", node.server.url());
        let options = OpenOptions::default().cache(cache.clone());
        let loaded = Checkpoint::open_with(&[url], &options).unwrap().load(&auto()).unwrap();
        assert_is_file(&loaded, file);
        cache.flush();
    }
}

#[test]
fn a_signature_that_rotates_keeps_its_entry() {
    let node = Node::new();
    node.server.put_tagged("get", &*node.file, "\"release-7\"");
    let cache = node.cache();
    for number in 0..3 {
        let signature = format!("OSSAccessKeyId=k&Expires={number}&Signature=0123456789abcdef{number}");
        let url = format!("{}/get?{signature}", node.server.url());
        let options = OpenOptions::default().cache(cache.clone());
        Checkpoint::open_with(&[url], &options).unwrap().load(&auto()).unwrap();
        cache.flush();
        assert_eq!(cache.entries().unwrap().len(), 1, "signature {number}");
    }
}

#[test]
fn eviction_takes_what_was_used_longest_ago_and_nothing_that_is_in_use() {
    let node = Node::new();
    let max_bytes = node.file.len() as u64 * 3 / 2;
    let cache = || NodeCache::open(node.directory(), Some(max_bytes)).unwrap();
    node.load_of(cache(), &auto());
    let other = node.model(8);
    node.server.put("models/llama/model.safetensors", &other);
    let second = cache();
    let loaded = node.open(second.clone()).unwrap().load(&auto()).unwrap();
    assert_is_file(&loaded, &other);
    second.flush();
    let entries = cache().entries().unwrap();
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert!(entries[0].taken_bytes <= max_bytes);
    let open = node.open(cache()).unwrap();
    assert_eq!(cache().collect(Some(0)).unwrap().entries, 0, "it is in use");
    drop(open);
    assert_eq!(cache().collect(Some(0)).unwrap().entries, 1);
    assert_eq!(cache().entries().unwrap(), []);
}

#[test]
fn an_entry_that_goes_during_a_load_loses_no_byte() {
    let node = Node::new();
    node.load(&auto());
    let checkpoint = node.open(node.cache()).unwrap();
    let stream = StreamOptions::default().max_in_flight_bytes(6 << 20);
    let whole = safetensors::SafeTensors::deserialize(&node.file).unwrap();
    let mut seen = 0;
    for tensor in checkpoint.stream(&auto(), &stream).unwrap() {
        let tensor = tensor.unwrap();
        assert!(*tensor.bytes().unwrap() == *whole.tensor(tensor.name()).unwrap().data());
        if seen == 0 {
            fs::remove_dir_all(node.directory().join("objects")).unwrap();
        }
        seen += 1;
    }
    assert_eq!(seen, TENSORS.len());
}

#[test]
fn a_cache_made_under_the_former_name_is_used() {
    let node = Node::new();
    drop(node.cache());
    fs::write(node.directory().join("format"), "windlass cache 1\n").unwrap();
    NodeCache::open(node.directory(), None).unwrap();
}

#[test]
fn directories_of_something_else_are_refused() {
    let node = Node::new();
    drop(node.cache());
    fs::write(node.directory().join("format"), "hoistway cache 2\n").unwrap();
    let other = NodeCache::open(node.directory(), None).unwrap_err();
    assert!(
        matches!(&other, Error::InvalidOption { reason, .. } if reason.contains("another version")),
        "{other:?}"
    );
    let full = NodeCache::open(env!("CARGO_MANIFEST_DIR"), None).unwrap_err();
    assert!(matches!(&full, Error::InvalidOption { reason, .. } if reason.contains("not empty")), "{full:?}");
    let file = node.folder.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(NodeCache::open(file, None).unwrap_err(), Error::Io { .. }));
}

#[test]
fn an_object_without_a_certain_version_is_not_kept() {
    let node = Node::new();
    node.server.fail(Faults::always(Fault::NoETag));
    let mut store = StoreOptions::default();
    for (name, value) in [("endpoint", &*node.server.url()), ("anonymous", "true"), ("unpinned", "true")] {
        store.set(name, value).unwrap();
    }
    let options = OpenOptions::default().store(store).cache(node.cache());
    let loaded = Checkpoint::open_with(&[URL], &options).unwrap().load(&auto()).unwrap();
    assert_is_file(&loaded, &node.file);
    assert!(loaded.report().notes.iter().any(|note| note.contains("is not kept")), "{}", loaded.report());
    assert_eq!(node.cache().entries().unwrap(), []);
}

/// What children do. The parent has the server.
const CHILD: &str = "HOISTWAY_TEST_ENDPOINT";

/// How long a child's claims last; else as long as usual.
const CLAIM_SECONDS: &str = "HOISTWAY_TEST_CLAIM_SECONDS";

fn child_of(node: &Node) -> Command {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "child", "--ignored"]).env(CHILD, node.server.url());
    child.env("HOISTWAY_CACHE", node.directory()).env("HOISTWAY_CACHE_BYTES", "1GiB");
    child
}

#[test]
fn a_folder_that_others_may_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let refused = NodeCache::open(folder.path(), None).unwrap_err();
    assert!(refused.to_string().contains("every user may write to it"), "{refused}");
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
}

#[test]
fn a_cache_that_cannot_be_looked_at_is_not_told_as_missing() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = NodeCache::chosen_existing(Some(&file.path().join("cache")), None).unwrap_err();
    assert!(matches!(&error, Error::Io { operation: "open the cache", .. }), "{error:?}");
    let folder = tempfile::tempdir().unwrap();
    let error = NodeCache::chosen_existing(Some(folder.path()), None).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
}

#[test]
fn a_folder_that_its_group_may_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    set(folder.path(), 0o775);
    let refused = NodeCache::open(folder.path(), None).unwrap_err().to_string();
    assert!(refused.contains("its group may write to it") && refused.contains("chmod go-w"), "{refused}");
    set(folder.path(), 0o755);
    NodeCache::open(folder.path(), None).unwrap();
    // Also the folders in it.
    set(&folder.path().join("objects"), 0o770);
    let refused = NodeCache::open(folder.path(), None).unwrap_err().to_string();
    assert!(refused.contains("objects"), "{refused}");
}

#[test]
fn entries_are_for_this_user_alone_whatever_the_mask() {
    use std::os::unix::fs::PermissionsExt;
    if env::var_os(CHILD).is_none() {
        // The mask is the whole process's.
        let node = Node::new();
        let mut child = Command::new("sh");
        child.args(["-c", "umask 0; exec \"$0\" --exact entries_are_for_this_user_alone_whatever_the_mask"]);
        child.arg(env::current_exe().unwrap()).env(CHILD, node.server.url());
        child.env("HOISTWAY_CACHE", node.directory()).env("HOISTWAY_CACHE_BYTES", "1GiB");
        assert!(child.status().unwrap().success());
        let entry = node.data().parent().unwrap().to_owned();
        assert_eq!(fs::metadata(entry).unwrap().permissions().mode() & 0o777, 0o700);
        return;
    }
    child();
}

#[test]
fn a_marker_that_a_power_cut_emptied_is_made_again() {
    let node = Node::new();
    node.load(&auto());
    for damaged in [&b""[..], &[0; 17]] {
        fs::write(node.directory().join("format"), damaged).unwrap();
        assert_all_by(&node.load_kept(&auto()), Route::NodeCache);
        assert_eq!(fs::read(node.directory().join("format")).unwrap(), b"hoistway cache 1\n");
    }
    // Beside files of something else, an empty file says nothing.
    fs::write(node.directory().join("format"), "").unwrap();
    fs::write(node.directory().join("weights"), "").unwrap();
    let refused = NodeCache::open(node.directory(), None).unwrap_err();
    assert!(refused.to_string().contains("not empty"), "{refused}");
}

/// What a report says of an entry whose lock another process has.
const LOCKED: &str = "not written to: another process holds the lock";

/// Locks the bytes of the model's entry, as a process does that looks whether it may be evicted.
fn lock_out(node: &Node) -> File {
    let data = File::open(node.data()).unwrap();
    data.lock().unwrap();
    data
}

#[test]
fn an_entry_that_is_opened_while_another_process_looks_at_it_is_not_evicted() {
    let node = Node::new();
    node.load(&auto());
    let open = loop {
        let looking = lock_out(&node);
        let open = thread::scope(|scope| {
            let opening = scope.spawn(|| node.open(node.cache()).unwrap());
            // Time to try the lock, which cannot be had yet.
            thread::sleep(Duration::from_millis(100));
            drop(looking);
            opening.join().unwrap()
        });
        // One that had no turn for a second gives the lock up, and says so.
        if !open.load(&auto()).unwrap().report().to_string().contains(LOCKED) {
            break open;
        }
    };
    assert_eq!(node.cache().collect(Some(0)).unwrap().entries, 0, "it is in use");
    assert_is_file(&open.load(&auto()).unwrap(), &node.file);
}

#[test]
fn an_entry_that_cannot_be_locked_is_read_and_not_written() {
    let node = Node::new();
    let cache = node.cache();
    let checkpoint = node.open(cache.clone()).unwrap();
    checkpoint.load(&auto().selection(Selection::all().select("a"))).unwrap();
    cache.flush();
    drop((checkpoint, cache));
    let _lock = lock_out(&node);
    let report = node.load(&auto());
    assert!(carried(&report, Route::NodeCache) > 0 && carried(&report, Route::Http) > 0, "{report}");
    assert!(report.to_string().contains(LOCKED), "{report}");
}

#[test]
fn an_entry_that_was_removed_is_not_written_to() {
    let node = Node::new();
    let cache = node.cache();
    let checkpoint = node.open(cache.clone()).unwrap();
    cache.flush();
    let data = File::open(node.data()).unwrap();
    let taken = || std::os::unix::fs::MetadataExt::blocks(&data.metadata().unwrap());
    let before = taken();
    fs::remove_dir_all(node.directory().join("objects")).unwrap();
    let loaded = checkpoint.load(&auto()).unwrap();
    assert_is_file(&loaded, &node.file);
    cache.flush();
    assert_eq!(taken(), before);
    let notes = checkpoint.load(&auto()).unwrap().report().to_string();
    assert!(notes.contains("its entry was removed"), "{notes}");
}

#[test]
fn a_load_that_fails_gives_its_claims_back_at_once() {
    // A claim that nothing comes of lasts longer than any of the loads.
    const CLAIM: Duration = Duration::from_secs(300);
    NodeCache::set_claim_time(CLAIM);
    let node = Node::new();
    let (cache, begun) = (node.cache(), Instant::now());
    let failed = node.open(cache.clone()).unwrap();
    node.server.fail(Faults::always(Fault::Status(403)));
    failed.load(&auto()).unwrap_err();
    node.server.fail(Faults::default());
    // The checkpoint of the load that failed is still open.
    assert_all_counted(&node.load(&auto()));
    // One that is cancelled while its reads wait for the server.
    drop((failed, cache));
    fs::remove_dir_all(node.directory()).unwrap();
    let cancelled = node.open(node.cache()).unwrap();
    asked_for(&node.server);
    node.server.fail(Faults::always(Fault::Stall(LONG)));
    let mut loading = cancelled.start(&auto()).unwrap();
    until("its reads are on their way", || asked_for(&node.server) > 0);
    loading.cancel();
    drop(loading);
    node.server.fail(Faults::default());
    assert_all_counted(&node.load(&auto()));
    assert!(begun.elapsed() < CLAIM, "{:?}", begun.elapsed());
}

#[test]
fn threads_that_open_a_new_cache_at_once_all_get_it() {
    for _ in 0..50 {
        let node = tempfile::tempdir().unwrap();
        let directory = node.path().join("cache");
        thread::scope(|scope| {
            let opening: Vec<_> = (0..4).map(|_| scope.spawn(|| NodeCache::open(&directory, None))).collect();
            opening.into_iter().for_each(|thread| drop(thread.join().unwrap().unwrap()));
        });
        let names = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with("format.")));
    }
}

#[test]
#[ignore = "a part of others"]
fn child() {
    if let Ok(seconds) = env::var(CLAIM_SECONDS) {
        NodeCache::set_claim_time(Duration::from_secs(seconds.parse().unwrap()));
    }
    let cache = NodeCache::chosen(None, None).unwrap().unwrap();
    open(&env::var(CHILD).unwrap(), cache.clone()).unwrap().load(&auto()).unwrap();
    // The end of the cache waits for it, but not for long.
    cache.flush();
}

#[test]
fn processes_that_start_at_once_fetch_each_byte_once() {
    let node = Node::new();
    node.server.fail(Faults { latency: Duration::from_millis(30), ..Faults::default() });
    let children: Vec<_> =
        (0..3).map(|_| child_of(&node).env(CLAIM_SECONDS, "300").spawn().unwrap()).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let asked = asked_for(&node.server);
    // A request that was too slow is repeated. Without the cache it would be three files.
    assert!(asked < node.file.len() * 3 / 2, "{asked} bytes of {}", node.file.len());
    assert_all_by(&node.load_kept(&auto()), Route::NodeCache);
}

#[test]
fn a_process_that_is_killed_leaves_what_it_had_and_holds_up_nothing_for_long() {
    let node = Node::new();
    let mut kept = 0;
    // At any moment, and when it has something.
    for after in [Some(50), Some(150), Some(600), None] {
        node.server.fail(Faults { latency: Duration::from_millis(100), ..Faults::default() });
        let mut child = child_of(&node).spawn().unwrap();
        match after {
            Some(milliseconds) => thread::sleep(Duration::from_millis(milliseconds)),
            None => until("the child keeps a block", || {
                node.directory().join("objects").exists() && node.cache().verify().unwrap().bytes > 0
            }),
        }
        child.kill().unwrap();
        child.wait().unwrap();
        node.server.fail(Faults::default());
        let begun = Instant::now();
        let report = node.load(&auto());
        assert_all_counted(&report);
        assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
        kept += carried(&report, Route::NodeCache);
        if after.is_some() {
            fs::remove_dir_all(node.directory()).unwrap();
        }
    }
    assert!(kept > 0, "nothing was left");
    assert_all_by(&node.load_kept(&auto()), Route::NodeCache);
}

/// A small file system in memory. `None` if this process may mount none.
struct Small(PathBuf);

impl Small {
    fn mount(folder: &Path, size: &str) -> Option<Self> {
        let folder = folder.join("small");
        fs::create_dir_all(&folder).unwrap();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", size, "hoistway"]).arg(&folder).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Self(folder))
    }

    fn make_read_only(&self) {
        let done = Command::new("mount").args(["-o", "remount,ro"]).arg(&self.0).status();
        assert!(done.unwrap().success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn noted(loaded: &Report, text: &str) -> bool {
    loaded.notes.iter().any(|note| note.contains(text))
}

#[test]
fn a_full_and_a_read_only_drive_are_told_and_fail_no_load() {
    let node = Node::new();
    let Some(small) = Small::mount(node.folder.path(), "size=8m,mode=700") else {
        return requirements::skip(Requirement::Mount, "mount -t tmpfs is refused");
    };
    // By the system's refusal, and by what stays free on a drive.
    for max_bytes in [Some(1 << 40), None] {
        let cache = NodeCache::open(&small.0, max_bytes).unwrap();
        let checkpoint = node.open(cache.clone()).unwrap();
        assert_is_file(&checkpoint.load(&auto()).unwrap(), &node.file);
        cache.flush();
        let again = checkpoint.load(&auto()).unwrap();
        assert_is_file(&again, &node.file);
        assert!(noted(again.report(), "is not written to"), "{}", again.report());
        drop(checkpoint);
        assert_all_counted(&node.load_of(cache, &auto()));
    }
    small.make_read_only();
    let cache = NodeCache::open(&small.0, None).unwrap();
    let read_only = node.load_of(cache, &auto());
    assert_all_counted(&read_only);
    assert!(noted(&read_only, "is not"), "{read_only}");
}
