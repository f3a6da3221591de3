//! Locks that a panic elsewhere does not take away.
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock. Whoever panicked while holding it left nothing half done that later holders rely on.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
