//! What processes see and leave of one another.

use super::*;

#[test]
fn a_directory_has_one_writer_and_is_taken_over_from_a_dead_one() {
    let bench = Bench::new();
    let first = bench.open();
    bench.put_all(&first, &["a"]);
    let second = bench.open();
    assert_eq!(bench.files("LEASE").len(), 2);
    assert_eq!(bench.found(&second, &["a"]), [true], "others' blocks are found at once");
    bench.put_all(&second, &["b"]);
    first.maintain().unwrap();
    assert_eq!(bench.found(&first, &["a", "b"]), [true, true]);
    drop((first, second));
    let third = bench.open();
    assert_eq!(bench.files("LEASE").len(), 2);
    assert_eq!(bench.found(&third, &["a", "b"]), [true, true]);
}

#[test]
fn a_directory_that_cannot_be_read_does_not_stop_writers() {
    let bench = Bench::new();
    let (first, second) = (bench.open(), bench.open());
    bench.put_all(&first, &["a"]);
    bench.put_all(&second, &["b"]);
    drop((first, second));
    bench.fail(Operation::Open, "idx-", 1, Errno::IO);
    let store = bench.open();
    assert_eq!(bench.files("LEASE").len(), 2);
    assert_eq!(store.usage().lost_on_recovery, 1);
    assert_eq!(bench.found(&store, &["a", "b"]), [true, true]);
    bench.put_all(&store, &["c"]);
}

#[test]
fn what_was_read_of_a_dead_writer_is_on_the_disk_before_its_room_is_used() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    drop(store);
    assert!(bench.files("CKPT").is_empty());
    let store = bench.open();
    // The next checkpoint is left to upkeep, and the old log stays until then.
    assert!(bench.files("CKPT").is_empty());
    assert_eq!(bench.files("idx-").len(), 2);
    store.maintain().unwrap();
    assert_eq!(bench.files("CKPT").len(), 1);
    bench.put_all(&store, &["b"]);
    store.close().unwrap();
    drop(store);
    let before = bench.files("CKPT");
    let store = bench.open();
    assert_eq!(bench.files("CKPT"), before, "it was closed");
    assert_eq!(bench.found(&store, &["a", "b"]), [true, true]);
}

#[test]
fn writers_that_are_killed_again_and_again_leave_few_logs() {
    let bench = Bench::new();
    for round in 0..6 {
        let store = bench.open();
        bench.put_all(&store, &[&format!("block {round}")]);
        assert!(bench.files("idx-").len() <= 3, "{:?}", bench.files("idx-"));
    }
}

#[test]
fn a_record_that_a_dead_writer_could_not_sync_is_on_the_disk_once_it_is_found() {
    for before in 0..8 {
        let bench = Bench::new();
        let store = bench.open();
        bench.put_all(&store, &["a", "c", "d", "e", "f", "g", "h", "i"][..=before]);
        // The system has the record in memory, and takes it for clean.
        bench.fail(Operation::Sync, "idx-", 1, Errno::IO);
        assert!(bench.put(&store, "b").is_err());
        drop(store);
        let store = bench.open();
        let found = bench.found(&store, &["a", "b"]);
        assert!(found[0], "it was acknowledged");
        drop(store);
        bench.disk.crash();
        let store = bench.open();
        assert_eq!((bench.found(&store, &["a", "b"]), store.usage().lost_on_recovery), (found, 0));
    }
}

