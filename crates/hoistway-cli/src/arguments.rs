//! Arguments of the command.

use crate::bench::Bench;
#[cfg(target_os = "linux")]
use crate::kv::Kv;
use crate::moe::Moe;
use bytesize::ByteSize;
use clap::{
    Args, Parser, Subcommand,
    builder::{PossibleValue, StringValueParser, TypedValueParser},
};
use hoistway::{Checkpoint, cache::NodeCache, catalog::OpenOptions, objects::StoreOptions};
use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
};

/// Moves tensors between storage and memory at the speed of the hardware, and reports how.
#[derive(Debug, Parser)]
#[command(name = "hoistway", version, max_term_width = 100, after_long_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  any other failure
  2  the command line or an option is invalid
  3  a file, a store or a tensor does not exist, or nothing matches a pattern
  4  the data is wrong: invalid, truncated or changed file, different digest, damaged block
  5  an operation of the operating system failed
  6  the named route or device cannot be used
  7  not enough memory

Environment:
  HOISTWAY_DEVICE, HOISTWAY_ROUTE and so on set the options of load; flags win.
  HOISTWAY_LENIENT=true opens files as --lenient does; --lenient=false wins over it.
  HOISTWAY_LOG=debug logs refusals and failures as they happen.";

/// Heading of the options that say how a checkpoint is opened.
const OPENING: &str = "Opening";

const INSPECT_EXAMPLES: &str = "\
Examples:
  hoistway inspect models/llama
  hoistway inspect --all model.gguf";

const LOAD_EXAMPLES: &str = "\
Examples:
  hoistway load models/llama --report
  hoistway load model.safetensors --device cuda --route gds --report
  hoistway load s3://models/llama/ --cache /var/cache/hoistway --json
  hoistway load models/llama --trace timeline.json   # for ui.perfetto.dev
  hoistway load --help   # all options, with those of tuning";

const VERIFY_EXAMPLES: &str = "\
Examples:
  hoistway verify models/llama --save llama.json
  hoistway verify models/llama --against llama.json";

const WARM_EXAMPLES: &str = "\
Examples:
  hoistway warm models/llama";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  hoistway doctor
  hoistway doctor /mnt/nvme s3://models/llama/";

const CACHE_EXAMPLES: &str = "\
Examples:
  hoistway cache warm --cache /var/cache/hoistway s3://models/llama/
  hoistway cache stat --cache /var/cache/hoistway
  hoistway cache gc --cache /var/cache/hoistway --cache-bytes 200GiB";

const RUN_EXAMPLES: &str = "\
Examples:
  hoistway run -- generate.py
  hoistway run --report -- accelerate launch train.py";

const CACHE_STAT_EXAMPLES: &str = "\
Examples:
  hoistway cache stat
  hoistway cache stat --cache /var/cache/hoistway --json";

const CACHE_LS_EXAMPLES: &str = "\
Examples:
  hoistway cache ls --cache /var/cache/hoistway";

const CACHE_VERIFY_EXAMPLES: &str = "\
Examples:
  hoistway cache verify --cache /var/cache/hoistway";

const CACHE_GC_EXAMPLES: &str = "\
Examples:
  hoistway cache gc --cache /var/cache/hoistway --cache-bytes 200GiB";

const CACHE_WARM_EXAMPLES: &str = "\
Examples:
  hoistway cache warm --cache /var/cache/hoistway s3://models/llama/";

const BENCH_EXAMPLES: &str = "\
Examples:
  hoistway bench read 'models/llama/*.safetensors' --route io_uring,threads
  hoistway bench headers 'models/llama/*.safetensors' --batch-sizes 1,16";

#[cfg(target_os = "linux")]
const KV_EXAMPLES: &str = "\
Examples:
  hoistway kv stat /mnt/nvme/kv
  hoistway kv verify /mnt/nvme/kv
  hoistway kv bench /mnt/nvme --block-sizes 64KiB,1MiB";

