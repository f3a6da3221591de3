//! Replays traces against policies and budgets, without reading any weights.
//!
//! `visits` turns a trace into the visits that a store would see, `residency` is that store without bytes, and `outcome` is
//! what became of it.
#![forbid(unsafe_code)]

mod budget;
mod outcome;
mod residency;
mod visits;

pub use budget::Budget;
pub use outcome::{LayerDemand, Outcome, TokenRate};

use crate::{
    policy::{self, CatalogShape, Future, PolicyError, PolicyInput, Profile},
    trace::{Phase, Trace},
};
use outcome::Tally;
use residency::Residency;
use std::{collections::BTreeMap, num::NonZeroU32};
use visits::Visits;

/// Options of a replay.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Tokens of a prompt that go through a layer together, as an engine's batches do.
    pub prefill_batch: NonZeroU32,
    /// The profile of the policy `static-profile`.
    pub profile: Option<Profile>,
}

impl Default for ReplayOptions {
    /// Batches of 512 tokens, and no profile.
    fn default() -> Self {
        Self { prefill_batch: NonZeroU32::new(512).unwrap_or(NonZeroU32::MIN), profile: None }
    }
}

/// Why a trace cannot be replayed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The policy cannot be made.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// There are no tokens to count.
    #[error("the trace has a prefill alone: a replay needs tokens of a decode")]
    NoDecode,
    /// The budget holds no expert.
    #[error("a budget of {budget} ({budget_bytes} bytes) does not hold one expert of {expert_bytes} bytes")]
    BudgetTooSmall {
        /// The budget as it was given.
        budget: Budget,
        /// Its bytes.
        budget_bytes: u64,
        /// Bytes of the largest expert.
        expert_bytes: u64,
    },
}

/// A trace, ready to be replayed.
///
/// ```
/// use hoistway_experts::{replay::{Budget, Replay, ReplayOptions}, trace::{Pattern, Synthetic}};
/// let trace = Synthetic::new(Pattern::Zipf { exponent: 1.0 }).generate().unwrap();
/// let mut replay = Replay::new(&trace, &ReplayOptions::default()).unwrap();
/// let outcome = replay.run("lru", Budget::Cycles(4.0)).unwrap();
/// assert!(outcome.hit_rate > 0.3 && outcome.belady_gap > 0.0);
/// ```
#[derive(Debug)]
pub struct Replay {
    shape: CatalogShape,
    visits: Visits,
    future: Future,
    profile: Option<Profile>,
    tokens: u64,
    /// Hit rates of `belady`, by budget in bytes.
    belady: BTreeMap<u64, f64>,
}

impl Replay {
    /// Prepares a trace.
    ///
    /// # Errors
    /// [`ReplayError::NoDecode`].
    pub fn new(trace: &Trace, options: &ReplayOptions) -> Result<Self, ReplayError> {
        let mut tokens: Vec<(u32, u32)> = trace
            .visits()
            .filter(|visit| visit.phase == Phase::Decode)
            .map(|visit| (visit.turn, visit.step))
            .collect();
        tokens.dedup();
        if tokens.is_empty() {
            return Err(ReplayError::NoDecode);
        }
        let (shape, visits) = (trace.shape().clone(), Visits::new(trace, options.prefill_batch));
        let future = Future::new(&shape, visits.iter().map(|visit| (visit.layer, visit.experts)));
        let (profile, tokens) = (options.profile.clone(), tokens.len() as u64);
        Ok(Self { shape, visits, future, profile, tokens, belady: BTreeMap::new() })
    }

    /// Replays the trace with the policy of a name and a budget for resident experts.
    ///
    /// # Errors
    /// [`ReplayError`] if there is no such policy, it lacks its profile, or the budget holds no expert.
    pub fn run(&mut self, policy: &str, budget: Budget) -> Result<Outcome, ReplayError> {
        let budget_bytes = budget.bytes(&self.shape);
        let sizes = self.shape.layers().iter().filter(|layer| layer.experts > 0);
        let expert_bytes = sizes.map(|layer| layer.expert_bytes).max().unwrap_or_default();
        if budget_bytes < expert_bytes {
            return Err(ReplayError::BudgetTooSmall { budget, budget_bytes, expert_bytes });
        }
        let (name, tally) = self.tally(policy, budget_bytes)?;
        let belady = match self.belady.get(&budget_bytes) {
            Some(&rate) => rate,
            None => {
                let rate = self.tally("belady", budget_bytes)?.1.hit_rate();
                self.belady.insert(budget_bytes, rate);
                rate
            }
        };
        Ok(Outcome::new(name, &tally, &self.shape, budget_bytes, self.tokens, belady))
    }

    fn tally(&self, policy: &str, budget_bytes: u64) -> Result<(&'static str, Tally), PolicyError> {
        let profile = self.profile.as_ref();
        let input = PolicyInput { shape: &self.shape, profile, future: Some(&self.future) };
        let policy = policy::by_name(policy, input)?;
        let name = policy.name();
        let mut residency = Residency::new(&self.shape, policy, budget_bytes);
        for visit in self.visits.iter() {
            residency.visit(&visit);
        }
        Ok((name, residency.tally))
    }
}
