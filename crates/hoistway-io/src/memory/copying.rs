//! Memory that a device still copies from or to.
#![allow(unsafe_code)]

use hoistway_device::Ticket;
use std::{
    mem::ManuallyDrop,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Memory that queued copies use. It is dropped once they are done, and leaked if that cannot be known.
#[derive(Debug)]
pub struct Copying<T> {
    ticket: Ticket,
    in_doubt: Arc<AtomicBool>,
    /// Only dropped once the copies are done: until then the device uses it.
    memory: ManuallyDrop<T>,
}

impl<T> Copying<T> {
    /// Keeps `memory` until the work behind `ticket` is done. Sets `in_doubt` if that cannot be known.
    pub fn new(ticket: Ticket, memory: T, in_doubt: Arc<AtomicBool>) -> Self {
        Self { ticket, in_doubt, memory: ManuallyDrop::new(memory) }
    }

    /// Returns whether the copies are done, or failed.
    pub fn is_over(&self) -> bool {
        self.ticket.is_over()
    }

    /// Waits for the copies.
    ///
    /// # Errors
    /// The device's.
    pub fn wait(&self) -> hoistway_device::Result<()> {
        self.ticket.wait()
    }
}

impl<T> Drop for Copying<T> {
    fn drop(&mut self) {
        if self.ticket.wait().is_err_and(|error| error.leaves_doubt()) {
            // Rather memory that is never used again than bytes that change while they are copied.
            tracing::warn!("memory is leaked, as it is not known whether a device still copies it");
            self.in_doubt.store(true, Ordering::Relaxed);
            return;
        }
        // SAFETY: dropped here alone, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}
