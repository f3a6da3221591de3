//! Threads that wait for a device, so that no caller of a store does.
#![forbid(unsafe_code)]

use hoistway_io::parallel::{lock, thread_named};
use std::{io, sync::Mutex, thread::JoinHandle};

/// Threads. Dropping this waits for them, but not in a child of `fork`, which does not have them.
#[derive(Debug)]
pub(crate) struct Waits {
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The process that has them.
    process: u32,
}

impl Default for Waits {
    fn default() -> Self {
        Self { threads: Mutex::default(), process: std::process::id() }
    }
}

impl Waits {
    /// Calls `work` on a thread of its own.
    ///
    /// # Errors
    /// The system's, if it has no thread. Then `work` is dropped.
    pub(crate) fn start(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread_named("hoistway-waits").spawn(work)?);
        Ok(())
    }

    /// Whether this process has the threads: a child of `fork` does not.
    pub(crate) fn are_own(&self) -> bool {
        self.process == std::process::id()
    }

    /// Waits until all that was started is done.
    pub(crate) fn wait(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // A panic was reported where it happened.
            _ = thread.join();
        }
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        if self.are_own() {
            self.wait();
        } else {
            std::mem::forget(std::mem::take(&mut self.threads));
        }
    }
}
