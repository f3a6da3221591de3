//! Transfers: reads on their way from files to memory, the same for all who ask for them.
//!
//! `order` is what an owner supplies: what is read, where it goes, and what its end means. `routes` opens the routes that
//! may make the reads, and `engine` holds them with their queues and slots. A thread `serve`s the queue of a route with a lane
//! and a `handler`, which asks `attempt` what follows an attempt. `device` is the way on from full slots to a device.

mod attempt;
mod device;
mod engine;
mod handler;
mod order;
mod routes;
mod serve;

pub(crate) use attempt::{Read, account, settle};
pub(crate) use device::{DeviceLine, Needs, SlotCounts};
pub(crate) use engine::Engine;
pub(crate) use order::{Order, Reads};
pub(crate) use routes::{Assigned, OpenRoute, Opening, Room, queue_of};
pub(crate) use serve::{scheduler, serve};
