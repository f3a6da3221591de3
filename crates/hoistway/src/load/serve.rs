//! A load as a customer of the executor: one group of reads, a queue for each route, and the threads that serve it.
#![forbid(unsafe_code)]

use super::{
    handler::{Copier, Fetcher},
    job::Job,
};
use crate::{
    Error,
    parallel::thread_named,
    report::Refusal,
    route::{ReadLane, ReadOp},
};
use hoistway_io::{
    executor::{
        Customer, Flight, Handler, InFlightLimit, Limits, Next, QueueId, QueueOptions, Reason, Scheduler,
        Served, Service,
    },
    lane::NoLane,
};
use std::{
    convert::Infallible,
    io,
    sync::{Arc, Weak},
    thread,
};

/// The routes that may make a read, as bits: a route's place in the load's order of preference is its number, and that of
/// its queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Takers(u8);

impl Takers {
    /// Most routes of a load: as many as a scheduler has queues.
    pub(super) const MOST: usize = u8::BITS as usize;

    pub(super) fn of(routes: impl IntoIterator<Item = usize>) -> Self {
        Self(routes.into_iter().fold(0, |bits, route| bits | 1 << route))
    }

    /// The best of them, from number `first` on.
    pub(super) fn from(self, first: usize) -> Option<usize> {
        let bits = self.0.checked_shr(first as u32)?;
        (bits != 0).then(|| first + bits.trailing_zeros() as usize)
    }

    pub(super) fn has(self, route: usize) -> bool {
        self.from(route) == Some(route)
    }
}

/// The reads of one load. The load itself ends when their group does.
#[derive(Debug)]
pub(super) struct Reads;

impl Customer for Reads {
    type Operation = ReadOp;
    type Group = Weak<Job>;
    type Event = Infallible;
    type Error = Reason;

    fn ended(&self, job: Weak<Job>, result: Result<(), Reason>) {
        if let Some(job) = job.upgrade() {
            job.reads_ended(result);
        }
    }
}

/// A scheduler with a queue for each of so many routes, which hands reads over to those after it.
pub(super) fn scheduler(routes: usize) -> Arc<Scheduler<Reads>> {
    let queue =
        |route| QueueOptions { slots: None, hands_over_to: (route + 1..routes).map(queue_of).collect() };
    let queues: Vec<_> = (0..routes).map(queue).collect();
    Scheduler::new(Reads, Limits::NONE, &queues)
}

/// The queue of a route.
pub(super) fn queue_of(route: usize) -> QueueId {
    QueueId(route as u8)
}

/// Serves the queue of a route with one lane. If the route gives up, the one that takes its reads goes on, with as many
/// threads as it should have.
pub(super) fn serve(job: &Job, route: usize) {
    let own = &job.routes[route];
    let queues = [queue_of(route)];
    let service = |limit| Service { queues: &queues, limit, patience: job.patience };
    // No read, no lane.
    let first = job.scheduler.serve(NoLane::default(), &mut FirstRead, service(InFlightLimit::fixed(1)));
    if !matches!(first, Served::GaveUp) {
        return;
    }
    let (facts, (first, most)) = (own.member.facts(), own.share.depth);
    let refused = match own.member.lane(most) {
        Err(why) => Some(why),
        Ok(lane) => {
            let lane = with_faults(job, lane);
            let limit = match facts.connects {
                true => InFlightLimit::by_connections(first, most),
                false => InFlightLimit::by_throughput(first, most),
            };
            let limit = service(limit);
            let mut fetcher = Fetcher::new(job, route);
            let served = match facts.cache {
                Some(cache) => job.scheduler.serve(lane, &mut Copier::new(job, route, cache), limit),
                None => job.scheduler.serve(lane, &mut fetcher, limit),
            };
            match served {
                Served::Over => None,
                Served::GaveUp => fetcher.into_refused(),
                Served::Failed { error, first_lost } => return job.fail(job.lost_reads(first_lost, error)),
            }
        }
    };
    let Some(why) = refused else { return };
    let name = facts.route;
    let Some(heir) = job.heir(route).filter(|_| job.route != name) else {
        return job.fail(Error::RouteUnavailable { route: name, path: None, why });
    };
    job.tally().refuse(Refusal::new(name.name(), None, why));
    if !job.scheduler.redirect(queue_of(route), queue_of(heir)) {
        return;
    }
    let later = &job.routes[heir];
    thread::scope(|scope| {
        for _ in 1..later.share.threads {
            // As many as the system gives; this one works in any case.
            let _ = thread_named(later.member.facts().thread_name).spawn_scoped(scope, || serve(job, heir));
        }
        serve(job, heir);
    });
}

/// Touches memory ahead of the reads, leaving out the first `ahead` extents.
pub(super) fn touch(job: &Job, ahead: usize) {
    while job.touch_ahead(ahead) {}
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

fn with_faults(job: &Job, lane: Box<ReadLane>) -> Box<ReadLane> {
    #[cfg(feature = "fault-injection")]
    if let Some(faults) = &job.faults {
        return faults.wrap(lane);
    }
    let _ = job;
    lane
}
