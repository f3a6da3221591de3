//! Devices of a driver: how they are found and described, their contexts, which are current only during a call, and
//! their memory.
#![allow(unsafe_code)]

use super::{
    Driver, Failed, Mapping, Relaxed, Vendor,
    kernels::KernelsOnce,
    stream::{self, DriverStream},
    table::{
        DeviceHandle, DevicePointer, Function, HOST_MEMORY_NOT_REGISTERED, HOST_REGISTER_PORTABLE,
        HOST_REGISTER_READ_ONLY, Handle, INVALID_CONTEXT, NOT_READY, NOT_SUPPORTED, OUT_OF_MEMORY,
        ResultCode, SUCCESS, is_not_now,
    },
};
use crate::{
    DeviceInfo, DriverError, Error, Fate, Finding, Result, Unavailable, aside,
    backend::{Backend, Direct, Event, External, Kind, Opened, Stream, Virtual},
};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt, io, ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// How many fences a device keeps. More than one, since another user of the device may take the memory of the last before it
/// is allocated again.
const FENCES: usize = 4;
/// How many events a device keeps: more than are used at once by a load.
const SPARE_EVENTS: usize = 128;

/// A device with its context, if its driver has such, which frameworks use too. The context is retained as long as a
/// value of this type lives, and never made current beyond a call.
pub(crate) struct DriverDevice<V: Vendor> {
    pub(crate) driver: &'static Driver<V>,
    pub(crate) handle: DeviceHandle,
    context: Handle,
    /// What tells it from a context that is made in its place, with the same handle, once the program has reset the device. `None`
    /// if the driver did not say when it was opened.
    context_id: Option<u64>,
    pub(crate) info: DeviceInfo,
    pub(crate) uuid: [u8; 16],
    pub(crate) mapping: Option<Mapping>,
    pub(super) kernels: KernelsOnce,
    /// Whether the driver has refused to queue several copies by one call.
    pub(super) has_no_batches: AtomicBool,
    /// Whether a call said that the device does nothing more.
    is_lost: AtomicBool,
    /// Memory whose release shows that all work has ended. It is there from the opening on: a device that is full has none when
    /// it is needed. Locked during a wait.
    fences: Mutex<Vec<DevicePointer>>,
    /// Events that nothing uses. To make and destroy one waits for other calls of the driver, long ones too.
    spare_events: Mutex<Vec<Handle>>,
}

// SAFETY: the driver's functions may be called from any thread; the handles are not changed after they were made.
unsafe impl<V: Vendor> Send for DriverDevice<V> {}
// SAFETY: as above.
unsafe impl<V: Vendor> Sync for DriverDevice<V> {}

impl<V: Vendor> Kind for V {
    fn check(&self) -> Result<(), Unavailable> {
        Driver::<V>::get().map(drop)
    }

    fn is_in_process(&self) -> bool {
        Driver::<V>::is_in_process()
    }

    fn is_started(&self) -> bool {
        V::slot().get().is_some_and(|made| made.as_ref().is_ok_and(Driver::is_usable))
    }

