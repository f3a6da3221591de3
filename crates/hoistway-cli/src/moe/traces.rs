//! Traces as the commands open them, and what they say of them.

use super::arguments::Reading;
use crate::failure::Failure;
use bytesize::ByteSize;
use hoistway::counted;
use hoistway_experts::{
    policy::Profile,
    replay::{Replay, ReplayOptions},
    trace::{Trace, TraceOptions},
};
use std::path::Path;

impl Reading {
    pub(super) fn open(&self, path: &Path) -> Result<Trace, Failure> {
        Ok(Trace::open(path, &TraceOptions { expert_bytes: self.expert_bytes })?)
    }

    /// Prepares a replay. A profile counts for the layers and experts that the trace has.
    pub(super) fn replay(&self, trace: &Trace) -> Result<Replay, Failure> {
        let profile = match &self.profile {
            Some(path) => {
                let recorded = self.open(path)?;
                let visits = recorded.visits().map(|visit| (visit.layer, visit.experts));
                Some(Profile::new(trace.shape(), visits))
            }
            None => None,
        };
        Ok(Replay::new(trace, &ReplayOptions { prefill_batch: self.prefill_batch, profile })?)
    }
}

/// What a trace is of, in a line.
pub(super) fn summary(trace: &Trace) -> String {
    let shape = trace.shape();
    let layers = shape.layers().iter().filter(|layer| layer.experts > 0).count();
    format!(
        "{}{} with {} of {}, {} a token; one token's cycle is {}",
        trace.model().map(|model| format!("{model}: ")).unwrap_or_default(),
        counted(layers, "layer", "layers"),
        counted(shape.experts(), "expert", "experts"),
        ByteSize(shape.total_bytes()),
        shape.experts_per_token(),
        ByteSize(shape.token_cycle_bytes()),
    )
}

/// What is missing from a trace, a sentence each.
pub(super) fn notes(trace: &Trace) -> Vec<String> {
    let holes = trace.holes();
    let mut notes = Vec::new();
    if holes.layers > 0 {
        notes.push(format!(
            "no token visits {} that the trace describes; they are left out",
            counted(holes.layers as usize, "layer", "layers")
        ));
    }
    if holes.tokens + holes.visits + holes.short_visits > 0 {
        let first = holes
            .first
            .map(|at| format!(", first at turn {}, step {}, layer {}", at.turn, at.step, at.layer));
        notes.push(format!(
            "the trace lacks {} and {} of others, and {} fewer experts than a token uses{}",
            counted(holes.tokens, "token", "tokens"),
            counted(holes.visits, "visit", "visits"),
            counted(holes.short_visits, "visit has", "visits have"),
            first.unwrap_or_default(),
        ));
    }
    notes
}
