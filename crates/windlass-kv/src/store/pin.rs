//! Blocks that stay.
#![forbid(unsafe_code)]

/// Blocks that are not evicted, nor deleted by this process, as long as this lives.
#[derive(Debug)]
pub struct PinGuard {
    pinned: Vec<bool>,
}

impl PinGuard {
    /// Which of the keys are pinned: those of blocks that were there.
    pub fn pinned(&self) -> &[bool] {
        &self.pinned
    }
}
