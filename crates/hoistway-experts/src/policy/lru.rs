//! The expert that was not used for the longest time goes first.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId, Policy, lists::Lists};

const ALL: usize = 0;

pub(super) struct Lru {
    lists: Lists<1>,
}

impl Lru {
    pub(super) const NAME: &str = "lru";

    pub(super) fn new(shape: &CatalogShape) -> Self {
        Self { lists: Lists::new(shape) }
    }
}

impl Policy for Lru {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.lists.begin_visit();
        for &(expert, _) in experts {
            if let Some(index) = self.lists.index(ExpertId { layer, expert }) {
                self.lists.push_back(ALL, index);
            }
        }
    }

    fn insert(&mut self, expert: ExpertId) {
        let Some(index) = self.lists.index(expert) else { return };
        if self.lists.set_resident(index, true) && self.lists.list_of(index).is_none() {
            self.lists.push_back(ALL, index);
        }
    }

    fn remove(&mut self, expert: ExpertId) {
        let Some(index) = self.lists.index(expert) else { return };
        if self.lists.set_resident(index, false) {
            self.lists.unlink(index);
        }
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.lists.victim(ALL, may_evict)
    }

    fn name(&self) -> &'static str {
        Self::NAME
    }
}
