//! How fast a store is here: `cargo run --release --example speed -- DIRECTORY [BLOCK_BYTES] [BLOCKS] [THREADS]`.
//! The store is made in a directory of its own below DIRECTORY, and removed.
#![allow(clippy::print_stdout, reason = "an example")]

use std::{
    env,
    error::Error,
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use windlass_kv::{
    Item, KeepAlive, Key, Namespace, NamespaceDescription, NamespaceOptions, Piece, Request, Store,
    StoreOptions,
};

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Requests that each thread has under way.
const DEPTH: usize = 4;

fn main() -> Result {
    let mut arguments = env::args().skip(1);
    let directory = arguments.next().ok_or("the directory of a file system to measure")?;
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let (block, blocks, threads) = (number(1 << 20)?, number(1024)?, number(8)?);
    let root = format!("{directory}/windlass-kv-speed-{}", std::process::id());
    let bytes = (block * blocks) as u64;
    let mut options = StoreOptions::new(&root);
    options.capacity_bytes = Some(bytes * 5 / 4 + (256 << 20));
    options.min_free_bytes = 0;

    let store = Store::open(options.clone())?;
    let namespace = store.namespace(&NamespaceDescription::default(), NamespaceOptions::default())?;
    let time = each(threads, blocks, block, |request| {
        // SAFETY: the request keeps the memory, and nothing writes to it before the ticket has ended.
        unsafe { namespace.store(request) }
    })?;
    store.flush(None)?;
    report("store", bytes, blocks, time);
    let keys: Vec<_> = (0..blocks).map(key).collect();
    look_up(&namespace, &keys)?;
    store.close(None)?;
    drop((store, namespace));

    let begin = Instant::now();
    let store = Store::open(options)?;
    println!("open   {:>8.1} ms with {blocks} blocks", begin.elapsed().as_secs_f64() * 1e3);
    let namespace = store.namespace(&NamespaceDescription::default(), NamespaceOptions::default())?;
    // What is in the page cache would flatter.
    let _ = Command::new("sh").args(["-c", "sync; echo 3 > /proc/sys/vm/drop_caches"]).status();
    for _ in 0..2 {
        let time = each(threads, blocks, block, |request| {
            // SAFETY: the request keeps the memory, and nothing else looks at it.
            unsafe { namespace.load(request) }
        })?;
        report("load", bytes, blocks, time);
    }
    println!("{}", serde_json::to_string_pretty(&store.report()?)?);
    drop((store, namespace));
    std::fs::remove_dir_all(root)?;
    Ok(())
}

fn key(number: usize) -> Vec<u8> {
    format!("a key as engines make them, {number:08}").into_bytes()
}

/// Begins a request for each block, from some threads.
fn each(
    threads: usize,
    blocks: usize,
    len: usize,
    begin: impl Fn(Request) -> windlass_kv::Result<windlass_kv::Ticket> + Sync,
) -> Result<Duration> {
    let start = Instant::now();
    thread::scope(|scope| {
        let work = |first: usize| {
            let begin = &begin;
            scope.spawn(move || -> Result {
                let memory: Vec<_> = (0..DEPTH).map(|_| Arc::new(vec![first as u8; len + 4096])).collect();
                let mut tickets: Vec<Option<windlass_kv::Ticket>> = vec![None; DEPTH];
                for (turn, number) in (first..blocks).step_by(threads).enumerate() {
                    let place = turn % DEPTH;
                    finish(&mut tickets[place])?;
                    let memory = &memory[place];
                    let aligned = memory[memory.as_ptr().align_offset(4096)..].as_ptr();
                    let pieces = vec![Piece::host(aligned, len)];
                    let items = vec![Item::new(Key::new(&key(number))?, 0, pieces)];
                    tickets[place] = Some(begin(Request::new(items, KeepAlive::new(memory.clone())))?);
                }
                tickets.iter_mut().try_for_each(finish)
            })
        };
        let workers: Vec<_> = (0..threads).map(work).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a thread panicked")?)
    })?;
    Ok(start.elapsed())
}

fn finish(ticket: &mut Option<windlass_kv::Ticket>) -> Result {
    let Some(ticket) = ticket.take() else { return Ok(()) };
    let completion = ticket.wait(None)?;
    if completion.is_ok() { Ok(()) } else { Err(format!("{completion:?}").into()) }
}

fn report(what: &str, bytes: u64, blocks: usize, time: Duration) {
    let seconds = time.as_secs_f64();
    println!(
        "{what:<6} {:>8.3} GB/s {:>10.0} blocks/s",
        bytes as f64 / seconds / 1e9,
        blocks as f64 / seconds
    );
}

fn look_up(namespace: &Namespace, keys: &[Vec<u8>]) -> Result {
    let begin = Instant::now();
    let mut found = 0;
    let mut asked = 0;
    while asked < 1_000_000 {
        for step in keys.chunks(1000) {
            found += namespace.lookup(step)?.iter().filter(|found| **found).count();
            asked += step.len();
        }
    }
    println!(
        "lookup {:>8.0} ns a key, {found} of {asked} found",
        begin.elapsed().as_nanos() as f64 / asked as f64
    );
    Ok(())
}
