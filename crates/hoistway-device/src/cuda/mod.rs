//! CUDA devices: what NVIDIA's driver has of its own. One build serves machines with and without a GPU: the driver is
//! found at run time, and a missing one is an error with a reason.
//!
//! `cufile` is the library that reads into devices past the host, `machine` what all of it needs. Signatures and numbers,
//! also those of `driver::table`, are those of NVIDIA's `cuda.h`, CUDA 12.0 unless a later one is named. A suffix such as `_v2` belongs to the name
//! under which the library exports a function.
#![allow(unsafe_code)]

pub(crate) mod cufile;
mod cufile_error;
mod descriptor;
mod external;
mod kernels;
mod machine;
mod virtual_memory;

use crate::{
    DeviceId, Error, Finding, Result, Unavailable,
    backend::{Direct, External, Opened, Virtual},
    driver::{
        Driver, Failed, Mapping, Slot, Traits, Vendor, Words,
        device::DriverDevice,
        images::Image,
        library::functions,
        table::{
            Batch, DeviceHandle, DevicePointer, Handle, INVALID_VALUE, MEMORY_DEVICE, ResultCode, SUCCESS,
            Symbols,
        },
    },
};
use cufile::CuFile;
use libloading::Library;
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsString, c_int, c_uint, c_void},
    ops::Deref,
    ptr,
    sync::{Mutex, PoisonError},
};

/// The kind.
#[derive(Debug)]
pub(crate) struct Cuda;

/// A CUDA device with its primary context.
pub(crate) type CudaDevice = DriverDevice<Cuda>;

functions! {
    /// Functions about contexts, attributes, and addresses.
    returning ResultCode;
    required {
        device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, DeviceHandle);
        primary_context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, DeviceHandle);
        primary_context_release = "cuDevicePrimaryCtxRelease_v2"(DeviceHandle);
        context_push = "cuCtxPushCurrent_v2"(Handle);
        context_pop = "cuCtxPopCurrent_v2"(*mut Handle);
        pointer_attribute = "cuPointerGetAttribute"(*mut c_void, c_int, u64);
    }
    optional {
        context_id = "cuCtxGetId"(Handle, *mut u64);
        device_luid = "cuDeviceGetLuid"(*mut [u8; 8], *mut c_uint, DeviceHandle);
        copy_batch_13 = "cuMemcpyBatchAsync_v2"(
            *mut DevicePointer, *mut DevicePointer, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, Handle
        );
        copy_batch_12 = "cuMemcpyBatchAsync"(
            *mut DevicePointer, *mut DevicePointer, *mut usize, usize, *mut CopyAttributes, *mut usize, usize,
            *mut usize, Handle
        );
    }
}

/// What the driver has of its own.
pub(crate) struct Own {
    functions: Functions,
    /// Else the name of the first that it lacks.
    external: Result<external::Functions, &'static str>,
    /// The same of functions that map memory.
    virtual_memory: Result<virtual_memory::Functions, &'static str>,
}