    fn opened(&self) -> &'static Opened {
        V::opened()
    }

    fn open(&self, ordinal: u32) -> Result<Arc<dyn Backend>> {
        let unavailable = |why| Error::DeviceUnavailable { device: V::id(ordinal).to_string(), why };
        let driver = Driver::<V>::get().map_err(unavailable)?;
        let device = DriverDevice::start(driver, ordinal).map_err(|problem| match problem {
            Problem::Absent(count) => unavailable(absent::<V>(count)),
            Problem::Driver(error) => device_error::<V>(ordinal, "starting the device", error),
        })?;
        device.keep_fences(&mut device.fences())?;
        Ok(Arc::new(device))
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable> {
        let driver = Driver::<V>::get()?;
        let _relaxed = driver.relax();
        let failed = |error: DriverError| Unavailable::new(error.to_string(), V::WORDS.check);
        (0..count(driver).map_err(failed)?)
            .map(|ordinal| describe(driver, ordinal, handle(driver, ordinal)?))
            .collect::<Result<_, DriverError>>()
            .map_err(failed)
    }

    fn owner_of(&self, address: u64) -> Result<Option<u32>> {
        const ASKING: &str = "asking whose memory an address is in";
        // Without the library there is no memory of its devices, and to look for that is no reason to load it. A child of
        // fork has copies of the host's memory alone.
        if !self.is_in_process() {
            return Ok(None);
        }
        let Ok(driver) = Driver::<V>::get() else { return Ok(None) };
        let _relaxed = driver.relax();
        let owner = match V::owner_of(driver, address) {
            // Some versions answer only where a context is current.
            Err((_, INVALID_CONTEXT)) => {
                let device = match DriverDevice::<V>::start(driver, 0) {
                    Ok(device) => device,
                    Err(Problem::Absent(_)) => return Ok(None),
                    Err(Problem::Driver(error)) => return Err(device_error::<V>(0, ASKING, error)),
                };
                let _entered = device.enter()?;
                V::owner_of(driver, address)
            }
            answer => answer,
        };
        owner.map_err(|failed| device_error::<V>(0, ASKING, driver.error(failed)))
    }

    fn may_have_direct_path(&self) -> Result<(), Unavailable> {
        V::may_have_direct_path()
    }

    fn examine(&self) -> Vec<Finding> {
        V::examine(self.devices().map(|devices| devices.len()))
    }

    fn dlpack_types(&self) -> &'static [i32] {
        V::DLPACK_TYPES
    }
}

impl<V: Vendor> DriverDevice<V> {
    fn start(driver: &'static Driver<V>, ordinal: u32) -> Result<Self, Problem> {
        let _relaxed = driver.relax();
        let count = count(driver)?;
        if ordinal >= count {
            return Err(Problem::Absent(count));
        }
        let handle = handle(driver, ordinal)?;
        let info = describe(driver, ordinal, handle)?;
        let uuid = uuid(driver, handle)?;
        let mapping = V::mapping(driver, handle);
        let context = V::retain(driver, handle).map_err(|failed| driver.error(failed))?;
        // Before anything is made in it: what belongs to a later context is not taken for a part of this.
        let context_id = match V::context_id(driver, context) {
            Err((_, NOT_SUPPORTED)) => None,
            // Without the number, nothing would tell a later context from this one as long as the device is open.
            Err(failed) => {
                V::release(driver, handle);
                return Err(driver.error(failed).into());
            }
            Ok(id) => id,
        };
        let (kernels, has_no_batches, is_lost, fences, spare_events) = Default::default();
        Ok(Self {
            driver,
            handle,
            context,
            context_id,
            info,
            uuid,
            mapping,
            kernels,
            has_no_batches,
            is_lost,
            fences,
            spare_events,
        })
    }

    /// Makes the device current on this thread until the result is dropped; what was current comes back then.
    pub(crate) fn enter(&self) -> Result<Entered<V>> {
        if !self.driver.is_usable() {
            return Err(Error::Forked);
        }
        let relaxed = self.driver.relax();
        let before =
            V::enter(self.driver, self.handle, self.context).map_err(|failed| self.cannot_enter(failed))?;
        let entered = Entered { before, relaxed };
        if self.context_id.is_some() {
            // In another context under this handle, addresses, events and streams of this one mean nothing, or something of the
            // program's. So nothing is done where the driver does not say which it is.
            let now = V::context_id(self.driver, self.context).map_err(|failed| self.cannot_enter(failed))?;
            if now != self.context_id {
                return Err(self.cannot_enter(("cuCtxGetId", INVALID_CONTEXT)));
            }
        }
        Ok(entered)
    }

    fn cannot_enter(&self, failed: Failed) -> Error {
        const OPERATION: &str = "entering its context";
        if failed.1 != INVALID_CONTEXT {
            return self.error(OPERATION, failed);
        }
        // The program has reset the device, which ends its work and frees its memory.
        self.is_lost.store(true, Ordering::Relaxed);
        let source = DriverError { ends_work: true, ..self.driver.error(failed) };
        device_error::<V>(self.info.ordinal, OPERATION, source)
    }

