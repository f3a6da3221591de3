//! What another user who can write to the root may plant there: nothing waits for it, follows it or believes its length.

use super::*;
use crate::format::{checkpoint::CheckpointHead, record::ProvenFrom};
use rustix::fs::{CWD, FileType, Mode};
use std::{fs, os::unix::fs::symlink, path::Path};

fn options(root: &Path) -> StoreOptions {
    let mut options = StoreOptions::new(root);
    options.capacity_bytes = Some(16 << 20);
    options.min_free_bytes = 0;
    options
}

fn open(root: &Path) -> Segments {
    let store = Segments::open(&options(root)).unwrap();
    store.open_namespace(NAMESPACE, "{}", NamespaceOptions::default()).unwrap();
    // The identity that its description gives it.
    store.open_namespace(NamespaceId::of_description("{}"), "{}", NamespaceOptions::default()).unwrap();
    store
}

fn read(root: &Path) -> Segments {
    let options = StoreOptions { access: StoreAccess::Read, capacity_bytes: None, ..options(root) };
    Segments::open(&options).unwrap()
}

/// Stores a block without shards' bytes.
fn put(store: &Segments, key: &str) {
    let block = NewBlock {
        namespace: NAMESPACE,
        key: Key::new(key.as_bytes()).unwrap(),
        fingerprint: fingerprint(key),
        shards: 1,
        shard_len: 4096,
        expires: None,
        following: 0,
        is_partial: false,
    };
    let Reservation::Claimed(claim) = store.reserve(block).unwrap() else { panic!() };
    let table = ShardTable(vec![Shard { len: 4096, checksum: Some(0) }]);
    store.commit(vec![Written { claim, table }]).pop().unwrap().unwrap();
}

fn has(store: &Segments, key: &str) -> bool {
    let mut found = [false];
    store.contains(NAMESPACE, &[(key.as_bytes(), fingerprint(key))], &mut found);
    found[0]
}

fn fifo(path: &Path) {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

fn directory(store: &Segments) -> PathBuf {
    store.writer().unwrap().directory.clone()
}

#[test]
fn fifos_hang_neither_openings_nor_those_who_run() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    put(&store, "a");
    let planted = WriterDirectory::new(root.path(), Uuid::from_u128(7)).path;
    fs::create_dir(&planted).unwrap();
    for name in ["LEASE", "CKPT-a", "CKPT-b", "idx-000001.log", "seg-000001.kvs"] {
        fifo(&planted.join(name));
    }
    let namespace = root.path().join("ns").join(NamespaceId([9; 16]).to_string());
    fs::create_dir_all(&namespace).unwrap();
    fifo(&namespace.join("NAMESPACE.json"));
    // Those who follow say what is wrong, and go on.
    let _ = store.maintain();
    put(&store, "b");
    assert_eq!(store.namespaces().unwrap().len(), 1, "the one that can be read");
    assert_eq!(store.writers().unwrap().len(), 2);
    let reader = read(root.path());
    assert!(has(&reader, "a") && has(&reader, "b"));
    let second = open(root.path());
    assert!(has(&second, "a"));
    put(&second, "c");
}

#[test]
fn links_are_not_followed_and_what_they_name_stays_as_it_is() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    put(&store, "a");
    let folder = directory(&store);
    drop(store);
    let victim = root.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    fs::remove_file(folder.join("LEASE")).unwrap();
    symlink(&victim, folder.join("LEASE")).unwrap();
    let store = open(root.path());
    assert_ne!(directory(&store), folder, "it is not taken over");
    store.maintain().unwrap();
    store.close().unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    // A log, a checkpoint that is to be written, and a segment of a writer that is gone.
    for name in ["CKPT-b.tmp", "CKPT-a.tmp", "idx-000002.log", "idx-000003.log", "seg-000001.kvs"] {
        let root = tempfile::tempdir().unwrap();
        let store = open(root.path());
        put(&store, "a");
        let folder = directory(&store);
        store.close().unwrap();
        drop(store);
        let path = folder.join(name);
        let _ = fs::remove_file(&path);
        symlink(&victim, &path).unwrap();
        let store = open(root.path());
        put(&store, "b");
        // What cannot be followed is said.
        let _ = store.maintain();
        store.close().unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious", "{name}");
    }
}

#[test]
fn lengths_that_files_claim_reserve_nothing() {
    const LEN: u64 = 1 << 40;
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    put(&store, "a");
    let folder = directory(&store);
    let writer = store.writer().unwrap().id;
    drop(store);
    let sparse = |name: &str| {
        let file =
            fs::File::options().write(true).create(true).truncate(false).open(folder.join(name)).unwrap();
        file.set_len(LEN).unwrap();
    };
    sparse("idx-000001.log");
    let begin = Instant::now();
    assert!(has(&read(root.path()), "a"), "the log's records are there still");
    let head = CheckpointHead {
        writer,
        generation: 2,
        epoch: 1,
        log: 1,
        next_record: 0,
        next_segment: 1,
        records: LEN / 64,
        proven_from: ProvenFrom::UNKNOWN,
    };
    fs::write(folder.join("CKPT-a"), head.to_bytes()).unwrap();
    sparse("CKPT-a");
    drop(read(root.path()));
    let path = folder.join("seg-000002.kvs");
    let slots = (1 << 30) - 1;
    let head =
        format::segment::SegmentHead { writer, number: 2, slot_bytes: 8192, slots, most_blocks: slots };
    fs::write(&path, head.to_bytes()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(1 << 43).unwrap();
    let store = open(root.path());
    put(&store, "b");
    assert!(!path.exists(), "it cannot be a segment");
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}
