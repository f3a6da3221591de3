//! Loading: from a checkpoint and options to tensors and a report.
//!
//! [`Checkpoint::load`] is the door. `loading` plans, allocates and starts threads; each drives a lane (`drive`)
//! with reads from the `queue`, as many at once as its `window` says; `job` turns finished reads into tensors,
//! `delivery` those that go to a device, for which `direct` is the path past the host. `mapped` is the route without reads.

mod array;
mod assign;
mod checkpoint;
mod delivery;
mod direct;
mod drive;
mod job;
mod loading;
mod mapped;
mod options;
mod queue;
mod tensor;
mod usrbio;
mod window;

pub use array::OpenArray;
pub use checkpoint::{Checkpoint, load};
pub use loading::{Arrival, Loading, Progress};
pub use options::{DeviceAllocator, DirectIo, LoadOptions, NumaPlacement};
pub use tensor::{Loaded, Tensor, TensorMemory};
