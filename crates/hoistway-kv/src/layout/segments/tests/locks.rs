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
