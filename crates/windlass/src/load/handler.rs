//! What a load does with a read that begins, and what it makes of one that came back. The same for every route.
#![forbid(unsafe_code)]

use super::{
    job::Job,
    routes::LoadRoute,
    serve::{Reads, queue_of},
};
use crate::{
    Alignment, ByteRange, Error, Result,
    memory::Slot,
    report::Refusal,
    route::{Access, Buffer, DirectIo, Outcome, ReadOp, Unavailable, member::no_direct_reads},
};
use std::io;
use windlass_io::{
    executor::{Charge, Flight, Handler, Next},
    file::{Residency, is_transient},
};

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

    /// What an attempt asks for that did not bring all.
    fn go_on(&self, op: &mut ReadOp, outcome: Outcome) -> Result<()> {
        let job = self.job;
        match outcome {
            Outcome::Complete | Outcome::Short => {}
            Outcome::DirectEndsEarly { is_final } => {
                let reason = format!("{} ends direct reads early", op.source.medium());
                let why = Unavailable::new(reason, "");
                if job.direct != DirectIo::Always {
                    let path = Some(op.source.path().to_owned());
                    job.note_refusal(Refusal { what: "direct reads".into(), path, why });
                    op.access = Access::Buffered;
                } else if is_final {
                    return Err(refused_direct(job, op, &why));
                }
            }
            Outcome::Interrupted => job.note_interruption(),
            Outcome::DirectRefused(error) => {
                let reason = format!("{} refused a direct read: {error}", op.source.medium());
                let why = Unavailable::new(reason, "");
                if !job.may_read_buffered() {
                    return Err(refused_direct(job, op, &why));
                }
                // `aim` reports it.
                op.source.refuse_direct(why);
            }
            Outcome::Failed(error) => return Err(read_error(job, op, error, self.own)),
        }
        Ok(())
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
        let (name, any_bytes) = (own.member.route(), own.member.reads_any_bytes());
        if let Some(why) = own.member.gives_up(op, &result).filter(|_| job.heir(self.number).is_some()) {
            self.refused.get_or_insert(why);
            job.take_back(op, name);
            op.buffer.give_slot_back();
            return Next::GiveUp(flight);
        }
        if job.is_stopped() {
            return job.drop_read(flight);
        }
        let whole = job.extent(op).read.len();
        let outcome =
            op.outcome(whole, result, any_bytes, |op, count, filled| job.account(op, name, count, filled));
        if outcome.is_short() {
            job.note_short_read();
            if let Err(error) = job.check_unchanged(op) {
                return job.fail_read(flight, error);
            }
        }
        if matches!(outcome, Outcome::Complete) {
            return job.complete(flight);
        }
        match self.go_on(op, outcome) {
            Ok(()) => self.carry(flight),
            Err(error) => job.fail_read(flight, error),
        }
    }
}

/// Copies what the page cache holds, one read after the other, and hands the rest to the routes after it.
pub(super) struct Copier<'a> {
    job: &'a Job,
    number: usize,
    own: &'a LoadRoute,
    /// How the routes after it make the read in the lane.
    cold_access: Access,
}

impl<'a> Copier<'a> {
    pub(super) fn new(job: &'a Job, number: usize) -> Self {
        Self { job, number, own: &job.routes[number], cold_access: Access::Direct }
    }

    /// Sends a read that the cache cannot serve to the route after it.
    fn hand_over(&self, flight: Flight<Reads>) -> Next<Reads> {
        let (job, op) = (self.job, &flight.content);
        let name = self.own.member.route();
        if job.route == name {
            let error = match job.check_unchanged(op) {
                Ok(()) => not_cached(job, op),
                Err(changed) => changed,
            };
            return job.fail_read(flight, error);
        }
        match job.takers[op.extent].from(self.number + 1) {
            Some(next) => {
                let charge = Charge::of_bytes(job.extent(op).read.len() - op.progress.filled);
                Next::HandOver(flight, queue_of(next), charge)
            }
            None => {
                let error = Error::Internal("no route takes what the page cache does not hold".into());
                job.fail_read(flight, error)
            }
        }
    }
}

