//! What a load does with a read that begins, and what it makes of one that came back. The same for every route.
#![forbid(unsafe_code)]

use super::{
    job::Job,
    routes::LoadRoute,
    serve::{Reads, queue_of},
};
use crate::{
    Alignment, Error, Result,
    memory::Slot,
    report::Refusal,
    route::{
        Access, Buffer, ReadOp, Unavailable,
        attempt::{self, Read},
        member::{CacheFacts, Landing},
    },
};
use hoistway_io::{
    executor::{Charge, Flight, Handler, Next},
    file::{Residency, is_transient},
};
use std::io;

/// Reads by one route, on one thread.
pub(super) struct Fetcher<'a> {
    job: &'a Job,
    number: usize,
    own: &'a LoadRoute,
    /// Reads in the lane.
    in_flight: usize,
    /// Why the route gives up.
    refused: Option<Unavailable>,
}

impl<'a> Fetcher<'a> {
    pub(super) fn new(job: &'a Job, number: usize) -> Self {
        Self { job, number, own: &job.routes[number], in_flight: 0, refused: None }
    }

    /// Why the route gave up, if it did.
    pub(super) fn into_refused(self) -> Option<Unavailable> {
        self.refused
    }

    fn carry(&mut self, mut flight: Flight<Reads>) -> Next<Reads> {
        if let Err(error) = aim(self.job, &mut flight.content, self.own) {
            return self.job.fail_read(flight, error);
        }
        self.in_flight += 1;
        Next::Carry(flight)
    }
}

impl Handler<Reads> for Fetcher<'_> {
    fn begin(&mut self, mut flight: Flight<Reads>) -> Next<Reads> {
        match take_slot(self.job, &mut flight.content, self.own, self.in_flight == 0) {
            Ok(true) => self.carry(flight),
            Ok(false) => Next::PutBack(flight),
            Err(error) => self.job.fail_read(flight, error),
        }
    }

    fn settle(&mut self, mut flight: Flight<Reads>, result: io::Result<usize>) -> Next<Reads> {
        self.in_flight -= 1;
        let (job, own, op) = (self.job, self.own, &mut flight.content);
        if let Some(why) = own.member.gives_up(op, &result).filter(|_| job.heir(self.number).is_some()) {
            self.refused.get_or_insert(why);
            op.begin_again();
            op.buffer.give_slot_back();
            return Next::GiveUp(flight);
        }
        if job.is_stopped() {
            return job.drop_read(flight);
        }
        match attempt::settle(job, &*own.member, op, result) {
            Ok(true) => job.complete(flight),
            Ok(false) => self.carry(flight),
            Err(error) => job.fail_read(flight, error),
        }
    }
}

/// Copies what a cache holds, and hands the rest to the routes after it.
pub(super) struct Copier<'a> {
    job: &'a Job,
    number: usize,
    own: &'a LoadRoute,
    cache: CacheFacts,
    /// Reads in the lane.
    in_flight: usize,
}

impl<'a> Copier<'a> {
    pub(super) fn new(job: &'a Job, number: usize, cache: CacheFacts) -> Self {
        Self { job, number, own: &job.routes[number], cache, in_flight: 0 }
    }

    /// Sends a read that the cache cannot serve to the route after it.
    fn hand_over(&self, mut flight: Flight<Reads>) -> Next<Reads> {
        let (job, op) = (self.job, &mut flight.content);
        op.wait();
        let next = job.takers[op.extent].from(self.number + 1);
        match next.filter(|_| job.route != self.own.member.route()) {
            Some(next) => {
                let charge = Charge::of_bytes(job.extent(op).read.len() - op.progress.filled);
                Next::HandOver(flight, queue_of(next), charge)
            }
            None => {
                let error = match job.check_unchanged(op) {
                    Ok(()) => not_cached(job, op, &self.cache),
                    Err(changed) => changed,
                };
                job.fail_read(flight, error)
            }
        }
    }
}

