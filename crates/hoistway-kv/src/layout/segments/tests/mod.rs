//! Faults of the disk, damage, and what processes do to one another, one at a time, on a simulated disk.

mod capacity;
mod damage;
mod emptied;
mod faults;
mod locks;
mod order;
mod planted;
mod processes;
mod room;
mod version_1;

use super::*;
use crate::{
    DropReason, Durability, EventKind,
    disk::simulated::{Dice, Effect, Fault, Operation, SimulatedDisk},
    format::{Shard, ShardTable, checksum},
};
use rustix::io::Errno;
use std::{
    path::PathBuf,
    sync::atomic::{AtomicU32, AtomicU64},
};

const LEN: usize = 8192;
const NAMESPACE: NamespaceId = NamespaceId([1; 16]);

/// A disk with a store, and a clock.
struct Bench {
    disk: SimulatedDisk,
    options: StoreOptions,
    now: Arc<AtomicU32>,
    /// Milliseconds of the monotonic clock, which goes on by one whenever it is asked.
    elapsed: Arc<AtomicU64>,
    ids: Arc<AtomicU64>,
    /// Most blocks that are looked through while a store waits.
    few_blocks: u64,
}

impl Bench {
    fn new() -> Self {
        let mut options = StoreOptions::new("/store");
        options.capacity_bytes = Some(1 << 20);
        options.min_free_bytes = 0;
        options.durability = Durability::Sync;
        options.segment_bytes = Some(128 << 10);
        Self {
            disk: SimulatedDisk::new(7, 64 << 20),
            options,
            now: Arc::new(AtomicU32::new(1000)),
            elapsed: Arc::new(AtomicU64::new(1)),
            ids: Arc::new(AtomicU64::new(1)),
            few_blocks: FEW_BLOCKS,
        }
    }

    fn try_open(&self) -> Result<Segments> {
        let (now, elapsed, ids) = (Arc::clone(&self.now), Arc::clone(&self.elapsed), Arc::clone(&self.ids));
        let surroundings = Surroundings {
            clock: Box::new(move || now.load(Ordering::Relaxed)),
            monotonic: Arc::new(move || Duration::from_millis(elapsed.fetch_add(1, Ordering::Relaxed))),
            new_id: Box::new(move || Uuid::from_u128(ids.fetch_add(1, Ordering::Relaxed).into())),
            few_blocks: self.few_blocks,
        };
        let store = Segments::open_on(Arc::new(self.disk.clone()), &self.options, surroundings)?;
        store.open_namespace(NAMESPACE, "{}", NamespaceOptions::default())?;
        Ok(store)
    }

    fn open(&self) -> Segments {
        self.try_open().unwrap()
    }

    fn reserve(&self, store: &Segments, key: &str) -> Result<Reservation> {
        self.reserve_len(store, key, LEN)
    }

    fn reserve_len(&self, store: &Segments, key: &str, len: usize) -> Result<Reservation> {
        self.reserve_of_many(store, key, len, 0)
    }

    /// A place for a block, behind which there are to be others of the same length.
    fn reserve_of_many(&self, store: &Segments, key: &str, len: usize, others: usize) -> Result<Reservation> {
        store.reserve(NewBlock {
            namespace: NAMESPACE,
            key: Key::new(key.as_bytes()).unwrap(),
            fingerprint: fingerprint(key),
            shards: 1,
            shard_len: len as u64,
            expires: None,
            following: (others * (len.next_multiple_of(4096) + HEADER_LEN)) as u64,
            is_partial: false,
        })
    }

    fn write(&self, claim: Claim, bytes: &[u8]) -> Written {
        let shard = Shard { len: bytes.len() as u64, checksum: Some(checksum(bytes)) };
        let table = ShardTable(vec![shard]);
        let path = claim.place.file.path();
        let header = claim.header(&table);
        for (offset, bytes) in [(claim.place.payload, bytes), (claim.place.header.unwrap(), &header)] {
            match self.disk.write(path, offset, bytes) {
                // The file that is written to is open, whatever has become of its name.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                written => written.unwrap(),
            }
        }
        Written { claim, table }
    }