const MOE_EXAMPLES: &str = "\
Examples:
  hoistway moe plan models/qwen3-30b-a3b --memory 16GiB
  hoistway moe replay trace.jsonl --budget 8GiB,4c
  hoistway moe generate zipf --output trace.csv";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  hoistway completions bash > ~/.local/share/bash-completion/completions/hoistway";

const MAN_EXAMPLES: &str = "\
Examples:
  hoistway man --directory ~/.local/share/man/man1";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the tensors of a checkpoint as a tree, with their types, shapes and sizes
    Inspect(Inspect),
    /// Load a checkpoint into memory and report how its bytes came
    Load(Box<Load>),
    /// Check a checkpoint's structure and digest every tensor
    Verify(Verify),
    /// Read a checkpoint into the page cache, for programs that map it
    Warm(Warm),
    /// Manage the cache on this machine of files from object stores
    #[command(after_help = CACHE_EXAMPLES)]
    Cache {
        /// What to do
        #[command(subcommand)]
        what: Cache,
    },
    /// Examine this machine: what loads can use, what is missing, and how to fix it
    Doctor(Doctor),
    /// Run a program with hoistway in place of safetensors
    Run(Run),
    /// Measure this machine's storage as hoistway reads it
    #[command(after_help = BENCH_EXAMPLES)]
    Bench {
        /// What to measure
        #[command(subcommand)]
        what: Bench,
    },
    /// Manage a store of KV-cache blocks
    #[cfg(target_os = "linux")]
    #[command(after_help = KV_EXAMPLES)]
    Kv {
        /// What to do
        #[command(subcommand)]
        what: Kv,
    },
    /// Fail: stores of KV-cache blocks are available on Linux only
    #[cfg(not(target_os = "linux"))]
    #[command(hide = true)]
    Kv {
        /// Anything
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        _arguments: Vec<OsString>,
    },
    /// Plan for models whose experts do not fit into memory
    #[command(after_help = MOE_EXAMPLES)]
    Moe {
        /// What to do
        #[command(subcommand)]
        what: Moe,
    },
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write those of all subcommands
    #[command(after_help = MAN_EXAMPLES)]
    Man {
        /// Write a page for hoistway and one for each subcommand into this directory
        #[arg(long, value_name = "DIR")]
        directory: Option<PathBuf>,
    },
}

/// A checkpoint.
#[derive(Debug, Args)]
pub(crate) struct Paths {
    /// Files, directories, indexes, glob patterns or URLs
    ///
    /// Safetensors or GGUF files, *.safetensors.index.json files, directories that hold these, glob patterns, or URLs that
    /// begin with s3://, gs://, az://, abfs://, hf://, https:// or http:// and end with '/' for a folder. One file of a split
    /// GGUF model stands for all
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Accept files that violate the specification of their format in harmless ways [env: HOISTWAY_LENIENT]
    ///
    /// These are safetensors files with padding after the last tensor, and GGUF files that other readers accept
    #[arg(
        long,
        help_heading = OPENING,
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true"
    )]
    pub(crate) lenient: Option<bool>,
    /// Byte at which the GGUF begins, for GGUF files that are embedded in other files
    #[arg(long, help_heading = OPENING, value_name = "BYTES", default_value_t = 0)]
    pub(crate) offset: u64,
    /// Endpoint and credentials of the object store of a URL, such as endpoint=URL; may be repeated
    ///
    /// Names are endpoint=URL, region=NAME, path_style=BOOL, profile=NAME, credentials_file=PATH, account=NAME, anonymous=BOOL,
    /// unpinned=BOOL, allow_http=BOOL, requester_pays=BOOL and checksums=auto or off. Keys and tokens come from the environment or files
    #[arg(long, help_heading = OPENING, value_name = "NAME=VALUE")]
    pub(crate) store: Vec<String>,
    /// Keep what is read from object stores in this directory, for the next load [default: HOISTWAY_CACHE]
    ///
    /// Use a directory on a drive of this machine
    #[arg(long, help_heading = OPENING, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
    /// Size limit of the cache
    /// [default: HOISTWAY_CACHE_BYTES, or what leaves a tenth of the drive free]
    #[arg(long, help_heading = OPENING, value_name = "SIZE", value_parser = size)]
    pub(crate) cache_bytes: Option<u64>,
}

