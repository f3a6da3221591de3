//! Measures what a span costs while nothing is recorded, and while something is.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use hoistway_trace::Timeline;
use std::{hint::black_box, time::Instant};
use tracing::trace_span;
use tracing_subscriber::layer::SubscriberExt as _;

fn nanoseconds_for_each(spans: u32) -> f64 {
    let begun = Instant::now();
    for offset in 0..spans {
        drop(black_box(
            trace_span!("read", route = "io_uring", file = %"model.safetensors", offset, bytes = 4_u64 << 20),
        ));
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
    println!("recording:      {:8.2} ns a span", nanoseconds_for_each(100_000));
    recording.finish().unwrap();
    std::fs::remove_file(path).unwrap();
}
