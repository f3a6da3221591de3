//! Faults of the disk, damage, and what processes do to one another, one at a time, on a simulated disk.

use super::*;
use crate::{
    DropReason, Durability,
    disk::simulated::{Dice, Effect, Fault, Operation, SimulatedDisk},
    format::checksum,
    layout::Shard,
};
use rustix::io::Errno;
use std::{
    path::PathBuf,
    sync::atomic::{AtomicU32, AtomicU64},
};

const LEN: usize = 8192;
const NAMESPACE: NamespaceId = NamespaceId([1; 16]);

/// A disk with a store, and a clock.
struct Bench {
    disk: SimulatedDisk,
    options: StoreOptions,
    now: Arc<AtomicU32>,
    ids: Arc<AtomicU64>,
}

impl Bench {
    fn new() -> Self {
        let mut options = StoreOptions::new("/store");
        options.capacity_bytes = Some(1 << 20);
        options.min_free_bytes = 0;
        options.durability = Durability::Sync;
        options.segment_bytes = Some(128 << 10);
        Self {
            disk: SimulatedDisk::new(7, 64 << 20),
            options,
            now: Arc::new(AtomicU32::new(1000)),
            ids: Arc::new(AtomicU64::new(1)),
        }
    }

    fn try_open(&self) -> Result<Segments> {
        let (now, ids) = (Arc::clone(&self.now), Arc::clone(&self.ids));
        let surroundings = Surroundings {
            clock: Box::new(move || now.load(Ordering::Relaxed)),
            new_id: Box::new(move || Uuid::from_u128(ids.fetch_add(1, Ordering::Relaxed).into())),
        };
        let store = Segments::open_on(Arc::new(self.disk.clone()), &self.options, surroundings)?;
        store.open_namespace(NAMESPACE, "{}", NamespaceOptions::default())?;
        Ok(store)
    }

    fn open(&self) -> Segments {
        self.try_open().unwrap()
    }

    fn reserve(&self, store: &Segments, key: &str) -> Result<Reservation> {
        self.reserve_len(store, key, LEN)
    }

    fn reserve_len(&self, store: &Segments, key: &str, len: usize) -> Result<Reservation> {
        store.reserve(NewBlock {
            namespace: NAMESPACE,
            key: Key::new(key.as_bytes()).unwrap(),
            fingerprint: fingerprint(key),
            shards: 1,
            shard_len: len as u64,
            expires: None,
        })
    }

    fn write(&self, store: &Segments, claim: Claim, bytes: &[u8]) -> Written {
        let shard = Shard { len: bytes.len() as u64, checksum: Some(checksum(bytes)) };
        let table = ShardTable(vec![shard]);
        let path = claim.place.file.path();
        self.disk.write(path, claim.place.payload, bytes).unwrap();
        let header = store.header(&claim, &table);
        self.disk.write(path, claim.place.header.unwrap(), &header).unwrap();
        Written { claim, table }
    }

    fn put_len(&self, store: &Segments, key: &str, len: usize) -> Result<Put> {
        let claim = match self.reserve_len(store, key, len)? {
            Reservation::Claimed(claim) => claim,
            Reservation::Dropped(reason) => return Ok(Put::Dropped(reason)),
            other => panic!("{other:?}"),
        };
        let written = self.write(store, claim, &content(key, len));
        store.commit(vec![written]).pop().unwrap()?;
        Ok(Put::Done)
    }

    fn put(&self, store: &Segments, key: &str) -> Result<Put> {
        self.put_len(store, key, LEN)
    }

    fn put_all(&self, store: &Segments, keys: &[&str]) {
        for key in keys {
            assert_eq!(self.put(store, key).unwrap(), Put::Done, "{key}");
        }
    }

    fn find(&self, store: &Segments, key: &str) -> Option<Found> {
        match store.find(NAMESPACE, &Key::new(key.as_bytes()).unwrap(), fingerprint(key)) {
            Lookup::Found(found) => Some(found),
            _ => None,
        }
    }

    fn verdict(&self, store: &Segments, key: &str, found: &Found) -> Verdict {
        let header = self.disk.read(found.place.file.path(), found.place.header.unwrap(), HEADER_LEN);
        store.check(found, &Key::new(key.as_bytes()).unwrap(), &header.unwrap())
    }

    /// Whether a block is found and good. Never are other bytes delivered.
    fn has(&self, store: &Segments, key: &str) -> bool {
        let Some(found) = self.find(store, key) else { return false };
        let Verdict::Good(table) = self.verdict(store, key, &found) else { return false };
        let shard = table.0[0];
        let bytes = self.disk.read(found.place.file.path(), found.place.payload, shard.len as usize);
        let bytes = bytes.unwrap();
        if shard.checksum != Some(checksum(&bytes)) {
            return false;
        }
        assert_eq!(bytes, content(key, bytes.len()));
        true
    }

