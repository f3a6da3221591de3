//! Handles: numbers that mean nothing outside their table, and nothing at all after their thing is destroyed.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Things by handle. No handle is used twice, but for those that are given out again; none is an address that can be followed.
pub(crate) struct Table<T> {
    entries: Mutex<Entries<T>>,
}

struct Entries<T> {
    next: usize,
    /// Come before the next.
    again: Vec<usize>,
    newest: Option<usize>,
    things: BTreeMap<usize, Arc<T>>,
}

/// Handles look like pointers to programs, which may expect them to be aligned.
const STEP: usize = 16;

impl<T> Table<T> {
    /// Handles of different tables must differ, so that one kind of thing isn't taken for another, and begin
    /// where no program has memory.
    pub(crate) const fn new(first: usize) -> Table<T> {
        Table {
            entries: Mutex::new(Entries {
                next: first,
                again: Vec::new(),
                newest: None,
                things: BTreeMap::new(),
            }),
        }
    }

    pub(crate) fn insert(&self, thing: Arc<T>) -> usize {
        let mut entries = self.entries();
        let handle = entries.again.pop().unwrap_or_else(|| {
            entries.next += STEP;
            entries.next - STEP
        });
        entries.newest = Some(handle);
        entries.things.insert(handle, thing);
        handle
    }

    pub(crate) fn get(&self, handle: usize) -> Option<Arc<T>> {
        self.entries().things.get(&handle).cloned()
    }

    pub(crate) fn remove(&self, handle: usize) -> Option<Arc<T>> {
        self.entries().things.remove(&handle)
    }

    /// Removes and returns all that meet a condition.
    pub(crate) fn remove_if(&self, mut condition: impl FnMut(&T) -> bool) -> Vec<Arc<T>> {
        self.entries().things.extract_if(.., |_, thing| condition(thing)).map(|entry| entry.1).collect()
    }

    pub(crate) fn find(&self, mut condition: impl FnMut(&T) -> bool) -> Option<usize> {
        self.entries().things.iter().find(|(_, thing)| condition(thing)).map(|(handle, _)| *handle)
    }

    /// The handle that was given out last.
    pub(crate) fn newest(&self) -> Option<usize> {
        self.entries().newest
    }

    /// The handles of all that meet a condition, the last first.
    pub(crate) fn handles_of(&self, mut condition: impl FnMut(&T) -> bool) -> Vec<usize> {
        let entries = self.entries();
        entries.things.iter().rev().filter(|(_, thing)| condition(thing)).map(|(handle, _)| *handle).collect()
    }

    /// Has handles of things that are gone given out again, the last first.
    pub(crate) fn give_again(&self, handles: Vec<usize>) {
        self.entries().again.extend(handles);
    }

    pub(crate) fn len(&self) -> u64 {
        self.entries().things.len() as u64
    }

    fn entries(&self) -> MutexGuard<'_, Entries<T>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
