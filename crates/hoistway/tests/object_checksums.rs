//! Objects that are read whole have the checksum that their store says, or the load fails.
#![cfg(feature = "objects")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{assert_is_file, devices, tensor, write_model};
use hoistway::{
    Cancel, Carrier, Checkpoint, Dtype, Error, LoadOptions, Loaded, Report, Route,
    cache::NodeCache,
    catalog::OpenOptions,
    objects::StoreOptions,
    plan::{Layout, Selection},
    verify::{Manifest, ManifestEntry},
};
use objectd::{Checksums, Dialect, Fault, Faults, Heads, Server};
use std::{
    collections::BTreeSet,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

const S3: &str = "s3://models/llama/model.safetensors";
const GOOGLE: &str = "gs://models/llama/model.safetensors";
const CHUNK: u64 = 256 << 10;

/// A server with a checkpoint of a few reads, and the checkpoint.
fn serving() -> (Server, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let tensors = [
        tensor("a", Dtype::U8, &[1 << 20]),
        tensor("b", Dtype::F16, &[3, 100_003]),
        tensor("c", Dtype::U8, &[1 << 20]),
    ];
    let file = write_model(&directory.path().join("model.safetensors"), &tensors, 0, 5);
    (serve(&file), file)
}

fn serve(file: &[u8]) -> Server {
    let server = Server::start().unwrap();
    server.put("models/llama/model.safetensors", file);
    server
}

fn options(server: &Server) -> OpenOptions {
    let mut store = StoreOptions::default();
    for (name, value) in [("endpoint", &*server.url()), ("anonymous", "true")] {
        store.set(name, value).unwrap();
    }
    OpenOptions::default().store(store)
}

fn open(server: &Server, url: &str) -> Checkpoint {
    Checkpoint::open_with(&[url], &options(server)).unwrap()
}

/// Tries again what depends on how fast the machine is, for as long as the slowest may take.
fn eventually<T>(attempt: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    let mut attempts =
        std::iter::repeat_with(attempt).take_while(|_| begun.elapsed() < Duration::from_secs(120));
    attempts.find_map(|own| own).expect("no attempt had it")
}

/// Opens it, and loads until the store has said its checksum, for which no load waits.
fn open_known(server: &Server, url: &str) -> Checkpoint {
    let checkpoint = open(server, url);
    eventually(|| {
        let loaded = checkpoint.load(&LoadOptions::default()).unwrap();
        let checksums = loaded.report().checksums.as_ref().unwrap();
        checksums.uncompared.iter().all(|own| !own.reason.contains("had not said")).then_some(())
    });
    checkpoint
}

fn load(server: &Server, url: &str) -> hoistway::Result<Loaded> {
    open_known(server, url).load(&LoadOptions::default().chunk_bytes(CHUNK))
}

/// All objects have the checksum of their store.
fn assert_compared(report: &Report, bytes: usize, algorithm: &str) {
    let found = report.checksums.as_ref().unwrap();
    assert_eq!((found.objects, found.bytes), (1, bytes as u64), "{report}");
    assert_eq!((&*found.algorithms, &*found.uncompared), (&[algorithm.to_owned()][..], &[][..]), "{report}");
    assert!(report.to_string().contains(&format!("as the store's {algorithm} says")), "{report}");
}

fn assert_not_compared(report: &Report, why: &str) {
    let found = report.checksums.as_ref().unwrap();
    let reasons: Vec<_> = found.uncompared.iter().map(|own| (own.objects, &*own.reason)).collect();
    assert!(found.objects == 0 && reasons.len() == 1 && reasons[0].0 == 1, "{report}");
    assert!(reasons[0].1.contains(why), "{report}");
}

fn assert_differs(error: &Error, algorithm: &str) {
    let is_of_store = matches!(error, Error::ChecksumMismatch { path, checksum, expected, found }
        if path.ends_with("model.safetensors") && *checksum == algorithm && expected != found);
    assert!(is_of_store, "{error:?}");
    assert!(error.to_string().contains(algorithm), "{error}");
}

#[test]
fn every_way_of_a_whole_load_is_compared() {
    let (server, file) = serving();
    for (url, dialect, algorithm) in [(S3, Dialect::S3, "CRC-64/NVME"), (GOOGLE, Dialect::Google, "CRC-32C")]
    {
        server.speak(dialect);
        let checkpoint = open_known(&server, url);
        for device in devices() {
            for route in [Route::Auto, Route::Http, Route::Threads] {
                for layout in [Layout::File, Layout::Packed, Layout::Tensor] {
                    let load = LoadOptions::default().device(device).route(route).layout(layout);
                    for load in [load.clone().chunk_bytes(CHUNK), load] {
                        let loaded = checkpoint.load(&load).unwrap();
                        assert_is_file(&loaded, &file);
                        assert_compared(loaded.report(), file.len(), algorithm);
                    }
                }
            }
        }
    }
}

#[test]
fn a_bit_that_changes_on_the_way_fails_the_load_whichever_request_it_is_of() {
    let (server, file) = serving();
    for (url, dialect, algorithm) in [(S3, Dialect::S3, "CRC-64/NVME"), (GOOGLE, Dialect::Google, "CRC-32C")]
    {
        server.speak(dialect);
        server.fail(Faults::default());
        let checkpoint = open_known(&server, url);
        let load = || checkpoint.load(&LoadOptions::default().chunk_bytes(CHUNK));
        server.take_requests();
        load().unwrap();
        let ranges = server.take_requests().into_iter().filter_map(|request| request.range);
        let ranges: BTreeSet<_> = ranges.filter(|(first, _)| *first > 0).collect();
        assert!(ranges.len() > 5, "{ranges:?}");
        for (first, _) in ranges {
            server.fail(Faults::of_byte(first, Fault::Flip));
            assert_differs(&load().unwrap_err(), algorithm);
        }
        server.fail(Faults::default());
        let loaded = load().unwrap();
        assert_is_file(&loaded, &file);
    }
}

/// A file whose header has a text.
fn with_text(len: usize) -> Vec<u8> {
    with_text_of("a", len)
}

fn with_text_of(letter: &str, len: usize) -> Vec<u8> {
    let header = format!(
        r#"{{"__metadata__":{{"text":"{}"}},"a":{{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}}}"#,
        letter.repeat(len)
    );
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), b"123456789"].concat()
}

