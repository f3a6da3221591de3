//! Stores to test, and blocks whose bytes say what they are.

use hoistway_kv::{
    Completion, Durability, Error, FarOptions, FarStats, Item, KeepAlive, Key, LayoutKind, Namespace,
    NamespaceDescription, NamespaceOptions, Piece, Request, Route, Status, Store, StoreOptions, Ticket,
    fault::{Fault, FaultScript, Operation},
};
use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Longer than anything takes that is going to happen at all.
pub(crate) const LONG: Option<Duration> = Some(Duration::from_secs(120));
pub(crate) const CAPACITY: u64 = 256 << 20;

/// A small store with nothing special.
pub(crate) fn options(root: &TempDir) -> StoreOptions {
    let mut options = StoreOptions::new(root.path().join("kv"));
    options.capacity_bytes = Some(CAPACITY);
    options.min_free_bytes = 0;
    options
}

/// Every durability on every route; and a file for each block.
pub(crate) fn each(test: impl Fn(&TempDir, StoreOptions)) {
    let with = |change: &dyn Fn(&mut StoreOptions)| {
        let root = tempfile::tempdir().unwrap();
        let mut options = options(&root);
        change(&mut options);
        test(&root, options);
    };
    for durability in [Durability::None, Durability::Batched, Durability::Sync] {
        for route in [Route::Auto, Route::Threads] {
            with(&|options| (options.durability, options.route) = (durability, route));
        }
    }
    with(&|options| options.layout = Some(LayoutKind::Files));
}

pub(crate) fn model(name: &str) -> NamespaceDescription {
    NamespaceDescription::default().model(name)
}

pub(crate) fn namespace(store: &Store) -> Namespace {
    store.namespace(&model("m"), NamespaceOptions::default()).unwrap()
}

pub(crate) fn key(name: &str) -> Key {
    Key::new(name.as_bytes()).unwrap()
}

