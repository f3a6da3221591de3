//! The suite of the executor: order, bounds, cancellation, faults, and a customer for each thing that it promises.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod bounds;
mod cancellation;
mod customers;
mod events;
mod faults;
mod kit;
mod order;
mod service;
mod soak;
mod streams;