/// The header that a checkpoint was opened by is a part of what is compared, however long it is.
#[test]
fn a_bit_of_the_header_that_changes_fails_the_load() {
    for text_len in [700_000, 3 << 20, 20 << 20] {
        let file = with_text(text_len);
        let server = serve(&file);
        let loaded = load(&server, S3).unwrap();
        assert_compared(loaded.report(), file.len(), "CRC-64/NVME");
        server.fail(Faults { spares_first: false, ..Faults::only(1, Fault::Flip) });
        let checkpoint = open(&server, S3);
        let metadata = checkpoint.catalog().files()[0].metadata().unwrap();
        assert!(format!("{metadata:?}").contains('`'), "the bit is of the text");
        // The first loads may begin before the store has said its checksum.
        let error = eventually(|| {
            let loaded = checkpoint.load(&LoadOptions::default());
            loaded.map(|loaded| assert_not_compared(loaded.report(), "had not said")).err()
        });
        assert_differs(&error, "CRC-64/NVME");
    }
}

#[test]
fn checksums_of_parts_are_compared_if_the_parts_have_one_length() {
    let (server, file) = serving();
    for part_bytes in [CHUNK as usize, 300_007, file.len(), file.len() / 2 + 1] {
        server.fail(Faults::default());
        server.say_checksums(Checksums::Parts(part_bytes));
        let checkpoint = open_known(&server, S3);
        let load = LoadOptions::default().chunk_bytes(CHUNK);
        assert_compared(checkpoint.load(&load).unwrap().report(), file.len(), "CRC-32");
        server.fail(Faults::of_byte(3 * CHUNK as usize, Fault::Flip));
        let error = checkpoint.load(&load).unwrap_err();
        assert_differs(&error, "CRC-32");
    }
    server.fail(Faults::default());
    server.say_checksums(Checksums::UnevenParts(700_001));
    let loaded = load(&server, S3).unwrap();
    assert_is_file(&loaded, &file);
    assert_not_compared(loaded.report(), "differ in their lengths");
}

