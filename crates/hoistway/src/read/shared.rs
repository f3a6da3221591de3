//! What the threads of a reader share.
#![forbid(unsafe_code)]

use super::{
    ReaderOptions,
    pieces::{DeviceShare, Piece},
    queue::Reads,
    report::RouteRemarks,
};
#[cfg(feature = "objects")]
use crate::memory::Ledger;
use crate::{
    DeviceId, Error,
    memory::Slots,
    parallel::lock,
    route::{ReadLane, member::Member},
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
    pub(super) lost: OnceLock<String>,
    pub(super) lines: Mutex<HashMap<DeviceId, Arc<DeviceShare>>>,
    /// What may be taken for the node's cache.
    #[cfg(feature = "objects")]
    pub(super) ledger: Arc<Ledger>,
}

impl ReaderShared {
    /// Where reads to the host land that are not made in place.
    pub(super) fn host_slots(&self) -> Option<&Slots> {
        self.slots.get()
    }

    /// Whether an error says that nothing comes any more.
    pub(super) fn is_lost_by(&self, error: &io::Error) -> bool {
        self.main.get().is_some_and(|main| main.is_lost(error))
    }

    /// Nothing comes any more, so nothing may wait for it.
    pub(super) fn lose(&self, reason: &str) {
        let _ = self.lost.set(reason.to_owned());
        if let Some(slots) = self.slots.get() {
            slots.close();
        }
        lock(&self.lines).values().for_each(|line| line.close_slots());
    }

    /// Why a piece cannot be read any more, if so.
    pub(super) fn loss(&self, piece: &Piece) -> Option<Error> {
        let reason = self.lost.get()?.clone();
        let read = piece.of();
        let (path, tensor, range) = (read.file.path().to_owned(), read.name(), Some(piece.wanted));
        Some(Error::Io { operation: "read", path, tensor, range, source: io::Error::other(reason) })
    }

    pub(super) fn with_faults(&self, lane: Box<ReadLane>) -> Box<ReadLane> {
        #[cfg(feature = "fault-injection")]
        if let Some(faults) = &self.options.faults {
            return faults.wrap(lane);
        }
        lane
    }
}