    fn found(&self, store: &Segments, keys: &[&str]) -> Vec<bool> {
        keys.iter().map(|key| self.has(store, key)).collect()
    }

    /// Fails operations on files whose names contain `name`.
    fn fail(&self, operation: Operation, name: &'static str, times: u32, errno: Errno) {
        let effect = Effect::Fail(errno.raw_os_error());
        self.disk.script(Fault { operation, name, skip: 0, times, effect });
    }

    /// The only file whose name contains this.
    fn file(&self, name: &str) -> PathBuf {
        let mut files = self.files(name);
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }

    fn files(&self, name: &str) -> Vec<PathBuf> {
        let mut paths = self.disk.paths();
        paths.retain(|path| path.to_string_lossy().contains(name));
        paths
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Put {
    Done,
    Dropped(DropReason),
}

fn fingerprint(key: &str) -> Fingerprint {
    Fingerprint::of(NAMESPACE, key.as_bytes())
}

fn content(key: &str, len: usize) -> Vec<u8> {
    let mut dice = Dice(u64::from(checksum(key.as_bytes())));
    (0..len).map(|_| dice.next() as u8).collect()
}

fn errno(error: &Error) -> Option<i32> {
    match error {
        Error::Io { source, .. } => source.raw_os_error(),
        _ => None,
    }
}

#[test]
fn a_full_disk_under_the_log_costs_nothing_but_the_blocks_that_met_it() {
    let bench = Bench::new();
    bench.put_all(&bench.open(), &["a"]);
    // A new log, which has no room for records yet.
    let store = bench.open();
    let Reservation::Claimed(claim) = bench.reserve(&store, "b").unwrap() else { panic!() };
    let written = bench.write(&store, claim, &content("b", LEN));
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
    let written = bench.write(&store, claim, &content("b", LEN));
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
    // The disk may have the record of `b`, or not; whoever stored it was told that it is not there.
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
    let free = || {
        let slots = lock(&store.writer.as_ref().unwrap().slots);
        slots.classes().map(|class| slots.free(class)).sum::<u64>()
    };
    let before = free();
    bench.fail(Operation::Sync, "idx-", 1, Errno::IO);
    assert!(bench.put(&store, "b").is_err());
    assert_eq!(free(), before - 1, "its record may be on the disk");
    store.maintain().unwrap();
    assert_eq!(free(), before);
    bench.put_all(&store, &["b"]);
}

#[test]
fn a_checkpoint_that_fails_is_tried_again_before_the_next_log_is_long() {
    let bench = Bench::new();
    let store = bench.open();
    let writer = store.writer.as_ref().unwrap();
    let mut number = 0;
    while writer.log.len() <= writer.limits.least_log() {
        bench.put(&store, &format!("key {number}")).unwrap();
        number += 1;
    }
    bench.fail(Operation::Rename, "CKPT", 1, Errno::IO);
    assert!(writer.checkpoint_if_long().is_err());
    assert!(bench.files("CKPT").is_empty());
    writer.checkpoint_if_long().unwrap();
    assert_eq!(bench.files("CKPT").len(), 1);
}

#[test]
fn checkpoints_that_fail_again_and_again_leave_few_files() {
    let bench = Bench::new();
    let store = bench.open();
    let writer = store.writer.as_ref().unwrap();
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
fn a_head_that_promises_more_than_there_can_be_is_not_believed() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let writer = store.writer.as_ref().unwrap().id;
    drop(store);
    let segment = bench.file("seg-");
    let head = format::segment::SegmentHead { writer, number: 1, slot_bytes: 8192, slots: u32::MAX };
    bench.disk.write(&segment, 0, &head.to_bytes()).unwrap();
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a"]), [false]);
    assert_eq!(store.usage().lost_on_recovery, 1);
    bench.put_all(&store, &["a"]);
    assert!(bench.disk.most_used() <= 1 << 20);
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
            Reservation::Claimed(claim) => bench.write(&store, claim, &content(key, LEN)),
            other => panic!("{other:?}"),
        });
        let [first, second] = both;
        bench.fail(Operation::Sync, "seg-", 1, Errno::IO);
        assert!(store.commit(vec![first]).pop().unwrap().is_err());
        // Its data may have gone with the failed sync, although its own succeeds.
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
fn a_flipped_record_loses_its_block_and_no_other() {
    let bench = Bench::new();
    let store = bench.open();
    let keys = ["a", "b", "c", "d"];
    bench.put_all(&store, &keys);
    drop(store);
    // The head, the namespace and `a` come first.
    bench.disk.flip(&bench.file("idx-"), (3 * 64 + 20) * 8);
    let store = bench.open();
    assert_eq!(bench.found(&store, &keys), [true, false, true, true]);
    assert_eq!(store.usage().lost_on_recovery, 1);
    drop(store);
    // It is counted once.
    let store = bench.open();
    assert_eq!(store.usage().lost_on_recovery, 0);
    assert_eq!(bench.found(&store, &keys), [true, false, true, true]);
    bench.put_all(&store, &["b"]);
}

#[test]
fn a_torn_record_at_the_end_of_a_log_is_no_damage() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a", "b"]);
    drop(store);
    let log = bench.file("idx-");
    bench.disk.truncate(&log, 4 * 64 - 30);
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a", "b"]), [true, false]);
    assert_eq!(store.usage().lost_on_recovery, 0);
    bench.put_all(&store, &["c"]);
    drop(store);
    assert_eq!(bench.found(&bench.open(), &["a", "b", "c"]), [true, false, true]);
}

