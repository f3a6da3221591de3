//! USRBIO's part in a reader: the 3FS that it reads from, and the memory that its reads land in.
#![forbid(unsafe_code)]

use super::{ReaderOptions, pieces::Piece};
use crate::{
    Error, Result,
    device::Device,
    memory::{SlotKind, Slots},
    parallel::lock,
    route::{OpenMount, Route, SourceFile, Unavailable, UsrbioFiles, UsrbioLane, host_rings},
    sys,
};
use std::{
    io,
    sync::{Arc, Mutex, OnceLock},
};

/// One 3FS, open for a reader.
#[derive(Debug)]
pub(super) struct UsrbioPath {
    files: Arc<UsrbioFiles>,
    /// Made with the first read to host memory.
    host_slots: OnceLock<Slots>,
    making: Mutex<()>,
    /// Why nothing comes any more.
    lost: OnceLock<String>,
    // Outlives what belongs to it.
    mount: Arc<OpenMount>,
}

impl UsrbioPath {
    /// Opens the 3FS that `first` lies on, with rings for as many threads as should copy.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`].
    pub(super) fn open(first: &SourceFile, options: &ReaderOptions) -> Result<(Self, Vec<UsrbioLane>)> {
        check_filesystem(first)?;
        let mount = OpenMount::of(first.device(), first.path(), options.usrbio, &options.usrbio_directories)
            .map_err(|why| unavailable(first, why))?;
        let count = options.slots();
        let files = Arc::new(UsrbioFiles::default());
        let rings = host_rings().min(count);
        let lane = |_| mount.lane(files.clone(), count.div_ceil(rings));
        let lanes = (0..rings).map(lane).collect::<Result<_, _>>().map_err(|why| unavailable(first, why))?;
        let (host_slots, making, lost) = (OnceLock::new(), Mutex::default(), OnceLock::new());
        Ok((Self { files, host_slots, making, lost, mount }, lanes))
    }

    /// Opens a file, unless it is open.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`].
    pub(super) fn add(&self, source: &Arc<SourceFile>) -> Result<()> {
        check_filesystem(source)?;
        let open = || {
            source.keep_mount(&self.mount);
            self.mount.file(source)
        };
        self.files.add(source, open).map_err(|why| unavailable(source, why))
    }

    /// Where reads to host memory land, once [`make_host_slots`](Self::make_host_slots) was called.
    pub(super) fn host_slots(&self) -> Option<&Slots> {
        self.host_slots.get()
    }

    /// # Errors
    /// Those of [`slots`](Self::slots).
    pub(super) fn make_host_slots(&self, options: &ReaderOptions) -> Result<()> {
        let _making = lock(&self.making);
        if self.host_slots.get().is_none() {
            let slots = self.slots(options.slots(), options.chunk_bytes as usize, None)?;
            let _ = self.host_slots.set(slots);
        }
        Ok(())
    }

    /// Memory that the daemon writes to, pinned for the device if there is one.
    ///
    /// # Errors
    /// [`Error::RouteUnavailable`]; [`Error::Allocation`].
    pub(super) fn slots(
        &self,
        count: usize,
        slot_bytes: usize,
        device: Option<&Arc<Device>>,
    ) -> Result<Slots> {
        // Slots that are pinned one by one begin at pages.
        let slot_bytes = slot_bytes.next_multiple_of(sys::pages::page_size());
        let numa_node = device.and_then(|device| device.info().numa_node);
        let memory = self.mount.memory(count.saturating_mul(slot_bytes), numa_node).map_err(|why| {
            let path = Some(self.mount.point().to_owned());
            Error::RouteUnavailable { route: Route::Usrbio, path, why }
        })?;
        Slots::new(count, slot_bytes, SlotKind::Shared { iov: &memory, device })
    }

    /// Nothing comes any more, and nobody waits for memory.
    pub(super) fn lose(&self, reason: &str) {
        let _ = self.lost.set(reason.to_owned());
        if let Some(slots) = self.host_slots.get() {
            slots.close();
        }
    }

    /// Why a piece cannot be read any more, if so.
    pub(super) fn loss(&self, piece: &Piece) -> Option<Error> {
        let reason = self.lost.get()?.clone();
        let read = piece.of();
        let (path, tensor, range) = (read.file.path().to_owned(), read.name(), Some(piece.wanted));
        Some(Error::Io { operation: "read", path, tensor, range, source: io::Error::other(reason) })
    }
}

fn check_filesystem(source: &SourceFile) -> Result<()> {
    if source.is_on_3fs() {
        return Ok(());
    }
    let filesystem = source.filesystem();
    let reason = format!("it lies on {filesystem}, and not on a 3FS whose daemon lives");
    Err(unavailable(source, Unavailable::new(reason, "choose route auto")))
}

fn unavailable(source: &SourceFile, why: Unavailable) -> Error {
    Error::RouteUnavailable { route: Route::Usrbio, path: Some(source.path().to_owned()), why }
}
