//! Locks and threads of what is tested in many orders of threads: the system's, or with `--cfg shuttle` those of shuttle, which
//! chooses the order.
#![forbid(unsafe_code)]

use std::io;

#[cfg(shuttle)]
pub use shuttle::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
#[cfg(not(shuttle))]
pub use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};

/// Starts a thread of this name in a scope.
///
/// # Errors
/// The system's, if it gives none.
pub fn spawn_scoped<'scope, 'env>(
    scope: &'scope thread::Scope<'scope, 'env>,
    name: &str,
    work: impl FnOnce() + Send + 'scope,
) -> io::Result<()> {
    #[cfg(not(shuttle))]
    crate::parallel::thread_named(name).spawn_scoped(scope, work)?;
    #[cfg(shuttle)]
    {
        let _ = name;
        scope.spawn(work);
    }
    Ok(())
}
