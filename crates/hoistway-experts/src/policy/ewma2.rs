//! The expert that its layer's router is least likely to choose next goes first, by the mean of two exponential averages: one
//! that follows the last few tokens, and one that remembers the text. It is the default.
//!
//! Averages say too little of the token before where routers often choose the same again. So the policy compares how often
//! that happens with what the averages say of these experts, and adds the difference to them. Where averages say enough,
//! nothing is added.
//!
//! Averages count in visits of the layer, so that layers can be compared. A visit of several tokens, such as a prefill,
//! counts as often as it has tokens: it is where the averages begin. What it reads is kept only if it was chosen more than
//! what would be evicted for it.
//!
//! A visit takes the time of its layer's experts, a victim that of the number of layers.
#![forbid(unsafe_code)]

use super::{CatalogShape, ExpertId, Policy};
use std::{cmp::Reverse, collections::BinaryHeap};

/// Visits of the layer after which a choice counts half, in the average that follows and in the one that remembers. Measured
/// on traces of three models: see `docs/moe-replay.md`.
const HALF_LIVES: [f32; 2] = [4.0, 32.0];
/// Visits, of all layers, after which a comparison of choices with averages counts half.
const REUSE_HALF_LIFE: f32 = 256.0;
/// Averages below this are zero. Numbers much smaller are slow to multiply.
const LEAST: f32 = 1e-30;

/// Orders residents: the score's bits (it is not negative, so they order as it does), the last visit that used the
/// expert, layer, position in the layer's order.
type Candidate = Reverse<(u32, u64, u32, u32)>;

pub(super) struct Ewma2 {
    layers: Vec<Layer>,
    experts_per_token: usize,
    visit: u64,
    is_scan: bool,
    reuse: Reuse,
    /// Kept for its memory.
    candidates: Vec<Candidate>,
}

/// How often a router chooses an expert of the token before again, beside what the averages say of these experts.
#[derive(Clone, Copy, Debug, Default)]
struct Reuse {
    chosen: f32,
    expected: f32,
}

impl Reuse {
    /// Notes the share of the experts of the token before that were chosen again, and the mean of their averages.
    fn note(&mut self, chosen: f32, expected: f32) {
        let rest = (-1.0 / REUSE_HALF_LIFE).exp2();
        self.chosen = self.chosen * rest + chosen * (1.0 - rest);
        self.expected = self.expected * rest + expected * (1.0 - rest);
    }

    /// The amount to add to the averages of the last token's experts.
    fn bonus(self) -> f32 {
        (self.chosen - self.expected).max(0.0)
    }
}

#[derive(Default)]
struct Layer {
    /// The two averages of each expert.
    averages: [Vec<f32>; 2],
    /// The experts of the last visit, unless it was one of several tokens, and what is added to the averages of each.
    last: Vec<u32>,
    bonus: Vec<f32>,
    /// The last visit that used each expert.
    used: Vec<u64>,
    is_resident: Vec<bool>,
    /// The residents, in the order in which they go if that is known.
    residents: Vec<u32>,
    is_sorted: bool,
}

impl Layer {
    fn new(experts: u32) -> Self {
        let experts = experts as usize;
        Self {
            averages: [vec![0.0; experts], vec![0.0; experts]],
            bonus: vec![0.0; experts],
            used: vec![0; experts],
            is_resident: vec![false; experts],
            ..Self::default()
        }
    }

    /// The mean of an expert's averages.
    fn average(&self, expert: u32) -> f32 {
        let [fast, slow] = &self.averages;
        f32::midpoint(fast[expert as usize], slow[expert as usize])
    }

    fn score(&self, expert: u32) -> f32 {
        self.average(expert) + self.bonus[expert as usize]
    }

