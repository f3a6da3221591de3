//! Items of requests: parts of blocks, and their memory.
#![forbid(unsafe_code)]

use crate::Key;
use hoistway_device::DeviceId;
use std::{any::Any, fmt, sync::Arc};

/// A piece of the caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Piece {
    /// Address of its first byte, in host memory or in that of the device.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Where it is.
    pub device: DeviceId,
}

impl Piece {
    /// The `len` bytes at `address` of `device`.
    pub fn new(device: DeviceId, address: u64, len: u64) -> Self {
        Self { address, len, device }
    }

    /// A piece of host memory.
    pub fn host(address: *const u8, len: usize) -> Self {
        Self { address: address.expose_provenance() as u64, len: len as u64, device: DeviceId::Cpu }
    }
}

/// A shard of a block, and the memory that it is loaded to or stored from: pieces in the order of the shard's bytes
/// (scatter/gather), so that paged layouts move without a copy.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Item {
    /// The block.
    pub key: Key,
    /// Which of its shards, from 0.
    pub shard: u32,
    /// The memory. Their lengths add up to the shard's.
    pub pieces: Vec<Piece>,
}

impl Item {
    /// A shard of a block, and its memory.
    pub fn new(key: Key, shard: u32, pieces: Vec<Piece>) -> Self {
        Self { key, shard, pieces }
    }

    /// Bytes of the shard.
    pub fn len_bytes(&self) -> u64 {
        self.pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.len))
    }
}

/// What keeps the caller's memory from being freed. It is dropped when nothing reads or writes the memory any more:
/// after a time-out that may be later than the ticket's end.
#[derive(Clone)]
pub struct KeepAlive(Option<Arc<dyn Any + Send + Sync>>);

impl KeepAlive {
    /// `owner` lives as long as the memory is in use.
    pub fn new(owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self(Some(owner))
    }

    /// The caller sees to it: see [`Ticket::is_released`](crate::Ticket::is_released).
    pub fn by_caller() -> Self {
        Self(None)
    }
}

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "KeepAlive" } else { "KeepAlive(by the caller)" })
    }
}
