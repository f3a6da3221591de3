//! Blocks whose bytes follow from their number, so that a reader knows what it has to be.
#![forbid(unsafe_code)]

use hoistway_kv::{Item, KeepAlive, Key, Piece, Request};
use std::sync::Arc;

/// What blocks are like.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Shape {
    /// Bytes of the longest block.
    #[arg(long, default_value_t = 256 << 10)]
    pub(crate) block_bytes: usize,
    /// Most shards of a block.
    #[arg(long, default_value_t = 3)]
    pub(crate) shards: u32,
}

impl Shape {
    /// Shards of the block of this number.
    pub(crate) fn shards_of(self, number: u64) -> u32 {
        1 + (mix(number ^ 0x5a5a) % u64::from(self.shards)) as u32
    }

    /// Bytes of each of its shards.
    pub(crate) fn shard_len(self, number: u64) -> usize {
        let longest = self.block_bytes / self.shards_of(number) as usize;
        // A half of them end at odd places.
        match mix(number) % 4 {
            0 | 1 => longest,
            2 => 1 + mix(number ^ 0x77) as usize % longest,
            _ => (longest / 2).next_multiple_of(512),
        }
    }

    /// The bytes of a shard.
    pub(crate) fn contents(self, number: u64, shard: u32) -> Vec<u8> {
        let mut state = mix(number << 8 | u64::from(shard));
        let mut bytes = vec![0; self.shard_len(number)];
        for chunk in bytes.chunks_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            chunk.copy_from_slice(&(state ^ state >> 29).to_le_bytes()[..chunk.len()]);
        }
        bytes
    }

    /// A request for all shards of a block, and the memory that it is about, zeros if `contents` are not wanted.
    pub(crate) fn request(
        self,
        number: u64,
        filled: Filled,
    ) -> hoistway_kv::Result<(Request, Vec<Arc<Vec<u8>>>)> {
        let shards = self.shards_of(number);
        let memory: Vec<Arc<Vec<u8>>> = (0..shards)
            .map(|shard| match filled {
                Filled::WithContents => Arc::new(self.contents(number, shard)),
                Filled::WithZeros => Arc::new(vec![0; self.shard_len(number)]),
            })
            .collect();
        let key = Key::new(name(number).as_bytes())?;
        let items = (0..).zip(&memory).map(|(shard, bytes)| {
            Item::new(key.clone(), shard, vec![Piece::host(bytes.as_ptr(), bytes.len())])
        });
        let mut request = Request::new(items.collect(), KeepAlive::new(Arc::new(memory.clone())));
        request.shards = shards;
        Ok((request, memory))
    }

    /// Whether memory has the bytes of a block.
    pub(crate) fn matches(self, number: u64, memory: &[Arc<Vec<u8>>]) -> bool {
        (0..).zip(memory).all(|(shard, bytes)| **bytes == self.contents(number, shard))
    }
}

/// What the memory of a request holds at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    WithContents,
    WithZeros,
}

/// The key of a block.
pub(crate) fn name(number: u64) -> String {
    format!("block {number}")
}

/// SplitMix64.
pub(crate) fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
