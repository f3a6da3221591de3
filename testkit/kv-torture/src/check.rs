//! Looks at what a store has after an accident.
#![allow(unsafe_code)]

use crate::{
    blocks::{Filled, Shape, name},
    write::{open, options},
};
use anyhow::{Context, bail};
use hoistway_kv::{Durability, Namespace, Status, Store};
use serde::Serialize;
use std::{collections::HashSet, path::PathBuf, time::Duration};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the store.
    root: PathBuf,
    /// A file with what the writer printed before the accident.
    #[arg(long)]
    said: Option<PathBuf>,
    /// Number after that of the last block that may be there.
    #[arg(long)]
    end: u64,
    /// Whether an acknowledged block that is missing is an error: it is not if syncs were not asked for.
    #[arg(long)]
    nothing_lost: bool,
    /// Whether blocks are delivered without comparing their checksums, where a sync covers them.
    #[arg(long)]
    no_verify: bool,
    /// Most bytes of the store.
    #[arg(long, default_value_t = 4 << 30)]
    capacity: u64,
    #[command(flatten)]
    shape: Shape,
}

/// What was found.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Findings {
    /// Blocks that were delivered, as they were stored.
    pub(crate) whole: u64,
    /// Blocks that were delivered with other bytes. The one thing that must never be.
    pub(crate) wrong: u64,
    /// Blocks that were found, but turned out damaged when they were loaded.
    pub(crate) damaged: u64,
    /// Blocks that are not there.
    pub(crate) missing: u64,
    /// Of these, blocks whose stores were acknowledged.
    pub(crate) lost: u64,
    /// Time that the store took to open, in milliseconds.
    pub(crate) recovery_ms: f64,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let said = match &arguments.said {
        Some(path) => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
        None => String::new(),
    };
    let acknowledged = acknowledged(&said);
    let mut options = options(&arguments.root, arguments.capacity, Durability::None);
    options.verify = !arguments.no_verify;
    let (store, namespace) = open(options)?;
    let findings = look(&store, &namespace, arguments.shape, 0..arguments.end, &acknowledged)?;
    store.close(Some(Duration::from_secs(60)))?;
    println!("{}", serde_json::to_string(&findings)?);
    if findings.wrong > 0 || arguments.nothing_lost && findings.lost > 0 {
        bail!("{} blocks are wrong and {} lost", findings.wrong, findings.lost);
    }
    Ok(())
}

/// Numbers of the blocks that a writer has to have. Those that it began to delete may be there or not.
pub(crate) fn acknowledged(said: &str) -> HashSet<u64> {
    let numbers = |word: &str| -> HashSet<u64> {
        // A last line that was cut short was not said.
        let whole = said.rfind('\n').map_or("", |end| &said[..end]);
        whole.lines().filter_map(|line| line.strip_prefix(word)?.trim().parse().ok()).collect()
    };
    &numbers("ack ") - &numbers("deleting ")
}

/// Loads every block of a range.
pub(crate) fn look(
    store: &Store,
    namespace: &Namespace,
    shape: Shape,
    range: std::ops::Range<u64>,
    acknowledged: &HashSet<u64>,
) -> anyhow::Result<Findings> {
    let recovery_ms = store.stats()?.recovery.as_secs_f64() * 1e3;
    let mut findings = Findings { recovery_ms, ..Findings::default() };
    for number in range {
        let is_found = namespace.lookup(&[name(number)])?[0];
        let (request, memory) = shape.request(number, Filled::WithZeros)?;
        // SAFETY: the request keeps its memory, which is read only after the ticket was released.
        let ticket = unsafe { namespace.load(request)? };
        let completion = ticket.wait(None)?;
        if completion.items.iter().all(|status| *status == Status::Ok) {
            match shape.matches(number, &memory) {
                true => findings.whole += 1,
                false => findings.wrong += 1,
            }
            continue;
        }
        findings.missing += 1;
        findings.damaged += u64::from(is_found);
        findings.lost += u64::from(acknowledged.contains(&number));
    }
    Ok(findings)
}
