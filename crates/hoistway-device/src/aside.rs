//! Work for devices on threads of its own, which the end of the process waits for.
#![allow(unsafe_code)]

use std::{
    process,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// The longest wait for these threads: on a device that hangs, none of them ends.
const PATIENCE: Duration = Duration::from_secs(10);

/// The threads of this process that do such work.
struct Running {
    threads: usize,
    /// Whether the end of the process waits for them.
    is_awaited: bool,
}

static RUNNING: Mutex<Running> = Mutex::new(Running { threads: 0, is_awaited: false });
static ENDED: Condvar = Condvar::new();
/// The process that the threads are in. A child of `fork` has none of them, and the lock may be held in its copy for ever.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn running() -> MutexGuard<'static, Running> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One of the threads.
struct Thread;

impl Drop for Thread {
    fn drop(&mut self) {
        running().threads -= 1;
        ENDED.notify_all();
    }
}

/// Does `work` on a thread of this name, in a child of `fork` on this one. If the system gives no thread, it drops `work` undone.
pub(crate) fn run(name: &str, work: impl FnOnce() + Send + 'static) {
    let own = process::id();
    match PROCESS.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire) {
        // A child of `fork` can do nothing with a device.
        Err(parent) if parent != own => return work(),
        _ => {}
    }
    let mut state = running();
    state.threads += 1;
    if !state.is_awaited {
        // The end of the driver's library must not come first. On Windows the threads are gone by then, and nothing is waited for.
        // SAFETY: the function has this signature. The system calls it when the process ends, or before it unloads the library that
        // the function is in.
        state.is_awaited = cfg!(windows) || unsafe { atexit(wait_at_exit) } == 0;
    }
    drop(state);
    let counted = Thread;
    let work = move || {
        work();
        drop(counted);
    };
    // Without a thread, this drops the closure here.
    drop(thread::Builder::new().name(name.into()).spawn(work));
}

/// When a wait that begins now should end.
pub(crate) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// Waits until all of it is done, or the deadline has passed.
pub(crate) fn wait(deadline: Instant) {
    if PROCESS.load(Ordering::Acquire) == process::id() {
        let (state, left) = (running(), deadline.saturating_duration_since(Instant::now()));
        drop(ENDED.wait_timeout_while(state, left, |state| state.threads > 0));
    }
}

unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
}

extern "C" fn wait_at_exit() {
    wait(deadline());
}
