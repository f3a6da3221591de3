//! CUDA devices through the driver: the only place that knows its types.
//!
//! `library` finds libraries, `driver` is the table of functions; this file has devices and their contexts; `memory` what they own; `copies` the
//! queue that fills them, `host_copies` one for both ways; `kernels` what runs on them; `cufile` the library that reads into them past the host.
#![allow(unsafe_code)]

pub mod copies;
pub mod cufile;
mod cufile_error;
mod descriptor;
mod driver;
pub mod host_copies;
mod kernels;
mod library;
pub mod memory;

pub use driver::DriverError;

use crate::{DeviceId, Error, Result, Unavailable};
use driver::{Attribute, DeviceHandle, Driver, Handle};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeSet, HashMap},
    ffi::{CStr, c_char, c_int, c_uint},
    marker::PhantomData,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
};

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its number among the visible devices.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Its place on the PCI bus, such as `0000:3b:00.0`.
    pub pci: String,
    /// Its UUID, in hex.
    pub uuid: String,
    /// Its locally unique identifier, which other APIs of Windows name it by.
    pub luid: Option<[u8; 8]>,
    /// The NUMA node that it hangs off, if the system says.
    pub numa_node: Option<u32>,
    /// Its compute capability.
    pub compute_capability: (u32, u32),
    /// Whether it shares the host's memory rather than having its own.
    pub is_integrated: bool,
    /// Whether it reads host memory that nobody pinned.
    pub reads_pageable_memory: bool,
    /// Whether it allocates in the order of a stream.
    pub has_memory_pools: bool,
    /// Whether other devices can read and write its memory.
    pub has_gpudirect_rdma: bool,
}

/// A CUDA device with its primary context, which frameworks use too. The context is retained as long as a value of
/// this type lives, and never made current beyond a call.
pub struct Device {
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
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// The CUDA version that the driver serves, such as `12.8`.
///
/// # Errors
/// Why there is no usable driver.
pub fn driver_version() -> std::result::Result<String, Unavailable> {
    Driver::get().map(|driver| driver::version_text(driver.version))
}

/// The devices that CUDA shows to this process.
///
/// ```
/// match windlass_device::devices() {
///     Ok(devices) => println!("{} devices", devices.len()),
///     Err(why) => println!("no CUDA: {why}"),
/// }
/// ```
///
/// # Errors
/// Why CUDA cannot be used here.
pub fn devices() -> std::result::Result<Vec<DeviceInfo>, Unavailable> {
    let driver = Driver::get()?;
    let failed = |error: DriverError| Unavailable::new(error.to_string(), "check that nvidia-smi works");
    (0..count(driver).map_err(failed)?)
        .map(|ordinal| describe(driver, ordinal, handle(driver, ordinal)?))
        .collect::<std::result::Result<_, DriverError>>()
        .map_err(failed)
}

/// The device whose memory an address is in; [`DeviceId::Cpu`] for all that CUDA does not know, or knows as memory of
/// the host.
pub fn device_of(address: u64) -> DeviceId {
    // Without a driver there is no memory of devices.
    let Ok(driver) = Driver::get() else { return DeviceId::Cpu };
    let (mut memory_type, mut ordinal): (c_uint, c_int) = (0, 0);
    // SAFETY: writes one integer. Any address may be asked about.
    let code = unsafe {
        (driver.functions.pointer_attribute)(
            (&raw mut memory_type).cast(),
            driver::POINTER_MEMORY_TYPE,
            address,
        )
    };
    if code != driver::SUCCESS || memory_type != driver::MEMORY_DEVICE {
        return DeviceId::Cpu;
    }
    // SAFETY: writes one integer.
    let code = unsafe {
        (driver.functions.pointer_attribute)(
            (&raw mut ordinal).cast(),
            driver::POINTER_DEVICE_ORDINAL,
            address,
        )
    };
    match u32::try_from(ordinal) {
        Ok(ordinal) if code == driver::SUCCESS => DeviceId::Cuda(ordinal),
        _ => DeviceId::Cpu,
    }
}

impl Device {
    /// The device of this number, its primary context retained.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if there is no driver or no such device; [`Error::Device`] if it does not start.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        static OPEN: Mutex<Option<HashMap<u32, Weak<Device>>>> = Mutex::new(None);
        let unavailable = |why| Error::DeviceUnavailable { device: format!("cuda:{ordinal}"), why };
        let driver = Driver::get().map_err(unavailable)?;
        // Kept consistent by every statement, so a panic elsewhere does not spoil it.
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        if let Some(device) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Arc::new(Self::start(driver, ordinal).map_err(|problem| match problem {
            Problem::Absent(count) => unavailable(Unavailable::new(
                match count {
                    0 => "the CUDA driver shows no device".to_owned(),
                    1 => "the CUDA driver shows one device, cuda:0".to_owned(),
                    _ => format!("the CUDA driver shows {count} devices, cuda:0 to cuda:{}", count - 1),
                },
                "choose another device, or check CUDA_VISIBLE_DEVICES",
            )),
            Problem::Driver(error) => device_error(ordinal, "starting the device", error),
        })?);
        open.insert(ordinal, Arc::downgrade(&device));
        Ok(device)
    }

