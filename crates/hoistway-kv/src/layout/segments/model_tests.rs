//! Random work on a simulated disk, which loses its power, or a process, at a random moment: what was found before is
//! found again, and nothing is ever delivered that was not stored.

use super::*;
use crate::{
    Durability,
    disk::simulated::{Dice, Effect, Fault, Operation, SimulatedDisk},
    format::{Shard, ShardTable, checksum},
};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

const CAPACITY: u64 = 1 << 20;
const NAMESPACES: u64 = 2;
const KEYS: u64 = 24;

/// A block that a process may store: which key, and which of its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    key: u64,
    number: u64,
}

impl Version {
    fn namespace(self) -> NamespaceId {
        namespace(self.key)
    }

    fn shards(self) -> u32 {
        1 + (self.key % 3) as u32
    }

    /// Bytes of a shard; of the same length for all versions, so that they can be taken for one another.
    fn shard(self, shard: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        let seed = self.key << 40 | self.number << 8 | u64::from(shard);
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
        bytes
    }

    fn len(self) -> usize {
        [4096, 700, 8192, 5000][(self.key % 4) as usize]
    }
}

fn namespace(key: u64) -> NamespaceId {
    NamespaceId([(key % NAMESPACES) as u8; 16])
}

fn key_of(key: u64) -> Key {
    Key::new(format!("key {key}").as_bytes()).unwrap()
}

fn fingerprint(key: u64) -> Fingerprint {
    Fingerprint::of(namespace(key), key_of(key).as_bytes())
}

/// A block that is being written.
struct Writing {
    process: usize,
    version: Version,
    claim: Claim,
    /// Which shards have checksums.
    has_sums: bool,
    /// Shards, then the header, that have been written.
    done: u32,
}

/// A block that is being read: its header has been.
struct Reading {
    process: usize,
    key: u64,
    found: Found,
    header: Vec<u8>,
}

