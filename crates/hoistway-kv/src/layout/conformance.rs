//! The suite that every layout passes. A layout runs it by `conformance!(open)`, where `open` opens it with options.
#![forbid(unsafe_code)]

use super::{Claim, Layout, Lookup, NewBlock, Reservation, Verdict, Written};
use crate::{
    Admission, DropReason, Durability, Error, Eviction, Fingerprint, Key, NamespaceDescription, NamespaceId,
    NamespaceOptions, Result, StoreAccess, StoreOptions,
    format::{HEADER_LEN, Shard, ShardTable, checksum},
};
use std::{
    collections::{HashMap, HashSet},
    fs::OpenOptions,
    io::ErrorKind,
    os::unix::fs::FileExt,
    path::Path,
    time::{Duration, Instant, SystemTime},
};

/// Opens a layout.
pub(crate) type Open = fn(&StoreOptions) -> Result<Box<dyn Layout>>;

/// Makes a test of each function here that has one argument, the layout's [`Open`].
macro_rules! conformance {
    ($open:expr) => {
        $crate::layout::conformance::conformance!($open;
            stored_blocks_are_loaded,
            a_block_is_not_there_before_it_is_committed,
            a_place_that_is_given_up_can_be_had_again,
            a_block_that_is_there_is_not_stored_again,
            blocks_are_there_when_a_store_is_opened_again,
            deleted_blocks_are_not_found,
            pinned_blocks_are_not_deleted,
            the_capacity_is_kept,
            what_is_pinned_stays_and_if_everything_is_there_is_no_room,
            a_block_that_is_read_stays_whole,
            blocks_whose_time_is_over_are_not_found,
            a_quota_is_kept,
            namespaces_are_apart,
            all_blocks_are_listed_with_their_keys,
            flipped_bits_are_found_out,
            a_damaged_header_is_no_key,
            a_damaged_block_can_be_stored_again,
            another_key_of_the_same_fingerprint_is_a_miss,
            admission_on_second_touch_refuses_the_first,
            what_is_too_large_is_refused,
            readers_change_nothing,
            what_another_process_writes_is_found,
            what_is_evicted_is_less,
            who_writes_is_known,
            many_threads_see_no_wrong_byte,
        );
    };
    ($open:expr; $($name:ident),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                $crate::layout::conformance::$name($open);
            }
        )+
    };
}
pub(crate) use conformance;

pub(crate) const CAPACITY: u64 = 32 << 20;
const LEN: usize = 256 << 10;
/// Longest time for something that happens soon.
const SOON: Duration = Duration::from_secs(60);

/// A store in a new directory.
pub(crate) struct Bench {
    pub(crate) root: tempfile::TempDir,
    pub(crate) options: StoreOptions,
    /// `None` between closing and opening.
    open_layout: Option<Box<dyn Layout>>,
    pub(crate) namespace: NamespaceId,
    open: Open,
}

impl Bench {
    pub(crate) fn new(open: Open) -> Self {
        Self::with(open, |_| ())
    }

    pub(crate) fn with(open: Open, change: impl FnOnce(&mut StoreOptions)) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut options = StoreOptions::new(root.path().join("store"));
        options.capacity_bytes = Some(CAPACITY);
        options.segment_bytes = Some(4 << 20);
        options.min_free_bytes = 0;
        options.durability = Durability::None;
        change(&mut options);
        let layout = open(&options).unwrap();
        let namespace = open_namespace(&*layout, "model", NamespaceOptions::default());
        Self { root, options, open_layout: Some(layout), namespace, open }
    }

    fn reopen(&mut self) {
        self.layout().close().unwrap();
        // The old one first: it holds the lease of its directory.
        self.open_layout = None;
        self.open_layout = Some((self.open)(&self.options).unwrap());
        open_namespace(self.layout(), "model", NamespaceOptions::default());
    }

    pub(crate) fn layout(&self) -> &dyn Layout {
        &**self.open_layout.as_ref().unwrap()
    }

    pub(crate) fn store(&self, key: &str, shards: &[Vec<u8>]) -> Stored {
        store(self.layout(), &block(self.namespace, key, shards), shards)
    }

    pub(crate) fn load(&self, key: &str) -> Loaded {
        load(self.layout(), self.namespace, key)
    }

    pub(crate) fn contains(&self, key: &str) -> bool {
        contains(self.layout(), self.namespace, key)
    }
}

/// Opens a namespace for a model of this name.
pub(crate) fn open_namespace(layout: &dyn Layout, model: &str, options: NamespaceOptions) -> NamespaceId {
    let description = NamespaceDescription { model: model.into(), ..Default::default() };
    let id = description.id().unwrap();
    layout.open_namespace(id, &description.to_json().unwrap(), options).unwrap();
    id
}

