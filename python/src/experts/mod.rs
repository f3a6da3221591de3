//! Models larger than memory, for `hoistway.experts` and `hoistway.stream_layers`.
//!
//! `store` leases experts, `catalog` says which there are, `rows` reads rows of tables, and `layers` streams layers of dense
//! models.

mod catalog;
mod error;
mod layers;
mod rows;
mod store;

pub(crate) use catalog::ExpertCatalog;
pub(crate) use layers::{LayerStream, numbered_layers};
pub(crate) use rows::Rows;
pub(crate) use store::{ExpertStore, ExpertTicket, policies};
