//! `windlass kv bench`: storing and loading blocks, beside what the drive can do.
//!
//! `limit` measures the drive with nothing but reads and writes of one file; `tables` writes what was measured.

mod limit;
mod tables;

use super::arguments;
use crate::{failure::Failure, output};
use limit::{Limit, drop_from_cache};
use std::{
    fs,
    path::Path,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};
use tables::{Measurement, Operation, Summary};
use windlass_kv::{
    Buffer, BufferItem, Key, Namespace, NamespaceDescription, NamespaceOptions, Store, StoreOptions,
    TransferOptions,
};

/// Time after which a request is given up, with the bench.
const PATIENCE: Duration = Duration::from_secs(120);
/// What a block takes besides its bytes, at most, rounded up to whole pages.
const OVERHEAD: u64 = 8192;

/// One combination of what is varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Combination {
    block_bytes: u64,
    threads: u16,
    batch: u32,
    /// How many blocks there are.
    blocks: u64,
}

pub(super) fn run(arguments: &arguments::Bench) -> Result<(), Failure> {
    let combinations = combinations(arguments)?;
    if let Some(directory) = &arguments.output_dir {
        fs::create_dir_all(directory).map_err(Failure::output)?;
    }
    fs::create_dir_all(&arguments.directory).map_err(|source| made(&arguments.directory, &source))?;
    let mut measurements = Vec::new();
    for combination in combinations {
        for iteration in 0..arguments.iterations {
            measure(arguments, combination, iteration, &mut measurements)?;
        }
    }
    let summaries = tables::summaries(&measurements);
    if let Some(directory) = &arguments.output_dir {
        tables::write(directory, &measurements, &summaries).map_err(Failure::output)?;
    }
    if arguments.json {
        output::write_json(&serde_json::json!({ "measurements": measurements, "summary": summaries }))
    } else {
        output::write_text(&Summary::table(&summaries))
    }
}

fn combinations(arguments: &arguments::Bench) -> Result<Vec<Combination>, Failure> {
    let mut combinations = Vec::new();
    for &block_bytes in &arguments.block_sizes {
        if block_bytes == 0 || block_bytes > arguments.bytes {
            let message = "block-sizes are at least one byte, and no more than --bytes in all";
            return Err(Failure::told(message, 2));
        }
        let blocks = arguments.bytes / block_bytes;
        let batch = arguments.batch;
        combinations.extend(arguments.threads.iter().map(|&threads| Combination {
            block_bytes,
            threads,
            batch,
            blocks,
        }));
    }
    Ok(combinations)
}

/// Measures one combination once: the drive, storing, the drive, loading cold and warm.
fn measure(
    arguments: &arguments::Bench,
    combination: Combination,
    iteration: u32,
    measurements: &mut Vec<Measurement>,
) -> Result<(), Failure> {
    let below = tempfile::Builder::new().prefix("windlass-kv-bench-").tempdir_in(&arguments.directory);
    let directory = below.map_err(|source| made(&arguments.directory, &source))?;
    let bytes = combination.blocks.saturating_mul(combination.block_bytes);
    let limit = Limit::new(&directory.path().join("limit"), bytes, combination.block_bytes)?;
    let mut add = |operation, seconds: f64, limit_rate| {
        measurements.push(Measurement::new(operation, combination, iteration, bytes, seconds, limit_rate));
    };
    let limit_rate = limit.write()?;
    let root = directory.path().join("store");
    let store = Store::open(options(arguments, combination, &root))?;
    let description = NamespaceDescription { model: "bench".into(), ..NamespaceDescription::default() };
    let namespace = store.namespace(&description, NamespaceOptions::default())?;
    let seconds = on_threads(
        combination,
        |thread| stored(&namespace, combination, thread),
        || Ok(store.flush(Some(PATIENCE))?),
    )?;
    add(Operation::Store, seconds, limit_rate);
    let limit_rate = limit.read()?;
    drop_from_cache(&root).map_err(|source| made(&root, &source))?;
    for operation in [Operation::LoadCold, Operation::LoadWarm] {
        let seconds = on_threads(combination, |thread| loaded(&namespace, combination, thread), || Ok(()))?;
        add(operation, seconds, limit_rate);
    }
    store.close(Some(PATIENCE))?;
    Ok(())
}

