//! Holes of a trace: visits and choices that are missing from recorded tokens.
#![forbid(unsafe_code)]

use super::{Phase, Recorded};
use crate::policy::CatalogShape;
use serde::Serialize;

/// The place of a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HolePlace {
    /// Number of the turn.
    pub turn: u32,
    /// Number of the token.
    pub step: u32,
    /// The layer.
    pub layer: u32,
}

/// The holes of a trace. Replays leave it out: they visit what was recorded, and count the tokens that they find.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holes {
    /// Layers that have experts, as the trace says, and that no token visits. They count as layers without experts.
    pub layers: u32,
    /// Tokens of the decode, by the gaps between the numbers of those that are there.
    pub tokens: u64,
    /// Visits: layers that other tokens visit, and that a token of the decode does not.
    pub visits: u64,
    /// The same in the prefill. Engines that need the last token alone leave out the others in the last layer.
    pub prefill_visits: u64,
    /// Visits with fewer experts than a token goes to.
    pub short_visits: u64,
    /// The first visit of the decode that is missing or short.
    pub first: Option<HolePlace>,
}

impl Holes {
    /// Returns whether everything is there that a replay of the decode needs.
    pub fn is_empty(&self) -> bool {
        let Self { layers, tokens, visits, short_visits, .. } = *self;
        (layers, tokens, visits, short_visits) == (0, 0, 0, 0)
    }

    /// Looks for holes in visits that are in order. `layers` is the number of layers that the trace says have experts.
    pub(super) fn of(shape: &CatalogShape, visits: &[Recorded], layers: usize) -> Self {
        let visited: Vec<u32> = (0..)
            .zip(shape.layers())
            .filter(|(_, layer)| layer.experts > 0)
            .map(|(number, _)| number)
            .collect();
        let mut holes = Self { layers: layers.saturating_sub(visited.len()) as u32, ..Self::default() };
        let mut last: Option<(u32, u32)> = None;
        let mut start = 0;
        let tokens = visits
            .chunk_by(|one, other| (one.turn, one.phase, one.step) == (other.turn, other.phase, other.step));
        for token in tokens {
            let Some(&Recorded { turn, phase, step, .. }) = token.first() else { continue };
            let is_decode = phase == Phase::Decode;
            if is_decode {
                if let Some((last_turn, last_step)) = last
                    && last_turn == turn
                {
                    holes.tokens += u64::from(step.saturating_sub(last_step).saturating_sub(1));
                }
                last = Some((turn, step));
            }
            let missing = (visited.len() - token.len()) as u64;
            *(if is_decode { &mut holes.visits } else { &mut holes.prefill_visits }) += missing;
            let mut first = None;
            if missing > 0 {
                let layers = token.iter().map(|visit| visit.layer).chain(std::iter::once(u32::MAX));
                first = visited
                    .iter()
                    .zip(layers)
                    .find(|(layer, other)| *layer != other)
                    .map(|(&layer, _)| layer);
            }
            for visit in token {
                let experts = shape.layers()[visit.layer as usize].experts.min(shape.experts_per_token());
                if visit.choices_end - start < experts {
                    holes.short_visits += 1;
                    first = Some(first.map_or(visit.layer, |first: u32| first.min(visit.layer)));
                }
                start = visit.choices_end;
            }
            if let Some(layer) = first.filter(|_| is_decode) {
                holes.first.get_or_insert(HolePlace { turn, step, layer });
            }
        }
        holes
    }
}