/// Bytes that tell keys, shards and versions apart.
pub(crate) fn bytes(seed: &str, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(seed.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

pub(crate) fn block(namespace: NamespaceId, key: &str, shards: &[Vec<u8>]) -> NewBlock {
    NewBlock {
        namespace,
        key: Key::new(key.as_bytes()).unwrap(),
        fingerprint: Fingerprint::of(namespace, key.as_bytes()),
        shards: shards.len() as u32,
        shard_len: shards.iter().map(Vec::len).max().unwrap() as u64,
        expires: None,
        following: 0,
        is_partial: false,
    }
}

/// How a store ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    Committed,
    Exists,
    InFlight,
    Dropped(DropReason),
}

/// Writes a block as `io` would, and commits it.
pub(crate) fn store(layout: &dyn Layout, block: &NewBlock, shards: &[Vec<u8>]) -> Stored {
    let claim = match layout.reserve(block.clone()).unwrap() {
        Reservation::Claimed(claim) => claim,
        Reservation::Exists => return Stored::Exists,
        Reservation::InFlight => return Stored::InFlight,
        Reservation::Full => return Stored::Dropped(DropReason::NoRoom),
        Reservation::Dropped(reason) => return Stored::Dropped(reason),
    };
    let written = write(claim, shards);
    for result in layout.commit(vec![written]) {
        result.unwrap();
    }
    Stored::Committed
}

pub(crate) fn write(claim: Claim, shards: &[Vec<u8>]) -> Written {
    let file = claim.place.file.open().unwrap();
    let file = file.buffered();
    for (number, shard) in shards.iter().enumerate() {
        assert!(shard.len() as u64 <= claim.place.stride);
        let mut padded = shard.clone();
        padded.resize(shard.len().next_multiple_of(4096), 0);
        file.write_all_at(&padded, claim.place.payload + claim.place.stride * number as u64).unwrap();
    }
    let table = ShardTable(
        shards
            .iter()
            .map(|shard| Shard { len: shard.len() as u64, checksum: Some(checksum(shard)) })
            .collect(),
    );
    let header = claim.header(&table);
    if let Some(offset) = claim.place.header {
        assert_eq!(header.len(), HEADER_LEN);
        file.write_all_at(&header, offset).unwrap();
    }
    Written { claim, table }
}

/// How a load ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Loaded {
    Shards(Vec<Vec<u8>>),
    Miss,
    Expired,
    Corrupt,
}

/// Reads a block as `io` and the store would.
pub(crate) fn load(layout: &dyn Layout, namespace: NamespaceId, key: &str) -> Loaded {
    let key = Key::new(key.as_bytes()).unwrap();
    let fingerprint = Fingerprint::of(namespace, key.as_bytes());
    let found = match layout.find(namespace, &key, fingerprint) {
        Lookup::Found(found) => found,
        Lookup::Miss => return Loaded::Miss,
        Lookup::Expired => return Loaded::Expired,
        Lookup::Failed(error) => panic!("{error}"),
    };
    let file = match found.place.file.open() {
        Ok(file) => file,
        // Where files are opened late, one may be gone.
        Err(error) if error.kind() == ErrorKind::NotFound => return Loaded::Miss,
        Err(error) => panic!("{error}"),
    };
    let read = |offset: u64, len: usize| {
        let mut bytes = vec![0; len];
        file.buffered().read_exact_at(&mut bytes, offset).map(|()| bytes)
    };
    let corrupt = || {
        layout.invalidate(&found);
        Loaded::Corrupt
    };
    let Ok(header) = found.place.header.map_or(Ok(Vec::new()), |offset| read(offset, HEADER_LEN)) else {
        return corrupt();
    };
    let table = match layout.check(&found, &key, &header) {
        Verdict::Good(table) => table,
        Verdict::Moved => return Loaded::Miss,
        Verdict::Corrupt(_) => return corrupt(),
    };
    let mut shards = Vec::new();
    for (number, shard) in table.0.iter().enumerate() {
        let Ok(bytes) = read(found.place.payload + found.place.stride * number as u64, shard.len as usize)
        else {
            return corrupt();
        };
        if shard.checksum.is_some_and(|expected| expected != checksum(&bytes)) {
            return corrupt();
        }
        shards.push(bytes);
    }
    Loaded::Shards(shards)
}

pub(crate) fn contains(layout: &dyn Layout, namespace: NamespaceId, key: &str) -> bool {
    let mut found = [false];
    let fingerprint = Fingerprint::of(namespace, key.as_bytes());
    layout.contains(namespace, &[(key.as_bytes(), fingerprint)], &mut found);
    found[0]
}

