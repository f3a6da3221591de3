//! The seam to the operating system: what is asked of it beyond the standard library.
//!
//! There is a folder for each system, and each provides the modules that are named below, with the same functions and
//! types. Only these folders name system calls, file descriptors or handles. What a system lacks is an error of the kind
//! [`Unsupported`](std::io::ErrorKind::Unsupported), `None`, or "not known", as the module says.
//!
//! * `block_device`: the hardware below a file system: its queues and its NUMA node.
//! * `files`: opening, identity, and transfers at a position.
//! * `folders`: folders and the names in them.
//! * `limits`: how much more memory this process may use.
//! * `machine`: what the system is, and what it grants this process.
//! * `numa`: nodes and their cores.
//! * `pages`: memory that the process gets in pages, empty or as a view of a file.
//! * `pieces`: transfers of memory in pieces, which the KV store makes on Linux alone.
//! * `permissions`: the users that may read and write a file.
//! * `port`: transfers that a completion port tells the end of, on Windows alone.
//! * `threads`: the cores that a thread runs on.
//! * `usage`: CPU time and page faults of the process.

mod common;
#[cfg(target_os = "linux")]
mod linux;
#[cfg(windows)]
mod windows;

#[cfg(target_os = "linux")]
pub use linux::*;
#[cfg(windows)]
pub use windows::*;
