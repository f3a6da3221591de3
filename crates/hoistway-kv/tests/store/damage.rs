//! Damage on the disk: a miss, a count and an event; never a wrong byte.

use crate::common::*;
use hoistway_kv::{
    Durability, EventKind, LayoutKind, NamespaceOptions, Status, Store, StoreAccess, StoreOptions,
};
use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

const SHAPE: Shape = Shape { shards: 2, len: 10_000, skew: 0, pieces: 1 };
const BLOCKS: usize = 8;

pub(crate) fn files(root: &Path, ending: &str, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, ending, into);
        } else if path.to_string_lossy().ends_with(ending) {
            into.push(path);
        }
    }
}

fn segments(options: &StoreOptions) -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(&options.root, ".kvs", &mut found);
    assert!(!found.is_empty());
    found
}

fn filled(root: &TempDir) -> (Store, StoreOptions) {
    let options = options(root);
    let store = Store::open(options.clone()).unwrap();
    let blocks = namespace(&store);
    for number in 0..BLOCKS {
        put(&blocks, &format!("block {number}"), SHAPE);
    }
    store.flush(LONG).unwrap();
    (store, options)
}

/// Where a block's bytes are: `(file, offset of its first shard)`.
fn find(segments: &[PathBuf], name: &str) -> (PathBuf, u64) {
    let wanted = &bytes_of(name, 0, SHAPE.len)[..64];
    for path in segments {
        let bytes = fs::read(path).unwrap();
        if let Some(block) = bytes.chunks(4096).position(|block| block.starts_with(wanted)) {
            return (path.clone(), block as u64 * 4096);
        }
    }
    panic!("{name} is in no segment");
}

pub(crate) fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn a_flipped_bit_anywhere_in_a_block_is_found() {
    for (what, at) in [
        ("magic", -4096),
        ("header", -4000),
        ("first byte", 0),
        ("middle", 5000),
        ("second shard", 12_288 + 77),
        ("last byte", 12_288 + 9999),
    ] {
        let root = tempfile::tempdir().unwrap();
        let (store, options) = filled(&root);
        let blocks = namespace(&store);
        let (path, offset) = find(&segments(&options), "block 3");
        flip(&path, offset.checked_add_signed(at).unwrap());
        let statuses = get(&blocks, "block 3", SHAPE);
        assert!(statuses.contains(&Status::Corrupt), "{what}: {statuses:?}");
        assert_eq!(get_status(&blocks, "block 3", SHAPE), Status::Miss, "{what}");
        let events = store.events();
        let event = events.iter().find(|event| event.kind == EventKind::CorruptBlock).unwrap();
        assert_eq!(event.key.as_ref().unwrap().as_bytes(), b"block 3", "{what}");
        assert_eq!(store.stats().unwrap().corrupt_blocks, 1, "{what}");
        for number in (0..BLOCKS).filter(|number| *number != 3) {
            assert_eq!(get_status(&blocks, &format!("block {number}"), SHAPE), Status::Ok, "{what}");
        }
        // It can be stored anew, and is still there later.
        put(&blocks, "block 3", SHAPE);
        drop((store, blocks));
        let store = Store::open(options).unwrap();
        assert_eq!(get_status(&namespace(&store), "block 3", SHAPE), Status::Ok, "{what}");
    }
}

/// A wrong number of a shard says nothing of the block.
#[test]
fn a_load_of_shards_that_are_not_there_leaves_the_block() {
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(options(&root).layout(layout)).unwrap();
        let mut of_vllm = model("m");
        of_vllm.other.insert("vllm_directory".into(), "m_0123456789ab_r0".into());
        for (description, name, shards) in [(model("m"), "block", 2), (of_vllm, "12345678\0\0\0\u{1}", 1)] {
            let blocks = store.namespace(&description, NamespaceOptions::default()).unwrap();
            let shape = Shape::of(shards, 5000);
            put(&blocks, name, shape);
            let (ticket, _) = begin_load(&blocks, name, shape, [0, shards, 255], |_| {});
            let wanted = [Status::Ok, Status::Mismatch, Status::Mismatch];
            assert_eq!(end(&ticket).items, wanted, "{layout}");
            let (ticket, _) = begin_load(&blocks, name, Shape::of(shards, 20_000), [0], |_| {});
            assert_eq!(end(&ticket).items, [Status::Mismatch], "{layout}");
            assert_eq!(get_status(&blocks, name, shape), Status::Ok, "{layout}");
        }
        assert_eq!(store.stats().unwrap().corrupt_blocks, 0);
    }
}

