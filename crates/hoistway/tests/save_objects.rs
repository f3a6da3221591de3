//! Saving to an object store: what is loaded again is what was saved, and what goes wrong leaves the old objects and no upload.
#![cfg(feature = "objects")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{
    devices,
    saving::{Owned, assert_is, data, go_on, mixed, owned, reference},
};
use hoistway::{
    Checkpoint, DeviceId, DirectIo, Dtype, Error, LoadOptions, Loaded,
    catalog::OpenOptions,
    objects::StoreOptions,
    save::{SaveOptions, SaveReport, Sharding, TensorData, save, save_sharded},
};
use objectd::{Checksums, Dialect, Server, Step, WriteFault};
use std::{
    ops::ControlFlow,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

const URL: &str = "s3://models/llama/model.safetensors";
const PATH: &str = "models/llama/model.safetensors";
const FOLDER: &str = "s3://models/llama";
const CANARY: &str = "canary";
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);
/// Less than the time that a cleanup has.
const FOR_CLEANUP: Duration = Duration::from_secs(9);

/// Whether a save was left without its cleanup, and tells so, because this machine was away for all of the time for it.
fn was_away(begun: Instant, error: &Error) -> bool {
    let text = error.to_string();
    let is_told = text.contains("could not be removed") || text.contains("stay that no index names");
    is_told && begun.elapsed() >= FOR_CLEANUP
}

fn store(server: &Server) -> StoreOptions {
    let mut store = StoreOptions::default();
    for (name, value) in
        [("endpoint", &*server.url()), ("access_key_id", "key"), ("secret_access_key", CANARY)]
    {
        store.set(name, value).unwrap();
    }
    store
}

fn options(server: &Server) -> SaveOptions {
    SaveOptions::default().store(store(server))
}

fn save_to(server: &Server, tensors: &[Owned]) -> hoistway::Result<SaveReport> {
    save(URL.as_ref(), &data(tensors), None, &options(server), go_on)
}

fn save_shards(server: &Server, tensors: &[Owned], max_shard_bytes: u64) -> hoistway::Result<SaveReport> {
    let sharding = Sharding::default().max_shard_bytes(max_shard_bytes);
    save_sharded(FOLDER.as_ref(), &data(tensors), None, &sharding, &options(server), go_on)
}

fn load(server: &Server, url: &str) -> Loaded {
    let open = OpenOptions::default().store(store(server));
    let checkpoint = Checkpoint::open_with(&[url], &open).unwrap();
    checkpoint.load(&LoadOptions::default()).unwrap()
}

/// Five tensors of 4 MiB and one of 20 MiB.
fn large(seed: u8) -> Vec<Owned> {
    let mut tensors: Vec<_> =
        (0..5).map(|number| owned(&format!("t{number}"), Dtype::F16, &[2 << 20], seed)).collect();
    tensors.push(owned("t9", Dtype::U8, &[20 << 20], seed));
    tensors
}

#[test]
fn an_object_has_the_bytes_of_the_reference() {
    let server = Server::start().unwrap();
    for tensors in [mixed(), vec![owned("a", Dtype::F32, &[10], 1)]] {
        let report = save_to(&server, &tensors).unwrap();
        let expected = reference(&tensors);
        assert!(server.object(PATH).unwrap() == expected);
        assert_is(&load(&server, URL), &tensors);
        let len = expected.len() as u64;
        assert_eq!((report.file_bytes, report.uploaded_bytes), (len, len));
        assert_eq!(report.parts, len.div_ceil(8 << 20));
        assert_eq!(report.checksum.as_deref(), Some("CRC-64/NVME"));
        assert_eq!(report.paths, [std::path::PathBuf::from(URL)]);
        assert!(report.synced && report.notes.is_empty() && report.staged_bytes == 0, "{report}");
        let text = report.to_string();
        assert!(text.contains("http") && text.contains("stored") && !text.contains(CANARY), "{text}");
    }
    assert!(server.open_uploads().is_empty());
}

