//! Reads files by DirectStorage, Microsoft's interface for many reads at a time on Windows.
//!
//! Its two libraries come with programs, not with Windows. `Runtime::get` loads them once a process, configures them, and agrees
//! on the size of their staging buffer. A `StorageFile` is a file as the runtime opens it, and a `Queue` has its reads in
//! flight; it owns what they fill until the runtime has told that they ended.
//!
//! DirectStorage is not a way past the host: it reads by the processor, and stages on the way to a device. It reads only.
//!
//! To a device, the runtime writes into buffers of D3D12: a `GraphicsDevice` makes such that another interface to the device imports.
//!
//! [`abi`], [`graphics_abi`], [`Failure`] and [`pieces`] are there on every system, the rest on Windows alone.
#![deny(unsafe_code)]

pub mod abi;
mod failure;
#[cfg(windows)]
mod file;
#[cfg(windows)]
mod graphics;
pub mod graphics_abi;
#[cfg(windows)]
mod interface;
#[cfg(windows)]
mod libraries;
mod pieces;
#[cfg(windows)]
mod queue;
#[cfg(windows)]
mod runtime;

pub use failure::Failure;
#[cfg(windows)]
pub use file::StorageFile;
#[cfg(windows)]
pub use graphics::{Adapter, GraphicsDevice, SharedBuffer, SharedFence, Sharing, adapters, luid_text};
#[cfg(windows)]
pub use libraries::{Found, find};
pub use pieces::pieces;
#[cfg(windows)]
pub use queue::{Ended, Queue, Read, Target};
#[cfg(windows)]
pub use runtime::Runtime;

/// Bytes of the runtime's staging buffers, each. It has one or more, in host memory.
pub const STAGING_BYTES: u32 = 64 << 20;
/// Bytes of one request, at most. A longer one than the staging buffer fails.
pub const REQUEST_BYTES: u32 = 32 << 20;
/// The variable that names the folder of the two libraries.
pub const DIRECTORY_VARIABLE: &str = "HOISTWAY_DIRECTSTORAGE_DIR";
