//! What is where, in memory: which blocks there are, and which of them go when room is needed. It does no I/O and asks
//! no clock: time is an argument, in seconds since 1970.
//!
//! Blocks are spread over partitions by their fingerprints, each under a lock that is held for a moment; whatever goes
//! over all blocks goes in small steps. Eviction is nevertheless that of one queue: all partitions stamp what they put in
//! their queues from one clock, and the oldest of their fronts is next.
#![forbid(unsafe_code)]

mod entry;
mod evict;
mod eviction;
mod eviction_list;
mod node;
mod partition;
mod quota;
mod recent;
#[cfg(test)]
mod tests;

pub(crate) use entry::{
    Candidates, Entry, Existing, Heat, Inserted, Lookup, MAX_SLOT_BYTES, PlacedBlock, Removed, Reuse, Slot,
    Totals, Want,
};
pub(crate) use recent::Recent;

use crate::{Admission, Eviction, Fingerprint};
use hoistway_io::parallel::{self, lock};
use node::{Mark, NONE, NodeId};
use partition::{Partition, Rules};
use quota::Namespaces;
use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

/// Partitions of an index: enough for many threads, few enough to look at the front of each.
const PARTITIONS: usize = 64;
/// Keys that are sorted by partition at a time, so that a lock is taken for several, and their memory is fetched at once.
const BATCH: usize = 1024;
/// Keys that are too few to be sorted.
const FEW: usize = 16;
/// Blocks that are worth several threads to take them in.
const MANY: usize = 1 << 14;
/// Nodes that are looked at under one lock, where all are looked at.
const STEP: NodeId = 512;
/// Seconds that must have passed for a second request to be another use, not the same one asking again before it stores.
const APART_SECONDS: u32 = 60;

/// How an index is made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IndexOptions {
    pub(crate) eviction: Eviction,
    pub(crate) admission: Admission,
}

/// The index. Its clones are the same one.
#[derive(Clone)]
pub(crate) struct Index {
    shared: Arc<IndexShared>,
}

struct IndexShared {
    partitions: Box<[Mutex<Partition>]>,
    rules: Rules,
    admission: Admission,
    /// Slots of removed blocks whose last reader is done.
    freed: Mutex<Vec<Slot>>,
    /// How often all blocks were looked through.
    #[cfg(test)]
    walks: AtomicU64,
}

/// While it lives, the slot of the own block that was found is not used for another. It holds no lock.
pub(crate) struct ReadHold {
    shared: Arc<IndexShared>,
    partition: usize,
    /// [`NONE`] for blocks of others, whose slots are not ours to keep.
    node: NodeId,
}

impl Index {
    /// An empty one.
    pub(crate) fn new(options: IndexOptions) -> Self {
        Self::with_partitions(options, PARTITIONS)
    }

