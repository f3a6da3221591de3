//! The choice of a client for 3FS.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use std::fmt;

/// The program that speaks to the daemon of a 3FS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Client {
    /// The vendor's library if there is one that works, else hoistway itself.
    #[default]
    Auto,
    /// Hoistway itself, which needs no library.
    Native,
    /// The vendor's library, `libhf3fs_api_shared.so`.
    Vendor,
}

impl Client {
    /// The name that options and messages use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Native => "native",
            Self::Vendor => "vendor",
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
