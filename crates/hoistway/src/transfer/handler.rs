//! What becomes of a read that begins, and of one that came back. The same for every route, and for all who read.
#![forbid(unsafe_code)]

use super::{
    attempt,
    order::{InCopy, Placed, Reads, drop_read, fail},
};
use crate::{
    Alignment, Error, Result,
    memory::Slot,
    report::Refusal,
    route::{
        Access, Buffer, ReadOp, Unavailable,
        member::{CacheFacts, Landing, Member},
    },
};
use hoistway_io::{
    executor::{Charge, Flight, Handler, Next, QueueId},
    file::is_transient,
};
use std::io;
use tracing::{Span, dispatcher, span::Id, trace_span};

/// The routes that one thread makes reads by. They have numbers.
pub(crate) trait Ways {
    /// The next route for a read, after one that has not brought it. `None` if this thread has none.
    ///
    /// # Errors
    /// Why the read cannot be made.
    fn next(&mut self, op: &mut ReadOp, after: Option<usize>) -> Result<Option<usize>>;

    /// A route, if it is none [past the host](ReadOp::past_host).
    fn member(&self, way: usize) -> &dyn Member;

    /// The queue of those that make a read which this thread has no route for. `missing` is the first byte that a cache lacks, if a
    /// copy has found one.
    ///
    /// # Errors
    /// If there are none: the route that was named has not brought it.
    fn others(&self, op: &ReadOp, missing: Option<u64>) -> Result<QueueId>;

    /// A slot for a read, pinned if it has to be. `None` if none is free: the read waits in its queue. With `may_wait`, the thread has
    /// nothing else to do, and may wait here for one that comes.
    ///
    /// # Errors
    /// Why there will be none.
    fn take_slot(&self, op: &ReadOp, may_wait: bool) -> Result<Option<Slot>>;

    /// The route of a read gives up.
    fn gives_up(&self, op: &ReadOp, why: Unavailable) -> After;
}

/// What follows when a route gives up.
pub(crate) enum After {
    /// The error is that of the read.
    Error,
    /// The read waits for a thread, which makes it by another route. It ends instead if its group is over.
    WaitAgain,
    /// The thread leaves the lane.
    LeaveLane,
}

/// Has the reads of one thread made.
pub(crate) struct Mover<W> {
    ways: W,
    /// Reads in the lane.
    in_flight: usize,
}

impl<W: Ways> Mover<W> {
    pub(crate) fn new(ways: W) -> Self {
        Self { ways, in_flight: 0 }
    }

    pub(super) fn into_ways(self) -> W {
        self.ways
    }

    /// Has a read made by the first route, or by the next after a cache that lacks a byte of it, `missing` if that is known.
    fn go_on(
        &mut self,
        mut flight: Flight<Reads>,
        after: Option<usize>,
        missing: Option<u64>,
    ) -> Next<Reads> {
        match self.begin_by_next(&mut flight.content, after) {
            Ok(Begun::Aimed) => self.carry(flight),
            Ok(Begun::NoSlot) => Next::PutBack(flight),
            Ok(Begun::NoRoute) => self.hand_over(flight, missing),
            Err(error) => fail(flight, error),
        }
    }

    fn begin_by_next(&mut self, op: &mut ReadOp, after: Option<usize>) -> Result<Begun> {
        let Some(way) = self.ways.next(op, after)? else { return Ok(Begun::NoRoute) };
        op.way = way;
        let facts = match &op.past_host {
            Some(route) => route.member.facts(),
            None => self.ways.member(way).facts(),
        };
        let access = if facts.cache.is_some() { Access::Buffered } else { op.access };
        let range_before = op.part.range;
        op.order.begins(&mut op.part, &mut op.buffer, &facts, access)?;
        if !op.account.is_empty()
            && (op.part.range != range_before || !matches!(op.buffer, Buffer::InPlace(_)))
        {
            start_over(op);
        }
        if let Some(None) = op.buffer.slot() {
            let Some(slot) = self.ways.take_slot(op, self.in_flight == 0)? else { return Ok(Begun::NoSlot) };
            if let Some(place) = op.buffer.slot() {
                *place = Some(slot);
            }
        }
        if facts.cache.is_some() {
            op.cold_access = std::mem::replace(&mut op.access, access);
        } else if op.access == Access::Direct
            && !facts.grain.is_any()
            && let (route, direct) = op.order.chosen()
            && route.may_read_buffered(direct)
            && let Some(why) = op.source.direct_refusal().cloned()
        {
            // Found out by an earlier read, perhaps of another load.
            attempt::read_buffered(op, why);
        }
        Ok(Begun::Aimed)
    }

