//! Transfers: reads on their way from files to memory, the same for all who ask for them.
//!
//! `order` is what an owner supplies: what is read, where it goes, and what its end means. A thread serves a queue with a lane
//! and a `handler`, which picks a route for each read and asks `attempt` what follows an attempt. `device` is the way on from full
//! slots to a device, and `copiers` how many threads feed it. `routes`, `engine` and `serve` are for orders all of whose reads are known from the start: which routes may make
//! them, with a queue and threads for each.

mod attempt;
mod copiers;
mod device;
mod engine;
mod handler;
mod order;
mod routes;
mod serve;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use copiers::with_copiers;
pub(crate) use device::{DeviceLine, Needs, ScratchMemory};
pub(crate) use engine::{Engine, MANY_READS};
pub(crate) use handler::{After, Mover, Ways, not_cached};
pub(crate) use order::{EngineOwner, Failure, InCopy, Order, Placed, Reads};
pub(crate) use routes::{Assigned, OpenRoute, Opening, Room, queue_of};
pub(crate) use serve::{scheduler, serve};
