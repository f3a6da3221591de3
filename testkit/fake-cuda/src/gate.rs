//! What every call of the driver goes through: forks, faults, and whether there is a context.

use crate::{
    control::{control, counters, settings},
    execution::{
        capture,
        context::{self, Context},
        operation::in_host_function,
    },
    interpreter,
    memory::host::Driver,
    status::{Code, INVALID_CONTEXT, NOT_INITIALIZED, NOT_PERMITTED, SUCCESS, ends_work},
};
use std::{
    cell::Cell,
    process,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

/// The process that initialized the driver, or 0.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Where a fault says that there is no context any more, and so no work of it.
const ENTERING: [&str; 3] = ["cuCtxPushCurrent_v2", "hipGetDevice", "hipSetDevice"];

/// A call that needs nothing.
pub(crate) fn anyone(name: &'static str, body: impl FnOnce() -> Result<(), Code>) -> Code {
    code(admit(name).and_then(|()| body()))
}

/// A call that needs an initialized driver.
pub(crate) fn initialized(name: &'static str, body: impl FnOnce() -> Result<(), Code>) -> Code {
    code(admit_initialized(name).and_then(|()| body()))
}

/// A call that needs a context that is usable.
pub(crate) fn in_context(name: &'static str, body: impl FnOnce(&Arc<Context>) -> Result<(), Code>) -> Code {
    code(admit_initialized(name).and_then(|()| {
        let context = context::current()?;
        context.owner.health()?;
        body(&context)
    }))
}

/// A call that needs a context, and is of use even if that is unusable: it ends something, and then reports
/// the context's error.
pub(crate) fn ending(name: &'static str, body: impl FnOnce(&Arc<Context>) -> Result<(), Code>) -> Code {
    code(admit_initialized(name).and_then(|()| {
        let context = context::current()?;
        body(&context)?;
        context.owner.health()
    }))
}

thread_local! {
    /// The calling thread's device of HIP's, and its last error.
    static HIP: (Cell<usize>, Cell<Code>) = const { (Cell::new(0), Cell::new(SUCCESS)) };
}

/// A call of HIP's that needs nothing of a device. Its error is the thread's last.
pub(crate) fn hip(name: &'static str, body: impl FnOnce() -> Result<(), Code>) -> Code {
    let code = code(admit_initialized(name).and_then(|()| body()));
    if code != SUCCESS {
        HIP.with(|(_, last)| last.set(code));
    }
    code
}

/// A call of HIP's that needs a device that is usable: the thread's.
pub(crate) fn on_hip_device(
    name: &'static str,
    body: impl FnOnce(&Arc<Context>) -> Result<(), Code>,
) -> Code {
    hip(name, || {
        let context = context::of_hip(hip_device())?;
        context.owner.health()?;
        body(&context)
    })
}

/// A call of HIP's that is of use even if the device is unusable, as [`ending`].
pub(crate) fn ending_on_hip_device(
    name: &'static str,
    body: impl FnOnce(&Arc<Context>) -> Result<(), Code>,
) -> Code {
    hip(name, || {
        let context = context::of_hip(hip_device())?;
        body(&context)?;
        context.owner.health()
    })
}

/// The calling thread's device of HIP's.
pub(crate) fn hip_device() -> usize {
    HIP.with(|(device, _)| device.get())
}

pub(crate) fn set_hip_device(ordinal: usize) {
    HIP.with(|(device, _)| device.set(ordinal));
}

/// The last error of the calling thread's calls of HIP, which this takes back.
pub(crate) fn take_hip_error() -> Code {
    HIP.with(|(_, last)| last.replace(SUCCESS))
}

/// Lets this process, and no child of it, use the driver.
pub(crate) fn open() {
    PROCESS.store(process::id(), Ordering::SeqCst);
}

/// Whether this is a child of the process that initialized the driver. There, locks may be held for ever by
/// threads that don't exist.
pub(crate) fn is_forked() -> bool {
    let opened_by = PROCESS.load(Ordering::SeqCst);
    opened_by != 0 && opened_by != process::id()
}

/// Counts a call and says whether it may go on.
pub(crate) fn admit(name: &'static str) -> Result<(), Code> {
    if is_forked() {
        return Err(NOT_INITIALIZED);
    }
    if in_host_function() {
        return Err(NOT_PERMITTED);
    }
    counters::called(name);
    if interpreter::is_held() {
        counters::called_under_interpreter(name);
    }
    while settings().blocks == name {
        thread::sleep(Duration::from_millis(1));
    }
    match control().faults.strike(name) {
        None => Ok(()),
        Some(code) => {
            let driver = if name.starts_with("hip") { Driver::Hip } else { Driver::Cuda };
            let context = match driver {
                Driver::Hip => context::of_hip(hip_device()),
                Driver::Cuda => context::current(),
            };
            if code == INVALID_CONTEXT && ENTERING.contains(&name) {
                context::end_work_of(driver);
            }
            if ends_work(driver, code)
                && let Ok(context) = context
            {
                context.owner.fail(code);
                context.owner.end_work();
            }
            Err(code)
        }
    }
}

fn admit_initialized(name: &'static str) -> Result<(), Code> {
    admit(name)?;
    if PROCESS.load(Ordering::SeqCst) == 0 {
        return Err(NOT_INITIALIZED);
    }
    if capture::is_unsafe(name) { capture::check_unsafe() } else { Ok(()) }
}

fn code(result: Result<(), Code>) -> Code {
    result.err().unwrap_or(SUCCESS)
}
