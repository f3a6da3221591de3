//! Locks that a panic elsewhere does not take away, and threads with a stack of their own size.
#![forbid(unsafe_code)]

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

/// Bytes of a thread's stack. Set for each, as `RUST_MIN_STACK` may give others too little.
const STACK_BYTES: usize = 2 << 20;

/// Begins a thread with this name, and a stack that the work of any thread fits in.
pub(crate) fn thread_named(name: &str) -> thread::Builder {
    thread::Builder::new().name(name.into()).stack_size(STACK_BYTES)
}

/// Takes a lock. Whoever panicked while holding it left nothing half done that later holders rely on.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
