//! Traces of routing: no panic, no expert that the model does not have, and what is taken is read again as it was written.
#![no_main]

use hoistway_experts::{
    replay::{Budget, Replay, ReplayOptions},
    trace::{Format, Trace, TraceOptions},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let options = TraceOptions { expert_bytes: Some(1 << 20) };
    let Ok(trace) = Trace::read("t", bytes, &options) else { return };
    let shape = trace.shape();
    for visit in trace.visits() {
        let layer = shape.layers()[visit.layer as usize];
        assert!(!visit.experts.is_empty() && visit.experts.len() <= shape.experts_per_token() as usize);
        assert!(visit.experts.iter().all(|&(expert, weight)| expert < layer.experts && weight.is_finite()));
    }
    for format in Format::ALL {
        let mut text = Vec::new();
        trace.write(*format, &mut text).expect("memory takes everything");
        let again = Trace::read("t", &text[..], &TraceOptions::default()).expect("it was written by us");
        assert_eq!(again.shape(), shape);
        assert!(again.visits().eq(trace.visits()));
    }
    // Policies keep a table of all experts.
    if shape.experts() > 1 << 16 {
        return;
    }
    let Ok(mut replay) = Replay::new(&trace, &ReplayOptions::default()) else { return };
    for policy in ["ewma2", "lru", "arc"] {
        if let Ok(outcome) = replay.run(policy, Budget::Cycles(1.5)) {
            assert!(outcome.hits + outcome.cold_misses <= outcome.lookups);
        }
    }
});
