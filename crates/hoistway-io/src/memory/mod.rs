//! Host memory that bytes are moved into and out of.

mod mapping;
mod slot;
mod staging;
#[cfg(target_os = "linux")]
mod view;

pub use mapping::{HUGE_PAGE_BYTES, Mapping, PageKind};
pub use slot::{DevicePart, Pinning, SharedMemory, Slot, SlotKind, Slots};
pub use staging::release_idle_staging;
#[cfg(target_os = "linux")]
pub use view::PinnedView;
