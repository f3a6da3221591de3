//! Devices that windlass moves bytes to and from, behind one interface. This crate knows no file and no tensor.
//!
//! Internal: other crates of windlass use it, and its interface promises nothing.
#![deny(missing_docs, unsafe_code)]

pub mod cuda;
mod error;
mod id;
mod transfer;
mod unavailable;

pub use cuda::cufile::{DirectBuffer, DirectFile, search_cufile_in};
pub use cuda::{
    Device, DeviceInfo, DriverError,
    copies::{CopyQueue, Scratch, Source, Ticket, table_bytes},
    device_of, devices, driver_version,
    host_copies::{CopyDirection, CopyError, HostCopies, HostCopy},
    memory::{Allocation, DeviceMemory, Pinned},
};
pub use error::{Error, FREE_MEMORY, Result};
pub use id::DeviceId;
pub use transfer::{Conversion, Element, Transfer};
pub use unavailable::Unavailable;
