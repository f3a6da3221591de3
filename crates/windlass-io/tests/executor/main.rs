//! The suite of the executor: order, bounds, cancellation, faults, and a customer for each thing that it promises.

mod bounds;
mod cancellation;
mod customers;
mod faults;
mod kit;
mod order;
mod service;
mod soak;
mod streams;
