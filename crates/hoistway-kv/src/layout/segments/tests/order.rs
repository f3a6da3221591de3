//! The order in which things reach the disk, and in which they are read again: what nothing else would notice.

use super::*;
use crate::format::record::RECORD_LEN;
use crate::layout::segments::log::{Log, Owner, Start, Sync};
use std::path::Path;

const SEEDS: std::ops::Range<u64> = 0..30;

fn bench_of(seed: u64) -> Bench {
    Bench { disk: SimulatedDisk::new(seed, 64 << 20), ..Bench::new() }
}

#[test]
fn records_that_are_read_of_a_dead_writer_are_synced_before_they_count() {
    for seed in SEEDS {
        let mut bench = bench_of(seed);
        bench.options.durability = Durability::None;
        let store = bench.open();
        bench.put_all(&store, &["a", "b"]);
        drop(store);
        bench.options.durability = Durability::Batched;
        let store = bench.open();
        assert_eq!(bench.found(&store, &["a", "b"]), [true, true]);
        drop(store);
        bench.disk.crash();
        let store = bench.open();
        // Their bytes may be lost, as no sync covered them; their records are not.
        assert!(["a", "b"].iter().all(|key| bench.find(&store, key).is_some()), "seed {seed}");
    }
}

#[test]
fn a_checkpoint_is_whole_before_it_has_its_name() {
    for seed in SEEDS {
        let bench = bench_of(seed);
        let store = bench.open();
        for round in 0..3 {
            bench.put_all(&store, &[&format!("{round}")]);
            store.writer().unwrap().checkpoint().unwrap();
        }
        drop(store);
        bench.disk.crash();
        let store = bench.open();
        assert_eq!(bench.found(&store, &["0", "1", "2"]), [true; 3], "seed {seed}");
        assert_eq!(store.usage().lost_on_recovery, 0, "seed {seed}");
    }
}

#[test]
fn what_is_written_during_a_sync_is_not_synced_by_it() {
    for seed in SEEDS {
        let disk = SimulatedDisk::new(seed, 64 << 20);
        let owner = Owner { writer: Uuid::from_u128(1), epoch: 1, proven_from: ProvenFrom(1) };
        let start = Start::new(1, 1, format::record::Begin::Next);
        let log = Log::create(Arc::new(disk.clone()), Path::new("/"), owner, 4096, start).unwrap();
        let log = Arc::new(log);
        let tombstone = |number: u8| format::record::Change::Tombstone {
            fingerprint: Fingerprint([number; 16]),
            sequence: 1,
        };
        let during = Arc::clone(&log);
        disk.during_next_sync(move || during.append(&[tombstone(2)], Sync::Later).unwrap());
        log.append(&[tombstone(1)], Sync::Now).unwrap();
        log.sync_all().unwrap();
        disk.crash();
        let path = disk.paths().into_iter().find(|path| path.to_string_lossy().contains("idx-")).unwrap();
        let bytes = disk.read(&path, 2 * RECORD_LEN as u64, RECORD_LEN).unwrap();
        assert!(format::record::Record::parse(&bytes).is_ok(), "seed {seed}");
    }
}

#[test]
fn a_good_record_in_another_ones_place_does_not_count() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    store.delete(NAMESPACE, &[(b"a", fingerprint("a"))]).unwrap();
    bench.put_all(&store, &["b"]);
    drop(store);
    let log = bench.file("idx-");
    let record = |number: u64| bench.disk.read(&log, number * RECORD_LEN as u64, RECORD_LEN).unwrap();
    let parsed = |number| format::record::Record::parse(&record(number)).unwrap().change;
    // The head, the namespace, `a`, its tombstone, `b`.
    let (a, b) = (parsed(2), parsed(4));
    assert!(matches!((a, b), (format::record::Change::Commit(_), format::record::Change::Commit(_))));
    bench.disk.write(&log, 4 * RECORD_LEN as u64, &record(2)).unwrap();
    let store = bench.open();
    assert!(bench.find(&store, "a").is_none(), "it was deleted");
    assert!(bench.find(&store, "b").is_none());
}

#[test]
fn a_tombstone_of_an_older_write_leaves_the_newer_one() {
    let mut bench = Bench::new();
    let store = bench.open();
    bench.options.access = StoreAccess::Read;
    let reader = bench.open();
    bench.options.access = StoreAccess::ReadWrite;
    bench.put_all(&store, &["a"]);
    // Its tombstone is written later.
    store.invalidate(&bench.find(&store, "a").unwrap());
    bench.put_all(&store, &["a"]);
    store.maintain().unwrap();
    let log = bench.file("idx-");
    let records = bench.disk.read(&log, 0, 1 << 16).unwrap();
    let is_tombstone = |bytes: &[u8]| {
        let record = format::record::Record::parse(bytes);
        record.is_ok_and(|record| matches!(record.change, format::record::Change::Tombstone { .. }))
    };
    assert_eq!(records.chunks_exact(RECORD_LEN).filter(|bytes| is_tombstone(bytes)).count(), 1);
    reader.maintain().unwrap();
    assert!(bench.has(&reader, "a"));
    drop(store);
    assert!(bench.has(&bench.open(), "a"));
}

