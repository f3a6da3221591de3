//! What an owner supplies to have its reads carried.
#![forbid(unsafe_code)]

use super::attempt::Read;
use crate::{Error, Result, report::Account, route::ReadOp};
use hoistway_io::executor::{Customer, Flight, Next, Reason, Ticket};
use std::{convert::Infallible, io, sync::Weak};

/// The reads of one order. The order itself ends when their group does.
#[derive(Debug)]
pub(crate) struct Reads;

impl Customer for Reads {
    type Operation = ReadOp;
    type Group = Weak<dyn Order>;
    type Event = Infallible;
    type Error = Reason;

    fn ended(&self, order: Weak<dyn Order>, result: Result<(), Reason>) {
        if let Some(order) = order.upgrade() {
            order.reads_ended(result);
        }
    }
}

/// What is asked for: its reads, and what becomes of them. Threads of an engine call it without locks.
pub(crate) trait Order: Read + Send + Sync {
    /// Whether it ended before all reads had.
    fn is_stopped(&self) -> bool;

    /// A read begins to fill its memory.
    ///
    /// # Errors
    /// [`Error::MemoryBudget`] if the system has no memory for it any more.
    fn begins(&self, op: &ReadOp) -> Result<()>;

    /// All bytes of a read are there: they go to their places.
    fn complete(&self, flight: Flight<Reads>) -> Next<Reads>;

    /// It is over. The first reason given is the one that its owner sees.
    fn fail(&self, error: Error);

    /// The error of a lane that cannot find out what becomes of its reads, by the position of the first of them.
    fn lost_reads(&self, first: Option<u64>, source: io::Error) -> Error;

    /// All reads have ended.
    fn reads_ended(&self, result: Result<(), Reason>);

    /// A read is over, and has delivered nothing.
    fn note_undelivered(&self, mut account: Account) {
        if !account.is_empty() {
            account.take_back();
            self.tally().add(account, 0);
        }
    }

    /// It is over because of a read.
    fn fail_read(&self, flight: Flight<Reads>, error: Error) -> Next<Reads> {
        self.fail(error);
        self.drop_read(flight)
    }

    /// It is over because of a read, whose memory is free already.
    fn fail_with(&self, ticket: Ticket<Reads>, account: Account, error: Error) {
        self.note_undelivered(account);
        self.fail(error);
        ticket.end(Err(Reason::Cancelled));
    }

    /// Ends a read of an order that is over.
    fn drop_read(&self, mut flight: Flight<Reads>) -> Next<Reads> {
        self.note_undelivered(std::mem::take(&mut flight.content.account));
        flight.end(Err(Reason::Cancelled));
        Next::Ended
    }
}
