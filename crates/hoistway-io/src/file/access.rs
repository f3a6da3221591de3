//! The two ways to the bytes of a file.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use std::fmt;

/// Whether reads and writes pass through the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Past the page cache (`O_DIRECT`).
    Direct,
    /// Through the page cache, or from a source that is no file of this machine.
    Buffered,
}

impl Access {
    /// The name that reports and metrics use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Buffered => "buffered",
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
