//! The index does what a plain one does: a map, and two queues for all blocks.
#![forbid(unsafe_code)]

use super::super::{
    Candidates, Entry, Existing, Index, IndexOptions, Inserted, Lookup, ReadHold, Removed, Reuse, Slot, Want,
    recent::Recent,
};
use super::fingerprint;
use crate::{Admission, Eviction, Fingerprint};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap, VecDeque};

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    uses: u8,
    holds: u32,
}

/// The plain one. Time is the same for all that happens in one step, and another in the next.
struct Model {
    eviction: Eviction,
    partitions: usize,
    blocks: HashMap<Fingerprint, (Entry, Block)>,
    pins: HashMap<Fingerprint, u32>,
    /// Own blocks that are not pinned: on probation, and protected.
    queues: [VecDeque<Fingerprint>; 2],
    ghosts: Vec<Recent<()>>,
    quotas: [u64; 3],
}

impl Model {
    fn new(eviction: Eviction, partitions: usize) -> Self {
        Self {
            eviction,
            partitions,
            blocks: HashMap::new(),
            pins: HashMap::new(),
            queues: Default::default(),
            ghosts: (0..partitions).map(|_| Recent::default()).collect(),
            quotas: [u64::MAX; 3],
        }
    }

    fn partition(&self, fingerprint: &Fingerprint) -> usize {
        usize::from(fingerprint.as_bytes()[0]) % self.partitions
    }

    fn unlink(&mut self, fingerprint: &Fingerprint) -> Option<usize> {
        for (number, queue) in self.queues.iter_mut().enumerate() {
            if let Some(place) = queue.iter().position(|other| other == fingerprint) {
                queue.remove(place);
                return Some(number);
            }
        }
        None
    }

    fn insert(&mut self, fingerprint: Fingerprint, entry: Entry) -> bool {
        let replaced = self.remove(&fingerprint);
        let partition = self.partition(&fingerprint);
        let is_remembered = self.ghosts[partition].remove(&fingerprint);
        self.blocks.insert(fingerprint, (entry, Block::default()));
        if entry.is_own() && !self.pins.contains_key(&fingerprint) {
            let queue = usize::from(is_remembered || self.eviction == Eviction::Lru);
            self.queues[queue].push_back(fingerprint);
        }
        replaced
    }

    fn remove(&mut self, fingerprint: &Fingerprint) -> bool {
        self.unlink(fingerprint);
        self.blocks.remove(fingerprint).is_some()
    }

    fn used(&mut self, fingerprint: &Fingerprint) {
        match self.eviction {
            Eviction::S3Fifo => {
                if let Some((_, block)) = self.blocks.get_mut(fingerprint) {
                    block.uses = (block.uses + 1).min(3);
                }
            }
            Eviction::Lru => {
                if let Some(queue) = self.unlink(fingerprint) {
                    self.queues[queue].push_back(*fingerprint);
                }
            }
        }
    }

    fn pin(&mut self, fingerprint: &Fingerprint) -> bool {
        let is_there = self.blocks.contains_key(fingerprint);
        if is_there {
            *self.pins.entry(*fingerprint).or_default() += 1;
            self.unlink(fingerprint);
        }
        is_there
    }

    fn namespace_bytes(&self, namespace: u16) -> u64 {
        let of_writer =
            self.blocks.values().filter(|(entry, _)| entry.is_own() && entry.namespace == namespace);
        of_writer.map(|(entry, _)| entry.slot_bytes).sum()
    }

    /// What is too much of a namespace, of which all owners that have blocks share the quota.
    fn excess(&self, namespace: u16) -> u64 {
        let mut others = BTreeMap::<u16, u64>::new();
        for (entry, _) in self.blocks.values() {
            if !entry.is_own() && entry.namespace == namespace {
                *others.entry(entry.owner).or_default() += entry.slot_bytes;
            }
        }
        let quota = self.quotas[usize::from(namespace)];
        if quota == u64::MAX {
            return 0;
        }
        let left = quota.saturating_sub(others.values().sum());
        self.namespace_bytes(namespace).saturating_sub(left.max(quota / (others.len() as u64 + 1)))
    }

