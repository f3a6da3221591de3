//! Memory of the stand-in driver's devices, for the tests of transfers and those of whole stores.

use super::{
    Piece,
    stand_in::{STAND_IN, Vendor},
};
use hoistway_device::{CopyDirection, CopyStream, Device, HostCopy};
use std::{ffi::c_void, sync::Arc};

/// What calls of the driver give back.
pub type Code = i32;

/// Memory of a device, allocated by the driver, as a framework would. It begins at a multiple of 4096.
pub struct DeviceMemory {
    vendor: Vendor,
    device: Arc<Device>,
    allocated: u64,
    pub address: u64,
    pub len: usize,
}

/// Calls the driver with the device current.
pub fn in_context<T>(vendor: Vendor, ordinal: u32, call: impl FnOnce() -> T) -> T {
    match vendor {
        Vendor::Cuda => in_cuda_context(ordinal, call),
        Vendor::Rocm => {
            let init: unsafe extern "C" fn(u32) -> Code = STAND_IN.function("hipInit");
            let set: unsafe extern "C" fn(i32) -> Code = STAND_IN.function("hipSetDevice");
            // SAFETY: of these signatures in the runtime.
            unsafe {
                assert_eq!((init(0), set(ordinal as i32)), (0, 0));
                let result = call();
                assert_eq!(set(0), 0);
                result
            }
        }
    }
}

fn in_cuda_context<T>(ordinal: u32, call: impl FnOnce() -> T) -> T {
    // SAFETY: of these signatures in the driver; the context is released after what was pushed is popped.
    unsafe {
        let retain: unsafe extern "C" fn(*mut *mut c_void, i32) -> Code =
            STAND_IN.function("cuDevicePrimaryCtxRetain");
        let release: unsafe extern "C" fn(i32) -> Code = STAND_IN.function("cuDevicePrimaryCtxRelease_v2");
        let push: unsafe extern "C" fn(*mut c_void) -> Code = STAND_IN.function("cuCtxPushCurrent_v2");
        let pop: unsafe extern "C" fn(*mut *mut c_void) -> Code = STAND_IN.function("cuCtxPopCurrent_v2");
        let mut context = std::ptr::null_mut();
        assert_eq!(retain(&mut context, ordinal as i32), 0);
        assert_eq!(push(context), 0);
        let result = call();
        pop(&mut context);
        release(ordinal as i32);
        result
    }
}

impl DeviceMemory {
    pub fn new(vendor: Vendor, ordinal: u32, len: usize) -> Self {
        let device = Device::open(vendor.device(ordinal)).unwrap();
        let allocate: unsafe extern "C" fn(*mut u64, usize) -> Code =
            STAND_IN.function(vendor.symbol("cuMemAlloc_v2"));
        let mut allocated = 0;
        // SAFETY: of this signature in the driver.
        assert_eq!(in_context(vendor, ordinal, || unsafe { allocate(&mut allocated, len + 4096) }), 0);
        Self { vendor, device, allocated, address: allocated.next_multiple_of(4096), len }
    }

    pub fn of(vendor: Vendor, ordinal: u32, bytes: &[u8]) -> Self {
        let memory = Self::new(vendor, ordinal, bytes.len());
        memory.copy(CopyDirection::ToDevice, bytes.as_ptr().expose_provenance());
        memory
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0u8; self.len];
        self.copy(CopyDirection::ToHost, bytes.as_mut_ptr().expose_provenance());
        bytes
    }

    pub fn copy(&self, direction: CopyDirection, host: usize) {
        let copy = HostCopy { host, device: self.address, len: self.len };
        let copies = CopyStream::new(&self.device).unwrap();
        // SAFETY: both sides live until this returns.
        unsafe { copies.run(direction, &[copy]) }.result().unwrap();
    }

    pub fn piece(&self, start: usize, len: usize) -> Piece {
        assert!(start + len <= self.len);
        Piece::new(self.device.id(), self.address + start as u64, len as u64)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let free: unsafe extern "C" fn(u64) -> Code = STAND_IN.function(self.vendor.symbol("cuMemFree_v2"));
        // SAFETY: allocated once, freed once.
        in_context(self.vendor, self.device.info().ordinal, || unsafe { free(self.allocated) });
    }
}