impl Paths {
    /// Opens the checkpoint: flags win over the environment.
    pub(crate) fn open(&self) -> hoistway::Result<Checkpoint> {
        Checkpoint::open_with(&self.paths, &self.options()?)
    }

    /// How the checkpoint is opened.
    pub(crate) fn options(&self) -> hoistway::Result<OpenOptions> {
        let lenient = match self.lenient {
            Some(lenient) => lenient,
            None => OpenOptions::lenient_from_env()?,
        };
        let cache = NodeCache::chosen(self.cache.as_deref(), self.cache_bytes)?;
        let mut options =
            OpenOptions::default().lenient(lenient).offset(self.offset).store(store_options(&self.store)?);
        options.cache = cache;
        Ok(options)
    }
}

/// The options of stores that the command line has.
pub(crate) fn store_options(named: &[String]) -> hoistway::Result<StoreOptions> {
    let mut options = StoreOptions::default();
    for text in named {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        // The value may be secret.
        let invalid = |reason: String| hoistway::Error::InvalidOption {
            option: "store",
            value: name.to_owned(),
            reason,
        };
        if StoreOptions::SECRETS.contains(&name) {
            let reason = "other users can see the command line: give keys by the environment or a profile";
            return Err(invalid(reason.into()));
        }
        options.set(name, value).map_err(|error| invalid(error.problem.to_string()))?;
    }
    Ok(options)
}

#[derive(Debug, Args)]
#[command(after_help = INSPECT_EXAMPLES)]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) paths: Paths,
    /// Show every tensor, rather than group numbered ones that are alike, and the first values of GGUF arrays
    #[arg(long)]
    pub(crate) all: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = LOAD_EXAMPLES)]
pub(crate) struct Load {
    #[command(flatten)]
    pub(crate) paths: Paths,
    /// Where tensors go: cpu (the default), cuda, rocm, or cuda:N, rocm:N [env: HOISTWAY_DEVICE]
    #[arg(long, value_name = "DEVICE", value_parser = Offered(DEVICES), hide_possible_values = true)]
    pub(crate) device: Option<String>,
    /// Route of the bytes: auto (the default), io_uring, threads, cached, mapped, gds, … [env: HOISTWAY_ROUTE]
    ///
    /// Routes to host memory are auto (the best one for each extent), io_uring, overlapped (on Windows), threads (pread),
    /// cached (copies from the page cache), mapped (reads when memory is touched), usrbio (from a 3FS, bypassing the kernel),
    /// directstorage (by Microsoft's runtime, on Windows), node-cache (from the cache of --cache) and http (from URLs).
    ///
    /// Routes to a device are also pinned-cache (copies from pinned pages of the page cache), staged (through pinned host
    /// memory), unified (an integrated device uses host memory as it is), gds (bypassing host memory, which is proven) and
    /// gds-compat (cuFile in whatever mode it works)
    #[arg(long, value_name = "ROUTE", value_parser = Offered(ROUTES), hide_possible_values = true)]
    pub(crate) route: Option<String>,
    /// Load only tensors whose names match this glob pattern; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) select: Vec<String>,
    /// Leave out tensors whose names match this glob pattern; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// Convert floats on the device as they arrive: F32, F16 or BF16 [env: HOISTWAY_DTYPE]
    #[arg(long, value_name = "DTYPE", value_parser = Offered(DTYPES), hide_possible_values = true)]
    pub(crate) dtype: Option<String>,
    /// Print the whole report rather than its first line
    #[arg(long)]
    pub(crate) report: bool,
    /// Print the report as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a timeline of reads, copies and waits to this file, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Compare the loaded tensors with a second, plain read of the files
    #[arg(long)]
    pub(crate) verify: bool,
    /// Compare the loaded tensors with a manifest of 'hoistway verify --save'
    #[arg(long, value_name = "MANIFEST")]
    pub(crate) manifest: Option<PathBuf>,
    /// Whether reads bypass the page cache: auto (the default), always or never [env: HOISTWAY_DIRECT]
    ///
    /// With auto they do if the file system allows it
    #[arg(long, value_name = "WHEN", value_parser = Offered(DIRECT), hide_possible_values = true)]
    pub(crate) direct: Option<String>,
    /// Client of the 3FS daemon: auto (the default), native or vendor [env: HOISTWAY_USRBIO]
    ///
    /// With auto it is the vendor's library if that works, else hoistway's client
    #[arg(long, value_name = "CLIENT", value_parser = Offered(CLIENTS), hide_possible_values = true)]
    pub(crate) usrbio: Option<String>,
    /// How tensors share memory: file (the default), packed or tensor [env: HOISTWAY_LAYOUT]
    ///
    /// With file, an allocation holds the tensors of one file (on a device, 64 MiB of them); with packed, all tensors back to
    /// back; with tensor, one large tensor or several small ones
    #[arg(long, value_name = "LAYOUT", value_parser = Offered(LAYOUTS), hide_possible_values = true)]
    pub(crate) layout: Option<String>,
    #[command(flatten)]
    pub(crate) tuning: Tuning,
}

