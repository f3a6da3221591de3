//! Experts, rows and layers of made models, from the catalog to the bytes of leases, on every backing and under faults.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

#[path = "../../../hoistway/tests/common/gguf.rs"]
mod gguf;
#[path = "../../../hoistway/tests/common/stand_in.rs"]
#[allow(dead_code, unreachable_pub)]
mod stand_in;

mod backings;
mod beside;
mod catalog;
mod faults;
mod kit;
mod layers;
mod levels;
mod pack;
#[cfg(target_os = "linux")]
mod resident;
mod rows;
mod soak;
mod sparse;
mod store;
