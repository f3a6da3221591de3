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

/// The longest wait for these threads: on a device that hangs, none of them ends.
const PATIENCE: Duration = Duration::from_secs(10);

/// The threads of this process that let something go.
struct Leaving {
    threads: usize,
    /// Whether the end of the process waits for them.
    is_awaited: bool,
}

static LEAVING: Mutex<Leaving> = Mutex::new(Leaving { threads: 0, is_awaited: false });
static ENDED: Condvar = Condvar::new();
/// The process that the threads are in. A child of `fork` has none of them, and the lock may be held in its copy for ever.
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

/// Drops it on a thread of its own; on this one if the system gives no other.
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
        // The end of the driver's library must not come first. On Windows the threads are gone by then, and nothing is waited for.
        // SAFETY: the function has this signature. The system calls it when the process ends, or before it unloads the library that
        // the function is in.
        state.is_awaited = cfg!(windows) || unsafe { atexit(wait_at_exit) } == 0;
    }
    drop(state);
    let running = Thread;
    let work = move || {
        drop(what);
        drop(running);
    };
    // A thread that cannot be started drops its closure, and `what` with it, here.
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
