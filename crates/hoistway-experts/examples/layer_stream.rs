//! Runs a model that does not stay in memory, one pass: its layers are read from storage one after the other. With `prefetch`
//! the next layer streams while this one is computed with.
//!
//! ```text
//! cargo run --release --package hoistway-experts --example layer_stream -- CHECKPOINT COMPUTE_MS on-demand|prefetch
//! ```
//!
//! What stands for computing adds up a layer's bytes and then keeps its thread busy until so many milliseconds are over. Prints
//! a line of JSON: where the time went, and the sum.
#![allow(clippy::print_stdout)]

use hoistway::{
    Checkpoint,
    read::{Reader, ReaderOptions},
};
use hoistway_experts::layers::{Layer, LayerOptions, LayerStream, numbered_layers};
use std::{
    env,
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

type Failure = Box<dyn std::error::Error>;

/// Memory of a layer beside its tensors, which lie in whole blocks there. Far less than a layer, so that none stays resident.
const BESIDE: u64 = 64 << 10;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [path, compute_ms, mode] = arguments.as_slice() else {
        return Err("usage: layer_stream CHECKPOINT COMPUTE_MS on-demand|prefetch".into());
    };
    let ahead = match mode.as_str() {
        "on-demand" => 0,
        "prefetch" => 1,
        other => return Err(format!("the mode is on-demand or prefetch, not {other}").into()),
    };
    let compute = Duration::from_secs_f64(compute_ms.parse::<f64>()? / 1e3);
    let checkpoint = Checkpoint::open(&[path])?;
    let layers = numbered_layers(checkpoint.catalog());
    let tensors = checkpoint.catalog().tensors().iter();
    let all_bytes: u64 = tensors.map(|tensor| tensor.bytes.len()).sum();
    let layer_bytes = all_bytes.div_ceil(layers.len().max(1) as u64) + BESIDE;
    let options = LayerOptions::default().ahead(ahead).budget_bytes((1 + ahead as u64) * layer_bytes);
    let reader = Arc::new(Reader::new(&ReaderOptions::default())?);
    let mut stream = LayerStream::new(&checkpoint, &reader, &layers, &options)?;
    let stats = stream.stats();
    if (stats.kept, stats.ahead) != (0, ahead) {
        return Err("the layers of the checkpoint are not of one size".into());
    }

    let (started, mut waited, mut sum) = (Instant::now(), Duration::ZERO, 0u64);
    for _ in 0..layers.len() {
        let asked = Instant::now();
        let layer = stream.next_layer()?;
        waited += asked.elapsed();
        sum = sum.wrapping_add(run_layer(&layer, compute));
    }
    println!(
        r#"{{"mode":"{mode}","layers":{},"waited_seconds":{:.6},"total_seconds":{:.6},"sum":{sum}}}"#,
        layers.len(),
        waited.as_secs_f64(),
        started.elapsed().as_secs_f64(),
    );
    Ok(())
}

/// Stands for computing with a layer.
fn run_layer(layer: &Layer, time: Duration) -> u64 {
    let until = Instant::now() + time;
    let words = layer.tensors().flat_map(|tensor| tensor.bytes().as_chunks::<8>().0);
    let sum = words.fold(0u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
    while Instant::now() < until {
        black_box(sum);
    }
    sum
}
