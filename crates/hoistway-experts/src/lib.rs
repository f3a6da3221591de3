//! Models larger than memory: experts, rows of tables and layers are read from storage as they are used, and evicted
//! when a budget says so.
#![deny(missing_docs, unsafe_code)]

pub mod backing;
pub mod catalog;
mod error;
pub mod layers;
pub mod pack;
pub mod policy;
pub mod replay;
pub mod rows;
pub mod store;
pub mod trace;

pub use error::{Error, ReadFailure, Result};
pub use policy::{ExpertId, Policy};
