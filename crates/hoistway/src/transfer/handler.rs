//! What becomes of a read that begins, and of one that came back. The same for every route.
#![forbid(unsafe_code)]

use super::{
    attempt,
    engine::Engine,
    order::{Order, Reads},
    routes::{OpenRoute, queue_of},
};
use crate::{
    Alignment, Error, Result,
    memory::Slot,
    report::Refusal,
    route::{
        Access, Buffer, ReadOp, Unavailable,
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
    engine: &'a Engine,
    order: &'a dyn Order,
    number: usize,
    own: &'a OpenRoute,
    /// Reads in the lane.
    in_flight: usize,
    /// Why the route gives up.
    refused: Option<Unavailable>,
}

impl<'a> Fetcher<'a> {
    pub(super) fn new(engine: &'a Engine, order: &'a dyn Order, number: usize) -> Self {
        Self { engine, order, number, own: &engine.routes[number], in_flight: 0, refused: None }
    }

    /// Why the route gave up, if it did.
    pub(super) fn into_refused(self) -> Option<Unavailable> {
        self.refused
    }

    fn carry(&mut self, mut flight: Flight<Reads>) -> Next<Reads> {
        if let Err(error) = aim(self.order, &mut flight.content, self.own) {
            return self.order.fail_read(flight, error);
        }
        self.in_flight += 1;
        Next::Carry(flight)
    }
}

impl Handler<Reads> for Fetcher<'_> {
    fn begin(&mut self, mut flight: Flight<Reads>) -> Next<Reads> {
        match take_slot(self.engine, &mut flight.content, self.own, self.in_flight == 0) {
            Ok(true) => self.carry(flight),
            Ok(false) => Next::PutBack(flight),
            Err(error) => self.order.fail_read(flight, error),
        }
    }

    fn settle(&mut self, mut flight: Flight<Reads>, result: io::Result<usize>) -> Next<Reads> {
        self.in_flight -= 1;
        let (order, own, op) = (self.order, self.own, &mut flight.content);
        let has_heir = || self.engine.heir(self.number).is_some();
        if let Some(why) = own.member.gives_up(op, &result).filter(|_| has_heir()) {
            self.refused.get_or_insert(why);
            op.begin_again();
            order.note_undelivered(std::mem::take(&mut op.account));
            op.buffer.give_slot_back();
            return Next::GiveUp(flight);
        }
        if order.is_stopped() {
            return order.drop_read(flight);
        }
        match attempt::settle(order, &*own.member, op, result) {
            Ok(true) => order.complete(flight),
            Ok(false) => self.carry(flight),
            Err(error) => order.fail_read(flight, error),
        }
    }
}

/// Copies what a cache holds, and hands the rest to the routes after it.
pub(super) struct Copier<'a> {
    engine: &'a Engine,
    order: &'a dyn Order,
    number: usize,
    own: &'a OpenRoute,
    cache: CacheFacts,
    /// Reads in the lane.
    in_flight: usize,
}

impl<'a> Copier<'a> {
    pub(super) fn new(engine: &'a Engine, order: &'a dyn Order, number: usize, cache: CacheFacts) -> Self {
        Self { engine, order, number, own: &engine.routes[number], cache, in_flight: 0 }
    }

    /// Sends a read that the cache cannot serve to the route after it.
    fn hand_over(&self, mut flight: Flight<Reads>) -> Next<Reads> {
        let (order, op) = (self.order, &mut flight.content);
        op.wait();
        let next = self.engine.takers[op.extent].from(self.number + 1);
        match next.filter(|_| !self.engine.names(self.own.member.route())) {
            Some(next) => {
                let charge = Charge::of_bytes(order.range(op).len() - op.progress.filled);
                Next::HandOver(flight, queue_of(next), charge)
            }
            None => {
                let error = match order.check_unchanged(op) {
                    Ok(()) => not_cached(order, op, &self.cache),
                    Err(changed) => changed,
                };
                order.fail_read(flight, error)
            }
        }
    }
}

