//! Devices that hoistway moves bytes to and from, behind one interface. This crate knows no file and no tensor.
//!
//! Internal: other crates of hoistway use it, and its interface promises nothing.
//!
//! A [`DeviceId`] names a device, [`Device::open`] opens it. [`DeviceMemory`] and [`Pinned`] are memory, and a
//! [`CopyStream`] moves bytes between them. `backend` is what a kind of devices implements, `id` the registry of kinds,
//! and each kind has a module. `driver` is what the kinds share whose devices a vendor's driver serves: `cuda`, which also
//! has a library for direct reads of files, and `hip`. A toy is for tests.
#![deny(missing_docs, unsafe_code)]

mod aside;
mod backend;
mod cuda;
mod device;
mod direct;
mod driver;
mod error;
mod external;
mod fate;
mod fence;
mod fork;
mod hip;
mod id;
mod idle;
mod mapped;
mod memory;
mod reused_memory;
mod spare_streams;
mod stream;
#[cfg(feature = "toy-device")]
pub mod toy;
mod transfer;
mod turns;
mod unavailable;

pub use backend::Address;
pub use cuda::cufile::RegisteredFile;
pub use device::{
    Condition, Device, DeviceInfo, Finding, device_of, devices, drop_aside, examine, may_have_direct_path,
    on_release, release_devices,
};
pub use direct::{DirectBuffer, DirectLibrary, PathCounts};
pub use driver::library::search_libraries_in;
pub use error::{DriverError, Error, FREE_MEMORY, Result};
pub use external::{ExternalKind, ExternalMemory, ExternalSemaphore, ExternalSignal};
pub use fate::{Fate, InUse};
pub use fence::{Fence, Gate};
pub use id::DeviceId;
pub use idle::{keep_while_used, look_again, on_idle};
pub use mapped::{AddressSpace, DeviceBlock, Mapped};
pub use memory::{DeviceMemory, Pinned};
pub use reused_memory::ReusedMemory;
pub use stream::{CopyDirection, CopyStream, HostCopy, Scratch, Ticket};
pub use transfer::{Conversion, Element, Transfer};

/// The names of all functions of drivers, and of libraries beside them, that are called.
#[cfg(feature = "stand-in")]
#[doc(hidden)]
pub fn driver_functions() -> Vec<&'static str> {
    [cuda::function_names(), hip::function_names()].concat()
}

/// The directory where Linux says what the machine has.
#[doc(hidden)]
pub fn sysfs() -> std::path::PathBuf {
    #[cfg(feature = "stand-in")]
    if let Some(path) = std::env::var_os("HOISTWAY_SYSFS") {
        return path.into();
    }
    "/sys".into()
}
pub use unavailable::Unavailable;
