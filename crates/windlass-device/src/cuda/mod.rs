//! CUDA devices through the driver: the only place that knows its types.
//!
//! `library` finds libraries, `driver` is the table of functions; this file has devices, their contexts and memory;
//! `stream` is what fills them, `kernels` what runs on them; `cufile` the library that reads into them past the host,
//! `machine` what all of it needs.
#![allow(unsafe_code)]

pub(crate) mod cufile;
mod cufile_error;
mod descriptor;
mod driver;
mod kernels;
mod library;
mod machine;
mod stream;

use crate::backend::Direct;
use crate::{
    DeviceId, DeviceInfo, DriverError, Error, Finding, Result, Unavailable,
    backend::{Backend, Kind, Stream},
};
use cufile::CuFile;
use driver::{Attribute, DeviceHandle, Driver, Handle};
use std::{
    collections::BTreeSet,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fmt, io,
    marker::PhantomData,
    ptr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};
use stream::CudaStream;

/// A CUDA device with its primary context, which frameworks use too. The context is retained as long as a value of
/// this type lives, and never made current beyond a call.
pub(crate) struct CudaDevice {
    driver: &'static Driver,
    handle: DeviceHandle,
    context: Handle,
    info: DeviceInfo,
    uuid: [u8; 16],
    kernels: OnceLock<kernels::Kernels>,
    /// Held while kernels are loaded.
    loading: Mutex<()>,
}

// SAFETY: the driver's functions may be called from any thread; the handles are not changed after they were made.
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
unsafe impl Sync for CudaDevice {}

/// The kind.
pub(crate) struct Cuda;

impl Kind for Cuda {
    fn check(&self) -> Result<(), Unavailable> {
        Driver::get().map(drop)
    }

    fn open(&self, ordinal: u32) -> Result<Arc<dyn Backend>> {
        let id = DeviceId::Cuda(ordinal);
        let unavailable = |why| Error::DeviceUnavailable { device: id.to_string(), why };
        let driver = Driver::get().map_err(unavailable)?;
        let device = CudaDevice::start(driver, ordinal).map_err(|problem| match problem {
            Problem::Absent(count) => unavailable(Unavailable::new(
                match count {
                    0 => "the CUDA driver shows no device".to_owned(),
                    1 => "the CUDA driver shows one device, cuda:0".to_owned(),
                    _ => format!("the CUDA driver shows {count} devices, cuda:0 to cuda:{}", count - 1),
                },
                "choose another device, or check CUDA_VISIBLE_DEVICES",
            )),
            Problem::Driver(error) => device_error(ordinal, "starting the device", error),
        })?;
        Ok(Arc::new(device))
    }

    fn devices(&self) -> std::result::Result<Vec<DeviceInfo>, Unavailable> {
        let driver = Driver::get()?;
        let failed = |error: DriverError| Unavailable::new(error.to_string(), "check that nvidia-smi works");
        (0..count(driver).map_err(failed)?)
            .map(|ordinal| describe(driver, ordinal, handle(driver, ordinal)?))
            .collect::<std::result::Result<_, DriverError>>()
            .map_err(failed)
    }

    fn owner_of(&self, address: u64) -> Option<u32> {
        // Without a driver there is no memory of devices.
        let driver = Driver::get().ok()?;
        let (mut memory_type, mut ordinal): (c_uint, c_int) = (0, 0);
        // SAFETY: writes one integer. Any address may be asked about.
        let code = unsafe {
            (driver.functions.pointer_attribute)(
                (&raw mut memory_type).cast(),
                driver::POINTER_MEMORY_TYPE,
                address,
            )
        };
        // Memory of the host may be known to CUDA too.
        if code != driver::SUCCESS || memory_type != driver::MEMORY_DEVICE {
            return None;
        }
        // SAFETY: writes one integer.
        let code = unsafe {
            (driver.functions.pointer_attribute)(
                (&raw mut ordinal).cast(),
                driver::POINTER_DEVICE_ORDINAL,
                address,
            )
        };
        u32::try_from(ordinal).ok().filter(|_| code == driver::SUCCESS)
    }

