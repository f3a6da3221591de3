//! A FUSE daemon over a local directory that serves 3FS's USRBIO, and fails on command: what programs that use USRBIO
//! are tested against. It moves bytes by `pread`; its speed says nothing about a 3FS.
//!
//! [`Daemon`] runs in this process, [`Spawned`] in one of its own, which can be killed. Both take [`Faults`].

mod control;
mod engine;
mod faults;
mod fs;
mod jobs;
mod mapping;
mod mounting;
mod nodes;
mod registry;
mod served;
mod spawned;

pub use control::serve_commands;
pub use faults::Faults;
pub use mounting::{Daemon, Options, is_usable};
pub use spawned::Spawned;
