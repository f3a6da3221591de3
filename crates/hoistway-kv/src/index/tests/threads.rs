//! Many threads at once: a slot never has two blocks, nor is it lost.
#![forbid(unsafe_code)]

use super::super::{Candidates, Entry, Existing, Index, IndexOptions, Inserted, Lookup, Reuse, Slot, Want};
use super::{block, fingerprint};
use crate::{Admission, Eviction};
use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};

const SLOTS: u32 = 256;
const KEYS: u64 = 1000;
const THREADS: u64 = 6;
const ROUNDS: u64 = 4000;

/// Slots, as a layout has them: who is in each, and which are free.
struct Slots {
    contents: Vec<AtomicU64>,
    free: Mutex<Vec<u32>>,
}

impl Slots {
    fn give_back(&self, slot: Slot) {
        let mut free = self.free.lock().unwrap();
        assert!(!free.contains(&slot.slot), "slot {} was given back twice", slot.slot);
        free.push(slot.slot);
    }
}

fn run(eviction: Eviction) {
    let index = Index::new(IndexOptions { eviction, admission: Admission::SecondTouch });
    let slots = Slots {
        contents: (0..SLOTS).map(|_| AtomicU64::new(u64::MAX)).collect(),
        free: Mutex::new((0..SLOTS).collect()),
    };
    let sequence = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (index, slots, sequence) = (&index, &slots, &sequence);
            scope.spawn(move || {
                let mut random = thread + 1;
                for round in 0..ROUNDS {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let key = (random >> 33) % KEYS;
                    let found = index.get(&fingerprint(key), 1);
                    if let Lookup::Found(entry, hold) = found {
                        // As long as the hold lives, the slot has what the entry says.
                        let contents = &slots.contents[entry.slot.slot as usize];
                        assert_eq!(contents.load(Ordering::SeqCst), entry.sequence);
                        if round % 8 == 0 {
                            std::thread::yield_now();
                        }
                        assert_eq!(contents.load(Ordering::SeqCst), entry.sequence);
                        drop(hold);
                    } else {
                        store(index, slots, sequence, key);
                    }
                    match random >> 60 {
                        0 => {
                            if let Some(removed) = index.remove_if(&fingerprint(key), |_, pinned| !pinned)
                                && removed.reuse == Reuse::Now
                            {
                                slots.give_back(removed.entry.slot);
                            }
                        }
                        1 if index.pin(&fingerprint(key)) => index.unpin(&fingerprint(key)),
                        2 => drop(index.touch(&[key, key / 2].map(fingerprint))),
                        3 => {
                            index.survey();
                        }
                        _ => {}
                    }
                    index.freed().into_iter().for_each(|slot| slots.give_back(slot));
                }
            });
        }
    });
    let there = index.totals(None).own_blocks;
    assert_eq!(there + slots.free.lock().unwrap().len() as u64, u64::from(SLOTS));
    let all = Want { from: Candidates::Anywhere, bytes: u64::MAX };
    assert_eq!(index.evict(&all, 1).len() as u64, there);
}

fn store(index: &Index, slots: &Slots, sequence: &AtomicU64, key: u64) {
    let free = slots.free.lock().unwrap().pop();
    let Some(slot) = free else {
        let want = Want { from: Candidates::Anywhere, bytes: 8 * (64 << 10) };
        for removed in index.evict(&want, 1) {
            assert_eq!(removed.reuse, Reuse::Now);
            slots.give_back(removed.entry.slot);
        }
        return;
    };
    let sequence = sequence.fetch_add(1, Ordering::SeqCst);
    slots.contents[slot as usize].store(sequence, Ordering::SeqCst);
    let slot = Slot { segment: slot / 16, slot };
    let entry = Entry { slot, sequence, ..block(0) };
    match index.insert(fingerprint(key), &entry, Existing::Replace) {
        Inserted::Replaced(removed) if removed.reuse == Reuse::Now => slots.give_back(removed.entry.slot),
        _ => {}
    }
}

#[test]
fn slots_are_neither_shared_nor_lost_with_s3fifo() {
    run(Eviction::S3Fifo);
}

#[test]
fn slots_are_neither_shared_nor_lost_with_lru() {
    run(Eviction::Lru);
}
