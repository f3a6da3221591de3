//! Memory for each block, and, on demand, time for each key.
#![forbid(unsafe_code)]

use super::super::{Candidates, Existing, Index, IndexOptions, Lookup, Want};
use super::{block, fingerprint};
use crate::{Eviction, Fingerprint};
use std::{hint::black_box, time::Instant};

#[test]
fn a_block_takes_at_most_110_bytes() {
    let index = Index::new(IndexOptions::default());
    let mut number = 0;
    // The worst that may come: tables have just grown, and as many blocks are remembered as there are.
    for blocks in [58_000u64, 60_000, 80_000, 118_000] {
        while number < 3 * blocks {
            index.insert(fingerprint(number), &block(number), Existing::Replace);
            number += 1;
            if index.totals_of_first_partition() > blocks / 64 {
                let want = Want { from: Candidates::Anywhere, bytes: 64 * (64 << 10) };
                index.evict(&want, 1);
            }
        }
        let there = index.totals(None).own_blocks;
        let each = index.heap_bytes() / there;
        assert!(each <= 110, "{each} bytes for each of {there} blocks");
    }
}

impl Index {
    /// How many blocks one partition has: a quick guess at how many there are.
    fn totals_of_first_partition(&self) -> u64 {
        let mut totals = super::super::Totals::default();
        super::super::lock(&self.shared.partitions[0]).totals(&mut totals, |_| true);
        totals.own_blocks
    }
}

#[test]
#[ignore = "prints times; run it with --release --ignored --nocapture"]
fn times() {
    const BLOCKS: u64 = 1_000_000;
    let keys: Vec<Fingerprint> = (0..2 * BLOCKS).map(fingerprint).collect();
    for eviction in [Eviction::S3Fifo, Eviction::Lru] {
        let index = Index::new(IndexOptions { eviction, ..IndexOptions::default() });
        let each = |what: &str, count: u64, started: Instant| {
            println!("{eviction} {what}: {:.0} ns", started.elapsed().as_nanos() as f64 / count as f64);
        };
        let started = Instant::now();
        for number in 0..BLOCKS {
            index.insert(keys[number as usize], &block(number), Existing::Replace);
        }
        each("insert", BLOCKS, started);
        println!("{eviction} memory: {} bytes a block", index.heap_bytes() / BLOCKS);

        // Keys far apart, as they come.
        let mut random = 1u64;
        let mut next = |first: u64, count: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            keys[(first + (random >> 33) % count) as usize]
        };
        let there: Vec<Fingerprint> = (0..BLOCKS).map(|_| next(0, BLOCKS)).collect();
        let absent: Vec<Fingerprint> = (0..BLOCKS).map(|_| next(BLOCKS, BLOCKS)).collect();
        let asked: Vec<Fingerprint> = (0..BLOCKS).map(|_| next(0, 2 * BLOCKS)).collect();
        let mut found = vec![false; 1000];
        for (what, asked) in [("there", &there), ("absent", &absent), ("half of them there", &asked)] {
            let started = Instant::now();
            for batch in asked.chunks(1000) {
                index.contains_many(batch, |key| key, 1, &mut found);
                black_box(&found);
            }
            each(&format!("contains_many, batches of 1000, {what}"), BLOCKS, started);
        }
        let started = Instant::now();
        for key in &asked {
            black_box(index.contains(key, 1));
        }
        each("contains", BLOCKS, started);
        let started = Instant::now();
        for key in &asked {
            black_box(matches!(index.get(key, 1), Lookup::Found(..)));
        }
        each("get and release", BLOCKS, started);
        let started = Instant::now();
        asked.chunks(100).for_each(|batch| drop(index.touch(batch)));
        each("touch", BLOCKS, started);
        let started = Instant::now();
        black_box(index.survey());
        each("survey", 1, started);
        let started = Instant::now();
        let want = Want { from: Candidates::Anywhere, bytes: 64 * (64 << 10) };
        for _ in 0..1000 {
            assert_eq!(index.evict(&want, 1).len(), 64);
        }
        each("evict, batches of 64", 64_000, started);
    }
}
