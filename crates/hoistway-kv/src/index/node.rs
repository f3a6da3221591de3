//! A block in 64 bytes, and the memory that they are in.
#![forbid(unsafe_code)]

use super::{
    entry::{Entry, MAX_PAYLOAD_LEN, Slot},
    eviction::Queue,
};
use crate::{Fingerprint, format::BLOCK_LEN};

/// Number of a node in its partition.
pub(super) type NodeId = u32;
/// No node.
pub(super) const NONE: NodeId = u32::MAX;
/// Number of a list in its partition.
pub(super) type ListId = u16;

/// What is known of a block, packed: owner, namespace and class are the list's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) fingerprint: Fingerprint,
    sequence: u64,
    /// When it came to the back of its queue, by the index's clock (48 bits), and its list (16 bits).
    stamp_and_list: u64,
    slot: Slot,
    payload_len_low: u32,
    slot_blocks: u32,
    pub(super) expires: u32,
    pub(super) previous: NodeId,
    pub(super) next: NodeId,
    payload_len_high: u16,
    flags: u8,
    state: u8,
}

const _: () = assert!(size_of::<Node>() == 64);

const USES: u8 = 0b11;
const PROTECTED: u8 = 1 << 2;
const LINKED: u8 = 1 << 3;
const PINNED: u8 = 1 << 4;
const HELD: u8 = 1 << 5;
const VISIBLE: u8 = 1 << 6;

/// What may be true of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// It is in a queue.
    Linked = LINKED as isize,
    /// It must not be evicted.
    Pinned = PINNED as isize,
    /// The block has at least one reader.
    Held = HELD as isize,
    /// It is found. A node that is not is held, or free.
    Visible = VISIBLE as isize,
}

impl Node {
    pub(super) fn new(fingerprint: Fingerprint, entry: &Entry, list: ListId) -> Self {
        let payload_len = entry.payload_len.min(MAX_PAYLOAD_LEN);
        Self {
            fingerprint,
            sequence: entry.sequence,
            stamp_and_list: u64::from(list),
            slot: entry.slot,
            payload_len_low: payload_len as u32,
            slot_blocks: u32::try_from(entry.slot_bytes.div_ceil(BLOCK_LEN)).unwrap_or(u32::MAX),
            expires: entry.expires,
            previous: NONE,
            next: NONE,
            payload_len_high: (payload_len >> 32) as u16,
            flags: entry.flags,
            state: VISIBLE,
        }
    }

    fn free() -> Self {
        let slot = Slot { segment: 0, slot: 0 };
        Self {
            fingerprint: Fingerprint([0; 16]),
            sequence: 0,
            stamp_and_list: 0,
            slot,
            payload_len_low: 0,
            slot_blocks: 0,
            expires: 0,
            previous: NONE,
            next: NONE,
            payload_len_high: 0,
            flags: 0,
            state: 0,
        }
    }

    /// The entry, where owner, namespace and class are those of its list.
    pub(super) fn entry(&self, owner: u16, namespace: u16, class: u8) -> Entry {
        Entry {
            owner,
            namespace,
            class,
            flags: self.flags,
            slot: self.slot,
            slot_bytes: self.slot_bytes(),
            payload_len: self.payload_len(),
            sequence: self.sequence,
            expires: self.expires,
        }
    }

    /// Takes over what may change while the block is there.
    pub(super) fn amend(&mut self, entry: &Entry) {
        self.flags = entry.flags;
        self.slot = entry.slot;
        self.sequence = entry.sequence;
        self.expires = entry.expires;
    }

    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(super) fn slot(&self) -> Slot {
        self.slot
    }

    pub(super) fn slot_bytes(&self) -> u64 {
        u64::from(self.slot_blocks) * BLOCK_LEN
    }

    pub(super) fn payload_len(&self) -> u64 {
        u64::from(self.payload_len_high) << 32 | u64::from(self.payload_len_low)
    }

    pub(super) fn list(&self) -> ListId {
        self.stamp_and_list as ListId
    }

    pub(super) fn stamp(&self) -> u64 {
        self.stamp_and_list >> ListId::BITS
    }

    pub(super) fn set_stamp(&mut self, stamp: u64) {
        self.stamp_and_list = stamp << ListId::BITS | u64::from(self.list());
    }

    pub(super) fn is_expired(&self, now: u32) -> bool {
        self.expires != 0 && self.expires <= now
    }

    pub(super) fn uses(&self) -> u8 {
        self.state & USES
    }

