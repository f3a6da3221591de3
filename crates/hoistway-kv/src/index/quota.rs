//! How much storage namespaces use, and how much they may.
#![forbid(unsafe_code)]

use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicU64, Ordering},
};

/// A namespace's own blocks.
#[derive(Debug)]
pub(super) struct NamespaceUse {
    /// Bytes of their slots.
    pub(super) own_bytes: AtomicU64,
    /// Most bytes; `u64::MAX`: no limit.
    quota_bytes: AtomicU64,
}

impl Default for NamespaceUse {
    fn default() -> Self {
        Self { own_bytes: AtomicU64::new(0), quota_bytes: AtomicU64::new(u64::MAX) }
    }
}

impl NamespaceUse {
    /// Bytes that have to go before so many more can come.
    fn excess(&self, more: u64) -> u64 {
        let used = self.own_bytes.load(Ordering::Relaxed).saturating_add(more);
        used.saturating_sub(self.quota_bytes.load(Ordering::Relaxed))
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
