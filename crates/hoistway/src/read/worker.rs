//! The thread of a reader: the routes that it makes reads by, with a lane for each.
#![forbid(unsafe_code)]

use super::shared::ReaderShared;
use crate::{
    Error, Result,
    memory::Slot,
    report::Refusal,
    route::{
        Access, CarriedRead, DirectRoute, Done, Lane, ReadLane, ReadOp, Unavailable,
        member::{CacheFacts, Member},
    },
    transfer::{After, Mover, Ways, not_cached},
};
use hoistway_io::{
    executor::{InFlightLimit, Patience, QueueId, Service},
    file::Residency,
};
use std::{io, sync::Arc};

/// The queue of all pieces.
pub(super) const PIECES: QueueId = QueueId(0);

/// The route that threads are made for.
const MAIN: usize = 0;
/// The route that copies from a cache.
const CACHE: usize = 1;
/// The route past the host that a read [has](ReadOp::past_host).
const PAST_HOST: usize = 2;

/// Serves the queue with a lane of `main`, until it is closed.
pub(super) fn run(shared: &ReaderShared, main: Arc<dyn Member>, lane: Box<ReadLane>) {
    let most = lane.capacity();
    let cache =
        shared.cached.clone().and_then(|member| Some((shared.with_faults(member.lane(most).ok()?), member)));
    let limit = InFlightLimit::fixed(most);
    let (cache_lane, cache) = cache.unzip();
    let lanes = Lanes {
        shared,
        main: shared.with_faults(lane),
        cache: cache_lane,
        past_host: Vec::new(),
        is_main_due: false,
        ended: Ok(Vec::new()),
    };
    let service = Service { queues: &[PIECES], limit, patience: Patience::UntilOver };
    shared.scheduler.serve(lanes, &mut Mover::new(Routes { shared, main, cache }), service);
}

/// The routes of a thread: those that may make a read are asked in turn, the cache first.
struct Routes<'a> {
    shared: &'a ReaderShared,
    main: Arc<dyn Member>,
    /// Copies from the page cache, for routes that look there first.
    cache: Option<Arc<dyn Member>>,
}

impl Routes<'_> {
    /// Whether a cache seems to hold a read, and a route looks there.
    fn may_be_cached(&self, op: &ReadOp) -> bool {
        let Some(cache) = &self.cache else { return false };
        match cache.add(&op.source, op.access) {
            Ok(true) => {
                let facts = cache.facts().cache;
                facts.is_some_and(|facts| facts.holds(&*op.source, op.part.wanted) == Residency::Cached)
            }
            Ok(false) => false,
            Err(why) => {
                let path = Some(op.source.path().to_owned());
                op.order.tally().refuse(Refusal::new(cache.route().name(), path, why));
                false
            }
        }
    }

    /// The cache that all bytes are to come from, if its route was named.
    fn named_cache(&self) -> Option<CacheFacts> {
        let facts = self.cache.as_ref()?.facts();
        facts.cache.filter(|_| facts.route == self.shared.options.route)
    }
}

impl Ways for Routes<'_> {
    fn next(&mut self, op: &mut ReadOp, after: Option<usize>) -> Result<Option<usize>> {
        op.past_host = None;
        if after.is_none() {
            let (access, refusal) = self.shared.options.wanted(None).access(&*op.source)?;
            refusal.into_iter().for_each(|refusal| op.order.tally().refuse(refusal));
            op.access = access;
        }
        if after.is_none() && self.may_be_cached(op) {
            return Ok(Some(CACHE));
        }
        if self.named_cache().is_some() {
            return Ok(None);
        }
        op.past_host = op.order.past_host(&op.part);
        let (way, member) = match &op.past_host {
            Some(route) => (PAST_HOST, &route.member),
            None => (MAIN, &self.main),
        };
        if member.facts().grain.is_any() {
            op.access = Access::Direct;
        }
        Ok(Some(way))
    }

    fn member(&self, way: usize) -> &dyn Member {
        match &self.cache {
            Some(cache) if way == CACHE => &**cache,
            _ => &*self.main,
        }
    }

    fn others(&self, op: &ReadOp, missing: Option<u64>) -> Result<QueueId> {
        Err(match self.named_cache() {
            Some(cache) => not_cached(op, &cache, missing),
            None => Error::Internal("no route takes a read".into()),
        })
    }

    fn take_slot(&self, op: &ReadOp, _: bool) -> Result<Option<Slot>> {
        if let Some(slot) = op.order.take_slot(op.part.item, op.past_host.as_deref())? {
            return Ok(slot);
        }
        let slots = self.shared.slots.get();
        let slots = slots.ok_or_else(|| Error::Internal("there are no slots for the host".into()))?;
        match slots.try_take() {
            None if slots.is_exhausted() => {
                let reason = "reads that failed may still arrive in any of its memory";
                let why = Unavailable::new(reason, "open the reader, or the store that reads by it, anew");
                let (route, path) = (self.main.route(), Some(op.source.path().to_owned()));
                Err(Error::RouteUnavailable { route, path, why })
            }
            slot => Ok(slot),
        }
    }

    fn gives_up(&self, op: &ReadOp, why: Unavailable) -> After {
        let Some(route) = &op.past_host else { return After::Error };
        op.order.tally().refuse(Refusal::new(route.member.route().name(), None, why.clone()));
        route.give_up(why);
        After::WaitAgain
    }
}

