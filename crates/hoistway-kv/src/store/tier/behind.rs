//! A namespace in the far tier, as the same namespace of the near one reaches it.
#![forbid(unsafe_code)]

use super::{Stored, Tier, add};
use crate::{
    BlockInfo, Error, FarPolicy, Key, Namespace, NamespaceId, NamespaceOptions, Result, Status, Store,
    store::{group::Group, load::LoadOptions, requests::StoreUnderWay},
    ticket::{LastStep, MemoryLease, TicketState},
};
use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicBool, Ordering},
};

/// The copy of a namespace in the far tier.
pub(crate) struct Behind {
    tier: Arc<Tier>,
    near: Namespace,
    description: String,
    far: RwLock<Option<Namespace>>,
    /// Whether the last attempt to open it failed.
    has_failed: AtomicBool,
}

impl Behind {
    pub(super) fn new(tier: &Arc<Tier>, near: Namespace, description: &str) -> Self {
        Self {
            tier: tier.clone(),
            near,
            description: description.to_owned(),
            far: RwLock::default(),
            has_failed: AtomicBool::new(false),
        }
    }

    pub(super) fn id(&self) -> NamespaceId {
        self.near.id()
    }

    pub(super) fn near(&self) -> &Namespace {
        &self.near
    }

    /// The namespace of the far store, while that can be used.
    pub(super) fn far(&self) -> Option<Namespace> {
        if !self.tier.link.is_up() {
            return None;
        }
        self.far.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.far.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Whether it is not open, and was not tried.
    pub(super) fn is_new(&self) -> bool {
        !self.has_failed.load(Ordering::Relaxed) && self.is_closed()
    }

    /// Opens it. Of attempts that fail one after the other, only the first is an error.
    pub(super) fn open(&self, store: &Store) -> Result<()> {
        // The near tier says when each block expires, and the quota is one of the near tier.
        let opened = store.opened_namespace(self.id(), &self.description, NamespaceOptions::default());
        let failure = opened.map(|far| self.set(Some(far)));
        let is_first = failure.is_err() && !self.has_failed.swap(true, Ordering::Relaxed);
        // A reader finds it once a writer has made it.
        if is_first && self.tier.stores() { failure } else { Ok(()) }
    }

    pub(super) fn set(&self, far: Option<Namespace>) {
        self.has_failed.store(false, Ordering::Relaxed);
        let last = std::mem::replace(&mut *self.far.write().unwrap_or_else(PoisonError::into_inner), far);
        drop(last);
    }

    /// Adds those keys to the found ones that the far tier has.
    pub(crate) fn contains<K: AsRef<[u8]>>(&self, keys: &[K], found: &mut [bool]) {
        if found.iter().all(|found| *found) {
            return;
        }
        let Some(far) = self.far() else { return };
        let missing: Vec<_> = (0..keys.len()).filter(|place| !found[*place]).collect();
        let asked = missing.iter().map(|place| keys[*place].as_ref());
        let answer = if far.lookups_wait() {
            let asked: Vec<_> = asked.map(<[u8]>::to_vec).collect();
            let answer = self.tier.ask(move || far.lookup(&asked).ok());
            if answer.is_none() {
                add(&self.tier.counters.lookup_timeouts, 1);
            }
            answer.flatten()
        } else {
            far.lookup(&asked.collect::<Vec<_>>()).ok()
        };
        for (place, is_there) in missing.iter().zip(answer.unwrap_or_default()) {
            found[*place] = is_there;
        }
    }

    /// What a block of the far tier is made of; `None` if the far tier cannot say.
    pub(crate) fn block(&self, key: &Key) -> Result<Option<BlockInfo>> {
        let (tier, key) = (&self.tier, key.clone());
        let Some(far) = self.far() else { return Ok(None) };
        let longest = tier.options.timeout;
        tier.within_timeout(move || far.block_within(&key, longest)).unwrap_or(Ok(None))
    }

    /// Loads blocks that the near tier lacks, and ends their items: as `absent` where the far tier lacks them, too.
    pub(crate) fn load(
        self: &Arc<Self>,
        options: &Arc<LoadOptions>,
        groups: Vec<Group>,
        lease: Arc<MemoryLease>,
        absent: Status,
    ) {
        self.tier.load(self, options, groups, lease, absent);
    }

    /// Sets what happens to the blocks of a store before it ends.
    pub(crate) fn set_last_step(
        self: &Arc<Self>,
        ticket: &TicketState,
        blocks: Vec<Stored>,
        under_way: Arc<StoreUnderWay>,
    ) {
        // A store that ends early cannot say of any block that the far tier has it.
        let far_missing = match self.tier.options.policy {
            FarPolicy::WriteThrough => blocks.len() as u64,
            FarPolicy::WriteBack => 0,
        };
        let behind = self.clone();
        let last_step: LastStep = Box::new(move |ticket, statuses| {
            let tier = &behind.tier;
            let through = match tier.options.policy {
                FarPolicy::WriteThrough => Some(tier.write_through(ticket, under_way)),
                FarPolicy::WriteBack => None,
            };
            // Blocks that lack shards are written once another request completes them.
            let keys: Vec<_> = blocks.iter().map(|block| block.key.as_bytes()).collect();
            let is_there = if statuses.iter().any(|status| status.is_ok()) {
                behind.near.contains(&keys).unwrap_or_default()
            } else {
                Vec::new()
            };
            // Those that the far tier has need no writing, where it knows that without asking its file system.
            let far = behind.far().filter(|far| !far.lookups_wait());
            let is_far = |key: &Key| {
                far.as_ref().is_some_and(|far| far.contains(&[key.as_bytes()]).is_ok_and(|found| found[0]))
            };
            let is_to_write = |(block, is_there): (_, bool)| {
                Some(block).filter(|block: &Stored| is_there && !is_far(&block.key))
            };
            for block in blocks.into_iter().zip(is_there).filter_map(is_to_write) {
                tier.write(&behind, block, through.clone());
            }
            if through.is_none() {
                ticket.conclude(0);
            }
        });
        ticket.set_last_step(last_step, far_missing);
    }

    /// Removes blocks from both tiers; `near` does so in the near one. Nothing moves between them meanwhile.
    ///
    /// # Errors
    /// [`Error::FarUnavailable`] if the far tier may still have them.
    pub(crate) fn delete<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        near: impl FnOnce() -> Result<usize>,
    ) -> Result<usize> {
        let keys: Vec<_> = keys.iter().map(|key| key.as_ref().to_vec()).collect();
        let is_gone = |key: &Key| keys.iter().any(|gone| gone == key.as_bytes());
        let asked = keys.clone();
        self.remove(is_gone, near, move |far| far.delete(&asked))
    }

