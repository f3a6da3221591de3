//! Damage to what is on the disk: the block that it hit is lost, and no other.

use super::*;

#[test]
fn a_head_that_promises_more_than_there_can_be_is_not_believed() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let writer = store.writer().unwrap().id;
    drop(store);
    let segment = bench.file("seg-");
    let slots = u32::MAX;
    let head =
        format::segment::SegmentHead { writer, number: 1, slot_bytes: 8192, slots, most_blocks: slots };
    bench.disk.write(&segment, 0, &head.to_bytes()).unwrap();
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a"]), [false]);
    assert_eq!(store.usage().lost_on_recovery, 1);
    bench.put_all(&store, &["a"]);
    assert!(bench.disk.most_used() <= 1 << 20);
}

#[test]
fn a_flipped_record_loses_its_block_and_no_other() {
    let bench = Bench::new();
    let store = bench.open();
    let keys = ["a", "b", "c", "d"];
    bench.put_all(&store, &keys);
    drop(store);
    // The head, the namespace and `a` come first.
    bench.disk.flip(&bench.file("idx-"), (3 * 64 + 20) * 8);
    let store = bench.open();
    assert_eq!(bench.found(&store, &keys), [true, false, true, true]);
    assert_eq!(store.usage().lost_on_recovery, 1);
    drop(store);
    // It is counted once.
    let store = bench.open();
    assert_eq!(store.usage().lost_on_recovery, 0);
    assert_eq!(bench.found(&store, &keys), [true, false, true, true]);
    bench.put_all(&store, &["b"]);
}

#[test]
fn a_torn_record_at_the_end_of_a_log_is_no_damage() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a", "b"]);
    drop(store);
    let log = bench.file("idx-");
    bench.disk.truncate(&log, 4 * 64 - 30);
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a", "b"]), [true, false]);
    assert_eq!(store.usage().lost_on_recovery, 0);
    bench.put_all(&store, &["c"]);
    drop(store);
    assert_eq!(bench.found(&bench.open(), &["a", "b", "c"]), [true, false, true]);
}

#[test]
fn a_damaged_checkpoint_is_made_good_by_the_one_before_it() {
    let bench = Bench::new();
    let store = bench.open();
    let checkpoint = || store.writer().unwrap().checkpoint().unwrap();
    bench.put_all(&store, &["a"]);
    checkpoint();
    bench.put_all(&store, &["b"]);
    checkpoint();
    bench.put_all(&store, &["c"]);
    drop(store);
    // The second one is of an even generation.
    bench.disk.flip(&bench.file("CKPT-a"), 8 * 30);
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a", "b", "c"]), [true; 3]);
    assert!(store.usage().lost_on_recovery > 0, "the damage is told");
    drop(store);
    let newest = bench.file("CKPT-a");
    bench.disk.flip(&newest, (4096 + 64 + 20) * 8);
    let store = bench.open();
    assert_eq!(store.usage().lost_on_recovery, 1, "a record of a checkpoint");
    assert_eq!(bench.found(&store, &["a", "b", "c"]).iter().filter(|is_there| **is_there).count(), 2);
}

#[test]
fn blocks_without_checksums_do_not_outlive_damage_to_the_log() {
    let mut bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a", "b"]);
    let Reservation::Claimed(claim) = bench.reserve(&store, "c").unwrap() else { panic!() };
    let mut written = bench.write(claim, &content("c", LEN));
    written.table.0[0].checksum = None;
    let header = written.claim.header(&written.table);
    let place = &written.claim.place;
    bench.disk.write(place.file.path(), place.header.unwrap(), &header).unwrap();
    store.commit(vec![written]).pop().unwrap().unwrap();
    bench.put_all(&store, &["d"]);
    drop(store);
    let log = bench.file("idx-");
    bench.options.access = StoreAccess::Read;
    assert!(bench.find(&bench.open(), "c").is_some());
    bench.options.access = StoreAccess::ReadWrite;
    // Whether `c` is still what is in its place was perhaps said by this record.
    bench.disk.flip(&log, (3 * 64 + 20) * 8);
    let store = bench.open();
    assert!(bench.find(&store, "c").is_none());
    assert_eq!(bench.found(&store, &["a", "b", "d"]), [true, false, true]);
}

#[test]
fn a_damaged_superblock_is_no_store() {
    let bench = Bench::new();
    drop(bench.open());
    bench.disk.flip(&bench.file("STORE"), 200);
    let refused = bench.try_open().unwrap_err();
    assert!(matches!(&refused, Error::NotAStore { .. }), "{refused}");
    bench.disk.flip(&bench.file("STORE"), 200);
    bench.disk.flip(&bench.file("STORE"), 64 + 3);
    let refused = bench.try_open().unwrap_err();
    assert!(matches!(&refused, Error::UnknownFormat { found: 10, known: 2, .. }), "{refused}");
}