    fn carry(&mut self, mut flight: Flight<Reads>) -> Next<Reads> {
        flight.content.aim();
        self.in_flight += 1;
        Next::Carry(flight)
    }

    /// Sends a read that this thread cannot make to one that can.
    fn hand_over(&self, flight: Flight<Reads>, missing: Option<u64>) -> Next<Reads> {
        let op = &flight.content;
        match self.ways.others(op, missing) {
            Ok(queue) => {
                let charge = Charge::of_bytes(op.part.range.len() - op.progress.filled);
                Next::HandOver(flight, queue, charge)
            }
            Err(error) => fail(flight, error),
        }
    }

    /// What came of a copy from a cache.
    fn settle_copy(
        &mut self,
        mut flight: Flight<Reads>,
        result: io::Result<usize>,
        cache: CacheFacts,
    ) -> Next<Reads> {
        let op = &mut flight.content;
        let member = self.ways.member(op.way);
        op.access = cache.access;
        let (whole, name) = (op.part.range.len(), member.route());
        let is_view = member.facts().landing == Landing::View;
        // Pages that cannot be pinned may be held nevertheless.
        let reached = result.as_ref().ok().filter(|_| !is_view);
        let missing = reached.map(|&count| op.part.range.start() + count as u64);
        let count = match result {
            Ok(count) => count,
            Err(error) if op.order.chosen().0 == name && !is_transient(&error) => {
                let error = attempt::failed(member, op, error);
                return fail(flight, error);
            }
            // The route that reads it from the device will see what is wrong, if anything is.
            Err(error) => {
                if is_view {
                    // Nothing else tells why these bytes were not copied from where they lie.
                    let why = Unavailable::new(error.to_string(), "");
                    op.order.tally().refuse(Refusal::new(name.name(), None, why));
                }
                0
            }
        };
        if count as u64 == whole {
            op.progress.filled = whole;
            attempt::account(op, name, count, 0);
            return complete(flight);
        }
        // The cache ends here: the rest is cold. Staged reads start over rather than hold a slot while they wait.
        if count > 0 {
            if let Buffer::InPlace(_) = op.buffer {
                // Direct reads go on at a whole block.
                op.progress.filled = Alignment::BLOCK.down(count as u64);
            }
            attempt::account(op, name, count, 0);
        }
        if !matches!(op.buffer, Buffer::InPlace(_)) {
            start_over(op);
        }
        op.access = op.cold_access;
        op.wait();
        let way = op.way;
        self.go_on(flight, Some(way), missing)
    }
}

/// What a read needs to begin.
enum Begun {
    Aimed,
    NoSlot,
    NoRoute,
}

impl<W: Ways> Handler<Reads> for Mover<W> {
    fn begin(&mut self, flight: Flight<Reads>) -> Next<Reads> {
        match flight.content.order.may_begin(&flight.content.part) {
            Ok(()) => self.go_on(flight, None, None),
            Err(failure) => drop_read(flight, failure),
        }
    }

    fn settle(&mut self, mut flight: Flight<Reads>, result: io::Result<usize>) -> Next<Reads> {
        self.in_flight -= 1;
        if let Err(failure) = flight.content.order.may_go_on(&flight.content.part) {
            return drop_read(flight, failure);
        }
        let op = &mut flight.content;
        let past_host = op.past_host.clone();
        let member = match &past_host {
            Some(route) => &*route.member,
            None => self.ways.member(op.way),
        };
        if let Some(cache) = member.facts().cache {
            return self.settle_copy(flight, result, cache);
        }
        if let Some(why) = member.gives_up(op, &result) {
            let after = self.ways.gives_up(op, why);
            if !matches!(after, After::Error) {
                start_over(op);
            }
            match after {
                After::Error => {}
                After::WaitAgain => {
                    let (queue, charge) = (flight.ticket().queue(), flight.ticket().charge());
                    return Next::HandOver(flight, queue, charge);
                }
                After::LeaveLane => return Next::GiveUp(flight),
            }
        }
        match attempt::settle(member, op, result) {
            Ok(true) => complete(flight),
            Ok(false) => self.carry(flight),
            Err(error) => fail(flight, error),
        }
    }

