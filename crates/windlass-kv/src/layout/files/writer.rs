//! A writing process: its directory, with files that are not whole yet, and the lease that says that it lives.
#![forbid(unsafe_code)]

use super::{failed, lock, names};
use crate::{
    Result, WriterStats,
    disk::{Disk, DiskFile, RealDisk, write_full},
    format::{
        lease::{Account, LEASE_LEN, Lease},
        now_seconds,
    },
    io::FileAccess,
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use uuid::Uuid;

/// How a writer's files are named that are not whole.
const TEMPORARY: &str = ".tmp";

/// This process.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) id: Uuid,
    pub(super) directory: PathBuf,
    lease: Mutex<OwnLease>,
    /// Number of the next temporary file.
    next: AtomicU64,
}

/// What tells others that this process lives, and what it has written.
#[derive(Debug)]
pub(super) struct OwnLease {
    path: PathBuf,
    writer: Uuid,
    file: Box<dyn DiskFile>,
    capacity: u64,
    written: Instant,
    said: Account,
}

impl OwnLease {
    pub(super) fn write(&mut self, account: Account) -> Result<()> {
        let lease = Lease {
            writer: self.writer,
            epoch: 1,
            process: std::process::id(),
            heartbeat: now_seconds().into(),
            wanted_bytes: 0,
            capacity: self.capacity,
            account,
        };
        write_full(&*self.file, &lease.to_bytes(), 0).map_err(failed("writing to", &self.path))?;
        (self.written, self.said) = (Instant::now(), account);
        Ok(())
    }

    /// Whether it was written so long ago, or less long, but with something else in it.
    pub(super) fn is_due(&self, account: Account, every: Duration, changed_every: Duration) -> bool {
        let age = self.written.elapsed();
        age >= every || (age >= changed_every && account != self.said)
    }
}

impl Writer {
    pub(super) fn start(disk: &RealDisk, root: &Path, capacity: u64) -> Result<Self> {
        let id = Uuid::new_v4();
        let directory = root.join(format!("{}{id}", names::WRITER_PREFIX));
        disk.create_directory(&directory).map_err(failed("making", &directory))?;
        let path = directory.join(names::LEASE);
        let file = disk.open(&path, FileAccess::CreateNew).map_err(failed("making", &path))?;
        // Where files cannot be locked, others go by the age of the lease.
        if let Err(error) = file.try_lock() {
            tracing::debug!(path = %path.display(), %error, "the lease cannot be locked");
        }
        let said = Account::default();
        let mut lease = OwnLease { path, writer: id, file, capacity, written: Instant::now(), said };
        lease.write(said)?;
        Ok(Self { id, directory, lease: Mutex::new(lease), next: AtomicU64::new(1) })
    }

    pub(super) fn lease(&self) -> MutexGuard<'_, OwnLease> {
        lock(&self.lease)
    }

    /// A name for a file that is not whole yet.
    pub(super) fn temporary(&self) -> PathBuf {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.directory.join(format!("{number}{TEMPORARY}"))
    }

    /// Writes a small file that is there whole, and on the disk, or as it was before.
    pub(super) fn write_file(&self, disk: &RealDisk, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.write_and(disk, path, bytes, RealDisk::rename)
    }

    /// As [`Writer::write_file`], unless something has the name: then it is [`io::ErrorKind::AlreadyExists`].
    pub(super) fn write_new_file(&self, disk: &RealDisk, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.write_and(disk, path, bytes, RealDisk::rename_new)
    }

    fn write_and(
        &self,
        disk: &RealDisk,
        path: &Path,
        bytes: &[u8],
        rename: fn(&RealDisk, &Path, &Path) -> io::Result<()>,
    ) -> io::Result<()> {
        let temporary = self.temporary();
        let written = disk.open(&temporary, FileAccess::CreateNew).and_then(|file| {
            write_full(&*file, bytes, 0)?;
            file.sync_data()?;
            rename(disk, &temporary, path)?;
            disk.sync_directory(path.parent().unwrap_or(Path::new(".")))
        });
        if written.is_err() {
            let _ = disk.remove(&temporary);
        }
        written
    }

    /// Leaves nothing. What is being written is lost.
    pub(super) fn end(&self, disk: &RealDisk) {
        remove_directory(disk, &self.directory);
    }
}

/// All writers that there are.
pub(super) fn all(disk: &RealDisk, root: &Path) -> Result<Vec<WriterStats>> {
    let described = |directory: PathBuf| {
        let id = id_of(directory.file_name()?.to_str()?)?;
        let bytes = disk.read_file(&directory.join(names::LEASE), LEASE_LEN).ok();
        let lease = bytes.and_then(|bytes| Lease::parse(&bytes).ok());
        Some(Lease::describe(lease, id, now_seconds().into()))
    };
    Ok(others(disk, root, None)?.into_iter().filter_map(described).collect())
}

fn id_of(name: &str) -> Option<Uuid> {
    Uuid::parse_str(name.strip_prefix(names::WRITER_PREFIX)?).ok()
}

/// Other writers' directories.
pub(super) fn others(disk: &RealDisk, root: &Path, own: Option<&Writer>) -> Result<Vec<PathBuf>> {
    let listing = disk.list(root).map_err(failed("listing", root))?;
    let is_other = |name: &str| id_of(name).is_some_and(|id| own.is_none_or(|own| own.id != id));
    let writers = listing.into_iter().filter(|entry| entry.is_directory && is_other(&entry.name));
    Ok(writers.map(|entry| root.join(entry.name)).collect())
}

/// Whether a writer is gone: nobody holds its lease, and it has said nothing for so long. As its lock may mean nothing on
/// the file system of another host, one is not enough. Holds the lease while the answer is in use.
pub(super) fn dead(disk: &RealDisk, directory: &Path, silent_for: Duration) -> Option<Box<dyn DiskFile>> {
    let path = directory.join(names::LEASE);
    let lease = match disk.open(&path, FileAccess::ReadWrite) {
        // It was being made, or removed, when its writer ended.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if age(directory)? < silent_for {
                return None;
            }
            disk.open(&path, FileAccess::CreateNew).ok()?
        }
        opened => opened.ok()?,
    };
    if age(&path)? < silent_for || !lease.try_lock().unwrap_or(true) {
        return None;
    }
    // Written by a clock that may be another one than the file system's.
    let bytes = disk.read_file(&path, LEASE_LEN).ok()?;
    let heartbeat = Lease::parse(&bytes).map_or(0, |lease| lease.heartbeat);
    (u64::from(now_seconds()).saturating_sub(heartbeat) >= silent_for.as_secs()).then_some(lease)
}

fn age(path: &Path) -> Option<Duration> {
    Some(path.metadata().ok()?.modified().ok()?.elapsed().unwrap_or_default())
}

/// Removes a writer's directory. What cannot be removed is left to the next who tries.
pub(super) fn remove_directory(disk: &RealDisk, directory: &Path) {
    let result = disk.list(directory).and_then(|listing| {
        let (lease, others): (Vec<_>, Vec<_>) =
            listing.into_iter().partition(|entry| entry.name == names::LEASE);
        for entry in others.into_iter().chain(lease) {
            disk.remove(&directory.join(entry.name))?;
        }
        disk.remove_directory(directory)
    });
    if let Err(error) = result
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %directory.display(), %error, "the directory of a writer that has ended cannot be removed");
    }
}
