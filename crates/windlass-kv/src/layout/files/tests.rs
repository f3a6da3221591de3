//! What layout `files` does beyond what all layouts do.
#![forbid(unsafe_code)]

use super::Files;
use crate::layout::conformance::conformance;

conformance!(|options| Ok(Box::new(Files::open(options)?)));
