//! A store of KV-cache blocks: they move from host or device memory to storage and back, and survive crashes.
#![deny(missing_docs, unsafe_code)]
#![allow(dead_code, reason = "PLACEHOLDER until the store uses its parts")]
mod completion;
mod disk;
mod error;
mod format;
mod index;
mod io;
mod item;
mod key;
mod layout;
mod namespace;
mod options;

pub use completion::{Completion, DropReason, Status};
pub use error::{Error, Result};
pub use item::{Item, KeepAlive, Piece};
pub use key::{Fingerprint, Key};
pub use namespace::{NamespaceDescription, NamespaceId, NamespaceOptions, Rank};
pub use options::{
    Admission, DirectPath, Durability, Eviction, IoRoute, LayoutKind, StoreAccess, StoreOptions,
};
