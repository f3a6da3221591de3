//! The visits that a store sees: a token's in the decode, a batch's in the prefill.
#![forbid(unsafe_code)]

use crate::trace::{Phase, Trace};
use std::{collections::BTreeMap, num::NonZeroU32};

/// Visits in order.
#[derive(Debug)]
pub(super) struct Visits {
    visits: Vec<Recorded>,
    choices: Vec<(u32, f32)>,
}

/// A visit, whose choices begin where those of the one before it end.
#[derive(Clone, Copy, Debug)]
struct Recorded {
    layer: u32,
    phase: Phase,
    choices_end: usize,
}

/// One visit of a layer, by one token or several.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchVisit<'a> {
    /// Counted from 1.
    pub(super) number: u32,
    pub(super) layer: u32,
    pub(super) phase: Phase,
    /// The choices of one token after the other.
    pub(super) experts: &'a [(u32, f32)],
}

impl Visits {
    /// Takes the visits of a trace. So many tokens of a prompt visit a layer together.
    pub(super) fn new(trace: &Trace, prefill_batch: NonZeroU32) -> Self {
        let mut visits = Self { visits: Vec::new(), choices: Vec::new() };
        let mut batch = BTreeMap::<u32, Vec<(u32, f32)>>::new();
        // The turn and the step of the last token of a batch, and the tokens in it.
        let mut last = None;
        let mut tokens = 0;
        for visit in trace.visits() {
            if visit.phase == Phase::Decode {
                visits.take(&mut batch);
                visits.push(visit.layer, Phase::Decode, visit.experts);
                last = None;
                continue;
            }
            let token = (visit.turn, visit.step);
            if last != Some(token) {
                if last.is_none_or(|(turn, _)| turn != visit.turn) || tokens == prefill_batch.get() {
                    visits.take(&mut batch);
                    tokens = 0;
                }
                (last, tokens) = (Some(token), tokens + 1);
            }
            batch.entry(visit.layer).or_default().extend_from_slice(visit.experts);
        }
        visits.take(&mut batch);
        visits
    }

    fn push(&mut self, layer: u32, phase: Phase, experts: &[(u32, f32)]) {
        self.choices.extend_from_slice(experts);
        self.visits.push(Recorded { layer, phase, choices_end: self.choices.len() });
    }

    /// Takes the visits of a batch, layer by layer.
    fn take(&mut self, batch: &mut BTreeMap<u32, Vec<(u32, f32)>>) {
        for (layer, experts) in std::mem::take(batch) {
            self.push(layer, Phase::Prefill, &experts);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = BatchVisit<'_>> + Clone {
        let starts = std::iter::once(0).chain(self.visits.iter().map(|visit| visit.choices_end));
        let numbered = (1..).zip(&self.visits).zip(starts);
        numbered.map(|((number, visit), start)| BatchVisit {
            number,
            layer: visit.layer,
            phase: visit.phase,
            experts: &self.choices[start..visit.choices_end],
        })
    }
}
