//! What can be typed after `windlass bench`.

use bytesize::ByteSize;
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Measure how fast files can be read by a route, with buffers and chunks of several sizes, by several processes
    Read(Box<Read>),
    /// Read what the command says that started this
    #[command(hide = true)]
    Worker,
}

#[derive(Debug, Args)]
#[command(after_long_help = READ_NOTES)]
pub(crate) struct Read {
    /// Files to read, whatever they hold. Their bytes are dealt evenly to the processes
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Which way the bytes take: auto (copies what the page cache holds, else threads), io_uring, threads, cached or usrbio
    #[arg(long, value_name = "ROUTE", default_value = "auto")]
    pub(crate) route: String,
    /// Whether reads go past the page cache: auto (where the file system allows it, the default), always or never
    #[arg(long, value_name = "WHEN")]
    pub(crate) direct: Option<String>,
    /// Who speaks to the daemon of a 3FS: auto (the default), native or vendor
    #[arg(long, value_name = "CLIENT")]
    pub(crate) usrbio: Option<String>,
    /// Bytes in flight in each process, and of its staging memory; a number without unit counts MiB
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "64", value_parser = size)]
    pub(crate) buffer_sizes: Vec<u64>,
    /// Longest single read, a multiple of 4096 up to 32MiB; a number without unit counts MiB
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "8", value_parser = size)]
    pub(crate) chunk_sizes: Vec<u64>,
    /// Processes that read at once
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1")]
    pub(crate) num_processes: Vec<u16>,
    /// Forget the bytes where they arrive, rather than bring them to memory of each process
    #[arg(long)]
    pub(crate) download_only: bool,
    /// How often to measure each combination
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) iterations: u32,
    /// How often to read everything before that
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) warmup: u32,
    /// What to measure: each buffer size with each chunk size and each number of processes, or only the first of each
    #[arg(long, value_enum, default_value_t = Mode::Grid)]
    pub(crate) mode: Mode,
    /// Write benchmark_raw.csv, benchmark_summary.csv and charts (SVG) into this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) output_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const READ_NOTES: &str = "\
Throughput is the bytes of one iteration by the time from its start to the end of the last process, in GB/s (10^9 bytes). \
Starting processes and opening files is not part of it. What the page cache holds is read from there by routes that go \
through it; the column 'carriers' says how the bytes came.

Combinations whose chunks are longer than their buffer are left out.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    Grid,
    Single,
}

/// Bytes from text such as `64MiB`, or from a number of MiB.
fn size(text: &str) -> Result<u64, String> {
    if let Ok(mebibytes) = text.parse::<u64>() {
        return mebibytes.checked_mul(1 << 20).ok_or_else(|| "it is more than there can be".to_owned());
    }
    text.parse::<ByteSize>().map(|size| size.as_u64())
}
