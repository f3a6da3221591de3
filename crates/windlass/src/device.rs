//! Devices: where tensors can live besides host memory, and what fills them.

pub(crate) use windlass_device::{
    Allocation, CopyQueue, Scratch,
    cuda::cufile::{Counters, CuFile, is_stand_in},
    table_bytes,
};
/// For other crates of windlass: no part of the interface.
#[doc(hidden)]
pub use windlass_device::{
    CopyDirection, CopyError, DeviceMemory, DirectBuffer, DirectFile, HostCopies, HostCopy, Pinned,
    search_cufile_in,
};
pub use windlass_device::{
    Device, DeviceId, DeviceInfo, DriverError, Error, device_of, devices, driver_version,
};
