//! Events: marks in a stream that hosts and other streams wait for.

use super::{context::Owner, handles::Table};
use std::{
    collections::BTreeSet,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// All events that exist.
pub(crate) static EVENTS: Table<Event> = Table::new(0xE7E0_0000_0000);

/// An event, which may be recorded again and again: each time is a generation.
pub(crate) struct Event {
    pub(crate) owner: Arc<Owner>,
    generations: Mutex<Generations>,
    passed: Condvar,
}

#[derive(Default)]
struct Generations {
    latest: u64,
    /// Those that no stream has reached yet. A later one, recorded in another stream, may be reached first.
    pending: BTreeSet<u64>,
    /// The latest that became part of a capture, and has no time.
    captured: u64,
    /// The latest behind work that was left out.
    lost: u64,
}

/// Destroys what a context left behind, and says how many events that were.
pub(crate) fn release_all(owner: &Arc<Owner>) -> u64 {
    EVENTS.remove_if(|event| Arc::ptr_eq(&event.owner, owner)).len() as u64
}

impl Event {
    pub(crate) fn new(owner: &Arc<Owner>) -> Arc<Event> {
        Arc::new(Event { owner: Arc::clone(owner), generations: Mutex::default(), passed: Condvar::new() })
    }

    /// Begins a generation, which a stream passes later.
    pub(crate) fn record(&self) -> u64 {
        let mut generations = self.generations();
        generations.latest += 1;
        let latest = generations.latest;
        generations.pending.insert(latest);
        latest
    }

    /// A generation became part of a capture.
    pub(super) fn capture(&self, generation: u64) {
        let mut generations = self.generations();
        generations.pending.remove(&generation);
        generations.captured = generation;
    }

    /// Whether the latest generation is part of a capture.
    pub(crate) fn is_captured(&self) -> bool {
        let generations = self.generations();
        generations.captured == generations.latest && generations.latest > 0
    }

    pub(crate) fn pass(&self, generation: u64) {
        self.generations().pending.remove(&generation);
        self.passed.notify_all();
    }

    /// As [`Event::pass`], behind work that was left out: nothing says that it was done.
    pub(super) fn lose(&self, generation: u64) {
        let mut generations = self.generations();
        generations.lost = generations.lost.max(generation);
        drop(generations);
        self.pass(generation);
    }

    /// Whether work ahead of the latest generation was left out.
    pub(crate) fn is_lost(&self) -> bool {
        let generations = self.generations();
        generations.lost == generations.latest && generations.latest > 0
    }

    /// The latest generation: what a wait that is asked for now must wait for, however often the event is
    /// recorded until a stream gets to the wait.
    pub(crate) fn latest(&self) -> u64 {
        self.generations().latest
    }

    pub(crate) fn is_complete(&self) -> bool {
        let generations = self.generations();
        !generations.pending.contains(&generations.latest)
    }

    pub(crate) fn wait(&self, generation: u64) {
        let waiting = |generations: &mut Generations| generations.pending.contains(&generation);
        let generations = self.generations();
        drop(self.passed.wait_while(generations, waiting).unwrap_or_else(PoisonError::into_inner));
    }

    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.generations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
