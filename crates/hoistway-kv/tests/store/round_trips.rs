//! What was stored is what is loaded: of every shape, from many threads, before and after opening anew.

use crate::common::*;
use hoistway_kv::{LayoutKind, NamespaceOptions, Status, Store};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

const SHAPES: [Shape; 9] = [
    Shape::of(1, 1),
    Shape::of(1, 4096),
    Shape { shards: 1, len: 65536, skew: 0, pieces: 4 },
    Shape { shards: 1, len: 65536, skew: 1, pieces: 1 },
    Shape { shards: 1, len: 100_001, skew: 7, pieces: 5 },
    Shape { shards: 3, len: 4095, skew: 0, pieces: 2 },
    Shape { shards: 8, len: 12_289, skew: 512, pieces: 3 },
    Shape { shards: 256, len: 100, skew: 3, pieces: 1 },
    Shape { shards: 2, len: 1 << 20, skew: 0, pieces: 64 },
];

#[test]
fn blocks_of_every_shape_come_back_as_they_were() {
    each(|_, options| {
        let store = Store::open(options.clone()).unwrap();
        let blocks = namespace(&store);
        for (number, shape) in SHAPES.into_iter().enumerate() {
            let name = format!("shape {number}");
            assert_eq!(get_status(&blocks, &name, shape), Status::Miss);
            put(&blocks, &name, shape);
            assert_eq!(get_status(&blocks, &name, shape), Status::Ok, "{name}, {:?}", options.durability);
            let info = blocks.block(name.as_bytes()).unwrap().unwrap();
            assert_eq!(info.shards.len(), shape.shards as usize);
            assert!(
                info.shards.iter().all(|shard| shard.len == shape.len as u64 && shard.checksum.is_some())
            );
        }
        let report = store.report().unwrap();
        let stored: u64 = SHAPES.iter().map(|shape| u64::from(shape.shards) * shape.len as u64).sum();
        let carried: u64 = report.carriers.iter().map(|share| share.written_bytes).sum();
        assert!(carried >= stored, "{report:?}");
        assert_eq!(store.stats().unwrap().blocks, SHAPES.len() as u64);
        store.close(LONG).unwrap();

        let store = Store::open(options).unwrap();
        let blocks = namespace(&store);
        let names: Vec<_> = (0..=SHAPES.len()).map(|number| format!("shape {number}")).collect();
        assert_eq!(blocks.lookup_prefix(&names).unwrap(), SHAPES.len());
        assert_eq!(blocks.lookup_reverse(&names).unwrap(), Some(SHAPES.len() - 1));
        for (name, shape) in names.iter().zip(SHAPES) {
            assert_eq!(get_status(&blocks, name, shape), Status::Ok, "{name} after opening anew");
            assert_eq!(end(&begin_store(&blocks, name, shape, 0..shape.shards)).items[0], Status::Exists);
        }
    });
}

#[test]
fn many_threads_store_and_load_the_same_blocks() {
    each(|_, options| {
        let store = Store::open(options).unwrap();
        let blocks = namespace(&store);
        let shape = Shape { shards: 2, len: 20_000, skew: 0, pieces: 2 };
        thread::scope(|scope| {
            for worker in 0..6 {
                let blocks = blocks.clone();
                scope.spawn(move || {
                    let mut dice = Dice(worker + 1);
                    for _ in 0..60 {
                        let name = format!("block {}", dice.roll(40));
                        match dice.roll(3) {
                            0 => {
                                let stored = end(&begin_store(&blocks, &name, shape, 0..2));
                                assert!(stored.is_ok(), "{stored:?}");
                            }
                            1 => {
                                // Each shard by itself, as layers come.
                                let tickets = [1, 0].map(|shard| begin_store(&blocks, &name, shape, [shard]));
                                assert!(tickets.iter().all(|ticket| end(ticket).is_ok()));
                            }
                            _ => {
                                let statuses = get(&blocks, &name, shape);
                                assert!(
                                    statuses.iter().all(|status| matches!(status, Status::Ok | Status::Miss)),
                                    "{statuses:?}"
                                );
                            }
                        }
                    }
                });
            }
        });
        store.flush(LONG).unwrap();
        let stats = store.stats().unwrap();
        assert_eq!((stats.corrupt_blocks, stats.open_requests, stats.leased_requests), (0, 0, 0));
        for number in 0..40 {
            let name = format!("block {number}");
            let is_there = blocks.lookup_prefix(&[&name]).unwrap() == 1;
            let expected = if is_there { Status::Ok } else { Status::Miss };
            assert_eq!(get_status(&blocks, &name, shape), expected);
        }
    });
}

/// Readers ask for a block again and again while its shards come from several threads: they see all or nothing.
#[test]
fn no_block_is_seen_before_all_its_shards_are_in() {
    each(|_, options| {
        let store = Store::open(options).unwrap();
        let blocks = namespace(&store);
        let shape = Shape { shards: 8, len: 8000, skew: 0, pieces: 1 };
        for round in 0..15 {
            let name = format!("round {round}");
            let is_stored = AtomicBool::new(false);
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        while !is_stored.load(Ordering::Relaxed) {
                            let statuses = get(&blocks, &name, shape);
                            let first = statuses[0];
                            assert!(matches!(first, Status::Ok | Status::Miss), "{statuses:?}");
                            assert!(statuses.iter().all(|status| *status == first), "{statuses:?}");
                        }
                    });
                }
                let writers: Vec<_> = (0..2)
                    .map(|writer| {
                        let (blocks, name) = (&blocks, &name);
                        scope.spawn(move || {
                            let shards = (0..8).filter(|shard| shard % 2 == writer);
                            let tickets: Vec<_> =
                                shards.map(|shard| begin_store(blocks, name, shape, [shard])).collect();
                            assert!(tickets.iter().all(|ticket| end(ticket).is_ok()));
                        })
                    })
                    .collect();
                writers.into_iter().for_each(|writer| writer.join().unwrap());
                is_stored.store(true, Ordering::Relaxed);
            });
            assert_eq!(get_status(&blocks, &name, shape), Status::Ok);
        }
    });
}