    fn span(&self, op: &ReadOp) -> Span {
        let route = || match &op.past_host {
            Some(route) => route.member.route().name(),
            None => self.ways.member(op.way).route().name(),
        };
        let span = |parent: Option<Id>| {
            trace_span!(
                parent: parent,
                "read",
                route = route(),
                direct = op.access == Access::Direct,
                file = %op.source.path().display(),
                offset = op.part.range.start() + op.progress.filled,
                bytes = op.part.range.len() - op.progress.filled,
            )
        };
        // A span is known to its own subscriber alone, which need not be that of this thread.
        let of_order = op.order.span().and_then(|parent| {
            parent.with_subscriber(|(id, dispatch)| {
                dispatcher::with_default(dispatch, || span(Some(id.clone())))
            })
        });
        of_order.unwrap_or_else(|| span(None))
    }
}

/// Nothing of a read is there any more, and its slot is free. It may end while it waits, so what was read is noted now.
fn start_over(op: &mut ReadOp) {
    op.begin_again();
    op.buffer.give_slot_back();
    op.order.note_undelivered(std::mem::take(&mut op.account));
}

/// All bytes of a read are there: they go where they belong.
fn complete(mut flight: Flight<Reads>) -> Next<Reads> {
    // If the order panics, the flight drops the operation before its ticket.
    let op = &mut flight.content;
    let (file, bytes) = (op.source.path().display(), op.part.wanted.len());
    let _delivering = trace_span!("deliver", file = %file, offset = op.part.wanted.start(), bytes).entered();
    let arrived = op.order.check_arrived(&op.part, &|| op.check_unchanged());
    match arrived.and_then(|()| op.order.place(&op.part, &mut op.buffer)) {
        Ok(Placed::Here(staged_bytes)) => {
            op.order.deliver(&op.part, std::mem::take(&mut op.account), staged_bytes);
            let buffer = std::mem::replace(&mut op.buffer, Buffer::SLOT);
            match op.order.complete(&op.part, buffer) {
                Ok(()) => {
                    flight.end(Ok(()));
                    Next::Ended
                }
                Err(error) => fail(flight, error),
            }
        }
        Ok(Placed::InSlot(slot)) => {
            let (op, ticket) = flight.into_parts();
            let order = op.order.clone();
            let read = InCopy::of(op, ticket, slot.is_view());
            order.copy_on(slot, read);
            Next::Ended
        }
        Err(error) => fail(flight, error),
    }
}

/// The error of an order that must read what a cache holds, of a read that it does not hold: `missing` is the first byte that it
/// lacks, if a copy has found one.
pub(crate) fn not_cached(op: &ReadOp, cache: &CacheFacts, missing: Option<u64>) -> Error {
    if let Err(changed) = op.check_unchanged() {
        return changed;
    }
    let wanted = op.part.wanted;
    // What is read before the bytes that are wanted is of their first page.
    let missing = missing.map(|offset| offset.max(wanted.start()));
    let lacks = match missing {
        Some(offset) => format!("byte {offset}"),
        None => format!("all of bytes {wanted}"),
    };
    let tensor = op.order.name_at(op.part.item, missing.unwrap_or(wanted.start()));
    let tensor = tensor.map(|tensor| format!(" (tensor '{tensor}')")).unwrap_or_default();
    let why = Unavailable::new(format!("{} does not hold {lacks}{tensor}", cache.name), cache.fix);
    Error::RouteUnavailable { route: op.order.chosen().0, path: Some(op.source.path().to_owned()), why }
}