#[test]
fn a_damaged_header_is_told_from_one_that_moved() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a", "b"]);
    let found = bench.find(&store, "a").unwrap();
    bench.disk.flip(found.place.file.path(), (found.place.header.unwrap() + 100) * 8);
    assert!(matches!(bench.verdict(&store, "a", &found), Verdict::Corrupt(_)));
    store.invalidate(&found);
    drop(found);
    assert!(bench.find(&store, "a").is_none());
    assert_eq!(store.usage().corrupt_blocks, 1);
    // Its place is used again, and it stays gone.
    store.maintain().unwrap();
    bench.put_all(&store, &["a"]);
    drop(store);
    assert_eq!(bench.found(&bench.open(), &["a", "b"]), [true, true]);
}

#[test]
fn a_truncated_segment_loses_what_was_cut_off() {
    let bench = Bench::new();
    let store = bench.open();
    let keys = ["a", "b", "c"];
    bench.put_all(&store, &keys);
    let place = bench.find(&store, "b").unwrap().place;
    drop(store);
    bench.disk.truncate(place.file.path(), usize::try_from(place.header.unwrap()).unwrap() + 4096);
    let store = bench.open();
    assert_eq!(bench.found(&store, &keys).iter().filter(|is_there| **is_there).count(), 1);
    assert_eq!(store.usage().lost_on_recovery, 2);
    bench.put_all(&store, &["b"]);
}

#[test]
fn blocks_of_a_removed_segment_are_misses() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    drop(store);
    bench.disk.remove(&bench.file("seg-")).unwrap();
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a"]), [false]);
    bench.put_all(&store, &["a"]);
}

#[test]
fn blocks_that_no_sync_covers_are_known_from_the_others() {
    let mut bench = Bench::new();
    let is_proven = |store: &Segments, key| bench_found(store, key).is_proven;
    let store = bench.open();
    bench.put_all(&store, &["synced"]);
    assert!(is_proven(&store, "synced"));
    drop(store);
    // As long as a process runs, its blocks are in the page cache or on the disk.
    bench.options.durability = Durability::None;
    let store = bench.open();
    bench.put_all(&store, &["closed"]);
    assert!(is_proven(&store, "synced") && is_proven(&store, "closed"));
    let mut reading = bench.options.clone();
    reading.access = StoreAccess::Read;
    let reader = Bench { options: reading, disk: bench.disk.clone(), ..Bench::new() }.open();
    assert!(!is_proven(&reader, "closed"), "its writer syncs nothing");
    store.close().unwrap();
    reader.follow().unwrap();
    assert!(is_proven(&reader, "synced") && is_proven(&reader, "closed"), "it was synced at the end");
    drop(store);
    let store = bench.open();
    assert!(is_proven(&store, "synced") && is_proven(&store, "closed"));
    bench.put_all(&store, &["killed"]);
    // A checkpoint says it, too.
    store.writer().unwrap().checkpoint().unwrap();
    drop(store);
    bench.options.durability = Durability::Batched;
    let store = bench.open();
    bench.put_all(&store, &["later"]);
    assert!(!is_proven(&store, "killed"));
    assert!(is_proven(&store, "later"));
    store.close().unwrap();
    drop(store);
    let store = bench.open();
    assert!(!is_proven(&store, "killed"), "a sync by another opening proves nothing");
    assert!(is_proven(&store, "later"));
}

#[test]
fn what_an_older_version_wrote_is_not_known_to_be_synced() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let writer = store.writer().unwrap();
    let change = format::record::Change::Head {
        writer: writer.id,
        log: 1,
        epoch: 1,
        begin: format::record::Begin::Next,
        proven_from: ProvenFrom::UNKNOWN,
    };
    let head = format::record::Record { number: 0, before: 0, change };
    drop(store);
    bench.disk.write(&bench.file("idx-"), 0, &head.to_bytes()).unwrap();
    let store = bench.open();
    assert!(!bench_found(&store, "a").is_proven);
    bench.put_all(&store, &["b"]);
    assert!(bench_found(&store, "b").is_proven);
}

fn bench_found(store: &Segments, key: &str) -> Found {
    match store.find(NAMESPACE, &Key::new(key.as_bytes()).unwrap(), fingerprint(key)) {
        Lookup::Found(found) => found,
        other => panic!("{key}: {other:?}"),
    }
}
