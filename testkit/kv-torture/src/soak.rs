//! Several processes use one store at once: all store, load what any of them may have stored, delete and clear; the disk
//! is full now and then. Every byte that is delivered is compared, and the size of the store is watched.
#![allow(unsafe_code)]

use crate::{
    blocks::{Filled, Shape, mix, name},
    kill::taken,
    write::open,
};
use anyhow::bail;
use serde::{Deserialize, Serialize};
use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use windlass_kv::{Durability, Status};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the store.
    root: PathBuf,
    /// How long.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// How many processes.
    #[arg(long, default_value_t = 4)]
    processes: u64,
    /// Most bytes of the store.
    #[arg(long, default_value_t = 512 << 20)]
    capacity: u64,
    #[command(flatten)]
    shape: Shape,
}

#[derive(clap::Args)]
pub(crate) struct WorkerArguments {
    root: PathBuf,
    #[arg(long)]
    seconds: u64,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    capacity: u64,
    #[command(flatten)]
    shape: Shape,
}

/// What a process did, or all did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Tally {
    stored: u64,
    existed: u64,
    dropped: u64,
    delivered: u64,
    missed: u64,
    /// Blocks that were found damaged, which nobody has done on purpose.
    corrupt: u64,
    failed: u64,
    deleted: u64,
    wrong: u64,
    evicted: u64,
}

/// Numbers that blocks have: so many more than there is room for that most are evicted some time.
const NUMBERS: u64 = 20_000;

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut children = Vec::new();
    for seed in 0..arguments.processes {
        let child = Command::new(std::env::current_exe()?)
            .arg("soak-worker")
            .arg(&arguments.root)
            .args(["--seconds", &arguments.seconds.to_string(), "--seed", &seed.to_string()])
            .args(["--capacity", &arguments.capacity.to_string()])
            .args(["--block-bytes", &arguments.shape.block_bytes.to_string()])
            .args(["--shards", &arguments.shape.shards.to_string()])
            .stdout(Stdio::piped())
            .spawn()?;
        children.push(child);
    }
    let (mut most_bytes, mut samples) = (0, 0_u64);
    while started.elapsed() < Duration::from_secs(arguments.seconds) {
        most_bytes = most_bytes.max(taken(&arguments.root)?.1);
        samples += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut all = Tally::default();
    for child in children {
        let done = child.wait_with_output()?;
        if !done.status.success() {
            bail!("a process ended with {}", done.status);
        }
        let tally: Tally = serde_json::from_slice(&done.stdout)?;
        all.stored += tally.stored;
        all.existed += tally.existed;
        all.dropped += tally.dropped;
        all.delivered += tally.delivered;
        all.missed += tally.missed;
        all.corrupt += tally.corrupt;
        all.failed += tally.failed;
        all.deleted += tally.deleted;
        all.wrong += tally.wrong;
        all.evicted += tally.evicted;
    }
    let seconds = started.elapsed().as_secs();
    println!(
        "{}",
        serde_json::json!({
            "seconds": seconds, "processes": arguments.processes, "capacity": arguments.capacity,
            "most_bytes": most_bytes, "samples": samples, "all": all,
        })
    );
    if all.wrong > 0 || most_bytes > arguments.capacity {
        bail!("{} blocks were wrong; {most_bytes} bytes of {} were taken", all.wrong, arguments.capacity);
    }
    Ok(())
}

pub(crate) fn work(arguments: &WorkerArguments) -> anyhow::Result<()> {
    let (store, namespace) = open(&arguments.root, arguments.capacity, Durability::Batched)?;
    let until = Instant::now() + Duration::from_secs(arguments.seconds);
    let (mut tally, mut state) = (Tally::default(), arguments.seed);
    while Instant::now() < until {
        state = mix(state);
        // Some numbers are much more popular than others.
        let number = match state % 3 {
            0 => mix(state ^ 1) % NUMBERS,
            1 => mix(state ^ 1) % (NUMBERS / 10),
            _ => mix(state ^ 1) % (NUMBERS / 100),
        };
        match mix(state ^ 2) % 100 {
            0 => tally.deleted += namespace.delete(&[name(number)])? as u64,
            1..50 => {
                let (request, _) = arguments.shape.request(number, Filled::WithContents)?;
                // SAFETY: the request keeps its memory, which nobody writes to.
                let completion = unsafe { namespace.store(request)? }.wait(None)?;
                for status in completion.items {
                    match status {
                        Status::Ok => tally.stored += 1,
                        Status::Exists => tally.existed += 1,
                        Status::Dropped(_) => tally.dropped += 1,
                        _ => tally.failed += 1,
                    }
                }
            }
            _ => {
                let (request, memory) = arguments.shape.request(number, Filled::WithZeros)?;
                // SAFETY: the request keeps its memory, which is read only after the ticket has ended.
                let completion = unsafe { namespace.load(request)? }.wait(None)?;
                if completion.items.iter().all(|status| *status == Status::Ok) {
                    tally.delivered += 1;
                    tally.wrong += u64::from(!arguments.shape.matches(number, &memory));
                } else if completion.items.contains(&Status::Corrupt) {
                    tally.corrupt += 1;
                } else if completion.items.contains(&Status::Miss) {
                    tally.missed += 1;
                } else {
                    tally.failed += 1;
                }
            }
        }
    }
    tally.evicted = store.stats()?.evicted_blocks;
    store.close(Some(Duration::from_secs(60)))?;
    println!("{}", serde_json::to_string(&tally)?);
    Ok(())
}
