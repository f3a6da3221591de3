//! A store whose directory, or files of it, are removed while processes use it.

use super::*;

/// Blocks that were acknowledged after the directory was emptied are found by the next process that opens it.
#[test]
fn what_is_acknowledged_after_the_directory_was_emptied_is_there_after_a_restart() {
    for durability in [Durability::None, Durability::Batched, Durability::Sync] {
        let mut bench = Bench::new();
        bench.options.durability = durability;
        let store = bench.open();
        bench.put_all(&store, &["a", "b"]);
        bench.disk.empty(&bench.options.root);
        let mut acknowledged = Vec::new();
        for number in 0..8 {
            let key = format!("key {number}");
            if matches!(bench.put(&store, &key), Ok(Put::Done)) {
                acknowledged.push(key);
            }
            if number == 3 {
                store.maintain().unwrap();
            }
        }
        assert_eq!(acknowledged, ["key 4", "key 5", "key 6", "key 7"], "{durability}");
        assert_eq!(bench.found(&store, &["a", "b"]), [false, false]);
        let notices = store.observed().take_notices();
        let restarted = notices.iter().filter(|notice| notice.kind == EventKind::WriterRestarted).count();
        assert_eq!(restarted, 1, "{notices:?}");
        assert_eq!(
            store.observed().take_evicted().blocks.len(),
            2,
            "engines learn that their blocks are gone"
        );
        assert_eq!(bench.files("NAMESPACE.json").len(), 1);
        drop(store);
        let store = bench.open();
        for key in &acknowledged {
            assert!(bench.has(&store, key), "{key} with {durability}");
        }
    }
}

#[test]
fn blocks_under_way_when_the_directory_is_emptied_are_refused() {
    let bench = Bench::new();
    let store = bench.open();
    let Reservation::Claimed(claim) = bench.reserve(&store, "a").unwrap() else { panic!() };
    let Reservation::Claimed(late) = bench.reserve(&store, "late").unwrap() else { panic!() };
    let (claim, late) = (bench.write(claim, &content("a", LEN)), bench.write(late, &content("late", LEN)));
    bench.disk.empty(&bench.options.root);
    assert!(store.commit(vec![claim]).pop().unwrap().is_err());
    store.maintain().unwrap();
    assert!(store.commit(vec![late]).pop().unwrap().is_err());
    assert_eq!(bench.found(&store, &["a", "late"]), [false, false]);
    bench.put_all(&store, &["a", "late"]);
    assert_eq!(bench.found(&store, &["a", "late"]), [true, true]);
}

#[test]
fn a_block_that_is_read_while_its_directory_is_emptied_is_read_to_the_end() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let found = bench.find(&store, "a").unwrap();
    bench.disk.empty(&bench.options.root);
    store.maintain().unwrap();
    bench.put_all(&store, &["b", "c"]);
    store.invalidate(&found);
    drop(found);
    store.maintain().unwrap();
    bench.put_all(&store, &["d", "e"]);
    assert_eq!(bench.found(&store, &["a", "b", "c", "d", "e"]), [false, true, true, true, true]);
}

#[test]
fn an_unmounted_store_takes_nothing_and_writes_nothing_to_the_disk_below() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    bench.disk.unmount(&bench.options.root);
    assert!(bench.put(&store, "b").is_err());
    let refused = store.maintain().unwrap_err().to_string();
    assert!(refused.contains("another file system"), "{refused}");
    assert_eq!(bench.put(&store, "c").unwrap(), Put::Dropped(DropReason::NoRoom));
    assert_eq!(bench.found(&store, &["a", "b", "c"]), [false; 3]);
    assert!(bench.files("/store/").is_empty(), "{:?}", bench.files("/store/"));
}

#[test]
fn a_store_that_is_mounted_again_has_its_blocks_and_takes_more() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let unmounted = bench.disk.unmount(&bench.options.root);
    store.maintain().unwrap_err();
    bench.disk.mount(unmounted);
    store.maintain().unwrap();
    store.maintain().unwrap();
    bench.put_all(&store, &["b"]);
    assert_eq!(bench.found(&store, &["a", "b"]), [true, true]);
    drop(store);
    assert_eq!(bench.found(&bench.open(), &["a", "b"]), [true, true]);
}

