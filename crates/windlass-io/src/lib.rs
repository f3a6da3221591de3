//! The I/O core of windlass: everything between a byte range and memory. This crate knows no tensor and no block.
//!
//! Internal: other crates of windlass use it, and its interface promises nothing.
#![deny(missing_docs)]

pub mod executor;
pub mod lane;