    /// As [`DriverDevice::enter`], to give something back. Asks twice: what is not given back stays as long as any part of the
    /// process uses the device.
    pub(crate) fn enter_to_give_back(&self) -> Result<Entered<V>> {
        self.enter().or_else(|_| self.enter())
    }

    /// Whether a later context is told from its own.
    pub(super) fn tells_contexts_apart(&self) -> bool {
        self.context_id.is_some()
    }

    /// Allocates memory by a function of the driver.
    pub(super) fn allocate_by(
        &self,
        function: &'static str,
        len: u64,
        mut allocate: impl FnMut(&mut DevicePointer, usize) -> ResultCode,
    ) -> Result<u64> {
        let _entered = self.enter()?;
        let mut address = 0;
        let bytes = usize::try_from(len.max(1)).unwrap_or(usize::MAX);
        let code = self.driver.repeat(|| allocate(&mut address, bytes));
        self.check_memory("allocating memory", function, code, len)?;
        Ok(address)
    }

    /// As [`DriverDevice::check`], of a call that may find too little memory for `needed` bytes.
    pub(crate) fn check_memory(
        &self,
        operation: &'static str,
        function: &'static str,
        code: ResultCode,
        needed: u64,
    ) -> Result<()> {
        if code == OUT_OF_MEMORY {
            V::forget_error(self.driver);
            let (available, _) = self.memory().unwrap_or_default();
            return Err(Error::OutOfMemory { device: self.info.id.to_string(), needed, available });
        }
        self.check(operation, function, code)
    }

    /// Frees memory by a function of the driver.
    pub(super) fn free_by(
        &self,
        operation: &'static str,
        function: &'static str,
        free: impl FnMut() -> ResultCode,
    ) -> Fate {
        // A child of fork has nothing to free.
        Fate::of(self.enter_to_give_back().and_then(|_entered| self.call(operation, function, free)))
    }

