//! What completions and closing say of the far tier is what the far tier has.

use crate::common::*;
use hoistway_kv::{
    Error, FarPolicy, LayoutKind, NamespaceOptions, Status,
    fault::{Fault, Gate},
};
use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const SHAPE: Shape = Shape { shards: 2, len: 70_000, skew: 0, pieces: 2 };

#[test]
fn a_store_that_ends_early_says_that_the_far_tier_lacks_its_block() {
    each_far_layout(|tiers, far| {
        let store = tiers.open("near", far.timeout(LONG.unwrap()));
        let blocks = namespace(&store);
        let gate = Gate::new();
        let hang = gate.clone();
        tiers.script.set(move |operation| operation.is_write.then(|| Fault::Hang(hang.clone())));
        let ticket = begin_store(&blocks, "a", SHAPE, 0..2);
        eventually("the far tier writes", || gate.came() > 0);
        assert!(ticket.cancel());
        let completion = ticket.wait(LONG).unwrap();
        assert_eq!((completion.items, completion.far_missing), (vec![Status::Ok; 2], 1));
        tiers.script.clear();
        gate.open();
        assert_eq!(end(&begin_store(&blocks, "b", SHAPE, 0..2)).far_missing, 0);
    });
}

#[test]
fn closing_does_not_wait_for_a_namespace_that_the_far_tier_cannot_open() {
    each_far_layout(|tiers, far| {
        let id = model("missing").id().unwrap();
        drop(tiers.open("near", far.clone()));
        fs::write(tiers.path("far").join("ns").join(id.to_string()), b"").unwrap();
        let store = tiers.open("near", far.policy(FarPolicy::WriteBack));
        let missing = store.namespace(&model("missing"), NamespaceOptions::default()).unwrap();
        put(&missing, "a", SHAPE);
        put(&namespace(&store), "b", SHAPE);
        let closing = {
            let store = store.clone();
            thread::spawn(move || store.close(None))
        };
        eventually("closing ends", || closing.is_finished());
        let closed = closing.join().unwrap();
        assert!(matches!(closed, Err(Error::NotWrittenBack { blocks: 1, .. })), "{closed:?}");
        assert_eq!(get_status(&namespace(&tiers.open_far()), "b", SHAPE), Status::Ok);
    });
}

#[test]
fn what_is_acknowledged_while_the_store_closes_is_in_the_far_tier() {
    each_far_layout(|tiers, far| {
        for round in 0..3 {
            let store = tiers.open("near", far.clone().policy(FarPolicy::WriteBack));
            tiers.script.set(|_| Some(Fault::Delay(Duration::from_millis(2))));
            let blocks = namespace(&store);
            let is_begun = AtomicBool::new(false);
            let acknowledged: Vec<String> = thread::scope(|scope| {
                let writers: Vec<_> = (0..3)
                    .map(|writer| {
                        let (blocks, is_begun) = (&blocks, &is_begun);
                        scope.spawn(move || {
                            let mut stored = Vec::new();
                            // So few that the far tier drops none of them, however far it lags behind.
                            for number in 0..100 {
                                let name = format!("{round} {writer} {number}");
                                let Some(ticket) = try_store(blocks, &name, SHAPE) else { break };
                                if ticket.wait(LONG).unwrap().is_ok() {
                                    stored.push(name);
                                }
                                is_begun.store(true, Ordering::Relaxed);
                            }
                            stored
                        })
                    })
                    .collect();
                eventually("blocks are stored", || is_begun.load(Ordering::Relaxed));
                store.close(LONG).unwrap();
                writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
            });
            tiers.script.clear();
            let far = tiers.open_far();
            assert_eq!(namespace(&far).lookup_prefix(&acknowledged).unwrap(), acknowledged.len());
            far.close(LONG).unwrap();
        }
    });
}

