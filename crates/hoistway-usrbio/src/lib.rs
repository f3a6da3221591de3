//! A client of USRBIO, the shared-memory interface by which programs read and write files of DeepSeek's 3FS without a
//! copy through the kernel.
//!
//! A [`Mount`] is opened by a file that lies on it. Memory that the daemon may write to is an [`Iov`], cut into
//! [`IovSlot`]s. A [`Ring`] takes [`Transfer`]s, each of which owns its [`File`] and its slot until it comes back as a
//! [`Completion`]. Two clients speak to the daemon: one in this crate, which needs no library, and the vendor's library;
//! [`choose`] tells which, and proves it by a read.
//!
//! Every wait has a limit. A daemon that died, was restarted or has forgotten this process's memory is an [`Error`] of
//! that name after a fraction of a second; one that hangs is [`Error::Timeout`]. After such an error the mount is opened
//! anew.
//!
//! The daemon is another process with the same memory. Whatever it writes there is checked before it is used, and none
//! of it leads to undefined behaviour. What no client can check is that the daemon wrote the right bytes, and that it
//! keeps the memory's length.
//!
//! ```no_run
//! use std::{path::Path, time::Duration};
//! use hoistway_usrbio::{
//!     IovOptions, LibrarySearch, Preference, Refused, RingOptions, Transfer, choose,
//! };
//!
//! # fn main() -> hoistway_usrbio::Result<()> {
//! let path = Path::new("/mnt/3fs/model.safetensors");
//! let mount = choose(path, Preference::Auto, &LibrarySearch::default())?.mount;
//! let file = mount.open_file(path)?;
//! let len = file.len_now()?;
//! // Four slots of 8 MiB; the buffer can be pinned for a device by its address.
//! const SLOT: usize = 8 << 20;
//! let iov = mount.create_iov(&IovOptions::default().len(4 * SLOT))?;
//! let mut slots = iov.slots(SLOT);
//! let mut ring = mount.create_ring(&RingOptions::default().depth(4))?;
//! let (mut offset, mut completions) = (0, Vec::new());
//! while offset < len || ring.in_flight() > 0 {
//!     while offset < len
//!         && let Some(slot) = slots.pop()
//!     {
//!         let wanted = SLOT.min((len - offset) as usize);
//!         let read = Transfer::new(file.clone(), offset, wanted, slot);
//!         match ring.push(read) {
//!             Ok(()) => offset += wanted as u64,
//!             Err(Refused::Full(read)) => {
//!                 slots.push(read.slot);
//!                 break;
//!             }
//!             Err(Refused::Failed(_, error)) => return Err(error),
//!         }
//!     }
//!     ring.wait(Duration::from_millis(500), &mut completions)?;
//!     for completion in completions.drain(..) {
//!         let got = completion.result?;
//!         assert_eq!(got, completion.transfer.len, "the file was cut short");
//!         // Copy from `completion.transfer.slot` to where the bytes belong; then it can be used again.
//!         slots.push(completion.transfer.slot);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

mod choose;
mod control;
mod copy;
mod driver;
mod error;
mod file;
mod iov;
mod key;
mod liveness;
mod mount;
mod mountinfo;
mod native;
#[cfg(test)]
mod peer;
pub mod proto;
#[cfg(test)]
mod protocol_tests;
mod registration;
mod ring;
mod semaphore;
mod setters;
mod shm;
mod vendor;
mod worker;

pub use choose::{Chosen, Preference, choose, probe};
pub use error::{Error, Result};
pub use file::{File, is_3fs, protocol_version};
pub use iov::{Iov, IovOptions, IovSlot};
pub use key::{Direction, Key, NotAKey, RingKey, RingPriority};
pub use mount::{Client, Mount};
pub use mountinfo::{extract_mount_point, mount_points};
pub use ring::{Completion, Refused, Ring, RingOptions, Transfer};
pub use vendor::{Library, LibrarySearch};

/// The parts that a stand-in of the vendor's library is made of; for tests.
#[doc(hidden)]
pub mod parts {
    pub use crate::{
        native::RingClient,
        registration::{deregister, register},
        semaphore::wait,
        shm::SharedMemory,
        vendor::abi,
    };
}
