//! Requests to a namespace: lookups, loads, stores.
#![allow(unsafe_code, reason = "the caller answers for the memory of requests")]

use super::{
    Core, Inner, PinGuard,
    core::Message,
    gate::Charge,
    group::{Group, group},
    load::{self, LoadOptions},
    placement::{self, AdmittedStore, Shape, StoreBlock, StoreTask},
    tier::{Behind, Stored},
    verify,
};
use crate::{
    BlockInfo, DropReason, Error, Fingerprint, Item, Key, LayoutKind, NamespaceId, NamespaceOptions,
    Priority, Request, Result, Status, Ticket,
    format::{BLOCK_LEN, MAX_SHARDS},
    metrics::NamespaceCounters,
    ticket::{Kind, TicketOptions, TicketState},
};
use hoistway_io::parallel::lock;
use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

/// Keys that are looked up together, where the answer may make others needless.
const LOOKUP_STEP: usize = 64;

/// A namespace of an open store. Clones are the same namespace, and keep the store open.
///
/// Looking up, loading and storing return without waiting for the disk in layout
/// [`Segments`](crate::LayoutKind::Segments), which knows what is there. In layout [`Files`](crate::LayoutKind::Files)
/// they ask the file system for each block that has to be found or is not known.
///
/// Keys that no block can have, because they are empty or too long, are refused with [`Error::InvalidKey`].
#[derive(Clone)]
pub struct Namespace {
    core: Arc<Core>,
    /// Keeps the store open; `None` for the threads of the store.
    open: Option<Arc<Inner>>,
    id: NamespaceId,
    options: Arc<Mutex<NamespaceOptions>>,
    counters: Arc<NamespaceCounters>,
    /// The same namespace in the far tier.
    far: Option<Arc<Behind>>,
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Namespace").field("id", &self.id).field("root", &self.core().root).finish()
    }
}

impl Namespace {
    pub(super) fn new(inner: &Arc<Inner>, id: NamespaceId, options: Arc<Mutex<NamespaceOptions>>) -> Self {
        let core = inner.core.clone();
        let counters = core.metrics.namespace(id);
        Self { core, open: Some(inner.clone()), id, options, counters, far: None }
    }

    /// The same namespace with its copy in the far tier.
    pub(super) fn before(self, far: Arc<Behind>) -> Self {
        Self { far: Some(far), ..self }
    }

    /// The near tier of the namespace, for blocks that move between the tiers, which no caller has asked for: they are not
    /// counted. It does not keep the store open.
    pub(super) fn near(&self) -> Self {
        Self { open: None, far: None, counters: Arc::default(), ..self.clone() }
    }

    fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Its identity.
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// Whether lookups may wait for the disk, as the layout has no index that knows of all blocks.
    pub fn lookups_wait(&self) -> bool {
        self.core().options.layout != Some(LayoutKind::Segments)
    }

    /// Whether blocks are there, one answer each. No disk is asked, where the layout knows of all blocks.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::Closed`].
    pub fn lookup<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<bool>> {
        let begin = Instant::now();
        self.check_open()?;
        let found = self.contains(keys)?;
        let count = found.iter().filter(|found| **found).count();
        self.core().metrics.looked_up(&self.counters, keys.len(), count, begin);
        Ok(found)
    }

    /// How many of these blocks, from the first on, are there without a gap.
    ///
    /// # Errors
    /// As [`Namespace::lookup`].
    pub fn lookup_prefix<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<usize> {
        let begin = Instant::now();
        self.check_open()?;
        let mut length = 0;
        for step in keys.chunks(LOOKUP_STEP) {
            let found = self.contains(step)?;
            let there = found.iter().take_while(|found| **found).count();
            length += there;
            if there < step.len() {
                break;
            }
        }
        self.core().metrics.looked_up(&self.counters, keys.len(), length, begin);
        Ok(length)
    }

