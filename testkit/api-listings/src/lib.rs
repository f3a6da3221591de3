//! Compares the public API of each published crate with the listing beside its manifest: see `tests/listings.rs`.
#![forbid(unsafe_code)]
