//! What devices take long to let go of, and is let go on threads of its own.
#![allow(unsafe_code)]

use std::{
    process,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

/// How long anybody waits for it: a device that hangs lets nothing go.
const PATIENCE: Duration = Duration::from_secs(10);

/// The threads of this process that let something go.
struct Leaving {
    threads: usize,
    /// Whether the end of the process waits for them.
    is_awaited: bool,
}

static LEAVING: Mutex<Leaving> = Mutex::new(Leaving { threads: 0, is_awaited: false });
static ENDED: Condvar = Condvar::new();
/// The process that they are in. A child of `fork` has none of them, and perhaps a lock that nobody opens.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn leaving() -> MutexGuard<'static, Leaving> {
    LEAVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One of the threads.
struct Thread;

impl Drop for Thread {
    fn drop(&mut self) {
        leaving().threads -= 1;
        ENDED.notify_all();
    }
}

/// Drops it on a thread; on this one if there is none to be had.
pub(crate) fn drop_aside(what: impl Send + 'static) {
    let own = process::id();
    match PROCESS.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire) {
        // A child of `fork` has nothing of a device's to let go.
        Err(parent) if parent != own => return drop(what),
        _ => {}
    }
    let mut state = leaving();
    state.threads += 1;
    if !state.is_awaited {
        // The driver's own end must not come first. A refusal leaves that to luck.
        // SAFETY: the function has this signature, and is a part of a library that is never unloaded.
        state.is_awaited = unsafe { atexit(wait_at_exit) } == 0;
    }
    drop(state);
    let running = Thread;
    let work = move || {
        drop(what);
        drop(running);
    };
    // One that is not started drops what it was to drop.
    drop(thread::Builder::new().name("hoistway-unpin".into()).spawn(work));
}

/// Waits until all of it is gone, or takes too long.
pub(crate) fn wait() {
    if PROCESS.load(Ordering::Acquire) == process::id() {
        let state = leaving();
        drop(ENDED.wait_timeout_while(state, PATIENCE, |state| state.threads > 0));
    }
}

unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
}

extern "C" fn wait_at_exit() {
    wait();
}