    /// The last of these blocks that is there, by its place in `keys`.
    ///
    /// # Errors
    /// As [`Namespace::lookup`].
    pub fn lookup_reverse<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Option<usize>> {
        let begin = Instant::now();
        self.check_open()?;
        let mut last = None;
        let mut end = keys.len();
        for step in keys.rchunks(LOOKUP_STEP) {
            end -= step.len();
            last = self.contains(step)?.iter().rposition(|found| *found).map(|place| end + place);
            if last.is_some() {
                break;
            }
        }
        self.core().metrics.looked_up(&self.counters, keys.len(), usize::from(last.is_some()), begin);
        Ok(last)
    }

    /// As [`Namespace::lookup`], uncounted.
    pub(super) fn contains<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<bool>> {
        let blocks = self.fingerprints(keys)?;
        let mut found = vec![false; blocks.len()];
        self.core().layout.contains(self.id, &blocks, &mut found);
        if let Some(far) = &self.far {
            far.contains(keys, &mut found);
        }
        Ok(found)
    }

    fn fingerprints<'a, K: AsRef<[u8]>>(&self, keys: &'a [K]) -> Result<Vec<(&'a [u8], Fingerprint)>> {
        keys.iter()
            .map(|key| {
                let key = key.as_ref();
                Key::check(key)?;
                Ok((key, Fingerprint::of(self.id, key)))
            })
            .collect()
    }

    /// Loads shards of blocks. What is not there, or cannot be delivered, is said by the status of its item.
    ///
    /// # Safety
    /// The memory of all pieces may be written until the ticket is released
    /// ([`Ticket::is_released`]); no other code reads or writes it until then. An event to wait for lives until then
    /// too.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`], [`Error::TooManyCompletions`], [`Error::Closed`].
    pub unsafe fn load(&self, mut request: Request) -> Result<Ticket> {
        self.check_open()?;
        let items = request.items.len();
        let groups = self.group(&mut request)?;
        let priority = request.priority.unwrap_or(Priority::Demand);
        let wait_event = request.wait_event;
        let ticket = self.begin(request, items, Kind::Load)?;
        let (counters, of_request) = (self.counters.clone(), ticket.clone());
        let far = self.far.clone();
        let options =
            LoadOptions { namespace: self.id, counters, priority, wait_event, ticket: of_request, far };
        load::load(self.core(), options, groups);
        Ok(Ticket::new(ticket))
    }

    /// Stores shards of blocks. A block is found once all its shards were stored, by this request or by several, in any
    /// order, from any threads of this process.
    ///
    /// An item that completes its block ends when the block is found: with
    /// [`Durability::None`](crate::Durability::None) when it is written, else when it is on the disk. Other items end
    /// when they are written. Items of one block in one request end together.
    ///
    /// # Safety
    /// The memory of all pieces may be read until the ticket is released ([`Ticket::is_released`]); no code writes it
    /// until then. An event to wait for lives until then too.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`], [`Error::TooManyCompletions`], [`Error::ReadOnly`], [`Error::Closed`].
    pub unsafe fn store(&self, mut request: Request) -> Result<Ticket> {
        self.check_writable()?;
        let items = request.items.len();
        let groups = self.group(&mut request)?;
        let shapes = shapes(&request, &groups)?;
        let ttl = [request.ttl, lock(&self.options).ttl].into_iter().flatten().min();
        let (shards, wait_event) = (request.shards, request.wait_event);
        let priority = request.priority.unwrap_or(Priority::Background);
        let ticket = self.begin(request, items, Kind::Store)?;
        let options = placement::StoreOptions {
            namespace: self.id,
            counters: self.counters.clone(),
            shards,
            expires: ttl.and_then(|ttl| SystemTime::now().checked_add(ttl)),
            priority,
            wait_event,
            under_way: self.core().requests.begin_store(ticket.id),
            ticket: ticket.clone(),
        };
        if let Some(far) = &self.far {
            // Other shards of a block may come with other requests: it counts as if all were as long as these.
            let stored = |(group, shape): (&Group, &Shape)| {
                let longest = group.items.iter().map(|item| item.len).max().unwrap_or(0);
                let pinned_bytes = shape.block_bytes(options.shards);
                Stored::new(group.key.clone(), options.shards, longest, pinned_bytes)
            };
            let blocks = groups.iter().zip(&shapes).map(stored).collect();
            far.set_last_step(&ticket, blocks, options.under_way.clone());
        }
        let blocks = self.admit(groups, shapes, &options);
        if blocks.is_empty() {
            ticket.release();
        } else {
            let task = StoreTask { options: Arc::new(options), blocks };
            // If the placement thread has ended, the store is closed, and ends the request.
            let _ = self.core().placement.send(Message::Task(task));
        }
        Ok(Ticket::new(ticket))
    }

    /// Whether a load of a block would be admitted just now.
    pub(crate) fn may_load(&self, priority: Priority) -> bool {
        self.core().gate.may_load(priority)
    }

    /// Whether a store of a block would be admitted just now.
    pub(crate) fn may_store(&self, bytes: u64) -> bool {
        self.core().gate.may_store(Charge::of(bytes))
    }

    /// Ends what is there already. The rest is admitted whole, or refused if others leave it no room.
    fn admit(
        &self,
        groups: Vec<Group>,
        shapes: Vec<Shape>,
        options: &placement::StoreOptions,
    ) -> VecDeque<StoreBlock> {
        let core = self.core();
        let blocks: Vec<_> = groups.iter().map(|group| (group.key.as_bytes(), group.fingerprint)).collect();
        let mut found = vec![false; blocks.len()];
        core.layout.contains(self.id, &blocks, &mut found);
        let charges =
            groups.iter().zip(&found).filter(|(_, exists)| !**exists).map(|(group, _)| charge(group));
        let is_admitted = core.gate.admit_store(charges);
        let (mut admitted, mut settled) = (VecDeque::with_capacity(groups.len()), Vec::new());
        for ((group, shape), exists) in groups.into_iter().zip(shapes).zip(found) {
            let status = if exists {
                Status::Exists
            } else if is_admitted {
                admitted.push_back(StoreBlock {
                    admitted: AdmittedStore::new(core, charge(&group)),
                    group,
                    shape,
                });
                continue;
            } else {
                Status::Dropped(DropReason::Busy)
            };
            group.items.iter().for_each(|_| placement::count_refused(core, options, status));
            settled.extend(group.settled(status));
        }
        options.ticket.settle(settled, None);
        admitted
    }

    fn group(&self, request: &mut Request) -> Result<Vec<Group>> {
        let items: Vec<Item> = std::mem::take(&mut request.items);
        if items.is_empty() {
            return Err(Error::InvalidRequest("a request without items".into()));
        }
        group(self.id, items)
    }

    fn begin(&self, request: Request, items: usize, kind: Kind) -> Result<Arc<TicketState>> {
        let core = self.core();
        let timeout = request.timeout.or(core.options.timeout);
        let options = TicketOptions {
            id: core.requests.number(request.notify)?,
            items,
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            notify: request.notify,
            kind,
            keep: request.keep,
        };
        let ticket = TicketState::new(core, options);
        core.requests.begin(&ticket);
        if self.check_open().is_err() {
            // Closed in the meantime: the closing thread may not have seen this request.
            ticket.abort(Status::Cancelled);
        }
        Ok(ticket)
    }

    /// What a block is made of; `None` if it is not there. Reads its header.
    ///
    /// # Errors
    /// [`Error::DamagedBlock`], [`Error::InvalidKey`], [`Error::Io`], [`Error::Closed`].
    pub fn block(&self, key: &[u8]) -> Result<Option<BlockInfo>> {
        self.check_open()?;
        let key = Key::new(key)?;
        let near = verify::block(self.core(), self.id, &key, verify::LONGEST_READ)?;
        match self.far.as_ref().filter(|_| near.is_none()) {
            Some(far) => far.block(&key),
            None => Ok(near),
        }
    }

    /// As [`Namespace::block`] of this tier, where reading may take this long.
    pub(super) fn block_within(&self, key: &Key, longest: Duration) -> Result<Option<BlockInfo>> {
        self.check_open()?;
        verify::block(self.core(), self.id, key, longest)
    }

    /// Notes that blocks were used, so that they stay longer. Of a prefix the first ones stay longest.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::Closed`].
    pub fn touch<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<()> {
        self.check_open()?;
        let blocks: Vec<_> =
            self.fingerprints(keys)?.into_iter().map(|(_, fingerprint)| fingerprint).collect();
        self.core().layout.touch(&blocks);
        Ok(())
    }

    /// Keeps blocks from being evicted or deleted by this process, as long as the guard lives.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::Closed`].
    pub fn pin<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<PinGuard> {
        self.check_open()?;
        let blocks = self.fingerprints(keys)?;
        Ok(PinGuard::new(self.core(), blocks.into_iter().map(|(_, fingerprint)| fingerprint)))
    }

    /// Removes blocks that this process has not pinned. Returns how many. In layout
    /// [`Segments`](crate::LayoutKind::Segments) those that this process stored; in layout
    /// [`Files`](crate::LayoutKind::Files) also those of other processes and hosts.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::ReadOnly`], [`Error::Io`], [`Error::Closed`].
    pub fn delete<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<usize> {
        self.check_writable()?;
        let blocks = self.fingerprints(keys)?;
        let delete = || self.core().layout.delete(self.id, &blocks);
        match &self.far {
            Some(far) => far.delete(keys, delete),
            None => delete(),
        }
    }

    /// Removes all blocks of the namespace that this process has not pinned. Returns how many. In layout
    /// [`Segments`](crate::LayoutKind::Segments) those that this process stored; in layout
    /// [`Files`](crate::LayoutKind::Files) also those of other processes and hosts.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`], [`Error::Closed`].
    pub fn clear(&self) -> Result<usize> {
        self.check_writable()?;
        let clear = || self.core().layout.clear(self.id);
        match &self.far {
            Some(far) => far.clear(clear),
            None => clear(),
        }
    }

    fn check_open(&self) -> Result<()> {
        match self.open {
            Some(_) => self.core().check_open(),
            None => self.core().check_running(),
        }
    }

    fn check_writable(&self) -> Result<()> {
        self.check_open()?;
        self.core().check_writable()
    }
}

