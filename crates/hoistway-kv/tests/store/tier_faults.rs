//! What the near tier does when the far one stalls, fails, is full or is gone; and what the far tier makes good.

use crate::{child, common::*};
use hoistway_kv::{
    Error, EventKind, FarPolicy, LayoutKind, Namespace, NamespaceOptions, Status, Store, StoreOptions,
    fault::{Fault, Gate, HangingCalls},
};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

const SHAPE: Shape = Shape { shards: 2, len: 70_000, skew: 0, pieces: 2 };
/// Time that the far tier may take in tests where it hangs.
const TIMEOUT: Duration = Duration::from_millis(300);

#[test]
fn a_damaged_block_of_the_near_tier_comes_from_the_far_one() {
    each_far_layout(|tiers, far| {
        let damage = Script::default();
        let near = near_options(&tiers.path("near"), far).faults(damage.faults());
        let store = Store::open(near).unwrap();
        let blocks = namespace(&store);
        put(&blocks, "both", SHAPE);
        tiers.script.set(|operation| operation.is_write.then_some(Fault::Errno(libc::EIO)));
        assert_eq!(end(&begin_store(&blocks, "near", SHAPE, 0..2)).far_missing, 1);
        tiers.script.clear();

        damage.set(|operation| (!operation.is_write && operation.len > 4096).then_some(Fault::Flip(5000)));
        let (ticket, memory) = begin_load(&blocks, "both", SHAPE, 0..2, |_| {});
        let completion = end(&ticket);
        assert_eq!((&*completion.items, completion.bytes), (&[Status::Ok; 2][..], 140_000));
        assert!(completion.far_bytes >= 70_000, "{completion:?}");
        assert!((0..2).all(|shard| memory[shard].bytes() == bytes_of("both", shard as u32, SHAPE.len)));
        // A block that is damaged, and that the far tier lacks, is damaged.
        assert!(get(&blocks, "near", SHAPE).contains(&Status::Corrupt));
        damage.clear();
        assert_eq!(get_status(&blocks, "near", SHAPE), Status::Miss);

        let stats = store.stats().unwrap();
        assert_eq!(stats.corrupt_blocks, 2);
        assert!(stats.namespaces[0].hits >= 2 && stats.namespaces[0].corrupt >= 1, "{stats:?}");
        assert!(store.events().iter().any(|event| event.kind == EventKind::CorruptBlock));
        eventually("the near tier has it again", || far_stats(&store).promoted_blocks == 1);
        let (ticket, _) = begin_load(&blocks, "both", SHAPE, 0..2, |_| {});
        assert_eq!(end(&ticket).far_bytes, 0);
    });
}

/// The longest time that a load, a lookup or a store of the near tier takes.
fn slowest(blocks: &Namespace, stores: &str) -> Duration {
    let mut slowest = Duration::ZERO;
    for number in 0..60 {
        let begin = Instant::now();
        assert_eq!(get_status(blocks, "both", SHAPE), Status::Ok);
        assert_eq!(blocks.lookup(&["both"]).unwrap(), [true]);
        if number % 10 == 0 {
            put(blocks, &format!("{stores} {number}"), SHAPE);
        }
        slowest = slowest.max(begin.elapsed());
    }
    slowest
}

