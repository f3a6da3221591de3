//! Which blocks go: the fronts of all partitions' queues, oldest first.
#![forbid(unsafe_code)]

use super::{
    Entry, Existing, Index, Inserted, ReadHold,
    entry::{Candidates, Heat, PlacedBlock, Removed, SegmentWorth, Want},
    eviction::{MAX_USES, Queue},
    lock,
    node::{ListId, Mark, Node},
};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    sync::{Arc, atomic::Ordering},
};

/// The front of a queue: when its first block came there, and whose it is.
type Front = Reverse<(u64, usize, ListId)>;

/// Bytes that have still to go.
struct BytesToEvict(u64);

impl BytesToEvict {
    fn is_done(&self) -> bool {
        self.0 == 0
    }

    fn less(&mut self, removed: &Removed) {
        self.0 = self.0.saturating_sub(removed.entry.slot_bytes);
    }
}

/// Blocks that are pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pinned {
    pub(crate) blocks: u64,
    pub(crate) slot_bytes: u64,
}

/// Fronts of the queues that blocks may be taken from.
#[derive(Default)]
struct Fronts {
    /// By [`Queue`].
    heaps: [BinaryHeap<Front>; 2],
    slot_bytes: [u64; 2],
    blocks: u64,
}

impl Index {
    /// Evicts own blocks that are neither pinned nor read: first expired blocks, then blocks of namespaces over their
    /// quota, then any, in the order of the policy. Evicts fewer bytes than asked for if no more blocks may go. The
    /// slots of all evicted blocks are free.
    pub(crate) fn evict(&self, want: &Want, now: u32) -> Vec<Removed> {
        let mut removed = Vec::new();
        let mut rest = BytesToEvict(want.bytes);
        self.evict_expired(want.from, now, &mut rest, &mut removed);
        if want.from == Candidates::Anywhere {
            for (namespace, excess) in self.shared.rules.namespaces.over_quota() {
                let mut excess = BytesToEvict(excess);
                self.evict_fronts(want.from, Some(namespace), &mut [&mut rest, &mut excess], &mut removed);
            }
        }
        self.evict_fronts(want.from, None, &mut [&mut rest], &mut removed);
        removed
    }

    fn evict_expired(&self, from: Candidates, now: u32, rest: &mut BytesToEvict, removed: &mut Vec<Removed>) {
        for partition in &self.shared.partitions {
            if rest.is_done() {
                return;
            }
            let before = removed.len();
            let mut partition = lock(partition);
            let may_go = |entry: &Entry, node: &Node| {
                let is_in = match from {
                    Candidates::Anywhere => true,
                    Candidates::Namespace(namespace) => entry.namespace == namespace,
                };
                entry.is_own() && is_in && !node.is(Mark::Held)
            };
            partition.expire(now, usize::MAX, may_go, removed);
            removed[before..].iter().for_each(|gone| rest.less(gone));
        }
    }

    /// Evicts by the policy until any of `rests` is done.
    fn evict_fronts(
        &self,
        from: Candidates,
        namespace: Option<u16>,
        rests: &mut [&mut BytesToEvict],
        removed: &mut Vec<Removed>,
    ) {
        let is_done = |rests: &[&mut BytesToEvict]| rests.iter().any(|rest| rest.is_done());
        if is_done(rests) {
            return;
        }
        let rules = &self.shared.rules;
        let mut fronts = self.fronts(from, namespace);
        // Each block can be put back so many times before its turn comes. What is put back for ever is being read.
        let mut steps = fronts.blocks.saturating_mul(u64::from(MAX_USES) + 2);
        while steps > 0 && !is_done(rests) {
            let wanted = rules.policy.next(fronts.slot_bytes[0], fronts.slot_bytes[1]);
            let Some((queue, Reverse((stamp, number, list)))) = fronts.pop(wanted) else { return };
            let mut partition = lock(&self.shared.partitions[number]);
            let key = partition.lists.get(list).key;
            if !key.is_in(from) || namespace.is_some_and(|wanted| key.namespace != wanted) {
                // The list is another one by now.
                continue;
            }
            let Some((front, newest)) = partition.front(list, queue) else { continue };
            steps -= 1;
            if newest != stamp {
                fronts.push(queue, (newest, number, list));
                continue;
            }
            let slot_bytes = partition.nodes.get(front).slot_bytes();
            fronts.slot_bytes[queue as usize] = fronts.slot_bytes[queue as usize].saturating_sub(slot_bytes);
            match partition.examine(rules, front) {
                Some(gone) => {
                    rests.iter_mut().for_each(|rest| rest.less(&gone));
                    removed.push(gone);
                }
                None => {
                    let node = partition.nodes.get(front);
                    fronts.slot_bytes[node.queue() as usize] += slot_bytes;
                    let is_only =
                        partition.front(list, node.queue()).is_some_and(|(first, _)| first == front);
                    if node.queue() != queue && is_only {
                        fronts.push(node.queue(), (node.stamp(), number, list));
                    }
                }
            }
            if let Some((_, next)) = partition.front(list, queue) {
                fronts.push(queue, (next, number, list));
            }
        }
    }

