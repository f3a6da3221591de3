//! A part of the index, under one lock: the blocks whose fingerprints fall to it.
#![forbid(unsafe_code)]

use super::{
    entry::{Entry, Existing, Inserted, PlacedBlock, Removed, Reuse, Slot, Totals},
    eviction::{Fate, OnUse, Policy, Queue},
    eviction_list::{EvictionLists, ListKey},
    node::{Mark, NONE, Node, NodeId, Nodes},
    quota::Namespaces,
    recent::Recent,
};
use crate::Fingerprint;
use hashbrown::HashTable;
use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
};

/// What the partitions share.
pub(super) struct Rules {
    pub(super) policy: &'static dyn Policy,
    pub(super) namespaces: Namespaces,
    /// Counts arrivals at the backs of queues. Within a queue, and so by merging in all, blocks are in its order.
    pub(super) clock: AtomicU64,
}

impl Rules {
    pub(super) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }
}

/// Fewest evicted blocks, or missed ones, that are remembered: else as many as there are blocks. Prompts come back after a
/// long time: with half as many of the former, traces of them found up to three blocks in a hundred less.
const LEAST_REMEMBERED: usize = 64;

/// Instead of a time: the block was not only asked for, but there to be stored.
const OFFERED: u32 = 0;

pub(super) struct Partition {
    /// Nodes by fingerprint, with 32 bits of it, so that no node is fetched that is not meant.
    table: HashTable<(NodeId, u32)>,
    pub(super) nodes: Nodes,
    pub(super) lists: EvictionLists,
    /// How many read a node.
    holds: HashMap<NodeId, u32>,
    /// By fingerprint, as a pin outlives the block that it was meant for if that is damaged, and written anew.
    pins: HashMap<Fingerprint, u32>,
    /// What was evicted and remembered.
    ghosts: Recent<()>,
    /// What was not there: since when it has been asked for, or [`OFFERED`].
    missed: Recent<u32>,
    /// No block expires before this second.
    earliest: u32,
    /// When expired blocks were last looked for.
    swept: u32,
}

impl Partition {
    pub(super) fn new() -> Self {
        Self {
            table: HashTable::new(),
            nodes: Nodes::new(),
            lists: EvictionLists::default(),
            holds: HashMap::new(),
            pins: HashMap::new(),
            ghosts: Recent::default(),
            missed: Recent::default(),
            earliest: u32::MAX,
            swept: 0,
        }
    }

    pub(super) fn find(&self, fingerprint: &Fingerprint) -> Option<NodeId> {
        let tag = fingerprint.tag();
        let same =
            |(id, other): &(NodeId, u32)| *other == tag && self.nodes.get(*id).fingerprint == *fingerprint;
        self.table.find(hash(fingerprint), same).map(|(id, _)| *id)
    }

    pub(super) fn contains(&self, fingerprint: &Fingerprint, now: u32) -> bool {
        self.find(fingerprint).is_some_and(|id| !self.nodes.get(id).is_expired(now))
    }

    /// The only node that a fingerprint's may be, unless two have the same tag: [`Partition::contains_candidate`] sees to
    /// that. To ask for all of a batch's first lets their nodes be fetched from memory at the same time.
    pub(super) fn candidate(&self, fingerprint: &Fingerprint) -> NodeId {
        let tag = fingerprint.tag();
        self.table.find(hash(fingerprint), |(_, other)| *other == tag).map_or(NONE, |(id, _)| *id)
    }

    /// As [`Partition::contains`], with what [`Partition::candidate`] said.
    pub(super) fn contains_candidate(&self, candidate: NodeId, fingerprint: &Fingerprint, now: u32) -> bool {
        if candidate == NONE {
            return false;
        }
        let node = self.nodes.get(candidate);
        if node.fingerprint == *fingerprint { !node.is_expired(now) } else { self.contains(fingerprint, now) }
    }

    pub(super) fn entry(&self, id: NodeId) -> Entry {
        let node = self.nodes.get(id);
        let key = self.lists.get(node.list()).key;
        node.entry(key.owner, key.namespace, key.class)
    }

    /// The node of an own block that lies where it was.
    pub(super) fn find_placed(&self, block: &PlacedBlock) -> Option<NodeId> {
        let id = self.find(&block.fingerprint)?;
        let node = self.nodes.get(id);
        (node.sequence() == block.sequence && node.slot() == block.slot && self.is_own(id)).then_some(id)
    }

    pub(super) fn is_own(&self, id: NodeId) -> bool {
        self.lists.get(self.nodes.get(id).list()).key.is_own()
    }

    /// Makes the table large enough for so many blocks more.
    pub(super) fn reserve(&mut self, blocks: usize) {
        let nodes = &self.nodes;
        self.table.reserve(blocks, |(id, _)| hash(&nodes.get(*id).fingerprint));
    }

