//! Arenas, and the two ways to touch one: write a region that has one owner, or read a block that is complete.
//!
//! [`Fill`] is the contract between them. It is told which tensors an arena holds and which regions will be
//! written, checks that the regions are disjoint and cover every tensor, and turns tensors into readable
//! [`Block`]s once the last region over them is complete. So no reader ever sees a byte that is still to be
//! written, whatever order completions come in.
#![allow(unsafe_code)]

use super::{borrowed::Borrowed, coverage::Coverage, pool::PoolPiece, spare::SparePiece};
use crate::{ByteRange, Error, Result, device::Device};
use hoistway_io::memory::{HUGE_PAGE_BYTES, Mapping};
use std::{
    fmt,
    ops::Deref,
    ptr::{self, NonNull},
    slice,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

/// Memory that several tensors share. Freed when the last of them is dropped; before that, huge page by huge
/// page, as those on a page are.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Backing,
    len: usize,
    /// For each huge page, the tensors on it that are still wanted, loading or held by someone, and the regions on it that may
    /// still be written to. A region that is leaked, since the system may write to it for ever, keeps its pages.
    live: Box<[AtomicU32]>,
    /// A device that reads the memory as it is, whose work must end before any of it goes.
    user: Option<Arc<Device>>,
}

#[derive(Debug)]
pub(super) enum Backing {
    Own(Mapping),
    Pooled(PoolPiece),
    Spare(SparePiece),
    File(Mapping),
    Borrowed(Borrowed),
    /// Set aside.
    Gone,
}

impl Arena {
    pub(super) fn new(memory: Backing, len: usize, user: Option<Arc<Device>>) -> Arc<Self> {
        let pages = if matches!(memory, Backing::Own(_)) { len.div_ceil(HUGE_PAGE_BYTES) } else { 0 };
        Arc::new(Self { memory, len, live: (0..pages).map(|_| AtomicU32::new(0)).collect(), user })
    }

    fn pointer(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len, "offset {offset} of an arena of {} bytes", self.len);
        match &self.memory {
            Backing::Own(mapping) | Backing::File(mapping) => mapping.pointer(offset),
            Backing::Pooled(piece) => piece.pointer(offset),
            Backing::Spare(piece) => piece.pointer(offset),
            Backing::Borrowed(memory) => memory.pointer(offset),
            Backing::Gone => unreachable!("an arena is asked for its memory while it is dropped"),
        }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Faults pages in ahead of their use. Best effort: a refusal costs time, not bytes.
    pub(crate) fn populate(&self, range: ByteRange) {
        if let Backing::Own(mapping) = &self.memory {
            let end = range.end().min(mapping.len() as u64);
            if let Some(range) = ByteRange::new(range.start().min(end), end) {
                let _ = mapping.populate(range);
            }
        }
    }

    /// Reads a part of a file-backed arena in.
    pub(crate) fn populate_for_reading(&self, range: ByteRange) -> std::io::Result<()> {
        match &self.memory {
            Backing::File(mapping) => mapping.populate_for_reading(range),
            Backing::Own(_)
            | Backing::Pooled(_)
            | Backing::Spare(_)
            | Backing::Borrowed(_)
            | Backing::Gone => Ok(()),
        }
    }

    /// Readable blocks of a file-backed arena, which the file itself has filled.
    pub(crate) fn file_block(self: &Arc<Self>, place: ByteRange) -> Result<Block> {
        if !matches!(self.memory, Backing::File(_)) {
            return Err(Error::Internal("only a file mapping is full from the start".into()));
        }
        Block::new(self.clone(), place)
    }

    fn huge_pages(&self, place: ByteRange) -> &[AtomicU32] {
        if self.live.is_empty() || place.is_empty() {
            return &[];
        }
        let page = |offset: u64| offset as usize / HUGE_PAGE_BYTES;
        &self.live[page(place.start())..=page(place.end() - 1)]
    }

    /// Waits for the device that uses the memory, if one does. `false` if it is not known whether it has ended.
    fn is_unused_by_device(&self) -> bool {
        self.user.as_ref().is_none_or(|device| device.settle().is_ok())
    }

    /// A tensor is no longer wanted, or a region no longer written to: pages that hold no other go back to the system.
    fn retire(&self, place: ByteRange) {
        let Backing::Own(mapping) = &self.memory else {
            return;
        };
        let first = place.start() as usize / HUGE_PAGE_BYTES;
        let mut free: Option<(usize, usize)> = None;
        let release = |(start, end): (usize, usize)| {
            let end = (end * HUGE_PAGE_BYTES).min(self.len);
            if let Some(range) = ByteRange::new((start * HUGE_PAGE_BYTES) as u64, end as u64)
                && self.is_unused_by_device()
            {
                // SAFETY: the count of tensors and regions on each of these pages went to zero. It is raised only before
                // loading begins, and a `Block` or a region lowers it only when it is dropped, so no reference remains.
                unsafe { mapping.release(range) };
            }
        };
        for (page, live) in (first..).zip(self.huge_pages(place)) {
            // Acquire: the releasing thread must see the page's other tensors as dropped before it acts.
            if live.fetch_sub(1, Ordering::AcqRel) == 1 {
                free = match free {
                    Some((start, end)) if end == page => Some((start, page + 1)),
                    other => {
                        other.map(release);
                        Some((page, page + 1))
                    }
                };
            }
        }
        free.map(release);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Some(device) = &self.user
            && !self.is_unused_by_device()
        {
            // Freed memory could be given to another allocation while a kernel still reads it.
            device.set_aside(std::mem::replace(&mut self.memory, Backing::Gone));
        }
    }
}

