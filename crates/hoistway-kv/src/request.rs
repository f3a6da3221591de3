//! Requests: items, and how they are moved.
#![forbid(unsafe_code)]

use crate::{Item, KeepAlive, Priority};
use std::time::Duration;

/// A load or a store of any number of items, which may belong to any number of blocks.
///
/// Items of one block that lie in one request move together.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// What is moved.
    pub items: Vec<Item>,
    /// How many shards each of the blocks has, 1 to 256. Stores only.
    pub shards: u32,
    /// Bytes of the longest shard of each of the blocks. Stores only. Default: for a block of which the request has all
    /// shards, the longest of them; else the longest item of the request, which fits unless shards of different lengths
    /// come in different requests.
    pub shard_len: Option<u64>,
    /// Time that it may take. Default: that of the store.
    pub timeout: Option<Duration>,
    /// Which requests are served first. Default: [`Priority::Demand`] for loads, [`Priority::Background`] for stores.
    pub priority: Option<Priority>,
    /// How the end of the request is announced.
    pub notify: Notify,
    /// How long the blocks are kept, at most; the namespace may say less. Stores only. The first request of a block
    /// decides.
    pub ttl: Option<Duration>,
    /// An event of the device, as a handle of the driver's, that work on the device must have reached before the memory is
    /// read, or written. It lives, and is not recorded anew, until the ticket is released
    /// ([`Ticket::is_released`](crate::Ticket::is_released)): `keep` may hold it. If the memory is on devices of several
    /// vendors, or of none while the process has drivers of several, it is unknown whose event it is: the request fails.
    pub wait_event: Option<u64>,
    /// Keeps the memory from being freed.
    pub keep: KeepAlive,
}

hoistway_io::setters! {
    Request {
        shards: u32,
        shard_len: Option<u64>,
        timeout: Option<Duration>,
        priority: Option<Priority>,
        notify: Notify,
        ttl: Option<Duration>,
        wait_event: Option<u64>,
    }
}

impl Request {
    /// A request with defaults for what is not named here: blocks of one shard.
    pub fn new(items: Vec<Item>, keep: KeepAlive) -> Self {
        Self {
            items,
            shards: 1,
            shard_len: None,
            timeout: None,
            priority: None,
            notify: Notify::default(),
            ttl: None,
            wait_event: None,
            keep,
        }
    }
}

/// How the end of a request is announced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notify {
    /// To callers of the ticket alone.
    #[default]
    Ticket,
    /// Also to a thread that watches [`Store::event_fd`](crate::Store::event_fd) and calls
    /// [`Store::drain_completions`](crate::Store::drain_completions).
    EventFd,
}