    /// Bytes of own blocks that could be evicted: those that are not pinned.
    pub(crate) fn evictable(&self, from: Candidates) -> u64 {
        self.fronts(from, None).slot_bytes.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes))
    }

    /// Own blocks that are pinned.
    pub(crate) fn pinned(&self) -> Pinned {
        let (fronts, totals) = (self.fronts(Candidates::Anywhere, None), self.totals(None));
        let unpinned = fronts.slot_bytes.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        Pinned {
            blocks: totals.own_blocks.saturating_sub(fronts.blocks),
            slot_bytes: totals.own_slot_bytes.saturating_sub(unpinned),
        }
    }

    fn fronts(&self, from: Candidates, namespace: Option<u16>) -> Fronts {
        let mut fronts = Fronts::default();
        for (number, partition) in self.shared.partitions.iter().enumerate() {
            let partition = lock(partition);
            for (id, list) in partition.lists.iter() {
                if !list.key.is_in(from) || namespace.is_some_and(|wanted| list.key.namespace != wanted) {
                    continue;
                }
                for queue in [Queue::Probation, Queue::Protected] {
                    let linked = &list.queues[queue as usize];
                    fronts.slot_bytes[queue as usize] += linked.slot_bytes;
                    fronts.blocks += linked.blocks;
                    if let Some((_, stamp)) = partition.front(id, queue) {
                        fronts.push(queue, (stamp, number, id));
                    }
                }
            }
        }
        fronts
    }

    /// The segments with own blocks, the ones that are worth least by their bytes first. A segment without blocks is not
    /// among them. Looks at all blocks.
    pub(crate) fn survey(&self) -> Vec<SegmentWorth> {
        #[derive(Default)]
        struct Sum {
            worth: u128,
            slot_bytes: u64,
            is_in_use: bool,
        }
        let ages = self.ages();
        let mut segments = HashMap::<u32, Sum>::new();
        self.shared.step_through(|partition, ids| {
            for id in ids {
                let node = partition.nodes.get(id);
                // Held ones are own, and may be in no list any more.
                if node.is(Mark::Held) {
                    segments.entry(node.slot().segment).or_default().is_in_use = true;
                }
                if !node.is(Mark::Visible) || !partition.is_own(id) {
                    continue;
                }
                let sum = segments.entry(node.slot().segment).or_default();
                sum.is_in_use |= node.is(Mark::Pinned);
                let worth = self.shared.rules.policy.worth(node.queue(), node.uses(), ages.recency(node));
                sum.worth += u128::from(worth) * u128::from(node.slot_bytes());
                sum.slot_bytes += node.slot_bytes();
            }
        });
        // By bytes of blocks, not in all: one that was just made is as good as what it has got so far.
        let density = |sum: &Sum| (sum.worth / u128::from(sum.slot_bytes.max(1))) as u64;
        let worth = |(segment, sum): (u32, Sum)| SegmentWorth {
            segment,
            worth: density(&sum),
            is_in_use: sum.is_in_use,
        };
        let mut worths: Vec<_> = segments.into_iter().map(worth).collect();
        worths.sort_unstable_by_key(|worth| (worth.worth, worth.segment));
        worths
    }

    /// The own blocks in segments for which `is_it`, by their places. Looks at all blocks.
    pub(crate) fn placed(&self, is_it: impl Fn(u32) -> bool) -> Vec<PlacedBlock> {
        let mut placed = Vec::new();
        self.shared.step_through(|partition, ids| {
            for id in ids {
                let node = partition.nodes.get(id);
                if node.is(Mark::Visible) && partition.is_own(id) && is_it(node.slot().segment) {
                    placed.push(PlacedBlock {
                        fingerprint: node.fingerprint,
                        sequence: node.sequence(),
                        slot: node.slot(),
                        slot_bytes: node.slot_bytes(),
                    });
                }
            }
        });
        placed.sort_unstable_by_key(|block| block.slot);
        placed
    }

    /// Whether blocks should stay, `None` for those that are gone.
    pub(crate) fn heat(&self, blocks: &[PlacedBlock]) -> Vec<Option<Heat>> {
        let ages = self.ages();
        let heat = |block: &PlacedBlock| {
            let partition = self.shared.lock_of(&block.fingerprint);
            let node = partition.nodes.get(partition.find_placed(block)?);
            Some(if node.is(Mark::Pinned) {
                Heat::Pinned
            } else if node.is(Mark::Held) {
                Heat::Read
            } else if self.shared.rules.policy.is_hot(node.queue(), node.uses(), ages.recency(node)) {
                Heat::Hot
            } else {
                Heat::Cold
            })
        };
        blocks.iter().map(heat).collect()
    }

    /// Evicts these blocks, unless they are pinned or read, whatever the policy says of them.
    pub(crate) fn evict_placed(&self, blocks: &[PlacedBlock]) -> Vec<Removed> {
        let evict = |block: &PlacedBlock| {
            let mut partition = self.shared.lock_of(&block.fingerprint);
            let id = partition.find_placed(block)?;
            let node = partition.nodes.get(id);
            let may_go = !node.is(Mark::Pinned) && !node.is(Mark::Held);
            may_go.then(|| partition.evict(id))
        };
        blocks.iter().filter_map(evict).collect()
    }

    /// Removes these blocks, also those that are read. Returns those that were removed, and those that are pinned, which stay.
    pub(crate) fn remove_placed(&self, blocks: &[PlacedBlock]) -> (Vec<Removed>, Vec<PlacedBlock>) {
        let (mut removed, mut pinned) = (Vec::new(), Vec::new());
        for block in blocks {
            let mut partition = self.shared.lock_of(&block.fingerprint);
            match partition.find_placed(block) {
                Some(id) if partition.is_pinned(id) => pinned.push(*block),
                Some(id) => removed.push(partition.remove(id)),
                None => {}
            }
        }
        (removed, pinned)
    }

    /// Holds a block as a reader does, which is no use of it.
    pub(crate) fn hold(&self, block: &PlacedBlock) -> Option<(Entry, ReadHold)> {
        let number = self.shared.partition_of(&block.fingerprint);
        let mut partition = lock(&self.shared.partitions[number]);
        let node = partition.find_placed(block)?;
        partition.hold(node);
        Some((partition.entry(node), ReadHold { shared: Arc::clone(&self.shared), partition: number, node }))
    }

    /// Gives a block another place, and takes a use from it, as the policy does with what it lets stay. The block as it
    /// was before; `None` if it is gone.
    pub(crate) fn relocate(&self, block: &PlacedBlock, entry: &Entry) -> Option<Removed> {
        let rules = &self.shared.rules;
        let stamp = rules.tick();
        let mut partition = self.shared.lock_of(&block.fingerprint);
        let node = *partition.nodes.get(partition.find_placed(block)?);
        let inserted = partition.insert(rules, block.fingerprint, entry, Existing::Replace, stamp);
        let Inserted::Replaced(removed) = inserted else { return None };
        partition.inherit(rules, &node);
        Some(removed)
    }

    fn ages(&self) -> Ages {
        let fronts = self.fronts(Candidates::Anywhere, None);
        let newest = self.shared.rules.clock.load(Ordering::Relaxed);
        let oldest =
            fronts.heaps.iter().filter_map(|heap| heap.peek()).map(|Reverse((stamp, ..))| *stamp).min();
        let oldest = oldest.unwrap_or(newest);
        Ages { oldest, span: newest.saturating_sub(oldest).max(1) }
    }
}

/// The stamps of the blocks that may be evicted.
struct Ages {
    oldest: u64,
    span: u64,
}

impl Ages {
    /// 0 for what has been in its queue for the longest time, 1000 for what has just come.
    fn recency(&self, node: &Node) -> u64 {
        node.stamp().saturating_sub(self.oldest).min(self.span) * 1000 / self.span
    }
}

impl Fronts {
    fn push(&mut self, queue: Queue, front: (u64, usize, ListId)) {
        self.heaps[queue as usize].push(Reverse(front));
    }

    /// The oldest front of a queue, or of the other if that has none.
    fn pop(&mut self, wanted: Queue) -> Option<(Queue, Front)> {
        let other = match wanted {
            Queue::Probation => Queue::Protected,
            Queue::Protected => Queue::Probation,
        };
        [wanted, other]
            .into_iter()
            .find_map(|queue| self.heaps[queue as usize].pop().map(|front| (queue, front)))
    }
}
