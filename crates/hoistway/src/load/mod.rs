//! Loading: from a checkpoint and options to tensors and a report.
//!
//! [`Checkpoint::load`] is the door. `loading` plans, opens routes, allocates and starts `threads`, which carry its reads by the
//! engine of `transfer`. `memory_plan` says where each is read to, `device_arenas`
//! what lies on a device, `job` turns finished reads into tensors. `reporting` says what
//! was done. `mapped` is the route without reads, `wave_load` the load whose reads are too many to be known at once. `started` is
//! what the caller has of a load.

mod array;
mod checkpoint;
mod copy_into;
mod device_arenas;
mod fill;
mod flow;
mod job;
mod loading;
mod mapped;
mod memory_plan;
mod options;
mod progress;
mod reporting;
mod start;
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
pub use progress::{Arrival, Progress};
pub use started::Loading;
pub use tensor::{Loaded, Tensor, TensorMemory};
