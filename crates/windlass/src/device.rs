//! Devices: where tensors can live besides host memory, and what fills them.

pub(crate) use windlass_device::Scratch;
/// For other crates of windlass: no part of the interface.
#[doc(hidden)]
pub use windlass_device::{
    CopyDirection, CopyError, CopyStream, CuFileHandle, DeviceMemory, DirectBuffer, HostCopy, Pinned,
    search_cufile_in,
};
pub use windlass_device::{
    Device, DeviceId, DeviceInfo, DriverError, Error, cuda::driver_version, device_of, devices,
};