    pub(super) fn set_uses(&mut self, uses: u8) {
        self.state = self.state & !USES | uses.min(USES);
    }

    pub(super) fn queue(&self) -> Queue {
        if self.state & PROTECTED == 0 { Queue::Probation } else { Queue::Protected }
    }

    pub(super) fn set_queue(&mut self, queue: Queue) {
        match queue {
            Queue::Probation => self.state &= !PROTECTED,
            Queue::Protected => self.state |= PROTECTED,
        }
    }

    pub(super) fn is(&self, mark: Mark) -> bool {
        self.state & mark as u8 != 0
    }

    pub(super) fn mark(&mut self, mark: Mark) {
        self.state |= mark as u8;
    }

    pub(super) fn unmark(&mut self, mark: Mark) {
        self.state &= !(mark as u8);
    }
}

/// Nodes in an allocation.
const CHUNK_NODES: usize = 32;

/// Nodes by number. They never move, and memory grows by a chunk at a time, so that none is wasted.
#[derive(Debug)]
pub(super) struct Nodes {
    chunks: Vec<Box<[Node]>>,
    /// A list of nodes to use again, by their `next`.
    free: NodeId,
    /// Nodes that were ever used: those from here on are new.
    used: NodeId,
}

impl Nodes {
    pub(super) fn new() -> Self {
        Self { chunks: Vec::new(), free: NONE, used: 0 }
    }

    /// Takes a node in.
    pub(super) fn insert(&mut self, node: Node) -> NodeId {
        let id = if self.free != NONE {
            let id = self.free;
            self.free = self.get(id).next;
            id
        } else {
            let id = self.used;
            if id as usize == self.chunks.len() * CHUNK_NODES {
                self.chunks.push(vec![Node::free(); CHUNK_NODES].into_boxed_slice());
            }
            self.used += 1;
            id
        };
        *self.get_mut(id) = node;
        id
    }

    /// Lets a node be used again.
    pub(super) fn remove(&mut self, id: NodeId) {
        let next = self.free;
        *self.get_mut(id) = Node { next, ..Node::free() };
        self.free = id;
    }

    pub(super) fn get(&self, id: NodeId) -> &Node {
        &self.chunks[id as usize / CHUNK_NODES][id as usize % CHUNK_NODES]
    }

    pub(super) fn get_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.chunks[id as usize / CHUNK_NODES][id as usize % CHUNK_NODES]
    }

    /// One more than the largest number in use.
    pub(super) fn end(&self) -> NodeId {
        self.used
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.chunks.capacity() * size_of::<Box<[Node]>>()
            + self.chunks.len() * CHUNK_NODES * size_of::<Node>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_node_says_what_the_entry_said(
            owner: u16, namespace: u16, class: u8, flags: u8, segment: u32, slot: u32, slot_blocks: u32,
            payload_len in 0..=MAX_PAYLOAD_LEN, sequence: u64, expires: u32, list: u16, stamp in 0u64..1 << 48,
        ) {
            let entry = Entry {
                owner, namespace, class, flags, slot: Slot { segment, slot },
                slot_bytes: u64::from(slot_blocks) * BLOCK_LEN, payload_len, sequence, expires,
            };
            let mut node = Node::new(Fingerprint([7; 16]), &entry, list);
            node.set_stamp(stamp);
            node.set_uses(2);
            node.set_queue(Queue::Protected);
            node.mark(Mark::Held);
            node.mark(Mark::Pinned);
            node.unmark(Mark::Held);
            prop_assert_eq!(node.entry(owner, namespace, class), entry);
            prop_assert_eq!((node.list(), node.stamp(), node.uses()), (list, stamp, 2));
            prop_assert_eq!(node.queue(), Queue::Protected);
            prop_assert!(node.is(Mark::Pinned) && node.is(Mark::Visible) && !node.is(Mark::Held));
        }
    }

    #[test]
    fn nodes_are_used_again() {
        let entry = Node::free().entry(0, 0, 0);
        let mut nodes = Nodes::new();
        let ids: Vec<_> =
            (0..300).map(|_| nodes.insert(Node::new(Fingerprint([1; 16]), &entry, 0))).collect();
        assert_eq!(ids, (0..300).collect::<Vec<_>>());
        nodes.remove(5);
        nodes.remove(200);
        let again = [(); 3].map(|()| nodes.insert(Node::new(Fingerprint([2; 16]), &entry, 0)));
        assert_eq!(again, [200, 5, 300]);
    }
}
