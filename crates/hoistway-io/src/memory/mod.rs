//! Host memory that bytes are moved into and out of.

mod mapping;
mod slot;
mod staging;
#[cfg(target_os = "linux")]
mod view;

pub use mapping::{HUGE_PAGE_BYTES, Mapping, PageKind, off_node};
pub use slot::{DevicePart, Pinning, SharedMemory, Slot, SlotKind, Slots};
pub use staging::release_idle_staging;
#[cfg(target_os = "linux")]
pub use view::PinnedView;

use std::io;

/// Makes `len` zeros. Where memory is short, that is an error, while `vec!` would abort the process.
///
/// # Errors
/// [`io::ErrorKind::OutOfMemory`].
pub fn zeroed<T: Clone + Default>(len: u64) -> io::Result<Vec<T>> {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(len).map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
    zeros.resize(len, T::default());
    Ok(zeros)
}
