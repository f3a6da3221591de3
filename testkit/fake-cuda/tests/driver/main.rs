//! The stand-in, as a program sees it that loads it with dlopen.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod captures;
mod contexts;
mod copies;
mod cufile;
mod faults;
mod fixture;
mod hip;
mod kernels;
mod library;
mod memory;
mod process;
mod streams;