#[test]
fn a_load_of_a_part_is_not_compared_and_says_so() {
    let (server, _) = serving();
    let checkpoint = open_known(&server, S3);
    server.take_requests();
    let selection = Selection::all().select("a");
    let loaded = checkpoint.load(&LoadOptions::default().selection(selection)).unwrap();
    assert_not_compared(loaded.report(), "read in part");
    assert!(server.take_requests().iter().all(|request| request.method == "GET"));
    // The next load of the same checkpoint is whole.
    let loaded = checkpoint.load(&LoadOptions::default()).unwrap();
    assert_eq!(loaded.report().checksums.as_ref().unwrap().objects, 1);
}

#[test]
fn a_store_without_checksums_is_read_all_the_same() {
    let (server, file) = serving();
    server.say_checksums(Checksums::None);
    let web = format!("{}/models/llama/model.safetensors", server.url());
    for (url, dialect, why) in [
        (S3, Dialect::S3, "no checksum"),
        (GOOGLE, Dialect::Google, "no checksum"),
        (&*web, Dialect::S3, "no checksum of the whole object that can be computed from ranges"),
    ] {
        server.speak(dialect);
        let loaded = load(&server, url).unwrap();
        assert_is_file(&loaded, &file);
        assert_not_compared(loaded.report(), why);
    }
}

#[test]
fn a_verification_compares_with_the_digests_that_servers_have_of_whole_objects() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let (server, file) = serving();
    server.say_checksums(Checksums::Sha256);
    let (hub, elsewhere) = (Server::start().unwrap(), Server::start().unwrap());
    hub.lead_to(&elsewhere);
    hub.put_model("org/model", COMMIT);
    hub.put_file("org/model", "model.safetensors", &file, true);
    let on_hub = format!("hf://org/model@{COMMIT}/model.safetensors");
    let (azure, web, why) = (serve(&file), serve(&file), "from ranges");
    azure.speak(Dialect::Azure);
    azure.say_checksums(Checksums::BlobMd5);
    web.say_checksums(Checksums::ObjectDigests);
    let on_web = format!("{}/models/llama/model.safetensors", web.url());
    for (url, asked, sending, digest) in [
        (S3, &server, &server, "SHA-256"),
        (&*on_hub, &hub, &elsewhere, "SHA-256"),
        ("az://models/llama/model.safetensors", &azure, &azure, "MD5"),
        (&*on_web, &web, &web, "SHA-256"),
    ] {
        let checkpoint = open_known(asked, url);
        let load = LoadOptions::default().chunk_bytes(CHUNK);
        for device in devices() {
            let mut loaded = checkpoint.load(&load.clone().device(device)).unwrap();
            assert_not_compared(loaded.report(), why);
            checkpoint.verify(&mut loaded, None).unwrap();
            assert_is_file(&loaded, &file);
            assert_compared(loaded.report(), file.len(), digest);
        }
        sending.fail(Faults::of_byte(3 * CHUNK as usize, Fault::Flip));
        let mut loaded = checkpoint.load(&load).unwrap();
        sending.fail(Faults::default());
        // A second reading differs as well: the manifest of what was loaded does not.
        let manifest = of_loaded(&loaded);
        let error =
            checkpoint.verify(&mut loaded, Some((Path::new("manifest.json"), &manifest))).unwrap_err();
        assert_differs(&error, digest);
        // A load of a part is compared with nothing.
        let mut loaded = checkpoint.load(&load.clone().selection(Selection::all().select("a"))).unwrap();
        checkpoint.verify(&mut loaded, None).unwrap();
        assert_not_compared(loaded.report(), "read in part");
    }
}

/// The digests of what a load has brought.
fn of_loaded(loaded: &Loaded) -> Manifest {
    let tensors = loaded.tensors().iter().map(|tensor| {
        let digest = blake3::hash(&tensor.bytes().unwrap()).to_hex().to_string();
        let entry = ManifestEntry { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), digest };
        (tensor.name().to_owned(), entry)
    });
    Manifest { algorithm: "blake3".into(), tensors: tensors.collect() }
}

