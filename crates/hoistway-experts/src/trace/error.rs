//! Errors of traces.
#![forbid(unsafe_code)]

use super::MAX_CHOICES;
use crate::policy::ShapeError;
use std::io;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The system failed to open or read it.
    #[error("{operation} the trace {name}: {source}")]
    Io {
        /// What was being done, such as `reading`.
        operation: &'static str,
        /// The file.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// It is not a trace, or contradicts itself.
    #[error("{name}{}: {problem}", line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Invalid {
        /// The file.
        name: String,
        /// The line, counted from 1, unless the whole file is wrong.
        line: Option<u64>,
        /// What is wrong.
        problem: TraceProblem,
    },
}

/// A problem of a trace, or of a line of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceProblem {
    /// A line is longer than any that a recorder writes.
    #[error("the line is longer than {limit_bytes} bytes")]
    LongLine {
        /// The limit.
        limit_bytes: usize,
    },
    /// A line is not UTF-8.
    #[error("the line is not UTF-8")]
    NotText,
    /// Its version is unknown.
    #[error("the trace has version '{found}', and only version 1 is known")]
    Version {
        /// The version that it names.
        found: String,
    },
    /// The line of column names lacks one.
    #[error("there is no column '{column}': the first line without # names the columns")]
    NoColumn {
        /// The column.
        column: &'static str,
    },
    /// A row does not have as many fields as there are columns.
    #[error("the row has {found} fields, and there are {columns} columns")]
    Fields {
        /// Fields of the row.
        found: usize,
        /// Columns.
        columns: usize,
    },
    /// A field is not a value that it can have.
    #[error("{field} is '{value}', which is not {expected}")]
    Field {
        /// The column or key.
        field: &'static str,
        /// The value, cut short.
        value: String,
        /// The values that are allowed.
        expected: &'static str,
    },
    /// A line is not the JSON object that it has to be.
    #[error("the line is not the object that it should be: {reason}")]
    Json {
        /// The parser's message.
        reason: String,
    },
    /// A visit has weights, but not one for each expert.
    #[error("the visit has {experts} experts and {weights} weights")]
    Weights {
        /// Experts.
        experts: usize,
        /// Weights.
        weights: usize,
    },
    /// A choice names a layer that the model does not have.
    #[error("there is no layer {layer}: the model has {layers}")]
    NoLayer {
        /// The layer.
        layer: u32,
        /// Layers of the model.
        layers: u32,
    },
    /// A choice names an expert that its layer does not have.
    #[error("there is no expert {expert} in layer {layer}: it has {experts}")]
    NoExpert {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// Experts of the layer.
        experts: u32,
    },
    /// A token goes to more experts than the model has for one.
    #[error(
        "a token goes to more than the {experts_per_token} experts of layer {layer} that the trace says are used"
    )]
    TooManyExperts {
        /// The layer.
        layer: u32,
        /// Experts that a token goes to.
        experts_per_token: u32,
    },
    /// A token goes to the same expert twice.
    #[error("a token goes to expert {expert} of layer {layer} twice, or two tokens have the same number")]
    Twice {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
    },
    /// There are more choices than a trace may have.
    #[error("the trace has more than {} choices of experts: cut it", MAX_CHOICES)]
    TooLong,
    /// There is nothing to replay.
    #[error("the trace has no visits")]
    Empty,
    /// The size of experts is not known.
    #[error("the trace does not say how many bytes an expert of layer {layer} has: give it as an option")]
    NoExpertBytes {
        /// The first such layer.
        layer: u32,
    },
    /// The layers and experts that the trace describes are of no model.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

impl TraceProblem {
    /// A field that is not what it has to be.
    pub(super) fn field(field: &'static str, value: &str, expected: &'static str) -> Self {
        Self::Field { field, value: value.chars().take(40).collect(), expected }
    }
}
