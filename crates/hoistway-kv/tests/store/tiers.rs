//! A far tier behind a store: what both say together, and what the near one says when the far one fails.

use crate::common::*;
use hoistway_kv::{
    DirectPath, Error, EventKind, FarOptions, FarPolicy, LayoutKind, NamespaceOptions, Status, Store,
    StoreAccess, StoreOptions, Ticket,
    fault::{Fault, Gate},
};
use std::{
    fs,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const SHAPE: Shape = Shape { shards: 2, len: 70_000, skew: 0, pieces: 2 };

#[test]
fn blocks_are_found_in_either_tier_and_promoted() {
    each_far_layout(|tiers, far| {
        let store = tiers.open("near", far.clone());
        let blocks = namespace(&store);
        let completion = end(&begin_store(&blocks, "a", SHAPE, 0..2));
        assert!(completion.is_ok() && completion.far_missing == 0, "{completion:?}");
        put(&blocks, "b", SHAPE);
        assert_eq!(far_stats(&store).written_blocks, 2);
        store.close(LONG).unwrap();
        drop((blocks, store));

        // Another node, whose near tier is empty.
        let store = tiers.open("other", far.clone());
        let blocks = namespace(&store);
        assert_eq!(blocks.lookup(&["a", "c", "b"]).unwrap(), [true, false, true]);
        assert_eq!(blocks.lookup_prefix(&["a", "b", "c"]).unwrap(), 2);
        assert_eq!(blocks.lookup_reverse(&["a", "b", "c"]).unwrap(), Some(1));
        let (ticket, memory) = begin_load(&blocks, "a", SHAPE, 0..2, |_| {});
        let completion = end(&ticket);
        assert_eq!(completion.items, [Status::Ok; 2]);
        assert_eq!(completion.far_bytes, completion.bytes);
        assert!(memory[1].bytes() == bytes_of("a", 1, SHAPE.len));
        eventually("it is promoted", || far_stats(&store).promoted_blocks == 1);
        let (ticket, memory) = begin_load(&blocks, "a", SHAPE, 0..2, |_| {});
        assert_eq!(end(&ticket).far_bytes, 0, "the near tier has it");
        assert!(memory[0].bytes() == bytes_of("a", 0, SHAPE.len));
        assert_eq!(get_status(&blocks, "c", SHAPE), Status::Miss);
        let stats = far_stats(&store);
        assert_eq!((stats.hits, stats.misses, stats.failures), (2, 2, 0));
        assert_eq!(stats.store.unwrap().blocks, 2);
        assert!(store.report().unwrap().far.unwrap().store.is_some());
        assert_eq!(store.events(), []);
    });
}

#[test]
fn deleted_blocks_are_in_no_tier() {
    each_far_layout(|tiers, far| {
        let store = tiers.open("near", far.clone());
        let blocks = namespace(&store);
        for name in ["a", "b", "c"] {
            put(&blocks, name, SHAPE);
        }
        assert_eq!(blocks.delete(&["a"]).unwrap(), 1);
        assert_eq!(blocks.lookup(&["a", "b"]).unwrap(), [false, true]);
        assert_eq!(get_status(&blocks, "a", SHAPE), Status::Miss);
        assert_eq!(blocks.clear().unwrap(), 2);
        assert_eq!(blocks.lookup_reverse(&["a", "b", "c"]).unwrap(), None);
        store.close(LONG).unwrap();
        assert_eq!(tiers.open_far().stats().unwrap().blocks, 0);
    });
}

#[test]
fn a_block_that_a_pin_keeps_from_being_deleted_is_counted_as_unwritten() {
    let tiers = Tiers::new();
    fs::remove_dir(tiers.path("far")).unwrap();
    let store = tiers.open("near", tiers.far(LayoutKind::Segments).policy(FarPolicy::WriteBack));
    let blocks = namespace(&store);
    put(&blocks, "a", SHAPE);
    put(&blocks, "b", SHAPE);
    let _pin = blocks.pin(&["a"]).unwrap();
    let error = blocks.delete(&["a", "b"]).unwrap_err();
    assert!(matches!(error, Error::FarUnavailable { .. }), "{error:?}");
    assert_eq!(blocks.lookup(&["a", "b"]).unwrap(), [true, false]);
    let stats = far_stats(&store);
    assert_eq!((stats.backlog_blocks, stats.unwritten_blocks), (0, 1));
}

#[test]
fn namespaces_without_blocks_come_and_go_in_both_tiers() {
    for policy in [FarPolicy::WriteThrough, FarPolicy::WriteBack] {
        let tiers = Tiers::new();
        let store = tiers.open("near", tiers.far(LayoutKind::Segments).policy(policy));
        for number in 0..3 {
            let description = model(&format!("model {number}"));
            let blocks = store.namespace(&description, NamespaceOptions::default()).unwrap();
            put(&blocks, "a", SHAPE);
            eventually("it is written", || far_stats(&store).written_blocks == number + 1);
            assert_eq!(blocks.delete(&["a"]).unwrap(), 1);
        }
        eventually("the near tier has them no more", || store.namespaces().unwrap().is_empty());
        eventually("nothing is kept of them", || store.stats().unwrap().namespaces.is_empty());
        assert!(!store.metrics().unwrap().contains("model=\"model 1\""));
        let is_far_empty = || far_stats(&store).store.is_some_and(|far| far.namespaces.is_empty());
        eventually("nor has the far one", is_far_empty);
    }
}

#[test]
fn write_back_does_not_wait_for_the_far_tier() {
    each_far_layout(|tiers, far| {
        let store = tiers.open("near", far.policy(FarPolicy::WriteBack));
        let blocks = namespace(&store);
        let gate = Gate::new();
        let hang = gate.clone();
        tiers.script.set(move |operation| operation.is_write.then(|| Fault::Hang(hang.clone())));
        put(&blocks, "a", SHAPE);
        eventually("the far tier writes", || gate.came() > 0);
        let stats = far_stats(&store);
        assert_eq!((stats.backlog_blocks, stats.backlog_bytes), (1, 4096 + 2 * 73_728));
        tiers.script.clear();
        gate.open();
        store.close(LONG).unwrap();
        let far = tiers.open_far();
        assert_eq!(get_status(&namespace(&far), "a", SHAPE), Status::Ok);
    });
}

#[test]
fn closing_says_what_was_not_written_back() {
    each_far_layout(|tiers, far| {
        let store = tiers.open("near", far.policy(FarPolicy::WriteBack));
        let gate = Gate::new();
        let hang = gate.clone();
        tiers.script.set(move |operation| operation.is_write.then(|| Fault::Hang(hang.clone())));
        put(&namespace(&store), "a", SHAPE);
        let error = store.close(Some(Duration::from_millis(100))).unwrap_err();
        assert!(error.to_string().starts_with("1 blocks were not written to the far tier"), "{error}");
        gate.open();
    });
}

/// A store whose far tier hangs at the gate, and a load that waits for it. The near tier has `both`.
fn hanging(tiers: &Tiers, far: FarOptions) -> (Store, Gate, Ticket, Vec<Arc<Memory>>) {
    let store = tiers.open("near", far);
    let blocks = namespace(&store);
    put(&blocks, "both", SHAPE);
    assert_eq!(blocks.lookup(&["both"]).unwrap(), [true]);
    let elsewhere = tiers.open_far();
    put(&namespace(&elsewhere), "far", SHAPE);
    eventually("it is followed", || blocks.lookup(&["far"]).unwrap() == [true]);
    let gate = Gate::new();
    let hang = gate.clone();
    tiers.script.set(move |_| Some(Fault::Hang(hang.clone())));
    let (late, memory) = begin_load(&blocks, "far", SHAPE, 0..2, |_| {});
    eventually("it hangs", || gate.came() > 0);
    (store, gate, late, memory)
}

/// Nothing of the near tier waits for a far tier that hangs.
#[test]
fn the_near_tier_does_not_notice_that_the_far_one_hangs() {
    each_far_layout(|tiers, far| {
        let far = far.timeout(LONG.unwrap()).lookup_timeout(LONG.unwrap());
        let (store, gate, late, _) = hanging(tiers, far);
        let blocks = namespace(&store);
        let mut slowest = Duration::ZERO;
        for _ in 0..200 {
            let begin = Instant::now();
            assert_eq!(get_status(&blocks, "both", SHAPE), Status::Ok);
            assert_eq!(blocks.lookup(&["both"]).unwrap(), [true]);
            slowest = slowest.max(begin.elapsed());
        }
        assert!(slowest < LONG.unwrap() / 2, "{slowest:?}");
        let new = begin_store(&blocks, "new", SHAPE, 0..2);
        eventually("the near tier has it", || get_status(&blocks, "new", SHAPE) == Status::Ok);
        assert!(late.poll().is_none() && new.poll().is_none(), "the far tier hangs still");
        tiers.script.clear();
        gate.open();
        assert!(end(&late).is_ok());
        assert_eq!(end(&new).far_missing, 0);
    });
}

/// What waits for a far tier that hangs ends in time, and nothing is wrong when that goes on.
#[test]
fn what_waits_for_a_far_tier_that_hangs_ends_in_time() {
    const TIMEOUT: Duration = Duration::from_secs(1);
    each_far_layout(|tiers, far| {
        let (store, gate, late, memory) = hanging(tiers, far.timeout(TIMEOUT).lookup_timeout(TIMEOUT));
        let blocks = namespace(&store);
        for number in 0..4 {
            let completion = end(&begin_store(&blocks, &format!("new {number}"), SHAPE, 0..2));
            assert_eq!((completion.items, completion.far_missing), (vec![Status::Ok; 2], 1));
            assert_eq!(get_status(&blocks, "both", SHAPE), Status::Ok);
        }
        assert_eq!(late.wait(LONG).unwrap().items, [Status::TimedOut; 2]);
        assert!(!late.is_released() && Arc::strong_count(&memory[0]) > 1, "the far tier may write to it");
        assert!(far_stats(&store).failures > 0);
        tiers.script.clear();
        gate.open();
        eventually("the memory is given back", || late.is_released());
        eventually("the far tier is back", || get_status(&blocks, "far", SHAPE) == Status::Ok);
        for number in 0..4 {
            assert_eq!(get_status(&blocks, &format!("new {number}"), SHAPE), Status::Ok);
        }
    });
}

/// Whether it was said since the last call that the far tier is open again.
fn has_recovered(store: &Store) -> bool {
    store.events().iter().any(|event| event.kind == EventKind::FarRecovered)
}

#[test]
fn a_far_tier_that_fails_is_opened_again() {
    each_far_layout(|tiers, far| {
        let store = tiers.open("near", far);
        let blocks = namespace(&store);
        tiers.script.set(|_| Some(Fault::Errno(libc::EIO)));
        for name in ["a", "b", "c", "d"] {
            let completion = end(&begin_store(&blocks, name, SHAPE, 0..2));
            assert_eq!((completion.items, completion.far_missing), (vec![Status::Ok; 2], 1));
        }
        eventually("it is given up", || far_stats(&store).outages > 0);
        assert_eq!(far_stats(&store).unwritten_blocks, 4);
        assert!(store.events().iter().any(|event| event.kind == EventKind::FarFailed));
        tiers.script.clear();
        eventually("it is opened again", || far_stats(&store).is_up);
        eventually("it is said", || has_recovered(&store));
        // The near tier has it, and it reaches the far one when it is stored again.
        assert_eq!(end(&begin_store(&blocks, "a", SHAPE, 0..2)).items, [Status::Exists; 2]);
        eventually("it is written", || far_stats(&store).written_blocks == 1);
    });
}

#[test]
fn a_far_tier_that_is_gone_comes_back() {
    each_far_layout(|tiers, far| {
        let store = tiers.open("near", far);
        let blocks = namespace(&store);
        put(&blocks, "a", SHAPE);
        let (root, aside) = (tiers.root.path().join("far"), tiers.root.path().join("aside"));
        fs::rename(&root, &aside).unwrap();
        eventually("it is missed", || !far_stats(&store).is_up);
        put(&blocks, "b", SHAPE);
        let failure = || store.report().unwrap().far.unwrap().failure.unwrap_or_default();
        eventually("it cannot be opened", || failure().contains("its directory is not there"));
        assert!(!root.exists(), "no other store is made in its place");
        fs::rename(&aside, &root).unwrap();
        eventually("it is opened again", || far_stats(&store).is_up);
        assert_eq!(end(&begin_store(&blocks, "c", SHAPE, 0..2)).far_missing, 0);
        store.close(LONG).unwrap();
        assert_eq!(namespace(&tiers.open_far()).lookup(&["a", "b", "c"]).unwrap(), [true, false, true]);
    });
}

#[test]
fn a_far_tier_that_is_missing_at_the_start_joins_when_it_comes() {
    each_far_layout(|tiers, far| {
        let root = tiers.path("far");
        fs::remove_dir(&root).unwrap();
        let store = tiers.open("near", far.policy(FarPolicy::WriteBack));
        let blocks = namespace(&store);
        put(&blocks, "a", SHAPE);
        assert_eq!(get_status(&blocks, "a", SHAPE), Status::Ok);
        assert_eq!(get_status(&blocks, "b", SHAPE), Status::Miss);
        let stats = far_stats(&store);
        assert!(!stats.is_up && stats.outages == 1 && stats.backlog_blocks == 1, "{stats:?}");
        let failure = store.report().unwrap().far.unwrap().failure.unwrap();
        assert!(failure.contains("mount its file system, or make the directory"), "{failure}");
        assert!(store.events().iter().any(|event| event.kind == EventKind::FarFailed));
        assert!(!root.exists(), "nothing is made below a file system that is not mounted");

        fs::create_dir(&root).unwrap();
        eventually("it joins", || far_stats(&store).written_blocks == 1);
        eventually("it is said", || has_recovered(&store));
        assert_eq!(store.report().unwrap().far.unwrap().failure, None);
        store.close(LONG).unwrap();
        assert_eq!(get_status(&namespace(&tiers.open_far()), "a", SHAPE), Status::Ok);
    });
}

#[test]
fn a_store_opens_whatever_is_in_the_way_of_its_far_tier() {
    let tiers = Tiers::new();
    fs::write(tiers.path("file"), b"").unwrap();
    let store = tiers.open("near", far_options(&tiers.path("file").join("far"), LayoutKind::Segments));
    let blocks = namespace(&store);
    put(&blocks, "a", SHAPE);
    assert_eq!(get_status(&blocks, "a", SHAPE), Status::Ok);
    assert!(!far_stats(&store).is_up);
    assert!(store.report().unwrap().far.unwrap().failure.is_some());
}

#[test]
fn a_reader_finds_a_far_tier_once_a_writer_has_made_it() {
    each_far_layout(|tiers, far| {
        drop(Store::open(options(&tiers.root)).unwrap());
        let near = options(&tiers.root).access(StoreAccess::Read);
        let reader = Store::open(near.far(far.clone().timeout(LONG.unwrap()))).unwrap();
        let begin = Instant::now();
        let blocks = namespace(&reader);
        assert!(begin.elapsed() < LONG.unwrap() / 2, "a namespace that no writer has made is not waited for");
        assert!(!far_stats(&reader).is_up);
        let writer = tiers.open("near", far);
        put(&namespace(&writer), "a", SHAPE);
        eventually("it is found", || blocks.lookup(&["a"]).unwrap() == [true]);
        assert_eq!(get_status(&blocks, "a", SHAPE), Status::Ok);
    });
}

#[test]
fn options_of_the_far_tier_that_cannot_be_are_an_error() {
    let tiers = Tiers::new();
    let good = far_options(&tiers.path("far"), LayoutKind::Segments);
    let refused = |far: FarOptions, reason: &str| {
        let error = Store::open(near_options(&tiers.path("near"), far)).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { .. }), "{error:?}");
        assert!(error.to_string().contains(reason), "{error}");
    };
    refused(FarOptions::new(tiers.path("far")), "far.capacity");
    refused(good.clone().min_free_bytes(u64::MAX), "far.min_free");
    refused(good.clone().timeout(Duration::ZERO), "far.timeout");
    refused(good.clone().timeout(Duration::MAX), "far.timeout");
    refused(good.clone().lookup_timeout(Duration::MAX), "far.lookup_timeout");
    refused(good.clone().staging_bytes(0), "far.staging_bytes");
    refused(good.clone().policy(FarPolicy::WriteBack).backlog_bytes(0), "far.backlog_bytes");
    refused(far_options(&tiers.path("near"), LayoutKind::Segments), "another store than the near one");
    let near = near_options(&tiers.path("near"), good.clone()).direct(DirectPath::Require);
    let error = Store::open(near).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { option: "direct", .. }), "{error:?}");
    let inside = tiers.path("near").join("far");
    fs::create_dir(&inside).unwrap();
    refused(far_options(&inside, LayoutKind::Segments), "far.root");
    refused(far_options(tiers.root.path(), LayoutKind::Segments), "the near tier is there");
    fs::write(tiers.path("far").join("STORE"), b"something else").unwrap();
    let error = Store::open(near_options(&tiers.path("near"), tiers.far(LayoutKind::Segments))).unwrap_err();
    assert!(matches!(error, Error::NotAStore { .. }), "{error:?}");
}

