//! Outcomes of replays.
#![forbid(unsafe_code)]

use crate::{policy::CatalogShape, trace::Phase};
use serde::Serialize;
use std::time::Duration;

const MEBIBYTE: f64 = (1 << 20) as f64;

/// The demand of one visit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LayerDemand {
    /// The layer.
    pub layer: u32,
    /// Experts that the visit used, resident or not.
    pub experts: u32,
    /// Their bytes.
    pub bytes: u64,
}

/// Counts of a replay. Those of tokens are of the decode alone.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) hits: u64,
    pub(super) lookups: u64,
    pub(super) read_bytes: u64,
    pub(super) cold_misses: u64,
    pub(super) prefill_misses: u64,
    pub(super) prefill_bytes: u64,
    pub(super) largest_demand: LayerDemand,
    pub(super) most_resident: u32,
}

impl Tally {
    /// Counts the use of one expert.
    pub(super) fn count(&mut self, phase: Phase, bytes: u64, is_hit: bool, is_first_use: bool) {
        match phase {
            Phase::Decode => {
                self.lookups += 1;
                self.hits += u64::from(is_hit);
                self.cold_misses += u64::from(!is_hit && is_first_use);
                self.read_bytes += if is_hit { 0 } else { bytes };
            }
            Phase::Prefill => {
                self.prefill_misses += u64::from(!is_hit);
                self.prefill_bytes += if is_hit { 0 } else { bytes };
            }
        }
    }

    pub(super) fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.lookups.max(1) as f64
    }
}

/// The outcome of a policy under a budget. Rates and counts are of the decode, unless their names say otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Outcome {
    /// The policy.
    pub policy: &'static str,
    /// Room for resident experts, in bytes.
    pub budget_bytes: u64,
    /// The same in token cycles.
    pub budget_cycles: f64,
    /// Bytes that one token uses in all layers together.
    pub cycle_bytes: u64,
    /// The share of the uses of experts that found them resident, from 0 to 1.
    pub hit_rate: f64,
    /// Uses of experts that found them resident.
    pub hits: u64,
    /// Uses of experts.
    pub lookups: u64,
    /// Tokens.
    pub tokens: u64,
    /// Experts that were read, a token.
    pub faults_per_token: f64,
    /// Bytes that were read, a token.
    pub bytes_per_token: f64,
    /// The same in MiB.
    pub mib_per_token: f64,
    /// Reads of experts that were used for the first time, which no policy avoids.
    pub cold_misses: u64,
    /// Experts that were read in the prefill.
    pub prefill_faults: u64,
    /// Bytes that were read in the prefill.
    pub prefill_bytes: u64,
    /// The most that one visit used, in the prefill or the decode. A store needs room for that beside its budget.
    pub largest_layer_demand: LayerDemand,
    /// The most experts of one layer that were resident after a visit of it.
    pub most_resident_in_a_layer: u32,
    /// Whether the budget is below one token's cycle, so that LRU keeps nothing until it is used again.
    pub cliff: bool,
    /// The hit rate of `belady` with the same budget.
    pub belady_hit_rate: f64,
    /// The points by which the hit rate is below that of `belady`.
    pub belady_gap: f64,
}

/// Bounds of the rate of tokens, where reads at a drive's rate and computing are all that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TokenRate {
    /// Tokens a second if all reads overlap with computing. More is not possible.
    pub overlapped: f64,
    /// Tokens a second if computing waits for each read.
    pub serial: f64,
}

impl Outcome {
    pub(super) fn new(
        policy: &'static str,
        tally: &Tally,
        shape: &CatalogShape,
        budget_bytes: u64,
        tokens: u64,
        belady_hit_rate: f64,
    ) -> Self {
        let (cycle_bytes, hit_rate) = (shape.token_cycle_bytes(), tally.hit_rate());
        let a_token = |count: u64| count as f64 / tokens.max(1) as f64;
        Self {
            policy,
            budget_bytes,
            budget_cycles: budget_bytes as f64 / cycle_bytes.max(1) as f64,
            cycle_bytes,
            hit_rate,
            hits: tally.hits,
            lookups: tally.lookups,
            tokens,
            faults_per_token: a_token(tally.lookups - tally.hits),
            bytes_per_token: a_token(tally.read_bytes),
            mib_per_token: a_token(tally.read_bytes) / MEBIBYTE,
            cold_misses: tally.cold_misses,
            prefill_faults: tally.prefill_misses,
            prefill_bytes: tally.prefill_bytes,
            largest_layer_demand: tally.largest_demand,
            most_resident_in_a_layer: tally.most_resident,
            cliff: budget_bytes < cycle_bytes,
            belady_hit_rate,
            belady_gap: belady_hit_rate - hit_rate,
        }
    }

    /// Returns bounds of the rate of tokens for a drive that reads so many bytes a second, and computing that takes so long
    /// a token. `None` if neither takes time.
    pub fn token_rate(&self, drive_bytes_per_second: f64, compute: Duration) -> Option<TokenRate> {
        let reading = self.bytes_per_token / drive_bytes_per_second;
        let computing = compute.as_secs_f64();
        let longer = reading.max(computing);
        (longer > 0.0).then(|| TokenRate { overlapped: 1.0 / longer, serial: 1.0 / (reading + computing) })
    }
}