/// A load by a process that has an empty cache waits for what the store says.
#[test]
fn the_nodes_cache_keeps_nothing_of_an_object_that_differs() {
    let (server, file) = serving();
    let folder = tempfile::tempdir().unwrap();
    let flip = Faults::every(1, Fault::Flip);
    let error = load_anew_by(&server, folder.path(), Route::Auto, Some(flip)).unwrap_err();
    assert_differs(&error, "CRC-64/NVME");
    assert_eq!(kept_bytes(folder.path()), 0);
    server.fail(Faults::default());
    // From the store again, and then from the cache.
    for route in [Route::Http, Route::NodeCache] {
        let loaded = load_anew(&server, folder.path()).unwrap();
        assert_is_file(&loaded, &file);
        assert_compared(loaded.report(), file.len(), "CRC-64/NVME");
        // The first may read from the cache what it has just kept there, and on a slow machine all of it.
        let by_route = |own: &&Carrier| own.route == route;
        let bytes: u64 = loaded.report().carriers.iter().filter(by_route).map(|own| own.tensor_bytes).sum();
        assert!(route == Route::Http || bytes == loaded.report().tensor_bytes, "{}", loaded.report());
    }
}

#[test]
fn what_comes_from_the_store_is_compared_whatever_the_nodes_cache_holds() {
    let (server, file) = serving();
    let folder = tempfile::tempdir().unwrap();
    for route in [Route::Auto, Route::Http, Route::Threads, Route::NodeCache] {
        assert_is_file(&load_anew(&server, folder.path()).unwrap(), &file);
        let loaded = load_anew_by(&server, folder.path(), route, None).unwrap();
        assert_is_file(&loaded, &file);
        assert_compared(loaded.report(), file.len(), "CRC-64/NVME");
        if [Route::Http, Route::Threads].contains(&route) {
            let flip = Faults::every(1, Fault::Flip);
            let error = load_anew_by(&server, folder.path(), route, Some(flip)).unwrap_err();
            assert_differs(&error, "CRC-64/NVME");
            server.fail(Faults::default());
        }
    }
}

/// Blocks with checksums of their own that are not those of the object: a load that was not compared may have left them.
#[test]
fn a_cache_that_has_kept_other_bytes_fails_one_load_and_is_filled_again() {
    let (server, file) = serving();
    let folder = tempfile::tempdir().unwrap();
    {
        let cache = NodeCache::open(folder.path(), Some(1 << 30)).unwrap();
        let mut store = StoreOptions::default();
        for (name, value) in [("endpoint", &*server.url()), ("anonymous", "true"), ("checksums", "off")] {
            store.set(name, value).unwrap();
        }
        server.fail(Faults::every(1, Fault::Flip));
        let options = OpenOptions::default().store(store).cache(cache.clone());
        Checkpoint::open_with(&[S3], &options)
            .unwrap()
            .load(&LoadOptions::default().chunk_bytes(CHUNK))
            .unwrap();
        cache.flush();
        server.fail(Faults::default());
    }
    assert_differs(&load_anew(&server, folder.path()).unwrap_err(), "CRC-64/NVME");
    for _ in 0..2 {
        let loaded = load_anew(&server, folder.path()).unwrap();
        assert_is_file(&loaded, &file);
        assert_compared(loaded.report(), file.len(), "CRC-64/NVME");
    }
}

/// Opens it with a cache, as another process does: it knows nothing of what the store did before.
fn open_anew(server: &Server, folder: &Path) -> (Checkpoint, NodeCache) {
    open_anew_within(server, folder, 1 << 30)
}

