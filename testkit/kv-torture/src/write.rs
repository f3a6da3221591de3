//! Stores blocks, several requests at a time, until it is ended.
#![allow(unsafe_code)]

use crate::blocks::{Filled, Shape, mix};
use anyhow::{Context, ensure};
use hoistway_kv::{
    Durability, LayoutKind, Namespace, NamespaceDescription, NamespaceOptions, Status, Store, StoreOptions,
    Ticket,
};
use std::{
    collections::VecDeque,
    io::Write as _,
    path::{Path, PathBuf},
};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the store.
    pub(crate) root: PathBuf,
    /// What acknowledgement means.
    #[arg(long, default_value = "sync")]
    pub(crate) durability: Durability,
    /// How blocks lie in files.
    #[arg(long)]
    pub(crate) layout: Option<LayoutKind>,
    /// Most bytes of the store.
    #[arg(long, default_value_t = 4 << 30)]
    pub(crate) capacity: u64,
    /// Number of the first block.
    #[arg(long, default_value_t = 0)]
    pub(crate) first: u64,
    /// Requests under way at once.
    #[arg(long, default_value_t = 8)]
    pub(crate) depth: usize,
    /// Of so many blocks one is deleted again; 0: none.
    #[arg(long, default_value_t = 0)]
    pub(crate) delete_one_in: u64,
    #[command(flatten)]
    pub(crate) shape: Shape,
}

/// What the store of a trial is opened with.
pub(crate) fn options(root: &Path, capacity: u64, durability: Durability) -> StoreOptions {
    let mut options = StoreOptions::new(root);
    options.capacity_bytes = Some(capacity);
    options.min_free_bytes = 0;
    options.durability = durability;
    options
}

/// The store of a trial, and its namespace.
pub(crate) fn open(options: StoreOptions) -> hoistway_kv::Result<(Store, Namespace)> {
    let store = Store::open(options)?;
    let description = NamespaceDescription::default().model("torture");
    let namespace = store.namespace(&description, NamespaceOptions::default())?;
    Ok((store, namespace))
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut options = options(&arguments.root, arguments.capacity, arguments.durability);
    options.layout = arguments.layout;
    let (store, namespace) = open(options)?;
    let recovery = store.stats()?.recovery;
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready {}", recovery.as_micros())?;
    out.flush()?;
    let mut waiting: VecDeque<(u64, Ticket)> = VecDeque::new();
    for number in arguments.first.. {
        let (request, _) = arguments.shape.request(number, Filled::WithContents)?;
        // SAFETY: the request keeps its memory, which nothing writes to.
        waiting.push_back((number, unsafe { namespace.store(request)? }));
        if waiting.len() < arguments.depth {
            continue;
        }
        let (number, ticket) = waiting.pop_front().context("nothing is under way")?;
        let completion = ticket.wait(None)?;
        ensure!(
            completion.items.iter().all(|status| matches!(status, Status::Ok | Status::Exists)),
            "block {number}: {:?}",
            completion.items
        );
        // One line each, in one write: its reader knows that the store said so.
        out.write_all(format!("ack {number}\n").as_bytes())?;
        out.flush()?;
        if arguments.delete_one_in != 0 && mix(number ^ 0xde1).is_multiple_of(arguments.delete_one_in) {
            out.write_all(format!("deleting {number}\n").as_bytes())?;
            out.flush()?;
            namespace.delete(&[crate::blocks::name(number)])?;
        }
    }
    Ok(())
}
