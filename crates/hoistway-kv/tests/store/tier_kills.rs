//! Processes that are killed while blocks move between the tiers.
//!
//! A block that is written to the far tier is there once its mark is: a record in the log of layout `segments`, or its name in
//! layout `files`.

use crate::{
    common::*,
    damage,
    processes::{CHILD, FLOOD, Other},
};
use hoistway_kv::{
    FarPolicy, LayoutKind, Status, Store,
    fault::{Fault, Gate},
};
use std::{
    env, fs,
    path::{Path, PathBuf},
};

const SHAPE: Shape = Shape { shards: 2, len: 70_000, skew: 0, pieces: 2 };

fn start(tiers: &Tiers, policy: FarPolicy, layout: LayoutKind) -> Other {
    let arguments = format!("{}\n{policy}\n{layout}", tiers.root.path().display());
    Other::start_as("tier_kills::child", &arguments)
}

/// The process that is killed. As a test of its own it does nothing.
#[test]
fn child() {
    let Ok(arguments) = env::var(CHILD) else { return };
    let mut arguments = arguments.split('\n');
    let root = Path::new(arguments.next().unwrap());
    let (policy, layout) = (arguments.next().unwrap(), arguments.next().unwrap());
    let (script, gate) = (Script::default(), Gate::new());
    let far = far_options(&root.join("far"), layout.parse().unwrap()).faults(script.faults());
    let far = far.policy(policy.parse().unwrap()).timeout(LONG.unwrap());
    let store = Store::open(near_options(&root.join("near"), far)).unwrap();
    let blocks = namespace(&store);
    println!("answer: ready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (verb, name) = line.split_once(' ').unwrap_or((&line, ""));
        match verb {
            "hang" => {
                let hang = gate.clone();
                script.set(move |operation| operation.is_write.then(|| Fault::Hang(hang.clone())));
                println!("answer: hangs");
            }
            "put" => {
                put(&blocks, name, SHAPE);
                println!("answer: stored");
            }
            "begun" => {
                eventually("the far write begins", || gate.came() > 0);
                println!("answer: begun");
            }
            "written" => {
                eventually("it is written", || far_stats(&store).written_blocks > 0);
                println!("answer: written");
            }
            // Until it is killed.
            "flood" => {
                for number in 0..FLOOD {
                    let completion = end(&begin_store(&blocks, &format!("{name} {number}"), SHAPE, 0..2));
                    assert!(completion.is_ok() && completion.far_missing == 0, "{completion:?}");
                    println!("answer: {number}");
                }
            }
            other => panic!("{other}"),
        }
    }
    std::process::exit(0);
}

/// The near tier has the block and the far one lacks it. It reaches the far tier when it is stored again.
fn is_in_the_near_tier_alone(tiers: &Tiers, layout: LayoutKind, name: &str) {
    let far = tiers.open_far();
    assert_eq!(get_status(&namespace(&far), name, SHAPE), Status::Miss);
    let stats = far.stats().unwrap();
    assert_eq!((stats.blocks, stats.corrupt_blocks, stats.lost_on_recovery), (0, 0, 0), "{stats:?}");
    far.close(LONG).unwrap();
    let store = tiers.open("near", far_options(&tiers.path("far"), layout).timeout(LONG.unwrap()));
    let blocks = namespace(&store);
    let (ticket, memory) = begin_load(&blocks, name, SHAPE, 0..2, |_| {});
    let completion = end(&ticket);
    assert!(completion.is_ok() && completion.far_bytes == 0, "{completion:?}");
    assert!((0..2).all(|shard| memory[shard].bytes() == bytes_of(name, shard as u32, SHAPE.len)));
    let completion = end(&begin_store(&blocks, name, SHAPE, 0..2));
    assert_eq!((completion.items, completion.far_missing), (vec![Status::Exists; 2], 0));
    store.close(LONG).unwrap();
    assert_eq!(get_status(&namespace(&tiers.open_far()), name, SHAPE), Status::Ok);
}

/// Files of the far store whose names end so.
fn far_files(tiers: &Tiers, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    damage::files(&tiers.path("far"), ending, &mut found);
    found
}

#[test]
fn a_kill_before_the_far_write_loses_nothing_of_the_near_tier() {
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        let tiers = Tiers::new();
        let mut other = start(&tiers, FarPolicy::WriteBack, layout);
        assert_eq!(other.tell("hang"), "hangs");
        assert_eq!(other.tell("put a"), "stored");
        assert_eq!(other.tell("begun"), "begun");
        other.kill();
        is_in_the_near_tier_alone(&tiers, layout, "a");
    }
}

#[test]
fn bytes_in_the_far_tier_without_their_mark_are_no_part_of_a_block() {
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        let tiers = Tiers::new();
        let mut other = start(&tiers, FarPolicy::WriteBack, layout);
        assert_eq!(other.tell("put a"), "stored");
        assert_eq!(other.tell("written"), "written");
        other.kill();
        // The mark is taken away, as a kill between the write and the mark would leave it.
        match layout {
            LayoutKind::Segments => {
                let logs = far_files(&tiers, ".log");
                assert_eq!(logs.len(), 1);
                let log = fs::File::options().write(true).open(&logs[0]).unwrap();
                assert!(log.metadata().unwrap().len() > 64);
                log.set_len(64).unwrap();
            }
            _ => {
                let blocks = far_files(&tiers, ".kvb");
                assert_eq!(blocks.len(), 1);
                let writer = far_files(&tiers, "LEASE").remove(0);
                fs::rename(&blocks[0], writer.with_file_name("1.tmp")).unwrap();
            }
        }
        is_in_the_near_tier_alone(&tiers, layout, "a");
    }
}

#[test]
fn what_a_killed_process_had_acknowledged_is_where_its_policy_says() {
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        for policy in [FarPolicy::WriteThrough, FarPolicy::WriteBack] {
            let tiers = Tiers::new();
            for round in 0..4 {
                let mut other = start(&tiers, policy, layout);
                let mut last: u32 = other.tell(&format!("flood round {round}")).parse().unwrap();
                while last < 8 + round * 3 {
                    last = other.answer().parse().unwrap();
                }
                other.kill();
                let far = tiers.open_far();
                let of_far = namespace(&far);
                let store = tiers.open("near", far_options(&tiers.path("far"), layout));
                let blocks = namespace(&store);
                // Some that were not acknowledged, too: those are whole or missing.
                for number in 0..last + 20 {
                    let name = format!("round {round} {number}");
                    let statuses = [get_status(&of_far, &name, SHAPE), get_status(&blocks, &name, SHAPE)];
                    let is_fine = |status| matches!(status, Status::Ok | Status::Miss);
                    assert!(statuses.into_iter().all(is_fine), "{name}: {statuses:?}");
                    let is_acknowledged = number <= last;
                    let must_be_far = is_acknowledged && policy == FarPolicy::WriteThrough;
                    assert!(statuses[0] == Status::Ok || !must_be_far, "{name} is not in the far tier");
                    assert!(statuses[1] == Status::Ok || !is_acknowledged, "{name} is in neither tier");
                }
                for store in [&far, &store] {
                    assert_eq!(store.stats().unwrap().corrupt_blocks, 0);
                }
                store.close(LONG).unwrap();
            }
        }
    }
}