#[test]
fn segments_that_are_cut_under_a_running_store_are_misses() {
    let root = tempfile::tempdir().unwrap();
    let (store, options) = filled(&root);
    let blocks = namespace(&store);
    for path in segments(&options) {
        let (_, offset) = find(std::slice::from_ref(&path), "block 0");
        // In the middle of the payload of the block.
        File::options().write(true).open(path).unwrap().set_len(offset + 5000).unwrap();
    }
    let mut lost = 0;
    for number in 0..BLOCKS {
        let statuses = get(&blocks, &format!("block {number}"), SHAPE);
        assert!(statuses.iter().all(|status| matches!(status, Status::Ok | Status::Corrupt)), "{statuses:?}");
        lost += usize::from(statuses.contains(&Status::Corrupt));
    }
    assert!(lost > 0);
    assert_eq!(store.stats().unwrap().corrupt_blocks, lost as u64);
}

#[test]
fn a_store_without_its_segments_opens_and_misses() {
    let root = tempfile::tempdir().unwrap();
    let (store, options) = filled(&root);
    let blocks = namespace(&store);
    let segments = segments(&options);
    segments.iter().for_each(|path| fs::remove_file(path).unwrap());
    // Those who have it open read what was stored.
    assert!(matches!(get_status(&blocks, "block 1", SHAPE), Status::Ok | Status::Corrupt));
    drop((store, blocks));
    let store = Store::open(options).unwrap();
    let blocks = namespace(&store);
    for number in 0..BLOCKS {
        let status = get_status(&blocks, &format!("block {number}"), SHAPE);
        assert!(matches!(status, Status::Miss | Status::Corrupt), "{status:?}");
    }
    put(&blocks, "block 1", SHAPE);
    assert_eq!(get_status(&blocks, "block 1", SHAPE), Status::Ok);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// Whatever is wrong with what the index wrote down: what is found is what was stored.
#[test]
fn damaged_logs_lose_blocks_at_most() {
    let root = tempfile::tempdir().unwrap();
    let (_store, options) = filled(&root);
    let mut lost = 0;
    for seed in 0..24 {
        // As it is while the store is open: what is known is in the log, not in a checkpoint.
        let other = tempfile::tempdir().unwrap();
        let mut options = options.clone();
        copy(&options.root, other.path());
        options.root = other.path().to_owned();
        let mut logs = Vec::new();
        files(&options.root, ".log", &mut logs);
        assert_eq!(logs.len(), 1);
        flip(&logs[0], Dice(seed + 1).roll(64 * (BLOCKS + 2)) as u64);
        let store = Store::open(options).unwrap();
        let blocks = namespace(&store);
        for number in 0..BLOCKS {
            let name = format!("block {number}");
            let status = get_status(&blocks, &name, SHAPE);
            assert!(matches!(status, Status::Ok | Status::Miss), "{name}: {status:?}");
            lost += usize::from(status == Status::Miss);
            assert!(end(&begin_store(&blocks, &name, SHAPE, 0..2)).is_ok());
            assert_eq!(get_status(&blocks, &name, SHAPE), Status::Ok);
        }
    }
    assert!(lost > 0, "nothing was damaged");
}

#[test]
fn verify_finds_damage_in_blocks_that_were_not_loaded() {
    let root = tempfile::tempdir().unwrap();
    let (store, options) = filled(&root);
    let (path, offset) = find(&segments(&options), "block 5");
    flip(&path, offset + 1);
    // Of its header, which has the key.
    let (path, offset) = find(&segments(&options), "block 6");
    flip(&path, offset - 4000);
    let verified = store.verify(|_| std::ops::ControlFlow::Continue(())).unwrap();
    assert_eq!((verified.blocks, verified.corrupt, verified.gone), (BLOCKS as u64, 2, 0));
    let damaged = store.events().iter().filter(|event| event.kind == EventKind::CorruptBlock).count();
    assert_eq!((damaged, store.stats().unwrap().corrupt_blocks), (2, 2));
    for name in ["block 5", "block 6"] {
        assert_eq!(get_status(&namespace(&store), name, SHAPE), Status::Miss);
    }
    let again = store.verify(|_| std::ops::ControlFlow::Continue(())).unwrap();
    assert_eq!((again.blocks, again.corrupt), (BLOCKS as u64 - 2, 0));
    assert_eq!(again.bytes, (BLOCKS as u64 - 2) * 20_000);
}

#[test]
fn scrubbing_finds_damage_by_itself() {
    let root = tempfile::tempdir().unwrap();
    let (store, mut options) = filled(&root);
    let (path, offset) = find(&segments(&options), "block 5");
    flip(&path, offset + 1);
    drop(store);
    options.scrub_bytes_per_second = 100 << 20;
    let store = Store::open(options).unwrap();
    eventually("the damage is found", || store.stats().unwrap().corrupt_blocks == 1);
    assert_eq!(get_status(&namespace(&store), "block 5", SHAPE), Status::Miss);
    assert_eq!(get_status(&namespace(&store), "block 4", SHAPE), Status::Ok);
}

#[test]
fn what_is_no_store_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (store, options) = filled(&root);
    drop(store);
    flip(&options.root.join("STORE"), 0);
    assert!(Store::open(options).is_err());
}

