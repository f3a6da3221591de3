//! A stand-in for Microsoft's `dstorage.dll`: its objects, which read files into host memory or buffers, and faults on request.
//!
//! It behaves as the release 1.3.0 was seen to, also where that is not what its header says, and counts what the real one punishes by
//! ending the process. Under the name `dstoragecore.dll` it stands for the library that the other needs, and as
//! `fake_graphics.dll` for as much of D3D12 as buffers need that another interface shares: see `graphics`.
#![allow(missing_docs, unreachable_pub)]

#[cfg(windows)]
mod control;
#[cfg(windows)]
mod factory;
#[cfg(windows)]
mod file;
#[cfg(windows)]
mod graphics;
#[cfg(windows)]
mod object;
#[cfg(windows)]
mod queue;
#[cfg(windows)]
pub mod stand_in;
#[cfg(windows)]
mod status;
