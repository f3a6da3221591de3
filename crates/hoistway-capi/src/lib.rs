//! The C ABI of hoistway: what a checkpoint holds, batches of reads into memory that the caller owns, models larger than
//! memory, and the KV store.
//!
//! cbindgen generates `include/hoistway.h` from this crate, with its comments. All names begin with `hoistway_`, sizes and
//! offsets have 64 bits, and structures begin with their size so that they can grow. No panic leaves the library. Any
//! function may be called from any thread, and several threads may use one handle, except while it is freed.
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

/// Version of this interface. It is raised when something is removed or changes its meaning.
pub const HOISTWAY_ABI_VERSION: u32 = 1;

/// Returns the `HOISTWAY_ABI_VERSION` that the library was built with. Compare it with that of the header.
#[unsafe(no_mangle)]
pub extern "C" fn hoistway_abi_version() -> u32 {
    HOISTWAY_ABI_VERSION
}

/// Releases the devices that nothing uses, and the device memory that their contexts take. Without this call, the
/// process keeps each device that it used, because opening one is slow. A released device is opened again when it is
/// needed.
#[unsafe(no_mangle)]
pub extern "C" fn hoistway_release_devices() {
    hoistway::device::release_devices();
}
