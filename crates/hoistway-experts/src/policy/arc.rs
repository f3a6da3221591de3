//! ARC (Megiddo and Modha, FAST 2003): what was used once and what was used again share the room, and which of the two was
//! evicted too early says how.
//!
//! The paper's cache holds a number of pages; here it is that of the experts that are resident when room is needed.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId, Policy, lists::Lists};

/// Used once, lately: resident, and evicted.
const ONCE: usize = 0;
const ONCE_EVICTED: usize = 2;
/// Used again: resident, and evicted.
const AGAIN: usize = 1;
const AGAIN_EVICTED: usize = 3;

pub(super) struct AdaptiveCache {
    lists: Lists<4>,
    /// Room for experts that were used once, in experts.
    once_room: usize,
    /// Residents when room was needed last.
    capacity: usize,
}

impl AdaptiveCache {
    pub(super) const NAME: &str = "arc";

    pub(super) fn new(shape: &CatalogShape) -> Self {
        Self { lists: Lists::new(shape), once_room: 0, capacity: 0 }
    }

    /// Notes a use of an expert that is not resident, and returns the list for it.
    fn miss(&mut self, index: usize) -> usize {
        let evicted = [ONCE_EVICTED, AGAIN_EVICTED].map(|list| self.lists.len(list));
        match self.lists.list_of(index) {
            Some(ONCE_EVICTED) => {
                let more = (evicted[1] / evicted[0]).max(1);
                self.once_room = (self.once_room + more).min(self.capacity);
                AGAIN
            }
            Some(AGAIN_EVICTED) => {
                self.once_room = self.once_room.saturating_sub((evicted[0] / evicted[1]).max(1));
                AGAIN
            }
            // It waits for a read: another token of the same visit chose it too, or an earlier read failed.
            Some(list) => list,
            None => ONCE,
        }
    }

    /// Forgets the experts that were evicted first, down to what the paper keeps.
    fn forget(&mut self) {
        while self.lists.len(ONCE) + self.lists.len(ONCE_EVICTED) > self.capacity
            && self.lists.pop_front(ONCE_EVICTED).is_some()
        {}
        while self.lists.len(ONCE_EVICTED) + self.lists.len(AGAIN_EVICTED) > self.capacity
            && self.lists.pop_front(AGAIN_EVICTED).is_some()
        {}
    }
}

impl Policy for AdaptiveCache {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.lists.begin_visit();
        for &(expert, _) in experts {
            let Some(index) = self.lists.index(ExpertId { layer, expert }) else { continue };
            let list = if self.lists.is_resident(index) { AGAIN } else { self.miss(index) };
            self.lists.push_back(list, index);
        }
    }

    fn insert(&mut self, expert: ExpertId) {
        let Some(index) = self.lists.index(expert) else { return };
        if self.lists.set_resident(index, true) && !matches!(self.lists.list_of(index), Some(ONCE | AGAIN)) {
            self.lists.push_back(ONCE, index);
        }
    }

    fn remove(&mut self, expert: ExpertId) {
        let Some(index) = self.lists.index(expert) else { return };
        if self.lists.set_resident(index, false) {
            let list = if self.lists.list_of(index) == Some(AGAIN) { AGAIN_EVICTED } else { ONCE_EVICTED };
            self.lists.push_back(list, index);
            self.forget();
        }
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.capacity = self.lists.residents();
        let [first, second] =
            if self.lists.len(ONCE) > self.once_room { [ONCE, AGAIN] } else { [AGAIN, ONCE] };
        self.lists.victim(first, may_evict).or_else(|| self.lists.victim(second, may_evict))
    }

    fn name(&self) -> &'static str {
        Self::NAME
    }
}