/// Nothing of the near tier waits for a far one that stalls, fails, is full, or is gone, and everything goes on afterwards.
#[test]
fn the_near_tier_is_as_fast_whatever_the_far_one_does() {
    /// Far longer than the near tier takes, and less than one wait for the far one.
    const LIMIT: Duration = Duration::from_secs(60);
    each_far_layout(|tiers, far| {
        let far = far.policy(FarPolicy::WriteBack).timeout(LIMIT * 2).lookup_timeout(LIMIT * 2);
        let store = tiers.open("near", far);
        let blocks = namespace(&store);
        put(&blocks, "both", SHAPE);
        eventually("it is written", || far_stats(&store).written_blocks == 1);

        let gate = Gate::new();
        let hang = gate.clone();
        tiers.script.set(move |_| Some(Fault::Hang(hang.clone())));
        assert!(slowest(&blocks, "stall") < LIMIT);
        eventually("it hangs", || gate.came() > 0);
        tiers.script.clear();
        gate.open();
        eventually("the backlog is written", || far_stats(&store).backlog_blocks == 0);

        tiers.script.set(|_| Some(Fault::Errno(libc::EIO)));
        assert!(slowest(&blocks, "error") < LIMIT);
        eventually("it is given up", || far_stats(&store).outages > 0);
        tiers.script.clear();
        eventually("it is opened again", || far_stats(&store).is_up);
        eventually("the backlog is written", || far_stats(&store).backlog_blocks == 0);

        let unwritten = far_stats(&store).unwritten_blocks;
        tiers.script.set(|operation| operation.is_write.then_some(Fault::Errno(libc::ENOSPC)));
        assert!(slowest(&blocks, "full") < LIMIT);
        eventually("blocks are refused", || far_stats(&store).unwritten_blocks == unwritten + 6);
        tiers.script.clear();

        let (root, aside) = (tiers.path("far"), tiers.path("aside"));
        fs::rename(&root, &aside).unwrap();
        eventually("it is missed", || !far_stats(&store).is_up);
        assert!(slowest(&blocks, "gone") < LIMIT);
        fs::rename(&aside, &root).unwrap();
        eventually("it is opened again", || far_stats(&store).is_up);
        eventually("the backlog is written", || far_stats(&store).backlog_blocks == 0);
        store.close(LONG).unwrap();
        let far = tiers.open_far();
        let blocks = namespace(&far);
        let names = ["both", "stall 0", "gone 50", "full 0"];
        assert_eq!(blocks.lookup(&names).unwrap(), [true, true, true, false]);
        // Some were given up: those that met more errors than a block may.
        let errors: Vec<String> = (0..60).step_by(10).map(|number| format!("error {number}")).collect();
        let written = blocks.lookup(&errors).unwrap().into_iter().filter(|is_there| *is_there).count();
        assert!(written as u64 + unwritten >= 6, "{written} of 6, and {unwritten} were given up");
    });
}

/// A mount whose server is gone: no call that names one of its files, or goes to one, comes back.
#[test]
fn the_near_tier_waits_for_no_call_of_the_file_system_below_the_far_one() {
    /// Far longer than all waits for the far tier that a step may have.
    const LIMIT: Duration = Duration::from_secs(60);
    fn in_time<T>(what: &str, step: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = step();
        let taken = begin.elapsed();
        assert!(taken < LIMIT, "{what} took {taken:?}");
        result
    }
    for policy in [FarPolicy::WriteBack, FarPolicy::WriteThrough] {
        each_far_layout(|tiers, far| {
            let store = tiers.open("near", far.clone());
            for name in ["both", "kept"] {
                assert_eq!(end(&begin_store(&namespace(&store), name, SHAPE, 0..2)).far_missing, 0);
            }
            store.close(LONG).unwrap();
            let far = far.policy(policy).timeout(TIMEOUT).lookup_timeout(TIMEOUT);
            let store = tiers.open("near", far.clone());
            let blocks = namespace(&store);
            eventually("the far tier is open", || far_stats(&store).is_up);

            let gate = Gate::new();
            let calls = HangingCalls::below(tiers.path("far"));
            let hang = gate.clone();
            tiers.script.set(move |_| Some(Fault::Hang(hang.clone())));
            for round in 0..8 {
                in_time("a store", || put(&blocks, &format!("stuck {round}"), SHAPE));
                in_time("a load", || assert_eq!(get_status(&blocks, "both", SHAPE), Status::Ok));
                in_time("a lookup", || blocks.lookup(&["both", "nowhere"]).unwrap());
                in_time("a load of what is in no tier", || get(&blocks, "nowhere", SHAPE));
                in_time("the description of a block", || blocks.block(b"nowhere").unwrap());
                in_time("statistics", || store.stats().unwrap());
                in_time("a report", || store.report().unwrap());
                in_time("upkeep", || store.maintain_now().unwrap());
                in_time("another namespace", || {
                    let description = model(&format!("stuck {round}"));
                    store.namespace(&description, NamespaceOptions::default()).unwrap()
                });
            }
            let removed = in_time("a deletion", || blocks.delete(&["both"]));
            assert!(matches!(removed, Err(Error::FarUnavailable { .. })), "{removed:?}");
            eventually("calls hang", || calls.came() > 0);
            let other = in_time("another opening", || tiers.open("other", far.clone()));
            in_time("a store", || put(&namespace(&other), "stuck", SHAPE));
            let timeout = Some(Duration::from_millis(500));
            for store in [other, store] {
                let closed = in_time("closing", || store.close(timeout));
                assert!(matches!(closed, Ok(()) | Err(Error::NotWrittenBack { .. })), "{closed:?}");
            }
            // Its directory is given back, whatever still waits.
            let near = StoreOptions::new(tiers.path("near")).capacity_bytes(CAPACITY);
            let again = Store::open(near.min_free_bytes(0)).unwrap();
            assert_eq!(get_status(&namespace(&again), "stuck 7", SHAPE), Status::Ok);
            tiers.script.clear();
            gate.open();
            drop(calls);
            // The deletion may go on by now.
            assert_eq!(get_status(&namespace(&tiers.open_far()), "kept", SHAPE), Status::Ok);
        });
    }
}

