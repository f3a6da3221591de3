//! Traces that no model recorded: for tests, and to see what a policy does with a kind of routing.
#![forbid(unsafe_code)]

use super::{
    Draft, MAX_CHOICES, Phase, Trace, TraceError, TraceOptions, TraceProblem,
    draft::{LayerDraft, Row},
};
use crate::policy::CatalogShape;
use fastrand::Rng;

/// How routers choose.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Pattern {
    /// Every expert is as likely as every other: no policy does better than the share that is resident.
    Uniform,
    /// An expert's likelihood falls with its rank to the power of the exponent. Each layer has its own ranks.
    Zipf {
        /// 0 is uniform; 1 is usual.
        exponent: f64,
    },
    /// A token keeps each expert of the token before with this probability, and chooses the others as by `Zipf`.
    Sticky {
        /// From 0 to 1.
        stay: f64,
        /// As in `Zipf`.
        exponent: f64,
    },
    /// One expert after the other, and again from the first.
    Scan,
}

/// A trace to be made. The same values give the same trace.
///
/// ```
/// use hoistway_experts::trace::{Pattern, Synthetic};
/// let synthetic = Synthetic { layers: 4, experts: 16, tokens: 10, ..Synthetic::new(Pattern::Scan) };
/// let trace = synthetic.generate().unwrap();
/// assert_eq!(trace.visits().count(), 4 * 10);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// How routers choose.
    pub pattern: Pattern,
    /// Number of layers.
    pub layers: u32,
    /// Experts of each layer.
    pub experts: u32,
    /// Experts that a token goes to in each layer.
    pub experts_per_token: u32,
    /// Bytes of each expert.
    pub expert_bytes: u64,
    /// Tokens of the prompt.
    pub prefill_tokens: u32,
    /// Tokens of the answer.
    pub tokens: u32,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl Synthetic {
    /// Describes a trace of 256 tokens without a prompt, of a model of 32 layers with 64 experts of 1 MiB, 4 a token.
    pub fn new(pattern: Pattern) -> Self {
        Self {
            pattern,
            layers: 32,
            experts: 64,
            experts_per_token: 4,
            expert_bytes: 1 << 20,
            prefill_tokens: 0,
            tokens: 256,
            seed: 0,
        }
    }

    /// Makes the trace.
    ///
    /// # Errors
    /// [`TraceError::Invalid`] if there is no such model, a probability or an exponent is no such number, or the trace is
    /// longer than a trace may be.
    pub fn generate(&self) -> Result<Trace, TraceError> {
        let wrong = |problem| TraceError::Invalid { name: "synthetic trace".into(), line: None, problem };
        let Self { layers, experts, experts_per_token, prefill_tokens, tokens, .. } = *self;
        let (exponent, stay) = match self.pattern {
            Pattern::Uniform | Pattern::Scan => (0.0, 0.0),
            Pattern::Zipf { exponent } => (exponent, 0.0),
            Pattern::Sticky { stay, exponent } => (exponent, stay),
        };
        if !(0.0..=100.0).contains(&exponent) {
            return Err(wrong(TraceProblem::field("exponent", &exponent.to_string(), "from 0 to 100")));
        }
        if !(0.0..=1.0).contains(&stay) {
            return Err(wrong(TraceProblem::field("stay", &stay.to_string(), "a probability")));
        }
        if experts_per_token > experts {
            let expected = "at most the number of experts";
            return Err(wrong(TraceProblem::field(
                "experts_per_token",
                &experts_per_token.to_string(),
                expected,
            )));
        }
        let all = u64::from(prefill_tokens) + u64::from(tokens);
        let choices = u128::from(all) * u128::from(layers) * u128::from(experts_per_token);
        if choices > MAX_CHOICES as u128 {
            return Err(wrong(TraceProblem::TooLong));
        }
        if experts > CatalogShape::MAX_EXPERTS {
            let (layer, expert) = (0, experts);
            return Err(wrong(TraceProblem::NoExpert { layer, expert, experts: CatalogShape::MAX_EXPERTS }));
        }
        let mut draft = Draft {
            model: Some("synthetic".into()),
            layer_count: Some(layers),
            experts: Some(experts),
            experts_per_token: Some(experts_per_token),
            ..Draft::default()
        };
        let mut rng = Rng::with_seed(self.seed);
        for number in 0..layers {
            let of_layer = LayerDraft { expert_bytes: Some(self.expert_bytes), ..LayerDraft::default() };
            *draft.layer(number).map_err(wrong)? = of_layer;
            let mut router = Router::new(experts, exponent, rng.fork());
            let mut chosen = Vec::new();
            for step in 0..all {
                match self.pattern {
                    Pattern::Scan => router.scan(experts_per_token, &mut chosen),
                    _ => router.choose(experts_per_token, stay, &mut chosen),
                }
                let phase = if step < u64::from(prefill_tokens) { Phase::Prefill } else { Phase::Decode };
                let weight = 1.0 / experts_per_token as f32;
                for &expert in &chosen {
                    // There are fewer choices than a u32 counts, so fewer steps too.
                    let row =
                        Row { turn: 0, phase, step: step as u32, layer: number, expert, weight, line: 0 };
                    draft.push(row).map_err(wrong)?;
                }
            }
        }
        draft.finish(&TraceOptions::default()).map_err(|(_, problem)| wrong(problem))
    }
}

