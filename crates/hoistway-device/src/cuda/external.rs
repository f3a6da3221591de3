//! Memory and fences of D3D12, as the driver imports them.
#![allow(unsafe_code)]

use super::CudaDevice;
use crate::{
    Error, ExternalKind, Fate, Result, Unavailable,
    backend::{Backend, External},
    driver::{
        library::functions,
        table::{Handle, ResultCode},
    },
};
use std::{
    ffi::{c_int, c_uint, c_void},
    ptr,
};

functions! {
    /// Functions about what other interfaces have made.
    returning ResultCode;
    required {
        import_memory = "cuImportExternalMemory"(*mut Handle, *const MemoryDescription);
        mapped_buffer = "cuExternalMemoryGetMappedBuffer"(*mut u64, Handle, *const BufferDescription);
        destroy_memory = "cuDestroyExternalMemory"(Handle);
        import_semaphore = "cuImportExternalSemaphore"(*mut Handle, *const SemaphoreDescription);
        wait = "cuWaitExternalSemaphoresAsync"(*const Handle, *const WaitParameters, c_uint, Handle);
        destroy_semaphore = "cuDestroyExternalSemaphore"(Handle);
    }
    optional {}
}

/// `CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP` and `…_RESOURCE`
const D3D12_HEAP: c_int = 4;
const D3D12_RESOURCE: c_int = 5;
/// `CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D12_FENCE`
const D3D12_FENCE: c_int = 4;
/// `CUDA_EXTERNAL_MEMORY_DEDICATED`, which a committed resource needs, and a heap must not have.
const DEDICATED: c_uint = 1;

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`
#[repr(C)]
pub(super) struct MemoryDescription {
    kind: c_int,
    handle: *mut c_void,
    name: *const c_void,
    bytes: u64,
    flags: c_uint,
    reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`
#[repr(C)]
pub(super) struct BufferDescription {
    offset: u64,
    bytes: u64,
    flags: c_uint,
    reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC`
#[repr(C)]
pub(super) struct SemaphoreDescription {
    kind: c_int,
    handle: *mut c_void,
    name: *const c_void,
    flags: c_uint,
    reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS`
#[repr(C)]
pub(super) struct WaitParameters {
    value: u64,
    others: [u64; 3],
    others_reserved: [c_uint; 10],
    flags: c_uint,
    reserved: [c_uint; 16],
}

/// The functions, or why they are not there.
pub(super) fn functions(device: &CudaDevice) -> Result<&Functions, Unavailable> {
    device.driver.own.external.as_ref().map_err(|missing| {
        Unavailable::new(format!("the driver has no function {missing}"), "update NVIDIA's driver")
    })
}

impl External for CudaDevice {
    unsafe fn import_memory(
        &self,
        kind: ExternalKind,
        handle: *mut c_void,
        len: u64,
    ) -> Result<(usize, u64)> {
        const IMPORTING: &str = "importing memory of D3D12";
        let functions = self.external_functions()?;
        let _entered = self.enter()?;
        let (kind, flags) = match kind {
            ExternalKind::D3d12Heap => (D3D12_HEAP, 0),
            ExternalKind::D3d12Resource => (D3D12_RESOURCE, DEDICATED),
        };
        let description =
            MemoryDescription { kind, handle, name: ptr::null(), bytes: len, flags, reserved: [0; 16] };
        let mut memory: Handle = ptr::null_mut();
        // SAFETY: the structure is that of the header; the caller vouches for the handle.
        self.call(IMPORTING, "cuImportExternalMemory", || unsafe {
            (functions.import_memory)(&mut memory, &description)
        })?;
        let buffer = BufferDescription { offset: 0, bytes: len, flags: 0, reserved: [0; 16] };
        let mut address = 0;
        // SAFETY: as above; all of the memory.
        let mapped = self.call(IMPORTING, "cuExternalMemoryGetMappedBuffer", || unsafe {
            (functions.mapped_buffer)(&mut address, memory, &buffer)
        });
        if let Err(error) = mapped {
            // SAFETY: imported above, and nothing is mapped.
            self.forget(unsafe { (functions.destroy_memory)(memory) });
            return Err(error);
        }
        Ok((memory.expose_provenance(), address))
    }

    unsafe fn release_memory(&self, memory: usize, address: u64) -> Fate {
        // SAFETY: mapped by `import_memory`. This waits for work that uses it.
        let freed = unsafe { self.free(address, 0) };
        if !freed.is_known() {
            return freed;
        }
        let released = self.external_functions().and_then(|functions| {
            let _entered = self.enter()?;
            let memory = ptr::with_exposed_provenance_mut(memory);
            // SAFETY: imported, and released once.
            self.call("releasing memory of D3D12", "cuDestroyExternalMemory", || unsafe {
                (functions.destroy_memory)(memory)
            })
        });
        // What was mapped is freed, so that nothing uses it whatever this says.
        match released {
            Ok(()) => freed,
            Err(error) => Fate::Failed(error),
        }
    }

    unsafe fn import_semaphore(&self, handle: *mut c_void) -> Result<usize> {
        let functions = self.external_functions()?;
        let _entered = self.enter()?;
        let description = SemaphoreDescription {
            kind: D3D12_FENCE,
            handle,
            name: ptr::null(),
            flags: 0,
            reserved: [0; 16],
        };
        let mut semaphore: Handle = ptr::null_mut();
        // SAFETY: the structure is that of the header; the caller vouches for the handle.
        self.call("importing a fence of D3D12", "cuImportExternalSemaphore", || unsafe {
            (functions.import_semaphore)(&mut semaphore, &description)
        })?;
        Ok(semaphore.expose_provenance())
    }

    unsafe fn release_semaphore(&self, semaphore: usize) {
        let released = self.external_functions().and_then(|functions| {
            let _entered = self.enter()?;
            let semaphore = ptr::with_exposed_provenance_mut(semaphore);
            // SAFETY: imported, and released once.
            self.call("releasing a fence of D3D12", "cuDestroyExternalSemaphore", || unsafe {
                (functions.destroy_semaphore)(semaphore)
            })
        });
        if let Err(error) = released {
            tracing::warn!(%error, "an imported fence of a device could not be released");
        }
    }

    unsafe fn wait(&self, stream: Handle, semaphore: usize, value: u64) -> Result<()> {
        let functions = self.external_functions()?;
        let _entered = self.enter()?;
        let semaphore: Handle = ptr::with_exposed_provenance_mut(semaphore);
        let parameters =
            WaitParameters { value, others: [0; 3], others_reserved: [0; 10], flags: 0, reserved: [0; 16] };
        // SAFETY: the caller vouches for both; the structure is that of the header.
        self.call("waiting for a fence of D3D12", "cuWaitExternalSemaphoresAsync", || unsafe {
            (functions.wait)(&semaphore, &parameters, 1, stream)
        })
    }
}

impl CudaDevice {
    fn external_functions(&self) -> Result<&Functions> {
        functions(self).map_err(|why| Error::DeviceUnavailable { device: self.info.id.to_string(), why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn structures_lie_as_the_header_has_them() {
        assert_eq!((size_of::<MemoryDescription>(), offset_of!(MemoryDescription, bytes)), (104, 24));
        assert_eq!((size_of::<BufferDescription>(), offset_of!(BufferDescription, flags)), (88, 16));
        assert_eq!((size_of::<SemaphoreDescription>(), offset_of!(SemaphoreDescription, flags)), (96, 24));
        assert_eq!((size_of::<WaitParameters>(), offset_of!(WaitParameters, flags)), (144, 72));
    }
}