#[test]
fn what_others_remove_is_not_found_any_more() {
    let bench = Bench::new();
    let (writer, reader) = (bench.open(), bench.open());
    bench.put_all(&writer, &["a", "b"]);
    reader.maintain().unwrap();
    let found = bench.find(&reader, "a").unwrap();
    let blocks = [("a", fingerprint("a"))].map(|(key, print)| (key.as_bytes(), print));
    assert_eq!(reader.delete(NAMESPACE, &blocks).unwrap(), 0, "another process stored it");
    assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
    // The reader knows nothing of it yet, and the place has another block by now: no other is free.
    let rest = 25 * 4096 - HEADER_LEN;
    assert_eq!(bench.put_len(&writer, "rest", rest).unwrap(), Put::Done);
    bench.put_all(&writer, &["c"]);
    assert_eq!(bench.verdict(&reader, "a", &found), Verdict::Moved);
    assert!(!bench.has(&reader, "a"));
    reader.maintain().unwrap();
    assert!(bench.find(&reader, "a").is_none());
    assert_eq!(bench.found(&reader, &["b", "c"]), [true, true]);
    // Through a change of logs, twice.
    for key in ["d", "e"] {
        writer.writer().unwrap().checkpoint().unwrap();
        bench.put_all(&writer, &[key]);
    }
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["b", "c", "d", "e"]), [true; 4]);
}

#[test]
fn who_lags_over_several_logs_reads_the_directory_anew() {
    let bench = Bench::new();
    let (writer, reader) = (bench.open(), bench.open());
    bench.put_all(&writer, &["a", "b"]);
    reader.maintain().unwrap();
    let blocks = [(b"a".as_slice(), fingerprint("a"))];
    assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
    // The log that the reader is at goes, and the one that followed it.
    for key in ["c", "d", "e"] {
        writer.writer().unwrap().checkpoint().unwrap();
        bench.put_all(&writer, &[key]);
    }
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a", "b", "c", "d", "e"]), [false, true, true, true, true]);
}

#[test]
fn a_log_that_could_not_be_made_leaves_no_gap_for_those_who_follow() {
    // The file may be missing, or there without a head.
    for operation in [Operation::Create, Operation::Write] {
        let bench = Bench::new();
        let (writer, reader) = (bench.open(), bench.open());
        bench.put_all(&writer, &["a"]);
        reader.maintain().unwrap();
        let checkpoint = || writer.writer().unwrap().checkpoint();
        bench.fail(operation, "idx-", 1, Errno::IO);
        assert!(checkpoint().is_err());
        checkpoint().unwrap();
        // The log before it is there still.
        let blocks = [(b"a".as_slice(), fingerprint("a"))];
        assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
        bench.put_all(&writer, &["b"]);
        reader.maintain().unwrap();
        assert_eq!(bench.found(&reader, &["a", "b"]), [false, true], "{operation:?}");
    }
}

#[test]
fn a_log_that_goes_while_a_directory_is_read_hides_nothing() {
    let bench = Bench::new();
    let writer = bench.open();
    bench.put_all(&writer, &["a"]);
    writer.writer().unwrap().checkpoint().unwrap();
    let blocks = [(b"a".as_slice(), fingerprint("a"))];
    assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
    bench.put_all(&writer, &["b"]);
    // The second one has the tombstone.
    bench.fail(Operation::Open, "idx-000002", 1, Errno::NOENT);
    let mut options = bench.options.clone();
    options.access = StoreAccess::Read;
    let reader = Bench { options, disk: bench.disk.clone(), ..Bench::new() }.open();
    assert!(bench.find(&reader, "a").is_none());
    assert!(bench.has(&reader, "b"));
}

#[test]
fn a_block_that_cannot_be_followed_is_in_no_others_way() {
    let bench = Bench::new();
    let (writer, reader) = (bench.open(), bench.open());
    bench.put_all(&writer, &["a", "b"]);
    reader.maintain().unwrap();
    // Another segment, which cannot be opened at first.
    assert_eq!(bench.put_len(&writer, "large", 13 * LEN).unwrap(), Put::Done);
    let blocks = [(b"a".as_slice(), fingerprint("a"))];
    assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
    bench.fail(Operation::Open, "seg-", 1, Errno::MFILE);
    assert!(reader.maintain().is_err());
    assert!(bench.find(&reader, "a").is_none());
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a", "b", "large"]), [false, true, true]);
}