    fn visit(&mut self, experts: &[(u32, f32)], tokens: usize, visit: u64, reuse: &mut Reuse) {
        if tokens == 1 && !self.last.is_empty() {
            let again = self.last.iter().filter(|last| experts.iter().any(|(expert, _)| expert == *last));
            let expected: f32 = self.last.iter().map(|&expert| self.average(expert)).sum();
            let count = self.last.len() as f32;
            reuse.note(again.count() as f32 / count, expected / count);
        }
        for expert in self.last.drain(..) {
            self.bonus[expert as usize] = 0.0;
        }
        for (averages, half_life) in self.averages.iter_mut().zip(HALF_LIVES) {
            let rest = (-(tokens as f32) / half_life).exp2();
            for average in averages.iter_mut() {
                *average *= rest;
                if *average < LEAST {
                    *average = 0.0;
                }
            }
            let more = (1.0 - rest) / tokens as f32;
            for &(expert, _) in experts {
                if let Some(average) = averages.get_mut(expert as usize) {
                    *average += more;
                }
            }
        }
        for &(expert, _) in experts {
            let Some(used) = self.used.get_mut(expert as usize) else { continue };
            *used = visit;
            if tokens == 1 {
                self.last.push(expert);
                self.bonus[expert as usize] = reuse.bonus();
            }
        }
        self.is_sorted = false;
    }

    fn sort(&mut self) {
        if std::mem::replace(&mut self.is_sorted, true) {
            return;
        }
        let mut residents = std::mem::take(&mut self.residents);
        residents.sort_unstable_by_key(|&expert| {
            (self.score(expert).to_bits(), self.used[expert as usize], expert)
        });
        self.residents = residents;
    }

    /// The resident at a position of the order, for comparison with those of other layers.
    fn candidate(&self, layer: u32, position: u32) -> Option<Candidate> {
        let expert = *self.residents.get(position as usize)?;
        Some(Reverse((self.score(expert).to_bits(), self.used[expert as usize], layer, position)))
    }
}

impl Ewma2 {
    pub(super) const NAME: &str = "ewma2";

    pub(super) fn new(shape: &CatalogShape) -> Self {
        Self {
            layers: shape.layers().iter().map(|layer| Layer::new(layer.experts)).collect(),
            experts_per_token: shape.experts_per_token() as usize,
            visit: 0,
            is_scan: false,
            reuse: Reuse::default(),
            candidates: Vec::new(),
        }
    }

    /// The resident of the lowest score for which `is_wanted` is true, given its last visit.
    fn least(&mut self, is_wanted: &mut dyn FnMut(ExpertId, u64) -> bool) -> Option<ExpertId> {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        for (number, layer) in self.layers.iter_mut().enumerate() {
            layer.sort();
            candidates.extend(layer.candidate(number as u32, 0));
        }
        let mut heap = BinaryHeap::from(candidates);
        let mut found = None;
        while let Some(Reverse((_, used, layer, position))) = heap.pop() {
            let of_layer = &self.layers[layer as usize];
            let id = ExpertId { layer, expert: of_layer.residents[position as usize] };
            if is_wanted(id, used) {
                found = Some(id);
                break;
            }
            heap.extend(of_layer.candidate(layer, position + 1));
        }
        self.candidates = heap.into_vec();
        found
    }

    fn layer_of(&mut self, id: ExpertId) -> Option<&mut Layer> {
        self.layers.get_mut(id.layer as usize).filter(|layer| (id.expert as usize) < layer.used.len())
    }
}

impl Policy for Ewma2 {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        self.visit += 1;
        let tokens = experts.len().div_ceil(self.experts_per_token);
        self.is_scan = tokens > 1;
        if let Some(layer) = self.layers.get_mut(layer as usize)
            && tokens > 0
        {
            layer.visit(experts, tokens, self.visit, &mut self.reuse);
        }
    }

    fn insert(&mut self, expert: ExpertId) {
        if let Some(layer) = self.layer_of(expert)
            && !std::mem::replace(&mut layer.is_resident[expert.expert as usize], true)
        {
            layer.residents.push(expert.expert);
            layer.is_sorted = false;
        }
    }

    fn remove(&mut self, expert: ExpertId) {
        if let Some(layer) = self.layer_of(expert)
            && std::mem::replace(&mut layer.is_resident[expert.expert as usize], false)
        {
            // What is left keeps its order.
            layer.residents.retain(|&resident| resident != expert.expert);
        }
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.least(&mut |id, _| may_evict(id))
    }

    fn admit(&mut self, expert: ExpertId) -> bool {
        if !self.is_scan {
            return true;
        }
        let visit = self.visit;
        let Some(least) = self.least(&mut |_, used| used != visit) else { return true };
        let score = |id: ExpertId| {
            let layer = self.layers.get(id.layer as usize);
            layer.filter(|layer| (id.expert as usize) < layer.used.len()).map(|layer| layer.score(id.expert))
        };
        score(expert) > score(least)
    }

    fn name(&self) -> &'static str {
        Self::NAME
    }
}
