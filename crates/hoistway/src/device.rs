//! Devices: where tensors can live besides host memory, and what fills them.

pub(crate) use hoistway_device::{CopyStream, DeviceMemory, InUse, ReusedMemory, Scratch};
pub use hoistway_device::{
    Device, DeviceId, DeviceInfo, DriverError, Error, Fence, device_of, devices, release_devices,
    search_libraries_in,
};
