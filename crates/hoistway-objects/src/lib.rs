//! **hoistway-objects** reads ranges of objects of S3, Google, Azure, the hub of Hugging Face and web servers straight into
//! memory of the caller's, and never mixes two versions of an object.
//!
//! ```no_run
//! use std::sync::atomic::AtomicBool;
//! use hoistway_objects::{Object, StoreOptions};
//! let object = Object::open("s3://models/llama/model.safetensors", &StoreOptions::default())?;
//! let mut bytes = vec![0; 8 << 20];
//! object.read(0, &mut bytes, &AtomicBool::new(false))?;
//! # Ok::<(), hoistway_objects::Error>(())
//! ```
//!
//! An [`Object`] is pinned by the ETag and the length of its first answer. Each later request carries `If-Match`, and the
//! status, range, length and ETag of each answer are compared before the first byte of its body is read. A [`Comparison`] computes
//! the [`Checksum`] that its store has of it from the bytes of any reads.
//!
//! An [`Upload`] writes an object to S3 or Google, in parts from any threads. The store compares each with its checksum, and shows
//! the object when it is complete.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod asking;
mod aws_files;
#[cfg(test)]
mod broken_bodies;
mod checksum;
mod client;
mod combine;
mod comparison;
mod credentials;
mod digest;
mod error;
mod file_state;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod http;
mod hub;
mod list;
mod location;
mod object;
mod options;
mod pace;
mod per_process;
mod pin;
mod policy;
mod probe;
mod redirect;
mod refusals;
mod region;
mod renewal;
mod request_size;
mod services;
mod signature;
mod stop;
mod upload;

/// What the fuzz target reaches. No part of the interface.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing {
    /// Parses bytes as everything that users write and servers say.
    pub fn parse_everything(bytes: &[u8]) {
        crate::fuzz::parse_everything(bytes);
    }
}

pub use asking::Unsaid;
pub use checksum::{Algorithm, Checksum};
pub use comparison::{Comparison, HeadSums, Outcome, Piece};
pub use digest::{Hasher, WholeDigest};
pub use error::{Error, Problem, Result};
pub use hub::{HubCommits, HubFile, is_folder};
pub use list::list;
pub use location::shown;
pub use object::{HEAD_BYTES, Object};
pub use options::{AccessKey, Checksums, Secret, StoreOptions};
pub use probe::{Reached, StoreProbe};
pub use stop::Stop;
pub use upload::{Upload, Uploaded, remove};