    /// Removes all blocks from both tiers.
    ///
    /// # Errors
    /// As [`Behind::delete`].
    pub(crate) fn clear(&self, near: impl FnOnce() -> Result<usize>) -> Result<usize> {
        self.remove(|_| true, near, |far| far.clear())
    }

    fn remove(
        &self,
        is_gone: impl Fn(&Key) -> bool,
        near: impl FnOnce() -> Result<usize>,
        remove: impl FnOnce(&Namespace) -> Result<usize> + Send + 'static,
    ) -> Result<usize> {
        let tier = &self.tier;
        let paused = tier.moves.pause(tier.options.timeout);
        // Those that wait to be written are pinned, and let go here.
        let let_go = tier.moves.forget(self.id(), is_gone);
        let removed = near();
        // Those that are there still are written no more: nothing was removed, or others have pinned them.
        let left = match &removed {
            Err(_) => let_go.len(),
            Ok(_) if let_go.is_empty() => 0,
            Ok(_) => {
                let keys: Vec<_> = let_go.iter().map(Key::as_bytes).collect();
                let found = self.near.contains(&keys).unwrap_or_default();
                found.into_iter().filter(|is_there| *is_there).count()
            }
        };
        add(&tier.counters.unwritten_blocks, left as u64);
        let removed = removed?;
        let unavailable = || Error::FarUnavailable { path: tier.root().to_path_buf() };
        let far = self.far().filter(|_| paused.is_some()).ok_or_else(unavailable)?;
        let of_far = tier.within_timeout(move || remove(&far)).ok_or_else(unavailable)??;
        Ok(removed.max(of_far))
    }
}
