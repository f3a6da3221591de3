//! What is asked of a namespace: lookups, loads, stores.
#![allow(unsafe_code, reason = "the caller answers for the memory of requests")]

use super::PinGuard;
use crate::{BlockInfo, Error, NamespaceId, Request, Result, Ticket};

/// A namespace of an open store. Clones are the same namespace.
///
/// Keys that no block can have, because they are empty or too long, are refused with [`Error::InvalidKey`].
#[derive(Clone, Debug)]
pub struct Namespace {}

impl Namespace {
    /// Its identity.
    pub fn id(&self) -> NamespaceId {
        NamespaceId([0; 16])
    }

    /// Whether blocks are there, one answer each. No disk is asked, where the layout has an index.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::Closed`].
    pub fn lookup<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<bool>> {
        let _ = keys;
        Err(Error::Internal("not yet".into()))
    }

    /// How many of these blocks, from the first on, are there without a gap.
    ///
    /// # Errors
    /// As [`Namespace::lookup`].
    pub fn lookup_prefix<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<usize> {
        let _ = keys;
        Err(Error::Internal("not yet".into()))
    }

    /// The last of these blocks that is there, by its place in `keys`.
    ///
    /// # Errors
    /// As [`Namespace::lookup`].
    pub fn lookup_reverse<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Option<usize>> {
        let _ = keys;
        Err(Error::Internal("not yet".into()))
    }

    /// Loads shards of blocks. What is not there, or cannot be delivered, is said by the status of its item.
    ///
    /// # Safety
    /// The memory of all pieces may be written until the ticket is released
    /// ([`Ticket::is_released`]); nobody else reads or writes it until then.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`], [`Error::TooManyCompletions`], [`Error::Closed`].
    pub unsafe fn load(&self, request: Request) -> Result<Ticket> {
        let _ = request;
        Err(Error::Internal("not yet".into()))
    }

    /// Stores shards of blocks. A block is found once all its shards were stored, by this request or by several, in any
    /// order, from any threads of this process.
    ///
    /// An item that completes its block ends when the block is found; with
    /// [`Durability::Sync`](crate::Durability::Sync) when it is on the disk. Others end when they are written.
    ///
    /// # Safety
    /// The memory of all pieces may be read until the ticket is released ([`Ticket::is_released`]); nobody writes it
    /// until then.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`], [`Error::TooManyCompletions`], [`Error::ReadOnly`], [`Error::Closed`].
    pub unsafe fn store(&self, request: Request) -> Result<Ticket> {
        let _ = request;
        Err(Error::Internal("not yet".into()))
    }

    /// What a block is made of; `None` if it is not there. Reads its header.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::Io`], [`Error::Closed`].
    pub fn block(&self, key: &[u8]) -> Result<Option<BlockInfo>> {
        let _ = key;
        Err(Error::Internal("not yet".into()))
    }

    /// Notes that blocks were used, so that they stay longer. Of a prefix the first ones stay longest.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::Closed`].
    pub fn touch<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<()> {
        let _ = keys;
        Err(Error::Internal("not yet".into()))
    }

    /// Keeps blocks from being evicted or deleted by this process, as long as the guard lives.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::Closed`].
    pub fn pin<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<PinGuard> {
        let _ = keys;
        Err(Error::Internal("not yet".into()))
    }

    /// Removes blocks, as far as this process stored them and nobody pins them. Says how many.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::ReadOnly`], [`Error::Io`], [`Error::Closed`].
    pub fn delete<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<usize> {
        let _ = keys;
        Err(Error::Internal("not yet".into()))
    }

    /// Removes all blocks of the namespace, as far as this process stored them and nobody pins them. Says how many.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`], [`Error::Closed`].
    pub fn clear(&self) -> Result<usize> {
        Err(Error::Internal("not yet".into()))
    }
}
