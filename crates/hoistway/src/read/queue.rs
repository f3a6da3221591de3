//! Reads as the scheduler sees them: a group each, of pieces that wait for a lane.
#![forbid(unsafe_code)]

use super::{batch::BatchState, pieces::Piece};
use crate::{
    ByteRange, Error, Result,
    route::{Done, ReadLane, ReadOp},
};
use hoistway_io::executor::{
    Bound, Charge, Customer, Flight, Limits, Next, Operation, Priority, QueueId, QueueOptions, Scheduler,
    Submission, Ticket,
};
use std::{convert::Infallible, io, sync::Arc, time::Instant};

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

/// A piece that was taken out, until its read has ended.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) piece: Box<Piece>,
    pub(super) op: ReadOp,
    ticket: Ticket<Reads>,
}

impl Customer for Reads {
    type Operation = ReadOp;
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
        pieces: impl Iterator<Item = (ByteRange, ReadOp)>,
        priority: Priority,
        begin_by: Option<Instant>,
    ) -> Submission<Self> {
        let tag = of.batch.number;
        let operations = pieces.map(|(wanted, content)| Operation {
            queue: PIECES,
            charge: Charge::of_bytes(wanted.len()),
            order: 0,
            content,
        });
        Submission { tag, priority, deadline: begin_by, ..Submission::new(of, operations.collect()) }
    }
}

impl Taken {
    /// The piece of an operation, which waits or comes back from a lane. One that is none has failed.
    pub(super) fn of(flight: Flight<Reads>) -> Option<Self> {
        let (mut op, ticket) = flight.into_parts();
        match op.piece.take().map(|piece| piece.downcast()) {
            Some(Ok(piece)) => Some(Self { piece, op, ticket }),
            _ => {
                drop(op);
                ticket.end(Err(Error::Internal("a read of a reader is of no piece".into())));
                None
            }
        }
    }

    /// The operation again, for the scheduler.
    pub(super) fn into_flight(self) -> Flight<Reads> {
        let Self { piece, mut op, ticket } = self;
        op.piece = Some(piece);
        Flight::new(op, ticket)
    }

    /// Has a lane that nothing else is in make the read now. `None` if the lane has lost it.
    pub(super) fn read_now(self, lane: &mut ReadLane) -> Option<(Self, io::Result<usize>)> {
        let Self { piece, op, ticket } = self;
        let mut done = Vec::with_capacity(1);
        lane.push(op.into());
        match lane.submit_and_wait(&mut done).ok().and_then(|()| done.pop()) {
            Some(Done { op, result }) => Some((Self { piece, op: op.content, ticket }, result)),
            None => {
                drop(piece);
                ticket.end(Err(Error::Internal("a lane has lost a read that it made at once".into())));
                None
            }
        }
    }

    /// Its memory is not used any more: `staged_bytes` of it passed a slot.
    pub(super) fn end(self, staged_bytes: u64, result: Result<()>) {
        let Self { piece, mut op, ticket } = self;
        let mut account = std::mem::take(&mut op.account);
        drop(op);
        match &result {
            Ok(()) => piece.batch().deliver(piece.wanted.len()),
            // It was read for nothing.
            Err(_) => account.take_back(),
        }
        if !account.is_empty() || staged_bytes > 0 {
            piece.batch().tally().add(account, staged_bytes);
        }
        drop(piece);
        ticket.end(result);
    }

    /// It fails.
    pub(super) fn fail(self, error: Error) -> Next<Reads> {
        self.end(0, Err(error));
        Next::Ended
    }
}