    /// `partitions`: a power of two, at most [`PARTITIONS`].
    fn with_partitions(options: IndexOptions, partitions: usize) -> Self {
        let shared = IndexShared {
            partitions: (0..partitions).map(|_| Mutex::new(Partition::new())).collect(),
            rules: Rules {
                policy: eviction::policy(options.eviction),
                namespaces: Namespaces::default(),
                clock: AtomicU64::new(0),
            },
            admission: options.admission,
            freed: Mutex::default(),
            #[cfg(test)]
            walks: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Whether a block is there. No use: that is [`Index::touch`].
    pub(crate) fn contains(&self, fingerprint: &Fingerprint, now: u32) -> bool {
        let mut partition = self.shared.lock_of(fingerprint);
        let is_there = partition.contains(fingerprint, now);
        if !is_there && self.shared.admission == Admission::SecondTouch {
            partition.miss(fingerprint, now);
        }
        is_there
    }

    /// Whether blocks are there, one answer each; of `found`, as many as there are `blocks` are written.
    pub(crate) fn contains_many<T>(
        &self,
        blocks: &[T],
        fingerprint: impl Fn(&T) -> &Fingerprint,
        now: u32,
        found: &mut [bool],
    ) {
        if blocks.len() < FEW {
            for (block, found) in blocks.iter().zip(found) {
                *found = self.contains(fingerprint(block), now);
            }
            return;
        }
        for (blocks, found) in blocks.chunks(BATCH).zip(found.chunks_mut(BATCH)) {
            let partition_of = |block| self.shared.partition_of(fingerprint(block));
            // A counting sort by partition. After it, `ends[partition]` is the end of the partition's part of `order`.
            let mut ends = [0u16; PARTITIONS + 1];
            for block in blocks {
                ends[partition_of(block) + 1] += 1;
            }
            for partition in 0..PARTITIONS {
                ends[partition + 1] += ends[partition];
            }
            let mut order = [0u16; BATCH];
            for (number, block) in blocks.iter().enumerate() {
                let end = &mut ends[partition_of(block)];
                order[usize::from(*end)] = number as u16;
                *end += 1;
            }
            let mut start = 0;
            let mut candidates = [NONE; BATCH];
            for (number, partition) in self.shared.partitions.iter().enumerate() {
                let part = &order[start..usize::from(ends[number])];
                start += part.len();
                if part.is_empty() {
                    continue;
                }
                let mut partition = lock(partition);
                let fingerprint = |block: &u16| fingerprint(&blocks[usize::from(*block)]);
                for (candidate, block) in candidates.iter_mut().zip(part) {
                    *candidate = partition.candidate(fingerprint(block));
                }
                for (candidate, block) in candidates.iter().zip(part) {
                    let fingerprint = fingerprint(block);
                    let is_there = partition.contains_candidate(*candidate, fingerprint, now);
                    if !is_there && self.shared.admission == Admission::SecondTouch {
                        partition.miss(fingerprint, now);
                    }
                    if let Some(found) = found.get_mut(usize::from(*block)) {
                        *found = is_there;
                    }
                }
            }
        }
    }

    /// Finds a block to read it: a use of it.
    pub(crate) fn get(&self, fingerprint: &Fingerprint, now: u32) -> Lookup {
        let number = self.shared.partition_of(fingerprint);
        let mut partition = lock(&self.shared.partitions[number]);
        let Some(id) = partition.find(fingerprint) else {
            if self.shared.admission == Admission::SecondTouch {
                partition.miss(fingerprint, now);
            }
            return Lookup::Miss;
        };
        let entry = partition.entry(id);
        if entry.is_expired(now) {
            return Lookup::Expired;
        }
        partition.used(&self.shared.rules, id);
        let node = if entry.is_own() {
            partition.hold(id);
            id
        } else {
            NONE
        };
        Lookup::Found(entry, ReadHold { shared: Arc::clone(&self.shared), partition: number, node })
    }

    /// What is known of a block, whether its time is over or not. No use, no hold.
    pub(crate) fn peek(&self, fingerprint: &Fingerprint) -> Option<Entry> {
        let partition = self.shared.lock_of(fingerprint);
        partition.find(fingerprint).map(|id| partition.entry(id))
    }

    /// Changes what the layout knows of a block: flags, slot, sequence and expiry. All else stays as it was. Whether the
    /// block is there.
    pub(crate) fn amend(&self, fingerprint: &Fingerprint, change: impl FnOnce(&mut Entry)) -> bool {
        let mut partition = self.shared.lock_of(fingerprint);
        let found = partition.find(fingerprint);
        found.map(|id| partition.amend(id, change)).is_some()
    }

    /// Takes a block in. A batch that belongs together, such as a prefix, is best inserted from its tail to its head, as
    /// what comes first also goes first.
    pub(crate) fn insert(&self, fingerprint: Fingerprint, entry: &Entry, existing: Existing) -> Inserted {
        let stamp = self.shared.rules.tick();
        self.shared.lock_of(&fingerprint).insert(&self.shared.rules, fingerprint, entry, existing, stamp)
    }

    /// Takes in many blocks, oldest first, by several threads. Tells what was replaced.
    pub(crate) fn fill<T: Sync>(
        &self,
        blocks: &[T],
        entry: impl Fn(&T) -> (Fingerprint, Entry) + Sync,
    ) -> Vec<Removed> {
        let rules = &self.shared.rules;
        let first = rules.clock.fetch_add(blocks.len() as u64, Ordering::Relaxed);
        let partitions = self.shared.partitions.len();
        // Nearly as many for each, and some more.
        let some = blocks.len() / partitions + blocks.len() / partitions / 8;
        let mut of_partitions: Vec<_> = (0..partitions).map(|_| Vec::with_capacity(some)).collect();
        for (stamp, block) in (first..).zip(blocks) {
            of_partitions[self.shared.partition_of(&entry(block).0)].push((stamp, block));
        }
        let parts: Vec<_> = self.shared.partitions.iter().zip(of_partitions).collect();
        let threads = if blocks.len() < MANY { 1 } else { parallel::cores() };
        let replaced = parallel::map(&parts, threads, |(partition, blocks)| {
            let mut partition = lock(partition);
            partition.reserve(blocks.len());
            let inserted = blocks.iter().map(|(stamp, block)| {
                let (fingerprint, entry) = entry(block);
                partition.insert(rules, fingerprint, &entry, Existing::Replace, *stamp)
            });
            let replaced = inserted.filter_map(|inserted| match inserted {
                Inserted::Replaced(removed) => Some(removed),
                _ => None,
            });
            replaced.collect::<Vec<_>>()
        });
        replaced.into_iter().flatten().collect()
    }

    /// Makes a block a miss at once.
    pub(crate) fn remove(&self, fingerprint: &Fingerprint) -> Option<Removed> {
        self.remove_if(fingerprint, |_, _| true)
    }

    /// Makes a block a miss if it is as the caller believes. `is_it` is told the entry, and whether it is pinned.
    pub(crate) fn remove_if(
        &self,
        fingerprint: &Fingerprint,
        is_it: impl FnOnce(&Entry, bool) -> bool,
    ) -> Option<Removed> {
        let mut partition = self.shared.lock_of(fingerprint);
        let id = partition.find(fingerprint)?;
        is_it(&partition.entry(id), partition.is_pinned(id)).then(|| partition.remove(id))
    }

    /// Removes all blocks for which `is_it`, which is told whether they are pinned: a cleared namespace, a segment that
    /// is given up, what a writer had that is gone. Blocks that come meanwhile may stay.
    pub(crate) fn remove_all(&self, is_it: impl Fn(&Fingerprint, &Entry, bool) -> bool) -> Vec<Removed> {
        let mut removed = Vec::new();
        self.shared.step_through(|partition, ids| {
            for id in ids {
                let node = partition.nodes.get(id);
                if node.is(Mark::Visible)
                    && is_it(&node.fingerprint, &partition.entry(id), node.is(Mark::Pinned))
                {
                    removed.push(partition.remove(id));
                }
            }
        });
        removed
    }

    /// Counts a use of blocks, given in the order of their prefix: the tail is touched first, and so goes first. Returns
    /// those that are others'.
    pub(crate) fn touch(&self, blocks: &[Fingerprint]) -> Vec<Fingerprint> {
        let mut foreign = Vec::new();
        for fingerprint in blocks.iter().rev() {
            let mut partition = self.shared.lock_of(fingerprint);
            if let Some(id) = partition.find(fingerprint) {
                partition.used(&self.shared.rules, id);
                if !partition.is_own(id) {
                    foreign.push(*fingerprint);
                }
            }
        }
        foreign
    }

    /// Keeps a block from being evicted or expired until as many unpins, if it is there; says whether it is. If it is
    /// replaced, or removed and inserted again, it is still pinned.
    pub(crate) fn pin(&self, fingerprint: &Fingerprint) -> bool {
        let mut partition = self.shared.lock_of(fingerprint);
        let found = partition.find(fingerprint);
        found.map(|id| partition.pin(id)).is_some()
    }

    /// Undoes a pin.
    pub(crate) fn unpin(&self, fingerprint: &Fingerprint) {
        self.shared.lock_of(fingerprint).unpin(&self.shared.rules, fingerprint);
    }

    /// Removes blocks whose time is over, at most `most` own ones, and tells which. Once a second is often enough.
    pub(crate) fn expired(&self, now: u32, most: usize) -> Vec<Removed> {
        let mut removed = Vec::new();
        for partition in &self.shared.partitions {
            if removed.len() >= most {
                break;
            }
            let left = most - removed.len();
            lock(partition).expire(now, left, |_, _| true, &mut removed);
        }
        removed
    }

    /// Slots whose block was removed while it was read, and is not any more. Each is told once.
    pub(crate) fn freed(&self) -> Vec<Slot> {
        std::mem::take(&mut *lock(&self.shared.freed))
    }

    /// Whether a block that is offered is worth storing: with [`Admission::SecondTouch`], if it was here lately, was
    /// offered before, or was asked for a minute ago or longer. Asking again and again before a first store, as
    /// schedulers do, is one use, not many.
    pub(crate) fn admit(&self, fingerprint: &Fingerprint, now: u32) -> bool {
        match self.shared.admission {
            Admission::Always => true,
            Admission::SecondTouch => self.shared.lock_of(fingerprint).admit(fingerprint, now, APART_SECONDS),
        }
    }

    /// Limits the bytes of the slots of a namespace's own blocks.
    pub(crate) fn set_quota(&self, namespace: u16, bytes: Option<u64>) {
        self.shared.rules.namespaces.set_quota(namespace, bytes);
    }

    /// Bytes of the slots of a namespace's own blocks.
    #[cfg(test)]
    pub(crate) fn namespace_bytes(&self, namespace: u16) -> u64 {
        self.shared.rules.namespaces.used(namespace)
    }

    /// Bytes that have to go from a namespace before so many more may come.
    pub(crate) fn quota_excess(&self, namespace: u16, more: u64) -> u64 {
        self.shared.rules.namespaces.excess(namespace, more)
    }

    /// Whether any namespace has a quota.
    pub(crate) fn have_quota(&self) -> bool {
        self.shared.rules.namespaces.have_quota()
    }

    /// Notes which owners write no more: they have no part of quotas.
    pub(crate) fn set_ended(&self, owners: HashSet<u16>) {
        self.shared.rules.namespaces.set_ended(owners);
    }

    /// How much it has, of a namespace or in all.
    pub(crate) fn totals(&self, namespace: Option<u16>) -> Totals {
        let mut totals = Totals::default();
        for partition in &self.shared.partitions {
            lock(partition).totals(&mut totals, |number| namespace.is_none_or(|wanted| wanted == number));
        }
        totals
    }

    /// Blocks after `cursor`, 0 at first, in an order that stays as it is: what is there all the while is told exactly
    /// once. At most `most`, which is at least 1. The next cursor, or `None` at the end.
    pub(crate) fn list(&self, cursor: u64, most: usize, into: &mut Vec<(Fingerprint, Entry)>) -> Option<u64> {
        let end = into.len().saturating_add(most.max(1));
        let (mut number, mut first) = ((cursor >> 32) as usize, cursor as NodeId);
        while let Some(partition) = self.shared.partitions.get(number) {
            let partition = lock(partition);
            let last = partition.nodes.end().min(first.saturating_add(STEP));
            for id in first..last {
                let node = partition.nodes.get(id);
                if !node.is(Mark::Visible) {
                    continue;
                }
                if into.len() == end {
                    return Some((number as u64) << 32 | u64::from(id));
                }
                into.push((node.fingerprint, partition.entry(id)));
            }
            if last == partition.nodes.end() {
                (number, first) = (number + 1, 0);
            } else {
                first = last;
            }
        }
        None
    }

    /// Tells all blocks. What is there all the while is told exactly once. No lock is held meanwhile.
    #[cfg(test)]
    pub(crate) fn for_each(&self, mut tell: impl FnMut(&Fingerprint, &Entry)) {
        let (mut cursor, mut some) = (Some(0), Vec::with_capacity(STEP as usize));
        while let Some(from) = cursor {
            cursor = self.list(from, STEP as usize, &mut some);
            some.drain(..).for_each(|(fingerprint, entry)| tell(&fingerprint, &entry));
        }
    }

    /// How often all blocks were looked through.
    #[cfg(test)]
    pub(crate) fn walks(&self) -> u64 {
        self.shared.walks.load(Ordering::Relaxed)
    }

    /// Bytes of memory that it takes.
    pub(crate) fn heap_bytes(&self) -> u64 {
        let of_partitions = self.shared.partitions.len() * size_of::<Mutex<Partition>>();
        let in_partitions: usize =
            self.shared.partitions.iter().map(|partition| lock(partition).heap_bytes()).sum();
        (of_partitions + in_partitions) as u64
    }
}

impl IndexShared {
    fn partition_of(&self, fingerprint: &Fingerprint) -> usize {
        usize::from(fingerprint.as_bytes()[0]) & (self.partitions.len() - 1)
    }

    fn lock_of(&self, fingerprint: &Fingerprint) -> MutexGuard<'_, Partition> {
        lock(&self.partitions[self.partition_of(fingerprint)])
    }

    /// Goes through all nodes, a few at a time under a lock.
    fn step_through(&self, mut step: impl FnMut(&mut Partition, std::ops::Range<NodeId>)) {
        #[cfg(test)]
        self.walks.fetch_add(1, Ordering::Relaxed);
        for partition in &self.partitions {
            let mut first = 0;
            loop {
                let mut partition = lock(partition);
                let end = partition.nodes.end();
                let last = end.min(first + STEP);
                step(&mut partition, first..last);
                if last == end {
                    break;
                }
                first = last;
            }
        }
    }
}

impl Drop for ReadHold {
    fn drop(&mut self) {
        if self.node == NONE {
            return;
        }
        let freed = lock(&self.shared.partitions[self.partition]).release(self.node);
        if let Some(slot) = freed {
            lock(&self.shared.freed).push(slot);
        }
    }
}

impl fmt::Debug for ReadHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadHold").field("partition", &self.partition).field("node", &self.node).finish()
    }
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let clock = self.shared.rules.clock.load(Ordering::Relaxed);
        f.debug_struct("Index").field("totals", &self.totals(None)).field("clock", &clock).finish()
    }
}
