//! Several processes on one store, and processes that die.

use crate::common::*;
use hoistway_kv::{Durability, LayoutKind, Namespace, Status, Store, StoreAccess};
use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};
use tempfile::TempDir;

const SHAPE: Shape = Shape { shards: 2, len: 30_000, skew: 0, pieces: 1 };
const LARGE: Shape = Shape::of(1, 1 << 20);
/// Blocks in a flood: many more than any test waits for, and fewer than need others to go.
pub(crate) const FLOOD: usize = 300;
/// Large blocks in a burst.
const BURST: usize = 128;
/// Names what a process of these tests works on.
pub(crate) const CHILD: &str = "HOISTWAY_KV_TEST_CHILD";

/// Another process with the store open. It does what it is told, a line at a time.
pub(crate) struct Other {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Other {
    fn start(root: &TempDir, durability: Durability) -> Self {
        Self::start_as("processes::child", &format!("{}\n{durability}", root.path().display()))
    }

    /// A process that runs this test with these arguments. The test answers once it is ready.
    pub(crate) fn start_as(test: &str, arguments: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(CHILD, arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (say, hear) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut other = Self { child, say, hear };
        other.answer();
        other
    }

    pub(crate) fn tell(&mut self, line: &str) -> String {
        writeln!(self.say, "{line}").unwrap();
        self.answer()
    }

    pub(crate) fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.hear.read_line(&mut line).unwrap() > 0, "the other process ended");
            // What the test harness prints is none of ours.
            if let Some((_, answer)) = line.split_once("answer: ") {
                return answer.trim_end().to_owned();
            }
        }
    }

    /// As if the machine had no mercy: SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other process. As a test of its own it does nothing.
#[test]
fn child() {
    let Ok(arguments) = env::var(CHILD) else { return };
    let (root, durability) = arguments.split_once('\n').unwrap();
    let mut options = hoistway_kv::StoreOptions::new(format!("{root}/kv"));
    options.capacity_bytes = Some(CAPACITY);
    options.min_free_bytes = 0;
    options.durability = durability.parse().unwrap();
    let store = Store::open(options).unwrap();
    let blocks = namespace(&store);
    println!("answer: ready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (verb, name) = line.split_once(' ').unwrap_or((&line, ""));
        match verb {
            "put" => {
                put(&blocks, name, SHAPE);
                println!("answer: stored");
            }
            "get" => println!("answer: {:?}", get_status(&blocks, name, SHAPE)),
            "delete" => println!("answer: {}", blocks.delete(&[name]).unwrap()),
            // All at once, so that its lease says little of them when it is killed.
            "burst" => {
                let tickets: Vec<_> = (0..BURST)
                    .map(|number| begin_store(&blocks, &format!("{name} {number}"), LARGE, 0..1))
                    .collect();
                assert!(tickets.iter().all(|ticket| end(ticket).is_ok()));
                println!("answer: stored");
            }
            // Until it is killed.
            "flood" => flood(&blocks, name),
            other => panic!("{other}"),
        }
    }
    std::process::exit(0);
}

fn flood(blocks: &Namespace, name: &str) {
    for number in 0..FLOOD {
        let _ = begin_store(blocks, &format!("{name} {number}"), SHAPE, 0..2).wait(LONG);
        println!("answer: {number}");
    }
}