    fn may_have_direct_path(&self) -> std::result::Result<(), Unavailable> {
        machine::may_have_direct_path()
    }

    fn examine(&self) -> Vec<Finding> {
        machine::examine(self.devices().map(drop))
    }

    fn dlpack_type(&self) -> i32 {
        /// `kDLCUDA`.
        const CUDA: i32 = 2;
        CUDA
    }
}

impl CudaDevice {
    fn start(driver: &'static Driver, ordinal: u32) -> std::result::Result<Self, Problem> {
        let count = count(driver)?;
        if ordinal >= count {
            return Err(Problem::Absent(count));
        }
        let handle = handle(driver, ordinal)?;
        let info = describe(driver, ordinal, handle)?;
        let uuid = uuid(driver, handle)?;
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle. No flags are set: they would be those of frameworks too.
        let code = unsafe { (driver.functions.primary_context_retain)(&mut context, handle) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Self { driver, handle, context, info, uuid, kernels: OnceLock::new(), loading: Mutex::new(()) })
    }

    /// Retains the context to the end of the process.
    fn keep_context(&self) -> Result<()> {
        static KEPT: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.contains(&self.info.ordinal) {
            return Ok(());
        }
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle, that of this device's context.
        let code = unsafe { (self.driver.functions.primary_context_retain)(&mut context, self.handle) };
        self.check("keeping its context", "cuDevicePrimaryCtxRetain", code)?;
        kept.insert(self.info.ordinal);
        Ok(())
    }

    /// Makes the context current on this thread until the result is dropped; what was current comes back then.
    fn enter(&self) -> Result<Entered<'_>> {
        if !self.driver.is_usable() {
            return Err(Error::Forked);
        }
        // SAFETY: the context is retained.
        let code = unsafe { (self.driver.functions.context_push)(self.context) };
        self.check("entering its context", "cuCtxPushCurrent", code)?;
        Ok(Entered { driver: self.driver, _this_thread: PhantomData })
    }

    /// Allocates memory by a function of the driver.
    fn allocate_by(
        &self,
        function: &'static str,
        len: u64,
        allocate: impl FnOnce(&mut driver::DevicePointer, usize) -> driver::ResultCode,
    ) -> Result<u64> {
        let _entered = self.enter()?;
        let mut address = 0;
        let code = allocate(&mut address, usize::try_from(len.max(1)).unwrap_or(usize::MAX));
        if code == driver::OUT_OF_MEMORY {
            let (available, _) = self.memory().unwrap_or_default();
            return Err(Error::OutOfMemory { device: self.info.id.to_string(), needed: len, available });
        }
        self.check("allocating memory", function, code)?;
        Ok(address)
    }

    /// Frees memory by a function of the driver.
    fn free_by(&self, len: u64, free: impl FnOnce() -> driver::ResultCode) {
        // A child of fork has nothing to free.
        let Ok(_entered) = self.enter() else { return };
        // A tensor may be dropped, by a garbage collector say, while another thread captures a graph.
        let mut mode = driver::CAPTURE_RELAXED;
        let exchange_mode = self.driver.functions.exchange_capture_mode;
        if let Some(exchange) = exchange_mode {
            // SAFETY: swaps this thread's mode with that in `mode`.
            unsafe { exchange(&mut mode) };
        }
        let code = free();
        if let Some(exchange) = exchange_mode {
            // SAFETY: as above.
            unsafe { exchange(&mut mode) };
        }
        if code != driver::SUCCESS && !driver::ends_context(code) {
            tracing::warn!(bytes = len, code, "memory of a device could not be freed");
        }
    }

    fn check(&self, operation: &'static str, function: &'static str, code: driver::ResultCode) -> Result<()> {
        let checked = self.driver.check(function, code);
        checked.map_err(|error| device_error(self.info.ordinal, operation, error))
    }
}

