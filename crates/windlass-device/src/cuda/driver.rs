//! The functions of the CUDA driver that windlass uses, found at run time: one build serves machines with and
//! without a GPU, and a missing driver is an error with a reason.
//!
//! Signatures and numbers are those of NVIDIA's `cuda.h`, CUDA 12.0. A suffix such as `_v2` belongs to the name under
//! which the library exports a function.
#![allow(unsafe_code)]

use super::library::{self, functions};
use crate::{DriverError, Unavailable};
use libloading::Library;
use std::{
    ffi::{CStr, OsString, c_char, c_int, c_uint, c_void},
    sync::OnceLock,
};

/// `CUdevice`.
pub(super) type DeviceHandle = c_int;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`: opaque pointers.
pub(super) type Handle = *mut c_void;
/// `CUdeviceptr`.
pub(super) type DevicePointer = u64;
/// `CUresult`.
pub(super) type ResultCode = c_int;

/// First version with PTX 8.0, which the kernels are compiled to, and with everything below.
const OLDEST_VERSION: i32 = 12_000;

pub(super) const SUCCESS: ResultCode = 0;
pub(super) const OUT_OF_MEMORY: ResultCode = 2;
pub(super) const NOT_READY: ResultCode = 600;

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
pub(super) const HOST_REGISTER_PORTABLE: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`: no order with the legacy default stream.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: this thread's calls are no part of what others capture.
pub(super) const CAPTURE_RELAXED: c_int = 2;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: waiting threads sleep.
pub(super) const EVENT_QUIET: c_uint = 1 | 2;

/// `CUdevice_attribute`.
#[derive(Clone, Copy)]
pub(super) enum Attribute {
    Integrated = 18,
    ComputeMajor = 75,
    ComputeMinor = 76,
    PageableMemoryAccess = 88,
    MemoryPools = 115,
    GpuDirectRdma = 116,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
pub(super) struct Copy2d {
    pub(super) source_x: usize,
    pub(super) source_y: usize,
    pub(super) source_type: c_uint,
    pub(super) source_host: *const c_void,
    pub(super) source_device: DevicePointer,
    pub(super) source_array: Handle,
    pub(super) source_pitch: usize,
    pub(super) destination_x: usize,
    pub(super) destination_y: usize,
    pub(super) destination_type: c_uint,
    pub(super) destination_host: *mut c_void,
    pub(super) destination_device: DevicePointer,
    pub(super) destination_array: Handle,
    pub(super) destination_pitch: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
pub(super) const POINTER_MEMORY_TYPE: c_int = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
pub(super) const POINTER_DEVICE_ORDINAL: c_int = 9;
/// `CU_MEMORYTYPE_HOST`.
pub(super) const MEMORY_HOST: c_uint = 1;
/// `CU_MEMORYTYPE_DEVICE`.
pub(super) const MEMORY_DEVICE: c_uint = 2;

functions! {
    /// The functions, each under the name of what it does.
    returning ResultCode;
    required {
        init = "cuInit"(c_uint);
        driver_version = "cuDriverGetVersion"(*mut c_int);
        error_name = "cuGetErrorName"(ResultCode, *mut *const c_char);
        error_text = "cuGetErrorString"(ResultCode, *mut *const c_char);
        device_count = "cuDeviceGetCount"(*mut c_int);
        device = "cuDeviceGet"(*mut DeviceHandle, c_int);
        device_name = "cuDeviceGetName"(*mut c_char, c_int, DeviceHandle);
        device_memory = "cuDeviceTotalMem_v2"(*mut usize, DeviceHandle);
        device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, DeviceHandle);
        device_pci = "cuDeviceGetPCIBusId"(*mut c_char, c_int, DeviceHandle);
        device_uuid = "cuDeviceGetUuid"(*mut [u8; 16], DeviceHandle);
        primary_context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, DeviceHandle);
        primary_context_release = "cuDevicePrimaryCtxRelease_v2"(DeviceHandle);
        context_push = "cuCtxPushCurrent_v2"(Handle);
        context_pop = "cuCtxPopCurrent_v2"(*mut Handle);
        context_synchronize = "cuCtxSynchronize"();
        memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
        allocate = "cuMemAlloc_v2"(*mut DevicePointer, usize);
        free = "cuMemFree_v2"(DevicePointer);
        pointer_attribute = "cuPointerGetAttribute"(*mut c_void, c_int, DevicePointer);
        host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
        host_unregister = "cuMemHostUnregister"(*mut c_void);
        stream_create = "cuStreamCreate"(*mut Handle, c_uint);
        stream_destroy = "cuStreamDestroy_v2"(Handle);
        stream_synchronize = "cuStreamSynchronize"(Handle);
        stream_wait_event = "cuStreamWaitEvent"(Handle, Handle, c_uint);
        event_create = "cuEventCreate"(*mut Handle, c_uint);
        event_record = "cuEventRecord"(Handle, Handle);
        event_query = "cuEventQuery"(Handle);
        event_synchronize = "cuEventSynchronize"(Handle);
        event_destroy = "cuEventDestroy_v2"(Handle);
        copy_to_device = "cuMemcpyHtoDAsync_v2"(DevicePointer, *const c_void, usize, Handle);
        copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, DevicePointer, usize, Handle);
        copy_on_device = "cuMemcpyDtoDAsync_v2"(DevicePointer, DevicePointer, usize, Handle);
        copy_2d = "cuMemcpy2DAsync_v2"(*const Copy2d, Handle);
        module_load = "cuModuleLoadData"(*mut Handle, *const c_void);
        module_unload = "cuModuleUnload"(Handle);
        module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
        launch = "cuLaunchKernel"(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
        );
    }
    optional {
        device_luid = "cuDeviceGetLuid"(*mut [u8; 8], *mut c_uint, DeviceHandle);
        allocate_async = "cuMemAllocAsync"(*mut DevicePointer, usize, Handle);
        free_async = "cuMemFreeAsync"(DevicePointer, Handle);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut c_int);
    }
}

