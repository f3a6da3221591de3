//! The lock of the store, held by a process that does not go on.

use super::*;
use crate::disk::FileAccess;

/// The lock of `STORE`, held by another process.
fn hold(bench: &Bench) -> Box<dyn crate::disk::DiskFile> {
    let file = bench.disk.open(&bench.file("STORE"), FileAccess::Read).unwrap();
    assert!(file.try_lock().unwrap());
    file
}

#[test]
fn a_lock_that_is_held_for_ever_is_waited_for_once() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..20 {
        bench.put(&store, &format!("before {number}")).unwrap();
    }
    let held = hold(&bench);
    let begin = bench.elapsed.load(Ordering::Relaxed);
    let mut done = 0;
    for number in 0..100 {
        let put = bench.put(&store, &format!("key {number}")).unwrap();
        done += usize::from(put == Put::Done);
        store.maintain().unwrap();
    }
    let waited = bench.elapsed.load(Ordering::Relaxed) - begin;
    assert_eq!(done, 100, "what there is gives way");
    assert!(waited < 2000, "{waited} ms of the clock");
    drop(held);
    bench.elapsed.fetch_add(60_000, Ordering::Relaxed);
    for number in 0..100 {
        assert_eq!(bench.put(&store, &format!("after {number}")).unwrap(), Put::Done);
    }
}

#[test]
fn a_store_opens_while_the_lock_is_held_and_finds_what_others_have_left() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    drop(store);
    let held = hold(&bench);
    let store = bench.open();
    assert!(bench.has(&store, "a"));
    store.open_namespace(NamespaceId([2; 16]), "{}", NamespaceOptions::default()).unwrap();
    let writers = store.writers().unwrap();
    assert_eq!(writers.len(), 2);
    drop(held);
}

#[test]
fn no_process_waits_for_the_syncs_of_another_one() {
    let mut bench = Bench::new();
    bench.options.segment_bytes = None;
    drop(bench.open());
    let syncs = Arc::new(AtomicU32::new(0));
    bench.disk.during_syncs({
        let (disk, path, syncs) = (bench.disk.clone(), bench.file("STORE"), syncs.clone());
        move || {
            let file = disk.open(&path, FileAccess::Read).unwrap();
            assert!(file.try_lock().unwrap(), "the lock is held while the disk syncs");
            syncs.fetch_add(1, Ordering::Relaxed);
        }
    });
    let expect = |what: &str, act: &mut dyn FnMut()| {
        let before = syncs.load(Ordering::Relaxed);
        act();
        assert!(syncs.load(Ordering::Relaxed) > before, "{what}");
    };
    let mut stores = Vec::new();
    expect("a directory is taken over", &mut || stores.push(bench.open()));
    expect("a directory is made", &mut || stores.push(bench.open()));
    let [rich, poor] = &stores[..] else { panic!() };
    expect("a segment is made", &mut || bench.put_all(rich, &["a"]));
    for number in 0..300 {
        bench.put(rich, &format!("rich {number}")).unwrap();
    }
    assert_eq!(bench.put(poor, "a").unwrap(), Put::Dropped(DropReason::NoRoom));
    let before = bench.files("seg-").len();
    expect("a segment is given up", &mut || rich.maintain().unwrap());
    assert_eq!(bench.files("seg-").len(), before - 1);
    poor.maintain().unwrap();
    bench.put_all(poor, &["b"]);
    let mut large = || assert_eq!(bench.put_len(rich, "large", 200 << 10).unwrap(), Put::Done);
    expect("a segment takes the place of others", &mut large);
    let gone = stores.pop().unwrap();
    let directory = gone.writer().unwrap().directory.clone();
    drop(gone);
    let rich = &stores[0];
    let segments = || bench.files("seg-").into_iter().filter(|path| path.starts_with(&directory)).count();
    let before = segments();
    expect("a segment of a writer that has ended goes", &mut || {
        for number in 0..300 {
            bench.put(rich, &format!("richer {number}")).unwrap();
        }
    });
    assert!(segments() < before);
}

#[test]
fn a_lock_that_was_free_again_is_waited_for_again() {
    let bench = Bench::new();
    let store = bench.open();
    let root = &store.shared.root;
    let wait = || {
        let _held = hold(&bench);
        let begin = bench.elapsed.load(Ordering::Relaxed);
        assert!(matches!(root.lock(), Err(Error::TimedOut { .. })));
        bench.elapsed.load(Ordering::Relaxed) - begin
    };
    assert!(wait() >= 500);
    assert!(wait() < 10, "not for a while");
    drop(root.lock().unwrap());
    assert!(wait() >= 500, "its owner has gone on");
}

#[test]
fn a_block_without_room_waits_for_the_lock() {
    let bench = Bench::new();
    let store = bench.open();
    let held = hold(&bench);
    let stamp = store.room_stamp();
    assert!(matches!(bench.reserve(&store, "a").unwrap(), Reservation::Full));
    let wait = |stamp| store.wait_for_room(stamp, Instant::now());
    assert_eq!(wait(stamp), RoomWait::Others);
    drop(held);
    store.maintain().unwrap();
    assert_eq!(wait(stamp), RoomWait::Changed);
    bench.put_all(&store, &["a"]);
    assert_eq!(wait(store.room_stamp()), RoomWait::Nothing);
}