/// The router of a layer.
struct Router {
    /// For each expert, 1 by its likelihood.
    rarity: Vec<f64>,
    /// For each expert, when it comes in the race for the next token.
    arrivals: Vec<(f64, u32)>,
    next: u32,
    rng: Rng,
}

impl Router {
    fn new(experts: u32, exponent: f64, mut rng: Rng) -> Self {
        let mut rarity: Vec<f64> = (0..experts).map(|rank| f64::from(rank + 1).powf(exponent)).collect();
        rng.shuffle(&mut rarity);
        Self { rarity, arrivals: Vec::new(), next: 0, rng }
    }

    /// Chooses the experts of a token; `chosen` has those of the token before.
    fn choose(&mut self, count: u32, stay: f64, chosen: &mut Vec<u32>) {
        chosen.retain(|_| self.rng.f64() < stay);
        // Exponential arrivals at rates that are the likelihoods come in the order of draws without replacement.
        self.arrivals.clear();
        for (expert, rarity) in (0..).zip(&self.rarity) {
            if !chosen.contains(&expert) {
                let arrival = -(1.0 - self.rng.f64()).ln() * rarity;
                self.arrivals.push((arrival, expert));
            }
        }
        let wanted = (count as usize).saturating_sub(chosen.len());
        self.arrivals.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
        chosen.extend(self.arrivals.iter().take(wanted).map(|&(_, expert)| expert));
    }

    fn scan(&mut self, count: u32, chosen: &mut Vec<u32>) {
        let experts = self.rarity.len() as u32;
        chosen.clear();
        for _ in 0..count {
            chosen.push(self.next);
            self.next = (self.next + 1) % experts;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn of(pattern: Pattern) -> Synthetic {
        Synthetic { layers: 3, experts: 32, experts_per_token: 4, tokens: 400, ..Synthetic::new(pattern) }
    }

    /// The share of the choices of layer 0 that go to the 8 experts that are chosen most, and of those that the token before
    /// went to as well.
    fn shares(synthetic: &Synthetic) -> (f64, f64) {
        let trace = synthetic.generate().unwrap();
        let mut counts = BTreeMap::<u32, u32>::new();
        let (mut all, mut kept) = (0.0, 0.0);
        let mut last: Vec<u32> = Vec::new();
        for visit in trace.visits().filter(|visit| visit.layer == 0) {
            let chosen: Vec<u32> = visit.experts.iter().map(|&(expert, _)| expert).collect();
            all += chosen.len() as f64;
            kept += chosen.iter().filter(|expert| last.contains(expert)).count() as f64;
            chosen.iter().for_each(|expert| *counts.entry(*expert).or_default() += 1);
            last = chosen;
        }
        let mut counts: Vec<u32> = counts.into_values().collect();
        counts.sort_unstable_by(|one, other| other.cmp(one));
        (counts[..8].iter().sum::<u32>() as f64 / all, kept / all)
    }

    #[test]
    fn patterns_are_what_they_are_called() {
        let (uniform, zipf) = (of(Pattern::Uniform), of(Pattern::Zipf { exponent: 1.0 }));
        let (common, kept) = shares(&uniform);
        assert!(common < 0.36 && (0.08..0.17).contains(&kept), "{common} {kept}");
        assert!(shares(&zipf).0 > 0.55, "{:?}", shares(&zipf));
        let sticky = shares(&of(Pattern::Sticky { stay: 0.75, exponent: 0.0 }));
        assert!((0.7..0.85).contains(&sticky.1), "{sticky:?}");
        let (common, kept) = shares(&of(Pattern::Scan));
        assert_eq!((common, kept), (0.25, 0.0));
    }

    #[test]
    fn the_same_seed_gives_the_same_trace() {
        let pattern = Pattern::Sticky { stay: 0.5, exponent: 1.0 };
        let [one, same] = [of(pattern), of(pattern)].map(|trace| trace.generate().unwrap());
        assert_eq!(one, same);
        assert_ne!(one, Synthetic { seed: 1, ..of(pattern) }.generate().unwrap());
        assert!(one.holes().is_empty() && one.shape().experts() == 3 * 32);
    }

    #[test]
    fn what_cannot_be_made_is_an_error() {
        let base = of(Pattern::Uniform);
        for (synthetic, said) in [
            (Synthetic { experts_per_token: 33, ..base }, "experts_per_token is '33'"),
            (Synthetic { experts_per_token: 0, ..base }, "no visits"),
            (Synthetic { tokens: 0, ..base }, "no visits"),
            (Synthetic { tokens: u32::MAX, ..base }, "more than 16777216 choices"),
            (Synthetic { layers: 4097, tokens: 1, ..base }, "there is no layer 4096"),
            (Synthetic { experts: u32::MAX, tokens: 1, ..base }, "there is no expert"),
            (Synthetic { expert_bytes: u64::MAX, ..base }, "experts of"),
            (Synthetic { pattern: Pattern::Zipf { exponent: f64::NAN }, ..base }, "exponent is 'NaN'"),
            (Synthetic { pattern: Pattern::Sticky { stay: 1.5, exponent: 0.0 }, ..base }, "stay is '1.5'"),
        ] {
            let text = synthetic.generate().unwrap_err().to_string();
            assert!(text.contains(said), "{text}");
        }
    }
}