#[test]
fn a_block_larger_than_the_backlog_is_written_all_the_same() {
    each_far_layout(|tiers, far| {
        for policy in [FarPolicy::WriteThrough, FarPolicy::WriteBack] {
            let store = tiers.open("near", far.clone().policy(policy).backlog_bytes(1));
            let name = policy.to_string();
            assert_eq!(end(&begin_store(&namespace(&store), &name, SHAPE, 0..2)).far_missing, 0);
            store.close(LONG).unwrap();
            assert_eq!(get_status(&namespace(&tiers.open_far()), &name, SHAPE), Status::Ok);
        }
    });
}

/// Loads that wait for the far tier have a bound of their own.
#[test]
fn loads_that_wait_for_the_far_tier_leave_room_for_near_ones() {
    const MANY: usize = 1 << 16;
    let tiers = Tiers::new();
    let other = tiers.open("other", tiers.far(LayoutKind::Segments));
    for number in 0..8 {
        put(&namespace(&other), &format!("far {number}"), SHAPE);
    }
    drop(other);
    let store = tiers.open("near", tiers.far(LayoutKind::Segments).timeout(LONG.unwrap()));
    let blocks = namespace(&store);
    put(&blocks, "near", SHAPE);
    let gate = Gate::new();
    let hang = gate.clone();
    tiers.script.set(move |_| Some(Fault::Hang(hang.clone())));
    let late: Vec<_> =
        (0..8).map(|number| begin_load(&blocks, &format!("far {number}"), SHAPE, 0..2, |_| {}).0).collect();
    eventually("all threads wait", || gate.came() >= 8);
    let waiting = load_many(&blocks, "waits", MANY - 8);
    assert_eq!(get_status(&blocks, "near", SHAPE), Status::Ok, "the near tier is not busy");
    let begin = Instant::now();
    let beyond = end(&load_many(&blocks, "beyond", 8));
    assert_eq!(beyond.items, [Status::Miss; 8], "there is no room for more");
    assert!(begin.elapsed() < LONG.unwrap() / 2);
    assert!(waiting.poll().is_none());
    tiers.script.clear();
    gate.open();
    assert!(late.iter().all(|ticket| end(ticket).is_ok()));
    assert!(end(&waiting).items.iter().all(|status| *status == Status::Miss));
    eventually("there is room again", || get_status(&blocks, "far 0", SHAPE) == Status::Ok);
}

#[test]
fn a_store_of_a_block_that_is_being_written_waits_for_that_write() {
    each_far_layout(|tiers, far| {
        let store = tiers.open("near", far.timeout(LONG.unwrap()));
        let blocks = namespace(&store);
        let gate = Gate::new();
        let hang = gate.clone();
        tiers.script.set(move |operation| operation.is_write.then(|| Fault::Hang(hang.clone())));
        let first = begin_store(&blocks, "a", SHAPE, 0..2);
        eventually("the far tier writes", || gate.came() > 0);
        let second = begin_store(&blocks, "a", SHAPE, 0..2);
        thread::sleep(Duration::from_millis(200));
        assert!(first.poll().is_none() && second.poll().is_none());
        tiers.script.clear();
        gate.open();
        assert_eq!(end(&first).far_missing, 0);
        let completion = end(&second);
        assert_eq!((completion.items, completion.far_missing), (vec![Status::Exists; 2], 0));
        assert_eq!(far_stats(&store).written_blocks, 1);
    });
}

/// What waits is counted as what it takes, however small its bytes are.
#[test]
fn small_blocks_count_in_the_backlog_as_what_they_take() {
    let tiers = Tiers::new();
    let far = tiers.far(LayoutKind::Segments).policy(FarPolicy::WriteBack).timeout(LONG.unwrap());
    let store = tiers.open("near", far.backlog_bytes(10 * 8192));
    let gate = Gate::new();
    let hang = gate.clone();
    tiers.script.set(move |operation| operation.is_write.then(|| Fault::Hang(hang.clone())));
    for number in 0..20 {
        put(&namespace(&store), &format!("small {number}"), Shape::of(1, 1));
    }
    let stats = far_stats(&store);
    assert!(stats.backlog_blocks <= 10 && stats.unwritten_blocks >= 10, "{stats:?}");
    tiers.script.clear();
    gate.open();
}
