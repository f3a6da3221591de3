//! How much more memory this process may use: what is free, and what the system may still promise.
#![allow(unsafe_code)]

pub use crate::sys::common::MemoryLimit;
use std::path::PathBuf;
use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};

/// A place that tells a limit and what it leaves.
#[derive(Clone, Debug)]
pub struct LimitSource(Kind);

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// The machine's memory.
    Machine,
    /// Memory and page files together: memory counts as soon as it is allocated, touched or not.
    Commit,
}

/// Returns every limit that applies to this process. What they leave always changes.
pub fn sources() -> Vec<LimitSource> {
    [Kind::Machine, Kind::Commit].map(LimitSource).into()
}

impl LimitSource {
    /// Reads the limit and what it leaves; `None` if it cannot be read.
    pub fn read(&self) -> Option<MemoryLimit> {
        let mut status =
            MEMORYSTATUSEX { dwLength: size_of::<MEMORYSTATUSEX>() as u32, ..Default::default() };
        // SAFETY: the structure says its size and outlives the call.
        if unsafe { GlobalMemoryStatusEx(&raw mut status) } == 0 {
            return None;
        }
        let (name, available_bytes, total_bytes) = match self.0 {
            Kind::Machine => ("the machine's free memory", status.ullAvailPhys, status.ullTotalPhys),
            Kind::Commit => ("the system's commit limit", status.ullAvailPageFile, status.ullTotalPageFile),
        };
        Some(MemoryLimit { name: name.into(), available_bytes, total_bytes })
    }

    /// Returns the file that stands for the limit. Processes under the same limit have the same file.
    pub fn file(&self) -> PathBuf {
        std::env::temp_dir().join(match self.0 {
            Kind::Machine => "hoistway-memory",
            Kind::Commit => "hoistway-commit",
        })
    }
}
