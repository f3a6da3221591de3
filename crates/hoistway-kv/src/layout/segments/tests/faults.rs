//! Disks that fail, and clocks that jump: what was acknowledged stays, and what was deleted stays away.

use super::*;

#[test]
fn a_full_disk_under_the_log_costs_nothing_but_the_blocks_that_met_it() {
    let bench = Bench::new();
    bench.put_all(&bench.open(), &["a"]);
    // A new log, which has no room for records yet.
    let store = bench.open();
    let Reservation::Claimed(claim) = bench.reserve(&store, "b").unwrap() else { panic!() };
    let written = bench.write(claim, &content("b", LEN));
    bench.fail(Operation::Allocate, "idx-", 1, Errno::NOSPC);
    let refused = store.commit(vec![written]).pop().unwrap().unwrap_err();
    assert_eq!(errno(&refused), Some(Errno::NOSPC.raw_os_error()));
    assert_eq!(bench.found(&store, &["a", "b"]), [true, false]);
    bench.put_all(&store, &["b", "c"]);
    drop(store);
    bench.disk.crash();
    assert_eq!(bench.found(&bench.open(), &["a", "b", "c"]), [true; 3]);
}

#[test]
fn a_record_that_was_cut_short_is_followed_by_no_other() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let Reservation::Claimed(claim) = bench.reserve(&store, "b").unwrap() else { panic!() };
    let written = bench.write(claim, &content("b", LEN));
    let (operation, name) = (Operation::Write, "idx-");
    bench.disk.script(Fault { operation, name, skip: 0, times: 1, effect: Effect::Cut(40) });
    bench.fail(operation, name, 1, Errno::NOSPC);
    assert!(store.commit(vec![written]).pop().unwrap().is_err());
    assert_eq!(bench.found(&store, &["a", "b"]), [true, false]);
    store.maintain().unwrap();
    bench.put_all(&store, &["c"]);
    drop(store);
    bench.disk.crash();
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a", "b", "c"]), [true, false, true]);
    assert_eq!(store.usage().lost_on_recovery, 0);
}

#[test]
fn a_log_that_could_not_be_synced_is_replaced_before_it_is_trusted() {
    // The disk may have the record of `b`, or not; the store of `b` ended with an error.
    for seed in 0..20 {
        let mut bench = Bench::new();
        bench.disk = SimulatedDisk::new(seed, 64 << 20);
        let store = bench.open();
        bench.put_all(&store, &["a"]);
        bench.fail(Operation::Sync, "idx-", 1, Errno::IO);
        let refused = bench.put(&store, "b").unwrap_err();
        assert_eq!(errno(&refused), Some(Errno::IO.raw_os_error()));
        assert_eq!(bench.found(&store, &["a", "b"]), [true, false]);
        // As long as nothing can be written down, nothing is stored: `b`'s place is not used again.
        bench.fail(Operation::Sync, "idx-", 1, Errno::IO);
        assert!(store.maintain().is_err());
        assert_eq!(bench.put(&store, "c").unwrap(), Put::Dropped(DropReason::NoRoom));
        store.maintain().unwrap();
        bench.put_all(&store, &["c", "d"]);
        drop(store);
        bench.disk.crash();
        let store = bench.open();
        assert_eq!(bench.found(&store, &["a", "b", "c", "d"]), [true, false, true, true], "seed {seed}");
        assert_eq!(store.usage().lost_on_recovery, 0);
    }
}

#[test]
fn a_place_whose_commit_failed_is_not_used_again_before_its_tombstone() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let free = || lock(&store.writer().unwrap().slots).free();
    let before = free();
    bench.fail(Operation::Sync, "idx-", 1, Errno::IO);
    assert!(bench.put(&store, "b").is_err());
    assert_eq!(free(), before - 3, "its record may be on the disk");
    store.maintain().unwrap();
    assert_eq!(free(), before);
    bench.put_all(&store, &["b"]);
}

#[test]
fn a_checkpoint_that_fails_is_tried_again_before_the_next_log_is_long() {
    let bench = Bench::new();
    let store = bench.open();
    let writer = store.writer().unwrap();
    let mut number = 0;
    while writer.log.len() <= writer.limits.least_log() {
        bench.put(&store, &format!("key {number}")).unwrap();
        number += 1;
    }
    bench.fail(Operation::Rename, "CKPT", 1, Errno::IO);
    assert!(writer.checkpoint_if_due().is_err());
    assert!(bench.files("CKPT").is_empty());
    writer.checkpoint_if_due().unwrap();
    assert_eq!(bench.files("CKPT").len(), 1);
}