fn charge(group: &Group) -> Charge {
    Charge::of(group.len_bytes())
}

/// Returns the room that the shards of each block get: unless the request says how long they are, a block whose shards are
/// all here gets as much as they need, and one that lacks some as much as the longest shard of the request.
fn shapes(request: &Request, groups: &[Group]) -> Result<Vec<Shape>> {
    let invalid = |what: String| Error::InvalidRequest(what);
    if !(1..=MAX_SHARDS).contains(&request.shards) {
        return Err(invalid(format!(
            "a block cannot have {} shards: it has 1 to {MAX_SHARDS}",
            request.shards
        )));
    }
    let items = || groups.iter().flat_map(|group| group.items.iter().map(move |item| (&group.key, item)));
    let longest = items().map(|(_, item)| item.len).max().unwrap_or(0);
    if let Some(shard_len) = request.shard_len.filter(|shard_len| longest > *shard_len) {
        return Err(invalid(format!(
            "an item has {longest} bytes, and the request says that shards have at most {shard_len}"
        )));
    }
    if let Some((key, item)) = items().find(|(_, item)| item.shard >= request.shards) {
        let shards = request.shards;
        return Err(invalid(format!(
            "item {} (key {key}): there is no shard {}, as blocks have {shards}, counted from 0",
            item.item, item.shard
        )));
    }
    let shape = |group: &Group| {
        let is_whole = group.items.len() == request.shards as usize;
        let longest_of_group = group.items.iter().map(|item| item.len).max().filter(|_| is_whole);
        let shard_len = request.shard_len.or(longest_of_group).unwrap_or(longest);
        let stride = shard_len.checked_next_multiple_of(BLOCK_LEN);
        stride
            .filter(|stride| stride.checked_mul(u64::from(request.shards) + 1).is_some())
            .map(|stride| Shape { shard_len, stride })
            .ok_or_else(|| invalid(format!("{} shards of {shard_len} bytes", request.shards)))
    };
    groups.iter().map(shape).collect()
}
