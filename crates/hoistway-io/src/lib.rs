//! The I/O core of hoistway: everything between a byte range and memory. This crate knows no tensor and no block.
//!
//! Internal: other crates of hoistway use it, and its interface promises nothing.
#![deny(missing_docs, unsafe_code)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("hoistway runs on 64-bit systems");

pub mod cancel;
pub mod direct_path;
mod error;
pub mod executor;
pub mod file;
pub mod lane;
pub mod memory;
pub mod parallel;
mod placement;
mod refusal;
mod setters;
pub mod span;
pub mod sync;
pub mod sys;
mod units;

pub use error::{Error, Result};
pub use placement::Placement;
pub use refusal::Refusal;
pub use units::{Alignment, ByteRange, counted};
