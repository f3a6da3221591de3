//! A file for each block: slower than segments, but all hosts that share a file system can read, write and remove the
//! same blocks, and vLLM's tier `fs` can be one of the users.
//!
//! A writer writes a block under a temporary name, and gives it its final name when it is complete. No file is ever
//! replaced under a final name. A complete file does not change until it is removed, so a reader that has opened it can
//! read it to the end. The index has the blocks that this process knows of; for others, it asks the file system. Each
//! process may evict any block below the root.
#![forbid(unsafe_code)]

mod checksum;
mod claim;
mod commit;
mod find;
mod heal;
mod liveness;
#[cfg(test)]
mod liveness_tests;
mod names;
mod namespaces;
mod ownership;
#[cfg(test)]
mod ownership_tests;
mod peers;
#[cfg(test)]
mod planted_tests;
mod remove;
mod room;
mod scan;
#[cfg(test)]
mod tests;
mod unsynced;
mod writer;

use super::steady::Steady;
use super::{
    Administration, Found, Layout, Listed, Lookup, NewBlock, Observed, Reservation, Sharing, Usage, Verdict,
    Written,
    directory::{self, failed},
    list_blocks,
};
use crate::{
    Durability, Error, EventKind, Fingerprint, Key, LayoutKind, NamespaceId, NamespaceOptions, Result,
    StoreAccess, StoreOptions, WriterStats,
    disk::RealDisk,
    format::{PAGE, lease::LockDomain, now_seconds},
    index::{Entry, Index, IndexOptions, Recent},
    options::Creation,
};
use find::FileId;
use hoistway_io::parallel::lock;
use liveness::{Liveness, Watch};
use names::Tree;
use namespaces::{Namespace, Namespaces};
use peers::Peers;
use room::Room;
use scan::Scan;
use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, Once,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use unsynced::Unsynced;
use writer::Writer;

/// Intervals, and how long the state of others is trusted.
#[derive(Clone, Copy, Debug)]
struct Timing {
    /// Between two looks at all files.
    rescan: Duration,
    /// Between two signs of life.
    heartbeat: Duration,
    /// Between two looks at other writers.
    follow: Duration,
    /// Silence after which a writer is gone whose locks this host does not see.
    silence: Duration,
    /// How long a miss is trusted.
    absence: Duration,
    /// Measures the silence.
    clock: fn() -> Instant,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            rescan: Duration::from_secs(60),
            heartbeat: Duration::from_secs(20),
            follow: Duration::from_secs(1),
            silence: Duration::from_secs(600),
            absence: Duration::from_millis(200),
            clock: Instant::now,
        }
    }
}

/// Most blocks of which it is remembered that they are not there.
const MOST_ABSENT: usize = 64 << 10;

/// The layout.
#[derive(Debug)]
pub(crate) struct Files {
    shared: Arc<FilesShared>,
}

/// The state that claims, and blocks that are being read, keep alive.
#[derive(Debug)]
struct FilesShared {
    root: PathBuf,
    /// When it was opened.
    started: Instant,
    /// The directory that the root named when it was opened.
    opened: Mutex<heal::Opened>,
    /// The parts that may be made again if they are gone.
    creation: Creation,
    disk: RealDisk,
    /// The durability that its lease tells others.
    written: Option<Durability>,
    durability: Durability,
    timing: Timing,
    index: Index,
    namespaces: Namespaces,
    /// `None` if the store is only read.
    writer: Option<Writer>,
    room: Room,
    /// Blocks that are being written by this process.
    in_flight: Mutex<HashSet<Fingerprint>>,
    /// Blocks that were not there, and when.
    absent: Mutex<Recent<Instant>>,
    /// Files that are damaged, and cannot be removed.
    damaged: Mutex<HashMap<Fingerprint, FileId>>,
    peers: Peers,
    watch: Watch,
    /// The domain in which this process sees locks.
    lock_domain: LockDomain,
    unsynced: Unsynced,
    /// Whether it has been said that checksums of bare files cannot be written down.
    told_of_checksums: Once,
    /// Temporary files of claims that were given up, and the room that they take.
    given_up: Mutex<Vec<(PathBuf, u64)>>,
    /// Directories whose names are on the disk.
    durable: Mutex<HashSet<PathBuf>>,
    scan: Mutex<Scan>,
    /// Held by the thread that looks at files.
    scanning: Mutex<()>,
    followed: Mutex<Option<Instant>>,
    observed: Observed,
    /// The time by which expired blocks are deleted.
    steady: Steady,
    /// Numbers of what this process has learned of, or written.
    next: AtomicU64,
    recovery: Duration,
}