/// The driver of this machine, initialised.
pub(super) struct Driver {
    pub(super) functions: Functions,
    /// Such as 12080 for CUDA 12.8.
    pub(super) version: i32,
    /// The process that initialised it: no other may use it.
    process: u32,
}

impl Driver {
    /// The driver, loaded at the first call.
    pub(super) fn get() -> Result<&'static Self, Unavailable> {
        static DRIVER: OnceLock<Result<Driver, Unavailable>> = OnceLock::new();
        let driver = DRIVER.get_or_init(Self::load).as_ref().map_err(Clone::clone)?;
        if driver.is_usable() {
            return Ok(driver);
        }
        Err(Unavailable::new(
            "CUDA was started before fork(), and a child cannot go on using it",
            "start workers with the method 'spawn', or load before anything else uses CUDA",
        ))
    }

    /// Whether this process may call the driver.
    pub(super) fn is_usable(&self) -> bool {
        self.process == std::process::id()
    }

    fn load() -> Result<Self, Unavailable> {
        let library = open(&library_names())?;
        let functions = Functions::find(&library).map_err(|symbol| {
            let reason = format!("the CUDA driver has no function {symbol}: it is too old, or a stub");
            Unavailable::new(reason, "install a driver for CUDA 12.0 or later (525 or later)")
        })?;
        // Unloading a driver that may have threads is asking for a crash.
        std::mem::forget(library);
        let mut driver = Self { functions, version: 0, process: std::process::id() };
        // SAFETY: no arguments but flags, which must be 0.
        let code = unsafe { (driver.functions.init)(0) };
        driver.check("cuInit", code).map_err(|error| unusable(&error))?;
        // SAFETY: writes one integer.
        let code = unsafe { (driver.functions.driver_version)(&mut driver.version) };
        driver.check("cuDriverGetVersion", code).map_err(|error| unusable(&error))?;
        if driver.version < OLDEST_VERSION {
            let reason = format!("the CUDA driver serves CUDA {}", version_text(driver.version));
            return Err(Unavailable::new(reason, "install a driver for CUDA 12.0 or later (525 or later)"));
        }
        Ok(driver)
    }

    /// Turns a result of `function` into an error with the driver's own words.
    pub(super) fn check(&self, function: &'static str, code: ResultCode) -> Result<(), DriverError> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = |get: unsafe extern "C" fn(ResultCode, *mut *const c_char) -> ResultCode| {
            let mut text = std::ptr::null();
            // SAFETY: writes a pointer to a static string, or null for codes that it does not know.
            unsafe {
                get(code, &mut text);
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        let name = text(self.functions.error_name).unwrap_or_else(|| format!("error {code}"));
        let description = text(self.functions.error_text).unwrap_or_default();
        Err(DriverError { function, code, name, description, ends_work: ends_context(code) })
    }
}

/// Whether a context is of no use any more: its device is gone or has failed, or it was destroyed.
///
/// `CUDA_ERROR_DEVICE_UNAVAILABLE` (46) and `CUDA_ERROR_UNKNOWN` (999) are not among these codes. The driver also returns
/// them where the context lives and its work goes on.
pub(super) fn ends_context(code: ResultCode) -> bool {
    // From CUDA_ERROR_ECC_UNCORRECTABLE to CUDA_ERROR_LAUNCH_FAILED.
    matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719)
}

/// CUDA's version number in its usual form.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Where to look for the driver, best first. The name with a version comes first: toolkits ship a stub under the
/// other.
fn library_names() -> Vec<OsString> {
    #[cfg(feature = "stand-in")]
    if let Some(path) = std::env::var_os("WINDLASS_CUDA_DRIVER") {
        return vec![path];
    }
    let names: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
    names.iter().map(OsString::from).collect()
}

fn open(names: &[OsString]) -> Result<Library, Unavailable> {
    let mut tried = Vec::new();
    for name in names {
        match library::open(name) {
            Ok(library) => return Ok(library),
            Err(error) => tried.push(library::reason(&error)),
        }
    }
    let reason = format!("no CUDA driver was found: {}", tried.join("; "));
    let fix = "install NVIDIA's driver; in a container, run it with the GPU (--gpus all)";
    Err(Unavailable::new(reason, fix))
}

/// Why the driver cannot be used, and what to do.
fn unusable(error: &DriverError) -> Unavailable {
    let fix = match error.code {
        3 => {
            "if CUDA was started before fork(), start workers with the method 'spawn'; else check that nvidia-smi works"
        }
        34 => "remove the toolkit's stub library from LD_LIBRARY_PATH",
        100 => "check that nvidia-smi lists a device; in a container, run it with the GPU (--gpus all)",
        802 => "start nvidia-fabricmanager",
        803 | 804 => {
            "make the driver's library match its kernel module: reboot, or leave out the compatibility library"
        }
        _ => "check that nvidia-smi works",
    };
    Unavailable::new(format!("the CUDA driver does not start: {error}"), fix)
}