    fn start(driver: &'static Driver, ordinal: u32) -> std::result::Result<Self, Problem> {
        let count = count(driver)?;
        if ordinal >= count {
            return Err(Problem::Absent(count));
        }
        let handle = handle(driver, ordinal)?;
        let info = describe(driver, ordinal, handle)?;
        let uuid = uuid(driver, handle)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle. No flags are set: they would be those of frameworks too.
        let code = unsafe { (driver.functions.primary_context_retain)(&mut context, handle) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Self { driver, handle, context, info, uuid, kernels: OnceLock::new(), loading: Mutex::new(()) })
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Its name in options, reports and messages.
    pub fn name(&self) -> String {
        format!("cuda:{}", self.info.ordinal)
    }

    /// Its UUID, as cuFile's statistics name it.
    pub fn uuid(&self) -> &[u8; 16] {
        &self.uuid
    }

    /// Bytes of its memory that nobody has, and that it has in all.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn memory(&self) -> Result<(u64, u64)> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers; the context is current.
        let code = unsafe { (self.driver.functions.memory_info)(&mut free, &mut total) };
        self.check("asking for its memory", "cuMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }

    /// The error of an operation that needs more of its memory than there is.
    pub fn too_little_memory(&self, needed: u64, available: u64) -> Error {
        Error::OutOfMemory { device: self.name(), needed, available }
    }

    /// Whether tensors in host memory are the device's as they are: it has no memory of its own to copy them to.
    pub fn shares_host_memory(&self) -> bool {
        self.info.is_integrated && self.info.reads_pageable_memory
    }

    /// Waits for all work on the device, whoever's. `false` if nobody knows whether it has ended.
    pub fn wait_for_all(&self) -> bool {
        // A child of fork has a copy of what the device works on.
        let Ok(_entered) = self.enter() else { return true };
        // SAFETY: the context is current.
        let code = unsafe { (self.driver.functions.context_synchronize)() };
        code == driver::SUCCESS || driver::ends_context(code)
    }

    /// Retains the context to the end of the process.
    fn keep_context(&self) -> Result<()> {
        static KEPT: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.contains(&self.info.ordinal) {
            return Ok(());
        }
        let mut context = std::ptr::null_mut();
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

    fn check(&self, operation: &'static str, function: &'static str, code: driver::ResultCode) -> Result<()> {
        let checked = self.driver.check(function, code);
        checked.map_err(|error| device_error(self.info.ordinal, operation, error))
    }
}

impl Drop for Device {
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

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("info", &self.info).finish_non_exhaustive()
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
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed by `enter` on this thread, and guards are dropped in the opposite order.
        unsafe { (self.driver.functions.context_pop)(&mut popped) };
    }
}

/// Why a device cannot be opened.
enum Problem {
    /// There are only so many.
    Absent(u32),
    Driver(DriverError),
}

impl From<DriverError> for Problem {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

fn device_error(ordinal: u32, operation: &'static str, source: DriverError) -> Error {
    Error::Device { device: format!("cuda:{ordinal}"), operation, source }
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
