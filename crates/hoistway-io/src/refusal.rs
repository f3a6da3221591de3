//! Refusals: things that could not be used, and why. For reports.
#![forbid(unsafe_code)]

use hoistway_device::Unavailable;
use serde::{Deserialize, Serialize, Serializer};
use std::path::PathBuf;

/// A route that was not used for some or all bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Refusal {
    /// What was refused, such as `io_uring` or `direct reads`.
    pub what: String,
    /// The file that it was refused for; `None` if for all.
    #[serde(serialize_with = "as_text")]
    pub path: Option<PathBuf>,
    /// Why, and what would change it.
    #[serde(flatten)]
    pub why: Unavailable,
}

impl Refusal {
    /// The refusal of `what`, for one file or for all.
    pub fn new(what: impl Into<String>, path: Option<PathBuf>, why: Unavailable) -> Self {
        Self { what: what.into(), path, why }
    }
}

/// A path may hold bytes that are no text: a report is for reading, so they are replaced.
fn as_text<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}
