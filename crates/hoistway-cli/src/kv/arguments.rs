//! Arguments of `hoistway kv`.

use crate::{arguments::size, bench::results::Output};
use clap::{Args, Subcommand};
use hoistway::DeviceId;
use hoistway_kv::{DirectPath, Durability, LayoutKind, NamespaceId, Route};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum Kv {
    /// Show a store: its capacity, use, writers and namespaces, and how it works
    Stat(Stat),
    /// List namespaces, or the blocks of one
    Ls(List),
    /// Read every block and compare its checksums
    Verify(Verify),
    /// Collect what is not needed: expired blocks, files of a process that ended, and segments above a size
    Gc(Collect),
    /// Remove blocks
    Rm(Remove),
    /// Measure storing and loading beside what the drive can do
    Bench(Box<Bench>),
}

/// A store that is looked at. No file is changed.
#[derive(Debug, Args)]
pub(super) struct Root {
    /// Directory of the store
    #[arg(value_name = "ROOT")]
    pub(super) root: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Stat {
    #[command(flatten)]
    pub(super) root: Root,
    /// Directory of its far tier, which is shown too
    #[arg(long, value_name = "PATH")]
    pub(super) far: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    #[command(flatten)]
    pub(super) root: Root,
    /// List the blocks of this namespace
    #[arg(long, value_name = "ID")]
    pub(super) namespace: Option<NamespaceId>,
    /// Also show whole descriptions of namespaces; for blocks sizes, checksums and expiry, which reads their headers
    #[arg(long)]
    pub(super) long: bool,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    #[command(flatten)]
    pub(super) root: Root,
    /// Forget damaged blocks for good, as far as they are not those of a process that runs
    #[arg(long)]
    pub(super) repair: bool,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Collect {
    #[command(flatten)]
    pub(super) root: Root,
    /// Give up whole segments, the coldest first, until all files take no more than this
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) size: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Remove {
    #[command(flatten)]
    pub(super) root: Root,
    /// The namespace of the blocks
    #[arg(long, value_name = "ID")]
    pub(super) namespace: NamespaceId,
    /// Remove all its blocks
    #[arg(long, conflicts_with = "keys", required_unless_present = "keys")]
    pub(super) all: bool,
    /// Keys are written in hexadecimal, as 'hoistway kv ls' shows those that are no text
    #[arg(long)]
    pub(super) hex: bool,
    /// Keys of the blocks
    #[arg(value_name = "KEY")]
    pub(super) keys: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_long_help = BENCH_NOTES)]
pub(crate) struct Bench {
    /// Directory to measure in. A store is made below it, and removed afterwards
    #[arg(value_name = "DIR")]
    pub(super) directory: PathBuf,
    /// Sizes of blocks
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "64KiB,1MiB", value_parser = size)]
    pub(super) block_sizes: Vec<u64>,
    /// Threads that store and load at once
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,8", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: Vec<u16>,
    /// Blocks in each request
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) batch: u32,
    /// Bytes that are stored and loaded for each combination
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = size)]
    pub(super) bytes: u64,
    /// How often to measure each combination
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iterations: u32,
    /// How blocks lie in files: segments (in slots of large files) or files (one each)
    #[arg(long, value_name = "LAYOUT", default_value_t)]
    pub(super) layout: LayoutKind,
    /// What a completed store means: none, batched (it is on the disk, in groups that share syncs) or sync (the same)
    #[arg(long, value_name = "WHAT", default_value_t)]
    pub(super) durability: Durability,
    /// How bytes move: auto, io_uring or threads
    #[arg(long, value_name = "ROUTE", default_value_t)]
    pub(super) route: Route,
    /// Where blocks are stored from and loaded to: cpu, or cuda:N or rocm:N for the device of that number
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub(super) device: DeviceId,
    /// Whether devices are read and written past the host's memory: prefer (where that is proven to work), require or off
    #[arg(long, value_name = "WHAT", default_value_t)]
    pub(super) direct: DirectPath,
    /// Do not compare checksums of blocks that are loaded, but for those that no sync covers
    #[arg(long)]
    pub(super) no_verify: bool,
    #[command(flatten)]
    pub(super) output: Output,
}

const BENCH_NOTES: &str = "\
Throughput is the bytes of one iteration by its time, in GB/s (10^9 bytes). Cold loads follow a dropping of the store's \
files from the page cache, warm ones a load. 'limit' is what 16 threads read from and write to one file past the page \
cache, in pieces of the same size, right before and after: nothing is kept of blocks, checksums or an index there. It is \
that of host memory, also with --device. 'routes' are the ways that bytes took, the one of most bytes first; below the \
table are those that would have been better, and why they were not used.

The directory gets kv_raw.csv, kv_summary.csv and a chart.";
