//! The routes of one order with a queue each, and the slots that their reads pass.
#![forbid(unsafe_code)]

use super::{
    order::Reads,
    routes::{OpenRoute, Takers},
};
use crate::{
    memory::Slots,
    route::{DirectIo, ReadLane, Route},
};
use hoistway_io::executor::{Patience, Reason, Scheduler};
use std::sync::Arc;

/// Carries the reads of one order.
pub(crate) struct Engine {
    /// The route, and the way to read directly, that the caller chose.
    pub(crate) chosen: (Route, DirectIo),
    /// Has the reads, with a queue for each route.
    pub(crate) scheduler: Arc<Scheduler<Reads>>,
    /// What threads do that find no read.
    pub(crate) patience: Patience,
    /// In order of preference.
    pub(crate) routes: Vec<OpenRoute>,
    /// For each extent, the routes that may read it.
    pub(crate) takers: Box<[Takers]>,
    /// Slots for routes that have none of their own.
    pub(crate) slots: Slots,
    #[cfg(feature = "fault-injection")]
    pub(crate) faults: Option<crate::route::fault::FaultScript>,
}

impl Engine {
    /// Whether the caller has named this route, so that no other may make its reads.
    pub(crate) fn names(&self, route: Route) -> bool {
        self.chosen.0 == route
    }

    /// The slots of those routes that have their own.
    pub(crate) fn slots_of_routes(&self) -> impl Iterator<Item = &Slots> {
        self.routes.iter().filter_map(OpenRoute::slots)
    }

    /// The route that makes the reads of one that gives up, if there is one that can make all.
    pub(super) fn heir(&self, route: usize) -> Option<usize> {
        let own = self.takers.iter().filter(|takers| takers.has(route));
        (route + 1..self.routes.len()).find(|&later| own.clone().all(|takers| takers.has(later)))
    }

    /// Whether a thread of a route will get any read: one that is its own at first, or is as soon as the page cache turns
    /// out not to hold it.
    pub(crate) fn will_serve(&self, route: usize) -> bool {
        let is_cache = |own: usize| self.routes[own].member.facts().cache.is_some();
        self.takers.iter().any(|takers| {
            let mut next = takers.from(0);
            while let Some(cache) = next.filter(|&own| own < route && is_cache(own)) {
                next = takers.from(cache + 1);
            }
            next == Some(route)
        })
    }

    /// No further read begins, and none waits for a slot.
    pub(crate) fn close(&self) {
        // Before slots: what finds none returns to its queue, and ends there.
        self.scheduler.close(Reason::Closed);
        self.slots.close();
        self.slots_of_routes().for_each(Slots::close);
    }

    pub(super) fn with_faults(&self, lane: Box<ReadLane>) -> Box<ReadLane> {
        #[cfg(feature = "fault-injection")]
        if let Some(faults) = &self.faults {
            return faults.wrap(lane);
        }
        lane
    }
}
