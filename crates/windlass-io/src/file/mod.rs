//! Files of this machine: opened, told apart, asked what they can do.

mod direct;
mod filesystem;
mod identity;
mod local;
mod opened;
mod residency;

pub use direct::{
    DirectAlignment, DirectFile, FileUse, is_refusal_of_direct, is_remote, open_direct, ring_refusal,
};
pub use filesystem::{FileSystem, FileSystemKind};
pub use identity::FileIdentity;
pub use local::LocalFile;
pub use opened::OpenFile;
pub use residency::{Probe, Residency};

pub use crate::sys::files::{read_at, read_cached_at, read_exact_at};
