//! Pins: blocks that are not evicted.
#![forbid(unsafe_code)]

use super::Core;
use crate::Fingerprint;
use std::{fmt, sync::Arc};

/// Blocks that are not evicted, nor deleted by this process, as long as this lives.
pub struct PinGuard {
    core: Arc<Core>,
    blocks: Vec<Fingerprint>,
    pinned: Vec<bool>,
}

impl PinGuard {
    pub(super) fn new(core: &Arc<Core>, blocks: impl Iterator<Item = Fingerprint>) -> Self {
        let blocks: Vec<_> = blocks.collect();
        let pinned = blocks.iter().map(|block| core.layout.pin(*block)).collect();
        Self { core: core.clone(), blocks, pinned }
    }

    /// Which of the keys are pinned: those of blocks that were there.
    pub fn pinned(&self) -> &[bool] {
        &self.pinned
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        if self.core.is_forked() {
            return;
        }
        for (block, _) in self.blocks.iter().zip(&self.pinned).filter(|(_, pinned)| **pinned) {
            self.core.layout.unpin(*block);
        }
    }
}

impl fmt::Debug for PinGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinGuard").field("pinned", &self.pinned).finish_non_exhaustive()
    }
}
