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
//! * An [`Operation`] is one read, write or sync. The customer defines its content, which owns the memory that it uses.
//! * A group ([`Submission`]) ends once: when all of its operations have ended and are dropped, with their first error.
//!   After an error, its other operations do not begin. An operation that shall end by itself is a group of one.
//! * A queue ([`QueueId`]) holds operations for lanes of one kind. A [`Handler`] hands operations over to other queues, and
//!   [`Scheduler::redirect`] moves a whole queue to another.
//! * A [`Handler`] decides for one thread what its lane does with operations. A [`Customer`] receives the ends of groups.
//! * A [`Ticket`] is an operation's right to its room. Ending the ticket, on any thread, ends the operation.
//!
//! # What the scheduler decides
//! * **Order**: the more urgent operation first, then the older. More urgent operations overtake another only a bounded
//!   number of times, in operations and in its bytes ([`Priority::most_overtakings`]), then it is next. This is the only rule against starvation.
//! * **Room**: [`Limits`] bound bytes and operations, of accepted groups and in flight. Part of both is reserved for demand.
//!   While there is demand, [`Bound::rest_bytes_beside_demand`] bounds the bytes that it may have to wait for in a device.
//!   [`QueueOptions::slots`] bounds staging slots. If the next operation lacks room, others do not take it.
//! * **Gates**: operations of a group begin at once, in stages (writes, then their sync), or as far as a consumer admits.
//! * **Ends**: cancellation, deadlines, [`Scheduler::close`] and errors remove operations that have not begun. Others end
//!   when their lane, the system or the device is done: until then, their memory is in use. [`Ticket::lose`] reports that
//!   this end cannot be known.
//!
//! The customer provides the threads: [`Scheduler::serve`] makes the calling thread serve queues, [`Executor`] owns some
//! threads. With [`Patience::None`], the thread of the caller serves, and no other is needed. A child of `fork` accepts
//! nothing and locks nothing.
//!
//! # How customers use it
//! | customer | groups | queues | gate | what its handlers do |
//! |---|---|---|---|---|
//! | reader | a read of a batch; the tag is the batch | one | open | choose a route in `begin`, which may be the page cache, and aim; keep the ticket while a device copies |
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
#[cfg(test)]
mod wake_tests;
mod worker;

pub use admission::{Bound, Limits};
pub use customer::{Customer, Handler, Next, Reason};
pub use flight::{Flight, LostSlots, Ticket};
pub use limit::InFlightLimit;
pub use operation::{Cancelled, Charge, Gate, GroupId, Operation, Priority, QueueId, Submission, Whose};
pub use queues::QueueOptions;
pub use scheduler::{Refused, Scheduler, Submitted};
pub use state::Figures;
pub use threads::Executor;
pub use worker::{Carried, Patience, Served, Service};
