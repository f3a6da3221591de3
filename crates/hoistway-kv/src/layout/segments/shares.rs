//! Room among writers: what each may have, what others want, and what those leave that have ended.
#![forbid(unsafe_code)]

use super::{
    WriterDirectory,
    allocate::NewSegment,
    failed, lock,
    names::{self, WriterFile},
    root::{Charges, RootLock},
    writer::Writer,
};
use crate::Result;
use std::{sync::atomic::Ordering, time::Duration};

/// The known state of the living writers of a store.
pub(super) struct Others {
    /// Their number, including this one.
    pub(super) writers: u64,
    /// The most that one of the others would allocate if it could.
    pub(super) wanted: u64,
}

/// Bytes that were freed for a segment that is to be created.
#[derive(Default)]
pub(super) struct Given {
    /// The charge of this writer before that.
    pub(super) own_before: u64,
    /// Bytes of files. As long as others have them open, the disk does not know that they are free.
    pub(super) bytes: u64,
}

/// A request for room expires after this long.
const SILENCE: Duration = Duration::from_secs(60);

impl Writer {
    /// Whether a new segment fits under all limits. A writer that gets no more than it had takes no room from others.
    pub(super) fn has_room(
        &self,
        charges: &Charges,
        new: &NewSegment,
        given: &Given,
        locked: &RootLock<'_>,
    ) -> Result<bool> {
        let own_charge = charges.of_writers.get(&self.id).copied().unwrap_or(0).saturating_add(new.charge);
        let mut needed = charges.total.saturating_add(new.charge);
        let others = self.others(locked)?;
        if own_charge > given.own_before && own_charge > self.limits.capacity / others.writers {
            // Writers below their share come first.
            needed = needed.saturating_add(others.wanted);
        }
        let available = self.shared.root.available()?.saturating_add(given.bytes);
        let fits = needed <= self.limits.capacity;
        Ok(fits && available >= self.limits.min_free.saturating_add(new.len))
    }

    /// Whether the store is over its capacity, or the disk below its minimum of free bytes.
    pub(super) fn is_too_much(&self, taken: u64) -> Result<bool> {
        Ok(taken > self.limits.capacity || self.shared.root.available()? < self.limits.min_free)
    }

    /// Gives up a segment if there is less room than there was, or if others have less than their share; one of a writer
    /// that is gone, if there is one.
    pub(super) fn keep_limits(&self) -> Result<()> {
        let root = &self.shared.root;
        let charges = self.charges()?;
        let is_wanted = |other: &WriterDirectory| other.id != self.id && self.wanted_by(other) > 0;
        if !self.is_too_much(charges.total)? && !root.writers()?.iter().any(is_wanted) {
            return Ok(());
        }
        // Stores wait for this thread, which waits for no other process.
        let Some(locked) = root.try_lock()? else { return Ok(()) };
        // Another process may have given up a segment in the meantime.
        let charges = root.charges(&self.limits)?;
        let own_charge = charges.of_writers.get(&self.id).copied().unwrap_or(0);
        let others = self.others(&locked)?;
        let is_unfair = others.wanted > 0
            && own_charge > self.limits.capacity / others.writers
            && charges.total.saturating_add(others.wanted) > self.limits.capacity;
        let must_give = is_unfair || self.is_too_much(charges.total)?;
        if must_give
            && !lock(&self.slots).is_about_to_drain()
            && !self.reclaim(&locked)?
            && let Some(region) = self.least_useful()
        {
            self.give_up(&region)?;
            // What was given up is not taken back at once.
            self.is_full.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Writes to the lease how much this writer would allocate, if there are others and it has less than its share.
    pub(super) fn note_want(&self, charge: u64, locked: &RootLock<'_>) -> Result<()> {
        let own_charge = self.own_charge()?;
        let writers = self.others(locked)?.writers;
        let has_share = own_charge.saturating_add(charge) > self.limits.capacity / writers;
        self.wanted.store(if has_share || writers == 1 { 0 } else { charge }, Ordering::Release);
        self.say_alive()
    }

    /// Counts the living writers, and what they want. Dead writers, and requests in leases that have expired, do not count.
    pub(super) fn others(&self, locked: &RootLock<'_>) -> Result<Others> {
        let root = &self.shared.root;
        let mut others = Others { writers: 1, wanted: 0 };
        for other in root.writers()?.iter().filter(|other| other.id != self.id) {
            let is_dead = match root.try_lease(&other.path, locked) {
                Ok(lease) => lease.is_some(),
                Err(error) => {
                    root.warn_once(&other.path, &error);
                    false
                }
            };
            if !is_dead {
                others.writers += 1;
                others.wanted = others.wanted.max(self.wanted_by(other));
            }
        }
        Ok(others)
    }

    /// Returns the bytes for which another writer asks in its lease; 0 if its request has expired.
    fn wanted_by(&self, other: &WriterDirectory) -> u64 {
        let oldest = u64::from(self.shared.now()).saturating_sub(SILENCE.as_secs());
        let lease = other.lease(&*self.shared.disk).filter(|lease| lease.heartbeat >= oldest);
        lease.map_or(0, |lease| lease.wanted_bytes)
    }

    fn own_charge(&self) -> Result<u64> {
        let charges = self.shared.root.charges(&self.limits)?;
        Ok(charges.of_writers.get(&self.id).copied().unwrap_or(0))
    }

    pub(super) fn charges(&self) -> Result<Charges> {
        let charges = self.shared.root.charges(&self.limits)?;
        self.shared.taken.store(charges.taken, Ordering::Relaxed);
        Ok(charges)
    }

    /// Removes a segment, or else the other files, of a writer that has ended. Returns whether there were any.
    pub(super) fn reclaim(&self, locked: &RootLock<'_>) -> Result<bool> {
        let root = &self.shared.root;
        for other in root.writers()?.into_iter().filter(|other| other.id != self.id) {
            match self.reclaim_from(&other, locked) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                // Others may have left something, too.
                Err(error) => root.warn_once(&other.path, &error),
            }
        }
        Ok(false)
    }

    fn reclaim_from(&self, other: &WriterDirectory, locked: &RootLock<'_>) -> Result<bool> {
        let disk = &*self.shared.disk;
        let root = &self.shared.root;
        let Some(_lease) = root.try_lease(&other.path, locked)? else { return Ok(false) };
        let mut files = disk.list(&other.path).map_err(failed("listing", &other.path))?;
        let number_of = |name: &str| match WriterFile::parse(name) {
            WriterFile::Segment(number) => Some(number),
            _ => None,
        };
        let first = files.iter().filter_map(|file| number_of(&file.name)).min();
        if let Some(number) = first {
            let path = other.path.join(names::segment(number));
            disk.remove(&path).map_err(failed("removing", &path))?;
            disk.sync_directory(&other.path).map_err(failed("syncing", &other.path))?;
            return Ok(true);
        }
        files.sort_unstable_by(|first, second| first.name.cmp(&second.name));
        for file in files {
            let path = other.path.join(file.name);
            disk.remove(&path).map_err(failed("removing", &path))?;
        }
        disk.remove_directory(&other.path).map_err(failed("removing", &other.path))?;
        disk.sync_directory(&root.path).map_err(failed("syncing", &root.path))?;
        Ok(true)
    }
}
