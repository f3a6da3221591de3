//! Reads as the scheduler sees them: a group each, of pieces that wait for a lane.
#![forbid(unsafe_code)]

use super::{batch::BatchState, pieces::Piece, worker::InLane};
use crate::{Error, Result, report::Carrier};
use hoistway_io::executor::{
    Bound, Charge, Customer, Flight, Limits, Next, Operation, Priority, QueueId, QueueOptions, Scheduler,
    Submission, Ticket,
};
use std::{convert::Infallible, sync::Arc, time::Instant};

/// The queue of all pieces.
pub(super) const PIECES: QueueId = QueueId(0);

/// The customer of a reader's scheduler.
#[derive(Debug)]
pub(super) struct Reads;

/// A read of a batch.
pub(super) struct ReadOf {
    pub(super) batch: Arc<BatchState>,
    pub(super) read: usize,
}

/// A piece, and the read that it is in, once one was aimed at it.
pub(super) struct Work {
    piece: Piece,
    pub(super) in_lane: Option<InLane>,
}

/// A piece that was taken out, until its read has ended.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) piece: Piece,
    ticket: Ticket<Reads>,
}

impl Customer for Reads {
    type Operation = Work;
    type Group = ReadOf;
    type Event = Infallible;
    type Error = Error;

    fn ended(&self, ReadOf { batch, read }: ReadOf, result: Result<()>) {
        batch.end(read, result);
    }
}

impl Reads {
    /// A scheduler for so many lanes.
    pub(super) fn scheduler(lanes: usize) -> Arc<Scheduler<Self>> {
        let in_flight = Bound { rest_operations: (lanes / 2).max(1), ..Bound::NONE };
        Scheduler::new(Self, Limits { accepted: Bound::NONE, in_flight }, &[QueueOptions::default()])
    }

    pub(super) fn submission(
        of: ReadOf,
        pieces: Vec<Piece>,
        priority: Priority,
        begin_by: Option<Instant>,
    ) -> Submission<Self> {
        let tag = of.batch.number;
        let operations = pieces.into_iter().map(|piece| Operation {
            queue: PIECES,
            charge: Charge::of_bytes(piece.wanted.len()),
            order: 0,
            content: Work { piece, in_lane: None },
        });
        Submission { tag, priority, deadline: begin_by, ..Submission::new(of, operations.collect()) }
    }
}

impl Taken {
    /// The piece of an operation, which waits or comes back from a lane.
    pub(super) fn of(flight: Flight<Reads>) -> (Self, Option<InLane>) {
        let (Work { piece, in_lane }, ticket) = flight.into_parts();
        (Self { piece, ticket }, in_lane)
    }

    /// The operation again, for the scheduler.
    pub(super) fn into_flight(self, in_lane: Option<InLane>) -> Flight<Reads> {
        let Self { piece, ticket } = self;
        Flight::new(Work { piece, in_lane }, ticket)
    }

    /// Its memory is not used any more.
    pub(super) fn end(self, result: Result<()>) {
        let Self { piece, ticket } = self;
        if result.is_ok() {
            piece.batch().deliver(piece.wanted.len());
        }
        drop(piece);
        ticket.end(result);
    }

    /// It fails before anything was read.
    pub(super) fn fail(self, error: Error) -> Next<Reads> {
        self.end(Err(error));
        Next::Ended
    }

    /// The same as [`Taken::end`], and notes who read it: `staged_bytes` of it by way of a slot.
    pub(super) fn end_carried(self, carriers: Vec<Carrier>, staged_bytes: u64, result: Result<()>) {
        self.piece.batch().account(carriers, staged_bytes, result.is_ok());
        self.end(result);
    }
}
