//! Operations that have begun, and the tickets that end them.
#![forbid(unsafe_code)]

use super::{
    customer::{Customer, Reason},
    operation::{Charge, GroupId, Priority, QueueId},
    scheduler::Scheduler,
    state::Position,
};
use std::{mem, sync::Arc};

/// An operation that has begun. If it is dropped, it fails as [abandoned](Reason::Abandoned).
pub struct Flight<C: Customer> {
    /// What the customer made of it. Dropped before the ticket: memory is free before the group ends.
    pub content: C::Operation,
    ticket: Ticket<C>,
}

/// The end of an operation that has begun, which takes its room until then. If it is dropped, the operation fails as
/// [abandoned](Reason::Abandoned).
pub struct Ticket<C: Customer> {
    scheduler: Arc<Scheduler<C>>,
    position: Position,
    has_ended: bool,
}

impl<C: Customer> Flight<C> {
    /// An operation and the ticket that came with it: the reverse of [`Flight::into_parts`].
    pub fn new(content: C::Operation, ticket: Ticket<C>) -> Self {
        Self { content, ticket }
    }

    pub(super) fn begun(scheduler: Arc<Scheduler<C>>, position: Position, content: C::Operation) -> Self {
        Self { content, ticket: Ticket { scheduler, position, has_ended: false } }
    }

    /// What ends it, for customers that use its memory after the lane: a device that copies from it.
    pub fn into_parts(self) -> (C::Operation, Ticket<C>) {
        (self.content, self.ticket)
    }

    /// The ticket.
    pub fn ticket(&self) -> &Ticket<C> {
        &self.ticket
    }

    /// Ends it: its memory is dropped, its room is free.
    pub fn end(self, result: Result<(), C::Error>) {
        let (content, ticket) = self.into_parts();
        drop(content);
        ticket.end(result);
    }
}

impl<C: Customer> Ticket<C> {
    /// The operation has ended: nothing uses its memory any more.
    pub fn end(mut self, result: Result<(), C::Error>) {
        self.finish(result, false);
    }

    /// The operation has failed, and the system or a device may still use its memory, which the caller has leaked. Its
    /// slots are not used again.
    pub fn lose(mut self, error: C::Error) {
        self.finish(Err(error), true);
    }

    /// What it takes of the room.
    pub fn charge(&self) -> Charge {
        self.position.charge
    }

    /// The group of the operation.
    pub fn group(&self) -> GroupId {
        self.position.group
    }

    /// The priority that its room was taken with.
    pub fn priority(&self) -> Priority {
        self.position.priority
    }

    /// The queue that it was taken from.
    pub fn queue(&self) -> QueueId {
        self.position.queue
    }

    /// What it is part of.
    pub fn scheduler(&self) -> &Arc<Scheduler<C>> {
        &self.scheduler
    }

    /// The operation waits again: its end is another ticket's.
    pub(super) fn defuse(mut self) -> Position {
        self.has_ended = true;
        self.position
    }

    fn finish(&mut self, result: Result<(), C::Error>, is_lost: bool) {
        if !mem::replace(&mut self.has_ended, true) {
            self.scheduler.end(&self.position, result, is_lost);
        }
    }
}

impl<C: Customer> Drop for Ticket<C> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.finish(Err(Reason::Abandoned.into()), false);
        }
    }
}

impl<C: Customer> std::fmt::Debug for Ticket<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket").field("position", &self.position).finish_non_exhaustive()
    }
}