#[test]
fn progress_adds_up_to_the_bytes() {
    let (server, tensors) = (Server::start().unwrap(), mixed());
    let told = AtomicU64::new(0);
    let go_on = |bytes| {
        told.fetch_add(bytes, Ordering::Relaxed);
        ControlFlow::Continue(())
    };
    let report = save(URL.as_ref(), &data(&tensors), None, &options(&server), go_on).unwrap();
    assert_eq!(told.into_inner(), report.file_bytes);
}

#[test]
fn the_index_is_written_last_and_names_the_new_files_alone() {
    let server = Server::start().unwrap();
    let first = large(1);
    let report = save_shards(&server, &first, 9 << 20).unwrap();
    assert_eq!(report.files, 4, "{report}");
    assert_is(&load(&server, &format!("{FOLDER}/")), &first);
    let requests = server.take_requests();
    let last_write = requests.iter().rev().find(|own| own.method != "GET" && own.method != "HEAD").unwrap();
    assert!(last_write.target.contains("model.safetensors.index.json"), "{last_write:?}");
    // All parts are there before the first object is shown.
    let shown = requests.iter().position(|own| {
        own.method == "PUT" && !own.target.contains("uploadId")
            || own.target.contains("uploadId") && own.method == "POST"
    });
    let part = requests.iter().rposition(|own| own.target.contains("partNumber"));
    assert!(shown > part, "{requests:?}");
    // A second save takes other names, and the first one's files stay.
    let second = large(2);
    let report = save_shards(&server, &second, 9 << 20).unwrap();
    assert!(report.paths[0].to_string_lossy().contains("model-set2-00001-of-00004"), "{report}");
    assert!(report.notes.iter().any(|note| note.contains("4 files of an earlier save stay")), "{report}");
    assert_is(&load(&server, &format!("{FOLDER}/")), &second);
    // One file has an index, too, where one is.
    let third = [owned("a", Dtype::F32, &[10], 3)];
    let report = save_shards(&server, &third, 9 << 20).unwrap();
    assert_eq!(report.paths.len(), 2);
    assert_is(&load(&server, &format!("{FOLDER}/")), &third);
    assert!(server.open_uploads().is_empty());
}

#[test]
fn a_set_in_azure_is_written_in_blocks_and_its_index_last() {
    let server = Server::start().unwrap();
    server.speak(Dialect::Azure);
    let mut store = StoreOptions::default();
    let endpoint = format!("{}/account", server.url());
    for (name, value) in [("endpoint", &*endpoint), ("account", "account"), ("account_key", "Y2FuYXJ5")] {
        store.set(name, value).unwrap();
    }
    let save_set = |tensors: &[Owned]| {
        let sharding = Sharding::default().max_shard_bytes(9 << 20);
        let options = SaveOptions::default().store(store.clone());
        save_sharded("az://models/llama".as_ref(), &data(tensors), None, &sharding, &options, go_on)
    };
    let cancel = || {
        let go_on = |bytes| if bytes > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let options = SaveOptions::default().store(store.clone());
        save("az://models/other.safetensors".as_ref(), &data(&large(3)), None, &options, go_on)
    };
    let load = || {
        let open = OpenOptions::default().store(store.clone());
        let checkpoint = Checkpoint::open_with(&["az://models/llama/"], &open).unwrap();
        checkpoint.load(&LoadOptions::default()).unwrap()
    };
    let first = large(1);
    let report = save_set(&first).unwrap();
    assert_eq!((report.files, report.checksum.as_deref()), (4, Some("CRC-64/NVME")), "{report}");
    assert_is(&load(), &first);
    let requests = server.take_requests();
    let last_write = requests.iter().rev().find(|own| own.method == "PUT").unwrap();
    assert!(last_write.target.contains("model.safetensors.index.json"), "{last_write:?}");
    // All blocks are there before the first blob is shown.
    let shown = requests.iter().position(|own| own.target.contains("comp=blocklist"));
    let block = requests.iter().rposition(|own| own.target.ends_with("comp=block"));
    assert!(block.is_some() && shown > block, "{requests:?}");
    // A save that fails leaves what was there, and says that blocks stay for a while.
    server.fail_writes(Step::Complete, usize::MAX, WriteFault::Status(403));
    let error = save_set(&large(2)).unwrap_err();
    assert!(error.to_string().contains("for a week"), "{error}");
    assert_is(&load(), &first);
    // One that is cancelled is no failure: Azure drops the blocks.
    let error = cancel().unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error}");
    assert!(server.open_uploads().contains(&"account/models/other.safetensors".to_owned()));
}