/// Many threads store, load and look up, in a near tier that evicts and before a far one that fails now and then.
#[test]
fn no_byte_is_wrong_while_blocks_move_between_the_tiers() {
    const BLOCKS: usize = 60;
    let shape = Shape::of(2, 300_000);
    each_far_layout(|tiers, far| {
        let dice = Mutex::new(Dice(7));
        tiers.script.set(move |_| match dice.lock().unwrap().roll(60) {
            0 => Some(Fault::Errno(libc::EIO)),
            1 => Some(Fault::Delay(Duration::from_millis(20))),
            _ => None,
        });
        let policy = FarPolicy::WriteBack;
        let options = StoreOptions::new(tiers.root.path().join("near")).capacity_bytes(16_u64 << 20);
        let store = Store::open(options.min_free_bytes(0).far(far.policy(policy))).unwrap();
        let blocks = store.namespace(&model("m"), NamespaceOptions::default()).unwrap();
        let loaded = AtomicU64::new(0);
        thread::scope(|scope| {
            for seed in 1..=8 {
                let (blocks, loaded) = (&blocks, &loaded);
                scope.spawn(move || {
                    let mut dice = Dice(seed * 977);
                    for _ in 0..60 {
                        let name = format!("block {}", dice.roll(BLOCKS));
                        if dice.roll(2) == 0 {
                            end(&begin_store(blocks, &name, shape, 0..2));
                        } else {
                            // It compares what it gets.
                            let statuses = get(blocks, &name, shape);
                            let count = statuses.iter().filter(|status| **status == Status::Ok).count();
                            loaded.fetch_add(count as u64, Ordering::Relaxed);
                            assert!(!statuses.contains(&Status::Corrupt), "{statuses:?}");
                        }
                    }
                });
            }
        });
        assert!(loaded.into_inner() > 0);
        eventually("blocks are written", || far_stats(&store).written_blocks > 0);
    });
}

