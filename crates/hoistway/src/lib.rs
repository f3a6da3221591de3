//! **hoistway** moves tensors from storage to memory at the speed of the hardware, and reports how.
//!
//! ```no_run
//! let loaded = hoistway::load(&["model.safetensors"], &hoistway::LoadOptions::default())?;
//! for tensor in loaded.tensors() {
//!     println!("{} {} {:?}: {} bytes", tensor.name(), tensor.dtype(), tensor.shape(), tensor.len_bytes());
//! }
//! // Which route moved how many bytes, and why it was not a better one.
//! print!("{}", loaded.report());
//! # Ok::<(), hoistway::Error>(())
//! ```
//!
//! Data flows one way: a [`Catalog`] says what a checkpoint holds, a [`plan::Plan`] which bytes go where, a
//! [`Route`] carries them into [`memory`], and a [`Report`] says what happened.
//!
//! # Promises
//! * A named route carries the data or the load fails; `auto` reports what it chose and what it could not use.
//! * A short, truncated, changed or lying file is a typed [`Error`], never zeros and never half a tensor.
//! * A [`Tensor`] stays valid as long as someone holds it.
#![deny(missing_docs, unsafe_code)]

#[cfg(feature = "objects")]
pub mod cache;
pub mod catalog;
pub mod device;
pub mod doctor;
mod dtype;
mod environment;
mod error;
mod handoff;
mod load;
pub mod memory;
mod metrics;
#[cfg(feature = "objects")]
pub use hoistway_objects as objects;
pub mod plan;
pub mod read;
mod report;
pub mod route;
pub mod save;
mod source;
#[cfg(feature = "fault-injection")]
#[path = "../tests/common/toy.rs"]
mod toy;
mod transfer;
pub mod verify;
mod warm;

pub use catalog::Catalog;
pub use device::DeviceId;
pub use dtype::{Dtype, GgmlType, SizeError};
pub use error::{Error, Result};
pub use hoistway_io::{Alignment, ByteRange, cancel::Cancel, counted};
pub use load::{
    Arrival, Checkpoint, DeviceAllocator, FillTarget, Filled, Filling, LoadOptions, Loaded, Loading,
    NumaPlacement, OpenArray, Order, Progress, StreamOptions, Tensor, TensorMemory, load, load_bytes,
};
pub use metrics::metrics;
pub use report::{
    Carrier, ChecksumReport, DeviceReport, MemoryReport, Refusal, Report, Retries, TimeReport, Uncompared,
};
pub use route::{DirectIo, Route, UsrbioClient};
pub use warm::WarmReport;

use hoistway_io::{parallel, sys};
