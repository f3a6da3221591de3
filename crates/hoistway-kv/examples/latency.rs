//! How long a load of one block takes, alone and beside stores.
//!
//! `cargo run --release --example latency -- DIRECTORY [CAPACITY BLOCK_BYTES...]` makes a store in a directory of its own below
//! DIRECTORY, and removes it. With a capacity, the store is full before anything is measured; blocks of these lengths are
//! stored in turn, by default of 1 MiB. Prints a line of JSON.
#![allow(clippy::print_stdout, reason = "an example")]

use hoistway_kv::{
    Item, KeepAlive, Key, Namespace, NamespaceDescription, NamespaceOptions, Piece, Priority, Request,
    Status, Store, StoreOptions, Ticket,
};
use serde_json::json;
use std::{
    collections::VecDeque,
    env,
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const LOADED_BYTES: usize = 64 << 10;
/// Blocks that are there to be loaded. They are pinned.
const BLOCKS: usize = 4096;
const LOADS: usize = 4000;
const STORED_BYTES: usize = 1 << 20;
/// Capacity of a store that is not filled.
const CAPACITY: u64 = 8 << 30;
/// Bytes of each request of the stores, unless one block has more.
const BATCH_BYTES: usize = 8 << 20;
/// Requests that are under way at any time.
const DEPTH: usize = 4;

fn main() -> Result {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (directory, rest) = arguments.split_first().ok_or("the directory of a file system to measure")?;
    let capacity = rest.first().map(|bytes| bytes.parse::<u64>()).transpose()?;
    let mut lens = rest.iter().skip(1).map(|len| len.parse()).collect::<std::result::Result<Vec<_>, _>>()?;
    if lens.is_empty() {
        lens.push(STORED_BYTES);
    }
    let root = format!("{directory}/hoistway-kv-latency-{}", std::process::id());
    let mut options = StoreOptions::new(&root);
    options.capacity_bytes = Some(capacity.unwrap_or(CAPACITY));
    options.min_free_bytes = 0;
    let store = Store::open(options)?;
    let namespace = store.namespace(&NamespaceDescription::default(), NamespaceOptions::default())?;
    let keys: Vec<Vec<u8>> = (0..BLOCKS).map(|number| format!("a block, {number:08}").into_bytes()).collect();
    let memory = Arc::new(vec![7; LOADED_BYTES + 4096]);
    for some in keys.chunks(256) {
        let items = some.iter().map(|key| item(key, &memory, LOADED_BYTES)).collect::<Result<_>>()?;
        // SAFETY: the request keeps the memory, and nothing writes to it before the ticket has ended.
        let ticket = unsafe { namespace.store(Request::new(items, KeepAlive::new(memory.clone())))? };
        check(ticket.wait(None)?.is_ok(), "a block was not stored")?;
    }
    store.flush(None)?;
    let _pins = namespace.pin(&keys)?;
    let stores = Stores { namespace: &namespace, lens: &lens, stored: AtomicU64::new(0) };
    if let Some(capacity) = capacity {
        stores.run(|stored| stored >= capacity)?;
        store.flush(None)?;
    }
    let alone = loads(&namespace, &keys)?;
    let (is_over, before) = (AtomicBool::new(false), stores.stored.load(Ordering::Relaxed));
    let begin = Instant::now();
    let beside = thread::scope(|scope| {
        let storing = scope.spawn(|| stores.run(|_| is_over.load(Ordering::Relaxed)));
        let found = loads(&namespace, &keys);
        is_over.store(true, Ordering::Relaxed);
        storing.join().map_err(|_| "a thread panicked")??;
        found
    })?;
    let rate = (stores.stored.load(Ordering::Relaxed) - before) as f64 / begin.elapsed().as_secs_f64() / 1e9;
    let line = |seconds: &[f64], stored: f64| {
        let at = |part: usize| seconds[seconds.len() * part / 100] * 1e3;
        json!({ "median_ms": at(50), "p95_ms": at(95), "p99_ms": at(99), "stored_gb_per_s": stored })
    };
    println!("{}", json!({ "alone": line(&alone, 0.0), "beside stores": line(&beside, rate) }));
    drop((namespace, store));
    std::fs::remove_dir_all(root)?;
    Ok(())
}

/// Loads one block after the other, at random. Returns the seconds of each, shortest first.
fn loads(namespace: &Namespace, keys: &[Vec<u8>]) -> Result<Vec<f64>> {
    let memory = Arc::new(vec![0; LOADED_BYTES + 4096]);
    let mut chance = 7u64;
    let mut seconds = Vec::with_capacity(LOADS);
    for _ in 0..LOADS {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let key = &keys[(chance >> 33) as usize % keys.len()];
        let mut request =
            Request::new(vec![item(key, &memory, LOADED_BYTES)?], KeepAlive::new(memory.clone()));
        request.priority = Some(Priority::Demand);
        let begin = Instant::now();
        // SAFETY: the request keeps the memory, and nothing looks at it.
        let completion = unsafe { namespace.load(request)? }.wait(None)?;
        seconds.push(begin.elapsed().as_secs_f64());
        check(completion.is_ok(), "a block was not loaded")?;
    }
    seconds.sort_unstable_by(f64::total_cmp);
    Ok(seconds)
}

/// Blocks that are stored in the background as fast as the store takes them.
struct Stores<'a> {
    namespace: &'a Namespace,
    /// Lengths of the blocks, which come in turn.
    lens: &'a [usize],
    /// Bytes of the blocks that were stored.
    stored: AtomicU64,
}

