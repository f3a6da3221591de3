//! Judges whether other writers live, by their locks and by changes of their leases while this process watches. No wall
//! clock counts: that of another host may be ahead, and a virtual machine may have been suspended.
#![forbid(unsafe_code)]

use super::{lock, names};
use crate::{
    disk::{Disk, DiskFile, FileAccess, RealDisk, is_unexpected_kind},
    format::lease::{LEASE_LEN, Lease, LockDomain},
};
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};

/// Most time between two looks that counts as silence: a clock may jump while this process is suspended.
const MOST_BETWEEN_LOOKS: Duration = Duration::from_secs(20);

/// The observed state of another writer.
#[derive(Debug)]
pub(super) enum Liveness {
    /// Its lease is locked, has changed within the time-out, or cannot be read.
    Living,
    /// Its lease is not locked, as far as this host sees, and has not changed since this process watches.
    Unproven,
    /// It has ended. Holds its lease, if that can be opened, so that no other process tidies up behind it too.
    Dead(Option<Box<dyn DiskFile>>),
}

/// The leases of other writers, as they were last read.
#[derive(Debug)]
pub(super) struct Watch {
    seen: Mutex<HashMap<PathBuf, Seen>>,
    clock: fn() -> Instant,
}

#[derive(Debug)]
struct Seen {
    /// Empty if there is none, or if its name is no file.
    lease: Vec<u8>,
    has_changed: bool,
    unchanged_for: Duration,
    last: Instant,
}

impl Watch {
    pub(super) fn new(clock: fn() -> Instant) -> Self {
        Self { seen: Mutex::default(), clock }
    }

    /// Judges the writer of a directory. One that shares no locks with this host is dead once its lease has not changed
    /// for `silence`. One whose lease the system cannot read counts as living. `makes_leases`: whether a directory without a lease gets
    /// one, to be locked while another process might tidy up, too; a reader writes nothing.
    pub(super) fn judge(
        &self,
        disk: &RealDisk,
        directory: &Path,
        own_domain: LockDomain,
        (silence, makes_leases): (Duration, bool),
    ) -> Liveness {
        let path = directory.join(names::LEASE);
        let read = || match disk.read_file(&path, LEASE_LEN) {
            Err(error) if error.kind() == io::ErrorKind::NotFound || is_unexpected_kind(&error) => {
                Ok(Vec::new())
            }
            read => read,
        };
        let bytes = match read() {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "a lease cannot be read");
                return Liveness::Living;
            }
        };
        let (has_changed, unchanged_for) = self.note(directory, &bytes);
        let is_silent = unchanged_for >= silence;
        let lease = Lease::parse(&bytes).ok();
        let shares_locks = lease.is_some_and(|lease| lease.lock_domain.is_shared_with(own_domain));
        let unlocked = match open(disk, &path) {
            // A lease that says nothing yet may not be locked yet.
            Ok(_) if lease.is_none() && !is_silent => return Liveness::Unproven,
            Ok(file) => match file.try_lock() {
                Ok(false) => return Liveness::Living,
                Ok(true) if shares_locks => return Liveness::Dead(Some(file)),
                _ => Some(file),
            },
            // It was being made, or removed, when its writer ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound && is_silent && makes_leases => {
                disk.open(&path, FileAccess::CreateNew).ok().filter(|file| file.try_lock().unwrap_or(true))
            }
            Err(_) => None,
        };
        match unlocked {
            unlocked if is_silent && read().is_ok_and(|again| again == bytes) => Liveness::Dead(unlocked),
            _ if has_changed => Liveness::Living,
            _ => Liveness::Unproven,
        }
    }

    /// Forgets writers whose directories are gone.
    pub(super) fn retain(&self, directories: &[PathBuf]) {
        lock(&self.seen).retain(|directory, _| directories.contains(directory));
    }

    /// Whether a lease has changed since it was first read, and for how long it has not.
    fn note(&self, directory: &Path, lease: &[u8]) -> (bool, Duration) {
        let now = (self.clock)();
        let mut watched = lock(&self.seen);
        let seen = watched.entry(directory.to_owned()).or_insert_with(|| Seen {
            lease: lease.to_owned(),
            has_changed: false,
            unchanged_for: Duration::ZERO,
            last: now,
        });
        if seen.lease == lease {
            seen.unchanged_for += now.duration_since(seen.last).min(MOST_BETWEEN_LOOKS);
        } else {
            lease.clone_into(&mut seen.lease);
            (seen.has_changed, seen.unchanged_for) = (true, Duration::ZERO);
        }
        seen.last = now;
        (seen.has_changed, seen.unchanged_for)
    }
}

/// A reader may have no permission to write.
fn open(disk: &RealDisk, path: &Path) -> io::Result<Box<dyn DiskFile>> {
    match disk.open(path, FileAccess::ReadWrite) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            disk.open(path, FileAccess::Read)
        }
        opened => opened,
    }
}
