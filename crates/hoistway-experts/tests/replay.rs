//! Replays: what is known beforehand of a trace and a policy comes out.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use hoistway_experts::{
    policy::{PolicyError, Profile, names},
    replay::{Budget, Outcome, Replay, ReplayError, ReplayOptions},
    trace::{Pattern, Phase, Synthetic, Trace, TraceOptions},
};
use proptest::prelude::*;
use std::{num::NonZeroU32, time::Duration};

const ZIPF: Pattern = Pattern::Zipf { exponent: 0.8 };
const STICKY: Pattern = Pattern::Sticky { stay: 0.4, exponent: 0.8 };

fn synthetic(pattern: Pattern) -> Synthetic {
    Synthetic { layers: 24, experts: 64, tokens: 200, ..Synthetic::new(pattern) }
}

fn replay(trace: &Trace) -> Replay {
    let profile = Profile::new(trace.shape(), trace.visits().map(|visit| (visit.layer, visit.experts)));
    Replay::new(trace, &ReplayOptions { profile: Some(profile), ..ReplayOptions::default() }).unwrap()
}

fn hit_rate(trace: &Trace, policy: &str, cycles: f64) -> f64 {
    replay(trace).run(policy, Budget::Cycles(cycles)).unwrap().hit_rate
}

#[test]
fn lru_keeps_nothing_below_one_cycle_and_the_default_does() {
    let trace = synthetic(ZIPF).generate().unwrap();
    let mut replay = replay(&trace);
    let mut run = |policy, cycles| replay.run(policy, Budget::Cycles(cycles)).unwrap();
    let below = run("lru", 0.9);
    assert!((below.hit_rate, below.cliff) == (0.0, true), "{below:?}");
    assert_eq!(below.faults_per_token, 24.0 * 4.0);
    assert_eq!(below.mib_per_token, 24.0 * 4.0);
    let above = run("lru", 1.25);
    assert!(above.hit_rate > 0.1 && !above.cliff, "{above:?}");
    let default = run("ewma2", 0.9);
    assert!(default.hit_rate > 0.1 && default.cliff, "{default:?}");
}

#[test]
fn with_room_for_all_only_first_uses_miss() {
    let trace = synthetic(STICKY).generate().unwrap();
    let all = Budget::Bytes(trace.shape().total_bytes());
    let mut replay = replay(&trace);
    for policy in names() {
        let Outcome { hits, lookups, cold_misses, belady_gap, .. } = replay.run(policy, all).unwrap();
        assert_eq!(hits + cold_misses, lookups, "{policy}");
        assert_eq!(belady_gap, 0.0, "{policy}");
    }
}

#[test]
fn of_uniform_routing_every_policy_hits_the_share_that_is_resident() {
    let trace = Synthetic { tokens: 600, ..synthetic(Pattern::Uniform) }.generate().unwrap();
    let mut replay = replay(&trace);
    for policy in names().filter(|policy| !["belady", "static-profile"].contains(policy)) {
        // 4 of 16 cycles.
        let rate = replay.run(policy, Budget::Cycles(4.0)).unwrap().hit_rate;
        assert!((0.19..0.27).contains(&rate), "{policy}: {rate}");
    }
}

#[test]
fn the_default_is_above_lru_where_experts_differ_in_use() {
    for (pattern, seed) in [(ZIPF, 1), (ZIPF, 2), (STICKY, 3), (STICKY, 4)] {
        let trace = Synthetic { seed, ..synthetic(pattern) }.generate().unwrap();
        for cycles in [1.25, 2.0, 4.0] {
            let [ewma2, lru] = ["ewma2", "lru"].map(|policy| hit_rate(&trace, policy, cycles));
            assert!(ewma2 >= lru + 0.025, "{pattern:?}, {cycles} cycles: {ewma2} and {lru}");
        }
    }
}

