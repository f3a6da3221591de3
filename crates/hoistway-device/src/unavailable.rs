//! The reason why something cannot be used here.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a route, a device or a part of one cannot be used, and what would change that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    /// What is in the way.
    pub reason: String,
    /// What to do about it; empty if nothing can be done.
    pub fix: String,
}

impl Unavailable {
    /// A reason and what to do about it.
    pub fn new(reason: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { reason: reason.into(), fix: fix.into() }
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        if !self.fix.is_empty() {
            write!(f, " ({})", self.fix)?;
        }
        Ok(())
    }
}