/// The same, with so many bytes for the cache.
fn open_anew_within(server: &Server, folder: &Path, most: u64) -> (Checkpoint, NodeCache) {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let mut store = StoreOptions::default();
    let key = format!("key{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    for (name, value) in
        [("endpoint", &*server.url()), ("access_key_id", &key), ("secret_access_key", "canary")]
    {
        store.set(name, value).unwrap();
    }
    let cache = NodeCache::open(folder, Some(most)).unwrap();
    (Checkpoint::open_with(&[S3], &OpenOptions::default().store(store).cache(cache.clone())).unwrap(), cache)
}

/// Loads as another process does, until the store's answer came in time: on a slow machine not the first time.
fn load_anew(server: &Server, folder: &Path) -> hoistway::Result<Loaded> {
    load_anew_by(server, folder, Route::Auto, None)
}

/// The same by a route, with something that goes wrong.
fn load_anew_by(
    server: &Server,
    folder: &Path,
    route: Route,
    faults: Option<Faults>,
) -> hoistway::Result<Loaded> {
    eventually(|| {
        let (checkpoint, cache) = open_anew(server, folder);
        faults.iter().for_each(|faults| server.fail(*faults));
        let loaded = checkpoint.load(&LoadOptions::default().chunk_bytes(CHUNK).route(route));
        cache.flush();
        let is_uncompared = |loaded: &Loaded| loaded.report().checksums.as_ref().unwrap().objects == 0;
        (!loaded.as_ref().is_ok_and(is_uncompared)).then_some(loaded)
    })
}

fn kept_bytes(folder: &Path) -> u64 {
    NodeCache::open(folder, Some(1 << 30)).unwrap().verify().unwrap().bytes
}

#[test]
fn what_was_kept_uncompared_is_compared_by_the_next_loads_until_one_has_read_all_of_it_from_the_cache() {
    for refusal in [Heads::Hold, Heads::Refuse(403)] {
        let (server, file) = serving();
        let folder = tempfile::tempdir().unwrap();
        server.answer_heads(refusal);
        server.fail(Faults::every(1, Fault::Flip));
        {
            let (checkpoint, cache) = open_anew(&server, folder.path());
            let loaded = checkpoint.load(&LoadOptions::default().chunk_bytes(CHUNK)).unwrap();
            assert_not_compared(loaded.report(), "its checksum");
            cache.flush();
        }
        server.fail(Faults::default());
        assert_eq!(kept_bytes(folder.path()), file.len() as u64);
        // It counts as right for none of these.
        server.answer_heads(Heads::Answer);
        assert_differs(&load_anew(&server, folder.path()).unwrap_err(), "CRC-64/NVME");
        assert_eq!(kept_bytes(folder.path()), 0);
        // It is filled again, and then compared as the cache holds it.
        load_anew_from_cache(&server, folder.path(), &file);
        // Then it waits for no store.
        let loaded = load_unsaid(&server, folder.path());
        assert_is_file(&loaded, &file);
        assert_eq!(by_cache(&loaded), loaded.report().tensor_bytes, "{}", loaded.report());
        assert_not_compared(loaded.report(), PROVEN);
    }
}

/// Why a load is not compared that waits for no store: what the node's cache holds is proven.
const PROVEN: &str = "an earlier load has compared";

/// The bytes of tensors that the node's cache brought.
fn by_cache(loaded: &Loaded) -> u64 {
    let own = |own: &&Carrier| own.route == Route::NodeCache;
    loaded.report().carriers.iter().filter(own).map(|own| own.tensor_bytes).sum()
}

/// Loads as other processes do, until all has come from the cache, and was compared.
fn load_anew_from_cache(server: &Server, folder: &Path, file: &[u8]) {
    eventually(|| {
        let loaded = load_anew(server, folder).unwrap();
        assert_is_file(&loaded, file);
        (by_cache(&loaded) == loaded.report().tensor_bytes).then_some(())
    });
}

/// Loads as another process does while the store does not say its checksum.
fn load_unsaid(server: &Server, folder: &Path) -> Loaded {
    server.answer_heads(Heads::Hold);
    let (checkpoint, cache) = open_anew(server, folder);
    let loaded = checkpoint.load(&LoadOptions::default().chunk_bytes(CHUNK)).unwrap();
    cache.flush();
    server.answer_heads(Heads::Answer);
    loaded
}

/// What of a header has come from the store says nothing of the blocks that the node's cache has of it.
#[test]
fn a_header_that_came_from_the_store_proves_nothing_that_the_nodes_cache_holds() {
    for text_len in [2 << 20, 12 << 20] {
        let file = with_text(text_len);
        let server = serve(&file);
        let folder = eventually(|| {
            let folder = tempfile::tempdir().unwrap();
            // It keeps nothing itself.
            let (first, _cache) = open_anew_within(&server, folder.path(), 1);
            server.answer_heads(Heads::Hold);
            server.fail(Faults::every(1, Fault::Flip));
            let (second, cache) = open_anew(&server, folder.path());
            server.fail(Faults::default());
            let metadata = second.catalog().files()[0].metadata().unwrap();
            assert!(format!("{metadata:?}").contains('`'), "the bit is of the text");
            let loaded = second.load(&LoadOptions::default().chunk_bytes(CHUNK)).unwrap();
            assert_not_compared(loaded.report(), "its checksum");
            cache.flush();
            assert_eq!(kept_bytes(folder.path()), file.len() as u64);
            server.answer_heads(Heads::Answer);
            let loaded = first.load(&LoadOptions::default().chunk_bytes(CHUNK)).unwrap();
            assert_eq!(by_cache(&loaded), loaded.report().tensor_bytes, "{}", loaded.report());
            // The store's answer may come late on a slow machine.
            let is_compared = loaded.report().checksums.as_ref().unwrap().objects > 0;
            is_compared.then_some(folder)
        });
        let later = load_unsaid(&server, folder.path());
        let found = &later.report().checksums.as_ref().unwrap().uncompared;
        assert!(found.len() == 1 && !found[0].reason.contains(PROVEN), "{found:?}");
        assert_differs(&load_anew(&server, folder.path()).unwrap_err(), "CRC-64/NVME");
        // Once the header comes from the cache, too, all of it is proven.
        load_anew_from_cache(&server, folder.path(), &file);
        load_anew_from_cache(&server, folder.path(), &file);
        assert_not_compared(load_unsaid(&server, folder.path()).report(), PROVEN);
    }
}

/// No comparison would come to it.
#[test]
fn a_header_that_is_invalid_is_not_left_in_the_nodes_cache() {
    for text_len in [2 << 20, 12 << 20] {
        // A flipped bit makes quotation marks of these.
        let file = with_text_of("#", text_len);
        let server = serve(&file);
        let folder = tempfile::tempdir().unwrap();
        let cache = NodeCache::open(folder.path(), Some(1 << 30)).unwrap();
        let open = || Checkpoint::open_with(&[S3], &options(&server).cache(cache.clone()));
        server.fail(Faults::every(1, Fault::Flip));
        let error = open().unwrap_err();
        assert!(matches!(error, Error::InvalidFile { .. }), "{error:?}");
        cache.flush();
        server.fail(Faults::default());
        open().unwrap();
    }
}

/// The checkpoint cannot be opened, so no load compares the header.
#[test]
fn a_header_that_contradicts_its_index_is_not_left_in_the_nodes_cache() {
    // The flipped bit is of the name.
    let (text, name) = ("a".repeat(1 << 20), "b".repeat(600_000));
    let header = format!(
        r#"{{"__metadata__":{{"text":"{text}"}},"{name}":{{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}}}"#
    );
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), b"123456789"].concat();
    let server = serve(&file);
    // A long index is not kept either.
    for text in ["", &text] {
        let index =
            format!(r#"{{"metadata":{{"text":"{text}"}},"weight_map":{{"{name}":"model.safetensors"}}}}"#);
        server.put("models/llama/model.safetensors.index.json", index.as_bytes());
        let folder = tempfile::tempdir().unwrap();
        let cache = NodeCache::open(folder.path(), Some(1 << 30)).unwrap();
        let url = "s3://models/llama/model.safetensors.index.json";
        let open = || Checkpoint::open_with(&[url], &options(&server).cache(cache.clone()));
        server.fail(Faults { spares_first: true, ..Faults::every(1, Fault::Flip) });
        let error = open().unwrap_err();
        assert!(matches!(error, Error::InvalidIndex { .. }), "{error:?}");
        cache.flush();
        server.fail(Faults::default());
        open().unwrap();
    }
}