#[test]
fn shards_of_several_requests_are_written_whole() {
    each_far_layout(|tiers, far| {
        // Room for one block at a time in each of the two threads.
        let shape = Shape { shards: 4, len: 70_000, skew: 0, pieces: 1 };
        let far = far.policy(FarPolicy::WriteBack).staging_bytes(2 * 4 * (70_000 + 4096));
        let store = tiers.open("near", far);
        let blocks = namespace(&store);
        let keys: Vec<String> = (0..12).map(|number| format!("block {number}")).collect();
        for shard in 0..4 {
            for key in &keys {
                assert!(end(&begin_store(&blocks, key, shape, shard..shard + 1)).is_ok());
            }
        }
        eventually("all are written", || far_stats(&store).written_blocks == 12);
        assert_eq!(far_stats(&store).unwritten_blocks, 0);
        store.close(LONG).unwrap();
        drop((blocks, store));
        let far = tiers.open_far();
        let blocks = namespace(&far);
        assert_eq!(blocks.lookup_prefix(&keys).unwrap(), 12);
    });
}

#[test]
fn a_block_larger_than_the_staging_memory_is_counted_and_said() {
    let tiers = Tiers::new();
    let far = tiers.far(LayoutKind::Segments).policy(FarPolicy::WriteBack).staging_bytes(100_000);
    let store = tiers.open("near", far);
    let blocks = namespace(&store);
    put(&blocks, "large", SHAPE);
    eventually("it is given up", || far_stats(&store).unwritten_blocks == 1);
    let events = store.events();
    assert!(events.iter().any(|event| event.reason.contains("larger than the staging memory")), "{events:?}");
    store.close(LONG).unwrap();
}

