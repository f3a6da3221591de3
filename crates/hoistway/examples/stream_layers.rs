//! Runs a model that does not stay in memory: its layers are read from storage one after the other, each time they are
//! needed. With `prefetch` the next layer streams while this one is computed with.
//!
//! ```text
//! cargo run --release --example stream_layers -- FILE LAYER_BYTES COMPUTE_MS on-demand|prefetch
//! ```
//!
//! The file is cut into layers of equal length. What stands for computing adds up a layer's bytes and then keeps its
//! thread busy until so many milliseconds are over. Prints a line of JSON: where the time went, and the sum.
#![allow(clippy::print_stdout)]

use hoistway::{
    ByteRange,
    read::{Batch, Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
};
use std::{
    env,
    hint::black_box,
    time::{Duration, Instant},
};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [file, layer_bytes, compute_ms, mode] = arguments.as_slice() else {
        return Err("usage: stream_layers FILE LAYER_BYTES COMPUTE_MS on-demand|prefetch".into());
    };
    let prefetches = match mode.as_str() {
        "on-demand" => false,
        "prefetch" => true,
        other => return Err(format!("the mode is on-demand or prefetch, not {other}").into()),
    };
    let (layer_bytes, compute) =
        (layer_bytes.parse()?, Duration::from_secs_f64(compute_ms.parse::<f64>()? / 1e3));
    let file = ReadFile::open(file)?;
    let reader = Reader::new(&ReaderOptions::default())?;
    let layers = file.len().checked_div(layer_bytes).ok_or("a layer has bytes")?;
    let submit = |layer: u64, priority| -> Result<Batch, Failure> {
        let range = ByteRange::at(layer * layer_bytes, layer_bytes).ok_or("the file is too long")?;
        Ok(reader.submit([ReadRequest::new(&file, range, Target::memory())], priority)?)
    };

    let (started, mut waited, mut sum) = (Instant::now(), Duration::ZERO, 0u64);
    let mut next = None;
    for layer in 0..layers {
        let asked = Instant::now();
        let batch = match next.take() {
            Some(batch) => batch,
            None => submit(layer, Priority::Demand)?,
        };
        batch.wait().map_err(ToString::to_string)?;
        waited += asked.elapsed();
        if prefetches && layer + 1 < layers {
            next = Some(submit(layer + 1, Priority::Prefetch)?);
        }
        let bytes = batch.take(0).ok_or("the layer has no memory")?;
        sum = sum.wrapping_add(run_layer(&bytes, compute));
    }
    println!(
        r#"{{"mode":"{mode}","layers":{layers},"waited_seconds":{:.6},"total_seconds":{:.6},"sum":{sum}}}"#,
        waited.as_secs_f64(),
        started.elapsed().as_secs_f64(),
    );
    Ok(())
}

/// Stands for computing with a layer.
fn run_layer(bytes: &[u8], time: Duration) -> u64 {
    let until = Instant::now() + time;
    let (words, _) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
    while Instant::now() < until {
        black_box(sum);
    }
    sum
}
