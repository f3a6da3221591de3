//! Arguments of `hoistway moe`.

use crate::arguments::{Paths, size, with_notes};
use clap::{Args, Subcommand, ValueEnum, builder::PossibleValuesParser};
use hoistway_experts::{
    policy,
    replay::Budget,
    trace::{Format, Pattern},
};
use std::{num::NonZeroU32, path::PathBuf, time::Duration};

#[derive(Debug, Subcommand)]
pub(crate) enum Moe {
    /// Replay a routing trace: how many experts a policy finds resident under a budget, and how much it reads
    Replay(Replay),
    /// Plan the memory of a model: how much is left for experts, and for how many tokens that suffices
    Plan(Plan),
    /// Pack the experts of a model into a file beside it, from which each takes fewer reads
    Pack(Pack),
    /// Generate a synthetic trace
    Generate(Generate),
}

/// Options for reading traces.
#[derive(Debug, Args)]
pub(super) struct Reading {
    /// Bytes of an expert, such as 3MiB, for layers where the trace does not say
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) expert_bytes: Option<u64>,
    /// Number of tokens of a prompt that pass a layer together
    #[arg(long, value_name = "N", default_value = "512")]
    pub(super) prefill_batch: NonZeroU32,
    /// Trace whose most chosen experts the policy static-profile keeps
    #[arg(long, value_name = "TRACE")]
    pub(super) profile: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = REPLAY_EXAMPLES, after_long_help = with_notes(REPLAY_EXAMPLES, &replay_notes()))]