#[test]
fn checkpoints_that_fail_again_and_again_leave_few_files() {
    let bench = Bench::new();
    let store = bench.open();
    let writer = store.writer().unwrap();
    bench.put_all(&store, &["a"]);
    bench.fail(Operation::Rename, "CKPT", 8, Errno::NOSPC);
    (0..4).for_each(|_| assert!(writer.checkpoint().is_err()));
    // A log in doubt waits for a checkpoint, too.
    bench.fail(Operation::Sync, "idx-", 1, Errno::IO);
    assert!(bench.put(&store, "b").is_err());
    (0..4).for_each(|_| assert!(writer.checkpoint().is_err()));
    assert!(bench.files("idx-").len() <= 3, "{:?}", bench.files("idx-"));
    writer.checkpoint().unwrap();
    assert_eq!(bench.files("idx-").len(), 1);
    bench.put_all(&store, &["c"]);
    drop(store);
    bench.disk.crash();
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a", "b", "c"]), [true, false, true]);
    assert_eq!(store.usage().lost_on_recovery, 0);
}

#[test]
fn blocks_are_found_while_a_directory_is_read_anew() {
    let bench = Bench::new();
    let (writer, reader) = (bench.open(), bench.open());
    bench.put_all(&writer, &["a"]);
    reader.maintain().unwrap();
    bench.fail(Operation::Open, "idx-", u32::MAX, Errno::MFILE);
    assert!(reader.maintain().is_err());
    assert!(reader.maintain().is_err());
    assert!(bench.has(&reader, "a"));
    bench.disk.end_faults();
    bench.put_all(&writer, &["b"]);
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a", "b"]), [true, true]);
}

#[test]
fn data_that_could_not_be_synced_is_not_committed_by_a_later_sync() {
    for seed in 0..20 {
        let mut bench = Bench::new();
        bench.disk = SimulatedDisk::new(seed, 64 << 20);
        let store = bench.open();
        bench.put_all(&store, &["a"]);
        let both = ["b", "c"].map(|key| match bench.reserve(&store, key).unwrap() {
            Reservation::Claimed(claim) => bench.write(claim, &content(key, LEN)),
            other => panic!("{other:?}"),
        });
        let [first, second] = both;
        bench.fail(Operation::Sync, "seg-", 1, Errno::IO);
        assert!(store.commit(vec![first]).pop().unwrap().is_err());
        // The failed sync may have lost the data of the second, although the sync of the second succeeds.
        assert!(store.commit(vec![second]).pop().unwrap().is_err());
        bench.put_all(&store, &["d"]);
        drop(store);
        bench.disk.crash();
        assert_eq!(bench.found(&bench.open(), &["a", "b", "c", "d"]), [true, false, false, true]);
    }
}

#[test]
fn a_file_system_that_turns_read_only_keeps_what_is_there() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a", "b"]);
    for operation in [Operation::Write, Operation::Create, Operation::Allocate, Operation::Remove] {
        bench.fail(operation, "", u32::MAX, Errno::ROFS);
    }
    let key = "c";
    let reserved = bench.reserve(&store, key).unwrap();
    if let Reservation::Claimed(claim) = reserved {
        let shard = Shard { len: LEN as u64, checksum: Some(0) };
        let written = Written { claim, table: ShardTable(vec![shard]) };
        assert!(store.commit(vec![written]).pop().unwrap().is_err());
    }
    assert!(store.maintain().is_err());
    assert_eq!(bench.found(&store, &["a", "b", "c"]), [true, true, false]);
    bench.disk.end_faults();
    store.maintain().unwrap();
    bench.put_all(&store, &["c"]);
}

#[test]
fn clocks_that_jump_end_blocks_early_or_late_and_nothing_else() {
    let bench = Bench::new();
    let store = bench.open();
    let ttl = NamespaceOptions::default().ttl(Duration::from_secs(60));
    bench.put_all(&store, &["stays"]);
    store.open_namespace(NAMESPACE, "{}", ttl).unwrap();
    bench.put_all(&store, &["ends"]);
    for (now, is_there) in [(1059, true), (5, true), (1060, false), (u32::MAX, false)] {
        bench.now.store(now, Ordering::Relaxed);
        assert_eq!(bench.found(&store, &["stays", "ends"]), [true, is_there], "at {now}");
    }
    store.maintain().unwrap();
    bench.now.store(1059, Ordering::Relaxed);
    store.maintain().unwrap();
    assert_eq!(store.usage().expired_blocks, 0, "a jump that is taken back deletes nothing");
    assert_eq!(bench.found(&store, &["stays", "ends"]), [true, true]);
    bench.now.store(u32::MAX, Ordering::Relaxed);
    store.maintain().unwrap();
    bench.elapsed.fetch_add(601_000, Ordering::Relaxed);
    store.maintain().unwrap();
    assert_eq!(store.usage().expired_blocks, 1);
    bench.now.store(1, Ordering::Relaxed);
    assert_eq!(bench.found(&store, &["stays", "ends"]), [true, false]);
    bench.put_all(&store, &["ends"]);
}

#[test]
fn what_is_deleted_while_its_segment_goes_does_not_come_back() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["read", "gone"]);
    let found = bench.find(&store, "read").unwrap();
    let segment = found.token.downcast_ref::<FoundToken>().unwrap().entry.slot.segment;
    let writer = store.writer().unwrap();
    lock(&writer.slots).drain(segment);
    writer.finish_draining().unwrap();
    assert_eq!(bench.files("seg-").len(), 1, "the segment has a reader");
    let blocks = [(b"gone".as_slice(), fingerprint("gone"))];
    assert_eq!(store.delete(NAMESPACE, &blocks).unwrap(), 0);
    drop((found, store));
    bench.disk.crash();
    assert_eq!(bench.found(&bench.open(), &["gone"]), [false]);
}