    /// Takes out what the index says it has evicted, and checks that a plain policy does the same.
    fn evict(&mut self, want: &Want, now: u32, said: &[Removed]) {
        let is_wanted = |entry: &Entry| match want.from {
            Candidates::Anywhere => true,
            Candidates::Namespace(namespace) => entry.namespace == namespace,
        };
        let mut rest = want.bytes;
        let mut said = said.iter();
        // The order among expired blocks is not specified.
        let mut expired: BTreeMap<Fingerprint, Entry> = self
            .blocks
            .iter()
            .filter(|(fingerprint, (entry, block))| {
                entry.is_own()
                    && is_wanted(entry)
                    && entry.is_expired(now)
                    && block.holds == 0
                    && !self.pins.contains_key(*fingerprint)
            })
            .map(|(fingerprint, (entry, _))| (*fingerprint, *entry))
            .collect();
        // All of a partition's go.
        while !expired.is_empty() {
            let Some(next) = said.as_slice().first() else {
                assert_eq!(rest, 0, "{expired:?} should have gone");
                break;
            };
            let Some(entry) = expired.remove(&next.fingerprint) else {
                assert_eq!(rest, 0, "{next:?} went before {expired:?}");
                break;
            };
            said.next();
            assert_eq!(next.entry, entry);
            self.remove(&next.fingerprint);
            rest = rest.saturating_sub(entry.slot_bytes);
        }
        let mut goes = Vec::new();
        if !matches!(want.from, Candidates::Namespace(_)) {
            for namespace in 0..3 {
                let mut excess = self.excess(namespace);
                let mut steps = None;
                while rest > 0 && excess > 0 {
                    let is_candidate = |entry: &Entry| is_wanted(entry) && entry.namespace == namespace;
                    let Some(entry) = self.next(is_candidate, &mut steps, &mut goes) else { break };
                    rest = rest.saturating_sub(entry.slot_bytes);
                    excess = excess.saturating_sub(entry.slot_bytes);
                }
            }
        }
        let mut steps = None;
        while rest > 0 {
            let Some(entry) = self.next(is_wanted, &mut steps, &mut goes) else { break };
            rest = rest.saturating_sub(entry.slot_bytes);
        }
        let said: Vec<_> = said.map(|removed| removed.fingerprint).collect();
        assert_eq!(said, goes);
    }