pub(crate) struct Replay {
    /// A trace of routing: CSV or JSON lines
    #[arg(value_name = "TRACE")]
    pub(super) trace: PathBuf,
    /// Memory for resident experts: a size such as 8GiB, or a number of token cycles such as 2c; may be repeated
    #[arg(long, value_name = "BUDGET", value_delimiter = ',', default_value = "0.9c,1.25c,2c,3c,4c,8c")]
    pub(super) budget: Vec<Budget>,
    /// Policy that chooses the experts to evict; may be repeated [default: all; static-profile only with --profile]
    #[arg(long, value_name = "POLICY", value_delimiter = ',', value_parser = PossibleValuesParser::new(policy::names()))]
    pub(super) policy: Vec<String>,
    #[command(flatten)]
    pub(super) reading: Reading,
    /// Bytes that the drive reads per second, such as 7GB: limits the tokens per second
    #[arg(long, value_name = "SIZE", value_parser = rate)]
    pub(super) drive_rate: Option<u64>,
    /// Milliseconds to compute a token if no expert has to be read
    #[arg(long, value_name = "MS", default_value = "0", value_parser = milliseconds, requires = "drive_rate")]
    pub(super) compute_ms: Duration,
    /// Draw hit rates by budget into this SVG file
    #[arg(long, value_name = "FILE")]
    pub(super) chart: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

const REPLAY_EXAMPLES: &str = "\
Examples:
  hoistway moe replay trace.csv
  hoistway moe replay trace.jsonl --budget 8GiB,4c --policy lru --drive-rate 7GB";

fn replay_notes() -> String {
    let width = policy::names().map(str::len).max().unwrap_or_default();
    let described = |name| format!("  {name:width$}  {}\n", policy::about(name).unwrap_or_default());
    let policies: String = policy::names().map(described).collect();
    format!(
        "Policies:\n{policies}\n\
         A token cycle is the bytes of the experts that one token uses in all layers. With a smaller budget, lru finds \
         nothing resident: the experts of a token are evicted before the next token needs them. Hit rates, faults and MiB \
         count the tokens of the answer; the prompt only fills the memory. 'to belady' is how many percentage points the \
         hit rate is below that of belady.\n\n\
         With --drive-rate, 'tokens/s' is the rate that reading and computing allow: if they overlap, and if they \
         alternate.\n\n\
         A trace is CSV with the columns step, layer, expert, and, if known, turn, phase (0 prompt, 1 answer), weight and \
         expert_bytes; comments such as '# n_layer=48 n_expert=128 n_expert_used=8' and '# layer=0 expert_bytes=3059712' \
         describe the model. A trace may also be JSON lines, as 'hoistway moe generate --format jsonl' writes them. What \
         a trace lacks is not replayed, and is reported."
    )
}

#[derive(Debug, Args)]
#[command(after_help = PLAN_EXAMPLES, after_long_help = with_notes(PLAN_EXAMPLES, PLAN_NOTES))]
pub(crate) struct Plan {
    #[command(flatten)]
    pub(super) paths: Paths,
    /// Memory for weights, such as 16GiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) memory: u64,
    /// Number of experts that a token uses in each layer [default: that of the model]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) experts_per_token: Option<u32>,
    /// Replay this trace of the model with the budget
    #[arg(long, value_name = "TRACE")]
    pub(super) trace: Option<PathBuf>,
    /// Policy that chooses the experts to evict
    #[arg(long, value_name = "POLICY", default_value = policy::DEFAULT, value_parser = PossibleValuesParser::new(policy::names()))]
    pub(super) policy: String,
    #[command(flatten)]
    pub(super) reading: Reading,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

const PLAN_EXAMPLES: &str = "\
Examples:
  hoistway moe plan models/qwen3-30b-a3b --memory 16GiB
  hoistway moe plan models/qwen3-30b-a3b --memory 16GiB --trace trace.csv";

const PLAN_NOTES: &str = "\
Only headers are read. Tensors that belong to no expert stay resident, and memory for the experts that one token uses in \
one layer is reserved; the rest is the budget for experts. Memory for anything else, such as the KV cache, is not \
counted: subtract it from --memory. A prompt uses more experts of a layer at once than a token: see \
'largest_layer_demand' of 'hoistway moe replay'.

A trace is replayed with the budget in token cycles. A trace of the same model in another quantization can therefore be \
used.";

#[derive(Debug, Args)]
#[command(after_help = PACK_EXAMPLES, after_long_help = with_notes(PACK_EXAMPLES, PACK_NOTES))]
pub(crate) struct Pack {
    #[command(flatten)]
    pub(super) paths: Paths,
    /// The file to write [default: the name of the model's first file, with .experts behind it]
    #[arg(long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
    /// Write nothing: read the experts of the pack and of the model, and compare both with the digests of those that were packed
    #[arg(long)]
    pub(super) check: bool,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

const PACK_EXAMPLES: &str = "\
Examples:
  hoistway moe pack models/qwen3-30b-a3b
  hoistway moe pack models/qwen3-30b-a3b --check";

const PACK_NOTES: &str = "\
The file takes as much room as the experts do, and the model stays as it is. It takes its name once it is complete and all of it \
was read again. Stores of experts use it if it lies beside the model under its default name, and if the model's files have the \
lengths and the times that they had when it was written: after a change or a copy of the model, pack again.";

const GENERATE_EXAMPLES: &str = "\
Examples:
  hoistway moe generate zipf --output trace.csv
  hoistway moe generate scan --format jsonl --layers 48 --experts 128";

#[derive(Debug, Args)]
#[command(after_help = GENERATE_EXAMPLES)]
pub(crate) struct Generate {
    /// How experts are chosen: uniform, zipf (some more often), sticky (zipf, and often those of the previous token) or scan
    /// (one after the other)
    #[arg(value_enum, value_name = "PATTERN")]
    pub(super) pattern: PatternName,
    /// The file to write [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
    /// Format of the file: csv or jsonl
    #[arg(long, value_name = "FORMAT", default_value_t = Format::Csv)]
    pub(super) format: Format,
    /// Number of layers
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub(super) layers: u32,
    /// Number of experts in each layer
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(super) experts: u32,
    /// Number of experts that a token uses in each layer
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(super) experts_per_token: u32,
    /// Bytes of each expert
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = size)]
    pub(super) expert_bytes: u64,
    /// Number of tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) prefill: u32,
    /// Number of tokens of the answer
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(super) tokens: u32,
    /// How unevenly zipf and sticky choose; 0 is evenly
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub(super) exponent: f64,
    /// Probability that sticky keeps an expert of the previous token
    #[arg(long, value_name = "P", default_value_t = 0.4)]
    pub(super) stay: f64,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum PatternName {
    Uniform,
    Zipf,
    Sticky,
    Scan,
}

impl Generate {
    pub(super) fn pattern(&self) -> Pattern {
        let Self { exponent, stay, .. } = *self;
        match self.pattern {
            PatternName::Uniform => Pattern::Uniform,
            PatternName::Zipf => Pattern::Zipf { exponent },
            PatternName::Sticky => Pattern::Sticky { stay, exponent },
            PatternName::Scan => Pattern::Scan,
        }
    }
}

/// Bytes a second from text such as `7GB` or `7GB/s`.
fn rate(text: &str) -> Result<u64, String> {
    match size(text.strip_suffix("/s").unwrap_or(text))? {
        0 => Err("the rate must be more than 0".into()),
        rate => Ok(rate),
    }
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    let milliseconds: f64 = text.parse().map_err(|error| format!("{error}"))?;
    Duration::try_from_secs_f64(milliseconds / 1e3).map_err(|error| error.to_string())
}