/// What is proven holds no wrong bytes: those that came are of the store, or were compared with something else.
#[test]
fn a_cache_that_is_proven_keeps_what_it_holds_whatever_comes_from_the_store() {
    let (server, file) = serving();
    let folder = tempfile::tempdir().unwrap();
    load_anew_from_cache(&server, folder.path(), &file);
    let flip = Faults::every(1, Fault::Flip);
    let error = load_anew_by(&server, folder.path(), Route::Http, Some(flip)).unwrap_err();
    assert_differs(&error, "CRC-64/NVME");
    server.fail(Faults::default());
    assert_eq!(kept_bytes(folder.path()), file.len() as u64);
    let mut loaded = load_unsaid(&server, folder.path());
    assert_not_compared(loaded.report(), PROVEN);
    let mut other = of_loaded(&loaded);
    other.tensors.values_mut().for_each(|own| own.digest = "0".repeat(64));
    let (checkpoint, _cache) = open_anew(&server, folder.path());
    let error = checkpoint.verify(&mut loaded, Some((Path::new("manifest.json"), &other))).unwrap_err();
    assert!(matches!(error, Error::DigestMismatch { .. }), "{error:?}");
    assert_eq!(kept_bytes(folder.path()), file.len() as u64);
}

/// A verification that finds wrong bytes leaves none of them in the node's cache.
#[test]
fn a_verification_discards_what_the_nodes_cache_holds_of_wrong_bytes() {
    for against_store in [true, false] {
        let (server, _) = serving();
        let folder = tempfile::tempdir().unwrap();
        server.answer_heads(if against_store { Heads::Hold } else { Heads::Refuse(403) });
        server.fail(Faults::every(1, Fault::Flip));
        let (checkpoint, cache) = open_anew(&server, folder.path());
        let mut loaded = checkpoint.load(&LoadOptions::default().chunk_bytes(CHUNK)).unwrap();
        cache.flush();
        assert!(kept_bytes(folder.path()) > 0);
        server.fail(Faults::default());
        server.answer_heads(if against_store { Heads::Answer } else { Heads::Refuse(403) });
        let manifest = of_loaded(&loaded);
        let manifest = against_store.then(|| (Path::new("manifest.json"), &manifest));
        match checkpoint.verify(&mut loaded, manifest).unwrap_err() {
            // The store is asked again, and has more time.
            error if against_store => assert_differs(&error, "CRC-64/NVME"),
            error => assert!(matches!(error, Error::DigestMismatch { .. }), "{error:?}"),
        }
        cache.flush();
        assert_eq!(kept_bytes(folder.path()), 0);
    }
}

