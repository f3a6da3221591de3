//! Blocks that are not there, but were met lately: what was evicted, and what was asked for.
#![forbid(unsafe_code)]

use crate::Fingerprint;
use hashbrown::HashTable;
use std::collections::VecDeque;

/// A set of fingerprints with a value each, cut to 32 bits to be small: one in thousands of strangers is mistaken for a
/// member, which costs nothing but a worse guess. The oldest members make room for new ones.
#[derive(Debug)]
pub(crate) struct Recent<V> {
    order: VecDeque<u32>,
    members: HashTable<(u32, V)>,
}

impl<V> Default for Recent<V> {
    fn default() -> Self {
        Self { order: VecDeque::new(), members: HashTable::new() }
    }
}

impl<V: Copy> Recent<V> {
    /// Adds a member, or changes its value, and lets the oldest go where there are more than `most`.
    pub(crate) fn insert(&mut self, fingerprint: &Fingerprint, value: V, most: usize) {
        let tag = fingerprint.tag();
        if let Some(member) = self.members.find_mut(spread(tag), |member| member.0 == tag) {
            member.1 = value;
            return;
        }
        while self.order.len() >= most.max(1) {
            let Some(oldest) = self.order.pop_front() else { break };
            self.remove_tag(oldest);
        }
        if self.order.len() == self.order.capacity() {
            // An eighth more, not twice as much: memory for each block is counted.
            self.order.reserve_exact(self.order.len() / 8 + 16);
        }
        self.order.push_back(tag);
        self.members.insert_unique(spread(tag), (tag, value), |member| spread(member.0));
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Its value, if it is a member.
    pub(crate) fn get(&self, fingerprint: &Fingerprint) -> Option<V> {
        let tag = fingerprint.tag();
        self.members.find(spread(tag), |member| member.0 == tag).map(|member| member.1)
    }

    /// Makes it a stranger; says whether it was a member. Its place in the order stays taken until its turn comes.
    pub(crate) fn remove(&mut self, fingerprint: &Fingerprint) -> bool {
        self.remove_tag(fingerprint.tag())
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.order.capacity() * size_of::<u32>() + self.members.allocation_size()
    }

    fn remove_tag(&mut self, tag: u32) -> bool {
        match self.members.find_entry(spread(tag), |member| member.0 == tag) {
            Ok(member) => {
                member.remove();
                true
            }
            Err(_) => false,
        }
    }
}

/// A hash of a tag whose upper bits, which tables use too, differ.
fn spread(tag: u32) -> u64 {
    u64::from(tag).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(number: u32) -> Fingerprint {
        let mut bytes = [0; 16];
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        Fingerprint(bytes)
    }

    #[test]
    fn the_oldest_make_room() {
        let mut recent = Recent::default();
        for number in 0..100 {
            recent.insert(&fingerprint(number), number, 10);
        }
        for number in 0..100 {
            assert_eq!(recent.get(&fingerprint(number)), (number >= 90).then_some(number));
        }
    }

    #[test]
    fn members_are_removed_and_come_again() {
        let mut recent = Recent::default();
        recent.insert(&fingerprint(1), 'a', 2);
        assert!(recent.remove(&fingerprint(1)));
        assert!(!recent.remove(&fingerprint(1)));
        recent.insert(&fingerprint(1), 'b', 2);
        recent.insert(&fingerprint(1), 'c', 2);
        assert_eq!(recent.get(&fingerprint(1)), Some('c'));
    }
}
