//! Writers that others take for dead, rightly or not.
#![forbid(unsafe_code)]

use super::{
    Files, Timing, names,
    tests::{HASTY, bench, hasty},
    writer,
};
use crate::{
    Durability, EventKind, NamespaceOptions, StoreAccess, StoreOptions,
    disk::{Disk, FileAccess, RealDisk},
    format::lease::{Account, Lease, LockDomain},
    layout::{
        Administration, Layout, Reservation, Sharing,
        conformance::{
            Bench, CAPACITY, Loaded, Stored, block, bytes, eventually, load, open_namespace, store,
        },
    },
};
use std::{
    cell::Cell,
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};
use uuid::Uuid;

const LEN: usize = 1 << 20;
const ELSEWHERE: LockDomain = LockDomain([7; 16]);

/// A writer of which there is nothing but what it has left.
struct Ghost {
    id: Uuid,
    directory: PathBuf,
    domain: LockDomain,
}

impl Ghost {
    fn new(root: &Path, domain: LockDomain) -> Self {
        let id = Uuid::new_v4();
        let directory = root.join(format!("{}{id}", names::WRITER_PREFIX));
        fs::create_dir(&directory).unwrap();
        Self { id, directory, domain }
    }

    fn lease(&self) -> PathBuf {
        self.directory.join(names::LEASE)
    }

    /// Writes its lease, by a clock that is far behind.
    fn say(&self, heartbeat: u64, taken: u64) {
        let lease = Lease {
            writer: self.id,
            epoch: 1,
            process: 1,
            heartbeat,
            wanted_bytes: 0,
            capacity: CAPACITY,
            durability: None,
            account: Account { taken, ..Account::default() },
            lock_domain: self.domain,
        };
        fs::write(self.lease(), lease.to_bytes()).unwrap();
        let long_ago = SystemTime::now() - Duration::from_secs(1000);
        fs::File::open(self.lease()).unwrap().set_modified(long_ago).unwrap();
    }
}

fn open(options: &StoreOptions, silence: Duration) -> Files {
    let layout = Files::open_timed(options, Timing { silence, ..HASTY }).unwrap();
    open_namespace(&layout, "model", NamespaceOptions::default());
    layout
}

fn here(bench: &Bench) -> LockDomain {
    writer::lock_domain(&bench.options.root)
}

thread_local! {
    /// The time of a layout that the thread looks after.
    static NOW: Cell<Instant> = Cell::new(Instant::now());
}

#[test]
fn a_writer_whose_lease_changes_lives_whatever_the_clocks_say() {
    let bench = bench();
    let ghost = Ghost::new(&bench.options.root, ELSEWHERE);
    ghost.say(1, 0);
    let silence = Duration::from_secs(2);
    let timing = Timing { silence, clock: || NOW.get(), ..HASTY };
    let layout = Files::open_timed(&bench.options, timing).unwrap();
    let pass = |time| {
        NOW.set(NOW.get() + time);
        layout.maintain().unwrap();
    };
    for beat in 2..10 {
        ghost.say(beat, 0);
        pass(silence * 3 / 4);
        assert!(ghost.lease().exists(), "after beat {beat}");
        assert!(layout.writers().unwrap().iter().all(|writer| writer.is_alive));
    }
    pass(silence - Duration::from_millis(1));
    assert!(ghost.lease().exists());
    pass(Duration::from_millis(1));
    eventually(&layout, "the end of a writer", || !ghost.directory.exists());
}

#[test]
fn a_writer_of_this_host_whose_lease_is_not_locked_is_dead_at_once() {
    let bench = bench();
    let ghost = Ghost::new(&bench.options.root, here(&bench));
    ghost.say(u64::MAX, 0);
    drop(open(&bench.options, Duration::from_secs(600)));
    assert!(!ghost.directory.exists());
}

#[test]
fn a_writer_whose_lease_is_locked_lives_however_silent() {
    let bench = bench();
    for domain in [here(&bench), ELSEWHERE] {
        let ghost = Ghost::new(&bench.options.root, domain);
        ghost.say(1, 0);
        let lease = RealDisk.open(&ghost.lease(), FileAccess::ReadWrite).unwrap();
        assert!(lease.try_lock().unwrap());
        let layout = open(&bench.options, Duration::ZERO);
        layout.maintain().unwrap();
        assert!(ghost.directory.exists());
        drop(lease);
        eventually(&layout, "the end of a writer", || !ghost.directory.exists());
    }
}

#[test]
fn what_a_dead_writer_announced_is_taken_back_before_its_directory_is_removed() {
    let bench = bench();
    let ghost = Ghost::new(&bench.options.root, here(&bench));
    ghost.say(1, 20 << 20);
    let lease = RealDisk.open(&ghost.lease(), FileAccess::ReadWrite).unwrap();
    writer::take_back(&*lease);
    let lease = Lease::parse(&fs::read(ghost.lease()).unwrap()).unwrap();
    assert_eq!((lease.writer, lease.account), (ghost.id, Account::default()));
}

fn directories(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(names::WRITER_PREFIX))
        .collect()
}

