//! The store that users open, and its threads.
//!
//! A store finds places for its blocks in `placement`, which may wait for the disk. `assembly` collects shards that come one by
//! one: a block is found only with all of them. `commit` makes groups of blocks visible that share their syncs.
//!
//! A load waits in `gate` until the bytes in flight allow it, and looks its block up after that. Where a lookup asks a file
//! system, `finder` does it, so that no thread that moves bytes or watches deadlines waits for it.

mod assembly;
mod commit;
mod core;
mod described;
mod events;
mod finder;
mod gate;
mod group;
mod housekeeping;
mod load;
mod namespace;
mod pin;
mod placement;
mod region;
mod requests;
mod scrub;
#[cfg(test)]
mod tests;
mod threads;
mod tier;
mod unreadable;
mod verify;

pub use namespace::Namespace;
pub use pin::PinGuard;
pub use region::Region;

pub(crate) use self::core::Core;
use self::{
    assembly::{Assemblies, Assembly},
    events::Events,
    finder::Finder,
    gate::Gate,
    requests::Requests,
    threads::{Running, Threads},
    tier::Tier,
    unreadable::Unreadable,
};
use crate::{
    BlockEntry, BlockPage, Completion, DirectPath, Error, Event, Evicted, Fingerprint, Key,
    NamespaceDescription, NamespaceId, NamespaceOptions, Owner, Result, Stats, StoreAccess, StoreOptions,
    StoreReport, Verified, WriterStats,
    io::{IoEngine, IoOptions, MAX_THREADS, Transfers},
    layout::{self, Layout},
    metrics::Metrics,
};
use hoistway_io::parallel::lock;
use std::{
    fmt,
    ops::ControlFlow,
    os::fd::BorrowedFd,
    path::Path,
    sync::{Arc, Mutex, RwLock, atomic::AtomicBool},
    time::Duration,
};

/// Longest time that an operation of a far tier may be given.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// A store of KV-cache blocks below a directory. Clones are the same store.
///
/// Nothing waits for the disk but what says so: [`Ticket::wait`](crate::Ticket::wait), [`Store::flush`],
/// [`Store::close`], and what lists, verifies and removes. In layout [`Files`](crate::LayoutKind::Files) looking up,
/// loading and storing ask the file system what is there, too; no bytes of blocks are read or written meanwhile.
///
/// ```no_run
/// use std::{sync::Arc, time::Duration};
/// use hoistway_kv::{
///     Item, KeepAlive, Key, NamespaceDescription, NamespaceOptions, Piece, Request, Store, StoreOptions,
/// };
///
/// let mut options = StoreOptions::new("/mnt/nvme/kv");
/// options.capacity_bytes = Some(100 << 30);
/// let store = Store::open(options)?;
/// let description = NamespaceDescription::default().model("llama@1");
/// let namespace = store.namespace(&description, NamespaceOptions::default())?;
///
/// let block = Arc::new(vec![7_u8; 1 << 20]);
/// let item = |memory: &Arc<Vec<u8>>| -> hoistway_kv::Result<Item> {
///     let pieces = vec![Piece::host(memory.as_ptr(), memory.len())];
///     Ok(Item::new(Key::new(b"tokens 0..16")?, 0, pieces))
/// };
/// // SAFETY: the request keeps the memory, and no code writes to it.
/// let ticket = unsafe { namespace.store(Request::new(vec![item(&block)?], KeepAlive::new(block.clone())))? };
/// assert!(ticket.wait(Some(Duration::from_secs(10)))?.is_ok());
/// assert_eq!(namespace.lookup_prefix(&["tokens 0..16", "tokens 16..32"])?, 1);
/// # Ok::<(), hoistway_kv::Error>(())
/// ```
///
/// In a child of `fork` it is closed: everything fails with [`Error::Closed`], and dropping it does nothing.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

/// What clones of a store and its namespaces share. Dropping it closes the store.
pub(crate) struct Inner {
    core: Arc<Core>,
    threads: Running,
    tier: Option<Arc<Tier>>,
}

