//! The store: what users open, and the threads behind it.

mod namespace;
mod pin;
mod region;

pub use namespace::Namespace;
pub use pin::PinGuard;
pub use region::Region;

use crate::{
    BlockPage, Completion, Error, Event, Fingerprint, Key, NamespaceDescription, NamespaceId,
    NamespaceOptions, Result, Stats, StoreOptions, StoreReport, Verified,
};
use std::{os::fd::BorrowedFd, path::Path, time::Duration};

/// A store of KV-cache blocks below a directory. Clones are the same store.
///
/// Nothing waits for the disk but what says so: [`Ticket::wait`](crate::Ticket::wait), [`Store::flush`],
/// [`Store::close`], and what lists, verifies and removes.
///
/// ```no_run
/// use std::{sync::Arc, time::Duration};
/// use windlass_kv::{
///     Item, KeepAlive, Key, NamespaceDescription, NamespaceOptions, Piece, Request, Store, StoreOptions,
/// };
///
/// let mut options = StoreOptions::new("/mnt/nvme/kv");
/// options.capacity_bytes = Some(100 << 30);
/// let store = Store::open(options)?;
/// let description = NamespaceDescription { model: "llama@1".into(), ..Default::default() };
/// let namespace = store.namespace(&description, NamespaceOptions::default())?;
///
/// let block = Arc::new(vec![7_u8; 1 << 20]);
/// let item = |memory: &Arc<Vec<u8>>| -> windlass_kv::Result<Item> {
///     let pieces = vec![Piece::host(memory.as_ptr(), memory.len())];
///     Ok(Item { key: Key::new(b"tokens 0..16")?, shard: 0, pieces })
/// };
/// // SAFETY: the request keeps the memory, and nobody writes to it.
/// let ticket = unsafe { namespace.store(Request::new(vec![item(&block)?], KeepAlive::new(block.clone())))? };
/// assert!(ticket.wait(Some(Duration::from_secs(10)))?.is_ok());
/// assert_eq!(namespace.lookup_prefix(&["tokens 0..16", "tokens 16..32"])?, 1);
/// # Ok::<(), windlass_kv::Error>(())
/// ```
///
/// In a child of `fork` it is closed: everything fails with [`Error::Closed`], and dropping it does nothing.
#[derive(Clone, Debug)]
pub struct Store {}

impl Store {
    /// Opens a store, and makes it if it is not there.
    ///
    /// # Errors
    /// [`Error::InvalidOption`], [`Error::NotAStore`], [`Error::UnknownFormat`], [`Error::RouteUnavailable`] if a route
    /// that was named cannot be used, [`Error::Io`].
    pub fn open(options: StoreOptions) -> Result<Self> {
        let _ = options;
        Err(Error::Internal("not yet".into()))
    }

    /// Its directory.
    pub fn root(&self) -> &Path {
        Path::new("")
    }

    /// Opens a namespace. Opening one again sets its options anew.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn namespace(
        &self,
        description: &NamespaceDescription,
        options: NamespaceOptions,
    ) -> Result<Namespace> {
        let _ = (description, options);
        Err(Error::Internal("not yet".into()))
    }

    /// Opens a namespace that the store has, without its description: for tools.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] if it has none of this name; [`Error::Io`], [`Error::Closed`].
    pub fn existing_namespace(&self, id: NamespaceId) -> Result<Namespace> {
        let _ = id;
        Err(Error::Internal("not yet".into()))
    }

    /// The namespaces that it has, with their descriptions as JSON.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn namespaces(&self) -> Result<Vec<(NamespaceId, String)>> {
        Err(Error::Internal("not yet".into()))
    }

    /// Readable while there are completions to drain, of requests with [`Notify::EventFd`](crate::Notify::EventFd).
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        unreachable!("not yet")
    }

    /// The completions of requests with [`Notify::EventFd`](crate::Notify::EventFd) since the last call, in the order in
    /// which they ended.
    pub fn drain_completions(&self) -> Vec<Completion> {
        Vec::new()
    }

    /// What it holds and did.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn stats(&self) -> Result<Stats> {
        Err(Error::Internal("not yet".into()))
    }

    /// What it holds and did, as Prometheus wants it (OpenMetrics text).
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn metrics(&self) -> Result<String> {
        Err(Error::Internal("not yet".into()))
    }

    /// How it works.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn report(&self) -> Result<StoreReport> {
        Err(Error::Internal("not yet".into()))
    }

    /// What happened since the last call. The store remembers the last 1024; [`Stats::forgotten_events`] counts others.
    pub fn events(&self) -> Vec<Event> {
        Vec::new()
    }

    /// Waits until every request to store that was made before has ended, on the disk as far as
    /// [`Durability`](crate::Durability) asks for it. Blocks that lack shards are not waited for.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Closed`].
    pub fn flush(&self, timeout: Option<Duration>) -> Result<()> {
        let _ = timeout;
        Err(Error::Internal("not yet".into()))
    }

    /// Ends it: nothing is accepted any more, stores under way get `timeout` to end (`None`: as long as they take),
    /// other requests end as [`Status::Cancelled`](crate::Status::Cancelled). Dropping the last clone does the same
    /// with no time at all. Closing it again does nothing.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if the kernel does not give back all memory within `timeout`: that memory stays leased until
    /// it does. [`Error::Io`] if the index cannot be written.
    pub fn close(&self, timeout: Option<Duration>) -> Result<()> {
        let _ = timeout;
        Ok(())
    }

    /// Does now what is done now and then: expire blocks, follow other processes, evict ahead, write checkpoints.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn maintain_now(&self) -> Result<()> {
        Err(Error::Internal("not yet".into()))
    }

    /// Blocks, at most `most` of them, in an order of the store's. The first page has the cursor 0.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn list(&self, cursor: u64, most: usize) -> Result<BlockPage> {
        let _ = (cursor, most);
        Err(Error::Internal("not yet".into()))
    }

    /// The key of a block in a listing, which may have to be read; `None` if it is gone.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn key_of(&self, block: Fingerprint) -> Result<Option<Key>> {
        let _ = block;
        Err(Error::Internal("not yet".into()))
    }

    /// Reads every block and compares its checksums. Those that are damaged are missing afterwards. `progress` is called
    /// after each block, and says whether to go on.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn verify(
        &self,
        mut progress: impl FnMut(&Verified) -> std::ops::ControlFlow<()>,
    ) -> Result<Verified> {
        let _ = progress(&Verified::default());
        Err(Error::Internal("not yet".into()))
    }

    /// Evicts own blocks that are not pinned, the coldest first, until at least `bytes` are free for others. Says how
    /// many bytes were freed.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`], [`Error::Closed`].
    pub fn evict(&self, bytes: u64) -> Result<u64> {
        let _ = bytes;
        Err(Error::Internal("not yet".into()))
    }
}