/// Options for tuning.
#[derive(Debug, Args)]
#[command(next_help_heading = "Tuning")]
pub(crate) struct Tuning {
    /// Longest single read, a multiple of 4096 [default: 4MiB] [env: HOISTWAY_CHUNK]
    #[arg(long, hide_short_help = true, value_name = "SIZE")]
    pub(crate) chunk: Option<String>,
    /// Longest gap between two wanted ranges that is read rather than skipped [default: 64KiB] [env: HOISTWAY_COALESCE_GAP]
    #[arg(long, hide_short_help = true, value_name = "SIZE")]
    pub(crate) coalesce_gap: Option<String>,
    /// Bytes in flight to one storage device [default: grows from 32MiB, or 128MiB over a network, while that is faster; 32MiB for usrbio]
    /// [env: HOISTWAY_IN_FLIGHT]
    #[arg(long, hide_short_help = true, value_name = "SIZE")]
    pub(crate) in_flight: Option<String>,
    /// Number of rings of the routes io_uring and usrbio, and of ports of the route overlapped [default: 1, or 2 on larger
    /// machines; 2 or 4 from a 3FS to host memory] [env: HOISTWAY_RINGS]
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) rings: Option<String>,
    /// Number of threads of the route threads, and of copies from the page cache [default: by cores and bytes in flight]
    /// [env: HOISTWAY_THREADS]
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) threads: Option<String>,
    /// Huge pages: transparent (if the system has some; the default), reserved (of vm.nr_hugepages, or large pages on Windows) or never
    /// [env: HOISTWAY_HUGE_PAGES]
    #[arg(long, hide_short_help = true, value_name = "KIND", value_parser = Offered(HUGE_PAGES), hide_possible_values = true)]
    pub(crate) huge_pages: Option<String>,
    /// NUMA node of memory and threads: auto (the default: the device's), unbound, near_storage or a number [env: HOISTWAY_NUMA]
    #[arg(long, hide_short_help = true, value_name = "NODE", value_parser = Offered(NODES), hide_possible_values = true)]
    pub(crate) numa: Option<String>,
    /// Limit of host memory for the load, such as 8GiB [default: what the machine and the limits of the process leave]
    /// [env: HOISTWAY_MEMORY_BUDGET]
    #[arg(long, hide_short_help = true, value_name = "SIZE")]
    pub(crate) memory_budget: Option<String>,
    /// With the route mapped: read everything at once, rather than when it is touched
    /// [env: HOISTWAY_POPULATE]
    #[arg(long, hide_short_help = true)]
    pub(crate) populate: bool,
}