/// Bytes of an arena that only the holder may write. They are not read until they are complete.
#[derive(Debug)]
pub(crate) struct WriteRegion {
    arena: Arc<Arena>,
    start: usize,
    len: usize,
}

impl Drop for WriteRegion {
    fn drop(&mut self) {
        if let Some(place) = ByteRange::at(self.start as u64, self.len as u64) {
            self.arena.retire(place);
        }
    }
}

impl WriteRegion {
    /// Where its first byte will be.
    pub(crate) fn address(&self) -> usize {
        self.arena.pointer(self.start).addr().get()
    }

    /// The bytes. They hold zeros or what a failed attempt left.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `Fill::new` hands out each byte of an arena in at most one region, regions are not `Clone`,
        // and blocks over these bytes exist only after the region was consumed by `Fill::complete`. The arena,
        // held by the region, keeps the bytes mapped; anonymous memory is initialised by the kernel, borrowed memory by
        // its lender.
        unsafe { slice::from_raw_parts_mut(self.arena.pointer(self.start).as_ptr(), self.len) }
    }
}

/// The tensors of one arena while it is being filled.
#[derive(Debug)]
pub(crate) struct Fill {
    /// Regions and blocks hold it: its memory goes with the last of them.
    arena: Weak<Arena>,
    coverage: Coverage,
}

impl Fill {
    /// `tensors` are tags and places, `writes` the regions that will be written. Returns the regions in the order
    /// of `writes`.
    ///
    /// # Errors
    /// [`Error::Internal`] if regions or tensors overlap, leave the arena, or leave a byte of a tensor uncovered.
    pub(crate) fn new(
        arena: Arc<Arena>,
        tensors: impl IntoIterator<Item = (usize, ByteRange)>,
        writes: &[ByteRange],
    ) -> Result<(Self, Vec<WriteRegion>)> {
        let coverage = Coverage::new(arena.len as u64, tensors, writes)?;
        for place in coverage.places().chain(writes.iter().copied()) {
            for live in arena.huge_pages(place) {
                live.fetch_add(1, Ordering::Relaxed);
            }
        }
        let regions = writes
            .iter()
            .map(|write| WriteRegion {
                arena: arena.clone(),
                start: write.start() as usize,
                len: write.len() as usize,
            })
            .collect();
        Ok((Self { arena: Arc::downgrade(&arena), coverage }, regions))
    }

    /// Faults memory in ahead of the writes to it.
    pub(crate) fn touch(&self, place: ByteRange) {
        if let Some(arena) = self.arena.upgrade() {
            arena.populate(place);
        }
    }

    /// The bytes of `region` are all written. Calls `ready` with the tag and block of each tensor that this
    /// completes.
    pub(crate) fn complete(&self, region: WriteRegion, mut ready: impl FnMut(usize, Block)) -> Result<()> {
        let arena = region.arena.clone();
        if !ptr::eq(self.arena.as_ptr(), &*arena) {
            return Err(Error::Internal("a region was completed in another arena".into()));
        }
        let written = ByteRange::at(region.start as u64, region.len as u64).unwrap_or_default();
        drop(region);
        for (tag, place) in self.coverage.complete(written) {
            ready(tag, Block::new(arena.clone(), place)?);
        }
        Ok(())
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        let mut unfinished = self.coverage.unfinished().peekable();
        // Not even for a moment, or the last block would not be the last holder of its memory.
        if unfinished.peek().is_none() {
            return;
        }
        let Some(arena) = self.arena.upgrade() else { return };
        for place in unfinished {
            // It never became a block and no longer can.
            arena.retire(place);
        }
    }
}

/// The bytes of one tensor, complete. Keeps its memory, and not much more, alive.
pub struct Block {
    /// `None` if there are no bytes.
    arena: Option<Arc<Arena>>,
    place: ByteRange,
}

impl Block {
    /// A block without bytes.
    pub(crate) fn empty() -> Self {
        Self { arena: None, place: ByteRange::default() }
    }

    fn new(arena: Arc<Arena>, place: ByteRange) -> Result<Self> {
        if place.end() > arena.len as u64 {
            return Err(Error::Internal(format!("block {place} of an arena of {} bytes", arena.len)));
        }
        Ok(Self { arena: Some(arena), place })
    }

    /// Address of the first byte; well aligned for any type, even if there is none.
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.arena {
            Some(arena) => arena.pointer(self.place.start() as usize).as_ptr(),
            None => ptr::without_provenance_mut(HUGE_PAGE_BYTES),
        }
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: a block is made only when every write to its bytes has completed (`Fill::complete`), or of a
        // file mapping; it holds the arena, so the bytes stay mapped; `retire` releases no page while a block on
        // it lives. Python code that got the address may write to it, which this crate never does concurrently
        // with reading.
        unsafe { slice::from_raw_parts(self.as_ptr(), self.place.len() as usize) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(arena) = &self.arena {
            arena.retire(self.place);
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("place", &self.place).finish_non_exhaustive()
    }
}