#[test]
fn one_file_in_a_new_folder_needs_no_index() {
    let (server, tensors) = (Server::start().unwrap(), mixed());
    for _ in 0..2 {
        let report = save_shards(&server, &tensors, 1 << 30).unwrap();
        assert_eq!(report.paths, [std::path::PathBuf::from(URL)], "{report}");
        assert_is(&load(&server, &format!("{FOLDER}/")), &tensors);
    }
}

#[test]
fn a_save_that_fails_leaves_the_old_object_and_no_upload() {
    let tensors = mixed();
    for (step, fault) in [
        (Step::Create, WriteFault::Status(403)),
        (Step::Part, WriteFault::Status(403)),
        (Step::Complete, WriteFault::Status(403)),
        (Step::Complete, WriteFault::ErrorInBody("InvalidPart")),
    ] {
        let server = Server::start().unwrap();
        server.put(PATH, b"old");
        server.fail_writes(step, usize::MAX, fault);
        let begun = Instant::now();
        let error = save_to(&server, &tensors).unwrap_err();
        let was_away = was_away(begun, &error);
        let Error::Io { operation: "upload", path, range, .. } = &error else { panic!("{error:?}") };
        assert_eq!(path.to_str(), Some(URL));
        assert_eq!(range.is_some(), step == Step::Part, "{error}");
        assert!(!format!("{error} {error:?}").contains(CANARY));
        assert_eq!(server.object(PATH).unwrap(), b"old");
        assert!(was_away || server.open_uploads().is_empty(), "{step:?} {fault:?}");
    }
}

#[test]
fn a_set_that_fails_leaves_what_was_there() {
    let first = large(1);
    for (step, fault) in [
        (Step::Part, WriteFault::Status(403)),
        (Step::Complete, WriteFault::Status(403)),
        (Step::Put, WriteFault::Status(403)),
    ] {
        let server = Server::start().unwrap();
        save_shards(&server, &first, 9 << 20).unwrap();
        server.fail_writes(step, usize::MAX, fault);
        let begun = Instant::now();
        let error = save_shards(&server, &large(2), 9 << 20).unwrap_err();
        let was_away = was_away(begun, &error);
        assert_is(&load(&server, &format!("{FOLDER}/")), &first);
        if was_away {
            continue;
        }
        assert!(server.open_uploads().is_empty(), "{step:?}");
        assert!(server.object("models/llama/model-set2-00001-of-00004.safetensors").is_none(), "{step:?}");
    }
}

fn is_doubtful(error: &Error) -> bool {
    matches!(error, Error::Io { .. })
        && error.to_string().contains("it is not known whether the object was replaced")
}

/// Two tensors, each in a shard that is sent in parts.
fn two(seed: u8) -> Vec<Owned> {
    ["a", "b"].map(|name| owned(name, Dtype::U8, &[9 << 20], seed)).into()
}

const INDEX: &str = "models/llama/model.safetensors.index.json";
const SECOND: &str = "models/llama/model-set2-00001-of-00002.safetensors";

