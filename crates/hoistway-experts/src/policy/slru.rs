//! Segmented LRU (Karedla et al., 1994): what was used once is on probation and goes first; what was used again is
//! protected, as long as it is among the last that were used.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId, Policy, lists::Lists};

const PROBATION: usize = 0;
const PROTECTED: usize = 1;
/// Part of the residents that are protected, at most: 4 of 5.
const PROTECTED_SHARE: (usize, usize) = (4, 5);

pub(super) struct Slru {
    lists: Lists<2>,
}

impl Slru {
    pub(super) const NAME: &str = "slru";

    pub(super) fn new(shape: &CatalogShape) -> Self {
        Self { lists: Lists::new(shape) }
    }

    /// Puts those back on probation that are protected beyond the share, the longest unused first.
    fn demote(&mut self) {
        let (part, of) = PROTECTED_SHARE;
        let most = self.lists.residents() * part / of;
        while self.lists.len(PROTECTED) > most
            && let Some(index) = self.lists.pop_front(PROTECTED)
        {
            self.lists.push_back(PROBATION, index);
        }
    }
}

impl Policy for Slru {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.lists.begin_visit();
        for &(expert, _) in experts {
            if let Some(index) = self.lists.index(ExpertId { layer, expert }) {
                // All tokens of a visit are one use: residency does not change in between.
                let list = if self.lists.is_resident(index) { PROTECTED } else { PROBATION };
                self.lists.push_back(list, index);
            }
        }
        self.demote();
    }

    fn insert(&mut self, expert: ExpertId) {
        let Some(index) = self.lists.index(expert) else { return };
        if self.lists.set_resident(index, true) && self.lists.list_of(index).is_none() {
            self.lists.push_back(PROBATION, index);
        }
    }

    fn remove(&mut self, expert: ExpertId) {
        let Some(index) = self.lists.index(expert) else { return };
        if self.lists.set_resident(index, false) {
            self.lists.unlink(index);
        }
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.lists.victim(PROBATION, may_evict).or_else(|| self.lists.victim(PROTECTED, may_evict))
    }

    fn name(&self) -> &'static str {
        Self::NAME
    }
}
