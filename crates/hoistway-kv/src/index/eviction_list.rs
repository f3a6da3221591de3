//! Eviction lists: the blocks of one owner, namespace and class in a partition, in queues.
#![forbid(unsafe_code)]

use super::{
    entry::Candidates,
    eviction::Queue,
    node::{ListId, Mark, NONE, Node, NodeId, Nodes},
    quota::NamespaceUse,
};
use hashbrown::HashMap;
use std::sync::{Arc, atomic::Ordering};

/// What the blocks of a list have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ListKey {
    pub(super) owner: u16,
    pub(super) namespace: u16,
    pub(super) class: u8,
}

impl ListKey {
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
pub(super) struct LinkedQueue {
    pub(super) front: NodeId,
    back: NodeId,
    pub(super) blocks: u64,
    pub(super) slot_bytes: u64,
}

impl Default for LinkedQueue {
    fn default() -> Self {
        Self { front: NONE, back: NONE, blocks: 0, slot_bytes: 0 }
    }
}

impl LinkedQueue {
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

/// A list.
#[derive(Debug)]
pub(super) struct EvictionList {
    pub(super) key: ListKey,
    /// By [`Queue`]. Blocks of others, and pinned ones, are in none.
    pub(super) queues: [LinkedQueue; 2],
    /// All its blocks, also those in no queue.
    pub(super) blocks: u64,
    pub(super) slot_bytes: u64,
    pub(super) payload_bytes: u64,
    namespace: Arc<NamespaceUse>,
}

/// The lists of a partition, by number. A list without blocks gives its number back.
#[derive(Debug, Default)]
pub(super) struct EvictionLists {
    lists: Vec<EvictionList>,
    by_key: HashMap<ListKey, ListId>,
    free: Vec<ListId>,
}

impl EvictionLists {
    /// The list for blocks of this key, or `None` if there is no number for it any more.
    pub(super) fn of(
        &mut self,
        key: ListKey,
        namespace: impl FnOnce() -> Arc<NamespaceUse>,
    ) -> Option<ListId> {
        if let Some(&id) = self.by_key.get(&key) {
            return Some(id);
        }
        let id = match self.free.pop() {
            Some(id) => id,
            None => ListId::try_from(self.lists.len()).ok()?,
        };
        let list = EvictionList {
            key,
            queues: Default::default(),
            blocks: 0,
            slot_bytes: 0,
            payload_bytes: 0,
            namespace: namespace(),
        };
        match self.lists.get_mut(usize::from(id)) {
            Some(free) => *free = list,
            None => self.lists.push(list),
        }
        self.by_key.insert(key, id);
        Some(id)
    }

    pub(super) fn get(&self, id: ListId) -> &EvictionList {
        &self.lists[usize::from(id)]
    }

    /// Those that have blocks, with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ListId, &EvictionList)> {
        self.lists
            .iter()
            .enumerate()
            .filter(|(_, list)| list.blocks > 0)
            .map(|(id, list)| (id as ListId, list))
    }

    /// Counts a block in.
    pub(super) fn enter(&mut self, node: &Node) {
        let list = &mut self.lists[usize::from(node.list())];
        list.blocks += 1;
        list.slot_bytes += node.slot_bytes();
        list.payload_bytes += node.payload_len();
        if list.key.is_own() {
            list.namespace.own_bytes.fetch_add(node.slot_bytes(), Ordering::Relaxed);
        } else {
            list.namespace.enter(list.key.owner, node.slot_bytes());
        }
    }

    /// Counts a block out. The list may be gone afterwards.
    pub(super) fn leave(&mut self, node: &Node) {
        let id = node.list();
        let list = &mut self.lists[usize::from(id)];
        list.blocks -= 1;
        list.slot_bytes -= node.slot_bytes();
        list.payload_bytes -= node.payload_len();
        if list.key.is_own() {
            list.namespace.own_bytes.fetch_sub(node.slot_bytes(), Ordering::Relaxed);
        } else {
            list.namespace.leave(list.key.owner, node.slot_bytes());
        }
        if list.blocks == 0 {
            self.by_key.remove(&list.key);
            self.free.push(id);
        }
    }

    /// Puts a block at the back of a queue of its list.
    pub(super) fn link(&mut self, nodes: &mut Nodes, id: NodeId, queue: Queue, stamp: u64) {
        let node = nodes.get_mut(id);
        node.set_queue(queue);
        node.mark(Mark::Linked);
        self.lists[usize::from(node.list())].queues[queue as usize].push_back(nodes, id, stamp);
    }

    /// Takes a block out of its queue, if it is in one.
    pub(super) fn unlink(&mut self, nodes: &mut Nodes, id: NodeId) {
        let node = nodes.get_mut(id);
        if !node.is(Mark::Linked) {
            return;
        }
        node.unmark(Mark::Linked);
        let (list, queue) = (node.list(), node.queue());
        self.lists[usize::from(list)].queues[queue as usize].remove(nodes, id);
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.lists.capacity() * size_of::<EvictionList>()
            + self.by_key.capacity() * (size_of::<(ListKey, ListId)>() + 1)
            + self.free.capacity() * size_of::<ListId>()
    }
}