/// Does what has to be done now and then until something is so.
pub(crate) fn eventually(layout: &dyn Layout, what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < SOON, "{what} did not happen");
        layout.maintain().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn stored_blocks_are_loaded(open: Open) {
    for durability in Durability::ALL {
        let bench = Bench::with(open, |options| options.durability = *durability);
        let shapes: [&[usize]; 6] = [&[1], &[4096], &[4095, 1, 4096], &[100_001], &[65_536; 16], &[7; 256]];
        for (number, lens) in shapes.iter().enumerate() {
            let key = format!("key {number}");
            let shards: Vec<_> = lens.iter().map(|len| bytes(&format!("{key} {len}"), *len)).collect();
            assert!(!bench.contains(&key));
            assert_eq!(bench.load(&key), Loaded::Miss);
            assert_eq!(bench.store(&key, &shards), Stored::Committed);
            assert!(bench.contains(&key));
            assert_eq!(bench.load(&key), Loaded::Shards(shards));
        }
        let usage = bench.layout().usage();
        assert_eq!(usage.blocks, 6);
        let payload: usize = shapes.iter().flat_map(|lens| lens.iter()).sum();
        assert_eq!(usage.payload_bytes, payload as u64);
        assert!(usage.allocated_bytes >= usage.payload_bytes && usage.root_bytes >= usage.allocated_bytes);
    }
}

pub(crate) fn a_block_is_not_there_before_it_is_committed(open: Open) {
    let bench = Bench::new(open);
    let shards = [bytes("a", LEN)];
    let block = block(bench.namespace, "a", &shards);
    let Reservation::Claimed(claim) = bench.layout().reserve(block.clone()).unwrap() else { panic!() };
    assert!(matches!(bench.layout().reserve(block).unwrap(), Reservation::InFlight));
    assert!(!bench.contains("a"));
    let written = write(claim, &shards);
    assert!(!bench.contains("a"));
    assert_eq!(bench.load("a"), Loaded::Miss);
    bench.layout().commit(vec![written]).pop().unwrap().unwrap();
    assert_eq!(bench.load("a"), Loaded::Shards(shards.into()));
}

pub(crate) fn a_place_that_is_given_up_can_be_had_again(open: Open) {
    let bench = Bench::new(open);
    let shards = [bytes("a", 4 << 20)];
    // Many times more than there is room for.
    for _ in 0..40 {
        let claim = bench.layout().reserve(block(bench.namespace, "a", &shards[..])).unwrap();
        assert!(
            matches!(claim, Reservation::Claimed(_) | Reservation::Dropped(DropReason::TooLarge)),
            "{claim:?}"
        );
    }
    assert_eq!(bench.load("a"), Loaded::Miss);
    let shards = [bytes("a", LEN)];
    assert_eq!(bench.store("a", &shards), Stored::Committed);
    assert_eq!(bench.load("a"), Loaded::Shards(shards.into()));
}

pub(crate) fn a_block_that_is_there_is_not_stored_again(open: Open) {
    let bench = Bench::new(open);
    let first = [bytes("first", LEN)];
    assert_eq!(bench.store("a", &first), Stored::Committed);
    assert_eq!(bench.store("a", &[bytes("second", LEN)]), Stored::Exists);
    assert_eq!(bench.load("a"), Loaded::Shards(first.into()));
}

pub(crate) fn blocks_are_there_when_a_store_is_opened_again(open: Open) {
    for durability in Durability::ALL {
        let mut bench = Bench::with(open, |options| options.durability = *durability);
        let shards = |key: &str| vec![bytes(key, 5000), bytes(key, 3)];
        let keys: Vec<_> = (0..50).map(|number| format!("key {number}")).collect();
        for key in &keys {
            assert_eq!(bench.store(key, &shards(key)), Stored::Committed);
        }
        for _ in 0..2 {
            bench.reopen();
            for key in &keys {
                assert!(bench.contains(key));
                assert_eq!(bench.load(key), Loaded::Shards(shards(key)), "{key}, durability {durability}");
            }
            assert_eq!(bench.layout().usage().blocks, 50);
        }
        assert_eq!(bench.store(&keys[0], &shards("x")), Stored::Exists);
    }
}

