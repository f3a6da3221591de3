//! `hoistway kv bench`: storing and loading blocks, beside what the drive can do.
//!
//! `limit` measures the drive with nothing but reads and writes of one file; `memory` is where blocks are before and after;
//! `tables` sums up what was measured; `files` is the directory of all that, which goes with the bench.

mod files;
mod limit;
mod memory;
mod tables;

use super::arguments;
use crate::{failure::Failure, output::progress_bar};
use files::Files;
use hoistway::DeviceId;
use hoistway_kv::{
    Buffer, BufferItem, Carrier, DeviceBuffer, Key, Namespace, NamespaceDescription, NamespaceOptions,
    Region, Store, StoreOptions, TransferOptions,
};
use indicatif::ProgressBar;
use limit::{Limit, drop_from_cache};
use memory::Memory;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};
use tables::{Measurement, Operation, Summary};

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
    /// Where they are stored from and loaded to.
    device: DeviceId,
}

impl Combination {
    /// Bytes of all blocks.
    fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes)
    }
}

pub(super) fn run(arguments: &arguments::Bench) -> Result<(), Failure> {
    let combinations = combinations(arguments)?;
    arguments.output.prepare(&["kv_throughput"])?;
    fs::create_dir_all(&arguments.directory).map_err(|source| made(&arguments.directory, &source))?;
    files::remove_when_interrupted()
        .map_err(|error| Failure::told(format!("cannot wait for Ctrl-C: {error}"), 1))?;
    // Of each combination: stores, cold loads, warm loads.
    let passes = 3 * u64::from(arguments.iterations);
    let moved = combinations.iter().map(Combination::bytes);
    let bar = progress_bar(moved.fold(0, u64::saturating_add).saturating_mul(passes));
    let mut found = Found { bar, measurements: Vec::new(), refused: BTreeSet::new() };
    for combination in combinations {
        for iteration in 0..arguments.iterations {
            match arguments.device {
                DeviceId::Cpu => measure::<Buffer>(arguments, combination, iteration, &mut found)?,
                _ => measure::<DeviceBuffer>(arguments, combination, iteration, &mut found)?,
            }
        }
    }
    let Found { measurements, refused, bar } = found;
    bar.finish_and_clear();
    let summaries = tables::summaries(&measurements);
    let figures = vec![("kv_throughput.svg".into(), Summary::figure(&summaries))];
    arguments.output.write_files("kv", &measurements, &summaries, figures)?;
    let results =
        serde_json::json!({ "measurements": measurements, "summary": summaries, "refused": refused });
    let refused = refused.iter().map(|why| format!("\nnot used: {why}")).collect::<String>();
    arguments.output.print(&results, &format!("{}{refused}", Summary::table(&summaries)))
}

/// What was measured, and what was not possible.
struct Found {
    bar: ProgressBar,
    measurements: Vec<Measurement>,
    /// Ways that would have been better, and why they were not used.
    refused: BTreeSet<String>,
}

fn combinations(arguments: &arguments::Bench) -> Result<Vec<Combination>, Failure> {
    let mut combinations = Vec::new();
    for &block_bytes in &arguments.block_sizes {
        if block_bytes == 0 || block_bytes > arguments.bytes {
            let message = "a size of --block-sizes must be at least one byte, and at most --bytes";
            return Err(Failure::told(message, 2));
        }
        let blocks = arguments.bytes / block_bytes;
        let batch = arguments.batch;
        combinations.extend(arguments.threads.iter().map(|&threads| Combination {
            block_bytes,
            threads,
            batch,
            blocks,
            device: arguments.device,
        }));
    }
    Ok(combinations)
}

/// Measures one combination once: the drive, storing, the drive, loading cold and warm.
fn measure<B: Memory>(
    arguments: &arguments::Bench,
    combination: Combination,
    iteration: u32,
    found: &mut Found,
) -> Result<(), Failure> {
    let directory = Files::new(&arguments.directory).map_err(|source| made(&arguments.directory, &source))?;
    let bytes = combination.bytes();
    let limit = Limit::new(&directory.path().join("limit"), bytes, combination.block_bytes)?;
    let mut add = |operation, (seconds, moved): (f64, Moved), limit| {
        let measured = Measurement::new(operation, combination, iteration, bytes, seconds, limit, &moved);
        found.measurements.push(measured);
        found.bar.inc(bytes);
    };
    let limit_rate = limit.write()?;
    let root = directory.path().join("store");
    let store = Store::open(options(arguments, combination, &root))?;
    let description = NamespaceDescription::default().model("bench");
    let namespace = store.namespace(&description, NamespaceOptions::default())?;
    let worker = |thread, is_store| Worker::<B>::new(&store, &namespace, combination, thread, is_store);
    let stored = on_threads(combination, |thread| worker(thread, true), || Ok(store.flush(Some(PATIENCE))?))?;
    add(Operation::Store, stored, limit_rate);
    let limit_rate = limit.read()?;
    drop_from_cache(&root).map_err(|source| made(&root, &source))?;
    for operation in [Operation::LoadCold, Operation::LoadWarm] {
        let loaded = on_threads(combination, |thread| worker(thread, false), || Ok(()))?;
        add(operation, loaded, limit_rate);
    }
    found
        .refused
        .extend(store.report()?.refused.iter().map(|refusal| format!("{}: {}", refusal.what, refusal.why)));
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
    options.direct = arguments.direct;
    options.verify = !arguments.no_verify;
    let under_way = u64::from(combination.threads) * u64::from(combination.batch);
    options.max_in_flight_bytes = options.max_in_flight_bytes.max(under_way.saturating_mul(slot));
    options
}

