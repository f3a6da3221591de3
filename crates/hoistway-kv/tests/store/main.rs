//! The store as users see it, on a real file system.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stderr, clippy::print_stdout)]

#[path = "../../../hoistway/tests/common/child.rs"]
mod child;
mod common;
mod damage;
mod device;
mod faults;
mod limits;
mod processes;
mod round_trips;
mod sandbox;
mod tier_faults;
mod tier_kills;
mod tier_promises;
mod tiers;
mod warnings;
