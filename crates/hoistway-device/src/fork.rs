//! Statics that a child of `fork` can use: it has copies of their locks, and no threads that would unlock them.
#![forbid(unsafe_code)]

use std::{
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

/// No process has this number.
const NONE: u32 = 0;

/// What a process makes once and keeps. A child of `fork` sees what its parent has made, and makes nothing: if the fork
/// interrupted the parent while it was making, the child would wait for ever.
pub(crate) struct Once<T> {
    /// The process that began to make it.
    process: AtomicU32,
    made: OnceLock<T>,
}

/// The value was made by a parent of this process, or would be by a thread that this process lacks.
#[derive(Debug)]
pub(crate) struct Forked;

impl<T> Once<T> {
    pub(crate) const fn new() -> Self {
        Self { process: AtomicU32::new(NONE), made: OnceLock::new() }
    }

    /// The value, made at the first call.
    ///
    /// # Errors
    /// A parent of this process has begun to make it.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> T) -> Result<&T, Forked> {
        let own = process::id();
        match self.process.compare_exchange(NONE, own, Ordering::AcqRel, Ordering::Acquire) {
            Err(other) if other != own => Err(Forked),
            _ => Ok(self.made.get_or_init(make)),
        }
    }

    /// The value, if it was made by this process or a parent of it.
    pub(crate) fn get(&self) -> Option<&T> {
        self.made.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_parent_began_to_make_is_refused_and_not_waited_for() {
        let once = Once::new();
        once.process.store(process::id() + 1, Ordering::Release);
        assert!(once.get_or_make(|| 1).is_err());
        assert!(once.get().is_none());
    }

    #[test]
    fn it_is_made_once() {
        let once = Once::new();
        assert_eq!(once.get(), None);
        assert_eq!(once.get_or_make(|| 1).ok(), Some(&1));
        assert_eq!(once.get_or_make(|| 2).ok(), Some(&1));
        assert_eq!(once.get(), Some(&1));
    }
}