/// The files of a store whose machine lost its power, as far as files can show it: nothing was closed.
fn copied(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copied(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

#[test]
fn blocks_that_no_sync_covers_are_verified_whatever_the_options_say() {
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        for access in [StoreAccess::ReadWrite, StoreAccess::Read] {
            let root = tempfile::tempdir().unwrap();
            let mut options = options(&root);
            (options.durability, options.layout) = (Durability::None, Some(layout));
            options.verify = false;
            let store = Store::open(options.clone()).unwrap();
            put(&namespace(&store), "block", SHAPE);
            let after_the_cut = root.path().join("after the cut");
            copied(&options.root, &after_the_cut);
            store.close(LONG).unwrap();
            options.root = after_the_cut;
            (options.access, options.durability) = (access, Durability::Batched);
            let mut data = Vec::new();
            files(&options.root, "", &mut data);
            data.retain(|path| fs::metadata(path).unwrap().len() > 16_384);
            let (path, offset) = find(&data, "block");
            flip(&path, offset + 5000);
            let store = Store::open(options).unwrap();
            let statuses = get(&namespace(&store), "block", SHAPE);
            assert_eq!(statuses, [Status::Corrupt, Status::Ok], "{layout} {access}");
            assert_eq!(store.stats().unwrap().unsynced_loads, 2, "{layout} {access}");
        }
    }
}

#[test]
fn blocks_that_were_synced_are_not_verified_unless_asked() {
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        let root = tempfile::tempdir().unwrap();
        let mut options = options(&root);
        options.layout = Some(layout);
        let store = Store::open(options.clone()).unwrap();
        put(&namespace(&store), "block", SHAPE);
        store.close(LONG).unwrap();
        options.verify = false;
        let mut data = Vec::new();
        files(&options.root, "", &mut data);
        data.retain(|path| fs::metadata(path).unwrap().len() > 16_384);
        let (path, offset) = find(&data, "block");
        flip(&path, offset + 5000);
        let store = Store::open(options).unwrap();
        let (ticket, memory) = begin_load(&namespace(&store), "block", SHAPE, 0..SHAPE.shards, |_| {});
        assert!(end(&ticket).is_ok(), "{layout}");
        assert!(memory[0].bytes() != bytes_of("block", 0, SHAPE.len), "{layout}");
        assert_eq!(store.stats().unwrap().unsynced_loads, 0, "{layout}");
    }
}