#[test]
fn a_verification_makes_up_for_a_load_that_was_not_compared() {
    let load = LoadOptions::default().chunk_bytes(CHUNK);
    for (checksums, algorithm) in [(Checksums::Whole, "CRC-64/NVME"), (Checksums::Parts(1 << 20), "CRC-32")] {
        let (server, file) = serving();
        server.say_checksums(checksums);
        server.answer_heads(Heads::Hold);
        let checkpoint = open(&server, S3);
        let mut loaded = checkpoint.load(&load).unwrap();
        server.fail(Faults::of_byte(3 * CHUNK as usize, Fault::Flip));
        let mut flipped = checkpoint.load(&load).unwrap();
        server.fail(Faults::default());
        // However late it is: a verification asks the store again.
        server.answer_heads(Heads::Answer);
        let manifest = of_loaded(&flipped);
        let manifest = Some((Path::new("manifest.json"), &manifest));
        assert_differs(&checkpoint.verify(&mut flipped, manifest).unwrap_err(), algorithm);
        checkpoint.verify(&mut loaded, None).unwrap();
        assert_compared(loaded.report(), file.len(), algorithm);
        assert!(server.heads_answered() > 0);
    }
}

/// What comes to be compared last has as much time as the first: all stores are asked before that begins.
#[test]
fn a_verification_asks_for_all_checksums_before_it_compares() {
    const SHARDS: usize = 100;
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start().unwrap();
    for number in 0..SHARDS {
        let file = write_model(
            &directory.path().join("model.safetensors"),
            &[tensor(&format!("t{number}"), Dtype::U8, &[9])],
            0,
            5,
        );
        server.put(&format!("models/set/{number}.safetensors"), &file);
    }
    server.answer_heads(Heads::Hold);
    let checkpoint = open(&server, "s3://models/set/");
    // Until none of the questions of its opening waits.
    let mut loaded = eventually(|| {
        let loaded = checkpoint.load(&LoadOptions::default()).unwrap();
        let uncompared = &loaded.report().checksums.as_ref().unwrap().uncompared;
        (uncompared.len() == 1 && uncompared[0].reason.contains("in time")).then_some(loaded)
    });
    server.answer_heads(Heads::Answer);
    server.take_requests();
    // The loaded bytes are not read again, and the headers are as each is compared.
    let manifest = of_loaded(&loaded);
    checkpoint.verify(&mut loaded, Some((Path::new("manifest.json"), &manifest))).unwrap();
    assert_eq!(loaded.report().checksums.as_ref().unwrap().objects, SHARDS, "{}", loaded.report());
    let is_head: Vec<_> = server.take_requests().iter().map(|own| own.method == "HEAD").collect();
    assert!(is_head.len() > SHARDS && is_head[..SHARDS].iter().all(|own| *own), "{is_head:?}");
}