#[test]
fn those_who_follow_are_told_of_records_that_never_counted() {
    let bench = Bench::new();
    let (writer, reader) = (bench.open(), bench.open());
    bench.put_all(&writer, &["a"]);
    bench.fail(Operation::Sync, "idx-", 1, Errno::IO);
    assert!(bench.put(&writer, "b").is_err());
    reader.maintain().unwrap();
    writer.maintain().unwrap();
    bench.put_all(&writer, &["c"]);
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a", "c"]), [true, true]);
    assert!(bench.find(&reader, "b").is_none());
}

#[test]
fn readers_write_nothing() {
    let mut bench = Bench::new();
    let writer = bench.open();
    bench.put_all(&writer, &["a"]);
    bench.options.access = StoreAccess::Read;
    let before = bench.disk.operations();
    let reader = bench.open();
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a"]), [true]);
    assert!(matches!(bench.reserve(&reader, "b"), Err(Error::ReadOnly { .. })));
    assert!(matches!(reader.clear(NAMESPACE), Err(Error::ReadOnly { .. })));
    reader.close().unwrap();
    assert_eq!(bench.disk.operations(), before);
    let nowhere = Bench { options: bench.options.clone(), ..Bench::new() };
    assert!(matches!(nowhere.try_open(), Err(Error::NotAStore { .. })));
}

#[test]
fn nothing_is_there_of_a_writer_whose_number_another_has() {
    let bench = Bench::new();
    let (first, reader) = (bench.open(), bench.open());
    bench.put_all(&first, &["a"]);
    reader.maintain().unwrap();
    let found = bench.find(&reader, "a").unwrap();
    let directory = first.writer().unwrap().directory.clone();
    drop(first);
    for file in bench.disk.list(&directory).unwrap() {
        bench.disk.remove(&directory.join(file.name)).unwrap();
    }
    bench.disk.remove_directory(&directory).unwrap();
    // It does the same, and so its blocks have the same sequences.
    let second = bench.open();
    reader.follow().unwrap();
    bench.put_all(&second, &["a"]);
    reader.follow().unwrap();
    let entry = |found: &Found| found.token.downcast_ref::<FoundToken>().unwrap().entry;
    let again = bench.find(&reader, "a").unwrap();
    assert_eq!((entry(&found).owner, entry(&found).sequence), (entry(&again).owner, entry(&again).sequence));
    assert!(!Sharing::is_still_there(&reader, &found));
    assert!(Sharing::is_still_there(&reader, &again));
}

/// A reader of a writer's store.
fn reader_of(bench: &Bench) -> Segments {
    let mut options = bench.options.clone();
    options.access = StoreAccess::Read;
    Bench { options, disk: bench.disk.clone(), ..Bench::new() }.open()
}

#[test]
fn a_segment_that_cannot_be_opened_does_not_have_the_log_read_again() {
    let mut bench = Bench::new();
    bench.options.capacity_bytes = Some(16 << 20);
    let writer = bench.open();
    let reader = reader_of(&bench);
    for number in 0..500 {
        assert_eq!(bench.put(&writer, &format!("key {number}")).unwrap(), Put::Done);
    }
    bench.fail(Operation::Open, "seg-000002", u32::MAX, Errno::ACCESS);
    assert!(reader.follow().is_err());
    let before = bench.disk.bytes_read();
    let failed = (0..200).filter(|_| reader.follow().is_err()).count();
    let read = bench.disk.bytes_read() - before;
    assert!(read < 200 * 64, "{read} bytes are read in 200 rounds");
    assert!((4..=8).contains(&failed), "it is tried {failed} times in 200 rounds");
    // The log is read on meanwhile, and what it says of the blocks that wait counts.
    let is_waiting = |number: &i32| bench.find(&reader, &format!("key {number}")).is_none();
    let waiting: Vec<i32> = (0..500).filter(is_waiting).collect();
    assert!(!waiting.is_empty() && waiting.len() < 100, "{waiting:?}");
    let gone = format!("key {}", waiting[0]);
    assert_eq!(writer.delete(NAMESPACE, &[(gone.as_bytes(), fingerprint(&gone))]).unwrap(), 1);
    // In a new segment, as it is larger.
    assert_eq!(bench.put_len(&writer, "later", 3 * LEN).unwrap(), Put::Done);
    let _ = reader.follow();
    assert!(bench.has(&reader, "later"));
    bench.disk.end_faults();
    (0..512).for_each(|_| reader.follow().unwrap());
    let missing: Vec<i32> = (0..500).filter(is_waiting).collect();
    assert_eq!(missing, [waiting[0]]);
}