pub(crate) fn deleted_blocks_are_not_found(open: Open) {
    let mut bench = Bench::new(open);
    for key in ["a", "b", "c"] {
        assert_eq!(bench.store(key, &[bytes(key, LEN)]), Stored::Committed);
    }
    let names: Vec<_> =
        ["a", "x"].map(|key| (key.as_bytes(), Fingerprint::of(bench.namespace, key.as_bytes()))).into();
    assert_eq!(bench.layout().delete(bench.namespace, &names).unwrap(), 1);
    assert_eq!(bench.layout().delete(bench.namespace, &names).unwrap(), 0);
    let other = open_namespace(bench.layout(), "other", NamespaceOptions::default());
    assert_eq!(store(bench.layout(), &block(other, "a", &[vec![1]]), &[vec![1]]), Stored::Committed);
    assert!(!bench.contains("a") && bench.contains("b"));
    assert_eq!(bench.load("a"), Loaded::Miss);
    assert_eq!(bench.layout().clear(bench.namespace).unwrap(), 2);
    assert!(!bench.contains("b") && !bench.contains("c"));
    assert!(contains(bench.layout(), other, "a"));
    bench.reopen();
    assert!(!bench.contains("a") && !bench.contains("b"));
    assert_eq!(bench.store("b", &[bytes("b", LEN)]), Stored::Committed);
}

pub(crate) fn pinned_blocks_are_not_deleted(open: Open) {
    let bench = Bench::new(open);
    let fingerprint = Fingerprint::of(bench.namespace, b"a");
    assert!(!bench.layout().pin(fingerprint));
    assert_eq!(bench.store("a", &[bytes("a", LEN)]), Stored::Committed);
    assert!(bench.layout().pin(fingerprint) && bench.layout().pin(fingerprint));
    let names = [(b"a".as_slice(), fingerprint)];
    assert_eq!(bench.layout().delete(bench.namespace, &names).unwrap(), 0);
    bench.layout().unpin(fingerprint);
    assert_eq!(bench.layout().clear(bench.namespace).unwrap(), 0);
    assert!(bench.contains("a"));
    bench.layout().unpin(fingerprint);
    assert_eq!(bench.layout().delete(bench.namespace, &names).unwrap(), 1);
}

pub(crate) fn the_capacity_is_kept(open: Open) {
    for eviction in Eviction::ALL {
        let bench = Bench::with(open, |options| options.eviction = *eviction);
        let count = 3 * CAPACITY as usize / LEN;
        for number in 0..count {
            let key = number.to_string();
            assert_eq!(bench.store(&key, &[bytes(&key, LEN)]), Stored::Committed, "{key}");
            assert!(bench.layout().usage().root_bytes <= CAPACITY);
            assert!(on_disk(&bench.options.root) <= CAPACITY, "after {key}");
            if number % 32 == 0 {
                bench.layout().maintain().unwrap();
            }
        }
        let mut there = 0;
        for number in 0..count {
            let key = number.to_string();
            let is_there = bench.contains(&key);
            match bench.load(&key) {
                Loaded::Shards(shards) => assert_eq!(shards, [bytes(&key, LEN)]),
                Loaded::Miss => assert!(!is_there, "{key}"),
                other => panic!("{key}: {other:?}"),
            }
            there += usize::from(is_there);
        }
        assert!(there * LEN > CAPACITY as usize / 2, "{there} of {count} blocks are left");
        assert!(bench.contains(&(count - 1).to_string()));
        assert!(bench.layout().usage().evicted_blocks >= (count - there) as u64);
    }
}

/// Bytes that all files below a directory take.
pub(crate) fn on_disk(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    let sizes = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let metadata = entry.metadata().ok()?;
        Some(if metadata.is_dir() { on_disk(&entry.path()) } else { metadata.blocks() * 512 })
    });
    sizes.sum()
}

pub(crate) fn what_is_pinned_stays_and_if_everything_is_there_is_no_room(open: Open) {
    let bench = Bench::new(open);
    let mut pinned = Vec::new();
    let last = loop {
        let key = format!("pinned {}", pinned.len());
        match bench.store(&key, &[bytes(&key, LEN)]) {
            Stored::Committed => {}
            other => break other,
        }
        assert!(bench.layout().pin(Fingerprint::of(bench.namespace, key.as_bytes())));
        pinned.push(key);
        assert!(pinned.len() <= CAPACITY as usize / LEN);
    };
    assert_eq!(last, Stored::Dropped(DropReason::NoRoom));
    for key in &pinned {
        assert_eq!(bench.load(key), Loaded::Shards(vec![bytes(key, LEN)]));
    }
    for key in &pinned[..4] {
        bench.layout().unpin(Fingerprint::of(bench.namespace, key.as_bytes()));
    }
    assert_eq!(bench.store("new", &[bytes("new", LEN)]), Stored::Committed);
    assert!(pinned[4..].iter().all(|key| bench.contains(key)));
}