impl Store {
    /// Opens a store, and makes it if it is not there.
    ///
    /// # Errors
    /// [`Error::InvalidOption`], [`Error::NotAStore`], [`Error::UnknownFormat`], [`Error::RouteUnavailable`] if a route
    /// that was named cannot be used, [`Error::Io`].
    pub fn open(options: StoreOptions) -> Result<Self> {
        check(&options)?;
        let (kind, layout) = layout::open(&options)?;
        let options = StoreOptions { layout: Some(kind), ..options };
        let transfers = IoEngine::start(IoOptions {
            route: options.route,
            direct: options.direct,
            threads: options.io_threads,
            staging_bytes: options.staging_bytes,
            #[cfg(feature = "fault-injection")]
            faults: options.faults.clone(),
            ..IoOptions::new(&options.root)
        })?;
        let unsafe_root = layout::warning(&options.root);
        let store = Self::with_parts(options, layout, Arc::new(transfers))?;
        unsafe_root.into_iter().for_each(|notice| store.core().warn(notice));
        Ok(store)
    }

    /// A store of these parts.
    pub(crate) fn with_parts(
        options: StoreOptions,
        layout: Arc<dyn Layout>,
        transfers: Arc<dyn Transfers>,
    ) -> Result<Self> {
        let metrics = Arc::new(Metrics::new());
        let (placement, places) = crossbeam_channel::unbounded();
        let (commits, groups) = crossbeam_channel::unbounded();
        let core = Arc::new(Core {
            root: options.root.as_path().into(),
            process: std::process::id(),
            layout,
            requests: Arc::new(Requests::new(metrics.clone())?),
            gate: Gate::new(options.max_in_flight_bytes),
            finder: Finder::default(),
            assemblies: Assemblies::default(),
            unreadable: Unreadable::default(),
            metrics,
            events: Events::default(),
            warnings: Mutex::default(),
            namespaces: Mutex::default(),
            placement,
            commits,
            transfers: RwLock::new(Some(transfers)),
            closing: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            has_lost: AtomicBool::new(false),
            options,
        });
        core.note_notices();
        let threads = Running::new(Threads::start(&core, places, groups)?);
        let mut inner = Inner { tier: None, core, threads };
        // An error from here on closes what has been opened.
        if let Some(far) = inner.core.options.far.clone() {
            inner.tier = Some(Tier::start(&inner.core, &far)?);
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    fn core(&self) -> &Arc<Core> {
        &self.inner.core
    }

    /// Its directory.
    pub fn root(&self) -> &Path {
        &self.core().root
    }

    /// Opens a namespace. Opening one again sets its options anew.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if a rank of the description is not below their number; [`Error::Io`],
    /// [`Error::Closed`].
    pub fn namespace(
        &self,
        description: &NamespaceDescription,
        options: NamespaceOptions,
    ) -> Result<Namespace> {
        description.check()?;
        self.opened_namespace(description.id()?, &description.to_json()?, options)
    }

    fn opened_namespace(
        &self,
        id: NamespaceId,
        description: &str,
        options: NamespaceOptions,
    ) -> Result<Namespace> {
        self.core().check_open()?;
        // From here on it is open, so that no thread closes it.
        let shared = lock(&self.core().namespaces).entry(id).or_default().clone();
        self.core().layout.open_namespace(id, description, options)?;
        *lock(&shared) = options;
        Ok(self.with_far(Namespace::new(&self.inner, id, shared), description))
    }

    /// Opens a namespace that the store has, without its description: for tools.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] if it has none of this name; [`Error::Io`], [`Error::Closed`].
    pub fn existing_namespace(&self, id: NamespaceId) -> Result<Namespace> {
        let Some((_, description)) = self.namespaces()?.into_iter().find(|(other, _)| *other == id) else {
            return Err(Error::InvalidRequest(format!(
                "{} has no namespace {id}: 'hoistway kv ls' shows those that it has",
                self.root().display()
            )));
        };
        let shared = lock(&self.core().namespaces).entry(id).or_default().clone();
        let options = *lock(&shared);
        self.core().layout.open_namespace(id, &description, options)?;
        Ok(self.with_far(Namespace::new(&self.inner, id, shared), &description))
    }

    fn with_far(&self, near: Namespace, description: &str) -> Namespace {
        self.core().metrics.describe(near.id(), description);
        match &self.inner.tier {
            Some(tier) => near.clone().before(tier.namespace(&near, description)),
            None => near,
        }
    }

    /// The namespaces that it has, with their descriptions as JSON.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn namespaces(&self) -> Result<Vec<(NamespaceId, String)>> {
        self.core().check_open()?;
        self.core().layout.namespaces()
    }

    /// Readable while there are completions to drain, of requests with [`Notify::EventFd`](crate::Notify::EventFd).
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.core().requests.event_fd()
    }