    pub(super) fn insert(
        &mut self,
        rules: &Rules,
        fingerprint: Fingerprint,
        entry: &Entry,
        existing: Existing,
        stamp: u64,
    ) -> Inserted {
        let found = self.find(&fingerprint);
        if let (Some(id), Existing::Keep) = (found, existing) {
            return Inserted::Kept(self.entry(id));
        }
        let key = ListKey { owner: entry.owner, namespace: entry.namespace, class: entry.class };
        let Some(list) = self.lists.of(key, || rules.namespaces.of(entry.namespace)) else {
            return Inserted::Refused;
        };
        let node = Node::new(fingerprint, entry, list);
        self.lists.enter(&node);
        let replaced = found.map(|id| self.remove(id));
        let id = self.nodes.insert(node);
        let nodes = &self.nodes;
        let rehash = |(id, _): &(NodeId, u32)| hash(&nodes.get(*id).fingerprint);
        self.table.insert_unique(hash(&fingerprint), (id, fingerprint.tag()), rehash);
        if entry.expires != 0 {
            self.earliest = self.earliest.min(entry.expires);
        }
        let is_remembered = self.ghosts.remove(&fingerprint);
        self.missed.remove(&fingerprint);
        let queue = rules.policy.enter(is_remembered);
        self.nodes.get_mut(id).set_queue(queue);
        if self.pins.contains_key(&fingerprint) {
            self.nodes.get_mut(id).mark(Mark::Pinned);
        } else if key.is_own() {
            self.lists.link(&mut self.nodes, id, queue, stamp);
        }
        replaced.map_or(Inserted::New, Inserted::Replaced)
    }

    /// Makes a block a miss.
    pub(super) fn remove(&mut self, id: NodeId) -> Removed {
        let entry = self.entry(id);
        let node = *self.nodes.get(id);
        if let Ok(found) = self.table.find_entry(hash(&node.fingerprint), |(other, _)| *other == id) {
            found.remove();
        }
        self.lists.unlink(&mut self.nodes, id);
        self.lists.leave(&node);
        let reuse = if node.is(Mark::Held) {
            self.nodes.get_mut(id).unmark(Mark::Visible);
            Reuse::Later
        } else {
            self.nodes.remove(id);
            Reuse::Now
        };
        Removed { fingerprint: node.fingerprint, entry, reuse }
    }

    pub(super) fn amend(&mut self, id: NodeId, change: impl FnOnce(&mut Entry)) {
        let mut entry = self.entry(id);
        change(&mut entry);
        if entry.expires != 0 {
            self.earliest = self.earliest.min(entry.expires);
        }
        self.nodes.get_mut(id).amend(&entry);
    }

    /// Counts a use of a block.
    pub(super) fn used(&mut self, rules: &Rules, id: NodeId) {
        let node = self.nodes.get_mut(id);
        match rules.policy.used(node.uses()) {
            OnUse::Count(uses) => node.set_uses(uses),
            OnUse::MoveToBack => {
                if node.is(Mark::Linked) {
                    let queue = node.queue();
                    self.lists.unlink(&mut self.nodes, id);
                    self.lists.link(&mut self.nodes, id, queue, rules.tick());
                }
            }
        }
    }

    /// Keeps the slot of an own block from being used again.
    pub(super) fn hold(&mut self, id: NodeId) {
        *self.holds.entry(id).or_insert(0) += 1;
        self.nodes.get_mut(id).mark(Mark::Held);
    }

    /// Ends a hold. Returns the slot if the block was removed in the meantime and this was its last reader.
    pub(super) fn release(&mut self, id: NodeId) -> Option<Slot> {
        if let Some(holds) = self.holds.get_mut(&id) {
            *holds -= 1;
            if *holds > 0 {
                return None;
            }
            self.holds.remove(&id);
        }
        let node = self.nodes.get_mut(id);
        node.unmark(Mark::Held);
        if node.is(Mark::Visible) {
            return None;
        }
        let slot = node.slot();
        self.nodes.remove(id);
        Some(slot)
    }

    pub(super) fn pin(&mut self, id: NodeId) {
        let node = self.nodes.get_mut(id);
        node.mark(Mark::Pinned);
        *self.pins.entry(node.fingerprint).or_insert(0) += 1;
        self.lists.unlink(&mut self.nodes, id);
    }

    /// Undoes a pin. A block that is not pinned any more is as if it had just come.
    pub(super) fn unpin(&mut self, rules: &Rules, fingerprint: &Fingerprint) {
        let Some(pins) = self.pins.get_mut(fingerprint) else { return };
        *pins -= 1;
        if *pins > 0 {
            return;
        }
        self.pins.remove(fingerprint);
        let Some(id) = self.find(fingerprint) else { return };
        let is_own = self.is_own(id);
        let node = self.nodes.get_mut(id);
        node.unmark(Mark::Pinned);
        let queue = node.queue();
        if is_own {
            self.lists.link(&mut self.nodes, id, queue, rules.tick());
        }
    }

    /// Makes a block a miss, and remembers it if nothing speaks for it yet.
    pub(super) fn evict(&mut self, id: NodeId) -> Removed {
        let is_remembered = self.nodes.get(id).queue() == Queue::Probation;
        let removed = self.remove(id);
        if is_remembered {
            let most = self.table.len().max(LEAST_REMEMBERED);
            self.ghosts.insert(&removed.fingerprint, (), most);
        }
        removed
    }