struct Model {
    seed: u64,
    dice: Dice,
    disk: SimulatedDisk,
    durability: Durability,
    /// Out of how many blocks one has no checksums; 0: none.
    without_sums: u64,
    /// Whether operations fail now and then.
    has_faults: bool,
    /// Whether loads compare checksums where they need not.
    verify: bool,
    processes: Vec<Option<Segments>>,
    writing: Vec<Writing>,
    reading: Vec<Reading>,
    /// All that was ever written, or begun to be.
    versions: BTreeMap<u64, u64>,
    /// The newest of each key whose store has ended well. With one process, no older one is found any more.
    stored: BTreeMap<u64, u64>,
    /// What was deleted, and must not come back.
    deleted: BTreeSet<Version>,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let durability = Durability::ALL[dice.below(3) as usize];
        let without_sums = [0, 2, 1][dice.below(3) as usize];
        let processes = 1 + dice.below(2) as usize;
        let has_faults = dice.one_in(3);
        let verify = dice.one_in(2);
        let mut model = Self {
            seed,
            disk: SimulatedDisk::new(seed, 64 << 20),
            durability,
            without_sums,
            has_faults,
            verify,
            processes: Vec::new(),
            writing: Vec::new(),
            reading: Vec::new(),
            versions: BTreeMap::new(),
            stored: BTreeMap::new(),
            deleted: BTreeSet::new(),
            dice,
        };
        for _ in 0..processes {
            let opened = model.open().unwrap();
            model.processes.push(Some(opened));
        }
        model
    }

    fn open(&mut self) -> Result<Segments> {
        self.dice.next();
        let mut options = StoreOptions::new("/store");
        options.capacity_bytes = Some(CAPACITY);
        options.min_free_bytes = 0;
        options.durability = self.durability;
        options.segment_bytes = Some(96 << 10);
        let ids = Mutex::new(self.dice.clone());
        let surroundings = Surroundings {
            clock: Box::new(|| 1000),
            monotonic: Arc::new(|| Duration::ZERO),
            new_id: Box::new(move || {
                let mut ids = lock(&ids);
                Uuid::from_u64_pair(ids.next(), ids.next())
            }),
            few_blocks: if self.seed.is_multiple_of(2) { FEW_BLOCKS } else { 0 },
        };
        let segments = Segments::open_on(Arc::new(self.disk.clone()), &options, surroundings)?;
        for key in 0..NAMESPACES {
            segments.open_namespace(namespace(key), "{}", NamespaceOptions::default())?;
        }
        Ok(segments)
    }

    fn process(&self, number: usize) -> &Segments {
        self.processes[number].as_ref().unwrap()
    }

    /// Does something. What fails for want of power fails.
    fn step(&mut self) {
        let number = self.dice.below(self.processes.len() as u64) as usize;
        let key = self.dice.below(KEYS);
        if self.has_faults && self.dice.one_in(12) {
            self.fail_something();
        }
        match self.dice.below(20) {
            0..=6 => self.begin_write(number, key),
            7..=9 => self.write_on(),
            10..=12 => self.commit(number),
            13..=14 => self.begin_read(number, key),
            15 => self.end_read(),
            16 => drop(self.process(number).maintain()),
            17 if self.dice.one_in(3) => self.delete(number, key),
            18 if self.dice.one_in(5) => {
                // Those who follow may lag over several of them.
                for _ in 0..=self.dice.below(4) {
                    let _ = self.process(number).writer().unwrap().checkpoint();
                }
            }
            18 if self.dice.one_in(8) => drop(self.process(number).clear(namespace(key))),
            19 => self.give_up_a_write(),
            _ => {
                self.begin_read(number, key);
                self.end_read();
            }
        }
    }

    fn delete(&mut self, number: usize, key: u64) {
        let known = self.process(number).shared.index.peek(&fingerprint(key));
        let version = known.filter(Entry::is_own).and_then(|_| self.load(number, key));
        let blocks = [(key_of(key), fingerprint(key))];
        let blocks: Vec<_> = blocks.iter().map(|(key, print)| (key.as_bytes(), *print)).collect();
        if self.process(number).delete(namespace(key), &blocks).is_ok_and(|deleted| deleted > 0) {
            self.deleted.extend(version);
        }
    }

    /// Lets one of the next operations fail.
    fn fail_something(&mut self) {
        let operations = [
            Operation::Write,
            Operation::Sync,
            Operation::Sync,
            Operation::Allocate,
            Operation::Create,
            Operation::Rename,
            Operation::Remove,
            Operation::SyncDirectory,
        ];
        let operation = operations[self.dice.below(operations.len() as u64) as usize];
        let name = ["idx-", "seg-", "CKPT", ""][self.dice.below(4) as usize];
        let effect = match (operation, self.dice.below(3)) {
            (Operation::Write, 0) => Effect::Cut(self.dice.below(200) as usize),
            (_, 1) => Effect::Fail(Errno::NOSPC.raw_os_error()),
            _ => Effect::Fail(Errno::IO.raw_os_error()),
        };
        let (skip, times) = (self.dice.below(4) as u32, 1 + self.dice.below(3) as u32);
        self.disk.script(Fault { operation, name, skip, times, effect });
    }

    fn begin_write(&mut self, number: usize, key: u64) {
        let version = self.versions.entry(key).or_insert(0);
        *version += 1;
        let version = Version { key, number: *version };
        let block = NewBlock {
            namespace: version.namespace(),
            key: key_of(key),
            fingerprint: fingerprint(key),
            shards: version.shards(),
            shard_len: version.len() as u64,
            expires: None,
            following: 0,
            is_partial: false,
        };
        if let Ok(Reservation::Claimed(claim)) = self.process(number).reserve(block) {
            let has_sums = self.without_sums == 0 || !self.dice.one_in(self.without_sums);
            self.writing.push(Writing { process: number, version, claim, has_sums, done: 0 });
            for _ in 0..self.dice.below(6) {
                self.write_on();
            }
        }
    }

    /// Writes another part of a block that is being written: a shard, at last the header.
    fn write_on(&mut self) {
        let unfinished: Vec<usize> = (0..self.writing.len())
            .filter(|number| self.writing[*number].done <= self.writing[*number].version.shards())
            .collect();
        let Some(chosen) = pick(&mut self.dice, &unfinished) else { return };
        let writing = &self.writing[chosen];
        let (place, shard) = (&writing.claim.place, writing.done);
        let written = if shard < writing.version.shards() {
            let mut bytes = writing.version.shard(shard);
            bytes.resize(bytes.len().next_multiple_of(4096), 0);
            self.disk.write(place.file.path(), place.payload + u64::from(shard) * place.stride, &bytes)
        } else {
            let header = writing.claim.header(&table(writing));
            self.disk.write(place.file.path(), place.header.unwrap(), &header)
        };
        if written.is_ok() {
            self.writing[chosen].done += 1;
        }
    }

    /// Commits all of a process that have been written, and checks that they are found.
    fn commit(&mut self, number: usize) {
        let is_ready =
            |writing: &Writing| writing.process == number && writing.done > writing.version.shards();
        let (ready, rest) = std::mem::take(&mut self.writing).into_iter().partition(is_ready);
        self.writing = rest;
        let ready: Vec<Writing> = ready;
        let versions: Vec<Version> = ready.iter().map(|writing| writing.version).collect();
        let blocks = ready
            .into_iter()
            .map(|writing| Written { table: table(&writing), claim: writing.claim })
            .collect();
        let committed = self.process(number).commit(blocks);
        for (version, committed) in versions.into_iter().zip(committed) {
            if committed.is_ok() {
                self.stored.insert(version.key, version.number);
                assert_eq!(self.load(number, version.key), Some(version), "{}", self.about());
            } else {
                let may_fail = self.has_faults || self.disk.is_without_power();
                assert!(may_fail, "{committed:?} {}", self.about());
            }
        }
    }

    /// Drops the claim of a request that was cancelled, or failed.
    fn give_up_a_write(&mut self) {
        let all: Vec<usize> = (0..self.writing.len()).collect();
        if let Some(chosen) = pick(&mut self.dice, &all) {
            self.writing.remove(chosen);
        }
    }

    fn begin_read(&mut self, number: usize, key: u64) {
        let found = match self.process(number).find(namespace(key), &key_of(key), fingerprint(key)) {
            Lookup::Found(found) => found,
            Lookup::Miss => return,
            Lookup::Expired => panic!("nothing expires"),
            Lookup::Failed(error) => panic!("{error}"),
        };
        let header = self.disk.read(found.place.file.path(), found.place.header.unwrap(), HEADER_LEN);
        if let Ok(header) = header {
            self.reading.push(Reading { process: number, key, found, header });
        }
    }

    fn end_read(&mut self) {
        let all: Vec<usize> = (0..self.reading.len()).collect();
        if let Some(chosen) = pick(&mut self.dice, &all) {
            let reading = self.reading.remove(chosen);
            let is_own = reading.found.token.downcast_ref::<FoundToken>().unwrap().entry.is_own();
            let delivered = self.deliver(&reading);
            // A block that a process stored stays where it is. Without syncs it is not certain that it got there.
            let must_be_there = is_own && self.durability != Durability::None;
            assert!(!must_be_there || delivered.is_ok(), "{delivered:?} {}", self.about());
        }
    }

    /// What a load delivers: a version, or why there is none.
    fn deliver(&self, reading: &Reading) -> Result<Version, Verdict> {
        let place = &reading.found.place;
        // As much as the index says; the header may have been replaced since.
        let stride = usize::try_from(place.stride).unwrap();
        let shards = reading.found.token.downcast_ref::<FoundToken>().unwrap().entry.flags as usize + 1;
        let payload = self.disk.read(place.file.path(), place.payload, stride * shards).unwrap_or_default();
        let process = self.process(reading.process);
        let table = match process.check(&reading.found, &key_of(reading.key), &reading.header) {
            Verdict::Good(table) => table,
            verdict => return Err(verdict),
        };
        // As loads do: no checksum vouches for what was read.
        let has_sums = table.0.iter().all(|shard| shard.checksum.is_some());
        let are_compared = self.verify || !reading.found.is_proven;
        let is_certain = reading.found.is_held || (has_sums && are_compared);
        if !is_certain && !Sharing::is_still_there(process, &reading.found) {
            return Err(Verdict::Moved);
        }
        let mut shards = Vec::new();
        for (number, shard) in table.0.iter().enumerate() {
            let start = number * stride;
            let Some(bytes) = payload.get(start..start + shard.len as usize) else {
                return Err(Verdict::Corrupt("short".into()));
            };
            if are_compared && shard.checksum.is_some_and(|sum| sum != checksum(bytes)) {
                return Err(Verdict::Corrupt("checksum".into()));
            }
            shards.push(bytes);
        }
        let highest = self.versions.get(&reading.key).copied().unwrap_or(0);
        let versions = (1..=highest).rev().map(|number| Version { key: reading.key, number });
        let is_it = |version: &Version| {
            shards.len() == version.shards() as usize
                && shards.iter().zip(0..).all(|(bytes, shard)| **bytes == version.shard(shard))
        };
        let version = versions.into_iter().find(is_it);
        Ok(version.unwrap_or_else(|| panic!("wrong bytes of key {} {}", reading.key, self.about())))
    }

    /// Finds a block, and reads it at once.
    fn load(&mut self, number: usize, key: u64) -> Option<Version> {
        let before = self.reading.len();
        self.begin_read(number, key);
        if self.reading.len() == before {
            return None;
        }
        let reading = self.reading.pop()?;
        let version = self.deliver(&reading).ok()?;
        let newest = self.stored.get(&key).copied().unwrap_or(0);
        let is_stale = self.processes.len() == 1 && version.number < newest;
        assert!(!is_stale, "{version:?} is found, but {newest} was stored {}", self.about());
        Some(version)
    }

    /// All blocks of a process that it finds.
    fn own_blocks(&mut self, number: usize) -> BTreeMap<u64, Version> {
        let is_own = |model: &Self, key| {
            let known = model.process(number).shared.index.peek(&fingerprint(key));
            known.is_some_and(|entry| entry.is_own())
        };
        let keys: Vec<u64> = (0..KEYS).filter(|key| is_own(self, *key)).collect();
        let mut blocks = BTreeMap::new();
        for key in keys {
            match self.load(number, key) {
                Some(version) => {
                    let is_back = self.deleted.contains(&version);
                    assert!(!is_back, "{version:?} is back {}", self.about());
                    blocks.insert(key, version);
                }
                None if self.durability == Durability::None => {}
                None => panic!("key {key} is not there {}", self.about()),
            }
        }
        blocks
    }

    /// Checks that no slot is lost once all writes and reads have ended.
    fn check_slots(&mut self, number: usize) {
        self.writing.retain(|writing| writing.process != number);
        self.reading.retain(|reading| reading.process != number);
        self.disk.end_faults();
        let process = self.process(number);
        process.maintain().unwrap_or_else(|error| panic!("{error} {}", self.about()));
        let used = lock(&process.writer().unwrap().slots).used();
        let bytes = process.shared.index.totals(None).own_slot_bytes;
        assert_eq!(used * 4096, bytes, "room leaks {}", self.about());
    }

    fn about(&self) -> String {
        format!(
            "(seed {}, {}, verify {}, faults {}, {} processes, without sums {}, {} operations)",
            self.seed,
            self.durability,
            self.verify,
            self.has_faults,
            self.processes.len(),
            self.without_sums,
            self.disk.operations()
        )
    }

    /// A process dies, and another takes its place.
    fn kill(&mut self, number: usize) {
        self.disk.end_faults();
        let before = self.own_blocks(number);
        self.writing.retain(|writing| writing.process != number);
        self.reading.retain(|reading| reading.process != number);
        if self.dice.one_in(2) {
            // It ends rather than dies: all that it wrote is synced.
            self.process(number).close().unwrap_or_else(|error| panic!("{error} {}", self.about()));
        }
        self.processes[number] = None;
        let opened = self.open().unwrap_or_else(|error| panic!("{error} {}", self.about()));
        self.processes[number] = Some(opened);
        let lost = self.process(number).usage().lost_on_recovery;
        assert_eq!(lost, 0, "{}", self.about());
        // There may be more: what was evicted without the disk's knowing, or could not be committed.
        let after = self.own_blocks(number);
        let is_there = |(key, version): (&u64, &Version)| after.get(key) == Some(version);
        assert!(before.iter().all(is_there), "{before:?} before a kill, then {after:?} {}", self.about());
        self.check_slots(number);
    }

    /// The power is cut, and all processes are started again.
    fn lose_power(&mut self) {
        let mut before = BTreeMap::new();
        for number in 0..self.processes.len() {
            // What is in memory is what users were told.
            if self.durability == Durability::None {
                continue;
            }
            before.extend(self.own_blocks(number));
        }
        self.writing.clear();
        self.reading.clear();
        let count = self.processes.len();
        self.processes = (0..count).map(|_| None).collect();
        self.disk.crash();
        for number in 0..count {
            let opened = self.open().unwrap_or_else(|error| panic!("{error} {}", self.about()));
            self.processes[number] = Some(opened);
        }
        let lost: u64 = (0..count).map(|number| self.process(number).usage().lost_on_recovery).sum();
        assert!(lost == 0 || self.durability == Durability::None, "lost {lost} {}", self.about());
        for key in 0..KEYS {
            let found: Vec<Option<Version>> = (0..count).map(|number| self.load(number, key)).collect();
            if let Some(version) = before.get(&key) {
                assert!(found.contains(&Some(*version)), "{found:?}, not {version:?} {}", self.about());
            }
        }
    }

    fn run(&mut self) {
        for _ in 0..1 + self.dice.below(3) {
            self.disk.forget_most_used();
            for _ in 0..self.dice.below(120) {
                self.step();
            }
            if self.dice.one_in(4) {
                let number = self.dice.below(self.processes.len() as u64) as usize;
                self.kill(number);
            }
            let more = self.dice.below(60);
            self.disk.cut_power_after(more);
            for _ in 0..120 {
                if self.disk.is_without_power() {
                    break;
                }
                self.step();
            }
            assert!(self.disk.most_used() <= CAPACITY, "{} bytes {}", self.disk.most_used(), self.about());
            self.lose_power();
            for number in 0..self.processes.len() {
                self.check_slots(number);
            }
        }
    }
}

fn table(writing: &Writing) -> ShardTable {
    let shards = (0..writing.version.shards()).map(|number| {
        let bytes = writing.version.shard(number);
        Shard { len: bytes.len() as u64, checksum: writing.has_sums.then(|| checksum(&bytes)) }
    });
    ShardTable(shards.collect())
}

fn pick(dice: &mut Dice, all: &[usize]) -> Option<usize> {
    (!all.is_empty()).then(|| all[dice.below(all.len() as u64) as usize])
}

#[test]
fn nothing_is_lost_and_nothing_is_wrong_after_a_crash() {
    let seeds = std::env::var("HOISTWAY_KV_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    let first = std::env::var("HOISTWAY_KV_FIRST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    for seed in first..first + seeds.unwrap_or(300) {
        Model::new(seed).run();
    }
}