    fn fences(&self) -> MutexGuard<'_, Vec<DevicePointer>> {
        self.fences.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates fences as far as they are missing and there is memory.
    fn keep_fences(&self, fences: &mut Vec<DevicePointer>) -> Result<()> {
        while fences.len() < FENCES {
            match self.allocate(1) {
                Ok(fence) => fences.push(fence),
                Err(Error::OutOfMemory { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// An event that nothing uses, if there is one.
    pub(super) fn spare_event(&self) -> Option<Handle> {
        self.spare_events.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// The spare events are gone.
    pub(super) fn forget_spare_events(&self) {
        self.spare_events.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Takes an event back that nothing uses any more. Destroys it if there are many.
    pub(super) fn give_event_back(&self, event: Handle) {
        // A child of fork has copies, and the lock may be held in its copy for ever.
        if !self.driver.is_usable() {
            return;
        }
        let mut spare = self.spare_events.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < SPARE_EVENTS {
            return spare.push(event);
        }
        drop(spare);
        if let Ok(_entered) = self.enter_to_give_back() {
            self.destroy_event(event);
        }
    }

    /// The caller has made the device current, and nothing uses the event.
    pub(super) fn destroy_event(&self, event: Handle) {
        // SAFETY: made once and destroyed once; the driver keeps what waits for it.
        let code = unsafe { (self.driver.functions.event_destroy.call)(event) };
        self.forget(code);
    }

    /// Whether an event is reached. The caller has made the device current.
    ///
    /// # Safety
    /// The event lives.
    pub(super) unsafe fn query(&self, event: Handle) -> Result<bool> {
        let query = &self.driver.functions.event_query;
        // SAFETY: passed on.
        let code = unsafe { (query.call)(event) };
        if code == NOT_READY || is_not_now(code) {
            V::forget_error(self.driver);
            return Ok(false);
        }
        self.check("asking whether an event is reached", query.name, code).map(|()| true)
    }

    /// Makes a call, and repeats it while the driver refuses it because of a capture.
    pub(crate) fn call(
        &self,
        operation: &'static str,
        function: &'static str,
        call: impl FnMut() -> ResultCode,
    ) -> Result<()> {
        self.check(operation, function, self.driver.repeat(call))
    }

    pub(crate) fn check(
        &self,
        operation: &'static str,
        function: &'static str,
        code: ResultCode,
    ) -> Result<()> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(operation, (function, code))) }
    }

    pub(crate) fn error(&self, operation: &'static str, failed: Failed) -> Error {
        self.note(failed.1);
        device_error::<V>(self.info.ordinal, operation, self.driver.error(failed))
    }
}

impl<V: Vendor> Backend for DriverDevice<V> {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    fn memory(&self) -> Result<(u64, u64)> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        let ask = &self.driver.functions.memory_info;
        // SAFETY: writes two numbers; the device is current.
        self.call("asking for its free memory", ask.name, || unsafe { (ask.call)(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Other devices, processes and network cards can be given it, which they cannot memory of a stream-ordered pool.
    fn allocate(&self, len: u64) -> Result<u64> {
        let allocate = &self.driver.functions.allocate;
        self.allocate_by(allocate.name, len, |address, bytes| {
            // SAFETY: writes one address; the device is current.
            unsafe { (allocate.call)(address, bytes) }
        })
    }

    unsafe fn free(&self, address: u64, _len: u64) -> Fate {
        let free = &self.driver.functions.free;
        // SAFETY: allocated on this device and freed once. The call waits for work that uses it.
        self.free_by("freeing memory", free.name, || unsafe { (free.call)(address) })
    }

    unsafe fn pin(&self, memory: *mut u8, len: usize, is_read_only: bool) -> Result<()> {
        let _entered = self.enter()?;
        let register = &self.driver.functions.host_register;
        let flags = HOST_REGISTER_PORTABLE | if is_read_only { HOST_REGISTER_READ_ONLY } else { 0 };
        // SAFETY: the caller keeps the memory mapped; pinning changes none of its bytes.
        let code = self.driver.repeat(|| unsafe { (register.call)(memory.cast(), len, flags) });
        if V::cannot_pin(code) {
            V::forget_error(self.driver);
            let source = io::Error::from(io::ErrorKind::OutOfMemory);
            return Err(Error::Allocation { bytes: len as u64, kind: "pinned memory", source });
        }
        self.check("pinning host memory", register.name, code)
    }

    unsafe fn unpin(&self, memory: *mut u8) -> bool {
        let _entered = match self.enter_to_give_back() {
            Ok(entered) => entered,
            // A context that is gone took its pins with it. One that cannot be entered for another reason may live on.
            Err(error) => return !error.leaves_doubt(),
        };
        let unregister = || {
            // SAFETY: the caller has pinned it, and unpins it once.
            self.driver.repeat(|| unsafe { (self.driver.functions.host_unregister.call)(memory.cast()) })
        };
        let may_be_pinned = |code| {
            !matches!(code, SUCCESS | HOST_MEMORY_NOT_REGISTERED | INVALID_CONTEXT) && !V::ends_work(code)
        };
        let mut code = unregister();
        if may_be_pinned(code) && !is_not_now(code) {
            // Addresses that stay registered cannot be pinned again, whatever is mapped there then.
            self.forget(code);
            code = unregister();
        }
        self.forget(code);
        !may_be_pinned(code)
    }

    fn stream(self: Arc<Self>) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(DriverStream::new(self)?))
    }

    unsafe fn mark(self: Arc<Self>, stream: usize) -> Result<Box<dyn Event>> {
        // SAFETY: passed on.
        unsafe { stream::mark(&self, stream) }
    }

    /// To free memory waits for all work of the device, and goes with captures of others, which a wait for the context
    /// would invalidate.
    fn wait_for_all(&self) -> Fate {
        if !self.driver.is_usable() {
            return Fate::Failed(Error::Forked);
        }
        let mut fences = self.fences();
        let fence = match fences.pop().map_or_else(|| self.allocate(1), Ok) {
            Ok(fence) => fence,
            Err(error @ Error::OutOfMemory { .. }) => return Fate::Unknown(error),
            Err(error) => return Fate::of(Err(error)),
        };
        let _entered = match self.enter() {
            Ok(entered) => entered,
            Err(error) => {
                // It was not freed. The context may live on, as where a library keeps one that does not answer.
                fences.push(fence);
                return Fate::of(Err(error));
            }
        };
        let free = &self.driver.functions.free;
        // SAFETY: allocated, and freed once.
        let freed = self.call("waiting for its work", free.name, || unsafe { (free.call)(fence) });
        let fate = Fate::of(freed);
        match &fate {
            // If there is none now, the next wait looks for it.
            Fate::Done => _ = self.keep_fences(&mut fences),
            Fate::Failed(_) => {}
            Fate::Unknown(_) => fences.push(fence),
        }
        fate
    }

    unsafe fn is_event_reached(&self, event: u64) -> Result<bool> {
        let _entered = self.enter()?;
        // SAFETY: the caller's event lives.
        unsafe { self.query(ptr::with_exposed_provenance_mut::<c_void>(event as usize)) }
    }

    fn prepare_kernels(self: Arc<Self>) {
        if self.info.has_kernels && self.kernels.begin() {
            aside::run("hoistway-kernels", move || {
                // The first use tries again, and reports why it fails.
                if let Err(error) = self.enter().and_then(|_entered| self.kernels().map(drop)) {
                    tracing::debug!(device = %self.info.id, %error, "kernels were not loaded ahead");
                }
            });
        }
    }

    fn kernels_note(&self) -> Option<String> {
        self.kernels.note()
    }

    fn direct(&self) -> Result<&dyn Direct, Unavailable> {
        V::direct(self)
    }

    fn external(&self) -> Result<&dyn External, Unavailable> {
        V::external(self)
    }

    fn virtual_memory(&self) -> Result<&dyn Virtual, Unavailable> {
        V::virtual_memory(self)
    }
}

impl<V: Vendor> DriverDevice<V> {
    fn note(&self, code: ResultCode) {
        if V::ends_work(code) {
            self.is_lost.store(true, Ordering::Relaxed);
        }
    }

    /// Takes back what the driver notes of a failed call that is not reported.
    pub(crate) fn forget(&self, code: ResultCode) {
        self.note(code);
        if code != SUCCESS {
            V::forget_error(self.driver);
        }
    }
}

impl<V: Vendor> Drop for DriverDevice<V> {
    fn drop(&mut self) {
        // A child of fork has no context to release.
        if !self.driver.is_usable() {
            return;
        }
        let fences = std::mem::take(&mut *self.fences());
        let free = &self.driver.functions.free;
        for fence in fences {
            // SAFETY: allocated, and freed once. If it fails, the end of the context frees it.
            _ = self.free_by("closing it", free.name, || unsafe { (free.call)(fence) });
        }
        if let Ok(_entered) = self.enter_to_give_back() {
            while let Some(event) = self.spare_event() {
                self.destroy_event(event);
            }
            if let Some(kernels) = self.kernels.take() {
                kernels.unload(self);
            }
        }
        let _relaxed = self.driver.relax();
        // Retained once, released once; everything made in it holds this device.
        V::release(self.driver, self.handle);
    }
}

impl<V: Vendor> fmt::Debug for DriverDevice<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverDevice").field("info", &self.info).finish_non_exhaustive()
    }
}

/// A device that is current on this thread.
pub(crate) struct Entered<V: Vendor> {
    before: DeviceHandle,
    /// Of the same thread, as devices are current on a thread. Dropped after the device is left.
    relaxed: Relaxed<V>,
}

impl<V: Vendor> Drop for Entered<V> {
    fn drop(&mut self) {
        // Entered on this thread, and guards are dropped in the opposite order.
        V::leave(self.relaxed.driver, self.before);
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

/// Why there is no device of a number: the driver shows only so many.
fn absent<V: Vendor>(count: u32) -> Unavailable {
    let (name, first) = (V::WORDS.name, V::id(0));
    Unavailable::new(
        match count {
            0 => format!("the {name} driver shows no device"),
            1 => format!("the {name} driver shows one device, {first}"),
            _ => format!("the {name} driver shows {count} devices, {first} to {}", V::id(count - 1)),
        },
        format!("choose another device, or check {}", V::WORDS.visible),
    )
}

fn device_error<V: Vendor>(ordinal: u32, operation: &'static str, source: DriverError) -> Error {
    Error::Device { device: V::id(ordinal).to_string(), operation, source }
}

fn count<V: Vendor>(driver: &Driver<V>) -> Result<u32, DriverError> {
    let (mut count, ask) = (0, &driver.functions.device_count);
    // SAFETY: writes one integer.
    driver.check(ask.name, unsafe { (ask.call)(&mut count) })?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn handle<V: Vendor>(driver: &Driver<V>, ordinal: u32) -> Result<DeviceHandle, DriverError> {
    let (mut handle, ask) = (0, &driver.functions.device);
    // SAFETY: writes one integer.
    let code = unsafe { (ask.call)(&mut handle, c_int::try_from(ordinal).unwrap_or(c_int::MAX)) };
    driver.check(ask.name, code)?;
    Ok(handle)
}

fn describe<V: Vendor>(
    driver: &Driver<V>,
    ordinal: u32,
    handle: DeviceHandle,
) -> Result<DeviceInfo, DriverError> {
    let functions = &driver.functions;
    let name = text(driver, &functions.device_name, handle)?;
    let pci = text(driver, &functions.device_pci, handle)?.to_ascii_lowercase();
    let mut memory = 0;
    let ask = &functions.device_memory;
    // SAFETY: writes one number.
    driver.check(ask.name, unsafe { (ask.call)(&mut memory, handle) })?;
    let own = V::describe(driver, handle).map_err(|failed| driver.error(failed))?;
    Ok(DeviceInfo {
        id: V::id(ordinal),
        ordinal,
        name,
        memory_bytes: memory as u64,
        numa_node: numa_node_of(&pci),
        pci,
        uuid: uuid(driver, handle)?.iter().map(|byte| format!("{byte:02x}")).collect(),
        luid: own.luid,
        has_kernels: !V::kernels(&own.architecture).is_empty(),
        architecture: own.architecture,
        is_integrated: own.is_integrated,
        reads_pageable_memory: own.reads_pageable_memory,
        has_memory_pools: own.has_memory_pools,
        has_gpudirect_rdma: own.has_gpudirect_rdma,
        pins_read_only: own.pins_read_only,
        uses_host_page_tables: own.uses_host_page_tables,
    })
}

/// The NUMA node of the device at this address of the PCI bus, if the system says.
fn numa_node_of(pci: &str) -> Option<u32> {
    let path = crate::sysfs().join("bus/pci/devices").join(pci).join("numa_node");
    // -1 stands for none.
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn uuid<V: Vendor>(driver: &Driver<V>, handle: DeviceHandle) -> Result<[u8; 16], DriverError> {
    let (mut uuid, ask) = ([0; 16], &driver.functions.device_uuid);
    // SAFETY: writes 16 bytes.
    driver.check(ask.name, unsafe { (ask.call)(&mut uuid, handle) })?;
    Ok(uuid)
}

/// A function that writes a text about a device.
type Describer = Function<unsafe extern "C" fn(*mut c_char, c_int, DeviceHandle) -> ResultCode>;

fn text<V: Vendor>(
    driver: &Driver<V>,
    function: &Describer,
    handle: DeviceHandle,
) -> Result<String, DriverError> {
    const ROOM: usize = 256;
    let mut buffer = [0u8; ROOM];
    // SAFETY: writes no more than it is told to. One byte stays zero, whatever it writes.
    let code = unsafe { (function.call)(buffer.as_mut_ptr().cast(), ROOM as c_int - 1, handle) };
    driver.check(function.name, code)?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}
