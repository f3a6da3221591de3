//! The routes of one order with a queue each, and the slots that their reads pass.
#![forbid(unsafe_code)]

use super::{
    order::Reads,
    routes::{OpenRoute, Takers, queue_of},
};
use crate::{
    memory::Slots,
    route::{DirectIo, ReadLane, Route, member::Landing},
};
use hoistway_io::executor::{Patience, QueueId, Reason, Scheduler};
use std::sync::{Arc, atomic::AtomicUsize};

/// Reads of pinned pages that processors help with, at least: for fewer, what they copy through has to be pinned too.
pub(crate) const MANY_READS: usize = 64;

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
    /// Threads that copy from the page cache, at most: while reads wait for a route that has a device copy from the same pages, and while
    /// none do.
    pub(crate) most_copiers: (usize, usize),
    /// Threads that have copied from the page cache.
    pub(crate) copiers: AtomicUsize,
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

    /// The queues that a thread of a route serves: its own, and if it copies from the page cache, that of the route which has a device
    /// copy from the same pages. Both take reads from the front: a thread that pins takes many at once, which are neighbours.
    pub(super) fn queues_of(&self, route: usize) -> Vec<QueueId> {
        let is_helped = |other: &usize| {
            let mut own = self.takers.iter().filter(|takers| takers.has(*other));
            let facts = self.routes[*other].member.facts();
            facts.landing == Landing::View
                && !self.names(facts.route)
                && self.patience == Patience::UntilOver
                && own.clone().count() >= MANY_READS
                && own.all(|takers| takers.has(route))
        };
        let helped = (0..route).filter(is_helped).filter(|_| self.copies_pages(route));
        helped.chain([route]).map(queue_of).collect()
    }

    /// Threads that may copy from the page cache now.
    pub(super) fn most_copiers(&self) -> usize {
        let (beside, alone) = self.most_copiers;
        let views = |(number, route): (usize, &OpenRoute)| {
            route.member.facts().landing == Landing::View
                && route.member.goes_on()
                && self.scheduler.waiting(&[queue_of(number)]) > 0
        };
        if self.routes.iter().enumerate().any(views) { beside } else { alone }
    }

    /// Whether processors copy from the page cache by this route.
    pub(super) fn copies_pages(&self, route: usize) -> bool {
        let facts = self.routes[route].member.facts();
        facts.landing == Landing::Any && facts.cache.is_some_and(|cache| cache.is_seen)
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