#[test]
fn a_prefill_is_visited_in_batches_and_seeds_the_default() {
    let trace = Synthetic { prefill_tokens: 100, tokens: 20, ..synthetic(ZIPF) }.generate().unwrap();
    let lookups = (24 * 4 * 20) as u64;
    let run = |batch, policy| {
        let prefill_batch = NonZeroU32::new(batch).unwrap();
        let options = ReplayOptions { prefill_batch, ..ReplayOptions::default() };
        Replay::new(&trace, &options).unwrap().run(policy, Budget::Cycles(2.0)).unwrap()
    };
    let (whole, halves, single) = (run(512, "lru"), run(50, "lru"), run(1, "lru"));
    for outcome in [&whole, &halves, &single] {
        assert_eq!((outcome.lookups, outcome.tokens), (lookups, 20));
    }
    // A prompt of 100 tokens goes to most of the 64 experts of a layer, a token to 4.
    assert!(whole.largest_layer_demand.experts > 50, "{whole:?}");
    assert!(halves.largest_layer_demand.experts < whole.largest_layer_demand.experts);
    assert_eq!(single.largest_layer_demand.experts, 4);
    assert_eq!(whole.largest_layer_demand.bytes, u64::from(whole.largest_layer_demand.experts) << 20);
    assert!(halves.prefill_faults > whole.prefill_faults);

    // The same tokens without the prompt before them: what the prompt taught is missing.
    let mut text = Vec::new();
    trace.write(hoistway_experts::trace::Format::Csv, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let decode: String =
        text.lines().filter(|line| !line.starts_with("0,0,")).map(|line| format!("{line}\n")).collect();
    let decode = Trace::read("t", decode.as_bytes(), &TraceOptions::default()).unwrap();
    assert!(decode.visits().all(|visit| visit.phase == Phase::Decode));
    let seeded = run(512, "ewma2").hit_rate;
    let unseeded = hit_rate(&decode, "ewma2", 2.0);
    assert!(seeded > unseeded + 0.05, "{seeded} {unseeded}");
}

#[test]
fn token_rates_are_bounds() {
    let trace = synthetic(ZIPF).generate().unwrap();
    let outcome = replay(&trace).run("lru", Budget::Cycles(0.5)).unwrap();
    // 96 MiB a token at 96 MiB a second.
    let rate = outcome.token_rate(96.0 * 1048576.0, Duration::from_millis(500)).unwrap();
    assert!((rate.overlapped - 1.0).abs() < 1e-9 && (rate.serial - 1.0 / 1.5).abs() < 1e-9, "{rate:?}");
    let rate = outcome.token_rate(f64::INFINITY, Duration::from_millis(500)).unwrap();
    assert_eq!((rate.overlapped, rate.serial), (2.0, 2.0));
    assert_eq!(outcome.token_rate(f64::INFINITY, Duration::ZERO), None);
}

#[test]
fn what_cannot_be_replayed_is_an_error() {
    let trace = Synthetic { tokens: 3, ..synthetic(ZIPF) }.generate().unwrap();
    let mut replay = Replay::new(&trace, &ReplayOptions::default()).unwrap();
    let cycles = Budget::Cycles(2.0);
    let unknown = PolicyError::Unknown { name: "mru".into() };
    assert_eq!(replay.run("mru", cycles), Err(ReplayError::Policy(unknown)));
    assert_eq!(replay.run("static-profile", cycles), Err(ReplayError::Policy(PolicyError::NeedsProfile)));
    let budget = Budget::Bytes((1 << 20) - 1);
    let too_small =
        ReplayError::BudgetTooSmall { budget, budget_bytes: (1 << 20) - 1, expert_bytes: 1 << 20 };
    assert_eq!(replay.run("lru", budget), Err(too_small));
    let prompt = Synthetic { prefill_tokens: 3, tokens: 0, ..synthetic(ZIPF) }.generate().unwrap();
    assert_eq!(Replay::new(&prompt, &ReplayOptions::default()).unwrap_err(), ReplayError::NoDecode);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn none_is_above_belady_and_more_room_never_hurts_it(
        seed in any::<u64>(),
        stay in 0.0..0.9,
        exponent in 0.0..1.5,
        cycles in 1.0..6.0,
    ) {
        let pattern = Pattern::Sticky { stay, exponent };
        let synthetic = Synthetic { layers: 5, experts: 24, experts_per_token: 3, tokens: 40, seed, ..Synthetic::new(pattern) };
        let trace = synthetic.generate().unwrap();
        let mut replay = replay(&trace);
        for policy in names() {
            let outcome = replay.run(policy, Budget::Cycles(cycles)).unwrap();
            prop_assert!(outcome.belady_gap >= 0.0, "{outcome:?}");
            prop_assert_eq!(outcome.belady_hit_rate - outcome.hit_rate, outcome.belady_gap);
        }
        let [less, more] = [cycles, cycles + 0.5].map(|cycles| replay.run("belady", Budget::Cycles(cycles)).unwrap().hit_rate);
        prop_assert!(more >= less);
    }
}
