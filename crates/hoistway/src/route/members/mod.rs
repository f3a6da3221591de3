//! A file for each route that reads: when it is open to loads and readers, and what it asks of them. `object_notes` is what those say
//! that read objects.

pub(super) mod cached;
#[cfg(windows)]
pub(super) mod directstorage;
pub(super) mod gds;
#[cfg(feature = "objects")]
pub(super) mod http;
#[cfg(target_os = "linux")]
pub(super) mod io_uring;
#[cfg(feature = "objects")]
pub(super) mod node_cache;
#[cfg(feature = "objects")]
pub(super) mod object_notes;
#[cfg(windows)]
pub(super) mod overlapped;
#[cfg(target_os = "linux")]
pub(super) mod pinned_cache;
mod queued;
pub(super) mod threads;
#[cfg(target_os = "linux")]
pub(super) mod usrbio;
