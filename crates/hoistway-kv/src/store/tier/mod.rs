//! The far tier: a second store behind this one, with threads of its own.
//!
//! Nothing of the near tier waits for it: lookups have a bound, and loads and stores hand over what is the far tier's.

mod behind;
mod link;
mod load;
mod moves;

pub(crate) use behind::Behind;

use self::{link::Link, load::Loads, moves::Moves};
use super::{Core, Namespace};
use crate::{
    DirectPath, EventKind, FarOptions, FarReport, FarStats, Key, NamespaceId, Result, Stats, StoreAccess,
    StoreOptions,
};
use crossbeam_channel::{Receiver, Sender};
use hoistway_io::parallel::{lock, thread_named};
use std::{
    collections::BTreeMap,
    mem,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Threads that load from the far tier: each carries out one request at a time.
const LOADERS: usize = 8;
/// Threads that move blocks between the tiers.
const MOVERS: usize = 2;
/// Threads that look up blocks where the far tier has to ask its file system.
const LOOKERS: usize = 2;
/// Questions for the far store's statistics that may wait at once.
const MOST_STATISTICS_ASKED: usize = 4;
/// Bytes that a transfer may move in the time of one operation.
const BYTES_IN_TIME: u64 = 64 << 20;
/// Time between looks at deadlines.
const TICK: Duration = Duration::from_millis(20);
/// Time between looks at namespaces that are not open any more.
const NAMESPACE_ROUND: Duration = Duration::from_millis(500);

/// The far tier of a store.
pub(crate) struct Tier {
    core: Arc<Core>,
    options: FarOptions,
    link: Link,
    namespaces: Mutex<BTreeMap<NamespaceId, Arc<Behind>>>,
    loads: Loads,
    moves: Moves,
    lookups: Sender<LookUp>,
    to_look_up: Receiver<LookUp>,
    /// Lookups whose callers have stopped waiting, and that have not ended.
    late_lookups: AtomicUsize,
    /// Questions for the far store's statistics that have no answer yet.
    statistics_asked: Arc<AtomicUsize>,
    is_closing: AtomicBool,
    counters: Counters,
}

/// A block of the near tier that is to be written to the far one.
pub(crate) struct Stored {
    pub(crate) key: Key,
    /// Bytes of its shards.
    pub(crate) bytes: u64,
    /// What they take of the staging memory.
    pub(crate) staged_bytes: u64,
    /// Bytes that it takes in the near tier.
    pub(crate) pinned_bytes: u64,
}

impl Stored {
    /// A block of so many shards, of which none is longer than this.
    pub(crate) fn new(key: Key, shards: u32, longest: u64, pinned_bytes: u64) -> Self {
        let all = |bytes: u64| u64::from(shards).saturating_mul(bytes);
        Self { key, bytes: all(longest), staged_bytes: all(moves::staged_bytes(longest)), pinned_bytes }
    }
}

type LookUp = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    loaded_bytes: AtomicU64,
    written_blocks: AtomicU64,
    written_bytes: AtomicU64,
    unwritten_blocks: AtomicU64,
    promoted_blocks: AtomicU64,
    unpromoted_blocks: AtomicU64,
    failures: AtomicU64,
    lookup_timeouts: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Tier {
    /// Opens the far store, and goes on without it if that fails or takes too long.
    ///
    /// # Errors
    /// Those of options that no later attempt can make right.
    pub(crate) fn start(core: &Arc<Core>, options: &FarOptions) -> Result<Arc<Self>> {
        let near = &core.options;
        let new = StoreOptions::new(&options.root);
        let store = StoreOptions {
            capacity_bytes: options.capacity_bytes,
            min_free_bytes: options.min_free_bytes,
            access: near.access,
            layout: options.layout,
            durability: options.durability,
            eviction: near.eviction,
            route: near.route,
            // Regions of the caller's memory are known to the near store alone.
            direct: DirectPath::Off,
            verify: near.verify,
            for_upkeep: near.for_upkeep,
            // What is in the staging memory may be stored.
            max_in_flight_bytes: new.max_in_flight_bytes.max(options.staging_bytes),
            #[cfg(feature = "fault-injection")]
            faults: options.faults.clone(),
            ..new
        };
        let (lookups, to_look_up) = crossbeam_channel::bounded(LOOKERS);
        let tier = Arc::new(Self {
            core: core.clone(),
            options: options.clone(),
            link: Link::new(store),
            namespaces: Mutex::default(),
            loads: Loads::default(),
            moves: Moves::new(options, near.capacity_bytes),
            lookups,
            to_look_up,
            late_lookups: AtomicUsize::new(0),
            statistics_asked: Arc::default(),
            is_closing: AtomicBool::new(false),
            counters: Counters::default(),
        });
        let started = tier.start_threads().and_then(|()| tier.wait_for_link());
        match started {
            Ok(()) => Ok(tier),
            Err(error) => {
                tier.end(Duration::ZERO);
                Err(error)
            }
        }
    }

    fn start_threads(self: &Arc<Self>) -> Result<()> {
        let start = |name: &str, count: usize, run: fn(&Arc<Self>)| {
            (0..count).try_for_each(|_| {
                let tier = self.clone();
                let spawned = thread_named(name).spawn(move || run(&tier));
                spawned.map(drop).map_err(|source| crate::Error::Io {
                    operation: "starting the thread",
                    path: name.into(),
                    source,
                })
            })
        };
        start("hoistway-far-link", 1, Self::keep_link)?;
        start("hoistway-far-clock", 1, Self::watch)?;
        start("hoistway-far-load", LOADERS, Self::run_loads)?;
        start("hoistway-far-move", MOVERS, Self::run_moves)?;
        start("hoistway-far-find", LOOKERS, Self::run_lookups)
    }

    /// The namespace in the far tier. Waits until it is open there, at most the time of one operation.
    pub(crate) fn namespace(self: &Arc<Self>, near: &Namespace, description: &str) -> Arc<Behind> {
        let new = || Arc::new(Behind::new(self, near.near(), description));
        let behind = lock(&self.namespaces).entry(near.id()).or_insert_with(new).clone();
        self.open_behind(&behind);
        behind
    }

    /// Lets go of namespaces of which there are no handles any more and no blocks to be moved, so that both stores may close
    /// them.
    pub(crate) fn close_namespaces(&self) {
        let mut namespaces = lock(&self.namespaces);
        // A handle is made with the lock held, or from another one.
        let unused: Vec<_> = namespaces.extract_if(.., |_, behind| Arc::strong_count(behind) == 1).collect();
        drop(namespaces);
        drop(unused);
    }

    /// Time that a transfer of this many bytes may take.
    fn longest(&self, bytes: u64) -> Duration {
        let parts = u32::try_from(bytes / BYTES_IN_TIME).unwrap_or(u32::MAX);
        self.options.timeout.saturating_mul(parts.saturating_add(1))
    }

    /// Whether blocks can be stored in both tiers.
    fn stores(&self) -> bool {
        self.core.options.access == StoreAccess::ReadWrite
    }

    /// Counts a failure of an operation. After some in a row, the far store is closed and opened anew.
    fn failed(&self, operation: &str, reason: &dyn std::fmt::Display) {
        add(&self.counters.failures, 1);
        self.link.note_failure(|| format!("{operation} failed: {reason}"));
    }

    /// Notes an event of the far tier.
    fn event(&self, reason: String) {
        self.note(EventKind::FarFailed, &reason);
    }

    fn note(&self, kind: EventKind, reason: &str) {
        self.core.events.note(kind, None, format!("far tier {}: {reason}", self.root().display()));
    }

    #[cfg(test)]
    pub(crate) fn far_store(&self) -> Option<crate::Store> {
        self.link.store()
    }

    pub(crate) fn root(&self) -> &Path {
        &self.options.root
    }

    pub(crate) fn stats(self: &Arc<Self>) -> FarStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (backlog_blocks, backlog_bytes) = self.moves.backlog();
        let counters = &self.counters;
        FarStats {
            is_up: self.link.is_up(),
            outages: self.link.outages(),
            hits: count(&counters.hits),
            misses: count(&counters.misses),
            loaded_bytes: count(&counters.loaded_bytes),
            written_blocks: count(&counters.written_blocks),
            written_bytes: count(&counters.written_bytes),
            unwritten_blocks: count(&counters.unwritten_blocks),
            promoted_blocks: count(&counters.promoted_blocks),
            unpromoted_blocks: count(&counters.unpromoted_blocks),
            failures: count(&counters.failures),
            lookup_timeouts: count(&counters.lookup_timeouts),
            backlog_blocks,
            backlog_bytes,
            store: self.ask_statistics().map(Box::new),
        }
    }

    pub(crate) fn report(&self) -> FarReport {
        FarReport {
            root: self.root().to_path_buf(),
            policy: self.options.policy,
            promote: self.options.promote,
            failure: self.link.failure(),
            store: self.link.store().and_then(|store| store.report().ok()).map(Box::new),
        }
    }

    /// Asks the far store for its statistics, which takes locks that are held while its file system is waited for; `None` if
    /// that takes longer than an operation may, or if earlier questions have no answer yet.
    fn ask_statistics(&self) -> Option<Stats> {
        let store = self.link.store()?;
        let asked = self.statistics_asked.clone();
        if asked.fetch_add(1, Ordering::AcqRel) >= MOST_STATISTICS_ASKED {
            asked.fetch_sub(1, Ordering::AcqRel);
            return None;
        }
        let (send, receive) = crossbeam_channel::bounded(1);
        let ends = asked.clone();
        let started = thread_named("hoistway-far-stats").spawn(move || {
            let _ = send.send(store.stats().ok());
            drop(store);
            ends.fetch_sub(1, Ordering::AcqRel);
        });
        if started.is_err() {
            asked.fetch_sub(1, Ordering::AcqRel);
            return None;
        }
        receive.recv_timeout(self.options.timeout).ok()?
    }

    /// Asks the far store on a thread that may wait for its file system; `None` if that takes longer than a lookup may.
    fn ask<T: Send + 'static>(self: &Arc<Self>, ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let is_stalled = self.late_lookups.load(Ordering::Relaxed) > 0;
        let (send, receive) = crossbeam_channel::bounded(1);
        // The second to set it, of the lookup and of the caller that gave it up, counts it as ended.
        let is_over = Arc::new(AtomicBool::new(false));
        let (tier, ends) = (self.clone(), is_over.clone());
        let run = move || {
            let _ = send.send(ask());
            if ends.swap(true, Ordering::AcqRel) {
                tier.late_lookups.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let deadline = Instant::now() + self.options.lookup_timeout;
        if is_stalled || self.lookups.send_deadline(Box::new(run), deadline).is_err() {
            return None;
        }
        match receive.recv_deadline(deadline) {
            Ok(answer) => Some(answer),
            Err(_) => {
                self.late_lookups.fetch_add(1, Ordering::Relaxed);
                if is_over.swap(true, Ordering::AcqRel) {
                    self.late_lookups.fetch_sub(1, Ordering::Relaxed);
                }
                None
            }
        }
    }

    /// What `run` returns on a thread of its own, unless it takes longer than an operation may.
    fn within_timeout<T: Send + 'static>(&self, run: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (send, receive) = crossbeam_channel::bounded(1);
        thread_named("hoistway-far-once").spawn(move || send.send(run())).ok()?;
        let answer = receive.recv_timeout(self.options.timeout).ok();
        if answer.is_none() {
            self.failed("asking", &"it took too long");
        }
        answer
    }

    fn run_lookups(self: &Arc<Self>) {
        while !self.is_closing() {
            if let Ok(run) = self.to_look_up.recv_timeout(TICK) {
                run();
            }
        }
    }

    /// Ends what takes too long, and lets go of namespaces that are not open any more.
    fn watch(self: &Arc<Self>) {
        let mut looked = Instant::now();
        while !self.is_closing() {
            thread::sleep(TICK);
            if looked.elapsed() >= NAMESPACE_ROUND {
                looked = Instant::now();
                self.close_namespaces();
            }
            self.end_late_loads(Instant::now());
            self.end_late_stores(Instant::now());
            self.note_late_moves(Instant::now());
            if let Some(what) = self.stuck_threads() {
                self.link.note_stuck(|| {
                    format!("its file system does not answer: every thread that {what} waits for it")
                });
            }
        }
    }

    /// What the threads do that all wait for the system, and may never come back.
    fn stuck_threads(&self) -> Option<&'static str> {
        let is_stuck = [(self.loads.are_stuck(), "loads"), (self.moves.are_stuck(), "moves blocks")];
        is_stuck.into_iter().find_map(|(is_stuck, what)| is_stuck.then_some(what))
    }

    fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// Ends the threads, and closes the far store. What the system does not end in time goes on without them.
    pub(crate) fn end(&self, timeout: Duration) {
        self.is_closing.store(true, Ordering::Release);
        self.loads.close();
        self.moves.close();
        mem::take(&mut *lock(&self.namespaces)).values().for_each(|behind| behind.set(None));
        self.link.close(timeout);
    }
}
