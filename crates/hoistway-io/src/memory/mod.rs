//! Host memory that bytes are moved into and out of.

mod mapping;
mod slot;

pub use mapping::{HUGE_PAGE_BYTES, Mapping, PageKind};
pub use slot::{SharedMemory, Slot, SlotKind, Slots};
