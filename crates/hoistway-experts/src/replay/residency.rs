//! A store without bytes: which experts are resident, and what a visit finds.
#![forbid(unsafe_code)]

use super::{
    outcome::{LayerDemand, Tally},
    visits::BatchVisit,
};
use crate::{
    policy::{CatalogShape, ExpertId, Policy},
    trace::Phase,
};

/// Keeps what its policy says, within a budget, beyond which it goes by what one visit needs at most.
pub(super) struct Residency<'a> {
    shape: &'a CatalogShape,
    policy: Box<dyn Policy>,
    budget_bytes: u64,
    resident_bytes: u64,
    experts: Vec<Expert>,
    /// Residents of each layer.
    layers: Vec<u32>,
    pub(super) tally: Tally,
}

#[derive(Clone, Copy, Default)]
struct Expert {
    is_resident: bool,
    /// The last visit that used it; 0 if none has.
    visit: u32,
}

impl<'a> Residency<'a> {
    pub(super) fn new(shape: &'a CatalogShape, policy: Box<dyn Policy>, budget_bytes: u64) -> Self {
        Self {
            shape,
            policy,
            budget_bytes,
            resident_bytes: 0,
            experts: vec![Expert::default(); shape.experts()],
            layers: vec![0; shape.layers().len()],
            tally: Tally::default(),
        }
    }

    pub(super) fn visit(&mut self, visit: &BatchVisit<'_>) {
        self.policy.visit(visit.layer, visit.experts);
        let mut demand = LayerDemand { layer: visit.layer, ..LayerDemand::default() };
        let mut missing = Vec::new();
        for &(expert, _) in visit.experts {
            let id = ExpertId { layer: visit.layer, expert };
            let Some(index) = self.shape.index(id) else { continue };
            let expert = &mut self.experts[index];
            let before = std::mem::replace(&mut expert.visit, visit.number);
            if before == visit.number {
                continue;
            }
            let bytes = self.shape.expert_bytes(id);
            demand.experts += 1;
            demand.bytes += bytes;
            if !expert.is_resident {
                missing.push(id);
            }
            self.tally.count(visit.phase, bytes, expert.is_resident, before == 0);
        }
        for id in missing {
            self.read(id, visit.number);
        }
        while self.resident_bytes > self.budget_bytes && self.evict(visit.number) {}
        if demand.bytes > self.tally.largest_demand.bytes {
            self.tally.largest_demand = demand;
        }
        if visit.phase == Phase::Decode {
            let residents = self.layers.get(visit.layer as usize).copied().unwrap_or_default();
            self.tally.most_resident = self.tally.most_resident.max(residents);
        }
    }

    /// Reads an expert, and keeps it if the policy says so.
    fn read(&mut self, id: ExpertId, visit: u32) {
        let bytes = self.shape.expert_bytes(id);
        let is_full = |residency: &Self| residency.resident_bytes + bytes > residency.budget_bytes;
        if is_full(self) && !self.policy.admit(id) {
            return;
        }
        while is_full(self) && self.evict(visit) {}
        self.policy.insert(id);
        self.set_resident(id, true);
    }

    /// Evicts an expert that the visit does not use. Returns whether there was one.
    fn evict(&mut self, visit: u32) -> bool {
        let (shape, experts) = (self.shape, &self.experts);
        let may_evict = &mut |id| shape.index(id).is_some_and(|index| experts[index].visit != visit);
        let Some(victim) = self.policy.victim(may_evict) else { return false };
        self.policy.remove(victim);
        self.set_resident(victim, false);
        true
    }

    fn set_resident(&mut self, id: ExpertId, is_resident: bool) {
        let Some(index) = self.shape.index(id) else { return };
        let bytes = self.shape.expert_bytes(id);
        self.experts[index].is_resident = is_resident;
        let residents = &mut self.layers[id.layer as usize];
        if is_resident {
            self.resident_bytes += bytes;
            *residents += 1;
        } else {
            self.resident_bytes -= bytes;
            *residents -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{LayerShape, by_name};
    use proptest::{collection::vec, prelude::*};

    proptest! {
        #[test]
        fn resident_bytes_stay_within_the_budget_and_one_visit(
            visits in vec((0..3_u32, vec(0..6_u32, 1..9)), 1..80),
            budget in 4..60_u64,
        ) {
            let layers = [3, 4, 2].map(|expert_bytes| LayerShape { experts: 6, expert_bytes });
            let shape = CatalogShape::new(2, layers.to_vec()).unwrap();
            for name in ["ewma2", "lru", "slru", "lfu", "arc"] {
                let mut residency = Residency::new(&shape, by_name(name, &shape).unwrap(), budget);
                let mut reads = 0;
                for ((layer, experts), number) in visits.iter().zip(1..) {
                    let experts: Vec<_> = experts.iter().map(|&expert| (expert, 1.0)).collect();
                    let (layer, phase) = (*layer, Phase::Decode);
                    residency.visit(&BatchVisit { number, layer, phase, experts: &experts });
                    let ids = (0..3).flat_map(|layer| (0..6).map(move |expert| ExpertId { layer, expert }));
                    let resident = ids.filter(|id| residency.experts[shape.index(*id).unwrap()].is_resident);
                    let bytes: u64 = resident.map(|id| shape.expert_bytes(id)).sum();
                    prop_assert_eq!(bytes, residency.resident_bytes);
                    prop_assert!(bytes <= budget + residency.tally.largest_demand.bytes, "{}", name);
                    let used: std::collections::BTreeSet<_> = experts.iter().map(|chosen| chosen.0).collect();
                    reads += used.len() as u64;
                }
                prop_assert_eq!(residency.tally.lookups, reads);
                prop_assert!(residency.tally.hits + residency.tally.cold_misses <= reads);
            }
        }
    }
}
