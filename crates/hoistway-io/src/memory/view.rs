//! Pages of the page cache, pinned where they lie, for a device to copy from.
#![allow(unsafe_code)]

use crate::{
    ByteRange, Error, Result,
    sys::pages::{Pages, page_size},
};
use hoistway_device::{Device, Pinned};
use std::{fs::File, io, sync::Arc};

/// A view of a range of a file that a device can copy from. The processor never reads it, so that a file which is cut
/// meanwhile does no harm: pinned pages stay, with the bytes that they have.
#[derive(Debug)]
pub struct PinnedView {
    // Unpinned before it is unmapped: fields are dropped in this order.
    _pinned: Pinned,
    pages: Pages,
    /// The bytes of the file that the pages hold.
    range: ByteRange,
}

impl PinnedView {
    /// Pins the pages that `range` lies in. What the page cache does not hold is read. The device must
    /// [pin memory that cannot be written](hoistway_device::DeviceInfo::pins_read_only).
    ///
    /// # Errors
    /// [`Error::Allocation`] if the system gives no mapping, or lets no more be pinned; [`Error::Device`], also if the range
    /// goes past the end of the file.
    pub fn new(device: &Arc<Device>, file: &File, range: ByteRange) -> Result<Self> {
        let page = page_size() as u64;
        let start = range.start() / page * page;
        let end = range.end().checked_next_multiple_of(page);
        let too_long = || Error::Internal(format!("bytes {range} of a file are no range of pages"));
        let range = end.and_then(|end| ByteRange::new(start, end)).ok_or_else(too_long)?;
        let len = usize::try_from(range.len()).map_err(|_| too_long())?;
        let no_view =
            |source: io::Error| Error::Allocation { bytes: range.len(), kind: "a view of a file", source };
        let pages = Pages::view(file, start, len).map_err(no_view)?;
        // SAFETY: the pages are unmapped after the pin is dropped.
        let pinned = unsafe { Pinned::read_only(device, pages.start().as_ptr(), len)? };
        Ok(Self { _pinned: pinned, pages, range })
    }

    /// Length of its pages in bytes.
    pub fn len(&self) -> u64 {
        self.range.len()
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Where the bytes of `range` of the file begin; `None` if they are not all in it.
    pub(super) fn address(&self, range: ByteRange) -> Option<*mut u8> {
        let is_inside = self.range.start() <= range.start() && range.end() <= self.range.end();
        let skip = usize::try_from(range.start().checked_sub(self.range.start())?).ok()?;
        is_inside.then(|| self.pages.start().as_ptr().wrapping_add(skip))
    }
}