impl Handler<Reads> for Copier<'_> {
    fn begin(&mut self, mut flight: Flight<Reads>) -> Next<Reads> {
        let (job, op) = (self.job, &mut flight.content);
        if self.cache.holds(&*op.source, job.extent(op).read) == Residency::Cold {
            return self.hand_over(flight);
        }
        match take_slot(job, op, self.own, self.in_flight == 0) {
            Ok(true) => {}
            Ok(false) => return Next::PutBack(flight),
            Err(error) => return job.fail_read(flight, error),
        }
        op.cold_access = std::mem::replace(&mut op.access, Access::Buffered);
        match aim(job, op, self.own) {
            Ok(()) => {
                self.in_flight += 1;
                Next::Carry(flight)
            }
            Err(error) => job.fail_read(flight, error),
        }
    }

    fn settle(&mut self, mut flight: Flight<Reads>, result: io::Result<usize>) -> Next<Reads> {
        self.in_flight -= 1;
        let (job, op) = (self.job, &mut flight.content);
        op.access = self.cache.access;
        if job.is_stopped() {
            return job.drop_read(flight);
        }
        let whole = job.extent(op).read.len();
        let name = self.own.member.route();
        let count = match result {
            Ok(count) => count,
            Err(error) if job.route == name && !is_transient(&error) => {
                let error = attempt::failed(job, &*self.own.member, op, error);
                return job.fail_read(flight, error);
            }
            // The route that reads it from the device will see what is wrong, if anything is.
            Err(error) => {
                if self.own.member.facts().landing == Landing::View {
                    // Nothing else tells why these bytes were not copied from where they lie.
                    let why = Unavailable::new(error.to_string(), "");
                    job.tally().refuse(Refusal::new(name.name(), None, why));
                }
                0
            }
        };
        if count as u64 == whole {
            op.progress.filled = whole;
            attempt::account(job, op, name, count, 0);
            return job.complete(flight);
        }
        // The cache ends here: the rest is cold. Staged extents start over rather than hold a slot while they wait.
        if count > 0 {
            if let Buffer::InPlace(_) = op.buffer {
                // Direct reads go on at a whole block.
                op.progress.filled = Alignment::BLOCK.down(count as u64);
            }
            attempt::account(job, op, name, count, 0);
        }
        op.buffer.give_slot_back();
        op.access = op.cold_access;
        self.hand_over(flight)
    }
}

/// Gives a staged read its slot. `false` if none is free and the thread has others to wait for, or the load is over.
fn take_slot(job: &Job, op: &mut ReadOp, route: &LoadRoute, may_wait: bool) -> Result<bool> {
    let slots = route.slots().unwrap_or(&job.slots);
    match &mut op.buffer {
        Buffer::Staged { slot: slot @ None, .. } | Buffer::SharedStaging { slot: slot @ None, .. } => {
            *slot = if may_wait { slots.take() } else { slots.try_take() };
            Ok(slot.as_ref().map(Slot::pin).transpose()?.is_some())
        }
        _ => Ok(true),
    }
}

/// Points a read at the bytes of its extent that are missing.
///
/// # Errors
/// If there is no memory for them.
fn aim(job: &Job, op: &mut ReadOp, route: &LoadRoute) -> Result<()> {
    job.note_reached(op)?;
    if op.access == Access::Direct
        && !route.member.facts().grain.is_any()
        && job.route.may_read_buffered(job.direct)
        && let Some(why) = op.source.direct_refusal().cloned()
    {
        // Found out by an earlier read, perhaps of another load.
        attempt::read_buffered(job, op, why);
    }
    op.aim(job.extent(op).read);
    Ok(())
}

/// The error of a load that must read what a cache holds, of a read that it does not hold.
fn not_cached(job: &Job, op: &ReadOp, cache: &CacheFacts) -> Error {
    let offset = job.extent(op).read.start() + op.progress.filled;
    let tensor = job.name_at(op, offset).map(|tensor| format!(" (tensor '{tensor}')")).unwrap_or_default();
    let why = Unavailable::new(format!("{} does not hold byte {offset}{tensor}", cache.name), cache.fix);
    Error::RouteUnavailable { route: job.route, path: Some(op.source.path().to_owned()), why }
}