#[test]
fn a_damaged_checkpoint_is_made_good_by_the_one_before_it() {
    let bench = Bench::new();
    let store = bench.open();
    let checkpoint = || store.writer.as_ref().unwrap().checkpoint().unwrap();
    bench.put_all(&store, &["a"]);
    checkpoint();
    bench.put_all(&store, &["b"]);
    checkpoint();
    bench.put_all(&store, &["c"]);
    drop(store);
    // The second one is of an even generation.
    bench.disk.flip(&bench.file("CKPT-a"), 8 * 30);
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a", "b", "c"]), [true; 3]);
    assert!(store.usage().lost_on_recovery > 0, "the damage is told");
    drop(store);
    let newest = bench.file("CKPT-a");
    bench.disk.flip(&newest, (4096 + 64 + 20) * 8);
    let store = bench.open();
    assert_eq!(store.usage().lost_on_recovery, 1, "a record of a checkpoint");
    assert_eq!(bench.found(&store, &["a", "b", "c"]).iter().filter(|is_there| **is_there).count(), 2);
}

#[test]
fn blocks_without_checksums_do_not_outlive_damage_to_the_log() {
    let mut bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a", "b"]);
    let Reservation::Claimed(claim) = bench.reserve(&store, "c").unwrap() else { panic!() };
    let mut written = bench.write(&store, claim, &content("c", LEN));
    written.table.0[0].checksum = None;
    let header = store.header(&written.claim, &written.table);
    let place = &written.claim.place;
    bench.disk.write(place.file.path(), place.header.unwrap(), &header).unwrap();
    store.commit(vec![written]).pop().unwrap().unwrap();
    bench.put_all(&store, &["d"]);
    drop(store);
    let log = bench.file("idx-");
    bench.options.access = StoreAccess::Read;
    assert!(bench.find(&bench.open(), "c").is_some());
    bench.options.access = StoreAccess::ReadWrite;
    // Whether `c` is still what is in its place was perhaps said by this record.
    bench.disk.flip(&log, (3 * 64 + 20) * 8);
    let store = bench.open();
    assert!(bench.find(&store, "c").is_none());
    assert_eq!(bench.found(&store, &["a", "b", "d"]), [true, false, true]);
}

#[test]
fn a_damaged_superblock_is_no_store() {
    let bench = Bench::new();
    drop(bench.open());
    bench.disk.flip(&bench.file("STORE"), 200);
    let refused = bench.try_open().unwrap_err();
    assert!(matches!(&refused, Error::NotAStore { .. }), "{refused}");
    bench.disk.flip(&bench.file("STORE"), 200);
    bench.disk.flip(&bench.file("STORE"), 64 + 3);
    let refused = bench.try_open().unwrap_err();
    assert!(matches!(&refused, Error::UnknownFormat { found: 9, known: 1, .. }), "{refused}");
}

#[test]
fn a_damaged_header_is_told_from_one_that_moved() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a", "b"]);
    let found = bench.find(&store, "a").unwrap();
    bench.disk.flip(found.place.file.path(), (found.place.header.unwrap() + 100) * 8);
    assert!(matches!(bench.verdict(&store, "a", &found), Verdict::Corrupt(_)));
    store.condemn(&found);
    drop(found);
    assert!(bench.find(&store, "a").is_none());
    assert_eq!(store.usage().corrupt_blocks, 1);
    // Its place is used again, and it stays gone.
    store.maintain().unwrap();
    bench.put_all(&store, &["a"]);
    drop(store);
    assert_eq!(bench.found(&bench.open(), &["a", "b"]), [true, true]);
}

