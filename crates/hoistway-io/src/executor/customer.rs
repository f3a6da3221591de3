//! The interface through which a customer describes its operations to the scheduler.
#![forbid(unsafe_code)]

use super::{
    flight::Flight,
    operation::{Charge, QueueId},
};
use std::{hash::Hash, io, sync::Arc};
use tracing::Span;

/// The types of a customer, and what the scheduler asks it about groups.
pub trait Customer: Sized + Send + Sync {
    /// An operation. It owns the memory that it moves bytes from or to.
    type Operation: Send;
    /// Identifies a group to the customer. It comes back when the group ends.
    type Group: Send;
    /// An event of a device, which lives as long as this value.
    type Event: Clone + Eq + Hash + Send;
    /// Why a group failed.
    type Error: From<Reason> + Send;

    /// Is called exactly once for each group, after all of its operations are dropped or were ended by the customer. Any
    /// thread may call it, without locks. A panic is contained.
    fn ended(&self, group: Self::Group, result: Result<(), Self::Error>);

    /// Returns whether a device has reached an event. It is called often and must not wait.
    ///
    /// # Errors
    /// If it cannot be known. The groups that wait for it fail.
    fn is_reached(&self, _event: &Self::Event) -> Result<bool, Self::Error> {
        Err(Reason::Unserved.into())
    }
}

/// Decides for one thread what its lane does with operations. If a call panics, the operation fails.
pub trait Handler<C: Customer> {
    /// Begins an operation that was taken from its queue: takes a slot, opens the file, aims the first attempt.
    fn begin(&mut self, flight: Flight<C>) -> Next<C>;

    /// Handles an attempt that the lane has completed.
    fn settle(&mut self, flight: Flight<C>, result: io::Result<usize>) -> Next<C>;

    /// Returns the span of an attempt, which ends as the lane has completed it. By default there is none.
    fn span(&self, _operation: &C::Operation) -> Span {
        Span::none()
    }
}

/// The next step of an operation.
pub enum Next<C: Customer> {
    /// The lane makes an attempt.
    Carry(Flight<C>),
    /// Another queue serves the rest, with this charge. The room is free meanwhile. It must be one of those that the queue
    /// [hands over to](super::QueueOptions::hands_over_to).
    HandOver(Flight<C>, QueueId, Charge),
    /// The operation cannot begin now and returns to its place. This thread begins no other until an operation has ended,
    /// or a pause is over.
    PutBack(Flight<C>),
    /// The lane cannot serve this queue. The operation returns to its place, and the thread returns once the lane is empty.
    GiveUp(Flight<C>),
    /// The operation has ended, or the customer keeps its ticket.
    Ended,
}

/// Why the scheduler ended an operation, or does not take one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// It was cancelled before it began.
    #[error("it was cancelled before it began")]
    Cancelled,
    /// Its deadline passed before it began.
    #[error("its deadline passed before it began")]
    TimedOut,
    /// The scheduler was closed before it began.
    #[error("the scheduler was closed before it began")]
    Closed,
    /// A lane failed before it began, and the scheduler was closed.
    #[error("waiting for operations failed: {0}")]
    Broken(Arc<str>),
    /// The lane that carried it failed, or was closed without it: the system may still use its memory.
    #[error("the lane that carried it was lost: {0}")]
    Lost(Arc<str>),
    /// It was dropped without an end: by a panic, or by mistake.
    #[error("it was dropped before it ended")]
    Abandoned,
    /// It needs more slots than there are left.
    #[error("it needs more staging slots than its queue has left")]
    NoMemory,
    /// No thread serves its queue, or watches its event.
    #[error("no thread serves it")]
    Unserved,
    /// Operations that have not ended leave it no room.
    #[error("too many operations have not ended")]
    Full,
    /// This process is a child of `fork`: the threads are in its parent.
    #[error("this process was forked: the threads that serve it are in its parent")]
    Forked,
}