impl Files {
    /// Opens a store, and makes it if it is not there and may be written.
    pub(crate) fn open(options: &StoreOptions) -> Result<Self> {
        Self::open_timed(options, Timing::default())
    }

    fn open_timed(options: &StoreOptions, timing: Timing) -> Result<Self> {
        let started = Instant::now();
        let (disk, root) = (RealDisk, options.root.clone());
        let writer = match options.access {
            StoreAccess::Read => {
                directory::expect(&disk, &root, LayoutKind::Files)?;
                None
            }
            StoreAccess::ReadWrite => Some(open_to_write(&disk, options)?),
        };
        let written = writer.as_ref().filter(|_| !options.for_upkeep).map(|_| options.durability);
        let unsynced = Unsynced::open(&disk, &root, written)?;
        let room = Room::new(options, writer.is_some())?;
        let index = Index::new(IndexOptions { eviction: options.eviction, admission: options.admission });
        let lock_domain = writer::lock_domain(&root);
        let opened = heal::Opened::at(&disk, &root)?;
        let mut shared = FilesShared {
            root,
            started: (timing.clock)(),
            opened: Mutex::new(opened),
            creation: options.creation,
            disk,
            written,
            durability: options.durability,
            timing,
            index,
            namespaces: Namespaces::default(),
            writer,
            room,
            in_flight: Mutex::default(),
            absent: Mutex::default(),
            damaged: Mutex::default(),
            peers: Peers::default(),
            watch: Watch::new(timing.clock),
            lock_domain,
            unsynced,
            told_of_checksums: Once::new(),
            given_up: Mutex::default(),
            durable: Mutex::default(),
            scan: Mutex::default(),
            scanning: Mutex::default(),
            followed: Mutex::default(),
            observed: Observed::default(),
            steady: Steady::default(),
            next: AtomicU64::new(1),
            recovery: Duration::ZERO,
        };
        shared.steady_now();
        shared.read_namespaces()?;
        shared.scan_all()?;
        shared.follow()?;
        shared.recovery = started.elapsed();
        Ok(Self { shared: Arc::new(shared) })
    }
}

impl Layout for Files {
    /// Asks the file system for blocks that are not known, as others write them too.
    fn contains(&self, namespace: NamespaceId, blocks: &[(&[u8], Fingerprint)], found: &mut [bool]) {
        let now = now_seconds();
        self.shared.index.contains_many(blocks, |(_, fingerprint)| fingerprint, now, found);
        let Some(namespace) = self.shared.namespaces.get(namespace) else { return };
        for ((key, fingerprint), found) in blocks.iter().zip(found) {
            if !*found {
                *found = self.shared.asks(&namespace, *fingerprint, key);
            }
        }
    }

    fn reserve(&self, block: NewBlock) -> Result<Reservation> {
        self.shared.reserve(block)
    }

    fn commit(&self, blocks: Vec<Written>) -> Vec<Result<()>> {
        self.shared.commit(blocks)
    }

    fn find(&self, namespace: NamespaceId, key: &Key, fingerprint: Fingerprint) -> Lookup {
        self.shared.find(namespace, key, fingerprint)
    }

    fn check(&self, found: &Found, key: &Key, header: &[u8]) -> Verdict {
        self.shared.check(found, key, header)
    }

    fn invalidate(&self, found: &Found) {
        self.shared.invalidate(found);
    }

    fn touch(&self, blocks: &[Fingerprint]) {
        // All that there are may be evicted by each process: none has to tell another.
        drop(self.shared.index.touch(blocks));
    }

