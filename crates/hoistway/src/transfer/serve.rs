//! An engine of a load as a customer of the executor: a queue for each route, and the threads that serve it.
#![forbid(unsafe_code)]

use super::{
    engine::Engine,
    handler::{After, Mover, Ways, not_cached},
    order::{EngineOwner, Reads},
    routes::{OpenRoute, queue_of},
};
use crate::{
    Error, Result,
    memory::{Slot, first_pinned},
    report::Refusal,
    route::{
        ReadOp, Unavailable,
        member::{Landing, Member},
    },
};
use hoistway_io::{
    executor::{
        Flight, Handler, InFlightLimit, Limits, Next, QueueId, QueueOptions, Scheduler, Served, Service,
    },
    file::Residency,
    lane::NoLane,
    sync::{spawn_scoped, thread},
};
use std::{
    io,
    sync::{Arc, OnceLock, atomic::Ordering},
    time::{Duration, Instant},
};

/// A scheduler with a queue for each of so many routes, which hands reads over to those after it.
pub(crate) fn scheduler(routes: usize) -> Arc<Scheduler<Reads>> {
    let queue =
        |route| QueueOptions { slots: None, hands_over_to: (route + 1..routes).map(queue_of).collect() };
    let queues: Vec<_> = (0..routes).map(queue).collect();
    Scheduler::new(Reads, Limits::NONE, &queues)
}

/// Serves the queue of a route with one lane. If the route gives up, the one that takes its reads goes on, with as many
/// threads as it should have.
pub(crate) fn serve(engine: &Engine, order: &dyn EngineOwner, route: usize) {
    let own = &engine.routes[route];
    let queues = engine.queues_of(route);
    let service = |limit| Service { queues: &queues, limit, patience: engine.patience };
    // No read, no lane.
    let first = engine.scheduler.serve(NoLane::default(), &mut FirstRead, service(InFlightLimit::fixed(1)));
    if !matches!(first, Served::GaveUp) {
        return;
    }
    let (facts, (first, most)) = (own.member.facts(), own.share.depth);
    let refused = match own.member.lane(most) {
        Err(why) => Some(why),
        Ok(lane) => {
            let lane = engine.with_faults(lane);
            let limit = match facts.connects {
                true => InFlightLimit::by_connections(first, most),
                false => InFlightLimit::by_throughput(first, most),
            };
            let limit = service(limit);
            let (copies, refused) = (OnceLock::new(), OnceLock::new());
            let mut mover = Mover::new(OwnRoute { engine, number: route, own, copies, refused });
            let served = engine.scheduler.serve(lane, &mut mover, limit);
            match served {
                Served::Over => None,
                Served::GaveUp => mover.into_ways().refused.into_inner(),
                Served::Failed { error, first_lost } => {
                    order.fail(order.lost_reads(first_lost, error));
                    return;
                }
            }
        }
    };
    let Some(why) = refused else { return };
    let name = facts.route;
    let Some(heir) = engine.heir(route).filter(|_| !engine.names(name)) else {
        order.fail(Error::RouteUnavailable { route: name, path: None, why });
        return;
    };
    order.tally().refuse(Refusal::new(name.name(), None, why));
    if !engine.scheduler.redirect(queue_of(route), queue_of(heir)) {
        return;
    }
    let later = &engine.routes[heir];
    thread::scope(|scope| {
        for _ in 1..later.share.threads {
            // As many as the system gives; this one works in any case.
            let _ = spawn_scoped(scope, later.member.facts().thread_name, || serve(engine, order, heir));
        }
        serve(engine, order, heir);
    });
}

/// The route of a thread that has no other. Others have their own.
struct OwnRoute<'a> {
    engine: &'a Engine,
    number: usize,
    own: &'a OpenRoute,
    /// Counted once it has a slot to copy to from the page cache.
    copies: OnceLock<()>,
    /// Why it gives up.
    refused: OnceLock<Unavailable>,
}

impl OwnRoute<'_> {
    /// Has the routes unpin what they keep. Returns whether one of them had any.
    fn make_room(&self) -> bool {
        self.engine.routes.iter().fold(false, |had, route| route.member.make_room() | had)
    }
}

impl Ways for OwnRoute<'_> {
    fn next(&mut self, op: &mut ReadOp, after: Option<usize>) -> Result<Option<usize>> {
        let is_cold = self
            .own
            .member
            .facts()
            .cache
            .is_some_and(|cache| cache.holds(&*op.source, op.part.range) == Residency::Cold);
        Ok((after.is_none() && !is_cold).then_some(self.number))
    }

    fn member(&self, _: usize) -> &dyn Member {
        &*self.own.member
    }

    fn others(&self, op: &ReadOp, missing: Option<u64>) -> Result<QueueId> {
        let facts = self.own.member.facts();
        let next = self.engine.takers[op.part.item].from(self.number + 1);
        match (next.filter(|_| !self.engine.names(facts.route)), facts.cache) {
            (Some(next), _) => Ok(queue_of(next)),
            (None, Some(cache)) => Err(not_cached(op, &cache, missing)),
            (None, None) => Err(Error::Internal("no route takes a read".into())),
        }
    }

    fn take_slot(&self, _: &ReadOp, may_wait: bool) -> Result<Option<Slot>> {
        let slots = self.own.slots().unwrap_or(&self.engine.slots);
        let take = || match self.own.member.facts().landing {
            // The thread takes all that are free, so that it pins many reads at once.
            Landing::View if may_wait => slots.take_of(self.own.share.depth.1.min(slots.count() / 2)),
            _ if may_wait => slots.take(),
            _ => slots.try_take(),
        };
        let (since, mut is_last) = (Instant::now(), false);
        loop {
            match first_pinned(take) {
                Err(Error::Allocation { .. })
                    if !is_last && since.elapsed() < PATIENCE && !self.engine.scheduler.is_closed() =>
                {
                    // Once more after there was nothing left: another thread may have unpinned it since this one failed.
                    is_last = !self.make_room();
                    // Until copies from pages that are pinned have ended.
                    thread::sleep(Duration::from_millis(1));
                }
                slot => {
                    if matches!(slot, Ok(Some(_))) && self.engine.copies_pages(self.number) {
                        self.copies.get_or_init(|| _ = self.engine.copiers.fetch_add(1, Ordering::Relaxed));
                    }
                    return slot;
                }
            }
        }
    }

    fn gives_up(&self, _: &ReadOp, why: Unavailable) -> After {
        if self.engine.heir(self.number).is_none() {
            return After::Error;
        }
        self.refused.get_or_init(|| why);
        After::LeaveLane
    }
}

/// The longest wait for other routes to unpin memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits for the first read of a queue, and leaves it there.
struct FirstRead;

impl Handler<Reads> for FirstRead {
    fn begin(&mut self, flight: Flight<Reads>) -> Next<Reads> {
        Next::GiveUp(flight)
    }

    fn settle(&mut self, flight: Flight<Reads>, _: io::Result<usize>) -> Next<Reads> {
        Next::GiveUp(flight)
    }
}