    fn put_len(&self, store: &Segments, key: &str, len: usize) -> Result<Put> {
        let claim = match self.reserve_len(store, key, len)? {
            Reservation::Claimed(claim) => claim,
            Reservation::Full => return Ok(Put::Dropped(DropReason::NoRoom)),
            Reservation::Dropped(reason) => return Ok(Put::Dropped(reason)),
            other => panic!("{other:?}"),
        };
        let written = self.write(claim, &content(key, len));
        store.commit(vec![written]).pop().unwrap()?;
        Ok(Put::Done)
    }

    /// Stores a block whose bytes the test does not compare.
    fn put_hollow(&self, store: &Segments, key: &str, len: usize) {
        let Reservation::Claimed(claim) = self.reserve_len(store, key, len).unwrap() else {
            panic!("no room for {key}")
        };
        let table = ShardTable(vec![Shard { len: len as u64, checksum: Some(0) }]);
        let header = claim.header(&table);
        self.disk.write(claim.place.file.path(), claim.place.header.unwrap(), &header).unwrap();
        store.commit(vec![Written { claim, table }]).pop().unwrap().unwrap();
    }

    fn put(&self, store: &Segments, key: &str) -> Result<Put> {
        self.put_len(store, key, LEN)
    }

    fn put_all(&self, store: &Segments, keys: &[&str]) {
        for key in keys {
            assert_eq!(self.put(store, key).unwrap(), Put::Done, "{key}");
        }
    }

    fn find(&self, store: &Segments, key: &str) -> Option<Found> {
        match store.find(NAMESPACE, &Key::new(key.as_bytes()).unwrap(), fingerprint(key)) {
            Lookup::Found(found) => Some(found),
            _ => None,
        }
    }

    fn verdict(&self, store: &Segments, key: &str, found: &Found) -> Verdict {
        let header = self.disk.read(found.place.file.path(), found.place.header.unwrap(), HEADER_LEN);
        store.check(found, &Key::new(key.as_bytes()).unwrap(), &header.unwrap())
    }

    /// Whether a block is found and good. Never are other bytes delivered.
    fn has(&self, store: &Segments, key: &str) -> bool {
        let Some(found) = self.find(store, key) else { return false };
        let Verdict::Good(table) = self.verdict(store, key, &found) else { return false };
        let shard = table.0[0];
        let bytes = self.disk.read(found.place.file.path(), found.place.payload, shard.len as usize);
        let bytes = bytes.unwrap();
        if shard.checksum != Some(checksum(&bytes)) {
            return false;
        }
        assert_eq!(bytes, content(key, bytes.len()));
        true
    }

    fn found(&self, store: &Segments, keys: &[&str]) -> Vec<bool> {
        keys.iter().map(|key| self.has(store, key)).collect()
    }

    /// Fails operations on files whose names contain `name`.
    fn fail(&self, operation: Operation, name: &'static str, times: u32, errno: Errno) {
        let effect = Effect::Fail(errno.raw_os_error());
        self.disk.script(Fault { operation, name, skip: 0, times, effect });
    }

    /// The only file whose name contains this.
    fn file(&self, name: &str) -> PathBuf {
        let mut files = self.files(name);
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }

    fn files(&self, name: &str) -> Vec<PathBuf> {
        let mut paths = self.disk.paths();
        paths.retain(|path| path.to_string_lossy().contains(name));
        paths
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Put {
    Done,
    Dropped(DropReason),
}

fn fingerprint(key: &str) -> Fingerprint {
    Fingerprint::of(NAMESPACE, key.as_bytes())
}

fn content(key: &str, len: usize) -> Vec<u8> {
    let mut dice = Dice(u64::from(checksum(key.as_bytes())));
    (0..len).map(|_| dice.next() as u8).collect()
}

/// What a process knows of the others.
fn others_of(store: &Segments) -> shares::Others {
    let writer = store.writer().unwrap();
    let charges = writer.charges().unwrap();
    writer.others(&charges, &store.shared.root.lock().unwrap()).unwrap()
}

fn errno(error: &Error) -> Option<i32> {
    match error {
        Error::Io { source, .. } => source.raw_os_error(),
        _ => None,
    }
}
