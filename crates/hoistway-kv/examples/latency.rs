//! How long a load of one block takes, alone and beside stores: `cargo run --release --example latency -- DIRECTORY`.
//! Prints a line of JSON. The store is made in a directory of its own below DIRECTORY, and removed.
#![allow(clippy::print_stdout, reason = "an example")]

use hoistway_kv::{
    Item, KeepAlive, Key, Namespace, NamespaceDescription, NamespaceOptions, Piece, Priority, Request,
    Status, Store, StoreOptions,
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
/// Blocks of each request of the stores.
const BATCH: usize = 8;
/// Requests that are under way at any time.
const DEPTH: usize = 4;

fn main() -> Result {
    let directory = env::args().nth(1).ok_or("the directory of a file system to measure")?;
    let root = format!("{directory}/hoistway-kv-latency-{}", std::process::id());
    let mut options = StoreOptions::new(&root);
    options.capacity_bytes = Some(8 << 30);
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
    let alone = loads(&namespace, &keys)?;
    let (is_over, stored) = (AtomicBool::new(false), AtomicU64::new(0));
    let begin = Instant::now();
    let beside = thread::scope(|scope| {
        let stores = scope.spawn(|| store_until(&namespace, &is_over, &stored));
        let found = loads(&namespace, &keys);
        is_over.store(true, Ordering::Relaxed);
        stores.join().map_err(|_| "a thread panicked")??;
        found
    })?;
    let rate = stored.into_inner() as f64 / begin.elapsed().as_secs_f64() / 1e9;
    let line = |seconds: &[f64], stored: f64| {
        let at = |part: usize| seconds[seconds.len() * part / 100] * 1e3;
        json!({ "median_ms": at(50), "p99_ms": at(99), "stored_gb_per_s": stored })
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

/// Stores blocks in the background as fast as the store takes them.
fn store_until(namespace: &Namespace, is_over: &AtomicBool, stored: &AtomicU64) -> Result {
    let memory = Arc::new(vec![1; STORED_BYTES + 4096]);
    let mut waiting = VecDeque::new();
    let mut number = 0u64;
    while !is_over.load(Ordering::Relaxed) {
        let mut items = Vec::with_capacity(BATCH);
        for _ in 0..BATCH {
            items.push(item(format!("stored meanwhile, {number}").as_bytes(), &memory, STORED_BYTES)?);
            number += 1;
        }
        let mut request = Request::new(items, KeepAlive::new(memory.clone()));
        request.priority = Some(Priority::Background);
        // SAFETY: the request keeps the memory, and nothing writes to it before the ticket has ended.
        waiting.push_back(unsafe { namespace.store(request)? });
        if waiting.len() < DEPTH {
            continue;
        }
        if let Some(ticket) = waiting.pop_front() {
            let completion = ticket.wait(None)?;
            let count = completion.items.iter().filter(|status| **status == Status::Ok).count();
            stored.fetch_add((count * STORED_BYTES) as u64, Ordering::Relaxed);
        }
    }
    for ticket in waiting {
        ticket.wait(None)?;
    }
    Ok(())
}

fn item(key: &[u8], memory: &Arc<Vec<u8>>, len: usize) -> Result<Item> {
    let aligned = memory[memory.as_ptr().align_offset(4096)..].as_ptr();
    Ok(Item::new(Key::new(key)?, 0, vec![Piece::host(aligned, len)]))
}

fn check(is_so: bool, otherwise: &str) -> Result {
    if is_so { Ok(()) } else { Err(otherwise.into()) }
}
