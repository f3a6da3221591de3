//! Devices that a vendor's driver serves, whichever vendor's: drivers mirror each other, so that one implementation is
//! enough. What a vendor has of its own is in its module, behind [`Vendor`].
//!
//! `library` finds libraries, `table` is the functions that drivers have in common; this file has the driver of a vendor,
//! `device` its devices and their memory; `stream` is what fills them, `kernels` what runs on them, from `images`.
#![allow(unsafe_code)]

pub(crate) mod device;
pub(crate) mod images;
mod kernels;
pub(crate) mod library;
mod stream;
pub(crate) mod table;

use crate::{
    DeviceId, DriverError, Finding, Unavailable,
    backend::{Direct, External, Opened, Virtual, no_external, no_virtual_memory},
    fork::Once,
};
use device::DriverDevice;
use images::Image;
use libloading::Library;
use std::{
    ffi::{CStr, OsString, c_char, c_int},
    fmt,
    marker::PhantomData,
    thread,
    time::{Duration, Instant},
};
use table::{
    Batch, CAPTURE_RELAXED, DeviceHandle, Functions, Handle, OUT_OF_MEMORY, ResultCode, SUCCESS, Symbols,
    is_not_now,
};

/// Where a vendor's driver is kept once it was looked for.
pub(crate) type Slot<V> = Once<Result<Driver<V>, Unavailable>>;

/// How long a call is repeated that the driver refuses because of a capture.
const NOT_NOW_LIMIT: Duration = Duration::from_secs(10);
/// Time between two such calls.
const NOT_NOW_PAUSE: Duration = Duration::from_millis(1);

/// What messages say of a vendor's driver.
pub(crate) struct Words {
    /// What devices are called by: the driver of `…`, `…` was started.
    pub(crate) name: &'static str,
    /// Where the driver is missing.
    pub(crate) install: &'static str,
    /// Where the driver is too old.
    pub(crate) update: &'static str,
    /// What to check where it does not work.
    pub(crate) check: &'static str,
    /// The environment variable that hides devices.
    pub(crate) visible: &'static str,
}

/// What a device can do, as far as only the vendor's own functions say.
#[derive(Default)]
pub(crate) struct Traits {
    /// See the fields of [`DeviceInfo`](crate::DeviceInfo) of the same names.
    pub(crate) architecture: String,
    pub(crate) luid: Option<[u8; 8]>,
    pub(crate) is_integrated: bool,
    pub(crate) reads_pageable_memory: bool,
    pub(crate) has_memory_pools: bool,
    pub(crate) has_gpudirect_rdma: bool,
    pub(crate) pins_read_only: bool,
    pub(crate) uses_host_page_tables: bool,
}

/// How memory of a device is mapped into address space. It is asked as the device is opened: a child of `fork` may ask nothing.
#[derive(Clone, Copy)]
pub(crate) struct Mapping {
    /// Whether files may be read to such memory directly.
    pub(crate) has_gpudirect_rdma: bool,
}

