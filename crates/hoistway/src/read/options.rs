//! What a caller can ask of a reader.
#![forbid(unsafe_code)]

#[cfg(feature = "fault-injection")]
use crate::route::fault::FaultScript;
use crate::{
    Alignment, Cancel, Error, Result,
    device::Device,
    route::{DirectIo, Route, member::Wanted, threefs_client},
};
use bytesize::ByteSize;
use hoistway_io::file;
use std::{path::PathBuf, sync::Arc};

/// Longest single read.
const MAX_CHUNK_BYTES: u64 = 1 << 30;

/// How to read. The default is right for almost everyone.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReaderOptions {
    /// Which way the bytes take: `auto`, `io_uring`, `overlapped`, `threads`, `cached`, `usrbio`, `directstorage`, and to a device `staged`, `gds` or
    /// `gds-compat`.
    ///
    /// `auto` copies what the page cache holds, and reads the rest by threads rather than a ring: what is read into the
    /// caller's memory is mostly copied there from a slot, and many threads copy faster than one. `usrbio` reads from one 3FS, that of the first file. When its daemon is lost, every read fails,
    /// and a new reader is needed.
    pub route: Route,
    /// Whether reads go past the page cache.
    pub direct: DirectIo,
    /// Who speaks to the daemon of a 3FS.
    pub usrbio: threefs_client::Client,
    /// Directories to look for the vendor's library in, besides the usual ones.
    pub usrbio_directories: Vec<PathBuf>,
    /// Reads at once. Prefetching takes up half of them at most, or the only one.
    pub in_flight: usize,
    /// Longest single read in bytes; a multiple of 4096 up to 1 GiB.
    pub chunk_bytes: u64,
    /// Most bytes of staging memory, for the host and for each device. It is taken as it is first used. What the host's slots
    /// leave of it is for what waits to be written to the node's cache.
    pub memory_budget_bytes: u64,
    /// Whether to advise huge pages for the caller's memory before it is written, where 2 MiB of it and more lie together.
    pub huge_pages: bool,
    /// Ends all reads early.
    pub cancel: Option<Cancel>,
    /// Faults to inject into the reads.
    #[cfg(feature = "fault-injection")]
    pub(crate) faults: Option<FaultScript>,
}

hoistway_io::setters! {
    ReaderOptions {
        route: Route,
        direct: DirectIo,
        usrbio: threefs_client::Client,
        usrbio_directories: Vec<PathBuf>,
        in_flight: usize,
        chunk_bytes: u64,
        memory_budget_bytes: u64,
        huge_pages: bool,
        cancel: Option<Cancel>,
        #[cfg(feature = "fault-injection")]
        #[doc(hidden)]
        faults: Option<FaultScript>,
    }
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self {
            route: Route::Auto,
            direct: DirectIo::Auto,
            usrbio: threefs_client::Client::Auto,
            usrbio_directories: Vec::new(),
            in_flight: 16,
            chunk_bytes: 2 << 20,
            memory_budget_bytes: 128 << 20,
            huge_pages: true,
            cancel: None,
            #[cfg(feature = "fault-injection")]
            faults: None,
        }
    }
}

impl ReaderOptions {
    /// Most reads in flight.
    pub const MAX_IN_FLIGHT: usize = 1024;

    /// # Errors
    /// [`Error::InvalidOption`].
    pub(super) fn check(&self) -> Result<()> {
        let invalid =
            |option, value: String, reason: String| Err(Error::InvalidOption { option, value, reason });
        if self.route.is_mapping() || matches!(self.route, Route::Unified | Route::PinnedCache) {
            let reason =
                "batches are read by auto, io_uring, overlapped, threads, cached, usrbio, directstorage, staged, gds or gds-compat"
                    .into();
            return invalid("route", self.route.to_string(), reason);
        }
        if self.direct == DirectIo::Never && self.route.reads_any_bytes() {
            let reason = format!("route {} bypasses the page cache; choose another route", self.route);
            return invalid("direct", "never".into(), reason);
        }
        if self.direct == DirectIo::Always && self.route.is_of_page_cache() {
            let reason = format!("route {} takes bytes from the page cache", self.route);
            return invalid("direct", "always".into(), reason);
        }
        if self.in_flight == 0 || self.in_flight > Self::MAX_IN_FLIGHT {
            let reason = format!("it must be from 1 to {} reads", Self::MAX_IN_FLIGHT);
            return invalid("in_flight", self.in_flight.to_string(), reason);
        }
        let chunk = self.chunk_bytes;
        if chunk == 0 || chunk > MAX_CHUNK_BYTES || !Alignment::BLOCK.divides(chunk) {
            let reason = format!("it must be a multiple of 4096 up to {}", ByteSize(MAX_CHUNK_BYTES));
            return invalid("chunk", chunk.to_string(), reason);
        }
        if self.memory_budget_bytes < chunk {
            let reason = format!("one read needs {}", ByteSize(chunk));
            return invalid("memory_budget", self.memory_budget_bytes.to_string(), reason);
        }
        Ok(())
    }

    /// What it asks of routes that lead to `device`, or to the host.
    pub(super) fn wanted<'a>(&'a self, device: Option<&'a Arc<Device>>) -> Wanted<'a> {
        Wanted {
            route: self.route,
            direct: self.direct,
            usrbio: self.usrbio,
            usrbio_directories: &self.usrbio_directories,
            device,
            is_inline: false,
            copies_on_lanes: true,
            copiers: self.in_flight,
            reads: usize::MAX,
            read_bytes: u64::MAX,
        }
    }

    /// Reads at once. Where the process may have few files open, they are fewer than was asked for.
    pub(super) fn most_reads(&self) -> usize {
        self.in_flight.min(file::most_reads(self.in_flight))
    }

    /// Bytes of the budget that staging slots of the host do not take.
    #[cfg(feature = "objects")]
    pub(super) fn unstaged_bytes(&self) -> u64 {
        self.memory_budget_bytes.saturating_sub(self.chunk_bytes.saturating_mul(self.slots() as u64))
    }

    /// Staging slots: one for each read in flight, as far as the budget goes.
    pub(super) fn slots(&self) -> usize {
        let affordable = usize::try_from(self.memory_budget_bytes / self.chunk_bytes).unwrap_or(usize::MAX);
        self.most_reads().min(affordable)
    }
}