    fn pin(&self, block: Fingerprint) -> bool {
        self.shared.index.pin(&block)
    }

    fn unpin(&self, block: Fingerprint) {
        self.shared.index.unpin(&block);
    }
}

impl Administration for Files {
    fn open_namespace(&self, id: NamespaceId, description: &str, options: NamespaceOptions) -> Result<()> {
        let shared = &self.shared;
        let is_new = shared.namespaces.get(id).is_none();
        shared.own_tree(id, description)?;
        if let Some(writer) = &shared.writer {
            directory::describe(&shared.disk, &shared.root, id, description, |path, bytes| {
                writer.write_file(&shared.disk, path, bytes).map_err(failed("writing to", path))
            })?;
        }
        let namespace = shared.namespaces.add(&shared.root, id, description)?;
        namespace.set_ttl(options.ttl);
        shared.index.set_quota(namespace.number, options.quota_bytes);
        if is_new || options.ttl.is_some() { shared.scan_namespace(&namespace) } else { Ok(()) }
    }

    fn namespaces(&self) -> Result<Vec<(NamespaceId, String)>> {
        self.shared.read_namespaces()?;
        Ok(self.shared.namespaces.described())
    }

    fn delete(&self, namespace: NamespaceId, blocks: &[(&[u8], Fingerprint)]) -> Result<usize> {
        self.shared.delete(namespace, blocks)
    }

    fn clear(&self, namespace: NamespaceId) -> Result<usize> {
        self.shared.clear(namespace)
    }

    fn evict(&self, bytes: u64) -> Result<u64> {
        self.shared.writer()?;
        Ok(self.shared.make_room(bytes))
    }

    fn list(&self, cursor: u64, most: usize, into: &mut Vec<Listed>) -> Option<u64> {
        let namespace = |number| self.shared.namespaces.numbered(number).map(|namespace| namespace.id);
        list_blocks(&self.shared.index, cursor, most, into, namespace)
    }

    fn key_of(&self, block: Fingerprint) -> Result<Option<Key>> {
        self.shared.key_of(block)
    }

    fn maintain(&self) -> Result<()> {
        self.shared.maintain()
    }

    fn usage(&self) -> Usage {
        let totals = self.shared.index.totals(None);
        let allocated_bytes = totals.own_slot_bytes + self.shared.room.besides();
        Usage {
            blocks: totals.own_blocks,
            payload_bytes: totals.own_payload_bytes,
            allocated_bytes,
            root_bytes: allocated_bytes.saturating_add_signed(self.shared.peers.likely_bytes()),
            unusable_namespaces: self.shared.namespaces.unusable(),
            recovery: self.shared.recovery,
            index_bytes: self.shared.index.heap_bytes(),
            ..self.shared.observed.usage()
        }
    }

    fn observed(&self) -> &Observed {
        &self.shared.observed
    }

    fn close(&self) -> Result<()> {
        self.shared.end();
        Ok(())
    }
}

impl Sharing for Files {
    fn find_waits(&self) -> bool {
        true
    }

    fn writers(&self) -> Result<Vec<WriterStats>> {
        writer::all(&self.shared.disk, &self.shared.root, |directory| match self.shared.judge(directory) {
            Liveness::Living => Some(true),
            Liveness::Unproven => None,
            Liveness::Dead(_) => Some(false),
        })
    }
}

impl FilesShared {
    /// This process's directory, if it may write.
    fn writer(&self) -> Result<&Writer> {
        self.writer.as_ref().ok_or_else(|| Error::ReadOnly { path: self.root.clone() })
    }

    /// Takes in the namespaces that are written down, and forgets the blocks of those that cannot be used any more.
    fn read_namespaces(&self) -> Result<()> {
        for lost in self.namespaces.read(&self.disk, &self.root, &self.observed)? {
            self.index.remove_all(|_, entry, _| entry.namespace == lost.number);
        }
        Ok(())
    }