/// A question that ends because the caller does is none that the store has not answered.
#[test]
fn a_verification_that_is_cancelled_as_it_asks_is_cancelled() {
    let (server, _) = serving();
    server.answer_heads(Heads::Hold);
    let checkpoint = open(&server, S3);
    let mut loaded = checkpoint.load(&LoadOptions::default()).unwrap();
    let manifest = of_loaded(&loaded);
    let manifest = Some((Path::new("manifest.json"), &manifest));
    let cancel = Cancel::default();
    let verified = std::thread::scope(|scope| {
        let verifying = scope.spawn(|| checkpoint.verify_until(&cancel, &mut loaded, manifest));
        // That of the opening, and that of the verification.
        let heads = || server.take_requests().iter().filter(|own| own.method == "HEAD").count();
        let mut came = 0;
        eventually(|| {
            came += heads();
            (came > 1).then_some(())
        });
        cancel.cancel();
        verifying.join().unwrap()
    });
    assert!(matches!(verified, Err(Error::Cancelled)), "{verified:?}");
    assert!(loaded.report().verify.is_none());
}

#[test]
fn a_load_waits_for_no_answer_that_hangs() {
    let (server, file) = serving();
    server.answer_heads(Heads::Hang);
    let loaded = open(&server, S3).load(&LoadOptions::default()).unwrap();
    assert_is_file(&loaded, &file);
    let found = &loaded.report().checksums.as_ref().unwrap().uncompared;
    assert!(found.iter().any(|own| own.reason.contains("the store")), "{found:?}");
    // They hang until the server is dropped.
    assert_eq!(server.heads_answered(), 0);
}

#[test]
fn a_store_that_refuses_is_asked_once() {
    for status in [403, 405] {
        let (server, file) = serving();
        server.answer_heads(Heads::Refuse(status));
        assert_is_file(&load(&server, S3).unwrap(), &file);
        server.take_requests();
        let loaded = load(&server, S3).unwrap();
        assert_not_compared(loaded.report(), "refuses");
        assert!(server.take_requests().iter().all(|request| request.method == "GET"));
    }
}

#[test]
fn a_checksum_that_may_be_of_parts_is_not_compared() {
    let (server, file) = serving();
    server.say_checksums(Checksums::UncountedParts(CHUNK as usize));
    let loaded = load(&server, S3).unwrap();
    assert_is_file(&loaded, &file);
    assert_not_compared(loaded.report(), "says not whether");
}

#[test]
fn an_option_turns_the_comparison_off_as_its_error_says() {
    let (server, _) = serving();
    server.speak(Dialect::Google);
    server.fail(Faults::of_byte(CHUNK as usize, Fault::Flip));
    let error = open(&server, GOOGLE).load(&LoadOptions::default().chunk_bytes(CHUNK)).unwrap_err();
    assert!(error.to_string().contains("checksums=off"), "{error}");
    server.speak(Dialect::S3);
    server.take_requests();
    let mut store = StoreOptions::default();
    for (name, value) in [("endpoint", &*server.url()), ("anonymous", "true"), ("checksums", "off")] {
        store.set(name, value).unwrap();
    }
    let checkpoint = Checkpoint::open_with(&[S3], &OpenOptions::default().store(store)).unwrap();
    let loaded = checkpoint.load(&LoadOptions::default()).unwrap();
    assert_not_compared(loaded.report(), "is off");
    assert!(server.take_requests().iter().all(|request| request.method == "GET"));
}