    /// A block has taken the place of another copy: it is as hot as that was, but for one use.
    pub(super) fn inherit(&mut self, rules: &Rules, before: &Node) {
        let Some(id) = self.find(&before.fingerprint) else { return };
        let (queue, uses) = rules.policy.carried(before.queue(), before.uses());
        self.nodes.get_mut(id).set_uses(uses);
        if self.nodes.get(id).is(Mark::Linked) {
            self.lists.unlink(&mut self.nodes, id);
            self.lists.link(&mut self.nodes, id, queue, rules.tick());
        } else {
            self.nodes.get_mut(id).set_queue(queue);
        }
    }

    /// Decides about the block at the front of a queue: the removed block, or `None` if it has gone to the back of one.
    pub(super) fn examine(&mut self, rules: &Rules, id: NodeId) -> Option<Removed> {
        let node = self.nodes.get_mut(id);
        let (queue, is_held) = (node.queue(), node.is(Mark::Held));
        let kept_in = match rules.policy.decide(queue, node.uses()) {
            Fate::Keep { queue, uses } => {
                node.set_uses(uses);
                queue
            }
            Fate::Evict | Fate::EvictAndRemember if is_held => queue,
            Fate::Evict => return Some(self.remove(id)),
            Fate::EvictAndRemember => return Some(self.evict(id)),
        };
        self.lists.unlink(&mut self.nodes, id);
        self.lists.link(&mut self.nodes, id, kept_in, rules.tick());
        None
    }

    /// Removes expired blocks that are not pinned, and adds own ones to `into`: at most `most` of those.
    pub(super) fn expire(
        &mut self,
        now: u32,
        most: usize,
        may_go: impl Fn(&Entry, &Node) -> bool,
        into: &mut Vec<Removed>,
    ) {
        if self.earliest > now || self.swept == now {
            return;
        }
        let mut earliest = u32::MAX;
        let end = into.len().saturating_add(most);
        for id in 0..self.nodes.end() {
            let node = self.nodes.get(id);
            if !node.is(Mark::Visible) || node.expires == 0 {
                continue;
            }
            let can_go = node.is_expired(now) && !node.is(Mark::Pinned) && may_go(&self.entry(id), node);
            if !can_go {
                earliest = earliest.min(node.expires);
                continue;
            }
            if into.len() >= end {
                return;
            }
            let removed = self.remove(id);
            if removed.entry.is_own() {
                into.push(removed);
            }
        }
        self.earliest = earliest;
        self.swept = now;
    }

    /// Remembers since when a block has been asked for, as it is not there.
    pub(super) fn miss(&mut self, fingerprint: &Fingerprint, now: u32) {
        if self.missed.get(fingerprint).is_none() {
            let most = self.table.len().max(LEAST_REMEMBERED);
            self.missed.insert(fingerprint, now.max(OFFERED + 1), most);
        }
    }

    /// Whether a block was here lately, was offered before, or was asked for at least so many seconds ago.
    pub(super) fn admit(&mut self, fingerprint: &Fingerprint, now: u32, apart: u32) -> bool {
        let is_known = self.find(fingerprint).is_some() || self.ghosts.get(fingerprint).is_some();
        let is_second = |since| since == OFFERED || now.saturating_sub(since) >= apart;
        if is_known || self.missed.get(fingerprint).is_some_and(is_second) {
            return true;
        }
        let most = self.table.len().max(LEAST_REMEMBERED);
        self.missed.insert(fingerprint, OFFERED, most);
        false
    }

    pub(super) fn is_pinned(&self, id: NodeId) -> bool {
        self.nodes.get(id).is(Mark::Pinned)
    }

    pub(super) fn totals(&self, totals: &mut Totals, is_wanted: impl Fn(u16) -> bool) {
        for (_, list) in self.lists.iter().filter(|(_, list)| is_wanted(list.key.namespace)) {
            if list.key.is_own() {
                totals.own_blocks += list.blocks;
                totals.own_slot_bytes += list.slot_bytes;
                totals.own_payload_bytes += list.payload_bytes;
            } else {
                totals.foreign_blocks += list.blocks;
                totals.foreign_payload_bytes += list.payload_bytes;
            }
        }
    }

    /// The front of a queue of a list: its node and stamp.
    pub(super) fn front(&self, list: u16, queue: Queue) -> Option<(NodeId, u64)> {
        let front = self.lists.get(list).queues[queue as usize].front;
        (front != NONE).then(|| (front, self.nodes.get(front).stamp()))
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.table.allocation_size()
            + self.nodes.heap_bytes()
            + self.lists.heap_bytes()
            + self.holds.capacity() * (size_of::<(NodeId, u32)>() + 1)
            + self.pins.capacity() * (size_of::<(Fingerprint, u32)>() + 1)
            + self.ghosts.heap_bytes()
            + self.missed.heap_bytes()
    }
}

/// Fingerprints are hashes: eight bytes of one are as good as any. The first eight choose the partition, and tags.
fn hash(fingerprint: &Fingerprint) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&fingerprint.as_bytes()[8..]);
    u64::from_le_bytes(bytes)
}
