//! Reads of byte ranges into memory of the caller's choice: batches with priorities, on threads that stay.
//!
//! A load fills memory of its own with whole tensors and is over; a [`Reader`] serves callers that have the memory already and
//! keeps asking: an inference engine that fills its own buffers, a model whose layers are streamed while it computes, a
//! cache of experts. [`Reader::submit`] is the door. `request` says what is read and where to, and `pieces` cuts requests
//! into reads. `worker` has the routes of a thread, which the engine makes reads by; `landing` says what the engine asks about
//! each; `device` has the slots on the way to a device. `batch` is what the caller holds meanwhile, and `state` what is known of
//! its reads.
//!
//! ```no_run
//! use hoistway::{ByteRange, read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target}};
//! let reader = Reader::new(&ReaderOptions::default())?;
//! let file = ReadFile::open("model.gguf")?;
//! let layer = |start| ReadRequest::new(&file, ByteRange::at(start, 64 << 20).unwrap(), Target::memory());
//! let now = reader.submit([layer(0)], Priority::Demand)?;
//! let next = reader.submit([layer(64 << 20)], Priority::Prefetch)?;
//! if let Err(error) = now.wait() {
//!     eprintln!("{error}");
//! }
//! let bytes = now.take(0);
//! // Compute with `bytes`, while the next layer is on its way.
//! # let _ = (bytes, next);
//! # Ok::<(), hoistway::Error>(())
//! ```

mod batch;
mod device;
mod landing;
mod options;
mod pieces;
mod reader;
mod report;
mod request;
mod shared;
mod state;
mod worker;

pub use batch::{Batch, ReadStatus};
pub use hoistway_io::executor::Priority;
pub use options::ReaderOptions;
pub use reader::Reader;
pub use report::BatchReport;
pub use request::{ReadFile, ReadRequest, SinkError, Target};