#[test]
fn an_index_that_may_have_been_replaced_keeps_the_shards_that_it_names() {
    let folder = format!("{FOLDER}/");
    let (first, second) = (two(1), two(2));
    // An answer is lost, and what follows it does not decide.
    let (lost, unavailable) = (WriteFault::Lost, WriteFault::Unavailable);
    for (checksums, fault, last) in [
        (Checksums::Whole, lost, 403),
        (Checksums::None, lost, 403),
        (Checksums::None, lost, 500),
        (Checksums::Whole, unavailable, 403),
        (Checksums::None, unavailable, 403),
    ] {
        let server = Server::start().unwrap();
        save_shards(&server, &first, 9 << 20).unwrap();
        server.say_checksums(checksums);
        server.fail_writes(Step::Put, 1, fault);
        server.then_fail_writes(Step::Put, usize::MAX, WriteFault::Status(last));
        let done = save_shards(&server, &second, 9 << 20);
        match checksums {
            Checksums::Whole => drop(done.unwrap()),
            _ => {
                let error = done.unwrap_err();
                assert!(is_doubtful(&error), "{error}");
                assert!(error.to_string().contains("the new shards stay"), "{error}");
            }
        }
        assert_is(&load(&server, &folder), &second);
    }
    // Errors of the store alone: the old index stands.
    let server = Server::start().unwrap();
    save_shards(&server, &first, 9 << 20).unwrap();
    server.fail_writes(Step::Put, usize::MAX, WriteFault::Status(500));
    let error = save_shards(&server, &second, 9 << 20).unwrap_err();
    assert!(is_doubtful(&error), "{error}");
    assert!(server.object(SECOND).is_some());
    assert_is(&load(&server, &folder), &first);
}

#[test]
fn an_index_that_was_refused_takes_its_shards_back_and_what_stays_is_named() {
    let (first, second) = (two(1), two(2));
    for removes in [true, false] {
        let server = Server::start().unwrap();
        save_shards(&server, &first, 9 << 20).unwrap();
        server.fail_writes(Step::Put, usize::MAX, WriteFault::Status(403));
        if !removes {
            server.then_fail_writes(Step::Remove, usize::MAX, WriteFault::Status(403));
        }
        let begun = Instant::now();
        let error = save_shards(&server, &second, 9 << 20).unwrap_err();
        let was_away = was_away(begun, &error);
        assert_is(&load(&server, &format!("{FOLDER}/")), &first);
        if was_away {
            continue;
        }
        let text = error.to_string();
        assert_eq!(server.object(SECOND).is_none(), removes, "{text}");
        assert_eq!(text.contains(SECOND), !removes, "{text}");
    }
}