impl Backend for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<(u64, u64)> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers; the context is current.
        let code = unsafe { (self.driver.functions.memory_info)(&mut free, &mut total) };
        self.check("asking for its memory", "cuMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }

    /// Other devices, processes and network cards can be given it, which they cannot memory of a stream-ordered pool.
    fn allocate(&self, len: u64) -> Result<u64> {
        self.allocate_by("cuMemAlloc", len, |address, bytes| {
            // SAFETY: writes one address; the context is current.
            unsafe { (self.driver.functions.allocate)(address, bytes) }
        })
    }

    unsafe fn free(&self, address: u64, len: u64) {
        // SAFETY: allocated in this context and freed once. The call waits for work that uses it.
        self.free_by(len, || unsafe { (self.driver.functions.free)(address) });
    }

    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<()> {
        let _entered = self.enter()?;
        let flags = driver::HOST_REGISTER_PORTABLE;
        // SAFETY: the caller keeps the memory mapped; pinning changes none of its bytes.
        let code = unsafe { (self.driver.functions.host_register)(memory.cast(), len, flags) };
        if code == driver::OUT_OF_MEMORY {
            let source = io::Error::from(io::ErrorKind::OutOfMemory);
            return Err(Error::Allocation { bytes: len as u64, kind: "pinned memory", source });
        }
        self.check("pinning host memory", "cuMemHostRegister", code)
    }

    unsafe fn unpin(&self, memory: *mut u8) {
        if let Ok(_entered) = self.enter() {
            // SAFETY: the caller has pinned it, and unpins it once.
            unsafe { (self.driver.functions.host_unregister)(memory.cast()) };
        }
    }

    fn stream(self: Arc<Self>) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::new(self)?))
    }

    fn wait_for_all(&self) -> bool {
        // A child of fork has a copy of what the device works on.
        let Ok(_entered) = self.enter() else { return true };
        // SAFETY: the context is current.
        let code = unsafe { (self.driver.functions.context_synchronize)() };
        code == driver::SUCCESS || driver::ends_context(code)
    }

    unsafe fn is_event_reached(&self, event: u64) -> Result<bool> {
        let _entered = self.enter()?;
        let event = ptr::with_exposed_provenance_mut::<c_void>(event as usize);
        // SAFETY: the caller's event lives.
        let code = unsafe { (self.driver.functions.event_query)(event) };
        if code == driver::NOT_READY {
            return Ok(false);
        }
        self.check("asking after an event", "cuEventQuery", code).map(|()| true)
    }

    fn direct(&self) -> std::result::Result<&dyn Direct, Unavailable> {
        CuFile::get().map(|_| self as &dyn Direct)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // A child of fork has no context to release.
        if !self.driver.is_usable() {
            return;
        }
        if let Some(kernels) = self.kernels.take()
            && let Ok(_entered) = self.enter()
        {
            kernels.unload(self.driver);
        }
        // SAFETY: retained once, released once; everything made in it holds this device.
        unsafe { (self.driver.functions.primary_context_release)(self.handle) };
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("info", &self.info).finish_non_exhaustive()
    }
}

/// A context that is current on this thread.
struct Entered<'a> {
    driver: &'a Driver,
    /// Contexts are current on a thread, so this must be dropped on the same.
    _this_thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: pushed by `enter` on this thread, and guards are dropped in the opposite order.
        unsafe { (self.driver.functions.context_pop)(&mut popped) };
    }
}

/// Why a device cannot be opened.
enum Problem {
    /// There is no device of this number: only as many as given.
    Absent(u32),
    Driver(DriverError),
}