/// Blocks of which the staging memory has room for few are read once each, in their order.
#[test]
fn blocks_of_many_small_shards_wait_until_the_staging_memory_has_room() {
    const BLOCKS: u64 = 64;
    let shape = Shape { shards: 64, len: 64, skew: 0, pieces: 1 };
    let tiers = Tiers::new();
    fs::remove_dir(tiers.path("far")).unwrap();
    let far = tiers.far(LayoutKind::Segments).policy(FarPolicy::WriteBack);
    // Two blocks fit into each thread's half.
    let far = far.staging_bytes(2 * 2 * 64 * (64 + 4096));
    let (reads, near) = (Arc::new(AtomicU64::new(0)), Script::default());
    let counted = reads.clone();
    near.set(move |operation| {
        counted.fetch_add(u64::from(!operation.is_write), Ordering::Relaxed);
        None
    });
    let store = Store::open(near_options(&tiers.path("near"), far).faults(near.faults())).unwrap();
    let blocks = namespace(&store);
    for number in 0..BLOCKS {
        put(&blocks, &format!("block {number}"), shape);
    }
    assert_eq!(far_stats(&store).backlog_blocks, BLOCKS);
    reads.store(0, Ordering::Relaxed);
    fs::create_dir(tiers.path("far")).unwrap();
    eventually("all are written", || far_stats(&store).written_blocks == BLOCKS);
    let reads = reads.load(Ordering::Relaxed);
    // A header of each, and its shards together.
    assert!(reads <= BLOCKS * 3, "{reads} reads");
    store.close(LONG).unwrap();
}

