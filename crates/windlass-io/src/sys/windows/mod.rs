//! Windows: `windows-sys`.

pub mod block_device;
pub mod files;
pub mod limits;
pub mod machine;
pub mod numa;
pub mod pages;
pub mod threads;
pub mod usage;

/// Cores that a processor group has numbers for.
const CORES_A_GROUP: usize = 64;