#[test]
fn two_stores_of_one_block_write_it_once() {
    each(|_, options| {
        let store = Store::open(options).unwrap();
        let blocks = namespace(&store);
        let shape = Shape::of(1, 50_000);
        for round in 0..20 {
            let name = format!("round {round}");
            let tickets = [0, 0].map(|_| begin_store(&blocks, &name, shape, [0]));
            let mut statuses = tickets.map(|ticket| end(&ticket).items[0]);
            statuses.sort_by_key(|status| *status == Status::Exists);
            assert_eq!(statuses, [Status::Ok, Status::Exists]);
            assert_eq!(get_status(&blocks, &name, shape), Status::Ok);
        }
        assert_eq!(store.stats().unwrap().blocks, 20);
    });
}

#[test]
fn namespaces_and_salts_do_not_see_one_another() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(options(&root)).unwrap();
    let open = |description| store.namespace(&description, NamespaceOptions::default()).unwrap();
    let with_salt = |salt: &str| {
        let mut description = model("m");
        description.salt = salt.into();
        description
    };
    let mut other_type = model("m");
    other_type.dtype = "float8".into();
    let spaces =
        [open(model("m")), open(model("n")), open(other_type), open(with_salt("a")), open(with_salt("b"))];
    let shape = Shape::of(1, 5000);
    put(&spaces[0], "k", shape);
    for other in &spaces[1..] {
        assert_eq!(other.lookup(&["k"]).unwrap(), [false]);
        assert_eq!(get_status(other, "k", shape), Status::Miss);
    }
    let longer = Shape::of(1, 6000);
    put(&spaces[3], "k", longer);
    assert_eq!(get_status(&spaces[3], "k", longer), Status::Ok);
    assert_eq!(get_status(&spaces[0], "k", shape), Status::Ok);
    assert_eq!(spaces[3].clear().unwrap(), 1);
    assert_eq!(get_status(&spaces[3], "k", longer), Status::Miss);
    assert_eq!(get_status(&spaces[0], "k", shape), Status::Ok);
    let known = store.namespaces().unwrap();
    assert_eq!(known.len(), 5);
    assert!(
        !known.iter().any(|(_, description)| description.contains("\"a\"")),
        "a salt is never written down"
    );
    let same = store.existing_namespace(spaces[0].id()).unwrap();
    assert_eq!(get_status(&same, "k", shape), Status::Ok);
}

#[test]
fn keys_of_every_length_are_kept_apart() {
    let root = tempfile::tempdir().unwrap();
    let options = options(&root);
    let store = Store::open(options.clone()).unwrap();
    let blocks = namespace(&store);
    let names: Vec<_> = [1, 2, 16, 36, 63, 64, 65, 255, 256, 1023, 1024].map(|len| "k".repeat(len)).into();
    let shape = Shape::of(1, 777);
    names.iter().for_each(|name| put(&blocks, name, shape));
    drop((store, blocks));
    let store = Store::open(options).unwrap();
    let blocks = namespace(&store);
    for name in &names {
        assert_eq!(get_status(&blocks, name, shape), Status::Ok, "{} bytes", name.len());
    }
    let page = store.list(0, 100).unwrap();
    let mut found: Vec<_> = page
        .blocks
        .iter()
        .map(|block| store.key_of(block.fingerprint).unwrap().unwrap().as_bytes().len())
        .collect();
    found.sort_unstable();
    assert_eq!(found, names.iter().map(String::len).collect::<Vec<_>>());
    assert_eq!(blocks.delete(&names[..3]).unwrap(), 3);
    assert_eq!(blocks.lookup(&names[2..4]).unwrap(), [false, true]);
    assert!(hoistway_kv::Key::new(&vec![0; 1 << 20]).is_err());
}

#[test]
fn a_block_that_comes_back_with_more_shards_is_never_delivered_unread() {
    let root = tempfile::tempdir().unwrap();
    let options = options(&root).layout(LayoutKind::Files);
    let (reader, writer) = (Store::open(options.clone()).unwrap(), Store::open(options).unwrap());
    let (reading, writing) = (namespace(&reader), namespace(&writer));
    // Shards of one page each: the distance between them is the same for both blocks.
    put(&writing, "a", Shape::of(2, 3000));
    assert_eq!(get_status(&reading, "a", Shape::of(2, 3000)), Status::Ok);
    assert_eq!(writing.delete(&["a"]).unwrap(), 1);
    put(&writing, "a", Shape::of(3, 3000));
    assert_eq!(get_status(&reading, "a", Shape::of(3, 3000)), Status::Miss);
    assert_eq!(get_status(&reading, "a", Shape::of(3, 3000)), Status::Ok);
    assert_eq!(reader.stats().unwrap().corrupt_blocks, 0);
}
