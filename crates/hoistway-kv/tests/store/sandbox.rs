//! Stores where a filter of system calls, as in containers, forbids rings. Each case runs in a process of its own.

use crate::{
    child::{forbid, is_case},
    common::*,
};
use hoistway_kv::{Error, Route, Status, Store};

const SHAPE: Shape = Shape { shards: 1, len: 30_000, skew: 0, pieces: 1 };

#[test]
fn a_filter_that_refuses_any_call_of_a_ring_is_reported() {
    let calls = [
        (libc::SYS_io_uring_setup, "io_uring_setup"),
        (libc::SYS_io_uring_enter, "io_uring_enter"),
        (libc::SYS_io_uring_register, "io_uring_register"),
        (libc::SYS_fstatfs, "fstatfs"),
    ];
    for (call, text) in calls {
        let test = "sandbox::a_filter_that_refuses_any_call_of_a_ring_is_reported";
        if is_case(test, text) {
            serves_without_rings(call, text);
        }
    }
}

/// Route `auto` falls back and says why; the named route fails with the same reason.
fn serves_without_rings(call: i64, text: &str) {
    let root = tempfile::tempdir().unwrap();
    forbid(&[call], libc::EPERM);
    let mut named = options(&root);
    named.route = Route::IoUring;
    match Store::open(named) {
        Err(Error::RouteUnavailable { why, .. }) => assert!(why.reason.contains(text), "{why:?}"),
        other => panic!("{other:?}"),
    }
    let store = Store::open(options(&root)).unwrap();
    let blocks = namespace(&store);
    put(&blocks, "a", SHAPE);
    assert_eq!(get_status(&blocks, "a", SHAPE), Status::Ok);
    let report = store.report().unwrap();
    assert_eq!(report.route, Route::Threads);
    let refusal = report.refused.iter().find(|refusal| refusal.what == "io_uring").unwrap();
    assert!(refusal.why.reason.contains(text) && refusal.why.fix.contains(text), "{refusal:?}");
}
