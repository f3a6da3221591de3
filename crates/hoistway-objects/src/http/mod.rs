//! HTTP/1.1, as far as reading objects needs it. Bodies are read to where the caller says.

mod answer;
mod connection;
mod idle;

#[cfg(any(test, fuzzing))]
pub(crate) use answer::head;
pub(crate) use answer::{Answer, send};
pub(crate) use connection::{Connection, Origin, TICK, Waiting};
pub(crate) use idle::IdlePool;
