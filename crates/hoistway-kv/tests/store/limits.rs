//! Capacity, eviction, pins, quotas, time to live, admission.

use crate::common::*;
use hoistway_kv::{
    Admission, Durability, Error, Eviction, Item, KeepAlive, LayoutKind, NamespaceOptions, Request, Status,
    Store, StoreAccess, StoreOptions,
};
use std::{fs, os::unix::fs::MetadataExt, path::Path, sync::Arc, time::Duration};

const SHAPE: Shape = Shape::of(1, 256 << 10);

/// Bytes that files below a directory take on the disk.
fn bytes_below(directory: &Path) -> u64 {
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_below(&entry.path()),
        Ok(metadata) => metadata.blocks() * 512,
        Err(_) => 0,
    };
    fs::read_dir(directory).unwrap().map(|entry| size(entry.unwrap())).sum()
}

fn small(root: &tempfile::TempDir) -> StoreOptions {
    let mut options = options(root);
    options.capacity_bytes = Some(32 << 20);
    options.segment_bytes = Some(4 << 20);
    options
}

#[test]
fn stores_beyond_the_capacity_evict_and_never_exceed_it() {
    for eviction in [Eviction::S3Fifo, Eviction::Lru] {
        for durability in [Durability::None, Durability::Batched, Durability::Sync] {
            let root = tempfile::tempdir().unwrap();
            let mut options = small(&root);
            options.eviction = eviction;
            options.durability = durability;
            let store = Store::open(options.clone()).unwrap();
            let blocks = namespace(&store);
            let mut stored = 0;
            for number in 0..300 {
                let status = end(&begin_store(&blocks, &format!("block {number}"), SHAPE, [0])).items[0];
                assert!(matches!(status, Status::Ok | Status::Dropped(_)), "{status:?}");
                stored += usize::from(status == Status::Ok);
                assert!(bytes_below(&options.root) <= 32 << 20, "after block {number}");
            }
            assert!(stored >= 290, "{stored} of 300 were stored");
            let stats = store.stats().unwrap();
            assert!(stats.evicted_blocks > 100 && stats.blocks > 60, "{stats:?}");
            assert!(stats.root_bytes <= 32 << 20);
            let mut there = 0;
            for number in 0..300 {
                let status = get_status(&blocks, &format!("block {number}"), SHAPE);
                assert!(matches!(status, Status::Ok | Status::Miss), "{status:?}");
                there += u64::from(status == Status::Ok);
            }
            // Some may be evicted ahead meanwhile, and none come.
            let left = store.stats().unwrap().blocks;
            assert!((left..=stats.blocks).contains(&there), "{there} of {} to {left}", stats.blocks);
        }
    }
}

#[test]
fn blocks_of_one_request_take_the_room_that_each_needs() {
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        let root = tempfile::tempdir().unwrap();
        let options = options(&root).capacity_bytes(CAPACITY).layout(layout);
        let store = Store::open(options).unwrap();
        let blocks = namespace(&store);
        // Half of the capacity; with room for the longest in each of them it would be more than all of it.
        let lens = [60 << 10, 1 << 20, 4 << 20];
        let sizes = || (0..75).map(|number| (format!("block {number}"), lens[number % 3]));
        let named: Vec<_> = sizes().collect();
        for request in named.chunks(9) {
            let memory: Vec<_> =
                request.iter().map(|(name, len)| Memory::of(&bytes_of(name, 0, *len), 0)).collect();
            let item = |((name, _), memory): (&(String, usize), &Arc<Memory>)| {
                Item::new(key(name), 0, memory.pieces(1))
            };
            let items = request.iter().zip(&memory).map(item).collect();
            let request = Request::new(items, KeepAlive::new(Arc::new(memory)));
            // SAFETY: the request keeps the memory, and nothing writes to it.
            let completion = end(&unsafe { blocks.store(request) }.unwrap());
            assert!(completion.is_ok(), "{completion:?}");
        }
        assert_eq!(store.stats().unwrap().evicted_blocks, 0, "{layout}");
        for (name, len) in sizes() {
            assert_eq!(get_status(&blocks, &name, Shape::of(1, len)), Status::Ok, "{name}, {layout}");
        }
    }
}

#[test]
fn one_request_may_have_more_blocks_than_there_is_room_for() {
    for durability in [Durability::None, Durability::Batched] {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(small(&root).durability(durability)).unwrap();
        let blocks = namespace(&store);
        let memory = Memory::of(&bytes_of("all", 0, SHAPE.len), 0);
        let item = |number| Item::new(key(&format!("block {number}")), 0, memory.pieces(1));
        let request = Request::new((0..256).map(item).collect(), KeepAlive::new(memory.clone()));
        // A part of it is the longest time that blocks wait for room.
        let request = request.timeout(Duration::from_secs(3600));
        // SAFETY: the request keeps the memory, and nothing writes to it.
        let completion = end(&unsafe { blocks.store(request) }.unwrap());
        assert!(completion.is_ok(), "{completion:?}");
        assert!(store.stats().unwrap().evicted_blocks > 100);
    }
}

