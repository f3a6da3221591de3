//! What the store asks of whatever moves its bytes.
#![allow(unsafe_code, reason = "passes on who answers for the memory of devices")]

use super::{DeviceRegion, IoEngine, IoReport, Job};
use crate::Result;
use hoistway_device::DeviceId;

/// Moves bytes: the engine, or in tests what takes its place.
pub(crate) trait Transfers: Send + Sync {
    /// Begins transfers. Never blocks.
    fn submit(&self, jobs: Vec<Job>);

    /// Ends those of this tag that have not begun, or are between two steps, as
    /// [`Failure::Cancelled`](super::Failure::Cancelled). Says how many.
    fn cancel(&self, tag: u64) -> usize;

    /// How they are moved.
    fn report(&self) -> IoReport;

    /// Makes memory of a device known to the direct path.
    ///
    /// # Safety
    /// It must be memory of this device, and stay allocated until the result is dropped.
    unsafe fn register_device(&self, id: DeviceId, address: u64, len: u64) -> Result<DeviceRegion>;
}

impl Transfers for IoEngine {
    fn submit(&self, jobs: Vec<Job>) {
        Self::submit(self, jobs);
    }

    fn cancel(&self, tag: u64) -> usize {
        Self::cancel(self, tag)
    }

    fn report(&self) -> IoReport {
        Self::report(self)
    }

    unsafe fn register_device(&self, id: DeviceId, address: u64, len: u64) -> Result<DeviceRegion> {
        // SAFETY: passed on.
        unsafe { Self::register_device(self, id, address, len) }
    }
}
