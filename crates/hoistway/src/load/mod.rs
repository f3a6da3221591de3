//! Loading: from a checkpoint and options to tensors and a report.
//!
//! [`Checkpoint::load`] is the door. `loading` plans, opens `routes`, allocates and starts `threads`. A load is a customer
//! of the executor: its threads `serve` a queue of reads each, with a lane that a `handler` uses. `memory_plan` says where
//! each is read to, `job` turns finished reads into tensors, `delivery` those that go to a device. `reporting` says what was
//! done. `mapped` is the route without reads, `wave_load` the load whose reads are too many to be known at once. `started` is what
//! the caller has of a load.

mod array;
mod checkpoint;
mod delivery;
mod fill;
mod flow;
mod handler;
mod job;
mod loading;
mod mapped;
mod memory_plan;
mod options;
mod reporting;
mod routes;
mod scatter;
mod serve;
mod started;
mod tensor;
mod threads;
mod wave_load;
mod waves;

pub use array::OpenArray;
pub use checkpoint::{Checkpoint, load, load_bytes};
pub use fill::{FillTarget, Filled, Filling};
pub use flow::{Order, StreamOptions};
pub use options::{DeviceAllocator, LoadOptions, NumaPlacement};
pub use started::{Arrival, Loading, Progress};
pub use tensor::{Loaded, Tensor, TensorMemory};