/// The lanes of a thread. Reads go to that of their route.
struct Lanes<'a> {
    shared: &'a ReaderShared,
    // Dropped before what they read: a lane waits for the kernel.
    main: Box<ReadLane>,
    cache: Option<Box<ReadLane>>,
    past_host: Vec<(Box<ReadLane>, Arc<DirectRoute>)>,
    /// Whether the main lane has reads that it was not given time for.
    is_main_due: bool,
    /// Reads that have ended ahead of the next call, or why a lane failed.
    ended: io::Result<Vec<Done>>,
}

impl Lanes<'_> {
    /// The lane for reads by the route of `op`. It is made if it is not there.
    fn lane_of(&mut self, op: &ReadOp) -> Result<&mut Box<ReadLane>, Unavailable> {
        let none = || Unavailable::new("the thread has no such route", "");
        let route = match op.way {
            MAIN => return Ok(&mut self.main),
            CACHE => return self.cache.as_mut().ok_or_else(none),
            _ => op.past_host.as_ref().ok_or_else(none)?,
        };
        let known = self.past_host.iter().position(|(_, own)| Arc::ptr_eq(own, route));
        let position = match known {
            Some(known) => known,
            None => {
                let lane = self.shared.with_faults(route.member.lane(1)?);
                self.past_host.push((lane, route.clone()));
                self.past_host.len() - 1
            }
        };
        Ok(&mut self.past_host[position].0)
    }

    fn side_lanes(&mut self) -> impl Iterator<Item = &mut Box<ReadLane>> {
        self.cache.iter_mut().chain(self.past_host.iter_mut().map(|(lane, _)| lane))
    }
}

impl Lane<CarriedRead> for Lanes<'_> {
    fn capacity(&self) -> usize {
        self.main.capacity()
    }

    fn allowed(&self) -> usize {
        self.main.allowed()
    }

    fn in_flight(&self) -> usize {
        let side = self.cache.iter().chain(self.past_host.iter().map(|(lane, _)| lane));
        let in_lanes: usize = side.map(|lane| lane.in_flight()).sum();
        self.main.in_flight() + in_lanes + self.ended.as_ref().map_or(1, Vec::len)
    }

    fn push(&mut self, op: CarriedRead) {
        let mut ended = match std::mem::replace(&mut self.ended, Ok(Vec::new())) {
            Ok(ended) => ended,
            Err(error) => {
                self.ended = Err(error);
                return;
            }
        };
        let pushed = match self.lane_of(&op) {
            Ok(lane) => wait_for_room(lane, &mut ended).map(|()| lane.push(op)),
            Err(why) => {
                let result = Err(io::Error::other(format!("no lane takes the read: {why}")));
                ended.push(Done { op, result });
                Ok(())
            }
        };
        self.ended = pushed.map(|()| ended);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let before = done.len();
        let mut ended = std::mem::replace(&mut self.ended, Ok(Vec::new()))?;
        done.append(&mut ended);
        self.ended = Ok(ended);
        // They make their reads at once.
        for lane in self.side_lanes().filter(|lane| lane.in_flight() > 0) {
            lane.submit_and_wait(done)?;
        }
        let has_main = self.main.in_flight() > 0;
        // While others bring reads, those of the main lane wait once, and no longer: it may not even have begun them.
        if done.len() > before && !self.is_main_due {
            self.is_main_due = has_main;
            return Ok(());
        }
        self.is_main_due = false;
        if has_main { self.main.submit_and_wait(done) } else { Ok(()) }
    }
}