#[test]
fn a_truncated_segment_loses_what_was_cut_off() {
    let bench = Bench::new();
    let store = bench.open();
    let keys = ["a", "b", "c"];
    bench.put_all(&store, &keys);
    let place = bench.find(&store, "b").unwrap().place;
    drop(store);
    bench.disk.truncate(place.file.path(), usize::try_from(place.header.unwrap()).unwrap() + 4096);
    let store = bench.open();
    assert_eq!(bench.found(&store, &keys).iter().filter(|is_there| **is_there).count(), 1);
    assert_eq!(store.usage().lost_on_recovery, 2);
    bench.put_all(&store, &["b"]);
}

#[test]
fn a_segment_that_somebody_removed_is_a_miss() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    drop(store);
    bench.disk.remove(&bench.file("seg-")).unwrap();
    let store = bench.open();
    assert_eq!(bench.found(&store, &["a"]), [false]);
    bench.put_all(&store, &["a"]);
}

#[test]
fn clocks_that_jump_end_blocks_early_or_late_and_nothing_else() {
    let bench = Bench::new();
    let store = bench.open();
    let ttl = NamespaceOptions { ttl: Some(Duration::from_secs(60)), quota_bytes: None };
    bench.put_all(&store, &["stays"]);
    store.open_namespace(NAMESPACE, "{}", ttl).unwrap();
    bench.put_all(&store, &["ends"]);
    for (now, is_there) in [(1059, true), (5, true), (1060, false), (u32::MAX, false)] {
        bench.now.store(now, Ordering::Relaxed);
        assert_eq!(bench.found(&store, &["stays", "ends"]), [true, is_there], "at {now}");
    }
    store.maintain().unwrap();
    assert_eq!(store.usage().expired_blocks, 1);
    bench.now.store(1, Ordering::Relaxed);
    assert_eq!(bench.found(&store, &["stays", "ends"]), [true, false]);
    bench.put_all(&store, &["ends"]);
}

#[test]
fn a_directory_has_one_writer_and_is_taken_over_from_a_dead_one() {
    let bench = Bench::new();
    let first = bench.open();
    bench.put_all(&first, &["a"]);
    let second = bench.open();
    assert_eq!(bench.files("LEASE").len(), 2);
    assert_eq!(bench.found(&second, &["a"]), [true], "others' blocks are found at once");
    bench.put_all(&second, &["b"]);
    first.maintain().unwrap();
    assert_eq!(bench.found(&first, &["a", "b"]), [true, true]);
    drop((first, second));
    let third = bench.open();
    assert_eq!(bench.files("LEASE").len(), 2);
    assert_eq!(bench.found(&third, &["a", "b"]), [true, true]);
}

#[test]
fn a_directory_that_cannot_be_read_keeps_nobody_from_writing() {
    let bench = Bench::new();
    let (first, second) = (bench.open(), bench.open());
    bench.put_all(&first, &["a"]);
    bench.put_all(&second, &["b"]);
    drop((first, second));
    bench.fail(Operation::Open, "idx-", 1, Errno::IO);
    let store = bench.open();
    assert_eq!(bench.files("LEASE").len(), 2);
    assert_eq!(store.usage().lost_on_recovery, 1);
    assert_eq!(bench.found(&store, &["a", "b"]), [true, true]);
    bench.put_all(&store, &["c"]);
}

#[test]
fn what_was_read_of_a_dead_writer_is_on_the_disk_before_its_room_is_used() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    drop(store);
    assert!(bench.files("CKPT").is_empty());
    let store = bench.open();
    assert_eq!(bench.files("CKPT").len(), 1);
    assert_eq!(bench.files("idx-").len(), 1);
    bench.put_all(&store, &["b"]);
    store.close().unwrap();
    drop(store);
    let before = bench.files("CKPT");
    let store = bench.open();
    assert_eq!(bench.files("CKPT"), before, "it was closed");
    assert_eq!(bench.found(&store, &["a", "b"]), [true, true]);
}

#[test]
fn what_others_remove_is_not_found_any_more() {
    let bench = Bench::new();
    let (writer, reader) = (bench.open(), bench.open());
    bench.put_all(&writer, &["a", "b"]);
    reader.maintain().unwrap();
    let found = bench.find(&reader, "a").unwrap();
    let blocks = [("a", fingerprint("a"))].map(|(key, print)| (key.as_bytes(), print));
    assert_eq!(reader.delete(NAMESPACE, &blocks).unwrap(), 0, "it is not its own");
    assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
    // The reader knows nothing of it yet, and the place has another block by now.
    bench.put_all(&writer, &["c"]);
    assert_eq!(bench.verdict(&reader, "a", &found), Verdict::Moved);
    assert!(!bench.has(&reader, "a"));
    reader.maintain().unwrap();
    assert!(bench.find(&reader, "a").is_none());
    assert_eq!(bench.found(&reader, &["b", "c"]), [true, true]);
    // Through a change of logs, twice.
    for key in ["d", "e"] {
        writer.writer.as_ref().unwrap().checkpoint().unwrap();
        bench.put_all(&writer, &[key]);
    }
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["b", "c", "d", "e"]), [true; 4]);
}