#[test]
fn a_writer_whose_directory_is_gone_goes_on_in_another() {
    let bench = bench();
    let shards = [bytes("a", 5000)];
    let layout = bench.layout();
    // It finds out as it stores, and as it looks after the store.
    for by_storing in [true, false] {
        let Reservation::Claimed(claim) = layout.reserve(block(bench.namespace, "lost", &shards)).unwrap()
        else {
            panic!("there is room")
        };
        let before = directories(&bench.options.root);
        assert_eq!(before.len(), 1);
        fs::remove_dir_all(&before[0]).unwrap();
        if !by_storing {
            layout.maintain().unwrap();
        }
        let key = by_storing.to_string();
        assert_eq!(bench.store(&key, &shards), Stored::Committed);
        drop(claim);
        layout.maintain().unwrap();
        let after = directories(&bench.options.root);
        assert!(after.len() == 1 && after != before && after[0].join(names::LEASE).exists(), "{after:?}");
        let notices = layout.observed().take_notices();
        assert!(matches!(&*notices, [one] if one.kind == EventKind::WriterRestarted), "{notices:?}");
        assert_eq!(load(layout, bench.namespace, &key), Loaded::Shards(shards.to_vec()));
        // Others see that it lives.
        drop(hasty(&bench.options));
        assert!(after[0].exists());
    }
}

/// Stores blocks of a mebibyte.
fn fill(layout: &dyn Layout, bench: &Bench, count: usize) {
    for number in 0..count {
        let key = number.to_string();
        let shards = [bytes(&key, LEN)];
        assert_eq!(store(layout, &block(bench.namespace, &key, &shards), &shards), Stored::Committed);
    }
}

#[test]
fn what_a_dead_writer_announced_evicts_nothing() {
    const BLOCKS: usize = 24;
    let bench = bench();
    fill(bench.layout(), &bench, BLOCKS);
    bench.layout().close().unwrap();
    // One that was killed, one of another host, and one whose host has started anew.
    for domain in [here(&bench), ELSEWHERE, LockDomain::default()] {
        let ghost = Ghost::new(&bench.options.root, domain);
        ghost.say(1, (BLOCKS * LEN) as u64);
        let layout = Files::open(&bench.options).unwrap();
        open_namespace(&layout, "model", NamespaceOptions::default());
        let shards = [bytes("new", 2 * LEN)];
        let new = block(bench.namespace, &format!("{domain:?}"), &shards);
        assert_eq!(store(&layout, &new, &shards), Stored::Committed);
        layout.maintain().unwrap();
        let usage = layout.usage();
        assert_eq!(usage.evicted_blocks, 0, "{domain:?}");
        assert!(usage.root_bytes < CAPACITY, "{usage:?}");
        for number in 0..BLOCKS {
            assert!(crate::layout::conformance::contains(&layout, bench.namespace, &number.to_string()));
        }
        assert_eq!(layout.delete(bench.namespace, &[(new.key.as_bytes(), new.fingerprint)]).unwrap(), 1);
        layout.close().unwrap();
        let _ = fs::remove_dir_all(&ghost.directory);
    }
}

#[test]
fn what_a_writer_of_another_host_announces_counts_while_its_lease_changes() {
    let bench = bench();
    let ghost = Ghost::new(&bench.options.root, ELSEWHERE);
    ghost.say(1, 0);
    let layout = open(&bench.options, Duration::from_secs(600));
    ghost.say(2, 20 << 20);
    layout.maintain().unwrap();
    layout.maintain().unwrap();
    assert_eq!(layout.shared.peers.bytes(), 20 << 20);
}

#[test]
fn a_closed_writer_counts_no_more_although_it_is_still_referenced() {
    let bench = bench();
    let closed = Files::open(&bench.options).unwrap();
    open_namespace(&closed, "model", NamespaceOptions::default());
    let large = [vec![0; 20 << 20]];
    let claim = closed.reserve(block(bench.namespace, "large", &large)).unwrap();
    assert!(matches!(claim, Reservation::Claimed(_)));
    closed.close().unwrap();

    let options = StoreOptions { capacity_bytes: Some(8 << 20), ..bench.options.clone() };
    let smaller = Files::open(&options).unwrap();
    open_namespace(&smaller, "model", NamespaceOptions::default());
    assert!(smaller.usage().root_bytes < 4 << 20, "{:?}", smaller.usage());
    fill(&smaller, &bench, 4);
    assert_eq!(smaller.usage().evicted_blocks, 0);
    assert_eq!(smaller.clear(bench.namespace).unwrap(), 4);
    assert_eq!(directories(&bench.options.root).len(), 2, "the bench's and the smaller one's");
    drop((claim, closed));
    assert_eq!(directories(&bench.options.root).len(), 2);
}

#[test]
fn a_reader_makes_no_lease_for_a_writer_that_has_none() {
    let bench = bench();
    let ghost = Ghost::new(&bench.options.root, ELSEWHERE);
    let options = StoreOptions { access: StoreAccess::Read, ..bench.options.clone() };
    let reader = Files::open_timed(&options, Timing { silence: Duration::ZERO, ..HASTY }).unwrap();
    for _ in 0..3 {
        reader.maintain().unwrap();
        assert!(!ghost.lease().exists());
        thread::sleep(HASTY.follow);
    }
    let writer = open(&bench.options, Duration::ZERO);
    eventually(&writer, "the end of a writer without a lease", || !ghost.directory.exists());
}

#[test]
fn writers_say_their_options_and_upkeep_says_none() {
    let bench = bench();
    let said = |for_upkeep| {
        let root = tempfile::tempdir().unwrap();
        let mut options = StoreOptions { root: root.path().to_owned(), for_upkeep, ..bench.options.clone() };
        options.durability = Durability::Sync;
        let writers = Files::open(&options).unwrap().writers().unwrap();
        writers.iter().map(|writer| (writer.capacity_bytes, writer.durability)).collect::<Vec<_>>()
    };
    assert_eq!(said(false), [(Some(CAPACITY), Some(Durability::Sync))]);
    assert_eq!(said(true), [(None, None)]);
}