#[test]
fn a_directory_that_cannot_be_read_is_not_read_again_and_again() {
    let bench = Bench::new();
    let writer = bench.open();
    for number in 0..50 {
        assert_eq!(bench.put(&writer, &format!("key {number}")).unwrap(), Put::Done);
    }
    writer.writer().unwrap().checkpoint().unwrap();
    bench.put_all(&writer, &["a"]);
    bench.fail(Operation::Open, "idx-", u32::MAX, Errno::ACCESS);
    let reader = reader_of(&bench);
    let before = bench.disk.bytes_read();
    let failed = (0..200).filter(|_| reader.follow().is_err()).count();
    assert!((4..=8).contains(&failed), "it is tried {failed} times in 200 rounds");
    assert!(bench.disk.bytes_read() - before < 3 * 8 * 16_384);
    bench.disk.end_faults();
    (0..512).for_each(|_| reader.follow().unwrap());
    assert!(bench.has(&reader, "a"));
}

/// Overwrites the record that follows `records` others in the only log; what was there.
fn zero_record(bench: &Bench, records: u64) -> Vec<u8> {
    let log = bench.file("idx-");
    let before = bench.disk.read(&log, records * 64, 64).unwrap();
    bench.disk.write(&log, records * 64, &[0; 64]).unwrap();
    before
}

#[test]
fn a_damaged_record_hides_no_other_and_is_told() {
    for durability in [Durability::Sync, Durability::None] {
        let mut bench = Bench::new();
        bench.options.durability = durability;
        let writer = bench.open();
        bench.put_all(&writer, &["a", "b", "c", "d"]);
        // The head, the namespace and `a` come first.
        zero_record(&bench, 3);
        let reader = reader_of(&bench);
        bench.put_all(&writer, &["e"]);
        // Without syncs, it may be on its way for a while.
        (0..16).for_each(|_| reader.follow().unwrap());
        let all = ["a", "b", "c", "d", "e"];
        assert_eq!(bench.found(&reader, &all), [true, false, true, true, true], "{durability}");
        assert_eq!(reader.usage().damaged_records, 1, "{durability}");
        assert_eq!(reader.observed().take_notices().len(), 1, "{durability}");
        bench.put_all(&writer, &["f"]);
        reader.follow().unwrap();
        assert!(bench.has(&reader, "f"), "{durability}");
        assert_eq!(
            (reader.usage().damaged_records, reader.observed().take_notices().len()),
            (1, 0),
            "{durability}"
        );
    }
}

#[test]
fn a_record_that_is_damaged_while_a_log_is_followed_hides_no_other() {
    let bench = Bench::new();
    let writer = bench.open();
    bench.put_all(&writer, &["a"]);
    let reader = reader_of(&bench);
    bench.put_all(&writer, &["b", "c"]);
    zero_record(&bench, 3);
    reader.follow().unwrap();
    assert_eq!(bench.found(&reader, &["a", "b", "c"]), [true, false, true]);
    assert_eq!((reader.usage().damaged_records, reader.observed().take_notices().len()), (1, 1));
}

#[test]
fn a_record_that_is_being_written_is_waited_for() {
    let mut bench = Bench::new();
    bench.options.durability = Durability::None;
    let writer = bench.open();
    bench.put_all(&writer, &["a"]);
    let reader = reader_of(&bench);
    bench.put_all(&writer, &["b", "c"]);
    let record = zero_record(&bench, 3);
    (0..3).for_each(|_| reader.follow().unwrap());
    assert!(bench.find(&reader, "c").is_none());
    bench.disk.write(&bench.file("idx-"), 3 * 64, &record).unwrap();
    reader.follow().unwrap();
    assert_eq!(bench.found(&reader, &["a", "b", "c"]), [true; 3]);
    assert_eq!(reader.usage().damaged_records, 0);
}

