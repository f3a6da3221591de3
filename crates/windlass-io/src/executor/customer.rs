//! What a customer tells the scheduler about its operations.
#![forbid(unsafe_code)]

use super::{
    flight::Flight,
    operation::{Charge, QueueId},
};
use std::{hash::Hash, io, sync::Arc};

/// The types of a customer, and what the scheduler asks it about groups.
pub trait Customer: Sized + Send + Sync {
    /// Moves bytes. Owns the memory that it moves them from or to.
    type Operation: Send;
    /// Comes back with the end of a group.
    type Group: Send;
    /// Names an event of a device, and keeps it alive.
    type Event: Clone + Eq + Hash + Send;
    /// Why a group failed.
    type Error: From<Reason> + Send;

    /// A group has ended: all of its operations are dropped, or were ended by the customer. Called exactly once, by any
    /// thread, without locks held. A panic is contained.
    fn ended(&self, group: Self::Group, result: Result<(), Self::Error>);

    /// Whether a device has reached an event. Called often: it must not wait.
    ///
    /// # Errors
    /// If it cannot be known. The groups that wait for it fail.
    fn is_reached(&self, _event: &Self::Event) -> Result<bool, Self::Error> {
        Err(Reason::Unserved.into())
    }
}

/// What one thread with a lane does with the operations of a customer. Panics are contained: the operation fails.
pub trait Handler<C: Customer> {
    /// An operation was taken from its queue, and has its room: takes the slot, opens the file, aims the first attempt.
    fn begin(&mut self, flight: Flight<C>) -> Next<C>;

    /// An attempt came back from the lane.
    fn settle(&mut self, flight: Flight<C>, result: io::Result<usize>) -> Next<C>;
}

/// What becomes of an operation next.
pub enum Next<C: Customer> {
    /// The lane makes an attempt.
    Carry(Flight<C>),
    /// Another queue serves the rest, with this charge. The room is free meanwhile. It must be one of those that the queue
    /// [hands over to](super::QueueOptions::hands_over_to).
    HandOver(Flight<C>, QueueId, Charge),
    /// It cannot begin now: it returns to its place, and this thread takes no other until an operation has ended.
    PutBack(Flight<C>),
    /// The lane is of no use for its queue: it returns to its place. This thread ends once the lane is empty.
    GiveUp(Flight<C>),
    /// It has ended, or its ticket was kept and will be ended.
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