    /// Makes sure that no other namespace has the directory that a description names.
    fn own_tree(&self, id: NamespaceId, description: &str) -> Result<()> {
        let tree = Tree::of(&self.root, directory::of_namespace(&self.root, id), description)?;
        if !tree.is_bare() {
            return Ok(());
        }
        if let Some(writer) = &self.writer {
            return ownership::claim(&self.disk, writer, &self.root, &tree, id, description);
        }
        let described = directory::described(&self.disk, &self.root)?;
        ownership::expect(&self.disk, &self.root, &tree, id, &described)
    }

    /// The time by which expired blocks are deleted.
    fn steady_now(&self) -> u32 {
        self.steady.now(now_seconds(), (self.timing.clock)().saturating_duration_since(self.started))
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The known state of a file.
    fn entry_of(&self, namespace: &Namespace, file_len: u64, expires: u32) -> Entry {
        let payload_len =
            if namespace.tree.is_bare() { file_len } else { file_len.saturating_sub(PAGE as u64) };
        Entry {
            owner: 0,
            namespace: namespace.number,
            class: 0,
            flags: lock(&self.scan).generation(),
            slot: find::UNKNOWN_SHARDS,
            slot_bytes: file_len.saturating_add(PAGE as u64 - 1) & !(PAGE as u64 - 1),
            payload_len,
            sequence: self.number(),
            expires,
        }
    }

    fn maintain(&self) -> Result<()> {
        self.heal()?;
        if self.writer.is_some() {
            self.restart_writer()?;
            self.sweep();
            self.tell_now_and_then(self.timing.heartbeat, self.timing.follow)?;
            self.expire();
            self.make_room_ahead()?;
        }
        self.scan_some();
        self.unsynced.look();
        self.follow()
    }

    /// Releases what tells others that this process writes. Does nothing the second time.
    fn end(&self) {
        self.sweep();
        if let Some(writer) = &self.writer {
            writer.end(&self.disk);
        }
    }

    /// Goes on in another directory if a process that took this one for dead has removed its directory.
    fn restart_writer(&self) -> Result<()> {
        let writer = self.writer()?;
        if writer.restart(&self.disk, &self.root)? {
            let reason = format!(
                "another process took this one for dead and removed its directory; it goes on in {}",
                writer.directory().display()
            );
            self.observed.note(EventKind::WriterRestarted, reason);
        }
        Ok(())
    }

    fn judge(&self, directory: &Path) -> Liveness {
        let makes_leases = self.writer.is_some();
        self.watch.judge(&self.disk, directory, self.lock_domain, (self.timing.silence, makes_leases))
    }

    /// Reads what other writers have said, and tidies up behind those that are gone.
    fn follow(&self) -> Result<()> {
        let mut followed = lock(&self.followed);
        if followed.is_some_and(|last| last.elapsed() < self.timing.follow) {
            return Ok(());
        }
        *followed = Some(Instant::now());
        let others = writer::peers(&self.disk, &self.root, self.writer.as_ref())?;
        self.watch.retain(&others);
        self.listen()?;
        let judged: Vec<_> =
            others.into_iter().map(|directory| (self.judge(&directory), directory)).collect();
        for (liveness, directory) in &judged {
            let temporary = match liveness {
                Liveness::Living => None,
                Liveness::Unproven | Liveness::Dead(_) => {
                    Some(writer::temporary_bytes(&self.disk, directory))
                }
            };
            if self.peers.judged(directory, temporary) {
                lock(&self.scan).repeat();
            }
        }
        for (liveness, directory) in judged {
            if let (Liveness::Dead(lease), Some(_)) = (liveness, &self.writer) {
                if let Some(lease) = &lease {
                    writer::take_back(&**lease);
                }
                writer::remove_directory(&self.disk, &directory);
            }
        }
        Ok(())
    }
}

impl Drop for FilesShared {
    fn drop(&mut self) {
        self.end();
    }
}

/// Makes the store if it is not there.
fn open_to_write(disk: &RealDisk, options: &StoreOptions) -> Result<Writer> {
    directory::create(disk, &options.root, LayoutKind::Files, options.creation)?;
    directory::expect(disk, &options.root, LayoutKind::Files)?;
    Writer::start(disk, options)
}