pub(crate) fn a_block_that_is_read_stays_whole(open: Open) {
    let bench = Bench::new(open);
    let expected = bytes("read", LEN);
    assert_eq!(bench.store("read", std::slice::from_ref(&expected)), Stored::Committed);
    let key = Key::new(b"read").unwrap();
    let fingerprint = Fingerprint::of(bench.namespace, b"read");
    let Lookup::Found(found) = bench.layout().find(bench.namespace, &key, fingerprint) else { panic!() };
    let file = found.place.file.open().unwrap();
    bench.layout().delete(bench.namespace, &[(b"read", fingerprint)]).unwrap();
    assert!(!bench.contains("read"));
    for number in 0..2 * CAPACITY as usize / LEN {
        let key = number.to_string();
        assert_eq!(bench.store(&key, &[bytes(&key, LEN)]), Stored::Committed);
    }
    bench.layout().maintain().unwrap();
    let mut read = vec![0; LEN];
    file.buffered().read_exact_at(&mut read, found.place.payload).unwrap();
    assert!(read == expected, "another block was written over one that is read");
}

pub(crate) fn blocks_whose_time_is_over_are_not_found(open: Open) {
    let mut bench = Bench::new(open);
    let (now, shards) = (SystemTime::now(), [bytes("a", LEN)]);
    let times = [("past", now - Duration::from_secs(5)), ("future", now + Duration::from_secs(3600))];
    for (key, expires) in times {
        let block = NewBlock { expires: Some(expires), ..block(bench.namespace, key, &shards) };
        assert_eq!(store(bench.layout(), &block, &shards), Stored::Committed);
    }
    for _ in 0..2 {
        assert!(!bench.contains("past") && bench.contains("future"));
        assert_eq!(bench.load("future"), Loaded::Shards(shards.to_vec()));
        assert!(matches!(bench.load("past"), Loaded::Expired | Loaded::Miss));
        bench.reopen();
    }
    assert_eq!(bench.store("past", &shards), Stored::Committed);
    assert_eq!(bench.load("past"), Loaded::Shards(shards.to_vec()));

    // A block that is not asked for is removed too, once it has expired.
    let expires = Some(SystemTime::now() + Duration::from_secs(1));
    let short = NewBlock { expires, ..block(bench.namespace, "short", &shards) };
    assert_eq!(store(bench.layout(), &short, &shards), Stored::Committed);
    let blocks = bench.layout().usage().blocks;
    eventually(bench.layout(), "expiry", || bench.layout().usage().blocks < blocks);
    assert!(bench.contains("past") && !bench.contains("short"));
}

pub(crate) fn a_quota_is_kept(open: Open) {
    let bench = Bench::new(open);
    let quota = 8 * LEN as u64;
    let options = NamespaceOptions { quota_bytes: Some(quota), ttl: None };
    let small = open_namespace(bench.layout(), "small", options);
    for number in 0..10 {
        let key = number.to_string();
        assert_eq!(bench.store(&key, &[bytes(&key, LEN)]), Stored::Committed);
    }
    for number in 0..40 {
        let (key, shards) = (number.to_string(), [bytes("small", LEN)]);
        assert_eq!(store(bench.layout(), &block(small, &key, &shards), &shards), Stored::Committed, "{key}");
    }
    let there = (0..40).filter(|number: &i32| contains(bench.layout(), small, &number.to_string())).count();
    assert!((4..=8).contains(&there), "{there} blocks of 256 KiB where 2 MiB are allowed");
    assert!((0..10).all(|number| bench.contains(&number.to_string())), "others pay for it");

    let tiny =
        open_namespace(bench.layout(), "tiny", NamespaceOptions { quota_bytes: Some(4096), ttl: None });
    let shards = [bytes("tiny", LEN)];
    let refused = store(bench.layout(), &block(tiny, "a", &shards), &shards);
    assert_eq!(refused, Stored::Dropped(DropReason::Quota));
}

pub(crate) fn namespaces_are_apart(open: Open) {
    let mut bench = Bench::new(open);
    let other = open_namespace(bench.layout(), "other", NamespaceOptions::default());
    assert_eq!(bench.store("a", &[bytes("model", LEN)]), Stored::Committed);
    assert!(!contains(bench.layout(), other, "a"));
    assert_eq!(load(bench.layout(), other, "a"), Loaded::Miss);
    let shards = [bytes("other", LEN)];
    assert_eq!(store(bench.layout(), &block(other, "a", &shards), &shards), Stored::Committed);
    bench.reopen();
    open_namespace(bench.layout(), "other", NamespaceOptions::default());
    assert_eq!(bench.load("a"), Loaded::Shards(vec![bytes("model", LEN)]));
    assert_eq!(load(bench.layout(), other, "a"), Loaded::Shards(shards.to_vec()));
    let mut namespaces: HashMap<_, _> = bench.layout().namespaces().unwrap().into_iter().collect();
    assert!(namespaces.remove(&bench.namespace).unwrap().contains("\"model\":\"model\""));
    assert!(namespaces.remove(&other).unwrap().contains("\"model\":\"other\""));
    assert!(namespaces.is_empty());
}

