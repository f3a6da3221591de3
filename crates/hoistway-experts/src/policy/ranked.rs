//! Resident experts in the order of a rank, for policies that evict the lowest.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId};
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    rank: u64,
    /// Counts experts as they are used; of two of the same rank, the one that was used before is lower.
    used: u64,
    /// The last visit that used it.
    visit: u64,
    is_resident: bool,
}

/// Experts with ranks. A use, an insert and a removal take the logarithm of the number of residents.
#[derive(Debug)]
pub(super) struct Ranked {
    shape: CatalogShape,
    entries: Vec<Entry>,
    /// Rank, last use and number of each resident.
    residents: BTreeSet<(u64, u64, u32)>,
    uses: u64,
    visit: u64,
}

impl Ranked {
    pub(super) fn new(shape: &CatalogShape) -> Self {
        Self {
            entries: vec![Entry::default(); shape.experts()],
            shape: shape.clone(),
            residents: BTreeSet::new(),
            uses: 0,
            visit: 0,
        }
    }

    /// Notes a visit. Each expert gets the rank that `rank` gives it from its number and its rank so far. An expert that
    /// several tokens chose is ranked once.
    pub(super) fn visit(
        &mut self,
        layer: u32,
        experts: &[(u32, f32)],
        mut rank: impl FnMut(usize, u64) -> u64,
    ) {
        self.visit += 1;
        for &(expert, _) in experts {
            let Some(index) = self.shape.index(ExpertId { layer, expert }) else { continue };
            self.uses += 1;
            let old = self.entries[index];
            let entry = &mut self.entries[index];
            if entry.visit != self.visit {
                (entry.rank, entry.visit) = (rank(index, entry.rank), self.visit);
            }
            entry.used = self.uses;
            if old.is_resident {
                let new = (entry.rank, entry.used, index as u32);
                self.residents.remove(&(old.rank, old.used, index as u32));
                self.residents.insert(new);
            }
        }
    }

    /// Sets the rank of an expert that is not resident.
    pub(super) fn set_rank(&mut self, index: usize, rank: u64) {
        self.entries[index].rank = rank;
    }

    pub(super) fn insert(&mut self, id: ExpertId) {
        let Some(index) = self.shape.index(id) else { return };
        let entry = &mut self.entries[index];
        if !std::mem::replace(&mut entry.is_resident, true) {
            self.residents.insert((entry.rank, entry.used, index as u32));
        }
    }

    pub(super) fn remove(&mut self, id: ExpertId) {
        let Some(index) = self.shape.index(id) else { return };
        let entry = &mut self.entries[index];
        if std::mem::replace(&mut entry.is_resident, false) {
            self.residents.remove(&(entry.rank, entry.used, index as u32));
        }
    }

    /// Returns the resident of the lowest rank that may be evicted.
    pub(super) fn victim(&self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.residents.iter().map(|&(_, _, index)| self.shape.id(index as usize)).find(|&id| may_evict(id))
    }
}
