//! HTTP/1.1, as far as reading objects needs it. Bodies are read to where the caller says.

mod answer;
mod connection;

pub(crate) use answer::{Answer, send};
pub(crate) use connection::{Connection, Origin, TICK, Waiting};