    /// The completions of requests with [`Notify::EventFd`](crate::Notify::EventFd) since the last call, in the order in
    /// which they ended. None in a child of `fork`.
    pub fn drain_completions(&self) -> Vec<Completion> {
        if self.core().is_forked() { Vec::new() } else { self.core().requests.drain() }
    }

    /// What it holds and did.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn stats(&self) -> Result<Stats> {
        self.core().check_open()?;
        Ok(Stats { far: self.inner.tier.as_ref().map(|tier| tier.stats()), ..self.core().stats() })
    }

    /// Returns what it holds and did, as OpenMetrics text for Prometheus. Each sample has the store's directory as label `store`.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn metrics(&self) -> Result<String> {
        self.core().metrics.encode(self.root(), &self.stats()?)
    }

    /// How it works.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn report(&self) -> Result<StoreReport> {
        self.core().check_open()?;
        let (core, options) = (self.core(), &self.core().options);
        let transfers = core.transfers().ok_or_else(|| core.closed())?.report();
        Ok(StoreReport {
            version: env!("CARGO_PKG_VERSION").into(),
            root: options.root.clone(),
            access: options.access,
            layout: options.layout.unwrap_or_default(),
            durability: options.durability,
            route: transfers.route,
            direct: options.direct,
            threads: transfers.threads,
            bounce_bytes: transfers.bounce_bytes,
            carriers: core.metrics.carriers(),
            bounced_bytes: core.metrics.bounced_bytes(),
            proofs: transfers.proofs,
            refused: transfers.refused,
            numa_node: transfers.numa_node,
            notes: transfers.notes,
            warnings: lock(&core.warnings).clone(),
            far: self.inner.tier.as_ref().map(|tier| tier.report()),
        })
    }

    /// What happened since the last call. The store remembers the last 1024; [`Stats::forgotten_events`] counts others.
    pub fn events(&self) -> Vec<Event> {
        if self.core().is_forked() {
            return Vec::new();
        }
        self.core().note_notices();
        self.core().events.drain()
    }

    /// Waits until every request to store that was made before has ended, on the disk as far as
    /// [`Durability`](crate::Durability) asks for it. Blocks that lack shards are not waited for.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Closed`].
    pub fn flush(&self, timeout: Option<Duration>) -> Result<()> {
        self.core().check_open()?;
        self.core().requests.flush(timeout)
    }

    /// Ends it: nothing is accepted any more, stores under way get `timeout` to end (`None`: as long as they take),
    /// other requests end as [`Status::Cancelled`](crate::Status::Cancelled). Then the system gets some seconds to end
    /// what it has. Dropping the store and all its namespaces does the same, with no time for stores. Closing it again
    /// does nothing.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if stores did not end within `timeout`, or the system does not give back all memory: that
    /// memory stays leased until it does. [`Error::Io`] if the index cannot be written, or if the end of a write can
    /// never be observed: the directory is then kept from other processes until this process ends.
    pub fn close(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.close(timeout)
    }

    /// Does now what is done now and then: expire blocks, follow other processes, evict ahead, write checkpoints.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn maintain_now(&self) -> Result<()> {
        self.core().check_open()?;
        self.inner.tier.iter().for_each(|tier| tier.close_namespaces());
        let closed = self.core().close_namespaces();
        let maintained = self.core().layout.maintain().and(closed);
        self.core().note_notices();
        maintained
    }

    /// Looks now for blocks that other processes have stored, which is done a few times a second anyway.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn follow_now(&self) -> Result<()> {
        self.core().check_open()?;
        let followed = self.core().layout.follow();
        self.core().note_notices();
        followed
    }

    /// Blocks of this process that were evicted, or have expired, since the last call.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn evicted(&self) -> Result<Evicted> {
        self.core().check_open()?;
        Ok(self.core().layout.observed().take_evicted())
    }

    /// The processes that write to the store, or wrote and left blocks behind.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn writers(&self) -> Result<Vec<WriterStats>> {
        self.core().check_open()?;
        self.core().layout.writers()
    }

    /// Blocks, at most `most` of them, in an order of the store's. The first page has the cursor 0.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn list(&self, cursor: u64, most: usize) -> Result<BlockPage> {
        self.core().check_open()?;
        let mut listed = Vec::new();
        let next = self.core().layout.list(cursor, most, &mut listed);
        let entry = |block: layout::Listed| BlockEntry {
            namespace: block.namespace,
            fingerprint: block.fingerprint,
            payload_bytes: block.payload_len,
            owner: if block.is_own { Owner::This } else { Owner::Other },
            expires: block.expires,
        };
        Ok(BlockPage { blocks: listed.into_iter().map(entry).collect(), next })
    }

    /// The key of a block in a listing, which may have to be read; `None` if it is gone.
    ///
    /// # Errors
    /// [`Error::DamagedBlock`] if it is there, but its header is not; [`Error::Io`], [`Error::Closed`].
    pub fn key_of(&self, block: Fingerprint) -> Result<Option<Key>> {
        self.core().check_open()?;
        verify::key_of(self.core(), block)
    }

    /// Reads every block and compares its checksums. Those that are damaged are missing afterwards. `progress` is called
    /// after each block, and says whether to go on.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Closed`].
    pub fn verify(&self, progress: impl FnMut(&Verified) -> ControlFlow<()>) -> Result<Verified> {
        self.core().check_open()?;
        verify::verify(self.core(), progress)
    }

    /// Evicts own blocks that are not pinned, the coldest first, until at least `bytes` are free for others. Says how
    /// many bytes were freed.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`], [`Error::Closed`].
    pub fn evict(&self, bytes: u64) -> Result<u64> {
        self.core().check_open()?;
        self.core().check_writable()?;
        self.core().layout.evict(bytes)
    }
}

