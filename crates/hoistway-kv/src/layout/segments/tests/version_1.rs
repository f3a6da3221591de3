//! A store of version 1 of the format, with segments of slots, is read and written to.

use super::*;
use std::{fs, path::Path};

/// What that version wrote: twelve blocks, a checkpoint, then two deletions and another block, and no end.
const FILES: &str = include_str!("version_1.txt");

/// Writes the files below `root`.
fn unpack(root: &Path) {
    let mut file: Option<(PathBuf, Vec<u8>)> = None;
    let end = |file: Option<(PathBuf, Vec<u8>)>| {
        if let Some((path, bytes)) = file {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    };
    for line in FILES.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        if let ["file", path, len] = words[..] {
            end(file.replace((root.join(path), vec![0; len.parse().unwrap()])));
            continue;
        }
        let (hex, times) = words[1].split_once('*').unwrap_or((words[1], "1"));
        let byte = |place| u8::from_str_radix(&hex[place..place + 2], 16).unwrap();
        let some: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let offset: usize = words[0].parse().unwrap();
        let bytes = some.repeat(times.parse().unwrap());
        file.as_mut().unwrap().1[offset..offset + bytes.len()].copy_from_slice(&bytes);
    }
    end(file);
}

fn open(root: &Path) -> Segments {
    let mut options = StoreOptions::new(root);
    options.capacity_bytes = Some(1 << 20);
    options.min_free_bytes = 0;
    options.segment_bytes = Some(64 << 10);
    let store = Segments::open(&options).unwrap();
    store.open_namespace(NAMESPACE, "{}", NamespaceOptions::default()).unwrap();
    store
}

/// Whether a block is found; its bytes are what they were.
fn has(store: &Segments, key: &str) -> bool {
    let name = Key::new(key.as_bytes()).unwrap();
    let Lookup::Found(found) = store.find(NAMESPACE, &name, fingerprint(key)) else { return false };
    let file = fs::read(found.place.file.path()).unwrap();
    let header = found.place.header.unwrap() as usize;
    let Verdict::Good(table) = store.check(&found, &name, &file[header..header + HEADER_LEN]) else {
        panic!("{key}")
    };
    let payload = &file[found.place.payload as usize..][..table.0[0].len as usize];
    assert_eq!(table.0[0].checksum, Some(checksum(payload)), "{key}");
    assert!(payload.iter().all(|byte| *byte == key.as_bytes()[key.len() - 1]), "{key}");
    true
}

fn check_all(store: &Segments) {
    for number in 0..7 {
        assert_eq!(has(store, &format!("small {number}")), number != 1, "small {number}");
        assert_eq!(has(store, &format!("large {number}")), ![2, 6].contains(&number), "large {number}");
    }
}

/// Stores blocks until old ones have to go.
fn fill(store: &Segments) {
    for number in 0..200 {
        let key = format!("new {number}");
        let block = NewBlock {
            namespace: NAMESPACE,
            key: Key::new(key.as_bytes()).unwrap(),
            fingerprint: fingerprint(&key),
            shards: 1,
            shard_len: 4096 * (1 + number % 5),
            expires: None,
            following: 0,
            is_partial: false,
        };
        let Reservation::Claimed(claim) = store.reserve(block).unwrap() else { panic!("{key}") };
        let table = ShardTable(vec![Shard { len: 4096, checksum: Some(0) }]);
        store.commit(vec![Written { claim, table }]).pop().unwrap().unwrap();
        store.maintain().unwrap();
    }
}

#[test]
fn an_old_store_is_read_and_its_segments_give_way_to_new_ones() {
    let root = tempfile::tempdir().unwrap();
    unpack(root.path());
    let store = open(root.path());
    assert_eq!(store.usage().lost_on_recovery, 0);
    check_all(&store);
    store.close().unwrap();
    drop(store);
    let store = open(root.path());
    check_all(&store);
    let old = lock(&store.writer().unwrap().slots).all().filter(|old| !old.head.is_paged()).count();
    assert_eq!(old, 5);
    fill(&store);
    assert!(lock(&store.writer().unwrap().slots).all().all(|segment| segment.head.is_paged()));
    assert!(store.usage().root_bytes <= 1 << 20);
}

#[test]
fn new_stores_say_that_older_versions_cannot_read_them() {
    let root = tempfile::tempdir().unwrap();
    fill(&open(root.path()));
    let version = |path: &Path| fs::read(path).unwrap()[8];
    assert_eq!(version(&root.path().join("STORE")), 2);
    let is_segment = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "kvs");
    let directory = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().path());
    let writer = directory.into_iter().find(|path| path.join("LEASE").exists()).unwrap();
    let files: Vec<_> = fs::read_dir(writer).unwrap().map(|entry| entry.unwrap().path()).collect();
    let mut segments = files.iter().filter(|path| is_segment(path)).peekable();
    assert!(segments.peek().is_some() && segments.all(|path| version(path) == 2));
}