/// A call that failed: the function, and what it returned.
pub(crate) type Failed = (&'static str, ResultCode);

/// The vendor of a driver.
pub(crate) trait Vendor: fmt::Debug + Sized + Send + Sync + 'static {
    /// Functions that drivers of other vendors lack, or that differ.
    type Own: Send + Sync;

    /// The names of the common functions.
    const SYMBOLS: Symbols;
    /// What messages say of it.
    const WORDS: Words;
    /// The oldest version that serves.
    const OLDEST_VERSION: i32;
    /// Its devices in DLPack: first their own type, then those of memory that others allocate.
    const DLPACK_TYPES: &'static [i32];
    /// Whether work goes on whose stream was destroyed.
    const STREAMS_OUTLIVE_HANDLES: bool;

    /// The name of a device.
    fn id(ordinal: u32) -> DeviceId;

    /// The one driver of the process.
    fn slot() -> &'static Slot<Self>;

    /// Its devices that were opened.
    fn opened() -> &'static Opened;

    /// Where to look for the driver's library, best first.
    fn library_names() -> Vec<OsString>;

    /// Its own functions, or the name of one that the library lacks.
    fn find(library: &Library) -> Result<Self::Own, &'static str>;

    /// A version in its usual form, with the name of what it is a version of.
    fn version_text(version: i32) -> String;

    /// What to do where the driver does not start.
    fn fix(code: ResultCode) -> &'static str;

    /// Whether after this error a device does nothing more, so that no work of it is in flight.
    fn ends_work(code: ResultCode) -> bool;

    /// Whether this result of pinning says that the memory cannot be pinned.
    fn cannot_pin(code: ResultCode) -> bool {
        code == OUT_OF_MEMORY
    }

    /// Takes back what the driver notes of a failed call for the thread's next question.
    fn forget_error(_driver: &Driver<Self>) {}

    /// Describes a device.
    fn describe(driver: &Driver<Self>, handle: DeviceHandle) -> Result<Traits, Failed>;

    /// How memory of a device is mapped into address space; `None` if it is not.
    fn mapping(_driver: &Driver<Self>, _handle: DeviceHandle) -> Option<Mapping> {
        None
    }

    /// The images of the kernels for a device of this architecture, best first; none if it has no kernels.
    fn kernels(architecture: &str) -> Vec<Image>;

    /// Begins to use a device, and returns its context, if the vendor has contexts.
    fn retain(driver: &Driver<Self>, handle: DeviceHandle) -> Result<Handle, Failed>;

    /// Ends what `retain` began.
    fn release(driver: &Driver<Self>, handle: DeviceHandle);

    /// Makes a device current on this thread, and returns what [`Vendor::leave`] needs to undo that.
    fn enter(driver: &Driver<Self>, handle: DeviceHandle, context: Handle) -> Result<DeviceHandle, Failed>;

    /// A number that no other context of the process has or had, although they may have one handle. `None` if the driver numbers
    /// none.
    fn context_id(_driver: &Driver<Self>, _context: Handle) -> Result<Option<u64>, Failed> {
        Ok(None)
    }

    /// Makes current what was before.
    fn leave(driver: &Driver<Self>, before: DeviceHandle);

    /// Queues copies on a stream of the current device by one call, in no order with each other, and returns the name of the call and
    /// its result. `None` if the driver has no such call.
    ///
    /// # Safety
    /// That of [`Stream::queue`](crate::backend::Stream::queue), for copies of at least one byte each.
    unsafe fn copy_batch(
        _driver: &Driver<Self>,
        _stream: Handle,
        _batch: &mut Batch,
    ) -> Option<(&'static str, ResultCode)> {
        None
    }

    /// The number of the device whose memory an address is in.
    fn owner_of(driver: &Driver<Self>, address: u64) -> Result<Option<u32>, Failed>;

    /// Reads and writes of files past the host's memory.
    ///
    /// # Errors
    /// Why there are none.
    fn direct(device: &DriverDevice<Self>) -> Result<&dyn Direct, Unavailable>;

    /// What other interfaces to a device have made.
    ///
    /// # Errors
    /// Why it imports none.
    fn external(_device: &DriverDevice<Self>) -> Result<&dyn External, Unavailable> {
        Err(no_external())
    }

    /// The address space of a device.
    ///
    /// # Errors
    /// Why memory cannot be mapped into it.
    fn virtual_memory(_device: &DriverDevice<Self>) -> Result<&dyn Virtual, Unavailable> {
        Err(no_virtual_memory())
    }

    /// Checks whether this machine may have a direct path from files to devices. Opens no library.
    ///
    /// # Errors
    /// What is missing.
    fn may_have_direct_path() -> Result<(), Unavailable>;

    /// Looks at what its devices need of the machine; `devices` says whether they can be listed.
    fn examine(devices: Result<usize, Unavailable>) -> Vec<Finding>;
}

/// While it lives, this thread's calls are no part of what others capture, and do not invalidate that.
pub(crate) struct Relaxed<V: Vendor> {
    driver: &'static Driver<V>,
    before: c_int,
    /// The mode is a thread's, so this must be dropped on the same.
    _this_thread: PhantomData<*const ()>,
}

impl<V: Vendor> Drop for Relaxed<V> {
    fn drop(&mut self) {
        self.driver.exchange_capture_mode(&mut self.before);
    }
}

/// Why a library that was opened does not serve.
enum Refusal {
    /// It is too old or incomplete: another may serve.
    Unfit(String),
    /// The driver does not start, whichever library is asked.
    Fails(Unavailable),
}

/// The driver of this machine, initialised.
pub(crate) struct Driver<V: Vendor> {
    pub(crate) functions: Functions,
    pub(crate) own: V::Own,
    /// As the driver counts them.
    pub(crate) version: i32,
    /// The process that initialised it: no other may use it.
    process: u32,
}