/// Options that no store can have.
fn check(options: &StoreOptions) -> Result<()> {
    let invalid = |option, value: &dyn fmt::Display, reason: &str| {
        Err(Error::InvalidOption { option, value: value.to_string(), reason: reason.into() })
    };
    if options.max_in_flight_bytes == 0 {
        return invalid("max_in_flight_bytes", &0, "nothing could be moved");
    }
    match options.io_threads {
        Some(0) => return invalid("io_threads", &0, "no thread would move bytes"),
        Some(threads) if threads > MAX_THREADS => {
            return invalid("io_threads", &threads, &format!("it is at most {MAX_THREADS}"));
        }
        _ => {}
    }
    if let Some(bytes) = options.staging_bytes
        && bytes < StoreOptions::LEAST_STAGING_BYTES
    {
        let least = StoreOptions::LEAST_STAGING_BYTES >> 20;
        return invalid("staging_bytes", &bytes, &format!("it is at least {least} MiB"));
    }
    let stores = options.access == StoreAccess::ReadWrite && !options.for_upkeep;
    if stores && options.capacity_bytes == Some(0) {
        return invalid("capacity_bytes", &0, "nothing could be stored");
    }
    let Some(far) = &options.far else { return Ok(()) };
    if options.direct == DirectPath::Require {
        let reason = "bytes between a far tier and a device pass host memory: use prefer, or no far tier";
        return invalid("direct", &"require", reason);
    }
    let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
    if far.timeout.is_zero() || far.timeout > LONGEST_TIMEOUT {
        return invalid("far.timeout", &seconds(far.timeout), "it is more than 0 seconds, and at most a day");
    }
    if far.lookup_timeout > LONGEST_TIMEOUT {
        return invalid("far.lookup_timeout", &seconds(far.lookup_timeout), "it is at most a day");
    }
    if far.staging_bytes == 0 {
        return invalid("far.staging_bytes", &0, "no block could move between the tiers");
    }
    if far.backlog_bytes == 0 {
        return invalid("far.backlog_bytes", &0, "no block could wait to be written to the far tier");
    }
    Ok(())
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("root", &self.core().root).finish_non_exhaustive()
    }
}
