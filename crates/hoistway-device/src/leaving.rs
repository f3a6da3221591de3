//! What takes a device long to let go of, and is let go on a thread of its own.
#![forbid(unsafe_code)]

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};

/// How much is being let go.
#[derive(Debug, Default)]
pub(crate) struct Leaving(Arc<Count>);

#[derive(Debug, Default)]
struct Count {
    threads: Mutex<usize>,
    ended: Condvar,
}

/// One thread of them.
struct Thread(Arc<Count>);

impl Leaving {
    /// Drops it on a thread; on this one if there is none to be had.
    pub(crate) fn drop_aside(&self, what: impl Send + 'static) {
        *self.0.threads.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let running = Thread(self.0.clone());
        let work = move || {
            drop(what);
            drop(running);
        };
        // One that is not started drops what it was to drop.
        drop(thread::Builder::new().name("hoistway-unpin".into()).spawn(work));
    }

    /// Waits until all of it is gone.
    pub(crate) fn wait(&self) {
        let threads = self.0.threads.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.ended.wait_while(threads, |threads| *threads > 0));
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        *self.0.threads.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_all();
    }
}