#[test]
fn who_lags_over_several_logs_reads_the_directory_anew() {
    let bench = Bench::new();
    let (writer, reader) = (bench.open(), bench.open());
    bench.put_all(&writer, &["a", "b"]);
    reader.maintain().unwrap();
    let blocks = [(b"a".as_slice(), fingerprint("a"))];
    assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
    // The log that the reader is at goes, and the one that followed it.
    for key in ["c", "d", "e"] {
        writer.writer.as_ref().unwrap().checkpoint().unwrap();
        bench.put_all(&writer, &[key]);
    }
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a", "b", "c", "d", "e"]), [false, true, true, true, true]);
}

#[test]
fn a_log_that_could_not_be_made_leaves_no_gap_for_those_who_follow() {
    // The file may be missing, or there without a head.
    for operation in [Operation::Create, Operation::Write] {
        let bench = Bench::new();
        let (writer, reader) = (bench.open(), bench.open());
        bench.put_all(&writer, &["a"]);
        reader.maintain().unwrap();
        let checkpoint = || writer.writer.as_ref().unwrap().checkpoint();
        bench.fail(operation, "idx-", 1, Errno::IO);
        assert!(checkpoint().is_err());
        checkpoint().unwrap();
        // The log before it is there still.
        let blocks = [(b"a".as_slice(), fingerprint("a"))];
        assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
        bench.put_all(&writer, &["b"]);
        reader.maintain().unwrap();
        assert_eq!(bench.found(&reader, &["a", "b"]), [false, true], "{operation:?}");
    }
}

#[test]
fn a_log_that_goes_while_a_directory_is_read_hides_nothing() {
    let bench = Bench::new();
    let writer = bench.open();
    bench.put_all(&writer, &["a"]);
    writer.writer.as_ref().unwrap().checkpoint().unwrap();
    let blocks = [(b"a".as_slice(), fingerprint("a"))];
    assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
    bench.put_all(&writer, &["b"]);
    // The second one has the tombstone.
    bench.fail(Operation::Open, "idx-000002", 1, Errno::NOENT);
    let mut options = bench.options.clone();
    options.access = StoreAccess::Read;
    let reader = Bench { options, disk: bench.disk.clone(), ..Bench::new() }.open();
    assert!(bench.find(&reader, "a").is_none());
    assert!(bench.has(&reader, "b"));
}

#[test]
fn a_block_that_cannot_be_followed_is_in_no_others_way() {
    let bench = Bench::new();
    let (writer, reader) = (bench.open(), bench.open());
    bench.put_all(&writer, &["a", "b"]);
    reader.maintain().unwrap();
    // Another segment, which cannot be opened at first.
    assert_eq!(bench.put_len(&writer, "large", 3 * LEN).unwrap(), Put::Done);
    let blocks = [(b"a".as_slice(), fingerprint("a"))];
    assert_eq!(writer.delete(NAMESPACE, &blocks).unwrap(), 1);
    bench.fail(Operation::Open, "seg-", 1, Errno::MFILE);
    assert!(reader.maintain().is_err());
    assert!(bench.find(&reader, "a").is_none());
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a", "b", "large"]), [false, true, true]);
}

#[test]
fn those_who_follow_are_told_of_records_that_never_counted() {
    let bench = Bench::new();
    let (writer, reader) = (bench.open(), bench.open());
    bench.put_all(&writer, &["a"]);
    bench.fail(Operation::Sync, "idx-", 1, Errno::IO);
    assert!(bench.put(&writer, "b").is_err());
    reader.maintain().unwrap();
    writer.maintain().unwrap();
    bench.put_all(&writer, &["c"]);
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a", "c"]), [true, true]);
    assert!(bench.find(&reader, "b").is_none());
}

#[test]
fn readers_write_nothing() {
    let mut bench = Bench::new();
    let writer = bench.open();
    bench.put_all(&writer, &["a"]);
    bench.options.access = StoreAccess::Read;
    let before = bench.disk.operations();
    let reader = bench.open();
    reader.maintain().unwrap();
    assert_eq!(bench.found(&reader, &["a"]), [true]);
    assert!(matches!(bench.reserve(&reader, "b"), Err(Error::ReadOnly { .. })));
    assert!(matches!(reader.clear(NAMESPACE), Err(Error::ReadOnly { .. })));
    reader.close().unwrap();
    assert_eq!(bench.disk.operations(), before);
    let nowhere = Bench { options: bench.options.clone(), ..Bench::new() };
    assert!(matches!(nowhere.try_open(), Err(Error::NotAStore { .. })));
}