fn made(path: &Path, source: &std::io::Error) -> Failure {
    Failure::told(format!("cannot use {}: {source}", path.display()), 5)
}

/// Seconds that `work` takes on all threads, from their start to the end of the last and of `finish`; and what it moved.
fn on_threads<B: Memory>(
    combination: Combination,
    work: impl Fn(u64) -> Result<Worker<B>, Failure> + Sync,
    finish: impl FnOnce() -> Result<(), Failure>,
) -> Result<(f64, Moved), Failure> {
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
        let mut moved = Moved::default();
        for thread in threads {
            let of_thread = thread.join().unwrap_or_else(|_| Err(Failure::told("a thread has failed", 1)))?;
            moved.add(&of_thread.carried, of_thread.bounced_bytes);
        }
        finish()?;
        Ok((start.elapsed().as_secs_f64(), moved))
    })
}

/// One thread's part: every so many-th block, in batches.
struct Worker<B> {
    namespace: Namespace,
    numbers: Vec<u64>,
    batch: usize,
    buffers: Vec<B>,
    /// What the buffers hold: the same when blocks are stored and when they were loaded.
    contents: Vec<Vec<u8>>,
    /// The buffers, known to the store.
    _regions: Vec<Region>,
    is_store: bool,
}

/// What transfers moved, by the way that it took.
#[derive(Clone, Debug, Default)]
struct Moved {
    carried: BTreeMap<Carrier, u64>,
    bounced_bytes: u64,
}

impl Moved {
    fn add(&mut self, carried: &BTreeMap<Carrier, u64>, bounced_bytes: u64) {
        for (carrier, bytes) in carried {
            *self.carried.entry(*carrier).or_default() += bytes;
        }
        self.bounced_bytes += bounced_bytes;
    }

    /// Names of the ways, that of most bytes first.
    fn routes(&self) -> String {
        let mut carried: Vec<_> = self.carried.iter().collect();
        carried.sort_by_key(|(_, bytes)| Reverse(**bytes));
        let names: Vec<_> = carried.iter().map(|(carrier, _)| carrier.to_string()).collect();
        names.join("+")
    }
}

/// Bytes that no drive could make shorter.
fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed + 1;
    let mut bytes = vec![0; len];
    for chunk in bytes.chunks_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let random = (state ^ (state >> 33)).to_le_bytes();
        chunk.copy_from_slice(&random[..chunk.len()]);
    }
    bytes
}

impl<B: Memory> Worker<B> {
    fn new(
        store: &Store,
        namespace: &Namespace,
        combination: Combination,
        thread: u64,
        is_store: bool,
    ) -> Result<Self, Failure> {
        let len = usize::try_from(combination.block_bytes)
            .map_err(|_| Failure::told("a block does not fit memory", 7))?;
        let batch = combination.batch as usize;
        let (mut buffers, regions) = B::allocate(store, combination.device, len, batch)?;
        let seed = |position: usize| thread << 32 | position as u64;
        let contents: Vec<_> = (0..batch).map(|position| content(seed(position), len)).collect();
        if is_store {
            for (buffer, content) in buffers.iter_mut().zip(&contents) {
                buffer.fill(content)?;
            }
        }
        Ok(Self {
            namespace: namespace.clone(),
            numbers: (thread..combination.blocks).step_by(usize::from(combination.threads)).collect(),
            batch,
            buffers,
            contents,
            _regions: regions,
            is_store,
        })
    }

    fn run(mut self) -> Result<Moved, Failure> {
        let options = TransferOptions::default();
        let mut moved = Moved::default();
        for numbers in self.numbers.chunks(self.batch) {
            let mut items = Vec::with_capacity(numbers.len());
            let spare = self.buffers.split_off(numbers.len());
            for (number, mut buffer) in numbers.iter().zip(std::mem::take(&mut self.buffers)) {
                if self.is_store {
                    buffer.mark(*number);
                }
                items.push(BufferItem::new(Key::new(&number.to_le_bytes())?, 0, buffer));
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
            moved.add(&completion.carried, completion.bounced_bytes);
            for (number, buffer) in numbers.iter().zip(&buffers) {
                if !self.is_store && !buffer.is_marked(*number) {
                    return Err(wrong(*number));
                }
            }
            self.buffers = buffers;
            self.buffers.extend(spare);
        }
        // Blocks of the last batches, which buffers hold still.
        for ((number, buffer), content) in self.numbers.iter().zip(&self.buffers).zip(&self.contents) {
            if !self.is_store && !buffer.holds(content)? {
                return Err(wrong(*number));
            }
        }
        Ok(moved)
    }
}

fn wrong(number: u64) -> Failure {
    Failure::told(format!("block {number} is not what was stored"), 4)
}
