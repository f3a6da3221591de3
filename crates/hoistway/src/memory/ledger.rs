//! The part of a load's memory budget that is left for optional memory.
#![forbid(unsafe_code)]

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The part of a load's memory budget that nothing it needs takes.
#[derive(Debug)]
pub(crate) struct Ledger {
    limit_bytes: u64,
    taken_bytes: AtomicU64,
    most_taken_bytes: AtomicU64,
}

/// Bytes that were taken. They are given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Grant {
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl Ledger {
    /// Lets so many bytes be taken; with `u64::MAX` any number.
    pub(crate) fn new(limit_bytes: u64) -> Arc<Self> {
        Arc::new(Self { limit_bytes, taken_bytes: AtomicU64::new(0), most_taken_bytes: AtomicU64::new(0) })
    }

    /// Takes bytes, if there are as many.
    pub(crate) fn try_take(self: &Arc<Self>, bytes: u64) -> Option<Grant> {
        let add = |taken: u64| taken.checked_add(bytes).filter(|&taken| taken <= self.limit_bytes);
        let before = self.taken_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        self.most_taken_bytes.fetch_max(before + bytes, Ordering::Relaxed);
        Some(Grant { ledger: self.clone(), bytes })
    }

    /// Returns whether there is a limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.limit_bytes < u64::MAX
    }

    /// Returns the most bytes that were taken at a time.
    pub(crate) fn most_taken_bytes(&self) -> u64 {
        self.most_taken_bytes.load(Ordering::Relaxed)
    }
}

impl Grant {
    /// Returns whether the ledger that it is of has a limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.ledger.is_limited()
    }

    /// Returns the limit of the ledger that it is of.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.ledger.limit_bytes
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.ledger.taken_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_taken_than_there_is_and_drops_give_it_back() {
        let ledger = Ledger::new(10);
        let first = ledger.try_take(7).unwrap();
        assert!(ledger.try_take(4).is_none() && ledger.try_take(u64::MAX).is_none());
        let second = ledger.try_take(3).unwrap();
        drop(first);
        assert!(ledger.try_take(8).is_none());
        let third = ledger.try_take(7).unwrap();
        assert_eq!(ledger.most_taken_bytes(), 10);
        drop((second, third));
        assert!(ledger.try_take(10).is_some_and(|grant| grant.is_limited()));
        assert!(!Ledger::new(u64::MAX).is_limited());
    }
}
