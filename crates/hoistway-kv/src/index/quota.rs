//! How much storage namespaces use, and how much they may.
#![forbid(unsafe_code)]

use hoistway_io::parallel::lock;
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard,
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

    fn has_quota(&self) -> bool {
        self.quota_bytes.load(Ordering::Relaxed) != u64::MAX
    }

    /// Own bytes that have to go before so many more can come. All processes that live and have blocks share the quota: what
    /// one has less than its part, others may have, until it wants it. Blocks of processes that have `ended` do not count:
    /// no process could evict them.
    fn excess(&self, more: u64, ended: &HashSet<u16>) -> u64 {
        if !self.has_quota() {
            return 0;
        }
        let quota = self.quota_bytes.load(Ordering::Relaxed);
        let (of_others, processes) = {
            let others = lock(&self.others);
            let living = others.iter().filter(|(owner, _)| !ended.contains(owner));
            living.fold((0, 1), |(sum, processes): (u64, u64), (_, bytes)| {
                (sum.saturating_add(*bytes), processes + 1)
            })
        };
        let own_quota = quota.saturating_sub(of_others).max(quota / processes);
        self.own_bytes.load(Ordering::Relaxed).saturating_add(more).saturating_sub(own_quota)
    }
}

/// Namespaces, by number.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    known: RwLock<Vec<Arc<NamespaceUse>>>,
    /// Owners that write no more.
    ended: RwLock<HashSet<u16>>,
}

impl Namespaces {
    pub(super) fn of(&self, namespace: u16) -> Arc<NamespaceUse> {
        let known = self.known();
        if let Some(found) = known.get(usize::from(namespace)) {
            return Arc::clone(found);
        }
        drop(known);
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
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

    /// Whether any namespace has a quota.
    pub(super) fn have_quota(&self) -> bool {
        self.known().iter().any(|namespace| namespace.has_quota())
    }

    /// Notes which owners write no more.
    pub(super) fn set_ended(&self, owners: HashSet<u16>) {
        *self.ended.write().unwrap_or_else(PoisonError::into_inner) = owners;
    }

    pub(super) fn excess(&self, namespace: u16, more: u64) -> u64 {
        self.of(namespace).excess(more, &self.ended())
    }

    /// Namespaces that have more than they may, with the bytes that are too many.
    pub(super) fn over_quota(&self) -> Vec<(u16, u64)> {
        let (known, ended) = (self.known(), self.ended());
        let excesses =
            known.iter().enumerate().map(|(number, namespace)| (number as u16, namespace.excess(0, &ended)));
        excesses.filter(|(_, excess)| *excess > 0).collect()
    }

    fn known(&self) -> RwLockReadGuard<'_, Vec<Arc<NamespaceUse>>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> RwLockReadGuard<'_, HashSet<u16>> {
        self.ended.read().unwrap_or_else(PoisonError::into_inner)
    }
}