fn options(arguments: &arguments::Bench, combination: Combination, root: &Path) -> StoreOptions {
    let slot = combination.block_bytes.saturating_add(OVERHEAD);
    let mut options = StoreOptions::new(root);
    // Room enough that nothing is evicted.
    options.capacity_bytes =
        Some(combination.blocks.saturating_mul(slot).saturating_mul(2).saturating_add(4 << 30));
    options.layout = Some(arguments.layout);
    options.durability = arguments.durability;
    options.route = arguments.route;
    options.verify = !arguments.no_verify;
    let under_way = u64::from(combination.threads) * u64::from(combination.batch);
    options.max_in_flight_bytes = options.max_in_flight_bytes.max(under_way.saturating_mul(slot));
    options
}

fn made(path: &Path, source: &std::io::Error) -> Failure {
    Failure::told(format!("using {}: {source}", path.display()), 5)
}

/// Seconds that `work` takes on all threads, from their start to the end of the last and of `finish`.
fn on_threads(
    combination: Combination,
    work: impl Fn(u64) -> Result<Worker, Failure> + Sync,
    finish: impl FnOnce() -> Result<(), Failure>,
) -> Result<f64, Failure> {
    let ready = Barrier::new(usize::from(combination.threads) + 1);
    thread::scope(|scope| {
        let (work, ready) = (&work, &ready);
        let threads: Vec<_> = (0..u64::from(combination.threads))
            .map(|thread| {
                scope.spawn(move || {
                    let worker = work(thread);
                    ready.wait();
                    worker?.run()
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        for thread in threads {
            thread.join().unwrap_or_else(|_| Err(Failure::told("a thread has failed", 1)))?;
        }
        finish()?;
        Ok(start.elapsed().as_secs_f64())
    })
}

/// One thread's part: every so many-th block, in batches.
struct Worker {
    namespace: Namespace,
    numbers: Vec<u64>,
    batch: usize,
    buffers: Vec<Buffer>,
    is_store: bool,
}

fn stored(namespace: &Namespace, combination: Combination, thread: u64) -> Result<Worker, Failure> {
    let mut worker = loaded(namespace, combination, thread)?;
    worker.is_store = true;
    // Nothing that a drive could make shorter.
    let mut state = thread + 1;
    for buffer in &mut worker.buffers {
        for chunk in buffer.chunks_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let random = (state ^ (state >> 33)).to_le_bytes();
            chunk.copy_from_slice(&random[..chunk.len()]);
        }
    }
    Ok(worker)
}

fn loaded(namespace: &Namespace, combination: Combination, thread: u64) -> Result<Worker, Failure> {
    let len = usize::try_from(combination.block_bytes)
        .map_err(|_| Failure::told("a block does not fit memory", 7))?;
    Ok(Worker {
        namespace: namespace.clone(),
        numbers: (thread..combination.blocks).step_by(usize::from(combination.threads)).collect(),
        batch: combination.batch as usize,
        buffers: (0..combination.batch).map(|_| Buffer::zeroed(len)).collect(),
        is_store: false,
    })
}

impl Worker {
    fn run(mut self) -> Result<(), Failure> {
        let options = TransferOptions::default();
        for numbers in self.numbers.chunks(self.batch) {
            let mut items = Vec::with_capacity(numbers.len());
            let spare = self.buffers.split_off(numbers.len());
            for (number, mut buffer) in numbers.iter().zip(std::mem::take(&mut self.buffers)) {
                if self.is_store {
                    mark(&mut buffer, *number);
                }
                items.push(BufferItem { key: Key::new(&number.to_le_bytes())?, shard: 0, buffer });
            }
            let transfer = if self.is_store {
                self.namespace.store_buffers(items, &options)?
            } else {
                self.namespace.load_buffers(items, &options)?
            };
            let (completion, buffers) = transfer.wait(Some(PATIENCE))?;
            if let Some(status) = completion.items.iter().find(|status| !status.is_ok()) {
                return Err(Failure::told(format!("a block ended as {status}"), 1));
            }
            for (number, buffer) in numbers.iter().zip(&buffers) {
                if !self.is_store && !is_marked(buffer, *number) {
                    return Err(Failure::told(format!("block {number} is not what was stored"), 4));
                }
            }
            self.buffers = buffers;
            self.buffers.extend(spare);
        }
        Ok(())
    }
}

fn mark(buffer: &mut [u8], number: u64) {
    let len = buffer.len().min(8);
    buffer[..len].copy_from_slice(&number.to_le_bytes()[..len]);
}

fn is_marked(buffer: &[u8], number: u64) -> bool {
    let len = buffer.len().min(8);
    buffer[..len] == number.to_le_bytes()[..len]
}
