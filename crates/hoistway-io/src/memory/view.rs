//! Pages of the page cache, pinned where they lie, for a device to copy from.
#![allow(unsafe_code)]

use crate::{
    ByteRange, Error, Result,
    file::read_in,
    parallel,
    sys::pages::{Pages, page_size},
};
use hoistway_device::{Device, Pinned};
use std::{fs::File, io, mem::ManuallyDrop, sync::Arc};

/// Pages that one thread maps at once, where several do.
const PIECE_BYTES: usize = 8 << 20;
/// So many map pages faster than a driver pins them.
const MOST_THREADS: usize = 4;

/// A view of a range of a file that a device can copy from. The processor never reads it, so that a file which is cut
/// meanwhile does no harm: pinned pages stay, with the bytes that they have.
#[derive(Debug)]
pub struct PinnedView {
    /// Until it is dropped.
    pinned: Option<Pinned>,
    pages: ManuallyDrop<Pages>,
    /// The bytes of the file that the pages hold.
    range: ByteRange,
}

impl PinnedView {
    /// Pins the pages that `range` lies in. What the page cache does not hold is read. If `reads_ahead`, several threads read and map
    /// the pages before the device is asked: the driver neither waits for storage, nor maps one page after the other. The device must
    /// [pin memory that cannot be written](hoistway_device::DeviceInfo::pins_read_only).
    ///
    /// # Errors
    /// [`Error::Allocation`] if the system gives no mapping or no pages, or lets no more be pinned; [`Error::Device`], also if
    /// the range goes past the end of the file.
    pub fn new(device: &Arc<Device>, file: &File, range: ByteRange, reads_ahead: bool) -> Result<Self> {
        let page = page_size() as u64;
        let start = range.start() / page * page;
        let end = range.end().checked_next_multiple_of(page);
        let too_long = || Error::Internal(format!("bytes {range} of a file are no range of pages"));
        let range = end.and_then(|end| ByteRange::new(start, end)).ok_or_else(too_long)?;
        let len = usize::try_from(range.len()).map_err(|_| too_long())?;
        let no_view =
            |source: io::Error| Error::Allocation { bytes: range.len(), kind: "a view of a file", source };
        let mut pages = Pages::view(file, start, len).map_err(no_view)?;
        pages.hide_from_children();
        if reads_ahead {
            let pieces: Vec<_> = (0..len).step_by(PIECE_BYTES).collect();
            let read = |&piece: &usize| {
                let piece = piece..len.min(piece + PIECE_BYTES);
                match pages.populate_for_reading(piece.clone()) {
                    // Before Linux 5.14: the driver maps the pages.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                        let bytes = ByteRange::at(start + piece.start as u64, piece.len() as u64);
                        read_in(file, bytes.unwrap_or_default())
                    }
                    read => read,
                }
            };
            let read = parallel::map(&pieces, MOST_THREADS.min(parallel::cores()), read);
            read.into_iter().collect::<io::Result<()>>().map_err(no_view)?;
        }
        // SAFETY: the pages stay mapped until they are unpinned.
        let pinned = unsafe { Pinned::read_only(device, pages.start().as_ptr(), len)? };
        Ok(Self { pinned: Some(pinned), pages: ManuallyDrop::new(pages), range })
    }

    /// Length of its pages in bytes.
    pub fn len(&self) -> u64 {
        self.range.len()
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The start of the bytes of `range` of the file; `None` if the view lacks some of them.
    pub(super) fn address(&self, range: ByteRange) -> Option<*mut u8> {
        let is_inside = self.range.start() <= range.start() && range.end() <= self.range.end();
        let skip = usize::try_from(range.start().checked_sub(self.range.start())?).ok()?;
        is_inside.then(|| self.pages.start().as_ptr().wrapping_add(skip))
    }
}

impl Drop for PinnedView {
    fn drop(&mut self) {
        // Pages that may be pinned still keep their address, so that no other memory gets it.
        if self.pinned.take().is_none_or(Pinned::unpin) {
            // SAFETY: dropped once, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.pages) };
        }
    }
}
