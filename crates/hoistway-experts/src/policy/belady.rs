//! The expert that is used again last goes first (Belady, 1966): the bound that no policy without knowledge of the future
//! exceeds, where experts have one size and each expert that is read is kept at first.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId, Policy, ranked::Ranked};

/// The visits of each expert in a trace, by their number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Future {
    /// Visits of all experts, those of one expert side by side and in order.
    visits: Vec<u32>,
    /// By the number of an expert, where its visits begin; at the end, where all end.
    starts: Vec<u32>,
}

impl Future {
    /// Lists for each expert the visits that will choose it. `visits` are those that the policy will see, from the first.
    /// Visits beyond the first 2³² choices are left out.
    pub fn new<'a>(
        shape: &CatalogShape,
        visits: impl Iterator<Item = (u32, &'a [(u32, f32)])> + Clone,
    ) -> Self {
        // Counting, then placing: the visits of an expert stay in order.
        let choices = || {
            let numbered = visits.clone().zip(0_u32..);
            let all = numbered.flat_map(|((layer, experts), visit)| {
                experts.iter().filter_map(move |&(expert, _)| {
                    shape.index(ExpertId { layer, expert }).map(|index| (index, visit))
                })
            });
            all.take(u32::MAX as usize)
        };
        let mut starts = vec![0_u32; shape.experts() + 1];
        for (index, _) in choices() {
            starts[index + 1] += 1;
        }
        for index in 1..starts.len() {
            starts[index] += starts[index - 1];
        }
        let mut next = starts.clone();
        let mut placed = vec![0; starts.last().copied().unwrap_or_default() as usize];
        for (index, visit) in choices() {
            placed[next[index] as usize] = visit;
            next[index] += 1;
        }
        Self { visits: placed, starts }
    }

    /// The first visit of an expert after this one, looked for from a place in the list, and that place.
    fn next_after(&self, index: usize, from: u32, visit: u32) -> (Option<u32>, u32) {
        let end = self.starts[index + 1];
        let mut at = from;
        while at < end && self.visits[at as usize] <= visit {
            at += 1;
        }
        ((at < end).then(|| self.visits[at as usize]), at)
    }
}

pub(super) struct Belady {
    /// The later an expert is used again, the lower its rank.
    ranked: Ranked,
    future: Future,
    /// By expert, the first of its visits that is not over.
    next: Vec<u32>,
    /// The number of the next visit.
    visit: u32,
}

/// Rank of an expert that is not used again.
const NEVER: u64 = 0;

fn rank(next: Option<u32>) -> u64 {
    next.map_or(NEVER, |next| u64::from(u32::MAX - next) + 1)
}

impl Belady {
    pub(super) const NAME: &str = "belady";

    pub(super) fn new(shape: &CatalogShape, future: &Future) -> Self {
        let mut ranked = Ranked::new(shape);
        let next = future.starts[..shape.experts()].to_vec();
        for (index, &start) in next.iter().enumerate() {
            let first = (start < future.starts[index + 1]).then(|| future.visits[start as usize]);
            ranked.set_rank(index, rank(first));
        }
        Self { ranked, future: future.clone(), next, visit: 0 }
    }
}

impl Policy for Belady {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        let (future, places, visit) = (&self.future, &mut self.next, self.visit);
        self.ranked.visit(layer, experts, |index, _| {
            let (next, place) = future.next_after(index, places[index], visit);
            places[index] = place;
            rank(next)
        });
        self.visit = self.visit.saturating_add(1);
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