pub(crate) fn all_blocks_are_listed_with_their_keys(open: Open) {
    let mut bench = Bench::new(open);
    let mut expected = HashSet::new();
    for number in 0..100 {
        let key = format!("key {number}");
        assert_eq!(bench.store(&key, &[bytes(&key, 100)]), Stored::Committed);
        expected.insert(key);
    }
    for _ in 0..2 {
        let (mut cursor, mut listed) = (Some(0), Vec::new());
        while let Some(from) = cursor {
            let before = listed.len();
            cursor = bench.layout().list(from, 7, &mut listed);
            assert!(listed.len() - before <= 7);
        }
        let keys: HashSet<_> = listed
            .iter()
            .map(|block| {
                assert_eq!(block.namespace, bench.namespace);
                bench.layout().key_of(block.fingerprint).unwrap().unwrap().to_string()
            })
            .collect();
        assert_eq!((keys, listed.len()), (expected.clone(), 100));
        bench.reopen();
    }
    assert_eq!(bench.layout().key_of(Fingerprint::of(bench.namespace, b"none")).unwrap(), None);
}

/// Flips a bit of a block where it lies.
fn flip(bench: &Bench, key: &str, offset: impl FnOnce(&super::BlockPlace) -> u64) {
    let name = Key::new(key.as_bytes()).unwrap();
    let fingerprint = Fingerprint::of(bench.namespace, key.as_bytes());
    let Lookup::Found(found) = bench.layout().find(bench.namespace, &name, fingerprint) else {
        panic!("{key}")
    };
    let file = OpenOptions::new().read(true).write(true).open(found.place.file.path()).unwrap();
    let (mut byte, offset) = ([0], offset(&found.place));
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 4], offset).unwrap();
}

pub(crate) fn flipped_bits_are_found_out(open: Open) {
    let mut bench = Bench::new(open);
    let shards = [bytes("a", 5000), bytes("b", 5000)];
    let places = 20;
    for number in 0..places {
        assert_eq!(bench.store(&number.to_string(), &shards), Stored::Committed);
    }
    for number in 0..places {
        let within = 211 * number;
        flip(&bench, &number.to_string(), |place| match number % 3 {
            0 => place.header.unwrap_or(place.payload) + within,
            1 => place.payload + within,
            _ => place.payload + place.stride + within,
        });
    }
    bench.reopen();
    for number in 0..places {
        let key = number.to_string();
        assert_eq!(bench.load(&key), Loaded::Corrupt, "{key}");
        assert_eq!(bench.load(&key), Loaded::Miss, "{key}");
        assert!(!bench.contains(&key));
    }
    assert_eq!(bench.layout().usage().corrupt_blocks, places);
}

pub(crate) fn a_damaged_header_is_no_key(open: Open) {
    let mut bench = Bench::new(open);
    for key in ["whole", "flipped"] {
        assert_eq!(bench.store(key, &[bytes(key, LEN)]), Stored::Committed);
    }
    flip(&bench, "flipped", |place| place.header.unwrap_or(place.payload) + 40);
    bench.reopen();
    let fingerprint = |key: &str| Fingerprint::of(bench.namespace, key.as_bytes());
    let damaged = bench.layout().key_of(fingerprint("flipped"));
    assert!(matches!(damaged, Err(Error::DamagedBlock { .. })), "{damaged:?}");
    assert_eq!(bench.layout().key_of(fingerprint("flipped")).unwrap(), None);
    assert!(!bench.contains("flipped"));
    assert_eq!(bench.layout().usage().corrupt_blocks, 1);
    assert_eq!(bench.layout().key_of(fingerprint("whole")).unwrap().unwrap().as_bytes(), b"whole");
}

pub(crate) fn a_damaged_block_can_be_stored_again(open: Open) {
    let mut bench = Bench::new(open);
    assert_eq!(bench.store("a", &[bytes("first", LEN)]), Stored::Committed);
    flip(&bench, "a", |place| place.payload + 77);
    assert_eq!(bench.load("a"), Loaded::Corrupt);
    assert_eq!(bench.store("a", &[bytes("second", LEN)]), Stored::Committed);
    assert_eq!(bench.load("a"), Loaded::Shards(vec![bytes("second", LEN)]));
    bench.reopen();
    assert_eq!(bench.load("a"), Loaded::Shards(vec![bytes("second", LEN)]));
}

