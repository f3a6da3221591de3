//! Files of this machine: opening, identity, file systems, the page cache.

mod access;
mod descriptor;
mod direct;
mod filesystem;
mod identity;
mod local;
mod opened;
mod read;
mod residency;
mod write;

pub use access::Access;
pub use descriptor::{Held, most_reads, with_descriptor};
pub use direct::{
    DirectAlignment, DirectFile, FileUse, is_refusal_of_direct, is_remote, open_direct, ring_refusal,
};
pub use filesystem::{FileSystem, FileSystemKind};
pub use identity::FileIdentity;
pub use local::LocalFile;
pub use opened::OpenFile;
pub use read::read_in;
pub use residency::{Probe, Residency};
pub use write::write_all_at;

pub use crate::sys::files::{read_at, read_cached_at, read_exact_at, try_lock, try_lock_shared, unlock};

/// Returns whether an error asks for another attempt.
pub fn is_transient(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::Interrupted | std::io::ErrorKind::WouldBlock)
}