#[test]
fn damage_that_an_opening_meets_is_told() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a", "b"]);
    drop(store);
    zero_record(&bench, 2);
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a", "b"]), [false, true]);
    assert_eq!(store.observed().take_notices().len(), 1);
    assert!(store.observed().take_notices().is_empty());
}

#[test]
fn a_writer_without_its_lease_does_not_write() {
    let bench = Bench::new();
    let (first, second) = (bench.open(), bench.open());
    let alive = |store: &Segments| -> Vec<bool> {
        store.writers().unwrap().iter().map(|writer| writer.is_alive).collect()
    };
    assert_eq!(alive(&second), [true, true]);
    // It does not say that it ends.
    drop(first);
    assert_eq!(alive(&second).into_iter().filter(|is_alive| *is_alive).count(), 1);
    assert_eq!(second.writers().unwrap()[0].durability, Some(Durability::Sync));
}

#[test]
fn blocks_that_another_process_uses_stay() {
    let bench = Bench::new();
    let (owner, user) = (bench.open(), bench.open());
    let hot: Vec<String> = (0..8).map(|number| format!("hot {number}")).collect();
    hot.iter().for_each(|key| assert_eq!(bench.put(&owner, key).unwrap(), Put::Done));
    user.maintain().unwrap();
    for number in 0..300 {
        assert_eq!(bench.put(&owner, &format!("{number}")).unwrap(), Put::Done);
        if number % 10 == 0 {
            user.touch(&hot.iter().map(|key| fingerprint(key)).collect::<Vec<_>>());
            bench.elapsed.fetch_add(1000, Ordering::Relaxed);
            user.maintain().unwrap();
            owner.maintain().unwrap();
        }
    }
    let kept = hot.iter().filter(|key| bench.has(&owner, key)).count();
    assert_eq!(kept, 8);
    assert!(bench.disk.most_used() <= bench.options.capacity_bytes.unwrap());
}

/// Whether two blocks stay in a full store that another process has used, and has said so in a file that is torn or not.
fn stay_if_used(is_torn: bool) -> [bool; 2] {
    let mut bench = Bench::new();
    // Ten blocks, and no room for a part of another.
    bench.options.segment_bytes = Some(31 << 12);
    let (owner, user) = (bench.open(), bench.open());
    let used = ["a", "b"];
    bench.put_all(&owner, &used);
    user.maintain().unwrap();
    user.touch(&used.map(fingerprint));
    bench.elapsed.fetch_add(1000, Ordering::Relaxed);
    user.maintain().unwrap();
    if is_torn {
        // In the first of the two.
        bench.disk.flip(&bench.file("HEAT"), 8 * 70);
    }
    bench.elapsed.fetch_add(1000, Ordering::Relaxed);
    owner.maintain().unwrap();
    let mut number = 0;
    while owner.usage().evicted_blocks < 20 {
        assert_eq!(bench.put(&owner, &format!("{number}")).unwrap(), Put::Done);
        number += 1;
    }
    used.map(|key| bench.has(&owner, key))
}

#[test]
fn a_torn_heat_file_is_passed_over() {
    assert_eq!(stay_if_used(false), [true, true]);
    assert_eq!(stay_if_used(true), [false, false]);
}

#[test]
fn a_copy_is_found_when_the_other_one_goes() {
    let bench = Bench::new();
    let (first, second) = (bench.open(), bench.open());
    bench.put_all(&first, &["a", "b"]);
    // Both have stored them before either has heard of the other's.
    for key in ["a", "b"] {
        let claim = match bench.reserve(&second, key) {
            Ok(Reservation::Claimed(claim)) => claim,
            other => panic!("{other:?}"),
        };
        let written = bench.write(claim, &content(key, LEN));
        store_all(&second, written);
    }
    first.maintain().unwrap();
    second.maintain().unwrap();
    let delete = |store: &Segments, key: &str| {
        store.delete(NAMESPACE, &[(key.as_bytes(), fingerprint(key))]).unwrap();
    };
    delete(&first, "a");
    assert!(bench.has(&first, "a"), "the second's");
    delete(&second, "b");
    assert!(bench.has(&second, "b"), "the first's");
    first.maintain().unwrap();
    second.maintain().unwrap();
    assert_eq!(bench.found(&first, &["a", "b"]), [true, true]);
    assert_eq!(bench.found(&second, &["a", "b"]), [true, true]);
    delete(&second, "a");
    first.maintain().unwrap();
    assert!(!bench.has(&first, "a"));
}

