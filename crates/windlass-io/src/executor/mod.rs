//! One scheduler for all that moves bytes: loads, readers, saves, KV blocks, experts.
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
pub use customer::{Carrier, Customer, Next, Reason};
pub use flight::{Flight, Ticket};
pub use limit::InFlightLimit;
pub use operation::{Cancelled, Charge, Gate, GroupId, Operation, Priority, QueueId, Submission, Whose};
pub use queues::QueueOptions;
pub use scheduler::{Refused, Scheduler};
pub use state::Figures;
pub use threads::Executor;
pub use worker::{Carried, Patience, Served, Service};