pub(crate) fn another_key_of_the_same_fingerprint_is_a_miss(open: Open) {
    let bench = Bench::new(open);
    assert_eq!(bench.store("a", &[bytes("a", LEN)]), Stored::Committed);
    let (key, fingerprint) = (Key::new(b"b").unwrap(), Fingerprint::of(bench.namespace, b"a"));
    let Lookup::Found(found) = bench.layout().find(bench.namespace, &key, fingerprint) else { panic!() };
    let mut header = vec![0; HEADER_LEN];
    let file = found.place.file.open().unwrap();
    file.buffered().read_exact_at(&mut header, found.place.header.unwrap()).unwrap();
    assert_eq!(bench.layout().check(&found, &key, &header), Verdict::Moved);
}

pub(crate) fn admission_on_second_touch_refuses_the_first(open: Open) {
    let bench = Bench::with(open, |options| options.admission = Admission::SecondTouch);
    let shards = [bytes("a", LEN)];
    assert_eq!(bench.store("a", &shards), Stored::Dropped(DropReason::NotAdmitted));
    assert_eq!(bench.store("a", &shards), Stored::Committed);
    assert_eq!(bench.load("a"), Loaded::Shards(shards.into()));
}

pub(crate) fn what_is_too_large_is_refused(open: Open) {
    let bench = Bench::new(open);
    for (shards, shard_len) in [(1, CAPACITY + 1), (256, CAPACITY), (1, u64::MAX), (256, u64::MAX - 4096)] {
        let block = NewBlock { shards, shard_len, ..block(bench.namespace, "a", &[vec![0]]) };
        let reservation = bench.layout().reserve(block);
        let is_refused = matches!(
            reservation,
            Ok(Reservation::Dropped(DropReason::TooLarge)) | Err(Error::InvalidRequest(_))
        );
        assert!(is_refused, "{reservation:?}");
    }
    assert_eq!(bench.store("a", &[bytes("a", LEN)]), Stored::Committed);
}

pub(crate) fn readers_change_nothing(open: Open) {
    let bench = Bench::new(open);
    assert_eq!(bench.store("a", &[bytes("a", LEN)]), Stored::Committed);
    assert_eq!(bench.store("b", &[bytes("b", LEN)]), Stored::Committed);
    flip(&bench, "b", |place| place.payload);
    bench.layout().close().unwrap();
    let mut options = bench.options.clone();
    options.access = StoreAccess::Read;
    options.capacity_bytes = None;
    let before = snapshot(&options.root);
    let reader = open(&options).unwrap();
    open_namespace(&*reader, "model", NamespaceOptions::default());
    open_namespace(&*reader, "a namespace that is not there", NamespaceOptions::default());
    assert_eq!(load(&*reader, bench.namespace, "a"), Loaded::Shards(vec![bytes("a", LEN)]));
    assert_eq!(load(&*reader, bench.namespace, "b"), Loaded::Corrupt);
    assert_eq!(load(&*reader, bench.namespace, "b"), Loaded::Miss);
    reader.maintain().unwrap();
    let shards = [bytes("c", LEN)];
    let refused = reader.reserve(block(bench.namespace, "c", &shards));
    assert!(matches!(refused, Err(Error::ReadOnly { .. })), "{refused:?}");
    assert!(matches!(reader.clear(bench.namespace), Err(Error::ReadOnly { .. })));
    let names = [(b"a".as_slice(), Fingerprint::of(bench.namespace, b"a"))];
    assert!(matches!(reader.delete(bench.namespace, &names), Err(Error::ReadOnly { .. })));
    drop(reader);
    assert_eq!(snapshot(&options.root), before);

    let mut nowhere = options;
    nowhere.root = bench.root.path().join("nowhere");
    assert!(matches!(open(&nowhere).map(drop), Err(Error::NotAStore { .. })));
    assert!(!nowhere.root.exists());
}

/// All files below a directory, with their bytes.
fn snapshot(directory: &Path) -> HashMap<std::path::PathBuf, Vec<u8>> {
    let mut files = HashMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(snapshot(&path));
        } else {
            files.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    files
}

