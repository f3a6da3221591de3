//! Operations that have begun, and the tickets that end them.
#![forbid(unsafe_code)]

use super::{
    customer::{Customer, Reason},
    operation::{Charge, GroupId, Priority, QueueId},
    queues::Position,
    scheduler::Scheduler,
};
use std::{
    mem,
    sync::{Arc, Weak},
};

/// An operation that has begun. If it is dropped, it fails as [abandoned](Reason::Abandoned).
pub struct Flight<C: Customer> {
    /// The customer's operation. It is dropped before the ticket: memory is free before the group ends.
    pub content: C::Operation,
    ticket: Ticket<C>,
}

/// The right of an operation that has begun to end, and to use its room until then. If it is dropped, the operation fails
/// as [abandoned](Reason::Abandoned).
pub struct Ticket<C: Customer> {
    scheduler: Arc<Scheduler<C>>,
    position: Position,
    has_ended: bool,
}

/// Slots of an operation that was [lost](Ticket::lose).
pub struct LostSlots<C: Customer> {
    scheduler: Weak<Scheduler<C>>,
    queue: QueueId,
    slots: u32,
}

impl<C: Customer> Flight<C> {
    /// Joins an operation and its ticket: the reverse of [`Flight::into_parts`].
    pub fn new(content: C::Operation, ticket: Ticket<C>) -> Self {
        Self { content, ticket }
    }

    pub(super) fn begun(scheduler: Arc<Scheduler<C>>, position: Position, content: C::Operation) -> Self {
        Self { content, ticket: Ticket { scheduler, position, has_ended: false } }
    }

    /// Separates the operation from its ticket, for customers that keep the ticket while a device copies.
    pub fn into_parts(self) -> (C::Operation, Ticket<C>) {
        (self.content, self.ticket)
    }

    /// Returns the ticket.
    pub fn ticket(&self) -> &Ticket<C> {
        &self.ticket
    }

    /// Drops the operation with its memory, then ends it and frees its room.
    pub fn end(self, result: Result<(), C::Error>) {
        let (content, ticket) = self.into_parts();
        drop(content);
        ticket.end(result);
    }
}

impl<C: Customer> Ticket<C> {
    /// Ends the operation, whose memory nothing uses any more.
    pub fn end(mut self, result: Result<(), C::Error>) {
        self.finish(result, false);
    }

    /// Fails the operation, whose memory the system or a device may still use and the caller keeps. Its slots are not used
    /// again, unless the caller gives them back.
    pub fn lose(mut self, error: C::Error) -> LostSlots<C> {
        let Position { queue, charge, .. } = self.position;
        self.finish(Err(error), true);
        LostSlots { scheduler: Arc::downgrade(&self.scheduler), queue, slots: charge.slots }
    }

    /// Returns the room that it uses.
    pub fn charge(&self) -> Charge {
        self.position.charge
    }

    /// Returns the group of the operation.
    pub fn group(&self) -> GroupId {
        self.position.group
    }

    /// Returns the operation's position in its group.
    pub(super) fn index(&self) -> u64 {
        self.position.index
    }

    /// Returns the priority that it began with.
    pub fn priority(&self) -> Priority {
        self.position.priority
    }

    /// Returns the queue that it was taken from.
    pub fn queue(&self) -> QueueId {
        self.position.queue
    }

    /// Returns the scheduler.
    pub fn scheduler(&self) -> &Arc<Scheduler<C>> {
        &self.scheduler
    }

    /// Returns the position of an operation that waits again, which then gets another ticket.
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

impl<C: Customer> LostSlots<C> {
    /// Nothing uses their memory any more.
    pub fn give_back(self) {
        if let Some(scheduler) = self.scheduler.upgrade() {
            scheduler.regain(self.queue, self.slots);
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