#[test]
fn the_place_of_an_expired_block_that_is_read_is_not_used_again() {
    let bench = Bench::new();
    let store = bench.open();
    let ttl = NamespaceOptions::default().ttl(Duration::from_secs(60));
    store.open_namespace(NAMESPACE, "{}", ttl).unwrap();
    bench.put_all(&store, &["read"]);
    let found = bench.find(&store, "read").unwrap();
    bench.now.fetch_add(61, Ordering::Relaxed);
    // It is stored anew, in place of the one whose time is over.
    bench.put_all(&store, &["read"]);
    for number in 0..200 {
        bench.put_all(&store, &[&format!("{number}")]);
    }
    let read = bench.disk.read(found.place.file.path(), found.place.payload, LEN).unwrap();
    assert!(read == content("read", LEN), "another block was written over one that is read");
    let header = bench.disk.read(found.place.file.path(), found.place.header.unwrap(), HEADER_LEN).unwrap();
    let token = found.token.downcast_ref::<FoundToken>().unwrap();
    assert_eq!(BlockHeader::parse(&header).unwrap().sequence, token.entry.sequence);
}

#[test]
fn what_is_to_be_left_free_is_left_free() {
    let mut bench = Bench::new();
    bench.options.capacity_bytes = Some(8 << 20);
    bench.options.min_free_bytes = (64 << 20) - (1 << 20);
    let store = bench.open();
    for number in 0..200 {
        bench.put_all(&store, &[&format!("{number}")]);
        store.maintain().unwrap();
    }
    assert!(bench.disk.most_used() <= 1 << 20, "{}", bench.disk.most_used());
    assert!(store.usage().blocks > 20);
}

#[test]
fn a_request_for_room_expires_with_its_lease() {
    let bench = Bench::new();
    let rich = bench.open();
    for number in 0..200 {
        bench.put(&rich, &format!("rich {number}")).unwrap();
    }
    let poor = bench.open();
    bench.put(&poor, "poor").unwrap();
    let wanted = || others_of(&rich).wanted;
    assert!(wanted() > 0);
    bench.now.fetch_add(60, Ordering::Relaxed);
    assert!(wanted() > 0);
    // It lives, and is stopped.
    bench.now.fetch_add(1, Ordering::Relaxed);
    assert_eq!(wanted(), 0);
    poor.maintain().unwrap();
    assert!(wanted() > 0, "it goes on");
}

#[test]
fn blocks_that_gave_way_stay_away_once_their_places_have_others() {
    for seed in SEEDS {
        let bench = bench_of(seed);
        let store = bench.open();
        let keys: Vec<String> = (0..150).map(|number| format!("{number}")).collect();
        for key in &keys {
            assert_eq!(bench.put(&store, key).unwrap(), Put::Done);
        }
        let there: Vec<bool> = keys.iter().map(|key| bench.find(&store, key).is_some()).collect();
        drop(store);
        bench.disk.crash();
        let store = bench.open();
        for (key, was_there) in keys.iter().zip(there) {
            if was_there {
                assert!(bench.has(&store, key), "{key}, seed {seed}");
            } else if let Some(found) = bench.find(&store, key) {
                assert!(matches!(bench.verdict(&store, key, &found), Verdict::Good(_)), "{key}, seed {seed}");
            }
        }
    }
}

#[test]
fn places_of_blocks_that_went_ahead_are_free_once_a_commit_has_synced() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a", "b"]);
    let writer = store.writer().unwrap();
    let free = || lock(&writer.slots).free();
    let before = free();
    writer.evict_before_need(&Want { from: Candidates::Anywhere, bytes: 1 }).unwrap();
    writer.release_synced();
    assert_eq!(free(), before, "its tombstone is not on the disk");
    // It takes as many slots as the one that went.
    bench.put_all(&store, &["c"]);
    assert_eq!(free(), before);
    drop(writer);
    drop(store);
    bench.disk.crash();
    let there = bench.found(&bench.open(), &["a", "b", "c"]);
    assert_eq!(there.iter().filter(|found| **found).count(), 2, "{there:?}");
}

#[test]
fn a_segment_is_made_before_it_is_needed_while_blocks_are_stored() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..7 {
        bench.put_all(&store, &[&format!("{number}")]);
    }
    assert_eq!(bench.files("seg-").len(), 1);
    store.maintain().unwrap();
    assert_eq!(bench.files("seg-").len(), 2);
    for _ in 0..3 {
        store.maintain().unwrap();
    }
    assert_eq!(bench.files("seg-").len(), 2, "nothing is stored");
}
