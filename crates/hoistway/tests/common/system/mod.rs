//! What tests ask of the system: what the process holds, and what the cache holds of a file.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(windows)]
mod windows;

#[cfg(target_os = "linux")]
pub use linux::*;
#[cfg(windows)]
pub use windows::*;

/// Descriptors, threads and memory mappings of this process: what a load must not leave behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Descriptors; handles on Windows, those of threads among them.
    pub descriptors: usize,
    /// Threads with a name of the engine's or the kernel's rings: the harness starts and ends others as it likes.
    pub threads: usize,
    /// Bytes of mappings that asked for huge pages: arenas, and nothing that libc or Rust map by themselves.
    pub arena_kib: u64,
}

impl Footprint {
    pub fn exceeds(&self, before: &Self) -> bool {
        self.descriptors > before.descriptors
            || self.threads > before.threads
            || self.arena_kib > before.arena_kib
    }
}
