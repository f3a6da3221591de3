//! A writing process: its directory, with files that are not whole yet, and the lease that says that it lives.
#![forbid(unsafe_code)]

use super::{failed, lock, names};
use crate::{
    Result, StoreOptions, WriterStats,
    disk::{Disk, DiskFile, FileAccess, RealDisk, TEMPORARY, metadata, read_full, write_full, write_whole},
    format::{
        lease::{Account, LEASE_LEN, Lease, LockDomain},
        now_seconds,
    },
    layout::directory::{self, WriterDirectory},
};
use std::{
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use uuid::Uuid;

/// This process.
#[derive(Debug)]
pub(super) struct Writer {
    /// The directory that it has now: another process may take it for dead and remove it.
    current: RwLock<WriterDirectory>,
    lease: Mutex<OwnLease>,
    /// Number of the next temporary file.
    next: AtomicU64,
    has_ended: AtomicBool,
}

/// The lease: it tells others that this process lives, and what it has written.
#[derive(Debug)]
pub(super) struct OwnLease {
    path: PathBuf,
    file: Box<dyn DiskFile>,
    written: Instant,
    /// As it was last written.
    said: Lease,
}

impl OwnLease {
    pub(super) fn write(&mut self, account: Account) -> Result<()> {
        let lease = Lease { heartbeat: now_seconds().into(), account, ..self.said };
        write_full(&*self.file, &lease.to_bytes(), 0).map_err(failed("writing to", &self.path))?;
        (self.written, self.said) = (Instant::now(), lease);
        Ok(())
    }

    /// Whether it was written so long ago, or less long, but with something else in it.
    pub(super) fn is_due(&self, account: Account, every: Duration, changed_every: Duration) -> bool {
        let age = self.written.elapsed();
        age >= every || (age >= changed_every && account != self.said.account)
    }
}

impl Writer {
    pub(super) fn start(disk: &RealDisk, options: &StoreOptions) -> Result<Self> {
        // A store for upkeep announces no capacity and no durability.
        let (capacity, durability) = match options.for_upkeep {
            true => (0, None),
            false => (options.capacity_bytes.unwrap_or(0), Some(options.durability)),
        };
        let said = Lease {
            writer: Uuid::nil(),
            epoch: 1,
            process: std::process::id(),
            heartbeat: 0,
            wanted_bytes: 0,
            capacity,
            durability,
            account: Account::default(),
            lock_domain: LockDomain::default(),
        };
        let (current, lease) = make(disk, &options.root, said)?;
        Ok(Self {
            current: RwLock::new(current),
            lease: Mutex::new(lease),
            next: AtomicU64::new(1),
            has_ended: AtomicBool::new(false),
        })
    }

    /// Makes another directory if this one was removed. Says whether it did.
    pub(super) fn restart(&self, disk: &RealDisk, root: &Path) -> Result<bool> {
        let mut lease = self.lease();
        let is_gone = metadata(&lease.path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if !is_gone || self.has_ended.load(Ordering::Acquire) {
            return Ok(false);
        }
        let (current, made) = make(disk, root, lease.said)?;
        *lease = made;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = current;
        Ok(true)
    }

    pub(super) fn id(&self) -> Uuid {
        self.current().id
    }

    pub(super) fn directory(&self) -> PathBuf {
        self.current().path.clone()
    }

    fn current(&self) -> RwLockReadGuard<'_, WriterDirectory> {
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lease(&self) -> MutexGuard<'_, OwnLease> {
        lock(&self.lease)
    }

    /// A name for a file that is not whole yet.
    pub(super) fn temporary(&self) -> PathBuf {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.current().path.join(format!("{number}{TEMPORARY}"))
    }

    /// Writes a small file that is there whole, and on the disk, or as it was before.
    pub(super) fn write_file(&self, disk: &RealDisk, path: &Path, bytes: &[u8]) -> io::Result<()> {
        write_whole(disk, &self.temporary(), path, bytes, |from, to| disk.rename(from, to))
    }

    /// As [`Writer::write_file`], unless something has the name: then it is [`io::ErrorKind::AlreadyExists`].
    pub(super) fn write_new_file(&self, disk: &RealDisk, path: &Path, bytes: &[u8]) -> io::Result<()> {
        write_whole(disk, &self.temporary(), path, bytes, |from, to| disk.rename_new(from, to))
    }

    /// Removes the directory, and releases the lease. Does nothing the second time.
    pub(super) fn end(&self, disk: &RealDisk) {
        if self.has_ended.swap(true, Ordering::AcqRel) {
            return;
        }
        let lease = self.lease();
        remove_directory(disk, &self.directory());
        if let Err(error) = lease.file.unlock() {
            tracing::debug!(path = %lease.path.display(), %error, "the lease cannot be unlocked");
        }
    }
}

/// Makes the directory of a writer, and its lease.
fn make(disk: &RealDisk, root: &Path, said: Lease) -> Result<(WriterDirectory, OwnLease)> {
    let current = WriterDirectory::new(root, Uuid::new_v4());
    disk.create_directory(&current.path).map_err(failed("making", &current.path))?;
    let lease = make_lease(disk, root, &current, said);
    // A restart is tried again several times a second.
    let lease = lease.inspect_err(|_| remove_directory(disk, &current.path))?;
    Ok((current, lease))
}

fn make_lease(disk: &RealDisk, root: &Path, directory: &WriterDirectory, said: Lease) -> Result<OwnLease> {
    let path = directory.path.join(names::LEASE);
    let file = disk.open(&path, FileAccess::CreateNew).map_err(failed("making", &path))?;
    // Others rely on the lock only if the lease says that there is one.
    let lock_domain = match file.try_lock() {
        Ok(true) => lock_domain(root),
        Ok(false) => LockDomain::default(),
        Err(error) => {
            tracing::debug!(path = %path.display(), %error, "the lease cannot be locked");
            LockDomain::default()
        }
    };
    let said = Lease { writer: directory.id, lock_domain, ..said };
    let mut lease = OwnLease { path, file, written: Instant::now(), said };
    lease.write(said.account)?;
    Ok(lease)
}

/// The domain of locks below a root.
pub(super) fn lock_domain(root: &Path) -> LockDomain {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let (Ok(boot), Ok(metadata)) = (boot, root.metadata()) else { return LockDomain::default() };
    let mut hasher = blake3::Hasher::new();
    hasher.update(boot.trim().as_bytes()).update(&metadata.dev().to_le_bytes());
    let mut domain = [0; 16];
    hasher.finalize_xof().fill(&mut domain);
    LockDomain(domain)
}

/// Bytes of a writer's files that are not whole yet.
pub(super) fn temporary_bytes(disk: &RealDisk, directory: &Path) -> u64 {
    let listing = disk.list(directory).unwrap_or_default().into_iter();
    let temporary = listing.filter(|entry| entry.name.ends_with(TEMPORARY));
    temporary.fold(0, |sum: u64, entry| sum.saturating_add(entry.allocated))
}

/// All writers that there are. `is_alive`: whether one lives, where that is proven.
pub(super) fn all(
    disk: &RealDisk,
    root: &Path,
    is_alive: impl Fn(&Path) -> Option<bool>,
) -> Result<Vec<WriterStats>> {
    let described = |directory: &WriterDirectory| {
        let stats = directory.describe(disk, now_seconds());
        WriterStats { is_alive: is_alive(&directory.path).unwrap_or(stats.is_alive), ..stats }
    };
    Ok(directory::writers(disk, root)?.iter().map(described).collect())
}

/// Other writers' directories.
pub(super) fn peers(disk: &RealDisk, root: &Path, own_writer: Option<&Writer>) -> Result<Vec<PathBuf>> {
    let writers = directory::writers(disk, root)?.into_iter();
    let others = writers.filter(|writer| own_writer.is_none_or(|own_writer| own_writer.id() != writer.id));
    Ok(others.map(|writer| writer.path).collect())
}

/// Takes back what a writer that has ended announced: others see its lease locked until it is removed.
pub(super) fn take_back(lease: &dyn DiskFile) {
    let mut bytes = vec![0; LEASE_LEN];
    let said = read_full(lease, &mut bytes, 0).ok().and_then(|len| Lease::parse(&bytes[..len]).ok());
    if let Some(lease_said) = said {
        let account = Account { taken: lease_said.account.settled, ..lease_said.account };
        let _ = write_full(lease, &Lease { account, ..lease_said }.to_bytes(), 0);
    }
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