/// Has a lane make reads until it takes another.
fn wait_for_room(lane: &mut Box<ReadLane>, ended: &mut Vec<Done>) -> io::Result<()> {
    while lane.in_flight() >= lane.capacity() {
        lane.submit_and_wait(ended)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        read::ReaderOptions,
        transfer::{Reads, tests::lone_read},
    };
    use hoistway_io::executor::{Bound, Limits, QueueOptions, Scheduler};
    use std::sync::{Mutex, OnceLock};

    /// Ends a read in each second round.
    struct Slow {
        capacity: usize,
        reads: Vec<CarriedRead>,
        is_next: bool,
    }

    impl Slow {
        fn lane(capacity: usize) -> Box<ReadLane> {
            Box::new(Self { capacity, reads: Vec::new(), is_next: false })
        }
    }

    impl Lane<CarriedRead> for Slow {
        fn capacity(&self) -> usize {
            self.capacity
        }

        fn in_flight(&self) -> usize {
            self.reads.len()
        }

        fn push(&mut self, op: CarriedRead) {
            assert!(self.reads.len() < self.capacity, "it takes no more");
            self.reads.push(op);
        }

        fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
            self.is_next = !self.is_next;
            if !self.is_next {
                done.extend(self.reads.pop().map(|op| Done { op, result: Ok(0) }));
            }
            Ok(())
        }
    }

    fn shared() -> ReaderShared {
        let limits = Limits { accepted: Bound::NONE, in_flight: Bound::NONE };
        ReaderShared {
            options: ReaderOptions::default(),
            scheduler: Scheduler::new(Reads, limits, &[QueueOptions::default()]),
            cached: None,
            main: OnceLock::new(),
            remarks: OnceLock::new(),
            slots: OnceLock::new(),
            lost: Arc::default(),
            lines: Mutex::default(),
            #[cfg(feature = "objects")]
            ledger: crate::memory::Ledger::new(0),
        }
    }

    fn lanes(shared: &ReaderShared, side: Box<ReadLane>) -> Lanes<'_> {
        let (main, ended) = (Slow::lane(4), Ok(Vec::new()));
        Lanes { shared, main, cache: Some(side), past_host: Vec::new(), is_main_due: false, ended }
    }

    fn read(way: usize) -> CarriedRead {
        let mut op = lone_read();
        op.way = way;
        op
    }

    #[test]
    fn the_main_lane_is_served_while_others_bring_reads() {
        let shared = shared();
        let mut lanes = lanes(&shared, Box::new(crate::route::BlockingLane::new(crate::route::SourceRead)));
        let mut done = Vec::new();
        lanes.push(read(MAIN));
        for _ in 0..4 {
            lanes.push(read(CACHE));
            lanes.submit_and_wait(&mut done).unwrap();
        }
        assert_eq!(done.iter().filter(|done| done.op.way == MAIN).count(), 1);
    }

    #[test]
    fn a_lane_gets_no_more_reads_than_it_takes() {
        let shared = shared();
        let (mut lanes, mut done) = (lanes(&shared, Slow::lane(1)), Vec::new());
        (0..3).for_each(|_| lanes.push(read(CACHE)));
        assert_eq!(lanes.in_flight(), 3);
        while lanes.in_flight() > 0 {
            lanes.submit_and_wait(&mut done).unwrap();
        }
        assert_eq!(done.len(), 3);
    }

    #[test]
    fn a_read_whose_route_has_no_lane_is_an_error() {
        let shared = shared();
        let (mut lanes, mut done) = (lanes(&shared, Slow::lane(1)), Vec::new());
        lanes.push(read(PAST_HOST));
        lanes.submit_and_wait(&mut done).unwrap();
        assert!(matches!(&done[..], [Done { result: Err(_), .. }]));
    }
}
