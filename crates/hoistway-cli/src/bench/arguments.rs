//! Arguments of `hoistway bench`.

use super::results::Output;
use crate::arguments::{CLIENTS, DEVICES, DIRECT, Offered, ROUTES, with_notes};
use bytesize::ByteSize;
use clap::{Args, Subcommand, ValueEnum, builder::TypedValueParser};
use hoistway::{DeviceId, Error};
use std::path::{Component, Path, PathBuf};

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Measure how fast routes read files, with several sizes of buffers and chunks and numbers of processes
    Read(Box<Read>),
    /// Measure how fast headers of safetensors files are read, with several sizes of batches and numbers of threads
    Headers(Box<Headers>),
    /// Draw the figure that standard input describes
    #[command(hide = true)]
    Chart {
        /// The SVG file to write
        output: PathBuf,
    },
    /// Read what the parent process asks for
    #[command(hide = true)]
    Worker,
}

#[derive(Debug, Args)]
#[command(after_help = READ_EXAMPLES, after_long_help = with_notes(READ_EXAMPLES, READ_NOTES))]
pub(crate) struct Read {
    #[command(flatten)]
    pub(crate) files: Files,
    /// Routes of the bytes: auto (copies what the page cache holds, else threads), io_uring, overlapped, threads, cached,
    /// usrbio or directstorage
    #[arg(long, value_name = "ROUTES", value_delimiter = ',', default_value = "auto", value_parser = Offered(ROUTES), hide_possible_values = true)]
    pub(crate) route: Vec<String>,
    /// Whether reads bypass the page cache: auto (if the file system allows it; the default), always or never
    #[arg(long, value_name = "WHEN", value_parser = Offered(DIRECT), hide_possible_values = true)]
    pub(crate) direct: Option<String>,
    /// Client of the 3FS daemon: auto (the default), native or vendor
    #[arg(long, value_name = "CLIENT", value_parser = Offered(CLIENTS), hide_possible_values = true)]
    pub(crate) usrbio: Option<String>,
    /// Instead of routes: backends, as benchmark_runner.py of fastsafetensor-3fs-reader names them
    #[arg(long, value_enum, value_name = "NAMES", value_delimiter = ',', conflicts_with_all = ["route", "direct", "usrbio"])]
    pub(crate) backends: Vec<Backend>,
    /// Sizes of the staging memory of each process, and so its bytes in flight; a number without unit is in MiB
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "64", value_parser = size)]
    pub(crate) buffer_sizes: Vec<u64>,
    /// Longest single read, a multiple of 4096 up to 1GiB; a number without unit is in MiB
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "8", value_parser = size)]
    pub(crate) chunk_sizes: Vec<u64>,
    /// Numbers of processes that read at the same time
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1")]
    pub(crate) num_processes: Vec<u16>,
    /// Discard the bytes where they arrive, rather than copy them to the memory of each process
    #[arg(long)]
    pub(crate) download_only: bool,
    /// Copy the bytes to a device: cuda, rocm, cuda:N or rocm:N. Each process uses one chunk of device memory
    #[arg(long, value_name = "DEVICE", default_value = "cpu", conflicts_with = "download_only", value_parser = Offered(DEVICES).try_map(|text| text.parse::<DeviceId>()), hide_possible_values = true)]
    pub(crate) device: DeviceId,
    #[command(flatten)]
    pub(crate) runs: Runs,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Ways to read by the names of another benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// Route usrbio by the vendor's library
    Cpp,
    /// Route usrbio by hoistway's own client
    Python,
    /// Route threads through the page cache
    Mock,
}

const READ_EXAMPLES: &str = "\
Examples:
  hoistway bench read models/llama/model.safetensors --route io_uring,threads
  hoistway bench read --mount-point /mnt/nvme 'llama/*.safetensors' --output-dir results";

const READ_NOTES: &str = "\
The bytes of the files are divided evenly among the processes. Throughput is the bytes of one iteration divided by the \
time from its start to the end of the last process, in GB/s (10^9 bytes); starting processes and opening files is not \
counted. Routes through the page cache read from there what it holds; the column 'carriers' says how the bytes came.

Combinations with chunks larger than the buffer are left out.

The directory gets benchmark_raw.csv, benchmark_summary.csv and charts.";

/// Arguments of `hoistway bench headers`.
#[derive(Debug, Args)]
#[command(after_help = HEADERS_EXAMPLES, after_long_help = with_notes(HEADERS_EXAMPLES, HEADERS_NOTES))]
pub(crate) struct Headers {
    #[command(flatten)]
    pub(crate) files: Files,
    /// Numbers of files in one call
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "8,32,128", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch_sizes: Vec<u32>,
    /// Numbers of threads that read the headers of one call
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "4,8,16", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) num_threads: Vec<u16>,
    #[command(flatten)]
    pub(crate) runs: Runs,
    #[command(flatten)]
    pub(crate) output: Output,
}

