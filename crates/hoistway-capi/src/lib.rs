//! The C ABI of hoistway: what a checkpoint holds, batches of reads into memory that the caller owns, models larger than
//! memory, and the KV store.
//!
//! `include/hoistway.h` is made of this crate by cbindgen, and says for C what is said here. All names begin with
//! `hoistway_`, all sizes and offsets have 64 bits, structures begin with their size so that they can grow, and no panic
//! gets out. Functions may be called from any thread; a handle may be used by several at once, except while it is freed.
#![deny(missing_docs)]
#![allow(non_camel_case_types)]

mod catalog;
mod experts;
mod handle;
#[cfg(target_os = "linux")]
mod kv;
#[cfg(not(target_os = "linux"))]
mod kv_absent;
mod read;
mod status;
mod system;
mod text;
mod versioned;

pub use catalog::*;
pub use experts::*;
#[cfg(target_os = "linux")]
pub use kv::*;
pub use read::*;
pub use status::*;
pub use text::*;

/// Version of this interface. It is raised when something is taken away or changes its meaning.
pub const HOISTWAY_ABI_VERSION: u32 = 1;

/// The `HOISTWAY_ABI_VERSION` that the library was built with.
#[unsafe(no_mangle)]
pub extern "C" fn hoistway_abi_version() -> u32 {
    HOISTWAY_ABI_VERSION
}

/// Lets the devices go that nothing uses, with their contexts, which take memory of each. The process keeps a device that it
/// has used, as to open it takes long. It is opened again when it is needed.
#[unsafe(no_mangle)]
pub extern "C" fn hoistway_release_devices() {
    hoistway::device::release_devices();
}