impl Handler<Reads> for Copier<'_> {
    fn begin(&mut self, mut flight: Flight<Reads>) -> Next<Reads> {
        let (job, op) = (self.job, &mut flight.content);
        if op.source.residency(job.extent(op).read) == Residency::Cold {
            return self.hand_over(flight);
        }
        match take_slot(job, op, self.own, true) {
            Ok(true) => {}
            Ok(false) => return Next::PutBack(flight),
            Err(error) => return job.fail_read(flight, error),
        }
        self.cold_access = std::mem::replace(&mut op.access, Access::Buffered);
        match aim(job, op, self.own) {
            Ok(()) => Next::Carry(flight),
            Err(error) => job.fail_read(flight, error),
        }
    }

    fn settle(&mut self, mut flight: Flight<Reads>, result: io::Result<usize>) -> Next<Reads> {
        let (job, op) = (self.job, &mut flight.content);
        let whole = job.extent(op).read.len();
        let name = self.own.member.route();
        let count = match result {
            Ok(count) => count,
            Err(error) if job.route == name && !is_transient(&error) => {
                let error = read_error(job, op, error, self.own);
                return job.fail_read(flight, error);
            }
            // The route that reads it from the device will see what is wrong, if anything is.
            Err(_) => 0,
        };
        if count as u64 == whole {
            op.progress.filled = whole;
            job.account(op, name, count, 0);
            return job.complete(flight);
        }
        // The cache ends here: the rest is cold. Staged extents start over rather than hold a slot while they wait.
        if count > 0 {
            if let Buffer::InPlace(_) = op.buffer {
                // Direct reads go on at a whole block.
                op.progress.filled = Alignment::BLOCK.down(count as u64);
            }
            job.account(op, name, count, 0);
        }
        op.buffer.give_slot_back();
        op.access = self.cold_access;
        self.hand_over(flight)
    }
}

impl Buffer {
    /// Frees the slot of a read that goes by way of one.
    fn give_slot_back(&mut self) {
        match self {
            Self::InPlace(_) => {}
            Self::Staged { slot, .. } | Self::SharedStaging { slot, .. } => *slot = None,
        }
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
        && !route.member.reads_any_bytes()
        && job.may_read_buffered()
        && let Some(why) = op.source.direct_refusal()
    {
        // Found out by an earlier read, perhaps of another load.
        let (what, path) = ("direct reads".into(), Some(op.source.path().to_owned()));
        job.note_refusal(Refusal { what, path, why: why.clone() });
        op.access = Access::Buffered;
    }
    op.aim(job.extent(op).read);
    Ok(())
}

/// The error of a load that must read what the page cache holds, of a read that it does not hold.
fn not_cached(job: &Job, op: &ReadOp) -> Error {
    let offset = job.extent(op).read.start() + op.progress.filled;
    let tensor = job.tensor_name(op).map(|tensor| format!(" (tensor '{tensor}')")).unwrap_or_default();
    let reason = format!("the page cache does not hold byte {offset}{tensor}");
    let why = Unavailable::new(reason, "run 'windlass warm' first, or choose route auto");
    Error::RouteUnavailable { route: job.route, path: Some(op.source.path().to_owned()), why }
}

/// The error of a load that must read past the page cache and cannot.
fn refused_direct(job: &Job, op: &ReadOp, why: &Unavailable) -> Error {
    let why = no_direct_reads(&why.reason);
    Error::RouteUnavailable { route: job.route, path: Some(op.source.path().to_owned()), why }
}

/// The error of a read that cannot be repeated.
fn read_error(job: &Job, op: &ReadOp, source: io::Error, route: &LoadRoute) -> Error {
    let extent = job.extent(op);
    // A file that was cut or swapped explains most read errors better than the error does. A daemon that hangs would not
    // say so, ever.
    if !route.member.is_lost(&source)
        && let Err(changed) = job.check_unchanged(op)
    {
        return changed;
    }
    let tensor = job.tensor_name(op);
    let range = ByteRange::new(extent.read.start() + op.progress.filled, extent.read.end());
    Error::Io { operation: "read", path: op.source.path().to_owned(), tensor, range, source }
}
