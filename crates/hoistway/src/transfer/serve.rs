//! An engine as a customer of the executor: a queue for each route, and the threads that serve it.
#![forbid(unsafe_code)]

use super::{
    engine::Engine,
    handler::{Copier, Fetcher},
    order::{Order, Reads},
    routes::queue_of,
};
use crate::{Error, parallel::thread_named, report::Refusal};
use hoistway_io::{
    executor::{Flight, Handler, InFlightLimit, Limits, Next, QueueOptions, Scheduler, Served, Service},
    lane::NoLane,
};
use std::{io, sync::Arc, thread};

/// A scheduler with a queue for each of so many routes, which hands reads over to those after it.
pub(crate) fn scheduler(routes: usize) -> Arc<Scheduler<Reads>> {
    let queue =
        |route| QueueOptions { slots: None, hands_over_to: (route + 1..routes).map(queue_of).collect() };
    let queues: Vec<_> = (0..routes).map(queue).collect();
    Scheduler::new(Reads, Limits::NONE, &queues)
}

/// Serves the queue of a route with one lane. If the route gives up, the one that takes its reads goes on, with as many
/// threads as it should have.
pub(crate) fn serve(engine: &Engine, order: &dyn Order, route: usize) {
    let own = &engine.routes[route];
    let queues = [queue_of(route)];
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
            let mut fetcher = Fetcher::new(engine, order, route);
            let served = match facts.cache {
                Some(cache) => {
                    engine.scheduler.serve(lane, &mut Copier::new(engine, order, route, cache), limit)
                }
                None => engine.scheduler.serve(lane, &mut fetcher, limit),
            };
            match served {
                Served::Over => None,
                Served::GaveUp => fetcher.into_refused(),
                Served::Failed { error, first_lost } => {
                    return order.fail(order.lost_reads(first_lost, error));
                }
            }
        }
    };
    let Some(why) = refused else { return };
    let name = facts.route;
    let Some(heir) = engine.heir(route).filter(|_| !engine.names(name)) else {
        return order.fail(Error::RouteUnavailable { route: name, path: None, why });
    };
    order.tally().refuse(Refusal::new(name.name(), None, why));
    if !engine.scheduler.redirect(queue_of(route), queue_of(heir)) {
        return;
    }
    let later = &engine.routes[heir];
    thread::scope(|scope| {
        for _ in 1..later.share.threads {
            // As many as the system gives; this one works in any case.
            let _ = thread_named(later.member.facts().thread_name)
                .spawn_scoped(scope, || serve(engine, order, heir));
        }
        serve(engine, order, heir);
    });
}

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
