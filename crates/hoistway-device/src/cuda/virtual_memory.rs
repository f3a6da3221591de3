//! Address space of a CUDA device, and memory that is mapped into it. Signatures and numbers are those of `cuda.h`, CUDA 12.0.
#![allow(unsafe_code)]

use super::CudaDevice;
use crate::{
    Error, Fate, Result, Unavailable,
    backend::Virtual,
    driver::{
        library::functions,
        table::{DevicePointer, ResultCode},
    },
};
use std::{
    ffi::{c_int, c_void},
    ptr,
};

functions! {
    /// Functions that map memory.
    returning ResultCode;
    required {
        granularity = "cuMemGetAllocationGranularity"(*mut usize, *const Properties, c_int);
        reserve = "cuMemAddressReserve"(*mut DevicePointer, usize, usize, DevicePointer, u64);
        unreserve = "cuMemAddressFree"(DevicePointer, usize);
        create = "cuMemCreate"(*mut u64, usize, *const Properties, u64);
        destroy = "cuMemRelease"(u64);
        map = "cuMemMap"(DevicePointer, usize, usize, u64, u64);
        set_access = "cuMemSetAccess"(DevicePointer, usize, *const Access, usize);
        unmap = "cuMemUnmap"(DevicePointer, usize);
    }
    optional {}
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`: memory that stays on its device.
const ON_DEVICE: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const MINIMUM: c_int = 0;

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    device: c_int,
}

/// `CUmemAllocationProp`
#[repr(C)]
pub(super) struct Properties {
    kind: c_int,
    handle_kinds: c_int,
    location: Location,
    security: *const c_void,
    compression: u8,
    has_gpudirect_rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`
#[repr(C)]
pub(super) struct Access {
    location: Location,
    flags: c_int,
}

/// The functions, or why they are not there. Asks the driver nothing.
pub(super) fn functions(device: &CudaDevice) -> Result<&Functions, Unavailable> {
    if device.mapping.is_none() {
        return Err(Unavailable::new("its driver maps no memory into address space", "use slots"));
    }
    found(&device.driver.own.virtual_memory)
}

fn found<'a>(functions: &'a Result<Functions, &'static str>) -> Result<&'a Functions, Unavailable> {
    functions.as_ref().map_err(|missing| {
        Unavailable::new(
            format!("the driver has no function {missing}"),
            "update NVIDIA's driver, or use slots",
        )
    })
}

impl Virtual for CudaDevice {
    fn granule(&self) -> Result<u64> {
        let functions = self.virtual_functions()?;
        let _entered = self.enter()?;
        let (mut granule, properties) = (0, self.properties());
        // SAFETY: writes one number; the structure is that of the header.
        self.call("asking for its granule", "cuMemGetAllocationGranularity", || unsafe {
            (functions.granularity)(&mut granule, &properties, MINIMUM)
        })?;
        let is_sound = |granule: &u64| granule.is_power_of_two();
        u64::try_from(granule).ok().filter(is_sound).ok_or_else(|| {
            Error::Internal(format!("the driver allocates memory by granules of {granule} bytes"))
        })
    }

    fn reserve(&self, len: u64, granule: u64) -> Result<u64> {
        let functions = self.virtual_functions()?;
        let _entered = self.enter()?;
        let (mut address, bytes, alignment) = (0, bytes_of(len), bytes_of(granule));
        // SAFETY: writes one address. Any place will do.
        let code =
            self.driver.repeat(|| unsafe { (functions.reserve)(&mut address, bytes, alignment, 0, 0) });
        self.check_memory("reserving addresses", "cuMemAddressReserve", code, len)?;
        Ok(address)
    }

    unsafe fn unreserve(&self, address: u64, len: u64) -> Result<()> {
        self.without_context("giving addresses back", "cuMemAddressFree", |functions| {
            // SAFETY: passed on.
            unsafe { (functions.unreserve)(address, bytes_of(len)) }
        })
    }

    fn create(&self, len: u64) -> Result<u64> {
        let functions = self.virtual_functions()?;
        let _entered = self.enter()?;
        let (mut memory, properties) = (0, self.properties());
        // SAFETY: writes one handle; the structure is that of the header.
        let code =
            self.driver.repeat(|| unsafe { (functions.create)(&mut memory, bytes_of(len), &properties, 0) });
        self.check_memory("allocating memory", "cuMemCreate", code, len)?;
        Ok(memory)
    }

    unsafe fn destroy(&self, memory: u64) -> Result<()> {
        self.without_context("freeing memory", "cuMemRelease", |functions| {
            // SAFETY: passed on.
            unsafe { (functions.destroy)(memory) }
        })
    }

    unsafe fn map(&self, memory: u64, address: u64, len: u64) -> Result<()> {
        let functions = self.virtual_functions()?;
        let _entered = self.enter()?;
        // SAFETY: passed on; all of the memory.
        let code = self.driver.repeat(|| unsafe { (functions.map)(address, bytes_of(len), 0, memory, 0) });
        self.check_memory("mapping memory", "cuMemMap", code, len)
    }

    unsafe fn allow(&self, address: u64, len: u64) -> Result<()> {
        let functions = self.virtual_functions()?;
        let _entered = self.enter()?;
        let access = Access { location: self.location(), flags: READ_WRITE };
        // SAFETY: passed on; the structure is that of the header.
        let code =
            self.driver.repeat(|| unsafe { (functions.set_access)(address, bytes_of(len), &access, 1) });
        self.check_memory("mapping memory", "cuMemSetAccess", code, len)
    }

    unsafe fn unmap(&self, address: u64, len: u64) -> Fate {
        Fate::of(self.without_context("unmapping memory", "cuMemUnmap", |functions| {
            // SAFETY: passed on.
            unsafe { (functions.unmap)(address, bytes_of(len)) }
        }))
    }
}

impl CudaDevice {
    fn virtual_functions(&self) -> Result<&Functions> {
        functions(self).map_err(|why| Error::DeviceUnavailable { device: self.info.id.to_string(), why })
    }

    /// Makes a call that gives something back. It needs no context, so that it serves after the program has reset the device.
    fn without_context(
        &self,
        operation: &'static str,
        function: &'static str,
        call: impl Fn(&Functions) -> ResultCode,
    ) -> Result<()> {
        if !self.driver.is_usable() {
            return Err(Error::Forked);
        }
        let _relaxed = self.driver.relax();
        let functions = self.virtual_functions()?;
        self.call(operation, function, || call(functions))
    }

    fn location(&self) -> Location {
        Location { kind: DEVICE, device: self.handle }
    }

    /// Memory that files may be read to directly, where the device can do that.
    fn properties(&self) -> Properties {
        let has_gpudirect_rdma = self.mapping.is_some_and(|mapping| mapping.has_gpudirect_rdma);
        Properties {
            kind: ON_DEVICE,
            handle_kinds: 0,
            location: self.location(),
            security: ptr::null(),
            compression: 0,
            has_gpudirect_rdma: has_gpudirect_rdma.into(),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

fn bytes_of(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn structures_lie_as_the_header_has_them() {
        assert_eq!((size_of::<Properties>(), offset_of!(Properties, has_gpudirect_rdma)), (32, 25));
        assert_eq!((size_of::<Access>(), offset_of!(Access, flags)), (12, 8));
    }

    #[test]
    fn a_function_that_the_driver_lacks_is_named() {
        let why = found(&Err("cuMemSetAccess")).map(|_| ()).unwrap_err();
        assert!(why.reason.contains("cuMemSetAccess"), "{why}");
    }
}