    /// The next that the policy evicts.
    fn next(
        &mut self,
        is_candidate: impl Fn(&Entry) -> bool,
        steps: &mut Option<usize>,
        goes: &mut Vec<Fingerprint>,
    ) -> Option<Entry> {
        loop {
            let of = |queue: usize| {
                self.queues[queue].iter().filter(|fingerprint| is_candidate(&self.blocks[*fingerprint].0))
            };
            let bytes =
                |queue| of(queue).map(|fingerprint| self.blocks[fingerprint].0.slot_bytes).sum::<u64>();
            let counts = [of(0).count(), of(1).count()];
            let steps = steps.get_or_insert((counts[0] + counts[1]) * 5);
            if *steps == 0 || counts == [0, 0] {
                return None;
            }
            *steps -= 1;
            let wants_probation = bytes(0) > (bytes(0) + bytes(1)) / 10;
            let queue = usize::from(!(wants_probation && counts[0] > 0 || counts[1] == 0));
            let fingerprint = *of(queue).next()?;
            let (entry, block) = self.blocks[&fingerprint];
            if block.holds == 0 && (self.eviction == Eviction::Lru || block.uses == 0) {
                self.remove(&fingerprint);
                if queue == 0 {
                    let partition = self.partition(&fingerprint);
                    let left = self.blocks.keys().filter(|other| self.partition(other) == partition).count();
                    self.ghosts[partition].insert(&fingerprint, (), (left / 2).max(64));
                }
                goes.push(fingerprint);
                return Some(entry);
            }
            self.unlink(&fingerprint);
            let mut into = queue;
            if let Some((_, block)) = self.blocks.get_mut(&fingerprint)
                && self.eviction == Eviction::S3Fifo
                && block.uses > 0
            {
                block.uses = if queue == 0 { 0 } else { block.uses - 1 };
                into = 1;
            }
            self.queues[into].push_back(fingerprint);
        }
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Insert { key: u64, owner: u16, namespace: u16, class: u8, slot_blocks: u64, ttl: Option<u32> },
    Get(u64),
    Release(usize),
    Touch(Vec<u64>),
    Pin(u64),
    Unpin(u64),
    Remove(u64),
    Evict(Want),
    Expired,
    Quota(u16, Option<u64>),
    RemoveOwner(u16),
    Clear(u16),
    Check,
}

fn operation() -> impl Strategy<Value = Operation> {
    let key = 0u64..60;
    let candidates = prop_oneof![Just(Candidates::Anywhere), (0u16..3).prop_map(Candidates::Namespace),];
    let bytes = (0u64..40).prop_map(|n| n * 4096);
    prop_oneof![
        20 => (key.clone(), prop_oneof![6 => Just(0u16), 1 => 1u16..3], 0u16..3, 0u8..2, 1u64..6,
            proptest::option::weighted(0.2, 1u32..40))
            .prop_map(|(key, owner, namespace, class, slot_blocks, ttl)| Operation::Insert {
                key, owner, namespace, class, slot_blocks, ttl
            }),
        8 => key.clone().prop_map(Operation::Get),
        7 => any::<usize>().prop_map(Operation::Release),
        4 => proptest::collection::vec(key.clone(), 1..8).prop_map(Operation::Touch),
        2 => key.clone().prop_map(Operation::Pin),
        2 => key.clone().prop_map(Operation::Unpin),
        2 => key.prop_map(Operation::Remove),
        6 => (candidates, bytes).prop_map(|(from, bytes)| Operation::Evict(Want { from, bytes })),
        1 => Just(Operation::Expired),
        1 => (0u16..3, proptest::option::of((0u64..30).prop_map(|n| n * 4096)))
            .prop_map(|(namespace, quota)| Operation::Quota(namespace, quota)),
        1 => (1u16..3).prop_map(Operation::RemoveOwner),
        1 => (0u16..3).prop_map(Operation::Clear),
        2 => Just(Operation::Check),
    ]
}

struct Pair {
    index: Index,
    model: Model,
    holds: Vec<(Fingerprint, Entry, ReadHold)>,
    /// Slots that the index said will be free later.
    later: Vec<Slot>,
    now: u32,
    sequence: u64,
}

impl Pair {
    fn new(eviction: Eviction, partitions: usize) -> Self {
        let options = IndexOptions { eviction, admission: Admission::Always };
        Self {
            index: Index::with_partitions(options, partitions),
            model: Model::new(eviction, partitions),
            holds: Vec::new(),
            later: Vec::new(),
            now: 1000,
            sequence: 0,
        }
    }

    /// A removed block's slot is free exactly if the block has no readers.
    fn gone(&mut self, removed: &Removed) {
        let is_read =
            self.holds.iter().any(|(_, entry, _)| entry.is_own() && entry.sequence == removed.entry.sequence);
        assert_eq!(removed.reuse, if is_read { Reuse::Later } else { Reuse::Now });
        if is_read {
            self.later.push(removed.entry.slot);
        }
    }

