//! Devices: where tensors can live besides host memory, and what fills them.

pub(crate) use windlass_device::{
    Allocation, CopyQueue, Scratch, Source, Ticket,
    cuda::cufile::{Counters, CuFile, is_stand_in},
    table_bytes,
};
pub use windlass_device::{
    CopyDirection, CopyError, Device, DeviceId, DeviceInfo, DeviceMemory, DirectBuffer, DirectFile,
    DriverError, Error, HostCopies, HostCopy, Pinned, device_of, devices, driver_version, search_cufile_in,
};