#[derive(Debug, Args)]
#[command(after_help = VERIFY_EXAMPLES)]
pub(crate) struct Verify {
    #[command(flatten)]
    pub(crate) paths: Paths,
    /// Write the digests to this file
    #[arg(long, value_name = "MANIFEST")]
    pub(crate) save: Option<PathBuf>,
    /// Compare with the digests in this file
    #[arg(long, value_name = "MANIFEST")]
    pub(crate) against: Option<PathBuf>,
    /// Print the digests as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = WARM_EXAMPLES)]
pub(crate) struct Warm {
    #[command(flatten)]
    pub(crate) paths: Paths,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Cache {
    /// Show the size of the cache and its limit
    #[command(after_help = CACHE_STAT_EXAMPLES)]
    Stat(CacheChoice),
    /// List the entries of the cache, the most recently used first
    #[command(after_help = CACHE_LS_EXAMPLES)]
    Ls(CacheChoice),
    /// Compare every block with its checksum, and remove damaged blocks
    #[command(after_help = CACHE_VERIFY_EXAMPLES)]
    Verify(CacheChoice),
    /// Evict the least recently used entries until the cache is within its limit, or --cache-bytes
    #[command(after_help = CACHE_GC_EXAMPLES)]
    Gc(CacheChoice),
    /// Read a checkpoint into the cache
    #[command(after_help = CACHE_WARM_EXAMPLES)]
    Warm(CacheWarm),
}

/// The cache of a command.
#[derive(Debug, Args)]
pub(crate) struct CacheChoice {
    /// Directory of the cache [default: HOISTWAY_CACHE]
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
    /// Size limit of the cache [default: HOISTWAY_CACHE_BYTES, or what leaves a tenth of the drive free]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) cache_bytes: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CacheWarm {
    #[command(flatten)]
    pub(crate) paths: Paths,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = DOCTOR_EXAMPLES)]
pub(crate) struct Doctor {
    /// Files or directories whose file systems to examine, or URLs whose object stores to examine
    #[arg(value_name = "PATH", default_value = ".")]
    pub(crate) paths: Vec<PathBuf>,
    /// Endpoint and credentials of the object store of a URL, as in `hoistway load`; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) store: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// A program to run. The command of the Python package does it; see `hoistway/_command.py`.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct Run {
    /// Report on standard error what each process loaded, how fast and by which routes
    #[arg(long)]
    pub(crate) report: bool,
    /// The program and its arguments. Scripts are run by the Python of this command
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Text that the engine checks. These values of it are offered by completion.
#[derive(Clone, Copy)]
pub(crate) struct Offered(pub(crate) &'static [&'static str]);

impl TypedValueParser for Offered {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().map(PossibleValue::new)))
    }
}

pub(crate) const DEVICES: &[&str] = &["cpu", "cuda", "cuda:0", "rocm", "rocm:0"];
pub(crate) const DIRECT: &[&str] = &["auto", "always", "never"];
pub(crate) const CLIENTS: &[&str] = &["auto", "native", "vendor"];
pub(crate) const ROUTES: &[&str] = &[
    "auto",
    "io_uring",
    "overlapped",
    "threads",
    "cached",
    "pinned-cache",
    "mapped",
    "usrbio",
    "directstorage",
    "staged",
    "unified",
    "gds",
    "gds-compat",
    "node-cache",
    "http",
];
const DTYPES: &[&str] = &["F32", "F16", "BF16"];
const LAYOUTS: &[&str] = &["file", "packed", "tensor"];
const HUGE_PAGES: &[&str] = &["transparent", "reserved", "never"];
const NODES: &[&str] = &["auto", "unbound", "near_storage"];