/// A block that waits while another one is written is no failure of the far tier, however long that write takes.
#[test]
fn a_wait_for_a_slow_write_is_no_failure_of_the_far_tier() {
    let tiers = Tiers::new();
    let far = tiers.far(LayoutKind::Segments).policy(FarPolicy::WriteBack);
    let store = tiers.open("near", far.timeout(Duration::from_secs(120)).staging_bytes(2 * (70_000 + 4096)));
    let (gate, writes) = (Gate::new(), Arc::new(AtomicU64::new(0)));
    let (hang, counted) = (gate.clone(), writes.clone());
    tiers.script.set(move |operation| {
        (operation.is_write && counted.fetch_add(1, Ordering::Relaxed) == 0)
            .then(|| Fault::Hang(hang.clone()))
    });
    let blocks = namespace(&store);
    put(&blocks, "a", SHAPE);
    eventually("the first is being written", || writes.load(Ordering::Relaxed) > 0);
    put(&blocks, "b", SHAPE);
    // Without room for the second one, this was an event after a second.
    thread::sleep(Duration::from_secs(2));
    gate.open();
    eventually("both are written", || far_stats(&store).written_blocks == 2);
    let events = store.events();
    assert!(events.iter().all(|event| event.kind != EventKind::FarFailed), "{events:?}");
    store.close(LONG).unwrap();
}

/// A far tier whose writes never end, and keep all the staging memory, is given up.
#[test]
fn closing_ends_though_no_staging_memory_comes_back() {
    let tiers = Tiers::new();
    let far = tiers.far(LayoutKind::Segments).policy(FarPolicy::WriteBack);
    let far = far.timeout(Duration::from_millis(500)).staging_bytes(2 * (70_000 + 4096));
    let store = tiers.open("near", far);
    let gate = Gate::new();
    let hang = gate.clone();
    tiers.script.set(move |operation| operation.is_write.then(|| Fault::Hang(hang.clone())));
    put(&namespace(&store), "a", SHAPE);
    eventually("it is given up", || {
        store.events().iter().any(|event| event.reason.contains("no staging memory comes back"))
    });
    assert!(far_stats(&store).outages > 0);
    let closing = {
        let store = store.clone();
        thread::spawn(move || store.close(None))
    };
    eventually("closing ends", || closing.is_finished());
    let closed = closing.join().unwrap();
    assert!(matches!(closed, Err(Error::NotWrittenBack { blocks: 1, .. })), "{closed:?}");
    tiers.script.clear();
    gate.open();
}