const HEADERS_EXAMPLES: &str = "\
Examples:
  hoistway bench headers models/llama/model.safetensors --batch-sizes 1,16";

const HEADERS_NOTES: &str = "\
An iteration reads the header of each file once, through the page cache, in one call for each batch, as read_headers_batch \
of hoistway.compat.threefs does. It includes opening the files. A batch size above the number of files means all files.

The directory gets benchmark_headers_batch_raw.csv, benchmark_headers_batch_summary.csv and a chart.";

/// How often a benchmark measures, and what.
#[derive(Debug, Args)]
pub(crate) struct Runs {
    /// How often to measure each combination
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) iterations: u32,
    /// How often to read everything first, unmeasured
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) warmup: u32,
    /// What to measure: grid (all combinations of the values of the options) or single (the first value of each)
    #[arg(long, value_enum, default_value_t = Mode::Grid)]
    pub(crate) mode: Mode,
}

/// The files that a benchmark reads.
#[derive(Debug, Args)]
pub(crate) struct Files {
    /// Files to read; with --mount-point, names or glob patterns below it [default there: **/*.safetensors]
    #[arg(required_unless_present = "mount_point", value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Directory that the paths lie below, such as the mount point of a 3FS
    #[arg(long, value_name = "DIR")]
    mount_point: Option<PathBuf>,
}

impl Files {
    /// Returns the files, those of a pattern in the order of their names.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a path that is not below the mount point, [`Error::NotFound`] if none matches.
    pub(crate) fn resolve(&self) -> hoistway::Result<Vec<PathBuf>> {
        let Some(mount_point) = &self.mount_point else { return Ok(self.paths.clone()) };
        let all = [PathBuf::from("**/*.safetensors")];
        let patterns = if self.paths.is_empty() { &all[..] } else { &self.paths };
        let mut files = Vec::new();
        for pattern in patterns {
            files.extend(matches(mount_point, pattern)?);
        }
        Ok(files)
    }
}

/// The files below `mount_point` that match `pattern`.
fn matches(mount_point: &Path, pattern: &Path) -> hoistway::Result<Vec<PathBuf>> {
    let below = pattern.strip_prefix(mount_point).unwrap_or(pattern);
    // On Windows, neither a path from the root of a drive nor one with a drive alone is absolute.
    if below.has_root() || matches!(below.components().next(), Some(Component::Prefix(_))) {
        let (value, reason) =
            (mount_point.display().to_string(), format!("{} is not below it", pattern.display()));
        return Err(Error::InvalidOption { option: "mount-point", value, reason });
    }
    let path = mount_point.join(below);
    if path.is_file() {
        return Ok(vec![path]);
    }
    let not_found = |reason: String| Error::NotFound { path: path.clone(), reason };
    let (Some(start), Some(below)) = (mount_point.to_str(), below.to_str()) else {
        return Err(not_found("it is not a file, and not a pattern either, as it is not UTF-8".into()));
    };
    let pattern = format!("{}/{below}", glob::Pattern::escape(start));
    let matches = glob::glob(&pattern).map_err(|error| not_found(format!("not a valid pattern: {error}")))?;
    let names_hidden = has_hidden_part(Path::new(below));
    let mut found = Vec::new();
    for path in matches {
        let path = path.map_err(|error| Error::Io {
            operation: "list",
            path: error.path().to_owned(),
            tensor: None,
            range: None,
            source: error.into(),
        })?;
        let is_hidden = path.strip_prefix(mount_point).is_ok_and(has_hidden_part);
        if path.is_file() && (names_hidden || !is_hidden) {
            found.push(path);
        }
    }
    if found.is_empty() { Err(not_found("no file matches".into())) } else { Ok(found) }
}

/// Whether a file or a folder in a path is hidden.
fn has_hidden_part(path: &Path) -> bool {
    path.iter().any(|name| name.as_encoded_bytes().starts_with(b"."))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    Grid,
    Single,
}

/// Bytes from text such as `64MiB`, or from a number of MiB.
fn size(text: &str) -> Result<u64, String> {
    if let Ok(mebibytes) = text.parse::<u64>() {
        return mebibytes.checked_mul(1 << 20).ok_or_else(|| "the size is too large".to_owned());
    }
    text.parse::<ByteSize>().map(|size| size.as_u64())
}

impl Mode {
    /// What is measured of the values of one option.
    pub(crate) fn of<T>(self, values: &[T]) -> &[T] {
        match self {
            Self::Grid => values,
            Self::Single => &values[..values.len().min(1)],
        }
    }
}