/// Text as help shows it: examples, then what else there is to say.
pub(crate) fn with_notes(examples: &str, notes: &str) -> String {
    format!("{examples}\n\n{notes}")
}

/// Bytes from text such as `64MiB`.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    text.parse::<ByteSize>().map(|size| size.as_u64())
}

#[cfg(test)]
mod tests {
    use super::{Arguments, CLIENTS, DEVICES, DIRECT, DTYPES, HUGE_PAGES, LAYOUTS, NODES, ROUTES};
    use clap::CommandFactory;
    use hoistway::{LoadOptions, Route};

    /// The words of a line as a shell splits them, up to a redirection or a comment.
    fn words(line: &str) -> Vec<String> {
        let before_redirection = line.split(['>', '#']).next().unwrap();
        before_redirection.split_whitespace().map(|word| word.trim_matches('\'').to_owned()).collect()
    }

    /// The subcommands of a command and of its subcommands, with what is typed before them.
    fn subcommands<'a>(
        command: &'a clap::Command,
        before: &str,
        found: &mut Vec<(String, &'a clap::Command)>,
    ) {
        // Subcommands of another system are hidden.
        for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
            let path = format!("{before} {}", subcommand.get_name());
            subcommands(subcommand, &path, found);
            found.push((path, subcommand));
        }
    }

    #[test]
    fn every_subcommand_has_examples_that_can_be_typed() {
        let command = Arguments::command();
        let mut all = Vec::new();
        subcommands(&command, "hoistway", &mut all);
        assert!(all.iter().any(|(path, _)| path == "hoistway moe plan"), "nested ones are among them");
        for (path, subcommand) in all {
            let help = subcommand.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples: Vec<&str> = help.lines().skip(1).map(str::trim).collect();
            assert!(help.starts_with("Examples:\n") && !examples.is_empty(), "{path}");
            let long = subcommand.get_after_long_help().map(ToString::to_string);
            assert!(long.is_none_or(|long| long.starts_with(&help)), "{path} --help has the examples too");
            for example in examples.iter().filter(|example| !example.contains("--help")) {
                assert!(example.starts_with(&path), "{example} is one of {path}");
                let parsed = command.clone().try_get_matches_from(words(example));
                assert!(parsed.is_ok(), "{example}: {}", parsed.unwrap_err());
            }
        }
    }

    #[test]
    fn values_that_completion_offers_are_taken() {
        let offered: [(&str, &[&str]); 8] = [
            ("device", DEVICES),
            ("route", ROUTES),
            ("dtype", DTYPES),
            ("direct", DIRECT),
            ("usrbio", CLIENTS),
            ("layout", LAYOUTS),
            ("huge_pages", HUGE_PAGES),
            ("numa", NODES),
        ];
        for (option, values) in offered {
            for value in values {
                LoadOptions::default().set(option, value).unwrap();
            }
        }
        let routes: Vec<&str> = Route::ALL.iter().map(|route| route.name()).collect();
        assert_eq!(routes, ROUTES, "every route is offered");
    }

    #[test]
    fn every_option_of_loads_names_its_variable() {
        let command = Arguments::command();
        let load = command.find_subcommand("load").unwrap();
        // A load has no option of a name that it does not know.
        let mut named = 0;
        for argument in load.get_arguments() {
            let id = argument.get_id().as_str();
            let is_option = LoadOptions::default()
                .set(id, "")
                .is_err_and(|error| !error.to_string().contains("the options are"));
            let help = argument.get_long_help().or(argument.get_help()).unwrap().to_string();
            let variable = format!("[env: HOISTWAY_{}]", id.to_uppercase());
            assert!(!is_option || help.contains(&variable), "{id}: {help}");
            named += u32::from(is_option);
        }
        assert_eq!(named, 15);
    }
}
