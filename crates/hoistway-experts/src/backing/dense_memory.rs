//! Memory of dense tensors on a device, each in an allocation of its own.
//!
//! To free memory waits for all work of the device, so a thread does it. What it has not freed yet counts: a tensor waits for it
//! rather than take more than the share.
#![forbid(unsafe_code)]

use super::waits::Waits;
use crate::error::guarded;
use hoistway_device::{Device, DeviceMemory, Error, Result};
use hoistway_io::parallel::lock;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Memory of a device for dense tensors, and no more than their share.
#[derive(Debug)]
pub(super) struct DenseMemory {
    device: Arc<Device>,
    max_bytes: u64,
    inner: Arc<Inner>,
    /// One frees memory, if there is any to be freed.
    threads: Waits,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    /// Some was freed.
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes that are allocated, or about to be.
    held_bytes: u64,
    /// Memory that no tensor has any more.
    unused: Vec<DeviceMemory>,
    /// Whether some of it is being freed.
    is_freeing: bool,
}

impl DenseMemory {
    pub(super) fn new(device: &Arc<Device>, max_bytes: u64) -> Self {
        Self { device: device.clone(), max_bytes, inner: Arc::default(), threads: Waits::default() }
    }

    /// Bytes that tensors may have at a time.
    pub(super) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Bytes of the device that it has.
    pub(super) fn held_bytes(&self) -> u64 {
        lock(&self.inner.state).held_bytes
    }

    /// Allocates memory. Waits for what is being freed, if that leaves too little of the share, or the device has none.
    pub(super) fn allocate(&self, len: u64) -> Result<DeviceMemory> {
        let len = len.max(1);
        self.wait_while(|state| state.held_bytes.saturating_add(len) > self.max_bytes).held_bytes += len;
        let allocate = || DeviceMemory::new(&self.device, len);
        let memory = match allocate() {
            Err(Error::OutOfMemory { .. }) => {
                drop(self.wait_while(|_| true));
                allocate()
            }
            other => other,
        };
        if memory.is_err() {
            self.inner.forget(len);
        }
        memory
    }

    /// Waits as long as memory is being freed that is needed.
    fn wait_while(&self, is_needed: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        // A child of fork has no thread that frees any.
        let is_freeing = |state: &mut State| state.is_freeing && self.threads.are_own() && is_needed(state);
        let state = lock(&self.inner.state);
        self.inner.freed.wait_while(state, is_freeing).unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a thread free memory; without one it is freed here.
    pub(super) fn free(&self, memory: DeviceMemory) {
        let mut state = lock(&self.inner.state);
        state.unused.push(memory);
        if std::mem::replace(&mut state.is_freeing, true) {
            return;
        }
        drop(state);
        let inner = self.inner.clone();
        if self.threads.start(move || inner.free_all()).is_err() {
            self.inner.free_all();
        }
    }
}

impl Inner {
    fn forget(&self, len: u64) {
        lock(&self.state).held_bytes -= len;
        self.freed.notify_all();
    }

    /// Frees memory until there is none left that no tensor has.
    fn free_all(&self) {
        loop {
            let mut state = lock(&self.state);
            let Some(memory) = state.unused.pop() else {
                state.is_freeing = false;
                drop(state);
                return self.freed.notify_all();
            };
            drop(state);
            let len = memory.len();
            // A request may wait for this thread. After a panic the memory counts as used.
            match guarded("freeing memory of a device", || drop(memory)) {
                Ok(()) => self.forget(len),
                Err(error) => tracing::error!(%error, len, "memory of a device may not have been freed"),
            }
        }
    }
}
