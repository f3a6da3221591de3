//! The root of a store: its superblock, its writers, and the room that is taken and left.
#![forbid(unsafe_code)]

use super::{
    failed, lock,
    names::{self, WriterFile},
    segment::read_head,
};
use crate::{
    Error, LayoutKind, NamespaceId, Result,
    disk::{Disk, DiskFile, FileAccess, Listing, TEMPORARY},
    format::{PAGE, heat::HeatFile, record::RECORD_LEN, segment::SegmentHead},
    layout::directory::{self, DESCRIPTION, WriterDirectory},
    options::Creation,
};
use std::{
    collections::{HashMap, HashSet},
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, TryLockError},
    thread,
    time::Duration,
};
use uuid::Uuid;

/// Time between two looks for the lock.
const TICK: Duration = Duration::from_millis(1);
/// Longest time to wait for the lock, which is held for moments.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// After a wait that failed, the lock is tried for this long, but not waited for.
const LOCK_PAUSE: Duration = Duration::from_secs(30);
/// Bytes of checkpoints and logs for each block: two checkpoints and one that is being written, and logs that are as long
/// as two checkpoints, and somewhat longer.
const RECORDS_PER_BLOCK: u64 = 6;

/// The limits on the room of a store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) capacity: u64,
    pub(super) min_free: u64,
}

impl Limits {
    /// Bytes of a log below which no checkpoint is worth while.
    pub(super) fn least_log(&self) -> u64 {
        (self.capacity / 4096).clamp(16 << 10, 4 << 20)
    }

    /// Bytes that a writer's directory takes besides its segments, at least.
    pub(super) fn writer_bytes(&self) -> u64 {
        4 * self.least_log() + 8 * PAGE as u64 + HeatFile::len(self.heat_blocks()) as u64
    }

    /// Most blocks that a heat file tells of.
    pub(super) const MOST_HEAT: usize = 8192;

    /// Blocks that the heat file of a writer tells of at a time.
    pub(super) fn heat_blocks(&self) -> usize {
        usize::try_from(self.capacity >> 16).unwrap_or(usize::MAX).clamp(64, Self::MOST_HEAT)
    }

    /// Bytes that come with a segment: those of its file, and those of the log entries of its blocks.
    pub(super) fn segment_bytes(head: &SegmentHead) -> Option<u64> {
        let records = u64::from(head.most_blocks).checked_mul(RECORDS_PER_BLOCK * RECORD_LEN as u64)?;
        head.file_len()?.checked_add(records)
    }
}

/// The root of a store.
pub(super) struct Root {
    pub(super) path: PathBuf,
    disk: Arc<dyn Disk>,
    opened: Mutex<Opened>,
    /// Held by the thread of this process that has the lock.
    locking: Mutex<()>,
    /// Until when the lock is not waited for.
    no_wait_until: Mutex<Duration>,
    clock: Monotonic,
    /// Heads of segments that were read once; they never change.
    heads: Mutex<HashMap<(Uuid, u32), SegmentHead>>,
    /// The bytes of each writer's files when its directory was last listed.
    counted: Mutex<HashMap<Uuid, Files>>,
    /// Bytes of the descriptions of namespaces, which never change, by their directories.
    described: Mutex<HashMap<String, u64>>,
    /// Directories of which it has been said that something is wrong with them.
    warned: Mutex<HashSet<PathBuf>>,
}

/// The directory that the store's path named when it was opened.
#[derive(Clone)]
struct Opened {
    /// `STORE`, whose lock is the store's.
    superblock: Arc<dyn DiskFile>,
    /// The identity of the store.
    store: Uuid,
    /// The file system that it is on.
    file_system: u64,
}

/// The monotonic clock.
pub(super) type Monotonic = Arc<dyn Fn() -> Duration + Send + Sync>;

/// The lock of a store's root. While it lives, no other thread or process allocates room or takes over directories.
pub(super) struct RootLock<'a> {
    file: Arc<dyn DiskFile>,
    _alone: MutexGuard<'a, ()>,
}

/// Bytes that are taken.
#[derive(Clone, Debug, Default)]
pub(super) struct Charges {
    /// For each writer, the bytes that its files take once its logs and checkpoints have their full length.
    pub(super) of_writers: HashMap<Uuid, u64>,
    /// For each writer, the bytes that its files take now.
    pub(super) taken_by: HashMap<Uuid, u64>,
    /// The bytes of the descriptions of namespaces.
    pub(super) namespaces: u64,
    /// The bytes that all files take now.
    pub(super) taken: u64,
    /// All that is reserved.
    pub(super) total: u64,
    /// Whether the last listing reached all directories that may be listed.
    pub(super) is_current: bool,
    /// Whether one of them could never be listed, so that the free room is not known.
    pub(super) is_partial: bool,
}

/// The bytes of a writer's files.
#[derive(Clone, Copy, Debug, Default)]
struct Files {
    /// All of them, now.
    taken: u64,
    segments: u64,
    /// Records of all blocks that the segments may have.
    records: u64,
    /// The bytes of files other than segments.
    others: u64,
}