impl Handler<Reads> for Copier<'_> {
    fn begin(&mut self, mut flight: Flight<Reads>) -> Next<Reads> {
        let (order, op) = (self.order, &mut flight.content);
        if self.cache.holds(&*op.source, order.range(op)) == Residency::Cold {
            return self.hand_over(flight);
        }
        match take_slot(self.engine, op, self.own, self.in_flight == 0) {
            Ok(true) => {}
            Ok(false) => return Next::PutBack(flight),
            Err(error) => return order.fail_read(flight, error),
        }
        op.cold_access = std::mem::replace(&mut op.access, Access::Buffered);
        match aim(order, op, self.own) {
            Ok(()) => {
                self.in_flight += 1;
                Next::Carry(flight)
            }
            Err(error) => order.fail_read(flight, error),
        }
    }

    fn settle(&mut self, mut flight: Flight<Reads>, result: io::Result<usize>) -> Next<Reads> {
        self.in_flight -= 1;
        let (order, op) = (self.order, &mut flight.content);
        op.access = self.cache.access;
        if order.is_stopped() {
            return order.drop_read(flight);
        }
        let whole = order.range(op).len();
        let name = self.own.member.route();
        let count = match result {
            Ok(count) => count,
            Err(error) if self.engine.names(name) && !is_transient(&error) => {
                let error = attempt::failed(order, &*self.own.member, op, error);
                return order.fail_read(flight, error);
            }
            // The route that reads it from the device will see what is wrong, if anything is.
            Err(error) => {
                if self.own.member.facts().landing == Landing::View {
                    // Nothing else tells why these bytes were not copied from where they lie.
                    let why = Unavailable::new(error.to_string(), "");
                    order.tally().refuse(Refusal::new(name.name(), None, why));
                }
                0
            }
        };
        if count as u64 == whole {
            op.progress.filled = whole;
            attempt::account(order, op, name, count, 0);
            return order.complete(flight);
        }
        // The cache ends here: the rest is cold. Staged extents start over rather than hold a slot while they wait.
        if count > 0 {
            if let Buffer::InPlace(_) = op.buffer {
                // Direct reads go on at a whole block.
                op.progress.filled = Alignment::BLOCK.down(count as u64);
            }
            attempt::account(order, op, name, count, 0);
        }
        if !matches!(op.buffer, Buffer::InPlace(_)) {
            // It starts over, and may end while it waits.
            order.note_undelivered(std::mem::take(&mut op.account));
        }
        op.buffer.give_slot_back();
        op.access = op.cold_access;
        self.hand_over(flight)
    }
}

/// Gives a staged read its slot. `false` if none is free and the thread has others to wait for, or the load is over.
fn take_slot(engine: &Engine, op: &mut ReadOp, route: &OpenRoute, may_wait: bool) -> Result<bool> {
    let slots = route.slots().unwrap_or(&engine.slots);
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
fn aim(order: &dyn Order, op: &mut ReadOp, route: &OpenRoute) -> Result<()> {
    order.begins(op)?;
    let (chosen, direct) = order.chosen();
    if op.access == Access::Direct
        && !route.member.facts().grain.is_any()
        && chosen.may_read_buffered(direct)
        && let Some(why) = op.source.direct_refusal().cloned()
    {
        // Found out by an earlier read, perhaps of another load.
        attempt::read_buffered(order, op, why);
    }
    op.aim(order.range(op));
    Ok(())
}

/// The error of an order that must read what a cache holds, of a read that it does not hold.
fn not_cached(order: &dyn Order, op: &ReadOp, cache: &CacheFacts) -> Error {
    let offset = order.range(op).start() + op.progress.filled;
    let tensor = order.name_at(op, offset).map(|tensor| format!(" (tensor '{tensor}')")).unwrap_or_default();
    let why = Unavailable::new(format!("{} does not hold byte {offset}{tensor}", cache.name), cache.fix);
    Error::RouteUnavailable { route: order.chosen().0, path: Some(op.source.path().to_owned()), why }
}