#[test]
fn a_cancellation_while_the_index_is_on_its_way_keeps_the_shards() {
    let server = Server::start().unwrap();
    save_shards(&server, &two(1), 9 << 20).unwrap();
    let before = server.received(Step::Put);
    server.fail_writes(Step::Put, usize::MAX, WriteFault::Stall(Duration::from_secs(600)));
    let (begun, second) = (Instant::now(), two(2));
    // Only the index is written by one request.
    let waits = |_| match server.received(Step::Put) > before {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    let sharding = Sharding::default().max_shard_bytes(9 << 20);
    let options = options(&server);
    let error = save_sharded(FOLDER.as_ref(), &data(&second), None, &sharding, &options, waits).unwrap_err();
    assert!(is_doubtful(&error), "{error}");
    assert!(begun.elapsed() < LONG);
    assert!(server.object(SECOND).is_some());
    // The index that was on its way, should it come later.
    server.fail_writes(Step::Put, 0, WriteFault::Lost);
    let index = String::from_utf8(server.object(INDEX).unwrap()).unwrap();
    server.put(INDEX, index.replace("model-0", "model-set2-0").as_bytes());
    assert_is(&load(&server, &format!("{FOLDER}/")), &second);
}

#[test]
fn a_store_that_refuses_checksums_takes_an_index_too() {
    let server = Server::start().unwrap();
    server.fail_writes(Step::Create, usize::MAX, WriteFault::NoChecksums);
    server.then_fail_writes(Step::Put, usize::MAX, WriteFault::NoChecksums);
    let report = save_shards(&server, &two(1), 9 << 20).unwrap();
    assert!(report.checksum.is_none(), "{report}");
    assert_is(&load(&server, &format!("{FOLDER}/")), &two(1));
}

#[test]
fn an_abort_that_fails_leaves_the_upload_and_not_the_object() {
    let server = Server::start().unwrap();
    server.fail_writes(Step::Abort, usize::MAX, WriteFault::Status(403));
    let tensors = mixed();
    let data = data(&tensors);
    let refused = |bytes| if bytes > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let begun = Instant::now();
    let error = save(URL.as_ref(), &data, None, &options(&server), refused).unwrap_err();
    let is_told = error.to_string().contains("could not be removed (the server denies access");
    assert!(is_told || was_away(begun, &error), "{error}");
    assert_eq!(server.open_uploads(), [PATH]);
    assert!(server.object(PATH).is_none());
}

#[test]
fn a_save_is_cancelled_while_the_store_does_not_answer() {
    for step in [Step::Part, Step::Put] {
        let (server, tensors) = (Server::start().unwrap(), mixed());
        let tensors = if step == Step::Put { vec![owned("a", Dtype::U8, &[9], 1)] } else { tensors };
        server.fail_writes(step, usize::MAX, WriteFault::Stall(Duration::from_secs(600)));
        let begun = Instant::now();
        let waits = |_| match server.received(step) > 0 {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let error = save(URL.as_ref(), &data(&tensors), None, &options(&server), waits).unwrap_err();
        // The store may still write what it got whole.
        let is_told = match step {
            Step::Put => is_doubtful(&error),
            _ => matches!(error, Error::Cancelled),
        };
        let was_away = was_away(begun, &error);
        assert!(was_away || is_told, "{error}");
        assert!(begun.elapsed() < LONG && (was_away || server.open_uploads().is_empty()));
        assert!(server.object(PATH).is_none());
    }
}

#[test]
fn what_cannot_be_saved_to_is_said_with_what_can() {
    let server = Server::start().unwrap();
    let tensors = [owned("a", Dtype::F32, &[10], 1)];
    for (url, said) in [
        ("https://user:canary@host/m.safetensors?sig=canary", "web servers are only read"),
        ("hf://org/model/m.safetensors", "the hub is only read"),
        ("ftp://user:canary@host/m.safetensors", "s3://, gs:// or az:// URL"),
        ("s3://bucket/folder/", "give the object a name"),
    ] {
        let error = save(url.as_ref(), &data(&tensors), None, &options(&server), go_on).unwrap_err();
        assert!(matches!(&error, Error::InvalidOption { option: "path", .. }), "{error:?}");
        let text = format!("{error} {error:?}");
        assert!(text.contains(said) && !text.contains(CANARY), "{text}");
    }
    let direct = options(&server).direct(DirectIo::Always);
    let error = save(URL.as_ref(), &data(&tensors), None, &direct, go_on).unwrap_err();
    assert!(matches!(&error, Error::InvalidOption { option: "direct", .. }), "{error:?}");
    assert!(server.take_requests().is_empty());
}

#[test]
fn tensors_of_devices_are_saved_through_parts_that_are_bounded() {
    let tensors = mixed();
    for device in devices().into_iter().filter(|device| *device != DeviceId::Cpu) {
        let server = Server::start().unwrap();
        save_to(&server, &tensors).unwrap();
        let open = OpenOptions::default().store(store(&server));
        let checkpoint = Checkpoint::open_with(&[URL], &open).unwrap();
        let loaded = checkpoint.load(&LoadOptions::default().device(device)).unwrap();
        let there: Vec<TensorData<'_>> = loaded.tensors().iter().map(TensorData::from).collect();
        let few = options(&server).in_flight(1);
        let error = save("s3://models/again.safetensors".as_ref(), &there, None, &few, go_on).unwrap_err();
        assert!(matches!(&error, Error::InvalidOption { option: "in_flight", .. }), "{error}");
        let report =
            save("s3://models/again.safetensors".as_ref(), &there, None, &options(&server), go_on).unwrap();
        assert!(server.object("models/again.safetensors").unwrap() == reference(&tensors));
        assert!(report.staged_bytes > 0);
        assert!(server.open_uploads().is_empty());
    }
}