#[test]
fn pinned_blocks_stay_and_what_is_used_stays_longer() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(small(&root)).unwrap();
    let blocks = namespace(&store);
    let pinned: Vec<_> = (0..8).map(|number| format!("pinned {number}")).collect();
    pinned.iter().for_each(|name| put(&blocks, name, SHAPE));
    let mut names = pinned.clone();
    names.push("not there".into());
    let guard = blocks.pin(&names).unwrap();
    assert_eq!(guard.pinned().iter().filter(|pinned| **pinned).count(), 8);
    assert_eq!(blocks.delete(&pinned).unwrap(), 0, "pinned blocks are not deleted");
    for number in 0..300 {
        let _ = end(&begin_store(&blocks, &format!("other {number}"), SHAPE, [0]));
    }
    pinned.iter().for_each(|name| assert_eq!(get_status(&blocks, name, SHAPE), Status::Ok));
    drop(guard);
    assert_eq!(blocks.delete(&pinned).unwrap(), 8);
    pinned.iter().for_each(|name| assert_eq!(get_status(&blocks, name, SHAPE), Status::Miss));
}

#[test]
fn a_store_full_of_pins_drops_what_comes() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(small(&root)).unwrap();
    let blocks = namespace(&store);
    let mut guards = Vec::new();
    let mut dropped = 0;
    for number in 0..200 {
        let name = format!("block {number}");
        match end(&begin_store(&blocks, &name, SHAPE, [0])).items[0] {
            Status::Ok => guards.push(blocks.pin(&[&name]).unwrap()),
            Status::Dropped(_) => dropped += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(dropped > 0 && store.stats().unwrap().dropped.no_room == dropped);
    assert!(guards.len() > 60, "{} blocks", guards.len());
    drop(guards);
    store.maintain_now().unwrap();
    put(&blocks, "again", SHAPE);
}

#[test]
fn blocks_go_when_their_time_is_over() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(options(&root)).unwrap();
    let lasting = namespace(&store);
    let fleeting = |seconds| {
        let options = NamespaceOptions::default().ttl(Duration::from_secs(seconds));
        store.namespace(&model("fleeting"), options).unwrap()
    };
    put(&lasting, "a", SHAPE);
    put(&fleeting(3600), "later", SHAPE);
    put(&fleeting(1), "a", SHAPE);
    let fleeting = fleeting(3600);
    eventually("its time is over", || fleeting.lookup(&["a"]).unwrap() == [false]);
    assert!(matches!(get_status(&fleeting, "a", SHAPE), Status::Expired | Status::Miss));
    assert_eq!(get_status(&lasting, "a", SHAPE), Status::Ok);
    put(&fleeting, "a", SHAPE);
    for name in ["a", "later"] {
        assert_eq!(get_status(&fleeting, name, SHAPE), Status::Ok, "{name}: its time is not over");
    }
}

#[test]
fn a_namespace_keeps_to_its_quota() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(small(&root)).unwrap();
    let others = namespace(&store);
    for number in 0..20 {
        put(&others, &format!("other {number}"), SHAPE);
    }
    let quota = NamespaceOptions::default().quota_bytes(3 << 20);
    let limited = store.namespace(&model("limited"), quota).unwrap();
    for number in 0..50 {
        let status = end(&begin_store(&limited, &format!("block {number}"), SHAPE, [0])).items[0];
        assert!(matches!(status, Status::Ok | Status::Dropped(_)), "{status:?}");
    }
    store.maintain_now().unwrap();
    let names: Vec<_> = (0..50).map(|number| format!("block {number}")).collect();
    let there = limited.lookup(&names).unwrap().iter().filter(|there| **there).count();
    assert!((4..=12).contains(&there), "{there} blocks of 256 KiB in 3 MiB");
    for number in 0..20 {
        assert_eq!(get_status(&others, &format!("other {number}"), SHAPE), Status::Ok);
    }
}

#[test]
fn blocks_that_are_asked_for_once_are_not_admitted() {
    let root = tempfile::tempdir().unwrap();
    let mut options = options(&root);
    options.admission = Admission::SecondTouch;
    let store = Store::open(options).unwrap();
    let blocks = namespace(&store);
    let status = end(&begin_store(&blocks, "once", SHAPE, [0])).items[0];
    assert_eq!(status, Status::Dropped(hoistway_kv::DropReason::NotAdmitted));
    assert_eq!(store.stats().unwrap().dropped.not_admitted, 1);
    assert_eq!(get_status(&blocks, "once", SHAPE), Status::Miss);
}

