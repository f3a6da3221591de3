//! Reads as the scheduler sees them: a group each, of pieces that wait for a lane.
#![forbid(unsafe_code)]

use super::state::BatchState;
use crate::{ByteRange, Error, Result, route::ReadOp};
use hoistway_io::executor::{
    Bound, Charge, Customer, Limits, Operation, Priority, QueueId, QueueOptions, Scheduler, Submission,
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