fn store_all(store: &Segments, written: Written) {
    store.commit(vec![written]).pop().unwrap().unwrap();
}

#[test]
fn a_quota_holds_for_all_processes_together() {
    let bench = Bench::new();
    let stores = [(); 3].map(|()| bench.open());
    const QUOTA: u64 = 240 << 10;
    for store in &stores {
        let options = NamespaceOptions { quota_bytes: Some(QUOTA), ttl: None };
        store.open_namespace(NAMESPACE, "{}", options).unwrap();
    }
    for number in 0..60 {
        for (place, store) in stores.iter().enumerate() {
            assert_eq!(bench.put(store, &format!("{place} {number}")).unwrap(), Put::Done);
        }
        stores.iter().for_each(|store| store.maintain().unwrap());
    }
    stores.iter().for_each(|store| store.maintain().unwrap());
    let totals: Vec<u64> =
        stores.iter().map(|store| store.shared.index.totals(None).own_slot_bytes).collect();
    assert!(totals.iter().sum::<u64>() <= QUOTA, "{totals:?}");
    assert!(totals.iter().all(|bytes| *bytes >= QUOTA / 4), "each has its part: {totals:?}");
}

#[test]
fn processes_that_have_ended_have_no_part_of_a_quota() {
    const QUOTA: u64 = 240 << 10;
    let mut bench = Bench::new();
    bench.options.capacity_bytes = Some(8 << 20);
    let mut stores = Vec::from([(); 3].map(|()| bench.open()));
    let options = NamespaceOptions { quota_bytes: Some(QUOTA), ttl: None };
    let put = |store: &Segments, count: u32, round: &str| {
        store.open_namespace(NAMESPACE, "{}", options).unwrap();
        for number in 0..count {
            store.maintain().unwrap();
            assert_eq!(bench.put(store, &format!("{round} {number}")).unwrap(), Put::Done);
        }
        store.shared.index.totals(None).own_slot_bytes
    };
    for (place, store) in stores.iter().enumerate() {
        put(store, 30, &format!("{place}"));
    }
    let left = stores.pop().unwrap();
    let alive = put(&left, 40, "beside others");
    assert!(alive <= QUOTA * 2 / 3, "{alive}");
    // One ends as it should, and one is killed.
    stores.pop().unwrap().close().unwrap();
    drop(stores);
    bench.now.fetch_add(61, Ordering::Relaxed);
    let alone = put(&left, 40, "alone");
    assert!(alone > QUOTA * 9 / 10 && alone <= QUOTA, "{alone}");
}

#[test]
fn a_directory_that_another_process_takes_over_as_it_is_made_is_made_again() {
    let bench = Bench::new();
    drop(bench.open());
    // The process that has the lock of the root looks whether the writer lives, which has just made its directory.
    let root = bench.disk.open(&bench.file("STORE"), crate::disk::FileAccess::Read).unwrap();
    assert!(root.try_lock().unwrap());
    let id = Uuid::from_u128(bench.ids.load(Ordering::Relaxed).into());
    let next = WriterDirectory::new(&bench.options.root, id);
    bench.disk.create_directory(&next.path).unwrap();
    let path = next.path.join("LEASE");
    let lease = bench.disk.open(&path, crate::disk::FileAccess::CreateNew).unwrap();
    assert!(lease.try_lock().unwrap());
    let store = bench.open();
    assert_ne!(store.writer().unwrap().directory, next.path);
    drop(root);
    bench.put_all(&store, &["a"]);
}
