//! Arguments of `hoistway kv`.

use crate::{
    arguments::{DEVICES, Offered, size, with_notes},
    bench::results::Output,
};
use clap::{Args, Subcommand, builder::TypedValueParser};
use hoistway::DeviceId;
use hoistway_kv::{DirectPath, Durability, LayoutKind, NamespaceId, Route};
use std::path::PathBuf;

const LAYOUTS: &[&str] = &["segments", "files"];
const DURABILITIES: &[&str] = &["none", "batched", "sync"];
const ROUTES: &[&str] = &["auto", "io_uring", "threads"];
const DIRECT: &[&str] = &["off", "prefer", "require"];

const STAT_EXAMPLES: &str = "\
Examples:
  hoistway kv stat /mnt/nvme/kv
  hoistway kv stat /mnt/nvme/kv --far /mnt/shared/kv --json";

const LIST_EXAMPLES: &str = "\
Examples:
  hoistway kv ls /mnt/nvme/kv
  hoistway kv ls /mnt/nvme/kv --namespace 0123456789abcdef0123456789abcdef --long";

const VERIFY_EXAMPLES: &str = "\
Examples:
  hoistway kv verify /mnt/nvme/kv
  hoistway kv verify /mnt/nvme/kv --repair";

const COLLECT_EXAMPLES: &str = "\
Examples:
  hoistway kv gc /mnt/nvme/kv
  hoistway kv gc /mnt/nvme/kv --size 100GiB";

const REMOVE_EXAMPLES: &str = "\
Examples:
  hoistway kv rm /mnt/nvme/kv --namespace 0123456789abcdef0123456789abcdef --all
  hoistway kv rm /mnt/nvme/kv --namespace 0123456789abcdef0123456789abcdef key-1 key-2";

#[derive(Debug, Subcommand)]
pub(crate) enum Kv {
    /// Show the size, layout, writers and namespaces of a store
    #[command(after_help = STAT_EXAMPLES)]
    Stat(Stat),
    /// List namespaces, or the blocks of one
    #[command(after_help = LIST_EXAMPLES)]
    Ls(List),
    /// Read every block and compare its checksums
    #[command(after_help = VERIFY_EXAMPLES)]
    Verify(Verify),
    /// Remove what is not needed: expired blocks, files of ended processes, and segments above a size
    #[command(after_help = COLLECT_EXAMPLES)]
    Gc(Collect),
    /// Remove blocks
    #[command(after_help = REMOVE_EXAMPLES)]
    Rm(Remove),
    /// Measure how fast blocks are stored and loaded, beside the limit of the drive
    Bench(Box<Bench>),
}

/// The store of a command.
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
    /// Also show the far tier in this directory
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
    /// Show more: whole descriptions of namespaces; sizes, checksums and expiry of blocks, for which headers are read
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
    /// Remove damaged blocks, except those of running processes
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
    /// Evict whole segments, the coldest first, until all files take at most this
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
    /// Remove all blocks of the namespace
    #[arg(long, conflicts_with = "keys", required_unless_present = "keys")]
    pub(super) all: bool,
    /// Keys are in hexadecimal, as 'hoistway kv ls' shows keys that are not text
    #[arg(long)]
    pub(super) hex: bool,
    /// Keys of the blocks
    #[arg(value_name = "KEY")]
    pub(super) keys: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = BENCH_EXAMPLES, after_long_help = with_notes(BENCH_EXAMPLES, BENCH_NOTES))]
pub(crate) struct Bench {
    /// Directory to measure in. A store is created below it, and removed afterwards
    #[arg(value_name = "DIR")]
    pub(super) directory: PathBuf,
    /// Sizes of blocks
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "64KiB,1MiB", value_parser = size)]
    pub(super) block_sizes: Vec<u64>,
    /// Numbers of threads that store and load at the same time
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,8", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: Vec<u16>,
    /// Number of blocks in each request
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) batch: u32,
    /// Bytes to store and load for each combination
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = size)]
    pub(super) bytes: u64,
    /// How often to measure each combination
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iterations: u32,
    /// How blocks are kept: segments (in slots of large files) or files (a file for each block)
    #[arg(long, value_name = "LAYOUT", default_value_t, value_parser = Offered(LAYOUTS).try_map(|text| text.parse::<LayoutKind>()), hide_possible_values = true)]
    pub(super) layout: LayoutKind,
    /// What a completed store of a block means: none (nothing), batched or sync (the block is on the disk; batched groups syncs)
    #[arg(long, value_name = "WHAT", default_value_t, value_parser = Offered(DURABILITIES).try_map(|text| text.parse::<Durability>()), hide_possible_values = true)]
    pub(super) durability: Durability,
    /// How bytes move: auto, io_uring or threads
    #[arg(long, value_name = "ROUTE", default_value_t, value_parser = Offered(ROUTES).try_map(|text| text.parse::<Route>()), hide_possible_values = true)]
    pub(super) route: Route,
    /// Where blocks are stored from and loaded to: cpu, or cuda:N or rocm:N for the device of that number
    #[arg(long, value_name = "DEVICE", default_value_t, value_parser = Offered(DEVICES).try_map(|text| text.parse::<DeviceId>()), hide_possible_values = true)]
    pub(super) device: DeviceId,
    /// Whether bytes of a device bypass host memory: prefer (if that is proven to work), require or off
    #[arg(long, value_name = "WHAT", default_value_t, value_parser = Offered(DIRECT).try_map(|text| text.parse::<DirectPath>()), hide_possible_values = true)]
    pub(super) direct: DirectPath,
    /// Compare checksums of loaded blocks only if no sync covers the block
    #[arg(long)]
    pub(super) no_verify: bool,
    #[command(flatten)]
    pub(super) output: Output,
}

const BENCH_EXAMPLES: &str = "\
Examples:
  hoistway kv bench /mnt/nvme
  hoistway kv bench /mnt/nvme --block-sizes 64KiB,1MiB --threads 8 --json";

const BENCH_NOTES: &str = "\
Throughput is the bytes of one iteration divided by its time, in GB/s (10^9 bytes). For cold loads, the files of the \
store are first dropped from the page cache; warm loads follow another load. 'limit' is the rate at which 16 threads read \
and write one file, bypassing the page cache, in pieces of the same size, right before and after: without blocks, \
checksums or an index. It is measured with host memory, also with --device. 'routes' are the routes of the bytes, that of \
most bytes first; below the table are faster routes, and why they were not used.

The directory gets kv_raw.csv, kv_summary.csv and a chart.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_completion_offers_are_all_that_there_are() {
        assert_eq!(LAYOUTS, LayoutKind::ALL.iter().map(|value| value.name()).collect::<Vec<_>>());
        assert_eq!(DURABILITIES, Durability::ALL.iter().map(|value| value.name()).collect::<Vec<_>>());
        assert_eq!(ROUTES, Route::ALL.iter().map(|value| value.name()).collect::<Vec<_>>());
        assert_eq!(DIRECT, DirectPath::ALL.iter().map(|value| value.name()).collect::<Vec<_>>());
    }
}