impl<V: Vendor> Driver<V> {
    /// The driver, loaded at the first call.
    pub(crate) fn get() -> Result<&'static Self, Unavailable> {
        let forked = || {
            let name = V::WORDS.name;
            Unavailable::new(
                format!("{name} was started before fork(), and a child cannot go on using it"),
                format!("start workers with the method 'spawn', or load before anything else uses {name}"),
            )
        };
        let made = match V::slot().get_or_make(Self::load) {
            Ok(made) => made,
            // What a parent found missing is missing here too.
            Err(_) => V::slot().get().filter(|made| made.is_err()).ok_or_else(forked)?,
        };
        made.as_ref().map_err(Clone::clone)
    }

    /// Keeps this thread's calls out of what others capture, until the result is dropped.
    pub(crate) fn relax(&'static self) -> Relaxed<V> {
        let mut mode = CAPTURE_RELAXED;
        self.exchange_capture_mode(&mut mode);
        Relaxed { driver: self, before: mode, _this_thread: PhantomData }
    }

    fn exchange_capture_mode(&self, mode: &mut c_int) {
        if let Some(exchange) = &self.functions.exchange_capture_mode {
            // SAFETY: swaps this thread's mode with that in `mode`.
            unsafe { (exchange.call)(mode) };
        }
    }

    /// Repeats a call while the driver refuses it because of a capture, up to a limit.
    pub(crate) fn repeat(&self, mut call: impl FnMut() -> ResultCode) -> ResultCode {
        let mut deadline = None;
        loop {
            let code = call();
            if !is_not_now(code)
                || Instant::now() >= *deadline.get_or_insert_with(|| Instant::now() + NOT_NOW_LIMIT)
            {
                return code;
            }
            V::forget_error(self);
            thread::sleep(NOT_NOW_PAUSE);
        }
    }

    /// Whether this process may call the driver.
    pub(crate) fn is_usable(&self) -> bool {
        self.process == std::process::id()
    }

    /// Whether the driver serves, or its library is loaded for others of this process.
    fn is_in_process() -> bool {
        V::slot().get().is_some_and(Result::is_ok)
            || V::library_names().iter().any(|name| library::is_loaded(name))
    }

    /// The first that serves of the libraries that can be opened.
    fn load() -> Result<Self, Unavailable> {
        let name = V::WORDS.name;
        let (mut refused, mut absent) = (Vec::new(), Vec::new());
        for path in V::library_names() {
            let library = match library::open(&path) {
                Ok(library) => library,
                Err(error) => {
                    let reason = library::reason(&error);
                    // Windows does not name the library.
                    absent.push(if cfg!(windows) { format!("{}: {reason}", path.display()) } else { reason });
                    continue;
                }
            };
            match Self::start(&library) {
                Ok(driver) => {
                    // Unloading a driver that may have threads is asking for a crash.
                    std::mem::forget(library);
                    return Ok(driver);
                }
                Err(Refusal::Unfit(reason)) => {
                    refused.push(format!("{} {reason}", path.display()));
                    std::mem::forget(library);
                }
                Err(Refusal::Fails(why)) => {
                    std::mem::forget(library);
                    return Err(why);
                }
            }
        }
        if refused.is_empty() {
            let reason = format!("no {name} driver was found: {}", absent.join("; "));
            return Err(Unavailable::new(reason, V::WORDS.install));
        }
        let tried: Vec<String> = refused.into_iter().chain(absent).collect();
        Err(Unavailable::new(format!("the {name} driver {}", tried.join("; ")), V::WORDS.update))
    }

    /// Starts the driver of a library that stays loaded.
    fn start(library: &Library) -> Result<Self, Refusal> {
        let name = V::WORDS.name;
        let lacks = |symbol| Refusal::Unfit(format!("has no function {symbol}: it is too old, or a stub"));
        let functions = Functions::find(library, &V::SYMBOLS).map_err(lacks)?;
        let own = V::find(library).map_err(lacks)?;
        let mut driver = Self { functions, own, version: 0, process: std::process::id() };
        let starts = |checked: Result<(), DriverError>| {
            checked.map_err(|error| {
                let reason = format!("the {name} driver does not start: {error}");
                Refusal::Fails(Unavailable::new(reason, V::fix(error.code)))
            })
        };
        let init = &driver.functions.init;
        // SAFETY: no arguments but flags, which must be 0.
        starts(driver.check(init.name, unsafe { (init.call)(0) }))?;
        let mut version = 0;
        let ask = &driver.functions.driver_version;
        // SAFETY: writes one integer.
        starts(driver.check(ask.name, unsafe { (ask.call)(&mut version) }))?;
        driver.version = version;
        if version < V::OLDEST_VERSION {
            return Err(Refusal::Unfit(format!("serves {}", V::version_text(version))));
        }
        Ok(driver)
    }

    /// Turns a result of `function` into an error with the driver's own words.
    pub(crate) fn check(&self, function: &'static str, code: ResultCode) -> Result<(), DriverError> {
        if code == SUCCESS { Ok(()) } else { Err(self.error((function, code))) }
    }

    /// A failed call as an error with the driver's own words.
    pub(crate) fn error(&self, (function, code): Failed) -> DriverError {
        V::forget_error(self);
        let text = |get: unsafe extern "C" fn(ResultCode, *mut *const c_char) -> ResultCode| {
            let mut text = std::ptr::null();
            // SAFETY: writes a pointer to a static string, or null for codes that it does not know.
            unsafe {
                get(code, &mut text);
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        let name = text(self.functions.error_name.call).unwrap_or_else(|| format!("error {code}"));
        let description = text(self.functions.error_text.call).unwrap_or_default();
        DriverError { function, code, name, description, ends_work: V::ends_work(code) }
    }
}
