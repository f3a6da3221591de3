//! Types that every system returns.
#![forbid(unsafe_code)]

use serde::Serialize;
use std::time::Duration;

/// A limit on the memory of this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MemoryLimit {
    /// The source of the limit: the machine, the file of a control group, or a job object. Equal for processes under
    /// the same limit.
    pub name: String,
    /// Bytes that may still be allocated under it. Reclaimable page cache counts as free; memory that loads of this
    /// process were promised and have not touched yet counts as used.
    pub available_bytes: u64,
    /// The limit itself in bytes.
    pub total_bytes: u64,
}

/// A limit of this process. `None` stands for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessLimit {
    /// The limit now.
    pub current: Option<u64>,
    /// The value to which the process may raise it.
    pub maximum: Option<u64>,
}

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub id: u32,
    /// The numbers of its cores.
    pub cpus: Vec<usize>,
}

/// CPU time and page faults of the whole process since it began.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Time of all threads on cores, in the kernel and outside it.
    pub cpu: Duration,
    /// Page faults, with and without I/O.
    pub page_faults: u64,
}

/// Bytes of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes that this process may still use.
    pub free_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}