impl Files {
    fn charge(&self, limits: &Limits) -> u64 {
        let reserved = limits.writer_bytes().saturating_add(self.records);
        self.segments.saturating_add(reserved.max(self.others))
    }
}

impl Root {
    /// Opens a store; makes one where there is none, as far as `creation` allows it.
    pub(super) fn open(
        disk: Arc<dyn Disk>,
        path: &Path,
        creation: Creation,
        clock: Monotonic,
    ) -> Result<Self> {
        let opened = Mutex::new(Opened::open(&*disk, path, creation)?);
        Ok(Self {
            path: path.to_owned(),
            disk,
            opened,
            locking: Mutex::default(),
            no_wait_until: Mutex::default(),
            clock,
            heads: Mutex::default(),
            counted: Mutex::default(),
            described: Mutex::default(),
            warned: Mutex::default(),
        })
    }

    /// Whether the store's path still names the directory that was opened.
    pub(super) fn is_there(&self) -> Result<bool> {
        let path = self.path.join(names::SUPERBLOCK);
        let superblock = lock(&self.opened).superblock.clone();
        superblock.is_named(&path).map_err(failed("asking for", &path))
    }

    /// Opens what the store's path names by now: the same store, which may have been mounted again, or one on the same file
    /// system as before, which is made as far as `creation` allows it.
    pub(super) fn open_again(&self, creation: Creation) -> Result<()> {
        let Opened { store, file_system, .. } = lock(&self.opened).clone();
        directory::expect_place(&*self.disk, &self.path, store, file_system)?;
        let opened = Opened::open(&*self.disk, &self.path, creation)?;
        *lock(&self.opened) = opened;
        lock(&self.heads).clear();
        lock(&self.counted).clear();
        Ok(())
    }

