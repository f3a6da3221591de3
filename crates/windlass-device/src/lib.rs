//! Devices that windlass moves bytes to and from, behind one interface. This crate knows no file and no tensor.
//!
//! Internal: other crates of windlass use it, and its interface promises nothing.
#![deny(missing_docs)]

mod unavailable;

pub use unavailable::Unavailable;