impl From<DriverError> for Problem {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

fn device_error(ordinal: u32, operation: &'static str, source: DriverError) -> Error {
    Error::Device { device: DeviceId::Cuda(ordinal).to_string(), operation, source }
}

fn count(driver: &Driver) -> std::result::Result<u32, DriverError> {
    let mut count = 0;
    // SAFETY: writes one integer.
    let code = unsafe { (driver.functions.device_count)(&mut count) };
    driver.check("cuDeviceGetCount", code)?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn handle(driver: &Driver, ordinal: u32) -> std::result::Result<DeviceHandle, DriverError> {
    let mut handle = 0;
    // SAFETY: writes one integer.
    let code =
        unsafe { (driver.functions.device)(&mut handle, c_int::try_from(ordinal).unwrap_or(c_int::MAX)) };
    driver.check("cuDeviceGet", code)?;
    Ok(handle)
}

fn describe(
    driver: &Driver,
    ordinal: u32,
    handle: DeviceHandle,
) -> std::result::Result<DeviceInfo, DriverError> {
    let functions = &driver.functions;
    let attribute = |attribute: Attribute| {
        let mut value = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (functions.device_attribute)(&mut value, attribute as c_int, handle) };
        // Attributes that an older driver does not know are those of features that it does not have.
        if code == driver::SUCCESS { u32::try_from(value).unwrap_or(0) } else { 0 }
    };
    let name = text(driver, "cuDeviceGetName", |buffer, len| {
        // SAFETY: the buffer has `len` bytes.
        unsafe { (functions.device_name)(buffer, len, handle) }
    })?;
    let pci = text(driver, "cuDeviceGetPCIBusId", |buffer, len| {
        // SAFETY: the buffer has `len` bytes.
        unsafe { (functions.device_pci)(buffer, len, handle) }
    })?
    .to_ascii_lowercase();
    let mut memory = 0;
    // SAFETY: writes one number.
    let code = unsafe { (functions.device_memory)(&mut memory, handle) };
    driver.check("cuDeviceTotalMem", code)?;
    let luid = functions.device_luid.and_then(|get| {
        let (mut luid, mut mask) = ([0; 8], 0);
        // SAFETY: writes 8 bytes and one integer.
        let code = unsafe { get(&mut luid, &mut mask, handle) };
        (code == driver::SUCCESS).then_some(luid)
    });
    Ok(DeviceInfo {
        id: DeviceId::Cuda(ordinal),
        ordinal,
        name,
        memory_bytes: memory as u64,
        numa_node: numa_node_of(&pci),
        pci,
        uuid: uuid(driver, handle)?.iter().map(|byte| format!("{byte:02x}")).collect(),
        luid,
        compute_capability: (attribute(Attribute::ComputeMajor), attribute(Attribute::ComputeMinor)),
        is_integrated: attribute(Attribute::Integrated) != 0,
        reads_pageable_memory: attribute(Attribute::PageableMemoryAccess) != 0,
        has_memory_pools: attribute(Attribute::MemoryPools) != 0,
        has_gpudirect_rdma: attribute(Attribute::GpuDirectRdma) != 0,
        has_kernels: true,
    })
}

/// The NUMA node of the device at this address of the PCI bus, if the system says.
fn numa_node_of(pci: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/numa_node")).ok()?;
    // -1 stands for none.
    text.trim().parse().ok()
}

fn uuid(driver: &Driver, handle: DeviceHandle) -> std::result::Result<[u8; 16], DriverError> {
    let mut uuid = [0; 16];
    // SAFETY: writes 16 bytes.
    let code = unsafe { (driver.functions.device_uuid)(&mut uuid, handle) };
    driver.check("cuDeviceGetUuid", code)?;
    Ok(uuid)
}

/// A text that the driver writes into a buffer.
fn text(
    driver: &Driver,
    function: &'static str,
    write: impl FnOnce(*mut c_char, c_int) -> driver::ResultCode,
) -> std::result::Result<String, DriverError> {
    let mut buffer = [0u8; 256];
    // One byte stays zero, whatever the driver writes.
    driver.check(function, write(buffer.as_mut_ptr().cast(), 255))?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}