#[test]
fn blocks_are_evicted_where_there_is_no_more_room() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..300 {
        assert_eq!(bench.put(&store, &format!("key {number}")).unwrap(), Put::Done);
    }
    assert!(bench.disk.most_used() <= 1 << 20, "{}", bench.disk.most_used());
    let usage = store.usage();
    assert!(usage.evicted_blocks > 0 && usage.blocks > 30, "{usage:?}");
    assert_eq!(usage.blocks + usage.evicted_blocks, 300);
}

#[test]
fn a_disk_that_is_fuller_than_it_should_be_evicts_as_well() {
    let bench = Bench::new();
    bench.disk.set_capacity(400 << 10);
    let store = bench.open();
    for number in 0..100 {
        assert_eq!(bench.put(&store, &format!("key {number}")).unwrap(), Put::Done);
    }
    // Somebody else fills it up.
    bench.disk.set_capacity(100 << 10);
    for number in 100..200 {
        let put = bench.put(&store, &format!("key {number}"));
        assert!(matches!(put, Ok(Put::Done | Put::Dropped(DropReason::NoRoom))), "{put:?}");
    }
}

#[test]
fn slots_of_one_size_give_way_to_another() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..100 {
        bench.put_len(&store, &format!("small {number}"), 4096).unwrap();
    }
    for number in 0..40 {
        let key = format!("large {number}");
        assert_eq!(bench.put_len(&store, &key, 100 << 10).unwrap(), Put::Done, "{key}");
    }
    let large = (0..40).filter(|number| bench.has(&store, &format!("large {number}"))).count();
    assert!(large >= 4, "{large} large blocks");
    assert_eq!(bench.put_len(&store, "huge", 1 << 20).unwrap(), Put::Dropped(DropReason::TooLarge));
    assert!(bench.disk.most_used() <= 1 << 20);
}

#[test]
fn a_writer_that_has_nothing_gets_its_share() {
    let bench = Bench::new();
    let rich = bench.open();
    for number in 0..200 {
        bench.put(&rich, &format!("rich {number}")).unwrap();
    }
    let poor = bench.open();
    let mut done = 0;
    for number in 0..100 {
        bench.now.fetch_add(1, Ordering::Relaxed);
        done += usize::from(bench.put(&poor, &format!("poor {number}")).unwrap() == Put::Done);
        poor.maintain().unwrap();
        rich.maintain().unwrap();
    }
    assert!(done > 50, "{done}");
    assert!(bench.disk.most_used() <= 1 << 20, "{}", bench.disk.most_used());
    assert!(rich.usage().blocks > 20 && poor.usage().blocks > 20);
}

#[test]
fn the_room_of_dead_writers_is_used() {
    let bench = Bench::new();
    let (first, second, third) = (bench.open(), bench.open(), bench.open());
    for number in 0..40 {
        bench.put(&first, &format!("first {number}")).unwrap();
        bench.put(&second, &format!("second {number}")).unwrap();
    }
    drop((first, second));
    for number in 0..60 {
        assert_eq!(bench.put(&third, &format!("third {number}")).unwrap(), Put::Done);
        third.maintain().unwrap();
    }
    let there = (0..60).filter(|number| bench.has(&third, &format!("third {number}"))).count();
    assert!(there > 40, "{there}");
    assert!(bench.files("LEASE").len() < 3);
    assert!(bench.disk.most_used() <= 1 << 20);
}

#[test]
fn the_dead_neither_want_nor_share() {
    let bench = Bench::new();
    let rich = bench.open();
    for number in 0..200 {
        bench.put(&rich, &format!("rich {number}")).unwrap();
    }
    let poor = bench.open();
    for number in 0..20 {
        bench.now.fetch_add(1, Ordering::Relaxed);
        bench.put(&poor, &format!("poor {number}")).unwrap();
        poor.maintain().unwrap();
    }
    drop(poor);
    let writer = rich.writer.as_ref().unwrap();
    let others = writer.others(&rich.shared.root.lock().unwrap()).unwrap();
    assert_eq!((others.writers, others.wanted), (1, 0));
    let before = rich.usage().blocks;
    for _ in 0..20 {
        rich.maintain().unwrap();
    }
    let gone = before - rich.usage().blocks;
    assert!(gone * 4 < before, "{gone} of {before} went for somebody who is not there");
}

