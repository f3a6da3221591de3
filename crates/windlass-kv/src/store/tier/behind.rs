//! A namespace in the far tier, as the same namespace of the near one reaches it.
#![forbid(unsafe_code)]

use super::Tier;
use crate::{
    BlockInfo, Error, FarPolicy, Key, Namespace, NamespaceId, NamespaceOptions, Result, Store,
    store::{group::Group, load::LoadOptions, requests::StoreUnderWay},
    ticket::{LastStep, Lease},
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
    /// Whether opening it failed; it is tried again once the far store is opened anew.
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

    pub(super) fn is_to_open(&self) -> bool {
        !self.has_failed.load(Ordering::Relaxed)
            && self.far.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    pub(super) fn open(&self, store: &Store) -> Result<()> {
        // The near tier says when each block expires, and the quota is one of the near tier.
        match store.opened_namespace(self.id(), &self.description, NamespaceOptions::default()) {
            Ok(far) => {
                self.set(Some(far));
                Ok(())
            }
            // A reader finds it once a writer has made it.
            Err(_) if !self.tier.stores() => Ok(()),
            Err(error) => {
                self.has_failed.store(true, Ordering::Relaxed);
                Err(error)
            }
        }
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
            self.tier.look_up(move || far.lookup(&asked).ok())
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

    /// Loads blocks that the near tier lacks, and ends their items.
    pub(crate) fn load(self: &Arc<Self>, options: &Arc<LoadOptions>, groups: Vec<Group>, lease: Arc<Lease>) {
        self.tier.load(self, options, groups, lease);
    }

    /// What happens to the blocks of a store before it ends.
    pub(crate) fn last_step(
        self: &Arc<Self>,
        blocks: Vec<(Key, u64)>,
        under_way: Arc<StoreUnderWay>,
    ) -> LastStep {
        let behind = self.clone();
        Box::new(move |ticket, statuses| {
            let tier = &behind.tier;
            let through = match tier.options.policy {
                FarPolicy::WriteThrough => Some(tier.write_through(ticket, under_way)),
                FarPolicy::WriteBack => None,
            };
            // Blocks that lack shards are written once another request completes them.
            let keys: Vec<_> = blocks.iter().map(|(key, _)| key.as_bytes()).collect();
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
                Some(block).filter(|(key, _): &(Key, u64)| is_there && !is_far(key))
            };
            for (key, bytes) in blocks.into_iter().zip(is_there).filter_map(is_to_write) {
                tier.write(&behind, key, bytes, through.clone());
            }
            if through.is_none() {
                ticket.conclude(0);
            }
        })
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
        tier.moves.forget(self.id(), is_gone);
        let removed = near()?;
        let unavailable = || Error::FarUnavailable { path: tier.root().to_path_buf() };
        let far = self.far().filter(|_| paused.is_some()).ok_or_else(unavailable)?;
        let of_far = tier.within_timeout(move || remove(&far)).ok_or_else(unavailable)??;
        Ok(removed.max(of_far))
    }
}