/// The lock of a log is held while the log is written.
#[test]
fn statistics_do_not_wait_for_the_log_of_the_far_tier() {
    let tiers = Tiers::new();
    let store = tiers.open("near", tiers.far(LayoutKind::Segments).timeout(TIMEOUT));
    let blocks = namespace(&store);
    eventually("the far tier is open", || far_stats(&store).is_up);
    put(&blocks, "before", SHAPE);
    let below = |folder: &Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let writers: Vec<PathBuf> = below(&tiers.path("far"));
    let files: Vec<PathBuf> =
        writers.iter().filter(|path| path.is_dir()).flat_map(|path| -> Vec<_> { below(path) }).collect();
    let is_log = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "log");
    let calls = HangingCalls::below(files.iter().find(is_log).unwrap());
    let mut number = 0;
    // Of one that the far tier takes too long to store, it may write no record.
    eventually("the log is written to", || {
        number += 1;
        put(&blocks, &format!("stuck {number}"), SHAPE);
        calls.came() > 0
    });
    let (send, receive) = mpsc::channel();
    let asked = store.clone();
    thread::spawn(move || drop(send.send(asked.stats().unwrap())));
    let stats = receive.recv_timeout(LONG.unwrap()).expect("they wait");
    assert!(stats.far.unwrap().store.is_none());
    drop(calls);
    eventually("they are there again", || far_stats(&store).store.is_some());
}

#[test]
fn a_far_tier_that_is_full_is_said_once_and_counted() {
    each_far_layout(|tiers, far| {
        let store = tiers.open("near", far);
        let blocks = namespace(&store);
        tiers.script.set(|operation| operation.is_write.then_some(Fault::Errno(libc::ENOSPC)));
        for name in ["a", "b", "c", "d"] {
            let completion = end(&begin_store(&blocks, name, SHAPE, 0..2));
            assert_eq!((completion.items, completion.far_missing), (vec![Status::Ok; 2], 1));
        }
        let stats = far_stats(&store);
        assert_eq!((stats.unwritten_blocks, stats.failures, stats.outages, stats.is_up), (4, 0, 0, true));
        let events = store.events();
        let said =
            events.iter().filter(|event| event.reason.contains("does not take blocks: dropped:no_room"));
        assert_eq!(said.count(), 1, "{events:?}");
        tiers.script.clear();
        assert_eq!(end(&begin_store(&blocks, "e", SHAPE, 0..2)).far_missing, 0);
        assert_eq!(end(&begin_store(&blocks, "a", SHAPE, 0..2)).far_missing, 0);
        assert_eq!(end(&begin_store(&blocks, "a", SHAPE, 0..2)).far_missing, 0);
        assert_eq!(far_stats(&store).written_blocks, 2, "what is there is not counted as written");
    });
}

#[test]
fn a_far_tier_that_never_lets_go_takes_no_more_than_its_share() {
    let tiers = Tiers::new();
    let store = tiers.open("near", tiers.far(LayoutKind::Segments).timeout(TIMEOUT));
    let blocks = namespace(&store);
    let gate = Gate::new();
    let hang = gate.clone();
    tiers.script.set(move |_| Some(Fault::Hang(hang.clone())));
    let failure = || store.report().unwrap().far.unwrap().failure.unwrap_or_default();
    let mut number = 0;
    eventually("no third store is opened", || {
        number += 1;
        put(&blocks, &format!("block {number}"), SHAPE);
        far_stats(&store).outages == 2 && failure().contains("from before its outage have not ended")
    });
    thread::sleep(Duration::from_secs(2));
    assert_eq!(far_stats(&store).outages, 2);
    tiers.script.clear();
    gate.open();
    // It has little time for each store, and may take more.
    eventually("it is opened again and written to", || {
        end(&begin_store(&blocks, "last", SHAPE, 0..2)).far_missing == 0
    });
}

#[test]
fn failures_of_the_near_tier_are_not_the_far_ones() {
    let tiers = Tiers::new();
    put(&namespace(&tiers.open("other", tiers.far(LayoutKind::Segments))), "far", SHAPE);
    let failing = Script::default();
    let near = near_options(&tiers.path("near"), tiers.far(LayoutKind::Segments)).faults(failing.faults());
    let store = Store::open(near).unwrap();
    let blocks = namespace(&store);
    failing.set(|operation| operation.is_write.then_some(Fault::Errno(libc::EIO)));
    // A load while the block is being promoted begins no promotion.
    eventually("it is not promoted", || {
        assert_eq!(get_status(&blocks, "far", SHAPE), Status::Ok);
        far_stats(&store).unpromoted_blocks >= 5
    });
    let stats = far_stats(&store);
    assert_eq!((stats.failures, stats.outages, stats.is_up), (0, 0, true), "{stats:?}");
}

