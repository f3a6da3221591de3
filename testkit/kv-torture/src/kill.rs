//! Kills a writer at a random moment, opens what it left, and looks; again and again, in one directory.
#![forbid(unsafe_code)]

use crate::{
    blocks::{Shape, mix},
    check::{acknowledged, look},
    write::{open, options},
};
use anyhow::{Context, bail, ensure};
use hoistway_kv::Durability;
use serde::Serialize;
use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the store.
    root: PathBuf,
    /// How often.
    #[arg(long, default_value_t = 1000)]
    rounds: u64,
    /// What acknowledgement means.
    #[arg(long, default_value = "batched")]
    durability: Durability,
    /// Most bytes of the store.
    #[arg(long, default_value_t = 256 << 20)]
    capacity: u64,
    /// So small that any block may have been evicted.
    #[arg(long)]
    may_evict: bool,
    #[command(flatten)]
    shape: Shape,
}

/// What came of it.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    rounds: u64,
    acknowledged: u64,
    whole: u64,
    wrong: u64,
    /// Of the last blocks that were acknowledged before a kill: those missing, lost or evicted.
    missing: u64,
    slowest_recovery_ms: f64,
    most_files: usize,
    most_bytes: u64,
    capacity: u64,
}

/// Blocks that are looked at after each kill: the last that were written.
const RECENT: u64 = 64;
/// Microseconds after which a writer that has begun is killed at the latest.
const LONGEST_LIFE_US: u64 = 250_000;

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut outcome = Outcome { capacity: arguments.capacity, ..Outcome::default() };
    let mut next = 0;
    for round in 0..arguments.rounds {
        let said =
            write_and_kill(arguments, next, Duration::from_micros(500 + mix(round) % LONGEST_LIFE_US))?;
        let acknowledged = acknowledged(&said);
        let newest = acknowledged.iter().max().map_or(next, |last| last + 1);
        let (store, namespace) = open(options(&arguments.root, arguments.capacity, arguments.durability))?;
        let first = newest.saturating_sub(RECENT);
        let findings = look(&store, &namespace, arguments.shape, first..newest, &acknowledged)?;
        store.close(Some(Duration::from_secs(60)))?;
        outcome.rounds += 1;
        outcome.acknowledged += acknowledged.len() as u64;
        outcome.whole += findings.whole;
        outcome.wrong += findings.wrong;
        outcome.missing += findings.lost;
        outcome.slowest_recovery_ms = outcome.slowest_recovery_ms.max(findings.recovery_ms);
        let (files, bytes) = taken(&arguments.root)?;
        outcome.most_files = outcome.most_files.max(files);
        outcome.most_bytes = outcome.most_bytes.max(bytes);
        // Beyond what was acknowledged, a few more may have been stored.
        next = newest + 64;
    }
    println!("{}", serde_json::to_string(&outcome)?);
    let are_lost = outcome.missing > 0 && !arguments.may_evict;
    if outcome.wrong > 0 || are_lost || outcome.most_bytes > arguments.capacity {
        bail!("{outcome:?}");
    }
    Ok(())
}

/// What a writer said before it was killed.
fn write_and_kill(arguments: &Arguments, first: u64, after: Duration) -> anyhow::Result<String> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg("write")
        .arg(&arguments.root)
        .args(["--durability", arguments.durability.name(), "--first", &first.to_string()])
        .args(["--capacity", &arguments.capacity.to_string()])
        .args(["--block-bytes", &arguments.shape.block_bytes.to_string()])
        .args(["--shards", &arguments.shape.shards.to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut out = BufReader::new(child.stdout.take().context("the writer has no output")?);
    let mut ready = String::new();
    out.read_line(&mut ready)?;
    ensure!(ready.starts_with("ready"), "the writer did not begin: {ready:?}");
    // Read on meanwhile: a full pipe would stop it.
    let reading = std::thread::spawn(move || {
        let mut said = String::new();
        out.read_to_string(&mut said).map(|_| said)
    });
    std::thread::sleep(after);
    child.kill()?;
    child.wait()?;
    reading.join().map_err(|_| anyhow::anyhow!("reading what the writer said failed"))?.map_err(Into::into)
}

/// Files below a directory, and the bytes that are allocated to them.
pub(crate) fn taken(root: &Path) -> anyhow::Result<(usize, u64)> {
    use std::os::unix::fs::MetadataExt;
    let (mut files, mut bytes) = (0, 0);
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            // Files come and go while others run.
            let Ok(entry) = entry else { continue };
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_dir() {
                folders.push(entry.path());
            } else {
                files += 1;
                bytes += metadata.blocks() * 512;
            }
        }
    }
    Ok((files, bytes))
}