#[test]
fn a_store_that_is_closed_while_it_is_not_mounted_loses_no_block() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let unmounted = bench.disk.unmount(&bench.options.root);
    store.maintain().unwrap_err();
    bench.disk.mount(unmounted);
    drop(store);
    assert_eq!(bench.found(&bench.open(), &["a"]), [true]);
}

#[test]
fn removed_files_of_a_writer_cost_their_blocks_alone() {
    for name in ["seg-000001", "idx-", "CKPT-", "STORE", "LEASE"] {
        let bench = Bench::new();
        let store = bench.open();
        bench.put_all(&store, &["a"]);
        store.writer().unwrap().checkpoint().unwrap();
        for path in bench.files(name) {
            bench.disk.remove(&path).unwrap();
        }
        let is_promised = matches!(bench.put(&store, "b"), Ok(Put::Done));
        store.maintain().unwrap();
        store.maintain().unwrap();
        bench.put_all(&store, &["c"]);
        let before = bench.found(&store, &["a", "b", "c"]);
        assert!(before[2] && (before[1] || !is_promised || name == "seg-000001"), "{name}: {before:?}");
        // Where this process goes on in another directory, the one before is followed as another's.
        assert_eq!(before[0], name != "seg-000001", "{name}");
        drop(store);
        let store = bench.open();
        let after = bench.found(&store, &["a", "b", "c"]);
        let kept = before.iter().zip(&after).all(|(before, after)| !before || *after);
        assert!(kept, "{name}: {before:?}, then {after:?}");
        assert_eq!(store.usage().lost_on_recovery, 0, "{name}");
    }
}

#[test]
fn readers_forget_what_was_removed_and_find_what_comes() {
    let mut bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    bench.options.access = StoreAccess::Read;
    let reader = bench.open();
    assert!(bench.has(&reader, "a"));
    bench.disk.empty(&bench.options.root);
    reader.maintain().ok();
    assert!(!bench.has(&reader, "a"));
    store.maintain().unwrap();
    bench.put_all(&store, &["b"]);
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a", "b"]), [false, true]);
}

#[test]
fn a_store_that_is_mounted_again_under_another_number_is_the_same() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let mut unmounted = bench.disk.unmount(&bench.options.root);
    store.maintain().unwrap_err();
    // As file systems over a network, and btrfs, are.
    unmounted.file_system = 77;
    bench.disk.mount(unmounted);
    store.maintain().unwrap();
    store.maintain().unwrap();
    bench.put_all(&store, &["b"]);
    assert_eq!(bench.found(&store, &["a", "b"]), [true, true]);
    // It is noticed again when that goes.
    bench.disk.unmount(&bench.options.root);
    assert!(store.maintain().unwrap_err().to_string().contains("another file system"));
    assert!(bench.files("/store/").is_empty());
}

#[test]
fn a_block_that_is_committed_after_its_directory_was_gone_is_refused_although_that_is_back() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let Reservation::Claimed(claim) = bench.reserve(&store, "b").unwrap() else { panic!() };
    let written = bench.write(claim, &content("b", LEN));
    let unmounted = bench.disk.unmount(&bench.options.root);
    store.maintain().unwrap_err();
    bench.disk.mount(unmounted);
    store.commit(vec![written]).pop().unwrap().unwrap_err();
    let mut found = [false];
    store.contains(NAMESPACE, &[(b"b", fingerprint("b"))], &mut found);
    assert_eq!(found, [false], "it could not be read");
}

#[test]
fn threads_that_find_their_directory_gone_at_the_same_time_go_on_in_one() {
    let bench = Bench::new();
    let store = Arc::new(bench.open());
    bench.put_all(&store, &["a"]);
    bench.disk.empty(&bench.options.root);
    bench.disk.during_next_sync({
        let store = store.clone();
        move || store.maintain().unwrap()
    });
    store.maintain().unwrap();
    assert_eq!(bench.files("LEASE").len(), 1);
    bench.put_all(&store, &["b"]);
    assert_eq!(bench.found(&store, &["a", "b"]), [false, true]);
}
