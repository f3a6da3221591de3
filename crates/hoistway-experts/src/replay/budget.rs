//! Room for resident experts.
#![forbid(unsafe_code)]

use crate::policy::CatalogShape;
use bytesize::ByteSize;
use std::{fmt, str::FromStr};

/// Room for resident experts, in bytes or in what one token uses.
///
/// ```
/// use hoistway_experts::replay::Budget;
/// assert_eq!("1.5c".parse(), Ok(Budget::Cycles(1.5)));
/// assert_eq!("8GiB".parse(), Ok(Budget::Bytes(8 << 30)));
/// assert!("-1c".parse::<Budget>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Bytes.
    Bytes(u64),
    /// Token cycles: times the bytes that one token uses in all layers together.
    Cycles(f64),
}

impl Budget {
    /// Returns the bytes of the budget for a model.
    pub fn bytes(self, shape: &CatalogShape) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            // A cast of what is too large, negative or no number ends at the nearest number that there is.
            Self::Cycles(cycles) => (cycles * shape.token_cycle_bytes() as f64) as u64,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => ByteSize(*bytes).fmt(f),
            Self::Cycles(cycles) => write!(f, "{cycles}c"),
        }
    }
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "it must be a size such as 8GiB, or a number of token cycles such as 2c";
        match text.strip_suffix('c') {
            Some(cycles) => match cycles.trim().parse() {
                Ok(cycles) if (0.0..=1e9).contains(&cycles) => Ok(Self::Cycles(cycles)),
                _ => Err(expected.into()),
            },
            None => match text.parse::<ByteSize>() {
                Ok(bytes) => Ok(Self::Bytes(bytes.as_u64())),
                Err(_) => Err(expected.into()),
            },
        }
    }
}