    fn carry_out(&mut self, operation: Operation) {
        self.now += 1;
        match operation {
            Operation::Insert { key, owner, namespace, class, slot_blocks, ttl } => {
                self.sequence += 1;
                let entry = Entry {
                    owner,
                    namespace,
                    class: if owner == 0 { class } else { 0 },
                    flags: key as u8,
                    slot: Slot { segment: class.into(), slot: self.sequence as u32 },
                    slot_bytes: slot_blocks * 4096,
                    payload_len: slot_blocks * 4096 - 100,
                    sequence: self.sequence,
                    expires: ttl.map_or(0, |ttl| self.now + ttl),
                };
                let key = fingerprint(key);
                let before = self.index.peek(&key);
                match self.index.insert(key, &entry, Existing::Replace) {
                    Inserted::New => assert_eq!(before, None),
                    Inserted::Replaced(removed) => {
                        assert_eq!(Some(removed.entry), before);
                        self.gone(&removed);
                    }
                    other => panic!("{other:?}"),
                }
                assert_eq!(self.model.insert(key, entry), before.is_some());
                assert_eq!(self.index.insert(key, &entry, Existing::Keep), Inserted::Kept(entry));
            }
            Operation::Get(key) => {
                let key = fingerprint(key);
                match (self.index.get(&key, self.now), self.model.blocks.get_mut(&key)) {
                    (Lookup::Miss, None) => {}
                    (Lookup::Expired, Some((entry, _))) => assert!(entry.is_expired(self.now)),
                    (Lookup::Found(found, hold), Some((entry, block))) => {
                        assert_eq!(found, *entry);
                        assert!(!entry.is_expired(self.now));
                        block.holds += 1;
                        self.holds.push((key, found, hold));
                        self.model.used(&key);
                    }
                    (found, expected) => panic!("{found:?}, not {expected:?}"),
                }
            }
            Operation::Release(which) => {
                if self.holds.is_empty() {
                    return;
                }
                let (key, entry, hold) = self.holds.swap_remove(which % self.holds.len());
                drop(hold);
                if let Some((current, block)) = self.model.blocks.get_mut(&key)
                    && current.sequence == entry.sequence
                {
                    block.holds -= 1;
                }
                let is_read = self.holds.iter().any(|(_, other, _)| other.sequence == entry.sequence);
                let waits = self.later.iter().position(|slot| *slot == entry.slot);
                let freed = match waits {
                    Some(place) if !is_read => vec![self.later.swap_remove(place)],
                    _ => vec![],
                };
                assert_eq!(self.index.freed(), freed);
            }
            Operation::Touch(keys) => {
                let keys: Vec<_> = keys.into_iter().map(fingerprint).collect();
                self.index.touch(&keys);
                keys.iter().rev().for_each(|key| self.model.used(key));
            }
            Operation::Pin(key) => {
                let key = fingerprint(key);
                assert_eq!(self.index.pin(&key), self.model.pin(&key));
            }
            Operation::Unpin(key) => {
                let key = fingerprint(key);
                self.index.unpin(&key);
                if let Some(pins) = self.model.pins.get_mut(&key) {
                    *pins -= 1;
                    if *pins == 0 {
                        self.model.pins.remove(&key);
                        let block = self.model.blocks.get(&key);
                        if block.is_some_and(|(entry, _)| entry.is_own()) {
                            self.relink(key);
                        }
                    }
                }
            }
            Operation::Remove(key) => {
                let key = fingerprint(key);
                let removed = self.index.remove_if(&key, |_, is_pinned| !is_pinned);
                let is_pinned = self.model.pins.contains_key(&key);
                let expected = self.model.blocks.get(&key).filter(|_| !is_pinned).map(|(entry, _)| *entry);
                assert_eq!(removed.map(|removed| removed.entry), expected);
                if let Some(removed) = removed {
                    self.gone(&removed);
                    self.model.remove(&key);
                }
            }
            Operation::Evict(want) => {
                let removed = self.index.evict(&want, self.now);
                for removed in &removed {
                    assert!(removed.entry.is_own() && removed.reuse == Reuse::Now);
                }
                self.model.evict(&want, self.now, &removed);
            }
            Operation::Expired => {
                let mut removed = self.index.expired(self.now, usize::MAX);
                removed.iter().for_each(|removed| self.gone(removed));
                let now = self.now;
                let mut expected: Vec<_> = self.model.blocks.iter().collect();
                expected
                    .retain(|(key, (entry, _))| entry.is_expired(now) && !self.model.pins.contains_key(*key));
                let gone: Vec<_> = expected.iter().map(|(key, _)| **key).collect();
                let mut of_namespace: Vec<_> =
                    expected.iter().filter(|(_, (entry, _))| entry.is_own()).map(|(key, _)| **key).collect();
                of_namespace.sort_unstable();
                removed.sort_unstable_by_key(|removed| removed.fingerprint);
                assert_eq!(
                    removed.iter().map(|removed| removed.fingerprint).collect::<Vec<_>>(),
                    of_namespace
                );
                gone.iter().for_each(|key| assert!(self.model.remove(key)));
            }
            Operation::Quota(namespace, quota) => {
                self.index.set_quota(namespace, quota);
                self.model.quotas[usize::from(namespace)] = quota.unwrap_or(u64::MAX);
            }
            Operation::RemoveOwner(owner) => {
                let before = self.model.blocks.len();
                let theirs: Vec<_> =
                    self.model.blocks.iter().filter(|(_, (entry, _))| entry.owner == owner).collect();
                let theirs: Vec<_> = theirs.into_iter().map(|(key, _)| *key).collect();
                theirs.iter().for_each(|key| assert!(self.model.remove(key)));
                assert_eq!(
                    self.index.remove_all(|_, entry, _| entry.owner == owner).len(),
                    before - self.model.blocks.len()
                );
            }
            Operation::Clear(namespace) => {
                let removed = self.index.remove_all(|_, entry, is_pinned| {
                    entry.is_own() && entry.namespace == namespace && !is_pinned
                });
                for removed in &removed {
                    self.gone(removed);
                    assert!(self.model.remove(&removed.fingerprint));
                }
                let left = self.model.blocks.iter().filter(|(key, (entry, _))| {
                    entry.is_own() && entry.namespace == namespace && !self.model.pins.contains_key(*key)
                });
                assert_eq!(left.count(), 0);
            }
            Operation::Check => self.check(),
        }
    }

