//! The expert that the fewest visits chose goes first; of two that as many chose, the one that was used before.
//!
//! Visits count for ever, also those of experts that are not resident.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId, Policy, ranked::Ranked};

pub(super) struct Lfu {
    ranked: Ranked,
}

impl Lfu {
    pub(super) const NAME: &str = "lfu";

    pub(super) fn new(shape: &CatalogShape) -> Self {
        Self { ranked: Ranked::new(shape) }
    }
}

impl Policy for Lfu {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.ranked.visit(layer, experts, |_, visits| visits + 1);
    }

    fn insert(&mut self, expert: ExpertId) {
        self.ranked.insert(expert);
    }

    fn remove(&mut self, expert: ExpertId) {
        self.ranked.remove(expert);
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.ranked.victim(may_evict)
    }

    fn name(&self) -> &'static str {
        Self::NAME
    }
}