#[test]
fn many_sizes_find_room_in_a_store_that_several_share() {
    let mut bench = Bench::new();
    bench.options.capacity_bytes = Some(24 << 20);
    bench.options.segment_bytes = None;
    let stores = [(); 4].map(|()| bench.open());
    let mut dice = Dice(5);
    let (mut done, mut refused) = (0, 0);
    for number in 0..3000 {
        let store = &stores[number % 4];
        // More classes than there could be segments.
        let len = 4096 << dice.below(6);
        match bench.put_len(store, &format!("key {number}"), len + dice.below(len as u64) as usize).unwrap() {
            Put::Done => done += 1,
            Put::Dropped(why) => {
                assert_eq!(why, DropReason::NoRoom);
                refused += 1;
            }
        }
        if dice.one_in(10) {
            bench.now.fetch_add(1, Ordering::Relaxed);
            store.maintain().unwrap();
        }
    }
    assert!(refused * 50 < done, "{refused} refused, {done} done");
    assert!(bench.disk.most_used() <= 24 << 20, "{}", bench.disk.most_used());
    let found = (0..3000).filter(|number| bench.has(&stores[number % 4], &format!("key {number}"))).count();
    assert!(found > 100, "{found}");
}

#[test]
fn a_directory_that_nobody_can_use_keeps_nobody_from_writing() {
    let bench = Bench::new();
    let (first, second) = (bench.open(), bench.open());
    for number in 0..40 {
        bench.put(&second, &format!("second {number}")).unwrap();
    }
    let lease = bench.files("LEASE")[1].clone();
    drop(second);
    let name: &'static str = Box::leak(lease.to_string_lossy().into_owned().into_boxed_str());
    bench.fail(Operation::Open, name, u32::MAX, Errno::ACCESS);
    for number in 0..100 {
        assert_eq!(bench.put(&first, &format!("first {number}")).unwrap(), Put::Done);
        first.maintain().unwrap();
    }
    bench.disk.end_faults();
    // What is in it cannot be removed either.
    bench.fail(Operation::Remove, name, u32::MAX, Errno::ISDIR);
    for number in 0..100 {
        assert_eq!(bench.put(&first, &format!("again {number}")).unwrap(), Put::Done);
        first.maintain().unwrap();
    }
}

#[test]
fn what_is_deleted_while_its_segment_goes_does_not_come_back() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["read", "gone"]);
    let found = bench.find(&store, "read").unwrap();
    let segment = found.token.downcast_ref::<FoundToken>().unwrap().entry.slot.segment;
    let writer = store.writer.as_ref().unwrap();
    lock(&writer.slots).drain(segment);
    writer.finish_draining().unwrap();
    assert_eq!(bench.files("seg-").len(), 1, "somebody reads it");
    let blocks = [(b"gone".as_slice(), fingerprint("gone"))];
    assert_eq!(store.delete(NAMESPACE, &blocks).unwrap(), 0);
    drop((found, store));
    bench.disk.crash();
    assert_eq!(bench.found(&bench.open(), &["gone"]), [false]);
}

#[test]
fn what_was_condemned_before_it_was_deleted_does_not_come_back() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    store.condemn(&bench.find(&store, "a").unwrap());
    let blocks = [(b"a".as_slice(), fingerprint("a"))];
    assert_eq!(store.delete(NAMESPACE, &blocks).unwrap(), 0);
    drop(store);
    bench.disk.crash();
    assert_eq!(bench.found(&bench.open(), &["a"]), [false]);
}

#[test]
fn lost_places_and_pinned_blocks_do_not_keep_segments_from_going() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let Reservation::Claimed(claim) = bench.reserve(&store, "lost").unwrap() else { panic!() };
    store.lose(claim);
    let segment_of = |key| {
        let found = bench.find(&store, key).unwrap();
        found.token.downcast_ref::<FoundToken>().unwrap().entry.slot.segment
    };
    let writer = store.writer.as_ref().unwrap();
    lock(&writer.slots).drain(segment_of("a"));
    writer.finish_draining().unwrap();
    assert!(bench.files("seg-").is_empty());
    bench.put_all(&store, &["pinned"]);
    store.pin(fingerprint("pinned"));
    lock(&writer.slots).drain(segment_of("pinned"));
    writer.finish_draining().unwrap();
    assert!(lock(&writer.slots).draining().is_empty(), "it is in use as before");
    bench.put_all(&store, &["b"]);
    assert_eq!(bench.found(&store, &["pinned", "b"]), [true, true]);
    assert_eq!(bench.files("seg-").len(), 1);
}

