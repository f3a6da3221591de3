//! Both clients against the daemon, through a real kernel: right bytes, or the right error in time.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod choosing;
mod daemon;
mod fixture;
mod processes;
mod reading;
mod refusals;
mod waiting;
mod writing;
