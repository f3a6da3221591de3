//! HTTP/1.1, as far as objects need it. Bodies are read to where the caller says.

mod answer;
mod connection;
mod idle;
mod names;
mod proxy;
mod tls;

#[cfg(any(test, fuzzing))]
pub(crate) use answer::head;
pub(crate) use answer::{Answer, Pending, Sent, TooSlow, send, send_pieces};
pub(crate) use connection::{Connection, End, Ends, Network, Origin, TICK, Waiting, have_input};
pub(crate) use idle::IdlePool;
pub(crate) use names::{addresses, is_of_this_network};
pub(crate) use proxy::address_of as proxy_of;
pub(crate) use tls::Roots;