/// What the far tier has under way when it is given up is taken up again, or ends as if it had taken too long.
#[test]
fn what_is_under_way_when_the_far_tier_goes_is_not_lost() {
    each_far_layout(|tiers, far| {
        put(&namespace(&tiers.open("other", far.clone())), "far", SHAPE);
        let store = tiers.open("near", far.policy(FarPolicy::WriteBack).timeout(LONG.unwrap()));
        let blocks = namespace(&store);
        eventually("it is found", || blocks.lookup(&["far"]).unwrap() == [true]);
        let begun = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        let gate = Gate::new();
        let (of_script, hang) = (begun.clone(), gate.clone());
        tiers.script.set(move |operation| {
            let is_payload = operation.len > 4096;
            of_script[usize::from(operation.is_write)].fetch_or(is_payload, Ordering::Relaxed);
            is_payload.then(|| Fault::Hang(hang.clone()))
        });
        put(&blocks, "near", SHAPE);
        let (late, _) = begin_load(&blocks, "far", SHAPE, 0..2, |_| {});
        eventually("both are under way", || begun.iter().all(|begun| begun.load(Ordering::Relaxed)));
        fs::rename(tiers.path("far"), tiers.path("aside")).unwrap();
        eventually("it is missed", || !far_stats(&store).is_up);
        assert_eq!(late.wait(LONG).unwrap().items, [Status::TimedOut; 2]);
        tiers.script.clear();
        fs::rename(tiers.path("aside"), tiers.path("far")).unwrap();
        gate.open();
        // By the store that was given up, which goes on until it is closed, or by the next.
        eventually("it is written", || far_stats(&store).backlog_blocks == 0);
        assert_eq!(far_stats(&store).unwritten_blocks, 0);
        eventually("the memory is given back", || late.is_released());
        store.close(LONG).unwrap();
        assert_eq!(get_status(&namespace(&tiers.open_far()), "near", SHAPE), Status::Ok);
    });
}

#[test]
fn a_store_that_took_too_long_is_not_flushed_for_ever() {
    let tiers = Tiers::new();
    let slow = Script::default();
    let near = near_options(&tiers.path("near"), tiers.far(LayoutKind::Segments)).faults(slow.faults());
    let store = Store::open(near.timeout(Duration::from_millis(50))).unwrap();
    let blocks = namespace(&store);
    let gate = Gate::new();
    let hang = gate.clone();
    slow.set(move |operation| operation.is_write.then(|| Fault::Hang(hang.clone())));
    let ticket = begin_store(&blocks, "late", SHAPE, 0..2);
    assert_eq!(ticket.wait(LONG).unwrap().items, [Status::TimedOut; 2]);
    slow.clear();
    gate.open();
    store.flush(LONG).unwrap();
    eventually("the memory is given back", || ticket.is_released());
}

/// Seconds of CPU that this process has taken.
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    // User and system time, in hundredths.
    [11, 12].iter().map(|field| fields[*field].parse::<f64>().unwrap() / 100.0).sum()
}

#[test]
fn a_namespace_that_the_far_tier_cannot_open_keeps_nothing_busy() {
    if !child::in_child("tier_faults::a_namespace_that_the_far_tier_cannot_open_keeps_nothing_busy") {
        return;
    }
    each_far_layout(|tiers, far| {
        let id = namespace(&Store::open(options(&tiers.root)).unwrap()).id();
        drop(tiers.open("near", far.clone()));
        let in_the_way = tiers.path("far").join("ns").join(id.to_string());
        fs::write(&in_the_way, b"").unwrap();
        let store = tiers.open("near", far.policy(FarPolicy::WriteBack));
        let blocks = namespace(&store);
        put(&blocks, "a", SHAPE);
        let before = cpu_seconds();
        thread::sleep(Duration::from_secs(3));
        let taken = cpu_seconds() - before;
        assert!(taken < 1.0, "{taken} s");
        let events = store.events();
        let said = events.iter().filter(|event| event.reason.contains("cannot be opened"));
        assert_eq!(said.count(), 1, "{events:?}");
        fs::remove_file(&in_the_way).unwrap();
        eventually("it is written", || far_stats(&store).written_blocks == 1);
    });
}
