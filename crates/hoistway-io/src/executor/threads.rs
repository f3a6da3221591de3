//! A scheduler with the threads that serve it.
#![forbid(unsafe_code)]

use super::{
    customer::{Customer, Reason},
    scheduler::Scheduler,
};
use crate::parallel::thread_named;
use std::{
    io, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
};

/// A scheduler, and the threads that serve it. Dropping it closes the scheduler and waits for the threads.
///
/// In a child of `fork` it does nothing, and takes nothing on.
pub struct Executor<C: Customer + 'static> {
    scheduler: Arc<Scheduler<C>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<C: Customer + 'static> Executor<C> {
    /// Makes an executor without threads.
    pub fn new(scheduler: Arc<Scheduler<C>>) -> Self {
        Self { scheduler, threads: Mutex::default() }
    }

    /// Returns the scheduler.
    pub fn scheduler(&self) -> &Arc<Scheduler<C>> {
        &self.scheduler
    }

    /// Starts a thread. Its `work` makes a lane and [serves](Scheduler::serve) queues with it.
    ///
    /// # Errors
    /// The system's, if it gives no thread.
    pub fn spawn(
        &self,
        name: &str,
        work: impl FnOnce(&Arc<Scheduler<C>>) + Send + 'static,
    ) -> io::Result<()> {
        let scheduler = self.scheduler.clone();
        let thread = thread_named(name).spawn(move || work(&scheduler))?;
        self.threads().push(thread);
        Ok(())
    }

    /// Starts the thread that watches deadlines and events.
    ///
    /// # Errors
    /// The system's, if it gives no thread.
    pub fn spawn_watcher(&self, name: &str) -> io::Result<()> {
        self.spawn(name, |scheduler| scheduler.watch())?;
        self.scheduler.expect_watcher();
        Ok(())
    }

    /// Waits for the threads, which end once the scheduler is sealed and has no operation left, or closed.
    pub fn join(&self) {
        if self.scheduler.is_foreign() {
            return;
        }
        let threads = mem::take(&mut *self.threads());
        for thread in threads {
            // A callback may drop the last reference: its thread cannot wait for itself, and ends soon.
            if thread.thread().id() != thread::current().id() {
                // Panics of customers are contained, so there are none to pass on.
                let _ = thread.join();
            }
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Customer + 'static> Drop for Executor<C> {
    fn drop(&mut self) {
        if self.scheduler.is_foreign() {
            // The threads live in the parent: what detaches them here may write to memory that others use by now.
            mem::forget(mem::take(self.threads.get_mut().unwrap_or_else(PoisonError::into_inner)));
            return;
        }
        self.scheduler.close(Reason::Closed);
        self.join();
    }
}

impl<C: Customer + 'static> std::fmt::Debug for Executor<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("scheduler", &self.scheduler).finish_non_exhaustive()
    }
}
