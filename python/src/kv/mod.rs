//! The store of KV-cache blocks, for `hoistway.kv`.
//!
//! `store` opens it, `namespace` asks it, `ticket` waits for what was asked. `memory` finds the bytes of buffers,
//! tensors and addresses, with `exported` for the buffer protocol, and keeps them; `keys` and `options` read the rest.

mod addresses;
mod error;
mod exported;
mod keys;
mod memory;
mod namespace;
mod options;
mod store;
mod ticket;

use pyo3::prelude::*;

/// Joins OpenMetrics texts, such as those of stores, to one.
#[pyfunction]
pub(crate) fn join_metrics(texts: Vec<String>) -> String {
    hoistway_kv::join_metrics(&texts)
}

pub(crate) use addresses::KvAddresses;
pub(crate) use namespace::{KvNamespace, KvPins};
pub(crate) use store::{KvRegion, KvStore};
pub(crate) use ticket::{KvCompletion, KvTicket};