#[test]
fn evict_makes_room_on_demand() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(options(&root)).unwrap();
    let blocks = namespace(&store);
    for number in 0..20 {
        put(&blocks, &format!("block {number}"), SHAPE);
    }
    let freed = store.evict(5 * SHAPE.len as u64).unwrap();
    assert!(freed >= 5 * SHAPE.len as u64, "{freed}");
    let left = store.stats().unwrap().blocks;
    assert!((10..=15).contains(&left), "{left} blocks are left");
}

#[test]
fn what_is_too_large_or_not_allowed_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let options = small(&root);
    let store = Store::open(options.clone()).unwrap();
    let blocks = namespace(&store);
    let huge = Shape::of(2, 5 << 20);
    let statuses = end(&begin_store(&blocks, "huge", huge, 0..2)).items;
    assert_eq!(statuses, [Status::Dropped(hoistway_kv::DropReason::TooLarge); 2]);
    put(&blocks, "a", SHAPE);

    let mut reading = options.clone();
    reading.access = StoreAccess::Read;
    let reader = Store::open(reading).unwrap();
    let seen = namespace(&reader);
    assert_eq!(get_status(&seen, "a", SHAPE), Status::Ok);
    assert!(matches!(seen.delete(&["a"]), Err(Error::ReadOnly { .. })));
    // SAFETY: it is refused before anything is read.
    let refused = unsafe { seen.store(Request::new(Vec::new(), KeepAlive::by_caller())) };
    assert!(matches!(refused, Err(Error::ReadOnly { .. })));
    drop((reader, seen, store, blocks));

    let mut other = options;
    other.layout = Some(LayoutKind::Files);
    assert!(Store::open(other).is_err(), "the store has another layout");
}

#[test]
fn files_are_for_their_owner_alone() {
    let root = tempfile::tempdir().unwrap();
    let options = options(&root);
    let store = Store::open(options.clone()).unwrap();
    put(&namespace(&store), "a", SHAPE);
    fn check(directory: &Path) {
        assert_eq!(fs::metadata(directory).unwrap().mode() & 0o777, 0o700, "{}", directory.display());
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => check(&path),
                false => assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600, "{}", path.display()),
            }
        }
    }
    check(&options.root);
}

#[test]
fn what_could_store_nothing_is_refused() {
    let refused = |change: &dyn Fn(&mut StoreOptions)| {
        let root = tempfile::tempdir().unwrap();
        let mut options = options(&root);
        change(&mut options);
        match Store::open(options) {
            Err(Error::InvalidOption { option, reason, .. }) => (option, reason),
            other => panic!("{other:?}"),
        }
    };
    let (option, reason) = refused(&|options| options.capacity_bytes = Some(0));
    assert_eq!((option, reason.as_str()), ("capacity_bytes", "nothing could be stored"));
    let (option, reason) = refused(&|options| options.segment_bytes = Some(CAPACITY + 1));
    assert_eq!(option, "segment_bytes");
    assert!(reason.contains(&format!("the capacity of {CAPACITY} bytes")), "{reason}");
    let (option, reason) = refused(&|options| options.capacity_bytes = Some(100_000));
    assert_eq!(option, "capacity_bytes");
    assert!(reason.contains("a segment takes 65536 bytes"), "{reason}");
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        let (option, reason) = refused(&|options| {
            (options.min_free_bytes, options.layout) = (1 << 60, Some(layout));
        });
        assert_eq!(option, "min_free_bytes");
        assert!(reason.contains("iB in all"), "{reason}");
    }
}

#[test]
fn a_store_is_tended_whatever_its_options_say() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(options(&root)).unwrap();
    put(&namespace(&store), "block", SHAPE);
    store.close(LONG).unwrap();
    let mut tending = options(&root);
    (tending.for_upkeep, tending.capacity_bytes) = (true, Some(1));
    tending.durability = Durability::None;
    let store = Store::open(tending).unwrap();
    let writers = store.writers().unwrap();
    assert_eq!(
        (writers[0].capacity_bytes, writers[0].durability),
        (Some(CAPACITY), Some(Durability::Batched))
    );
    store.close(LONG).unwrap();
}

#[test]
fn segments_do_not_matter_to_a_store_of_files_whose_layout_is_not_named() {
    let root = tempfile::tempdir().unwrap();
    let mut options = options(&root);
    options.layout = Some(LayoutKind::Files);
    drop(Store::open(options.clone()).unwrap());
    (options.layout, options.segment_bytes) = (None, Some(CAPACITY + 1));
    drop(Store::open(options).unwrap());
}
