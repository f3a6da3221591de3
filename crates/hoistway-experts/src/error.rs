//! Everything that can go wrong with experts, sorted by what the caller can do about it.
#![forbid(unsafe_code)]

use bytesize::ByteSize;
use hoistway::read::Batch;
use std::{
    fmt,
    panic::{self, AssertUnwindSafe},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation did not deliver. An operation that fails has leased nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The engine failed: a checkpoint does not open, a reader does not start, a device has no memory.
    #[error(transparent)]
    Engine(#[from] hoistway::Error),
    /// A tensor is named like an expert's and is none, or an expert lacks one.
    #[error("{}: tensor '{tensor}' {reason}", path.display())]
    InvalidExperts {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An expert that was described by hand is not what a store can read.
    #[error("layer {layer}, expert {expert}: {reason}")]
    InvalidExpert {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// What is wrong with it.
        reason: String,
    },
    /// A `config.json` cannot be read, or is not what it should be.
    #[error("{}: {reason}; give the number of experts a token instead", path.display())]
    InvalidConfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of packed experts cannot be used for the model, or does not hold what it should.
    #[error("{}: {reason}", path.display())]
    InvalidPack {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The layer has no experts.
    #[error("layer {layer} has no experts{}", match range { Some((first, last)) => format!("; layers between {first} and {last} have"), None => "; nor has any other layer".into() })]
    NoSuchLayer {
        /// The layer.
        layer: u32,
        /// The first and the last layer with experts, if there are any.
        range: Option<(u32, u32)>,
    },
    /// The layer has fewer experts.
    #[error("layer {layer} has {experts} experts, counted from 0: there is no expert {expert}")]
    NoSuchExpert {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// The number of experts of the layer.
        experts: u32,
    },
    /// No dense tensor has this name.
    #[error("no dense tensor has the name '{name}'{}", if *is_expert { ": it holds experts, which are leased by layer" } else { "" })]
    NoSuchTensor {
        /// The name.
        name: String,
        /// Whether it is a tensor of experts.
        is_expert: bool,
    },
    /// The budget does not hold one expert.
    #[error("a budget of {} does not hold {unit}, which needs {}", ByteSize(*budget), ByteSize(*needed))]
    BudgetTooSmall {
        /// The budget in bytes.
        budget: u64,
        /// What the largest expert needs, in bytes.
        needed: u64,
        /// The largest expert.
        unit: String,
    },
    /// A batch does not fit the memory that was set apart, however much is evicted.
    #[error("the batch needs {} and there is memory for {}; {}", ByteSize(*needed), ByteSize(*capacity), too_large(*is_dense))]
    BatchTooLarge {
        /// Whether it is of dense tensors, which have a share of the budget.
        is_dense: bool,
        /// Bytes that the batch needs.
        needed: u64,
        /// Bytes that there is memory for.
        capacity: u64,
    },
    /// Leases held the room that a batch needs, until its deadline.
    #[error(
        "no room for {} within {:?}: leases hold {} and the budget is {}; drop leases or set a larger budget",
        ByteSize(*needed), waited, ByteSize(*leased), ByteSize(*budget)
    )]
    NoRoom {
        /// Bytes that the batch needs.
        needed: u64,
        /// Bytes that leases hold.
        leased: u64,
        /// The budget in bytes.
        budget: u64,
        /// How long the batch waited.
        waited: Duration,
    },
    /// The backing gave no memory for an expert or tensor.
    #[error("{unit} got no memory: {source}")]
    NoMemory {
        /// The expert or tensor.
        unit: String,
        /// Why.
        #[source]
        source: Arc<Error>,
    },
    /// The reads of a batch did not end by its deadline. They are cancelled.
    #[error("{unit} was not read within {waited:?}")]
    TimedOut {
        /// An expert or tensor that is missing.
        unit: String,
        /// How long the batch waited.
        waited: Duration,
    },
    /// An expert, a tensor or a row could not be read. Nothing of the batch is leased.
    #[error("{unit} could not be read: {source}")]
    Read {
        /// The expert or tensor.
        unit: String,
        /// What the engine says, with the file and the bytes.
        #[source]
        source: ReadFailure,
    },
    /// The row is not in the table.
    #[error("the table '{table}' has {rows} rows, counted from 0: there is no row {row}")]
    NoSuchRow {
        /// The table.
        table: String,
        /// The row.
        row: u64,
        /// The number of rows.
        rows: u64,
    },
    /// A callback or policy of the caller's panicked.
    #[error("{what} panicked: {message}")]
    Panicked {
        /// What was called.
        what: &'static str,
        /// The panic's message.
        message: String,
    },
    /// A policy panicked before, so the store admits no request that has to wait or read. What is leased stays.
    #[error("the store is closed: its policy '{policy}' panicked: {message}; open another store")]
    Closed {
        /// The policy.
        policy: &'static str,
        /// The panic's message.
        message: String,
    },
    /// An option has a value that means nothing.
    #[error("{option} cannot be {value}: {reason}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// The value as given.
        value: String,
        /// What it may be.
        reason: String,
    },
    /// A promise that the code makes to itself was broken. Please report it.
    #[error("internal error, please report it: {0}")]
    Internal(String),
}

impl Error {
    pub(crate) fn invalid_option(
        option: &'static str,
        value: impl fmt::Display,
        reason: impl Into<String>,
    ) -> Self {
        Self::InvalidOption { option, value: value.to_string(), reason: reason.into() }
    }
}

/// What to do about [`Error::BatchTooLarge`].
const fn too_large(is_dense: bool) -> &'static str {
    if is_dense {
        "ask for fewer tensors at a time, or set more of the budget apart for them"
    } else {
        "ask for fewer experts at a time"
    }
}

/// Calls code of the caller's. A panic becomes an error, so that it cannot leave the store half changed.
///
/// # Errors
/// [`Error::Panicked`].
pub(crate) fn guarded<T>(what: &'static str, call: impl FnOnce() -> T) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(call)).map_err(|payload| {
        let message = payload.downcast_ref::<&str>().map(ToString::to_string);
        let message = message.or_else(|| payload.downcast_ref::<String>().cloned());
        Error::Panicked { what, message: message.unwrap_or_else(|| "no message".into()) }
    })
}

/// A read that failed, and why. Clones share the engine's error, as several callers may have waited for one read.
#[derive(Clone, Debug)]
pub struct ReadFailure(Arc<hoistway::Error>);

impl ReadFailure {
    /// Why a read of a batch failed. Keeps the error alone: the batch holds the memory of its other reads.
    pub(crate) fn of_batch(batch: &Batch, read: usize) -> Self {
        Self(batch.error(read).unwrap_or_else(|| Arc::new(hoistway::Error::Cancelled)))
    }

    /// The engine's error.
    pub fn error(&self) -> &hoistway::Error {
        &self.0
    }
}

impl From<hoistway::Error> for ReadFailure {
    fn from(error: hoistway::Error) -> Self {
        Self(Arc::new(error))
    }
}

impl fmt::Display for ReadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

impl std::error::Error for ReadFailure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error().source()
    }
}
