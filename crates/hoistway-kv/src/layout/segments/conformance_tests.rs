//! What all layouts do, done by this one on a real disk.
#![forbid(unsafe_code)]

use super::Segments;
use crate::layout::conformance::conformance;

conformance!(|options| Ok(Box::new(Segments::open(options)?)));
