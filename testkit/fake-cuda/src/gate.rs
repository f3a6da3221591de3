//! What every call of the driver goes through: forks, faults, and whether there is a context.

use crate::{
    control::{control, counters},
    execution::{
        context::{self, Context},
        operation::in_host_function,
    },
    status::{Code, NOT_INITIALIZED, NOT_PERMITTED, SUCCESS, is_sticky},
};
use std::sync::{
    Arc,
    atomic::{AtomicI32, Ordering},
};

/// The process that initialized the driver, or 0.
static PROCESS: AtomicI32 = AtomicI32::new(0);

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

/// Lets this process, and no child of it, use the driver.
pub(crate) fn open() {
    PROCESS.store(pid(), Ordering::SeqCst);
}

/// Whether this is a child of the process that initialized the driver. There, locks may be held for ever by
/// threads that don't exist.
pub(crate) fn is_forked() -> bool {
    let process = PROCESS.load(Ordering::SeqCst);
    process != 0 && process != pid()
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
    match control().faults.strike(name) {
        None => Ok(()),
        Some(code) => {
            if is_sticky(code)
                && let Ok(context) = context::current()
            {
                context.owner.fail(code);
            }
            Err(code)
        }
    }
}

fn admit_initialized(name: &'static str) -> Result<(), Code> {
    admit(name)?;
    if PROCESS.load(Ordering::SeqCst) == 0 { Err(NOT_INITIALIZED) } else { Ok(()) }
}

fn code(result: Result<(), Code>) -> Code {
    result.err().unwrap_or(SUCCESS)
}

fn pid() -> libc::pid_t {
    // SAFETY: asks for a number.
    unsafe { libc::getpid() }
}