impl Stores<'_> {
    /// Stores blocks until the bytes that were stored are enough.
    fn run(&self, is_enough: impl Fn(u64) -> bool) -> Result {
        let longest = self.lens.iter().copied().max().unwrap_or(STORED_BYTES);
        let batch = (BATCH_BYTES * self.lens.len() / self.lens.iter().sum::<usize>().max(1)).clamp(1, 64);
        let memory = Arc::new(vec![1; longest + 4096]);
        let start = self.stored.load(Ordering::Relaxed);
        let mut waiting = VecDeque::new();
        let mut number = 0;
        while !is_enough(self.stored.load(Ordering::Relaxed)) {
            let lens: Vec<usize> =
                (number..number + batch).map(|at| self.lens[at % self.lens.len()]).collect();
            let item = |(at, len): (usize, &usize)| {
                item(format!("stored after {start}, {}", number + at).as_bytes(), &memory, *len)
            };
            let items = lens.iter().enumerate().map(item).collect::<Result<_>>()?;
            number += batch;
            let mut request = Request::new(items, KeepAlive::new(memory.clone()));
            request.priority = Some(Priority::Background);
            // SAFETY: the request keeps the memory, and nothing writes to it before the ticket has ended.
            waiting.push_back((unsafe { self.namespace.store(request)? }, lens));
            if waiting.len() >= DEPTH {
                self.wait_for(waiting.pop_front())?;
            }
        }
        waiting.into_iter().try_for_each(|first| self.wait_for(Some(first)))
    }

    fn wait_for(&self, first: Option<(Ticket, Vec<usize>)>) -> Result {
        let Some((ticket, lens)) = first else { return Ok(()) };
        let completion = ticket.wait(None)?;
        let stored = completion.items.iter().zip(&lens).filter(|(status, _)| **status == Status::Ok);
        self.stored.fetch_add(stored.map(|(_, len)| *len as u64).sum(), Ordering::Relaxed);
        Ok(())
    }
}

fn item(key: &[u8], memory: &Arc<Vec<u8>>, len: usize) -> Result<Item> {
    let aligned = memory[memory.as_ptr().align_offset(4096)..].as_ptr();
    Ok(Item::new(Key::new(key)?, 0, vec![Piece::host(aligned, len)]))
}

fn check(is_so: bool, otherwise: &str) -> Result {
    if is_so { Ok(()) } else { Err(otherwise.into()) }
}