#[test]
fn what_was_invalidated_before_it_was_deleted_does_not_come_back() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    store.invalidate(&bench.find(&store, "a").unwrap());
    let blocks = [(b"a".as_slice(), fingerprint("a"))];
    assert_eq!(store.delete(NAMESPACE, &blocks).unwrap(), 0);
    drop(store);
    bench.disk.crash();
    assert_eq!(bench.found(&bench.open(), &["a"]), [false]);
}

#[test]
fn logs_and_checkpoints_stay_short() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..3000 {
        bench.put(&store, &format!("key {number}")).unwrap();
        if number % 10 == 0 {
            store.maintain().unwrap();
        }
    }
    let files: Vec<_> = bench.files("idx-");
    assert!(files.len() <= 3, "{files:?}");
    assert!(bench.disk.most_used() <= 1 << 20);
    assert!(!bench.files("CKPT").is_empty());
}

#[test]
fn who_invalidates_a_block_does_not_wait_for_a_log_that_changes() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let found = bench.find(&store, "a").unwrap();
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let writer = store.writer().unwrap();
        let alone = writer.publishing.write().unwrap();
        scope.spawn(|| {
            store.invalidate(&found);
            done.send(()).unwrap();
        });
        let ended = wait.recv_timeout(Duration::from_secs(60));
        drop(alone);
        ended.unwrap();
    });
    assert!(bench.find(&store, "a").is_none());
}

/// What a key's block is, if it is found and good.
fn bytes_of(bench: &Bench, store: &Segments, key: &str) -> Option<Vec<u8>> {
    let found = bench.find(store, key)?;
    let Verdict::Good(table) = bench.verdict(store, key, &found) else { return None };
    let bytes = bench.disk.read(found.place.file.path(), found.place.payload, LEN).unwrap();
    (table.0[0].checksum == Some(checksum(&bytes))).then_some(bytes)
}

#[test]
fn an_older_block_of_a_key_that_was_stored_again_never_comes_back() {
    let (older, newer) = (content("older", LEN), content("newer", LEN));
    let mut kept = 0;
    for seed in 0..64 {
        for is_deleted in [true, false] {
            let mut bench = Bench::new();
            bench.disk = SimulatedDisk::new(seed, 64 << 20);
            bench.options.durability = Durability::None;
            let put = |store: &Segments, bytes: &[u8]| {
                let Reservation::Claimed(claim) = bench.reserve(store, "a").unwrap() else { panic!() };
                let written = bench.write(claim, bytes);
                store.commit(vec![written]).pop().unwrap().unwrap();
            };
            let store = bench.open();
            put(&store, &older);
            // All of it is on the disk.
            store.close().unwrap();
            drop(store);
            let store = bench.open();
            if is_deleted {
                assert_eq!(store.delete(NAMESPACE, &[(b"a", fingerprint("a"))]).unwrap(), 1);
            } else {
                assert!(store.evict(1).unwrap() > 0);
            }
            // The place of the older one: it is not written to before the power is cut.
            let claim = bench.reserve(&store, "b").unwrap();
            put(&store, &newer);
            drop((claim, store));
            bench.disk.crash();
            let store = bench.open();
            let found = bytes_of(&bench, &store, "a");
            kept += u32::from(found.as_ref() == Some(&newer));
            assert!(found != Some(older.clone()), "seed {seed}, deleted {is_deleted}");
        }
    }
    assert!(kept < 128, "the newer one is never lost: the test shows nothing");
}

#[test]
fn what_was_deleted_stays_away_after_a_power_cut_whatever_the_durability() {
    for seed in 0..64 {
        let mut bench = Bench::new();
        bench.disk = SimulatedDisk::new(seed, 64 << 20);
        bench.options.durability = Durability::None;
        let store = bench.open();
        bench.put_all(&store, &["a"]);
        store.close().unwrap();
        drop(store);
        let store = bench.open();
        assert_eq!(store.delete(NAMESPACE, &[(b"a", fingerprint("a"))]).unwrap(), 1);
        drop(store);
        bench.disk.crash();
        assert!(!bench.has(&bench.open(), "a"), "seed {seed}");
    }
}

#[test]
fn tombstones_are_noted_until_their_sync_has_ended() {
    let mut bench = Bench::new();
    bench.options.durability = Durability::None;
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let writer = store.writer().unwrap();
    let is_noted = || lock(&writer.unsynced_tombstones).contains_key(&fingerprint("a"));
    let syncing = lock(&writer.log.syncing);
    assert!(store.evict(1).unwrap() > 0);
    assert!(is_noted());
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| writer.sync_tombstones());
        // Long enough for it to wait for the disk.
        std::thread::sleep(Duration::from_millis(100));
        assert!(!sync.is_finished() && is_noted());
        drop(syncing);
        sync.join().unwrap().unwrap();
    });
    assert!(!is_noted());
}
