//! How much storage namespaces use, and how much they may.
#![forbid(unsafe_code)]

use hoistway_io::parallel::lock;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// A namespace's blocks.
#[derive(Debug)]
pub(super) struct NamespaceUse {
    /// Bytes of the slots of own ones.
    pub(super) own_bytes: AtomicU64,
    /// Bytes of the slots of others', by their owners.
    others: Mutex<HashMap<u16, u64>>,
    /// Most bytes; `u64::MAX`: no limit.
    quota_bytes: AtomicU64,
}

impl Default for NamespaceUse {
    fn default() -> Self {
        Self { own_bytes: AtomicU64::new(0), others: Mutex::default(), quota_bytes: AtomicU64::new(u64::MAX) }
    }
}

impl NamespaceUse {
    /// A block of another owner has come.
    pub(super) fn enter(&self, owner: u16, bytes: u64) {
        *lock(&self.others).entry(owner).or_default() += bytes;
    }

    /// A block of another owner has gone.
    pub(super) fn leave(&self, owner: u16, bytes: u64) {
        let mut others = lock(&self.others);
        if let Some(left) = others.get_mut(&owner) {
            *left = left.saturating_sub(bytes);
            if *left == 0 {
                others.remove(&owner);
            }
        }
    }

    /// Own bytes that have to go before so many more can come. All processes that have blocks share the quota: what one has
    /// less than its part, others may have, until it wants it.
    fn excess(&self, more: u64) -> u64 {
        let quota = self.quota_bytes.load(Ordering::Relaxed);
        if quota == u64::MAX {
            return 0;
        }
        let (of_others, processes) = {
            let others = lock(&self.others);
            (others.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)), others.len() as u64 + 1)
        };
        let own_quota = quota.saturating_sub(of_others).max(quota / processes);
        self.own_bytes.load(Ordering::Relaxed).saturating_add(more).saturating_sub(own_quota)
    }
}

/// Namespaces, by number.
#[derive(Debug, Default)]
pub(super) struct Namespaces(RwLock<Vec<Arc<NamespaceUse>>>);

impl Namespaces {
    pub(super) fn of(&self, namespace: u16) -> Arc<NamespaceUse> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.get(usize::from(namespace)) {
            return Arc::clone(found);
        }
        drop(known);
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let len = known.len().max(usize::from(namespace) + 1);
        known.resize_with(len, Arc::default);
        Arc::clone(&known[usize::from(namespace)])
    }

    pub(super) fn set_quota(&self, namespace: u16, bytes: Option<u64>) {
        self.of(namespace).quota_bytes.store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn used(&self, namespace: u16) -> u64 {
        self.of(namespace).own_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn excess(&self, namespace: u16, more: u64) -> u64 {
        self.of(namespace).excess(more)
    }

    /// Namespaces that have more than they may, with the bytes that are too many.
    pub(super) fn over_quota(&self) -> Vec<(u16, u64)> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let excesses = known.iter().enumerate().map(|(number, usage)| (number as u16, usage.excess(0)));
        excesses.filter(|(_, excess)| *excess > 0).collect()
    }
}