    /// An unpinned block goes to the back of the queue that it was in.
    fn relink(&mut self, key: Fingerprint) {
        let queue = {
            let partition = lock_partition(&self.index, &key);
            let id = partition.find(&key).expect("it is there");
            partition.nodes.get(id).queue() as usize
        };
        self.model.queues[queue].push_back(key);
    }

    fn check(&self) {
        let keys: Vec<_> = (0..60).map(fingerprint).collect();
        let mut found = vec![false; keys.len()];
        self.index.contains_many(&keys, |key| key, self.now, &mut found);
        for (key, found) in keys.iter().zip(found) {
            let expected = self.model.blocks.get(key);
            assert_eq!(found, expected.is_some_and(|(entry, _)| !entry.is_expired(self.now)));
            assert_eq!(found, self.index.contains(key, self.now));
        }
        let mut listed = HashMap::new();
        self.index.for_each(|key, entry| assert!(listed.insert(*key, *entry).is_none()));
        let expected: HashMap<_, _> =
            self.model.blocks.iter().map(|(key, (entry, _))| (*key, *entry)).collect();
        assert_eq!(listed, expected);
        let totals = self.index.totals(None);
        let of_writer = expected.values().filter(|entry| entry.is_own());
        assert_eq!(totals.own_blocks, of_writer.clone().count() as u64);
        assert_eq!(totals.own_slot_bytes, of_writer.clone().map(|entry| entry.slot_bytes).sum::<u64>());
        assert_eq!(totals.own_payload_bytes, of_writer.map(|entry| entry.payload_len).sum::<u64>());
        assert_eq!(totals.foreign_blocks + totals.own_blocks, expected.len() as u64);
        for namespace in 0..3 {
            assert_eq!(self.index.namespace_bytes(namespace), self.model.namespace_bytes(namespace));
        }
    }
}

fn lock_partition<'a>(
    index: &'a Index,
    key: &Fingerprint,
) -> std::sync::MutexGuard<'a, super::super::partition::Partition> {
    index.shared.lock_of(key)
}

fn agrees(eviction: Eviction, partitions: usize, operations: Vec<Operation>) {
    let mut pair = Pair::new(eviction, partitions);
    for operation in operations {
        pair.carry_out(operation);
    }
    pair.check();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn s3fifo_is_that_of_a_plain_index(
        partitions in prop_oneof![Just(1usize), Just(4)],
        operations in proptest::collection::vec(operation(), 1..250),
    ) {
        agrees(Eviction::S3Fifo, partitions, operations);
    }

    #[test]
    fn lru_is_that_of_a_plain_index(
        partitions in prop_oneof![Just(1usize), Just(4)],
        operations in proptest::collection::vec(operation(), 1..250),
    ) {
        agrees(Eviction::Lru, partitions, operations);
    }
}
