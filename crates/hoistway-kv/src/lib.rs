//! A store of KV-cache blocks: they move from host or device memory to storage and back, and survive crashes.
#![deny(missing_docs, unsafe_code)]
mod buffer;
mod completion;
mod device_buffer;
mod disk;
mod error;
mod fork;
mod format;
mod index;
mod io;
mod item;
mod key;
mod layout;
mod metrics;
mod namespace;
mod options;
mod report;
mod request;
mod store;
mod ticket;

pub use buffer::{Buffer, BufferItem, Lend, Transfer, TransferOptions};
pub use device_buffer::DeviceBuffer;
/// Faults between the store and its disk, for tests.
#[cfg(feature = "fault-injection")]
pub mod fault {
    pub use crate::{
        disk::HangingCalls,
        io::fault::{Fault, FaultScript, Gate, Operation},
    };
}

/// What the fuzz target reaches. No part of the interface.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing {
    /// Parses bytes as everything that may be on a disk, with the checksums that they have and with those that they need.
    pub fn parse_everything(bytes: &[u8]) {
        crate::format::fuzzing::parse_everything_sealed(bytes);
    }
}

pub use completion::{Completion, DropReason, Status};
pub use error::{Error, Result};
pub use hoistway_io::executor::Priority;
pub use io::Carrier;
pub use item::{Item, KeepAlive, Piece};
pub use key::{Fingerprint, Key};
pub use metrics::join_metrics;
pub use namespace::{NamespaceDescription, NamespaceId, NamespaceOptions, Rank};
pub use options::{
    Admission, DirectPath, Durability, Eviction, FarOptions, FarPolicy, LayoutKind, Route, StoreAccess,
    StoreOptions,
};
pub use report::{
    BlockEntry, BlockInfo, BlockPage, CarrierShare, Dropped, Event, EventKind, Evicted, FarReport, FarStats,
    NamespaceStats, Owner, ShardInfo, Stats, StoreReport, Verified, WriterStats,
};
pub use request::{Notify, Request};
pub use store::{Namespace, PinGuard, Region, Store};
pub use ticket::Ticket;
