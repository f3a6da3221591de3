//! One scheduler for all that moves bytes: loads, readers, saves, KV blocks, experts.
//!
//! ```text
//! submit ──► gate, event ──► queue ──► begin ──► lane ──► settle ──► end ──► group's end
//!            held back       waits     has its   in       again, or  its     told to the
//!                                      room      flight   elsewhere  room    customer
//!                                                                    is free
//! ```
//!
//! # Terms
//! * An [`Operation`] is one read, write or sync. Its content is the customer's, and owns the memory that it uses.
//! * A group ([`Submission`]) is what ends: once, when all of its operations have ended and are dropped, with the first
//!   error. Operations that have not begun by then do not begin. An operation that ends for itself is a group of one.
//! * A queue ([`QueueId`]) holds what waits for lanes of one kind. A [`Handler`] hands operations over to another queue, and
//!   [`Scheduler::redirect`] gives a whole queue to another.
//! * A [`Handler`] is what one thread with a lane does with operations. A [`Customer`] is told of the ends of groups.
//! * A [`Ticket`] is an operation's right to its room. Its end is the operation's end, on whatever thread.
//!
//! # What the scheduler decides
//! * **Order**: the more urgent first, then the older. An operation is overtaken by more urgent ones a bounded number of
//!   times ([`Priority::most_overtakings`]), then it is next. That is the one rule against starvation.
//! * **Room**: [`Limits`] bound bytes and operations, both of what is accepted and of what is in flight; part of both is for
//!   demand only. [`QueueOptions::slots`] bounds staging slots. What is next and lacks room is not overtaken for it.
//! * **Gates**: operations of a group begin at once, in stages (writes, then their sync), or as far as a consumer has got.
//! * **Ends**: cancellation, deadlines, [`Scheduler::close`] and errors remove what has not begun. What a lane, the system or
//!   a device has ends as it may: its memory is in use until then. [`Ticket::lose`] says that this is never known.
//!
//! Threads are the customer's: [`Scheduler::serve`] makes one of them serve queues, [`Executor`] keeps some. With
//! [`Patience::None`] the caller's own thread serves, and no other is needed. In a child of `fork` nothing is accepted, and
//! nothing locks.
//!
//! # How customers use it
//! | customer | groups | queues | gate | what its handlers do |
//! |---|---|---|---|---|
//! | reader | a read of a batch; the tag is the batch | one | open | copy from the page cache in `begin`, else aim a read; keep the ticket while a device copies |
//! | save | a file | one | stages: writes, sync | write in `begin`, without a [lane](crate::lane::NoLane) |
//! | load | the load, with an operation for each extent, whose order is its position | the probe of the page cache, then one for each route; the probe hands over to them | `Below(u64::MAX)`, or what the stream has room for | take a slot, aim, deliver; fail the group and close |
//! | KV store | a transfer; a further group helps with its steps; the tag is the request | waiting, staged | open | open the file and plan in `begin`; hand over to where slots are granted, carry step after step; copy from and to devices, compute checksums as bytes pass |
//!
//! A load makes one scheduler, submits its group, and [seals](Scheduler::seal) it. Its threads serve the queue of their route
//! until that [is over](Patience::UntilOver): those of the probe return first, and touch memory ahead. A ring that is refused
//! is a `redirect` to the pool's queue by the first thread that finds out, which then serves that queue with others. A route
//! that gives up says [`Next::GiveUp`], and its thread does the same. [`Scheduler::admit`] follows the stream's consumer. A
//! small load, or one without threads, serves queue after queue with [`Patience::None`] each time that its owner asks for a
//! tensor.
#![forbid(unsafe_code)]

mod admission;
mod customer;
mod flight;
mod limit;
#[cfg(test)]
mod model;
mod operation;
mod queues;
mod scheduler;
mod state;
mod sync;
mod threads;
mod worker;

pub use admission::{Bound, Limits};
pub use customer::{Customer, Handler, Next, Reason};
pub use flight::{Flight, Ticket};
pub use limit::InFlightLimit;
pub use operation::{Cancelled, Charge, Gate, GroupId, Operation, Priority, QueueId, Submission, Whose};
pub use queues::QueueOptions;
pub use scheduler::{Refused, Scheduler};
pub use state::Figures;
pub use threads::Executor;
pub use worker::{Carried, Patience, Served, Service};
