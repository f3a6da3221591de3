//! The wish of a caller that something ends, and how long what cannot be left half done goes on then.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How long after a stop an answer is waited for that says whether an object was replaced, until when the store is asked what it
/// has, and until when uploads are aborted and objects are removed.
pub(crate) const ANSWERED_BY: Duration = Duration::from_secs(5);
pub(crate) const COMPARED_BY: Duration = Duration::from_secs(7);
pub(crate) const ENDED_BY: Duration = Duration::from_secs(10);

/// Ends uploads once it is set. What cannot be left half done then has 10 s in all: an answer that is on its way, aborts and
/// removals.
#[derive(Debug, Default)]
pub struct Stop {
    is_set: AtomicBool,
    since: OnceLock<Instant>,
}

impl Stop {
    /// Sets it. Only the first time counts.
    pub fn set(&self) {
        self.since.get_or_init(Instant::now);
        self.is_set.store(true, Ordering::Relaxed);
    }

    /// Returns whether it was set.
    pub fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Relaxed)
    }

    /// Returns what other operations of this crate take.
    pub fn flag(&self) -> &AtomicBool {
        &self.is_set
    }

    /// Whether it was set so long ago.
    pub(crate) fn was_set_for(&self, time: Duration) -> bool {
        self.since.get().is_some_and(|since| since.elapsed() >= time)
    }

    /// Sets it, and returns when all must have ended.
    pub(crate) fn end(&self) -> Instant {
        self.set();
        self.since.get().map_or_else(Instant::now, |since| *since + ENDED_BY)
    }
}