impl Deref for Own {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

/// `CUmemcpyAttributes`, of CUDA 12.8.
#[repr(C)]
pub(crate) struct CopyAttributes {
    /// `CUmemcpySrcAccessOrder`.
    source_order: c_int,
    /// Types and numbers of places, for memory that has none of its own.
    places: [c_int; 4],
    flags: c_uint,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`.
const IN_ORDER_OF_STREAM: c_int = 1;
/// The first versions with a call for several copies, and with the one that says no more which copy was refused.
const BATCHES_SINCE: [i32; 2] = [12_080, 13_000];

/// `CUdevice_attribute`.
#[derive(Clone, Copy)]
enum Attribute {
    Integrated = 18,
    ComputeMajor = 75,
    ComputeMinor = 76,
    PageableMemoryAccess = 88,
    UsesHostPageTables = 100,
    VirtualMemory = 102,
    GpuDirectRdmaOfMapped = 110,
    ReadOnlyHostRegister = 113,
    MemoryPools = 115,
    GpuDirectRdma = 116,
}

/// What comes before the two numbers of an architecture.
const ARCHITECTURE: &str = "compute capability ";
/// The mask of the node of an adapter that D3D12 takes unless it is told otherwise.
const FIRST_NODE: c_uint = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
const POINTER_MEMORY_TYPE: c_int = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const POINTER_DEVICE_ORDINAL: c_int = 9;

/// The names of all functions of the driver and of cuFile that are called.
#[cfg(feature = "stand-in")]
pub(crate) fn function_names() -> Vec<&'static str> {
    let own = [
        Functions::NAMES,
        cufile::Functions::NAMES,
        virtual_memory::Functions::NAMES,
        if cfg!(windows) { external::Functions::NAMES } else { &[] },
    ];
    [Cuda::SYMBOLS.names(), own.concat()].concat()
}

impl Vendor for Cuda {
    type Own = Own;

    const SYMBOLS: Symbols = Symbols {
        init: "cuInit",
        driver_version: "cuDriverGetVersion",
        error_name: "cuGetErrorName",
        error_text: "cuGetErrorString",
        device_count: "cuDeviceGetCount",
        device: "cuDeviceGet",
        device_name: "cuDeviceGetName",
        device_memory: "cuDeviceTotalMem_v2",
        device_pci: "cuDeviceGetPCIBusId",
        device_uuid: "cuDeviceGetUuid",
        memory_info: "cuMemGetInfo_v2",
        allocate: "cuMemAlloc_v2",
        free: "cuMemFree_v2",
        host_register: "cuMemHostRegister_v2",
        host_unregister: "cuMemHostUnregister",
        stream_create: "cuStreamCreate",
        stream_destroy: "cuStreamDestroy_v2",
        stream_synchronize: "cuStreamSynchronize",
        stream_query: "cuStreamQuery",
        stream_wait_event: "cuStreamWaitEvent",
        event_create: "cuEventCreate",
        event_record: "cuEventRecord",
        event_query: "cuEventQuery",
        event_synchronize: "cuEventSynchronize",
        event_destroy: "cuEventDestroy_v2",
        copy_to_device: "cuMemcpyHtoDAsync_v2",
        copy_to_host: "cuMemcpyDtoHAsync_v2",
        copy_on_device: "cuMemcpyDtoDAsync_v2",
        copy_2d: "cuMemcpy2DAsync_v2",
        module_load: "cuModuleLoadData",
        module_unload: "cuModuleUnload",
        module_function: "cuModuleGetFunction",
        launch: "cuLaunchKernel",
        allocate_async: "cuMemAllocAsync",
        free_async: "cuMemFreeAsync",
        exchange_capture_mode: "cuThreadExchangeStreamCaptureMode",
        stream_is_capturing: "cuStreamIsCapturing",
    };
    const WORDS: Words = Words {
        name: "CUDA",
        install: if cfg!(windows) {
            "install NVIDIA's driver"
        } else {
            "install NVIDIA's driver; in a container, run it with the GPU (--gpus all)"
        },
        update: "install a driver for CUDA 12.0 or later (525 or later)",
        check: "check that nvidia-smi works",
        visible: "CUDA_VISIBLE_DEVICES",
    };
    /// The first with PTX 8.0, which the kernels are compiled to, and with all functions.
    const OLDEST_VERSION: i32 = 12_000;
    /// `kDLCUDA`, and `kDLCUDAManaged`: memory that the driver moves between host and device.
    const DLPACK_TYPES: &'static [i32] = &[2, 13];
    const STREAMS_OUTLIVE_HANDLES: bool = true;

    fn id(ordinal: u32) -> DeviceId {
        DeviceId::Cuda(ordinal)
    }

    fn slot() -> &'static Slot<Self> {
        static SLOT: Slot<Cuda> = Slot::new();
        &SLOT
    }

    fn opened() -> &'static Opened {
        static OPENED: Opened = Opened::new(BTreeMap::new());
        &OPENED
    }

    /// The name with a version comes first: toolkits ship a stub under the other.
    fn library_names() -> Vec<OsString> {
        #[cfg(feature = "stand-in")]
        if let Some(path) = std::env::var_os("HOISTWAY_CUDA_DRIVER") {
            return vec![path];
        }
        let names: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
        names.iter().map(OsString::from).collect()
    }

    fn find(library: &Library) -> Result<Own, &'static str> {
        Ok(Own {
            functions: Functions::find(library)?,
            external: external::Functions::find(library),
            virtual_memory: virtual_memory::Functions::find(library),
        })
    }

    fn version_text(version: i32) -> String {
        format!("CUDA {}", number_text(version))
    }

    fn fix(code: ResultCode) -> &'static str {
        match code {
            // Of forks, stub libraries and kernel modules: Windows has none of them.
            3 | 34 | 803 | 804 if cfg!(windows) => {
                "check that nvidia-smi works, and reboot after an update of the driver"
            }
            3 => {
                "if CUDA was started before fork(), start workers with the method 'spawn'; else check that nvidia-smi works"
            }
            34 => "remove the toolkit's stub library from LD_LIBRARY_PATH",
            100 if cfg!(windows) => "check that nvidia-smi lists a device",
            100 => "check that nvidia-smi lists a device; in a container, run it with the GPU (--gpus all)",
            802 => "start nvidia-fabricmanager",
            803 | 804 => {
                "make the driver's library match its kernel module: reboot, or leave out the compatibility library"
            }
            _ => "check that nvidia-smi works",
        }
    }

    /// A context is of no use any more: its device is gone or has failed, or it was destroyed.
    ///
    /// `CUDA_ERROR_DEVICE_UNAVAILABLE` (46) and `CUDA_ERROR_UNKNOWN` (999) are not among these codes. The driver also
    /// returns them where the context lives and its work goes on.
    fn ends_work(code: ResultCode) -> bool {
        // From CUDA_ERROR_ECC_UNCORRECTABLE to CUDA_ERROR_LAUNCH_FAILED.
        matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719)
    }

    fn describe(driver: &Driver<Self>, handle: DeviceHandle) -> Result<Traits, Failed> {
        let attribute = |asked| attribute(driver, handle, asked);
        let luid = driver.own.device_luid.and_then(|get| {
            let (mut luid, mut mask) = ([0; 8], 0);
            // SAFETY: writes 8 bytes and one integer.
            let code = unsafe { get(&mut luid, &mut mask, handle) };
            // Devices that are linked as one adapter share its identifier, and D3D12 means the first of them.
            (code == SUCCESS && mask == FIRST_NODE).then_some(luid)
        });
        let (major, minor) = (attribute(Attribute::ComputeMajor), attribute(Attribute::ComputeMinor));
        Ok(Traits {
            architecture: format!("{ARCHITECTURE}{major}.{minor}"),
            luid,
            is_integrated: attribute(Attribute::Integrated) != 0,
            reads_pageable_memory: attribute(Attribute::PageableMemoryAccess) != 0,
            has_memory_pools: attribute(Attribute::MemoryPools) != 0,
            has_gpudirect_rdma: attribute(Attribute::GpuDirectRdma) != 0,
            uses_host_page_tables: attribute(Attribute::UsesHostPageTables) != 0,
            pins_read_only: attribute(Attribute::ReadOnlyHostRegister) != 0,
        })
    }

    fn mapping(driver: &Driver<Self>, handle: DeviceHandle) -> Option<Mapping> {
        let has = |asked| attribute(driver, handle, asked) != 0;
        has(Attribute::VirtualMemory)
            .then(|| Mapping { has_gpudirect_rdma: has(Attribute::GpuDirectRdmaOfMapped) })
    }

    fn kernels(architecture: &str) -> Vec<Image> {
        let numbers = architecture.strip_prefix(ARCHITECTURE).and_then(|numbers| numbers.split_once('.'));
        let parsed = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        kernels::of(parsed.unwrap_or_default())
    }

    /// No flags are set: they would be those of frameworks too.
    fn retain(driver: &Driver<Self>, handle: DeviceHandle) -> Result<Handle, Failed> {
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (driver.own.primary_context_retain)(&mut context, handle) };
        succeeded("cuDevicePrimaryCtxRetain", code).map(|()| context)
    }

    fn release(driver: &Driver<Self>, handle: DeviceHandle) {
        // SAFETY: retained once, released once.
        unsafe { (driver.own.primary_context_release)(handle) };
    }

    fn enter(driver: &Driver<Self>, handle: DeviceHandle, context: Handle) -> Result<DeviceHandle, Failed> {
        // SAFETY: the context is retained.
        succeeded("cuCtxPushCurrent", unsafe { (driver.own.context_push)(context) }).map(|()| handle)
    }

    fn context_id(driver: &Driver<Self>, context: Handle) -> Result<Option<u64>, Failed> {
        let Some(ask) = driver.own.context_id else { return Ok(None) };
        let mut id = 0;
        // SAFETY: writes one number; the context is retained, and one that was destroyed is an error.
        succeeded("cuCtxGetId", unsafe { ask(context, &mut id) }).map(|()| Some(id))
    }

    fn leave(driver: &Driver<Self>, _before: DeviceHandle) {
        let mut popped = ptr::null_mut();
        // SAFETY: pushed by `enter` on this thread.
        unsafe { (driver.own.context_pop)(&mut popped) };
    }

    unsafe fn copy_batch(
        driver: &Driver<Self>,
        stream: Handle,
        Batch { to, from, lens }: &mut Batch,
    ) -> Option<(&'static str, ResultCode)> {
        let mut attributes = CopyAttributes { source_order: IN_ORDER_OF_STREAM, places: [0; 4], flags: 0 };
        // The attributes are those of all copies from the first on.
        let (mut first, mut refused) = (0, 0);
        let (to, from, lens, count) = (to.as_mut_ptr(), from.as_mut_ptr(), lens.as_mut_ptr(), lens.len());
        let [since, since_13] = BATCHES_SINCE;
        match (driver.own.copy_batch_12, driver.own.copy_batch_13) {
            (_, Some(call)) if driver.version >= since_13 => {
                // SAFETY: the caller vouches for the copies; the driver reads the arrays before it returns.
                let code = unsafe { call(to, from, lens, count, &mut attributes, &mut first, 1, stream) };
                Some(("cuMemcpyBatchAsync", code))
            }
            (Some(call), _) if driver.version >= since => {
                // SAFETY: as above; it writes one number.
                let code = unsafe {
                    call(to, from, lens, count, &mut attributes, &mut first, 1, &mut refused, stream)
                };
                Some(("cuMemcpyBatchAsync", code))
            }
            _ => None,
        }
    }

    fn owner_of(driver: &Driver<Self>, address: u64) -> Result<Option<u32>, Failed> {
        const NAME: &str = "cuPointerGetAttribute";
        let (mut memory_type, mut ordinal): (c_uint, c_int) = (0, 0);
        let ask = driver.own.pointer_attribute;
        // SAFETY: writes one integer. Any address may be asked about.
        let code = unsafe { ask((&raw mut memory_type).cast(), POINTER_MEMORY_TYPE, address) };
        // Memory of the host may be known to CUDA too.
        if code == INVALID_VALUE || code == SUCCESS && memory_type != MEMORY_DEVICE {
            return Ok(None);
        }
        succeeded(NAME, code)?;
        // SAFETY: writes one integer.
        succeeded(NAME, unsafe { ask((&raw mut ordinal).cast(), POINTER_DEVICE_ORDINAL, address) })?;
        Ok(u32::try_from(ordinal).ok())
    }

    fn direct(device: &CudaDevice) -> Result<&dyn Direct, Unavailable> {
        CuFile::get().map(|_| device as &dyn Direct)
    }

    fn external(device: &CudaDevice) -> Result<&dyn External, Unavailable> {
        external::functions(device).map(|_| device as &dyn External)
    }

    fn virtual_memory(device: &CudaDevice) -> Result<&dyn Virtual, Unavailable> {
        virtual_memory::functions(device).map(|_| device as &dyn Virtual)
    }

    fn may_have_direct_path() -> Result<(), Unavailable> {
        machine::may_have_direct_path()
    }

    fn examine(devices: Result<usize, Unavailable>) -> Vec<Finding> {
        machine::examine(devices.map(drop))
    }
}

impl CudaDevice {
    /// Retains the context to the end of the process.
    fn keep_context(&self) -> Result<(), Error> {
        static KEPT: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if !kept.contains(&self.info.ordinal) {
            let retained = Cuda::retain(self.driver, self.handle);
            retained.map_err(|failed| self.error("keeping its context", failed))?;
            kept.insert(self.info.ordinal);
        }
        Ok(())
    }
}

/// An attribute of a device; 0 if the driver does not know it.
fn attribute(driver: &Driver<Cuda>, handle: DeviceHandle, asked: Attribute) -> u32 {
    let mut value = 0;
    // SAFETY: writes one integer.
    let code = unsafe { (driver.own.device_attribute)(&mut value, asked as c_int, handle) };
    // Attributes that an older driver does not know are those of features that it does not have.
    if code == SUCCESS { u32::try_from(value).unwrap_or(0) } else { 0 }
}

fn succeeded(function: &'static str, code: ResultCode) -> Result<(), Failed> {
    if code == SUCCESS { Ok(()) } else { Err((function, code)) }
}

/// CUDA's version number in its usual form.
fn number_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
