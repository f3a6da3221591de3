//! Measures what a span costs while nothing is recorded, and while something is.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use hoistway_trace::Timeline;
use std::{hint::black_box, time::Instant};
use tracing::trace_span;
use tracing_subscriber::layer::SubscriberExt as _;

fn nanoseconds_for_each(spans: u32) -> f64 {
    let begun = Instant::now();
    for offset in 0..spans {
        drop(black_box(trace_span!(
            // Others are not recorded.
            target: "hoistway",
            "read",
            route = "io_uring",
            file = %"model.safetensors",
            offset,
            bytes = 4_u64 << 20
        )));
    }
    begun.elapsed().as_nanos() as f64 / f64::from(spans)
}

fn main() {
    println!("no subscriber:  {:8.2} ns a span", nanoseconds_for_each(50_000_000));
    let timeline = Timeline::new();
    let subscriber = tracing_subscriber::registry().with(timeline.layer());
    tracing::subscriber::set_global_default(subscriber).unwrap();
    println!("not recording:  {:8.2} ns a span", nanoseconds_for_each(50_000_000));
    let path = std::env::temp_dir().join(format!("hoistway-cost-{}.json", std::process::id()));
    let recording = timeline.record(&path).unwrap();
    const RECORDED: u32 = 100_000;
    println!("recording:      {:8.2} ns a span", nanoseconds_for_each(RECORDED));
    recording.finish().unwrap();
    let written = std::fs::read_to_string(&path).unwrap().matches("model.safetensors").count();
    assert_eq!(written, RECORDED as usize, "each span is in the timeline");
    std::fs::remove_file(path).unwrap();
}
