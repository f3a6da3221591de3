//! Loading: from a checkpoint and options to tensors and a report.
//!
//! [`Checkpoint::load`] is the door. `loading` plans, allocates and starts threads; each drives a lane (`drive`)
//! with reads from the `queue`, as many at once as its `window` says; `job` turns finished reads into tensors,
//! `delivery` those that go to a device, for which `direct` is the path past the host. `mapped` is the route without reads.

mod array;
mod assign;
mod bytes;
mod checkpoint;
mod delivery;
mod direct;
mod drive;
mod fill;
mod flow;
mod job;
mod loading;
mod mapped;
mod options;
mod queue;
mod scatter;
mod tensor;
mod usrbio;
mod waves;
mod window;

pub use array::OpenArray;
pub use bytes::load_bytes;
pub use checkpoint::{Checkpoint, load};
pub use fill::{FillTarget, Filled, Filling};
pub use flow::{Order, StreamOptions};
pub use loading::{Arrival, Loading, Progress};
pub use options::{DeviceAllocator, DirectIo, LoadOptions, NumaPlacement};
pub(crate) use options::{bytes as byte_option, count as count_option, named as named_option};
pub use tensor::{Loaded, Tensor, TensorMemory};