#[test]
fn processes_find_and_read_each_others_blocks() {
    for durability in [Durability::None, Durability::Batched, Durability::Sync] {
        let root = tempfile::tempdir().unwrap();
        let mut options = options(&root);
        options.durability = durability;
        let store = Store::open(options).unwrap();
        let blocks = namespace(&store);
        let mut other = Other::start(&root, durability);
        put(&blocks, "mine", SHAPE);
        assert_eq!(other.tell("put theirs"), "stored");
        eventually("theirs is found", || blocks.lookup(&["theirs"]).unwrap() == [true]);
        assert_eq!(get_status(&blocks, "theirs", SHAPE), Status::Ok);
        eventually("mine is found", || other.tell("get mine") == "Ok");
        assert_eq!(blocks.delete(&["theirs"]).unwrap(), 0, "only who stored it may delete it");
        assert_eq!(other.tell("delete theirs"), "1");
        eventually("theirs is gone", || get_status(&blocks, "theirs", SHAPE) == Status::Miss);
        assert_eq!(get_status(&blocks, "mine", SHAPE), Status::Ok);
        assert_eq!(store.stats().unwrap().corrupt_blocks, 0);
    }
}

#[test]
fn the_lease_of_a_killed_writer_evicts_nothing() {
    let root = tempfile::tempdir().unwrap();
    let mut options = options(&root);
    options.layout = Some(LayoutKind::Files);
    options.capacity_bytes = Some(154 << 20);
    drop(Store::open(options.clone()).unwrap());
    let mut other = Other::start(&root, Durability::Sync);
    assert_eq!(other.tell("burst block"), "stored");
    other.kill();

    let store = Store::open(options.clone()).unwrap();
    let blocks = namespace(&store);
    for number in 0..20 {
        put(&blocks, &format!("new {number}"), LARGE);
    }
    let stats = store.stats().unwrap();
    assert_eq!((stats.evicted_blocks, stats.blocks), (0, BURST as u64 + 20), "{stats:?}");
    options.access = StoreAccess::Read;
    let reader = Store::open(options).unwrap();
    let root_bytes = reader.stats().unwrap().root_bytes >> 20;
    assert!((148..154).contains(&root_bytes), "{root_bytes} MiB");
}

#[test]
fn two_processes_that_store_one_block_both_have_it() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(options(&root)).unwrap();
    let blocks = namespace(&store);
    let mut other = Other::start(&root, Durability::Batched);
    for number in 0..20 {
        let name = format!("both {number}");
        let ticket = begin_store(&blocks, &name, SHAPE, 0..2);
        let theirs = other.tell(&format!("get {name}"));
        assert!(theirs == "Ok" || theirs == "Miss", "{theirs}");
        assert!(end(&ticket).is_ok());
        assert_eq!(get_status(&blocks, &name, SHAPE), Status::Ok);
        eventually("the other finds it", || other.tell(&format!("get {name}")) == "Ok");
    }
}

#[test]
fn what_a_killed_process_had_acknowledged_is_there() {
    for durability in [Durability::None, Durability::Batched, Durability::Sync] {
        let root = tempfile::tempdir().unwrap();
        let mut options = options(&root);
        options.durability = durability;
        for round in 0..6 {
            let mut other = Other::start(&root, durability);
            let mut last: i32 = other.tell(&format!("flood round {round}")).parse().unwrap();
            while last < 10 + round * 3 {
                last = other.answer().parse().unwrap();
            }
            other.kill();
            let store = Store::open(options.clone()).unwrap();
            let blocks = namespace(&store);
            for round in 0..=round {
                for number in 0..=10 + round * 3 {
                    let name = format!("round {round} {number}");
                    // The system has what was written: only a power cut forgets that.
                    assert_eq!(get_status(&blocks, &name, SHAPE), Status::Ok, "{name}, {durability}");
                }
            }
            assert_eq!(store.stats().unwrap().corrupt_blocks, 0);
            store.close(LONG).unwrap();
        }
    }
}

#[test]
fn a_killed_writers_blocks_are_found_by_those_who_live_on() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(options(&root)).unwrap();
    let blocks = namespace(&store);
    let mut other = Other::start(&root, Durability::Batched);
    assert_eq!(other.tell("put theirs"), "stored");
    other.kill();
    eventually("theirs is found", || blocks.lookup(&["theirs"]).unwrap() == [true]);
    assert_eq!(get_status(&blocks, "theirs", SHAPE), Status::Ok);
}