    /// Waits a short time for the lock. After a wait that failed, it does not wait again for a while, or until it was free.
    pub(super) fn lock(&self) -> Result<RootLock<'_>> {
        let begin = (self.clock)();
        let waits = begin >= *lock(&self.no_wait_until);
        loop {
            if let Some(locked) = self.try_lock()? {
                *lock(&self.no_wait_until) = Duration::ZERO;
                return Ok(locked);
            }
            let now = (self.clock)();
            let waited = now.saturating_sub(begin);
            if !waits || waited >= LOCK_TIMEOUT {
                if waits {
                    *lock(&self.no_wait_until) = now + LOCK_PAUSE;
                }
                return Err(Error::TimedOut {
                    what: "waiting for the lock of the store's file STORE",
                    waited_ms: waited.as_millis(),
                });
            }
            thread::sleep(TICK);
        }
    }

    /// Takes the lock if it is free.
    pub(super) fn try_lock(&self) -> Result<Option<RootLock<'_>>> {
        let alone = match self.locking.try_lock() {
            Ok(alone) => alone,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        let file = lock(&self.opened).superblock.clone();
        let is_locked = file.try_lock();
        let is_locked =
            is_locked.map_err(|error| failed("locking", &self.path.join(names::SUPERBLOCK))(error))?;
        Ok(is_locked.then_some(RootLock { file, _alone: alone }))
    }

    /// Directories of all writers, living or dead, in the order of their names.
    pub(super) fn writers(&self) -> Result<Vec<WriterDirectory>> {
        directory::writers(&*self.disk, &self.path)
    }

    /// Removes what a crash left of files that never were whole.
    pub(super) fn sweep(&self, _: &RootLock<'_>) -> Result<()> {
        for file in self.disk.list(&self.path).map_err(failed("listing", &self.path))? {
            if file.name.starts_with(names::SUPERBLOCK) && file.name.ends_with(TEMPORARY) {
                let path = self.path.join(file.name);
                match self.disk.remove(&path) {
                    // It was that of a process that is just opening the store, and is done with it.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    removed => removed.map_err(failed("removing", &path))?,
                }
            }
        }
        Ok(())
    }

    /// The room that is taken, by writer.
    pub(super) fn charges(&self, limits: &Limits) -> Result<Charges> {
        let mut charges = Charges { is_current: true, ..Charges::default() };
        // The superblock, and what namespaces there are.
        charges.namespaces = self.described_bytes();
        charges.taken = 2 * PAGE as u64 + charges.namespaces;
        charges.total = charges.taken;
        let writers = self.writers()?;
        let mut counted = lock(&self.counted);
        counted.retain(|id, _| writers.iter().any(|writer| writer.id == *id));
        for writer in writers {
            match self.disk.list(&writer.path) {
                Ok(listing) => drop(counted.insert(writer.id, self.count(&writer, listing))),
                // It was removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    counted.remove(&writer.id);
                    continue;
                }
                Err(error) => {
                    // Of one that we may not look into, we shall never know; the others go on.
                    if error.kind() != io::ErrorKind::PermissionDenied {
                        charges.is_current = false;
                        charges.is_partial |= !counted.contains_key(&writer.id);
                    }
                    self.warn_once(&writer.path, &failed("listing", &writer.path)(error));
                }
            }
            let Some(files) = counted.get(&writer.id) else { continue };
            let charge = files.charge(limits);
            charges.taken = charges.taken.saturating_add(files.taken);
            charges.taken_by.insert(writer.id, files.taken);
            charges.total = charges.total.saturating_add(charge);
            charges.of_writers.insert(writer.id, charge);
        }
        lock(&self.heads).retain(|(writer, _), _| counted.contains_key(writer));
        Ok(charges)
    }

    /// Bytes of all descriptions of namespaces, with their directories.
    fn described_bytes(&self) -> u64 {
        let all = self.path.join(names::NAMESPACES);
        let Ok(listing) = self.disk.list(&all) else { return 0 };
        let mut described = lock(&self.described);
        described.retain(|name, _| listing.iter().any(|entry| entry.name == *name));
        for entry in &listing {
            if described.contains_key(&entry.name) {
                continue;
            }
            let files = self.disk.list(&all.join(&entry.name)).unwrap_or_default();
            let bytes = files.iter().fold(PAGE as u64, |sum, file| sum.saturating_add(file.allocated));
            // One that is being described is looked at again.
            if files.iter().any(|file| file.name == DESCRIPTION) {
                described.insert(entry.name.clone(), bytes);
            }
        }
        described.values().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Whether a namespace was described when that was last looked at.
    pub(super) fn is_described(&self, id: NamespaceId) -> bool {
        lock(&self.described).contains_key(&id.to_string())
    }

    /// The bytes of the files of a directory.
    fn count(&self, writer: &WriterDirectory, listing: Vec<Listing>) -> Files {
        let mut files = Files { others: PAGE as u64, ..Files::default() };
        let mut heads = lock(&self.heads);
        let mut there = HashSet::new();
        for file in listing {
            let WriterFile::Segment(number) = WriterFile::parse(&file.name) else {
                files.others = files.others.saturating_add(file.allocated);
                continue;
            };
            there.insert(number);
            let head = heads.get(&(writer.id, number)).copied().or_else(|| {
                let head = read_head(&*self.disk, &writer.path.join(&file.name)).ok()?.ok()?;
                heads.insert((writer.id, number), head);
                Some(head)
            });
            let whole = head.and_then(|head| Some((head.file_len()?, Limits::segment_bytes(&head)?)));
            let (len, with_records) = whole.unwrap_or((file.allocated, file.allocated));
            files.segments = files.segments.saturating_add(len.max(file.allocated));
            files.records = files.records.saturating_add(with_records.saturating_sub(len));
            files.taken = files.taken.saturating_add(file.allocated);
        }
        heads.retain(|(whose, number), _| *whose != writer.id || there.contains(number));
        files.taken = files.taken.saturating_add(files.others);
        files
    }

    /// Says once of a writer's directory, or of a file, that something is wrong with it, which is in no other's way.
    pub(super) fn warn_once(&self, path: &Path, error: &dyn fmt::Display) {
        if lock(&self.warned).insert(path.to_owned()) {
            tracing::warn!(path = %path.display(), %error, "something is wrong with it");
        }
    }

    /// Bytes that others can still write on this file system.
    pub(super) fn available(&self) -> Result<u64> {
        let space = self.disk.free_space(&self.path).map_err(failed("asking for the room at", &self.path))?;
        Ok(space.free_bytes)
    }

    /// Takes the lease of a directory if its writer is gone.
    pub(super) fn try_lease(&self, directory: &Path, _: &RootLock<'_>) -> Result<Option<Box<dyn DiskFile>>> {
        let path = directory.join(names::LEASE);
        let file = match self.disk.open(&path, FileAccess::ReadWrite) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.disk.open(&path, FileAccess::CreateNew)
            }
            opened => opened,
        };
        let file = file.map_err(failed("opening", &path))?;
        let is_ours = file.try_lock().map_err(failed("locking", &path))?;
        Ok(is_ours.then_some(file))
    }

    /// Whether a writer has the lease of its directory; `None` if that cannot be found out. Changes no file.
    pub(super) fn is_leased(&self, directory: &Path, _: &RootLock<'_>) -> Option<bool> {
        let file = match self.disk.open(&directory.join(names::LEASE), FileAccess::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Some(false),
            opened => opened.ok()?,
        };
        file.try_lock().ok().map(|is_free| !is_free)
    }
}

impl Drop for RootLock<'_> {
    fn drop(&mut self) {
        // If that fails, the file is closed before long.
        let _ = self.file.unlock();
    }
}

impl Opened {
    /// Opens `STORE`, after it was made where it is not there, as far as `creation` allows it.
    fn open(disk: &dyn Disk, root: &Path, creation: Creation) -> Result<Self> {
        directory::create(disk, root, LayoutKind::Segments, creation)?;
        let store = directory::expect(disk, root, LayoutKind::Segments)?.store;
        let file = root.join(names::SUPERBLOCK);
        let superblock = Arc::from(disk.open(&file, FileAccess::Read).map_err(failed("opening", &file))?);
        let file_system = disk.file_system(root).map_err(failed("asking for the file system of", root))?;
        Ok(Self { superblock, store, file_system })
    }
}