/// The bytes of a shard: other ones for each block, shard and length.
pub(crate) fn bytes_of(name: &str, shard: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let seed = format!("{shard} {len} {name}");
    blake3::Hasher::new().update(seed.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Memory for one shard. It begins `skew` bytes after an address that suits direct transfers.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    pub(crate) fn new(len: usize, skew: usize) -> Arc<Self> {
        let mut bytes = vec![0; len + 4096 + skew];
        let start = bytes.as_ptr().align_offset(4096) + skew;
        // The pointer that is handed out later comes from here.
        let _ = bytes.as_mut_ptr().expose_provenance();
        Arc::new(Self { bytes, start, len })
    }

    pub(crate) fn of(bytes: &[u8], skew: usize) -> Arc<Self> {
        let mut memory = Self::new(bytes.len(), skew);
        let inner = Arc::get_mut(&mut memory).unwrap();
        inner.bytes[inner.start..inner.start + bytes.len()].copy_from_slice(bytes);
        memory
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// In `count` pieces, of as different lengths as it goes.
    pub(crate) fn pieces(&self, count: usize) -> Vec<Piece> {
        let mut rest = self.bytes();
        let mut pieces = Vec::new();
        for number in (1..count).rev() {
            let (head, tail) = rest.split_at(((rest.len() / (number + 1)) | 1).min(rest.len() - 1));
            pieces.push(Piece::host(head.as_ptr(), head.len()));
            rest = tail;
        }
        pieces.push(Piece::host(rest.as_ptr(), rest.len()));
        pieces
    }
}

/// How shards of one block are moved.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) shards: u32,
    pub(crate) len: usize,
    pub(crate) skew: usize,
    pub(crate) pieces: usize,
}

impl Shape {
    pub(crate) const fn of(shards: u32, len: usize) -> Self {
        Self { shards, len, skew: 0, pieces: 1 }
    }
}

/// Stores some shards of a block.
pub(crate) fn begin_store(
    namespace: &Namespace,
    name: &str,
    shape: Shape,
    shards: impl IntoIterator<Item = u32>,
) -> Ticket {
    store_shards(namespace, name, shape, shards).unwrap()
}

/// Begins to store a whole block; `None` if the store is closed.
pub(crate) fn try_store(namespace: &Namespace, name: &str, shape: Shape) -> Option<Ticket> {
    match store_shards(namespace, name, shape, 0..shape.shards) {
        Err(Error::Closed { .. }) => None,
        begun => Some(begun.unwrap()),
    }
}

fn store_shards(
    namespace: &Namespace,
    name: &str,
    shape: Shape,
    shards: impl IntoIterator<Item = u32>,
) -> Result<Ticket, Error> {
    let shards: Vec<u32> = shards.into_iter().collect();
    let memory: Vec<_> =
        shards.iter().map(|shard| Memory::of(&bytes_of(name, *shard, shape.len), shape.skew)).collect();
    let items = shards.iter().zip(&memory);
    let items =
        items.map(|(shard, memory)| Item::new(key(name), *shard, memory.pieces(shape.pieces))).collect();
    let mut request = Request::new(items, KeepAlive::new(Arc::new(memory)));
    request.shards = shape.shards;
    // SAFETY: the request keeps the memory, and nothing writes to it.
    unsafe { namespace.store(request) }
}

/// Stores a whole block, and waits until it is there.
pub(crate) fn put(namespace: &Namespace, name: &str, shape: Shape) {
    let completion = end(&begin_store(namespace, name, shape, 0..shape.shards));
    assert!(completion.items.iter().all(|status| *status == Status::Ok), "{name}: {completion:?}");
    assert_eq!(completion.bytes, shape.len as u64 * u64::from(shape.shards));
}

/// Begins to load some shards of a block; the memory is to be looked at once the ticket is released.
pub(crate) fn begin_load(
    namespace: &Namespace,
    name: &str,
    shape: Shape,
    shards: impl IntoIterator<Item = u32>,
    change: impl FnOnce(&mut Request),
) -> (Ticket, Vec<Arc<Memory>>) {
    let shards: Vec<u32> = shards.into_iter().collect();
    let memory: Vec<_> = shards.iter().map(|_| Memory::new(shape.len, shape.skew)).collect();
    let items = shards.iter().zip(&memory);
    let items =
        items.map(|(shard, memory)| Item::new(key(name), *shard, memory.pieces(shape.pieces))).collect();
    let mut request = Request::new(items, KeepAlive::new(Arc::new(memory.clone())));
    change(&mut request);
    // SAFETY: the request keeps the memory, and it is looked at once the ticket is released.
    (unsafe { namespace.load(request) }.unwrap(), memory)
}

/// Begins to load many blocks that are nowhere, of one byte each.
pub(crate) fn load_many(namespace: &Namespace, name: &str, count: usize) -> Ticket {
    let memory = Memory::new(1, 0);
    let item = |number| Item::new(key(&format!("{name} {number}")), 0, memory.pieces(1));
    let items = (0..count).map(item).collect();
    // SAFETY: the request keeps the memory, and nothing looks at it.
    unsafe { namespace.load(Request::new(items, KeepAlive::new(memory.clone()))) }.unwrap()
}

/// Loads a block, and says how each of its shards ended. What was delivered is what was stored.
pub(crate) fn get(namespace: &Namespace, name: &str, shape: Shape) -> Vec<Status> {
    let (ticket, memory) = begin_load(namespace, name, shape, 0..shape.shards, |_| {});
    let completion = end(&ticket);
    for (shard, (status, memory)) in completion.items.iter().zip(&memory).enumerate() {
        if *status == Status::Ok {
            assert!(memory.bytes() == bytes_of(name, shard as u32, shape.len), "shard {shard} of {name}");
        }
    }
    completion.items
}

/// The same, where all shards end alike.
pub(crate) fn get_status(namespace: &Namespace, name: &str, shape: Shape) -> Status {
    let statuses = get(namespace, name, shape);
    assert!(statuses.iter().all(|status| *status == statuses[0]), "{name}: {statuses:?}");
    statuses[0]
}

pub(crate) fn end(ticket: &Ticket) -> Completion {
    let completion = ticket.wait(LONG).unwrap();
    if !completion.items.contains(&Status::TimedOut) {
        assert!(ticket.is_released());
    }
    completion
}

pub(crate) fn eventually(what: &str, mut happens: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !happens() {
        assert!(begin.elapsed() < LONG.unwrap(), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A number that is another one each time, in an order that is the same each time.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

/// What happens to transfers from now on.
#[derive(Clone, Default)]
pub(crate) struct Script(Arc<Mutex<Option<Rule>>>);

type Rule = Box<dyn Fn(&Operation<'_>) -> Option<Fault> + Send>;

impl Script {
    pub(crate) fn set(&self, rule: impl Fn(&Operation<'_>) -> Option<Fault> + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(rule));
    }

    pub(crate) fn clear(&self) {
        *self.0.lock().unwrap() = None;
    }

    /// The faults of a store that follows it.
    pub(crate) fn faults(&self) -> FaultScript {
        let rules = self.clone();
        FaultScript::new(move |operation| rules.0.lock().unwrap().as_ref().and_then(|rule| rule(operation)))
    }
}

/// Directories for stores with a far tier, whose transfers follow a script.
pub(crate) struct Tiers {
    pub(crate) root: TempDir,
    pub(crate) script: Script,
}

impl Tiers {
    pub(crate) fn new() -> Self {
        let tiers = Self { root: tempfile::tempdir().unwrap(), script: Script::default() };
        fs::create_dir(tiers.path("far")).unwrap();
        tiers
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.root.path().join(name)
    }

    pub(crate) fn far(&self, layout: LayoutKind) -> FarOptions {
        far_options(&self.path("far"), layout).faults(self.script.faults())
    }

    /// A store before the far tier.
    pub(crate) fn open(&self, near: &str, far: FarOptions) -> Store {
        Store::open(near_options(&self.path(near), far)).unwrap()
    }

    /// The far store by itself.
    pub(crate) fn open_far(&self) -> Store {
        let options = StoreOptions::new(self.path("far")).capacity_bytes(CAPACITY);
        Store::open(options.min_free_bytes(0)).unwrap()
    }
}

/// It has more time than it ever needs. Tests of a far tier that hangs give it less.
pub(crate) fn far_options(root: &Path, layout: LayoutKind) -> FarOptions {
    let far = FarOptions::new(root).capacity_bytes(CAPACITY).min_free_bytes(0).layout(layout);
    far.timeout(Duration::from_secs(60)).lookup_timeout(Duration::from_secs(20))
}

pub(crate) fn near_options(root: &Path, far: FarOptions) -> StoreOptions {
    StoreOptions::new(root).capacity_bytes(CAPACITY).min_free_bytes(0).far(far)
}

pub(crate) fn far_stats(store: &Store) -> FarStats {
    store.stats().unwrap().far.unwrap()
}

/// A far tier of each layout.
pub(crate) fn each_far_layout(test: impl Fn(&Tiers, FarOptions)) {
    for layout in [LayoutKind::Segments, LayoutKind::Files] {
        let tiers = Tiers::new();
        let far = tiers.far(layout);
        test(&tiers, far);
    }
}
