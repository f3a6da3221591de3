//! Host memory that bytes are moved into and out of.

mod mapping;

pub use mapping::{HUGE_PAGE_BYTES, Mapping, PageKind};
