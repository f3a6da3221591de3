//! What the threads of a reader share.
#![forbid(unsafe_code)]

use super::{ReaderOptions, device::DeviceShare};
#[cfg(feature = "objects")]
use crate::memory::Ledger;
use crate::{
    DeviceId,
    memory::Slots,
    report::RouteRemarks,
    route::{ReadLane, member::Member},
    transfer::Reads,
};
use hoistway_io::executor::Scheduler;
use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, OnceLock},
};

/// What the threads of a reader share.
#[derive(Debug)]
pub(super) struct ReaderShared {
    pub(super) options: ReaderOptions,
    pub(super) scheduler: Arc<Scheduler<Reads>>,
    /// What copies from the page cache, if the route looks there.
    pub(super) cached: Option<Arc<dyn Member>>,
    /// The route that threads read by: at once, or once there was a file for it.
    pub(super) main: OnceLock<Arc<dyn Member>>,
    /// What reports say of it.
    pub(super) remarks: OnceLock<Arc<RouteRemarks>>,
    /// Staging for what cannot be read in place, once that was needed.
    pub(super) slots: OnceLock<Slots>,
    /// Why nothing comes any more.
    pub(super) lost: Arc<OnceLock<String>>,
    pub(super) lines: Mutex<HashMap<DeviceId, Arc<DeviceShare>>>,
    /// What may be taken for the node's cache.
    #[cfg(feature = "objects")]
    pub(super) ledger: Arc<Ledger>,
}

impl ReaderShared {
    /// Notes an error of a read. If it says that nothing comes any more, reads that wait fail with it.
    pub(super) fn note_error(&self, error: &io::Error) {
        if self.main.get().is_some_and(|main| main.is_lost(error)) {
            let _ = self.lost.set(error.to_string());
        }
    }

    pub(super) fn with_faults(&self, lane: Box<ReadLane>) -> Box<ReadLane> {
        #[cfg(feature = "fault-injection")]
        if let Some(faults) = &self.options.faults {
            return faults.wrap(lane);
        }
        lane
    }
}
