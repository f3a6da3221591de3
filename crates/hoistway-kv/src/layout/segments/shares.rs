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
use std::{io, path::PathBuf, sync::atomic::Ordering, time::Duration};

/// The known state of the living writers of a store.
pub(super) struct Others {
    /// Their number, including this one.
    pub(super) writers: u64,
    /// What those would allocate if they could that have less than this one.
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

/// A request for room of a writer that does not say that it lives expires after this long.
const SILENCE: Duration = Duration::from_secs(60);
/// A writer that has not lacked room for this long ends its request.
const ASKED: Duration = Duration::from_secs(5);

impl Writer {
    /// Whether a new segment fits under all limits. A writer that gets no more than it had takes no room from others.
    pub(super) fn has_room(
        &self,
        charges: &Charges,
        new: &NewSegment,
        given: &Given,
        locked: &RootLock<'_>,
    ) -> Result<bool> {
        let mut needed = charges.total.saturating_add(new.charge);
        if self.charge_of_own(charges).saturating_add(new.charge) > given.own_before {
            // Writers that have less come first.
            needed = needed.saturating_add(self.others(charges, locked)?.wanted);
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
        let own_charge = self.charge_of_own(&charges);
        let others = self.others(&charges, &locked)?;
        let is_unfair = others.wanted > 0
            && own_charge > self.limits.capacity / others.writers
            && charges.total.saturating_add(others.wanted) > self.limits.capacity;
        let must_give = is_unfair || self.is_too_much(charges.total)?;
        if !must_give || lock(&self.slots).is_about_to_drain() {
            return Ok(());
        }
        if let Some(left) = self.reclaim(&locked)? {
            drop(locked);
            self.sync_reclaimed(&[left]);
            return Ok(());
        }
        if let Some(region) = self.least_useful() {
            self.give_up(&region)?;
            // What was given up is not taken back at once.
            self.is_full.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Writes to the lease how much this writer would allocate, if there are others and it has less than its share.
    pub(super) fn note_want(&self, charge: u64, locked: &RootLock<'_>) -> Result<()> {
        let charges = self.shared.root.charges(&self.limits)?;
        let writers = self.others(&charges, locked)?.writers;
        let has_share = self.charge_of_own(&charges).saturating_add(charge) > self.limits.capacity / writers;
        self.wanted.store(if has_share || writers == 1 { 0 } else { charge }, Ordering::Release);
        *lock(&self.asked) = (self.shared.surroundings.monotonic)();
        self.say_alive()
    }

    /// Wants no more room once it has not been lacking for a while.
    pub(super) fn forget_want(&self) {
        let now = (self.shared.surroundings.monotonic)();
        if now.saturating_sub(*lock(&self.asked)) > ASKED {
            self.wanted.store(0, Ordering::Release);
        }
    }

    /// Counts the living writers, and what those want that have less. Dead writers, and requests in leases that have expired,
    /// do not count.
    pub(super) fn others(&self, charges: &Charges, locked: &RootLock<'_>) -> Result<Others> {
        let root = &self.shared.root;
        let own_charge = self.charge_of_own(charges);
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
                let has_less = charges.of_writers.get(&other.id).is_none_or(|charge| *charge < own_charge);
                let wanted = if has_less { self.wanted_by(other) } else { 0 };
                others.wanted = others.wanted.saturating_add(wanted);
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

    fn charge_of_own(&self, charges: &Charges) -> u64 {
        charges.of_writers.get(&self.id).copied().unwrap_or(0)
    }

    /// Whether others have not given up room that was asked for, or keep the lock of the store.
    pub(super) fn waits_for_others(&self) -> bool {
        self.wanted.load(Ordering::Acquire) > 0 || self.is_locked_out.load(Ordering::Acquire)
    }

    pub(super) fn charges(&self) -> Result<Charges> {
        let charges = self.shared.root.charges(&self.limits)?;
        self.shared.taken.store(charges.taken, Ordering::Relaxed);
        Ok(charges)
    }

    /// Removes a segment, or else the other files, of a writer that has ended. Returns the directory that they were in, if there
    /// were any, for [`Writer::sync_reclaimed`] once the lock is given back.
    pub(super) fn reclaim(&self, locked: &RootLock<'_>) -> Result<Option<PathBuf>> {
        let root = &self.shared.root;
        for other in root.writers()?.into_iter().filter(|other| other.id != self.id) {
            match self.reclaim_from(&other, locked) {
                Ok(None) => {}
                Ok(left) => return Ok(left),
                // Others may have left something, too.
                Err(error) => root.warn_once(&other.path, &error),
            }
        }
        Ok(None)
    }

    /// Has the disk know what was removed of these directories. Until then a power cut brings it back: blocks that were good, and
    /// more bytes than there may be, which go again.
    pub(super) fn sync_reclaimed(&self, directories: &[PathBuf]) {
        for path in directories {
            match self.shared.disk.sync_directory(path) {
                // It has gone as well.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => self.shared.root.warn_once(path, &failed("syncing", path)(error)),
                Ok(()) => {}
            }
        }
    }

    fn reclaim_from(&self, other: &WriterDirectory, locked: &RootLock<'_>) -> Result<Option<PathBuf>> {
        let disk = &*self.shared.disk;
        let root = &self.shared.root;
        let Some(_lease) = root.try_lease(&other.path, locked)? else { return Ok(None) };
        let mut files = disk.list(&other.path).map_err(failed("listing", &other.path))?;
        let number_of = |name: &str| match WriterFile::parse(name) {
            WriterFile::Segment(number) => Some(number),
            _ => None,
        };
        let first = files.iter().filter_map(|file| number_of(&file.name)).min();
        if let Some(number) = first {
            let path = other.path.join(names::segment(number));
            disk.remove(&path).map_err(failed("removing", &path))?;
            return Ok(Some(other.path.clone()));
        }
        files.sort_unstable_by(|first, second| first.name.cmp(&second.name));
        for file in files {
            let path = other.path.join(file.name);
            disk.remove(&path).map_err(failed("removing", &path))?;
        }
        disk.remove_directory(&other.path).map_err(failed("removing", &other.path))?;
        Ok(Some(root.path.clone()))
    }
}
