//! Lanes: the blocks of one owner, namespace and class in a shard, in queues.
#![forbid(unsafe_code)]

use super::{
    entry::Candidates,
    eviction::Queue,
    node::{LaneId, Mark, NONE, Node, NodeId, Nodes},
    quota::NamespaceUse,
};
use hashbrown::HashMap;
use std::sync::{Arc, atomic::Ordering};

/// What the blocks of a lane have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LaneKey {
    pub(super) owner: u16,
    pub(super) namespace: u16,
    pub(super) class: u8,
}

impl LaneKey {
    pub(super) fn is_own(self) -> bool {
        self.owner == 0
    }

    /// Whether its blocks may be evicted, and are wanted.
    pub(super) fn is_in(self, from: Candidates) -> bool {
        self.is_own()
            && match from {
                Candidates::Anywhere => true,
                Candidates::Namespace(namespace) => self.namespace == namespace,
            }
    }
}

/// A queue: a list through the nodes, in the order of their stamps.
#[derive(Debug)]
pub(super) struct List {
    pub(super) front: NodeId,
    back: NodeId,
    pub(super) blocks: u64,
    pub(super) slot_bytes: u64,
}

impl Default for List {
    fn default() -> Self {
        Self { front: NONE, back: NONE, blocks: 0, slot_bytes: 0 }
    }
}

impl List {
    fn push_back(&mut self, nodes: &mut Nodes, id: NodeId, stamp: u64) {
        let back = std::mem::replace(&mut self.back, id);
        if back == NONE {
            self.front = id;
        } else {
            nodes.get_mut(back).next = id;
        }
        let node = nodes.get_mut(id);
        node.previous = back;
        node.next = NONE;
        node.set_stamp(stamp);
        self.blocks += 1;
        self.slot_bytes += node.slot_bytes();
    }

    fn remove(&mut self, nodes: &mut Nodes, id: NodeId) {
        let node = *nodes.get(id);
        match node.previous {
            NONE => self.front = node.next,
            previous => nodes.get_mut(previous).next = node.next,
        }
        match node.next {
            NONE => self.back = node.previous,
            next => nodes.get_mut(next).previous = node.previous,
        }
        self.blocks -= 1;
        self.slot_bytes -= node.slot_bytes();
    }
}

/// A lane.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) key: LaneKey,
    /// By [`Queue`]. Blocks of others, and pinned ones, are in none.
    pub(super) queues: [List; 2],
    /// All its blocks, also those in no queue.
    pub(super) blocks: u64,
    pub(super) slot_bytes: u64,
    pub(super) payload_bytes: u64,
    namespace: Arc<NamespaceUse>,
}

/// The lanes of a shard, by number. A lane without blocks gives its number back.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    by_key: HashMap<LaneKey, LaneId>,
    free: Vec<LaneId>,
}

impl Lanes {
    /// The lane for blocks of this key, or `None` if there is no number for it any more.
    pub(super) fn of(
        &mut self,
        key: LaneKey,
        namespace: impl FnOnce() -> Arc<NamespaceUse>,
    ) -> Option<LaneId> {
        if let Some(&id) = self.by_key.get(&key) {
            return Some(id);
        }
        let id = match self.free.pop() {
            Some(id) => id,
            None => LaneId::try_from(self.lanes.len()).ok()?,
        };
        let lane = Lane {
            key,
            queues: Default::default(),
            blocks: 0,
            slot_bytes: 0,
            payload_bytes: 0,
            namespace: namespace(),
        };
        match self.lanes.get_mut(usize::from(id)) {
            Some(free) => *free = lane,
            None => self.lanes.push(lane),
        }
        self.by_key.insert(key, id);
        Some(id)
    }

    pub(super) fn get(&self, id: LaneId) -> &Lane {
        &self.lanes[usize::from(id)]
    }

    /// Those that have blocks, with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (LaneId, &Lane)> {
        self.lanes
            .iter()
            .enumerate()
            .filter(|(_, lane)| lane.blocks > 0)
            .map(|(id, lane)| (id as LaneId, lane))
    }

    /// Counts a block in.
    pub(super) fn enter(&mut self, node: &Node) {
        let lane = &mut self.lanes[usize::from(node.lane())];
        lane.blocks += 1;
        lane.slot_bytes += node.slot_bytes();
        lane.payload_bytes += node.payload_len();
        if lane.key.is_own() {
            lane.namespace.own_bytes.fetch_add(node.slot_bytes(), Ordering::Relaxed);
        } else {
            lane.namespace.enter(lane.key.owner, node.slot_bytes());
        }
    }

    /// Counts a block out. The lane may be gone afterwards.
    pub(super) fn leave(&mut self, node: &Node) {
        let id = node.lane();
        let lane = &mut self.lanes[usize::from(id)];
        lane.blocks -= 1;
        lane.slot_bytes -= node.slot_bytes();
        lane.payload_bytes -= node.payload_len();
        if lane.key.is_own() {
            lane.namespace.own_bytes.fetch_sub(node.slot_bytes(), Ordering::Relaxed);
        } else {
            lane.namespace.leave(lane.key.owner, node.slot_bytes());
        }
        if lane.blocks == 0 {
            self.by_key.remove(&lane.key);
            self.free.push(id);
        }
    }

    /// Puts a block at the back of a queue of its lane.
    pub(super) fn link(&mut self, nodes: &mut Nodes, id: NodeId, queue: Queue, stamp: u64) {
        let node = nodes.get_mut(id);
        node.set_queue(queue);
        node.mark(Mark::Linked);
        self.lanes[usize::from(node.lane())].queues[queue as usize].push_back(nodes, id, stamp);
    }

    /// Takes a block out of its queue, if it is in one.
    pub(super) fn unlink(&mut self, nodes: &mut Nodes, id: NodeId) {
        let node = nodes.get_mut(id);
        if !node.is(Mark::Linked) {
            return;
        }
        node.unmark(Mark::Linked);
        let (lane, queue) = (node.lane(), node.queue());
        self.lanes[usize::from(lane)].queues[queue as usize].remove(nodes, id);
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.lanes.capacity() * size_of::<Lane>()
            + self.by_key.capacity() * (size_of::<(LaneKey, LaneId)>() + 1)
            + self.free.capacity() * size_of::<LaneId>()
    }
}