pub(crate) fn what_another_process_writes_is_found(open: Open) {
    let bench = Bench::new(open);
    let second = open(&bench.options).unwrap();
    open_namespace(&*second, "model", NamespaceOptions::default());
    let mut options = bench.options.clone();
    options.access = StoreAccess::Read;
    let reader = open(&options).unwrap();
    open_namespace(&*reader, "model", NamespaceOptions::default());

    assert_eq!(bench.store("a", &[bytes("a", LEN)]), Stored::Committed);
    for other in [&second, &reader] {
        eventually(&**other, "a block of another process", || contains(&**other, bench.namespace, "a"));
        assert_eq!(load(&**other, bench.namespace, "a"), Loaded::Shards(vec![bytes("a", LEN)]));
    }
    let shards = [bytes("b", LEN)];
    assert_eq!(store(&*second, &block(bench.namespace, "b", &shards), &shards), Stored::Committed);
    eventually(bench.layout(), "a block of another process", || bench.contains("b"));
    assert_eq!(bench.load("b"), Loaded::Shards(shards.to_vec()));

    let names = [(b"a".as_slice(), Fingerprint::of(bench.namespace, b"a"))];
    assert_eq!(bench.layout().delete(bench.namespace, &names).unwrap(), 1);
    for other in [&second, &reader] {
        eventually(&**other, "the end of a block of another process", || {
            load(&**other, bench.namespace, "a") == Loaded::Miss
        });
    }
}

pub(crate) fn what_is_evicted_is_less(open: Open) {
    let bench = Bench::new(open);
    for number in 0..32 {
        let key = number.to_string();
        assert_eq!(bench.store(&key, &[bytes(&key, LEN)]), Stored::Committed);
    }
    let freed = bench.layout().evict(10 * LEN as u64).unwrap();
    assert!(freed >= 10 * LEN as u64, "{freed}");
    let there = (0..32).filter(|number: &i32| bench.contains(&number.to_string())).count();
    assert!((1..=22).contains(&there), "{there} of 32 blocks are there after 10 should have gone");
    assert_eq!(bench.layout().observed().take_evicted().blocks.len(), 32 - there);
    bench.layout().evict(u64::MAX).unwrap();
    assert_eq!(bench.layout().usage().blocks, 0);
    assert_eq!(bench.layout().observed().take_evicted().blocks.len(), there);
}

pub(crate) fn who_writes_is_known(open: Open) {
    let bench = Bench::new(open);
    assert_eq!(bench.store("a", &[bytes("a", LEN)]), Stored::Committed);
    bench.layout().maintain().unwrap();
    let writers = bench.layout().writers().unwrap();
    let [writer] = &writers[..] else { panic!("{writers:?}") };
    assert!(writer.is_alive && writer.process == std::process::id(), "{writer:?}");
    assert_eq!(writer.capacity_bytes, Some(CAPACITY));
    // Where blocks belong to no writer, a writer has no number of blocks.
    assert!(writer.blocks.is_none_or(|blocks| blocks == 1), "{writer:?}");
}

pub(crate) fn many_threads_see_no_wrong_byte(open: Open) {
    // Each of the threads may read a block and write another, in segments of one block.
    let capacity = 2 * CAPACITY;
    let bench = Bench::with(open, |options| options.capacity_bytes = Some(capacity));
    let (layout, namespace) = (bench.layout(), bench.namespace);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                let mut random = thread + 1;
                for round in 0..150 {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let key = format!("key {}", (random >> 33) % 40);
                    let lens = [1 << 20, (random >> 40) as usize % 5000 + 1];
                    match load(layout, namespace, &key) {
                        // The writer of the block chose the second length.
                        Loaded::Shards(shards) => {
                            assert_eq!(shards.len(), 2);
                            for (shard, which) in shards.iter().zip(["0", "1"]) {
                                assert!(*shard == bytes(&format!("{key} {which}"), shard.len()), "{key}");
                            }
                        }
                        Loaded::Miss => {
                            let shards =
                                [0, 1].map(|which| bytes(&format!("{key} {which}"), lens[which])).to_vec();
                            let stored = store(layout, &block(namespace, &key, &shards), &shards);
                            // The others may be using whatever could go.
                            let is_refused =
                                matches!(stored, Stored::Dropped(why) if why != DropReason::NoRoom);
                            assert!(!is_refused, "{stored:?}");
                        }
                        other => panic!("{key}: {other:?}"),
                    }
                    let fingerprint = Fingerprint::of(namespace, key.as_bytes());
                    match random >> 60 {
                        0 => {
                            layout.delete(namespace, &[(key.as_bytes(), fingerprint)]).unwrap();
                        }
                        1 if layout.pin(fingerprint) => layout.unpin(fingerprint),
                        2 => layout.touch(&[fingerprint]),
                        _ => {}
                    }
                    if round % 10 == 0 {
                        layout.maintain().unwrap();
                    }
                }
            });
        }
    });
    assert!(bench.layout().usage().root_bytes <= capacity);
    assert_eq!(bench.layout().usage().corrupt_blocks, 0);
}
