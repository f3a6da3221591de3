//! Blocks that the drive failed to read. A block is given up when the same part fails twice with no success in between.
#![forbid(unsafe_code)]

use crate::{Fingerprint, index::Recent};
use hoistway_io::parallel::lock;
use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

/// Blocks that are remembered.
const MOST: usize = 4096;

/// The blocks that failed when they were last read, each with the first shard that was asked for then.
#[derive(Default)]
pub(crate) struct Unreadable {
    /// Whether there may be any: most drives never fail.
    has_any: AtomicBool,
    blocks: Mutex<Recent<u32>>,
}

impl Unreadable {
    /// Notes that the drive failed to give shards of a block, of which this is the first. Returns whether it did the last time
    /// that they were read, too.
    pub(crate) fn failed(&self, block: &Fingerprint, shard: u32) -> bool {
        let mut blocks = lock(&self.blocks);
        self.has_any.store(true, Ordering::Release);
        if blocks.get(block) == Some(shard) {
            blocks.remove(block);
            return true;
        }
        blocks.insert(block, shard, MOST);
        false
    }

    /// Notes that these shards of a block were read.
    pub(crate) fn read(&self, block: &Fingerprint, mut shards: impl Iterator<Item = u32>) {
        if self.has_any.load(Ordering::Acquire) {
            let mut blocks = lock(&self.blocks);
            if let Some(failed) = blocks.get(block)
                && shards.any(|shard| shard == failed)
            {
                blocks.remove(block);
            }
        }
    }

    /// Notes that a block was stored again.
    pub(crate) fn stored(&self, block: &Fingerprint) {
        if self.has_any.load(Ordering::Acquire) {
            lock(&self.blocks).remove(block);
        }
    }
}