#[test]
fn a_smaller_capacity_is_kept_after_the_next_opening() {
    let mut bench = Bench::new();
    let store = bench.open();
    for number in 0..100 {
        bench.put(&store, &format!("key {number}")).unwrap();
    }
    drop(store);
    bench.options.capacity_bytes = Some(512 << 10);
    let store = bench.open();
    for _ in 0..20 {
        store.maintain().unwrap();
    }
    assert!(bench.disk.used() <= 512 << 10, "{}", bench.disk.used());
    bench.put_all(&store, &["new"]);
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
fn nothing_is_there_of_a_writer_whose_number_another_has() {
    let bench = Bench::new();
    let (first, reader) = (bench.open(), bench.open());
    bench.put_all(&first, &["a"]);
    reader.maintain().unwrap();
    let found = bench.find(&reader, "a").unwrap();
    let directory = first.writer.as_ref().unwrap().directory.clone();
    drop(first);
    for file in bench.disk.list(&directory).unwrap() {
        bench.disk.remove(&directory.join(file.name)).unwrap();
    }
    bench.disk.remove_directory(&directory).unwrap();
    // It does the same, and so its blocks have the same sequences.
    let second = bench.open();
    reader.follow().unwrap();
    bench.put_all(&second, &["a"]);
    reader.follow().unwrap();
    let entry = |found: &Found| found.token.downcast_ref::<FoundToken>().unwrap().entry;
    let again = bench.find(&reader, "a").unwrap();
    assert_eq!((entry(&found).owner, entry(&found).sequence), (entry(&again).owner, entry(&again).sequence));
    assert!(!Layout::is_still_there(&reader, &found));
    assert!(Layout::is_still_there(&reader, &again));
}

#[test]
fn who_condemns_a_block_does_not_wait_for_a_log_that_changes() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["a"]);
    let found = bench.find(&store, "a").unwrap();
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let alone = store.writer.as_ref().unwrap().publishing.write().unwrap();
        scope.spawn(|| {
            store.condemn(&found);
            done.send(()).unwrap();
        });
        let ended = wait.recv_timeout(Duration::from_secs(10));
        drop(alone);
        ended.unwrap();
    });
    assert!(bench.find(&store, "a").is_none());
}

#[test]
fn a_disk_that_refuses_segments_costs_few_of_those_that_are_there() {
    let bench = Bench::new();
    let store = bench.open();
    for number in 0..100 {
        bench.put(&store, &format!("small {number}")).unwrap();
    }
    let before = bench.files("seg-").len();
    bench.fail(Operation::Allocate, "seg-", u32::MAX, Errno::NOSPC);
    for number in 0..10 {
        let put = bench.put_len(&store, &format!("large {number}"), 8 * LEN).unwrap();
        assert_eq!(put, Put::Dropped(DropReason::NoRoom));
    }
    assert_eq!(bench.files("seg-").len(), before - 1);
    bench.disk.end_faults();
    store.maintain().unwrap();
    assert_eq!(bench.put_len(&store, "large", 8 * LEN).unwrap(), Put::Done);
}

#[test]
fn while_a_segment_that_was_given_up_is_read_no_other_is() {
    let bench = Bench::new();
    let store = bench.open();
    bench.put_all(&store, &["read"]);
    let found = bench.find(&store, "read").unwrap();
    let segment = found.token.downcast_ref::<FoundToken>().unwrap().entry.slot.segment;
    for number in 0..100 {
        bench.put(&store, &format!("small {number}")).unwrap();
    }
    lock(&store.writer.as_ref().unwrap().slots).drain(segment);
    let before = bench.files("seg-").len();
    for number in 0..3 {
        let put = bench.put_len(&store, &format!("large {number}"), 8 * LEN).unwrap();
        assert_eq!(put, Put::Dropped(DropReason::NoRoom));
    }
    assert_eq!(bench.files("seg-").len(), before);
    drop(found);
    assert_eq!(bench.put_len(&store, "large", 8 * LEN).unwrap(), Put::Done);
    assert_eq!(bench.files("seg-").len(), before, "its room was enough");
}

#[test]
fn a_directory_that_cannot_be_listed_takes_what_it_took() {
    let bench = Bench::new();
    let first = bench.open();
    for number in 0..100 {
        bench.put(&first, &format!("first {number}")).unwrap();
    }
    let directory = first.writer.as_ref().unwrap().directory.to_string_lossy().into_owned();
    let name: &'static str = Box::leak(directory.into_boxed_str());
    let put_many = |store: &Segments| {
        for number in 0..100 {
            bench.put(store, &format!("second {number}")).unwrap();
            store.maintain().ok();
        }
    };
    let capacity = bench.options.capacity_bytes.unwrap();
    let second = bench.open();
    bench.fail(Operation::List, name, u32::MAX, Errno::MFILE);
    put_many(&second);
    assert!(bench.disk.most_used() <= capacity, "{}", bench.disk.most_used());
    drop(second);
    // This one has never seen it.
    let third = bench.open();
    put_many(&third);
    assert!(bench.disk.most_used() <= capacity, "{}", bench.disk.most_used());
    bench.disk.end_faults();
    // What is not for us to look into is in nobody's way.
    bench.fail(Operation::List, name, u32::MAX, Errno::ACCESS);
    let fourth = bench.open();
    assert_eq!(bench.put(&fourth, "a").unwrap(), Put::Done);
}
