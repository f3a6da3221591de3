//! The bytes of layers in memory, counted against a budget.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use hoistway_io::parallel::lock;
use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// A budget of bytes.
#[derive(Debug)]
pub(super) struct LayerRoom {
    budget: u64,
    used: Mutex<Used>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Used {
    bytes: u64,
    peak_bytes: u64,
    is_stopped: bool,
}

/// Bytes of a budget, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    room: Arc<LayerRoom>,
    bytes: u64,
}

impl LayerRoom {
    pub(super) fn new(budget: u64) -> Arc<Self> {
        Arc::new(Self { budget, used: Mutex::default(), freed: Condvar::new() })
    }

    pub(super) fn peak_bytes(&self) -> u64 {
        lock(&self.used).peak_bytes
    }

    /// Claims bytes, if as many are free.
    pub(super) fn try_claim(self: &Arc<Self>, bytes: u64) -> Option<Claim> {
        self.take(&mut lock(&self.used), bytes)
    }

    /// Claims bytes, and waits for them no longer than `timeout`.
    ///
    /// # Errors
    /// [`Error::NoRoom`]; [`hoistway::Error::Cancelled`] once it is stopped.
    pub(super) fn claim(self: &Arc<Self>, bytes: u64, timeout: Duration) -> Result<Claim> {
        let asked = Instant::now();
        let mut used = lock(&self.used);
        loop {
            if let Some(claim) = self.take(&mut used, bytes) {
                return Ok(claim);
            }
            if used.is_stopped {
                return Err(hoistway::Error::Cancelled.into());
            }
            let Some(left) = timeout.checked_sub(asked.elapsed()).filter(|left| !left.is_zero()) else {
                let (leased, budget) = (used.bytes, self.budget);
                return Err(Error::NoRoom { needed: bytes, leased, budget, waited: asked.elapsed() });
            };
            used = self.freed.wait_timeout(used, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets no claim wait any more.
    pub(super) fn stop(&self) {
        lock(&self.used).is_stopped = true;
        self.freed.notify_all();
    }

    fn take(self: &Arc<Self>, used: &mut Used, bytes: u64) -> Option<Claim> {
        let total = used.bytes.checked_add(bytes).filter(|total| *total <= self.budget)?;
        used.bytes = total;
        used.peak_bytes = used.peak_bytes.max(total);
        Some(Claim { room: self.clone(), bytes })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(&self.room.used).bytes -= self.bytes;
        self.room.freed.notify_all();
    }
}
