//! Blocks that the drive failed to give: one that fails twice, with no success in between, is given up.
#![forbid(unsafe_code)]

use crate::{Fingerprint, index::Recent};
use hoistway_io::parallel::lock;
use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

/// Blocks that are remembered.
const MOST: usize = 4096;

/// The blocks that failed when they were last read.
#[derive(Default)]
pub(crate) struct Unreadable {
    /// Whether there may be any: most drives never fail.
    has_any: AtomicBool,
    blocks: Mutex<Recent<()>>,
}

impl Unreadable {
    /// Notes that the drive failed to give a block. Returns whether it did the last time, too.
    pub(crate) fn failed(&self, block: &Fingerprint) -> bool {
        let mut blocks = lock(&self.blocks);
        self.has_any.store(true, Ordering::Release);
        if blocks.remove(block) {
            return true;
        }
        blocks.insert(block, (), MOST);
        false
    }

    /// Notes that a block was read, or stored again.
    pub(crate) fn succeeded(&self, block: &Fingerprint) {
        if self.has_any.load(Ordering::Acquire) {
            lock(&self.blocks).remove(block);
        }
    }
}
