//! Measures what `Store::ensure` takes if all experts are resident.
//!
//! ```text
//! cargo run --release --package hoistway-experts --example ensure_hits -- [ROUNDS]
//! ```
//!
//! A model of one layer with 128 experts is made, all of which fit the budget. A round requests so many experts 64 times and
//! then drops the leases, with a layer that a caller observes and with one that it does not, for which each request tells
//! the policy of a visit. Prints a line of JSON for each number of experts: the fastest round and the median, in microseconds.
#![allow(clippy::print_stdout)]

use hoistway::Checkpoint;
use hoistway_experts::{
    catalog::ExpertCatalog,
    policy::{self, CatalogShape},
    store::{Lease, Store, StoreOptions},
};
use std::{
    env, fs, hint,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

type Failure = Box<dyn std::error::Error>;

const EXPERTS: u32 = 128;
const REQUESTS: usize = 64;
const SIZES: [u32; 5] = [1, 2, 4, 8, 16];

/// The times of rounds, a request each.
#[derive(Default)]
struct Times {
    ensure: Vec<Duration>,
    release: Vec<Duration>,
}

fn main() -> Result<(), Failure> {
    let rounds: usize = env::args().nth(1).map_or(Ok(20_000), |rounds| rounds.parse())?;
    let path = env::temp_dir().join(format!("ensure-hits-{}.safetensors", std::process::id()));
    write_model(&path)?;
    let opened = open(&path);
    fs::remove_file(&path)?;
    let store = opened?;
    for is_observed in [false, true] {
        if is_observed {
            store.observe(0, &[(0, 1.0)])?;
        }
        for size in SIZES {
            let times = measure(&store, size, rounds)?;
            let (ensure, release) = (figures(times.ensure), figures(times.release));
            println!(
                r#"{{"experts":{size},"observed":{is_observed},"ensure":{ensure},"release":{release}}}"#
            );
        }
    }
    Ok(())
}

/// Requests `size` experts again and again, which are all resident.
fn measure(store: &Store, size: u32, rounds: usize) -> Result<Times, Failure> {
    let mut times = Times::default();
    let mut leases: Vec<Lease> = Vec::with_capacity(REQUESTS);
    for round in 0..rounds {
        let first = (round as u32 * 7) % (EXPERTS - size);
        let experts: Vec<u32> = (first..first + size).rev().collect();
        let begun = Instant::now();
        for _ in 0..REQUESTS {
            leases.push(store.ensure(0, hint::black_box(&experts))?);
        }
        let ensured = Instant::now();
        leases.clear();
        let released = ensured.elapsed();
        times.ensure.push((ensured - begun) / REQUESTS as u32);
        times.release.push(released / REQUESTS as u32);
    }
    Ok(times)
}

/// A JSON object: the fastest round and the median, in microseconds.
fn figures(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let microseconds = |time: Option<&Duration>| time.copied().unwrap_or_default().as_secs_f64() * 1e6;
    let (least, median) = (microseconds(times.first()), microseconds(times.get(times.len() / 2)));
    format!(r#"{{"least":{least:.3},"median":{median:.3}}}"#)
}

/// A store whose experts are all resident.
fn open(path: &Path) -> Result<Store, Failure> {
    let checkpoint = Checkpoint::open(&[path])?;
    let catalog = Arc::new(ExpertCatalog::of_checkpoint(&checkpoint, Some(8))?);
    let files = ExpertCatalog::open_files(&checkpoint);
    let shape = CatalogShape::try_from(&*catalog)?;
    let chosen = policy::by_name(policy::DEFAULT, &shape)?;
    let store = Store::open(catalog, files, chosen, &StoreOptions::default().budget_bytes(1 << 30))?;
    let all: Vec<u32> = (0..EXPERTS).collect();
    drop(store.ensure(0, &all)?);
    Ok(store)
}

/// A safetensors file of one layer.
fn write_model(path: &Path) -> Result<(), Failure> {
    let (mut entries, mut end) = (Vec::new(), 0);
    for part in ["gate", "up", "down"] {
        for expert in 0..EXPERTS {
            let name = format!("model.layers.0.mlp.experts.{expert}.{part}_proj.weight");
            let start = end;
            end += 8192;
            entries.push(format!(
                r#""{name}":{{"dtype":"U8","shape":[64,128],"data_offsets":[{start},{end}]}}"#
            ));
        }
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + end, 0);
    Ok(fs::write(path, file)?)
}
