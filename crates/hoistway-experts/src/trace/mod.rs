//! Traces of routing: which experts a model's routers chose, token by token and layer by layer.
//!
//! `csv` and `json_lines` are the formats; both make rows, and `draft` makes a [`Trace`] of them and checks it. `synthetic`
//! makes traces that no model has recorded.
//!
//! A trace may have holes. A token that was recorded in part is replayed in part; [`Holes`] counts what is missing.
#![forbid(unsafe_code)]

mod csv;
mod draft;
mod error;
mod holes;
mod json_lines;
mod lines;
mod synthetic;

pub use error::{TraceError, TraceProblem};
pub use holes::{HolePlace, Holes};
pub use synthetic::{Pattern, Synthetic};

use crate::policy::CatalogShape;
use draft::Draft;
use lines::Lines;
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    fs::File,
    io::{self, BufRead, BufReader, Write},
    path::Path,
    str::FromStr,
};

/// Most choices of experts in a trace: 40,000 tokens of a model of 48 layers with 8 experts a token.
pub const MAX_CHOICES: usize = 1 << 24;

/// The phase of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The prompt, whose tokens go through a layer together.
    Prefill,
    /// The answer, a token at a time.
    Decode,
}

/// The format of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// A row for each choice, with a comment that describes the model: version 1 of BigMoeOnEdge's traces of routes.
    Csv,
    /// A JSON object for the model, then one for each visit, a line each.
    JsonLines,
}

impl Format {
    /// Every format.
    pub const ALL: &[Self] = &[Self::Csv, Self::JsonLines];

    /// Returns the name that options have for it, which is also the usual end of a file's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Csv => "csv",
            Self::JsonLines => "jsonl",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().copied().find(|format| format.name() == name);
        found.ok_or_else(|| {
            format!(
                "it must be one of {}",
                Self::ALL.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
            )
        })
    }
}

/// Facts that a trace may lack and the reader supplies.
#[derive(Clone, Copy, Debug, Default)]
pub struct TraceOptions {
    /// Bytes of an expert, in layers for which the trace does not say.
    pub expert_bytes: Option<u64>,
}

/// The choices of a model's routers.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    model: Option<String>,
    shape: CatalogShape,
    states_experts: bool,
    holes: Holes,
    /// In order: turns, in each the prefill before the decode, tokens, layers.
    visits: Vec<Recorded>,
    choices: Vec<(u32, f32)>,
}

/// A visit, whose choices begin where those of the one before it end.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Recorded {
    turn: u32,
    phase: Phase,
    step: u32,
    layer: u32,
    choices_end: u32,
}

/// One token's visit of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Visit<'a> {
    /// Number of the question and its answer, in a conversation.
    pub turn: u32,
    /// Whether the token is part of the prompt.
    pub phase: Phase,
    /// Number of the token.
    pub step: u32,
    /// The layer.
    pub layer: u32,
    /// The experts that were chosen, with the router's weights; 1 where the trace has none.
    pub experts: &'a [(u32, f32)],
}

impl Trace {
    /// Reads a trace from a file, in whichever format it is.
    ///
    /// # Errors
    /// [`TraceError`], with the number of the line, if the file cannot be read or is no trace.
    pub fn open(path: &Path, options: &TraceOptions) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|source| TraceError::Io {
            operation: "opening",
            name: path.display().to_string(),
            source,
        })?;
        Self::read(&path.display().to_string(), BufReader::new(file), options)
    }

    /// Reads a trace, which errors call by this name.
    ///
    /// ```
    /// use hoistway_experts::trace::{Trace, TraceOptions};
    /// let text = "turn,phase,step,layer,slot,expert,weight\n0,1,0,0,0,3,0.6\n0,1,0,0,1,1,0.4\n";
    /// let options = TraceOptions { expert_bytes: Some(1 << 20) };
    /// let trace = Trace::read("example", text.as_bytes(), &options).unwrap();
    /// assert_eq!(trace.visits().next().unwrap().experts, [(3, 0.6), (1, 0.4)]);
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn read(name: &str, mut input: impl BufRead, options: &TraceOptions) -> Result<Self, TraceError> {
        let start = input.fill_buf().map_err(|source| TraceError::Io {
            operation: "reading",
            name: name.to_owned(),
            source,
        })?;
        let is_json = start.trim_ascii_start().first() == Some(&b'{');
        let mut lines = Lines::new(name, input);
        let draft = if is_json { json_lines::read(&mut lines)? } else { csv::read(&mut lines)? };
        draft.finish(options).map_err(|(line, problem)| TraceError::Invalid {
            name: name.to_owned(),
            line,
            problem,
        })
    }

    /// Writes the trace. What is read from that has the same visits of a model of the same shape.
    ///
    /// # Errors
    /// The error of the output.
    pub fn write(&self, format: Format, output: &mut dyn Write) -> io::Result<()> {
        match format {
            Format::Csv => csv::write(self, output),
            Format::JsonLines => json_lines::write(self, output),
        }
    }

    /// Returns the name of the model, if the trace has one.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Returns the model's layers and experts. Layers that the trace never visits have none.
    pub fn shape(&self) -> &CatalogShape {
        &self.shape
    }

    /// Returns whether the trace says how many experts the layers have that it visits. Otherwise they have one more than the
    /// highest that is chosen.
    pub fn states_experts(&self) -> bool {
        self.states_experts
    }

    /// Returns what is missing.
    pub fn holes(&self) -> &Holes {
        &self.holes
    }

    /// Returns the visits of all tokens in order: turns, in each the prefill before the decode, tokens, layers.
    pub fn visits(&self) -> impl Iterator<Item = Visit<'_>> + Clone {
        let starts = std::iter::once(0).chain(self.visits.iter().map(|visit| visit.choices_end));
        self.visits.iter().zip(starts).map(|(visit, start)| Visit {
            turn: visit.turn,
            phase: visit.phase,
            step: visit.step,
            layer: visit.layer,
            experts: &self.choices[start as usize..visit.choices_end as usize],
        })
    }
}
