//! Keeps the experts that a profile says are chosen most, whatever the model is asked now.
//!
//! Evicts experts that the profile lacks, then those that it has seen chosen least.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId, Policy, ranked::Ranked};

/// How often each expert was chosen, in a trace that was recorded before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// By layer and expert.
    counts: Vec<Vec<u64>>,
}

impl Profile {
    /// Counts choices: of a layer, the experts that were chosen. Experts outside of the shape are left out.
    ///
    /// ```
    /// use hoistway_experts::policy::{CatalogShape, ExpertId, LayerShape, Profile};
    /// let shape = CatalogShape::new(2, vec![LayerShape { experts: 4, expert_bytes: 1 }]).unwrap();
    /// let visits = [(0, &[(1, 0.5), (3, 0.5)][..]), (0, &[(1, 0.9), (0, 0.1)])];
    /// let profile = Profile::new(&shape, visits);
    /// assert_eq!(profile.count(ExpertId { layer: 0, expert: 1 }), 2);
    /// ```
    pub fn new<'a>(shape: &CatalogShape, visits: impl IntoIterator<Item = (u32, &'a [(u32, f32)])>) -> Self {
        let mut counts: Vec<Vec<u64>> =
            shape.layers().iter().map(|layer| vec![0; layer.experts as usize]).collect();
        for (layer, experts) in visits {
            let Some(layer) = counts.get_mut(layer as usize) else { continue };
            for &(expert, _) in experts {
                if let Some(count) = layer.get_mut(expert as usize) {
                    *count += 1;
                }
            }
        }
        Self { counts }
    }

    /// Returns how often an expert was chosen; 0 for those that the profile does not know.
    pub fn count(&self, id: ExpertId) -> u64 {
        let layer = self.counts.get(id.layer as usize);
        layer.and_then(|layer| layer.get(id.expert as usize)).copied().unwrap_or_default()
    }
}

pub(super) struct StaticProfile {
    ranked: Ranked,
}

impl StaticProfile {
    pub(super) const NAME: &str = "static-profile";

    pub(super) fn new(shape: &CatalogShape, profile: &Profile) -> Self {
        let mut ranked = Ranked::new(shape);
        for index in 0..shape.experts() {
            ranked.set_rank(index, profile.count(shape.id(index)));
        }
        Self { ranked }
    }
}

impl Policy for StaticProfile {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.ranked.visit(layer, experts, |_, count| count);
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
