//! Memory that loads were promised and have not touched: one sum for all loads of the process, and a watch for each load.
//!
//! Memory that is touched shows in what the system has left. Until then only this sum knows of it, and other processes
//! may take it. So a load looks at the limits again as it touches its memory, the more often the less they leave. Where
//! little is left, one thread of one process at a time touches memory, and only while there is enough for the rest and a
//! reserve.
#![forbid(unsafe_code)]

use crate::{
    Error, Result,
    parallel::lock,
    sys::limits::{LimitSource, MemoryLimit},
};
use hoistway_io::file::{is_transient, try_lock, unlock};
use std::{
    fs::File,
    hash::{BuildHasher, Hasher, RandomState},
    io,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// What loads leave free under every limit. Where none is left, the kernel kills a process that needs a page for a stack or
/// a page table; and memory may come in huge pages of 2 MiB.
pub(super) const RESERVE_BYTES: u64 = 4 << 20;
/// Where limits leave less than this beside what is promised, each touch is preceded by a look at them. More than reads
/// that are in flight take between two looks.
const TIGHT_BYTES: u64 = 512 << 20;
/// Elsewhere a load touches this part of what is left, one 16th, before it looks again: 16 processes may do so at once.
const SHARE_SHIFT: u32 = 4;
/// It looks at least as often as this.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// A load that finds too little gives up after a random time between these. Loads that run out together do not all give
/// up: the first one to do so frees what the others need.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));
/// Time between two looks of a load that finds too little.
const PAUSE: Duration = Duration::from_millis(4);
/// Longest wait for other processes that touch memory: one may wait for a core of a busy machine.
const TURN_LIMIT: Duration = Duration::from_secs(2);
/// The same after a wait in vain: the process may be stopped.
const NEXT_TURN_LIMIT: Duration = Duration::from_millis(50);
/// Time between two attempts to get a turn.
const TURN_PAUSE: Duration = Duration::from_micros(200);

/// Bytes that loads of this process were promised and have not touched, and the process that this counts for.
static PROMISED: AtomicU64 = AtomicU64::new(0);
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Returns the bytes that loads of this process were promised and have not touched.
pub(super) fn bytes() -> u64 {
    ledger().load(Ordering::Relaxed)
}

fn ledger() -> &'static AtomicU64 {
    let process = std::process::id();
    match PROCESS.swap(process, Ordering::Relaxed) {
        // The first use: nothing is promised yet, or another thread has just promised something.
        0 => {}
        before if before == process => {}
        // A child of fork has none of its parent's loads.
        _ => PROMISED.store(0, Ordering::Relaxed),
    }
    &PROMISED
}

fn take_from(counter: &AtomicU64, bytes: u64) -> u64 {
    let less = |promised: u64| Some(promised.saturating_sub(bytes));
    let before = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).unwrap_or_default();
    before.min(bytes)
}

/// Memory that one load may have, and how much of it the load has not touched.
#[derive(Debug)]
pub(crate) struct Promise {
    untouched: AtomicU64,
    process: u32,
    /// `None` if the load allocates too little to be watched.
    watch: Option<Mutex<Watch>>,
}

#[derive(Debug)]
struct Watch {
    sources: Vec<LimitSource>,
    /// Bytes that may be touched before the next look. None are left where memory is tight.
    until_look: u64,
    is_tight: bool,
    /// Whether the last wait for a turn was in vain.
    lost_turn: bool,
    looked: Instant,
}

/// The limit that leaves the least.
struct Tightest {
    limit: MemoryLimit,
    file: std::path::PathBuf,
}

impl Promise {
    /// A promise of nothing, of which nothing is checked.
    pub(super) fn none() -> Self {
        Self { untouched: AtomicU64::new(0), process: std::process::id(), watch: None }
    }

    /// Promises `bytes`, if they may be promised beside those that were promised before.
    ///
    /// # Errors
    /// The bytes that were promised before, if `may` says that these are too many beside them.
    pub(super) fn new(bytes: u64, sources: Vec<LimitSource>, may: impl Fn(u64) -> bool) -> Result<Self, u64> {
        ledger().fetch_update(Ordering::Relaxed, Ordering::Relaxed, |promised| {
            may(promised).then(|| promised.saturating_add(bytes))
        })?;
        // The first touch looks.
        let watch =
            Watch { sources, until_look: 0, is_tight: false, lost_turn: false, looked: Instant::now() };
        let watch = (bytes > 0).then(|| Mutex::new(watch));
        Ok(Self { untouched: AtomicU64::new(bytes), process: std::process::id(), watch })
    }

    /// Allows the load to touch `bytes` that it was promised, or waits a moment until that is possible. Calls `touch`
    /// where memory is tight, and returns whether it did.
    ///
    /// # Errors
    /// [`Error::MemoryBudget`] if the system has too little left for all that is promised. Other errors end a load that
    /// is over anyway.
    pub(crate) fn touch(&self, bytes: u64, is_over: impl Fn() -> bool, touch: impl FnOnce()) -> Result<bool> {
        self.touch_once(&AtomicBool::new(false), bytes, is_over, touch)
    }

    /// Allows as [`Promise::touch`] does, for memory that several threads want to touch. The first one that is allowed to
    /// sets `is_allowed`. Until then the others wait, and afterwards they may touch the memory, too.
    ///
    /// # Errors
    /// Those of [`Promise::touch`].
    pub(crate) fn touch_once(
        &self,
        is_allowed: &AtomicBool,
        bytes: u64,
        is_over: impl Fn() -> bool,
        touch: impl FnOnce(),
    ) -> Result<bool> {
        let Some(watch) = &self.watch else { return Ok(false) };
        // Without the lock, which another thread may hold while it waits for room: what is read here may make that room.
        if is_allowed.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let mut watch = lock(watch);
        if is_allowed.load(Ordering::Relaxed) {
            return Ok(false);
        }
        watch.until_look = watch.until_look.saturating_sub(bytes);
        let is_ample = watch.until_look > 0 && watch.looked.elapsed() < LOOK_INTERVAL;
        let turn = if is_ample { None } else { watch.wait_for_room(bytes, is_over)? };
        let is_tight = !is_ample && watch.is_tight;
        if is_tight {
            touch();
        }
        self.touched(bytes);
        is_allowed.store(true, Ordering::Relaxed);
        drop(turn);
        Ok(is_tight)
    }

    /// The load touches no more.
    pub(crate) fn end(&self) {
        self.touched(u64::MAX);
    }

    fn touched(&self, bytes: u64) {
        let taken = take_from(&self.untouched, bytes);
        if self.process == std::process::id() {
            take_from(ledger(), taken);
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.end();
    }
}

impl Watch {
    /// Waits a moment if there is too little memory. The result keeps other processes from touching memory where it is
    /// tight.
    fn wait_for_room(&mut self, bytes: u64, is_over: impl Fn() -> bool) -> Result<Option<Turn>> {
        let patience = patience();
        let mut paused = Duration::ZERO;
        loop {
            let tightest = self.is_tight.then(|| self.tightest()).flatten();
            let turn = tightest.and_then(|found| self.turn(&found.file, &is_over));
            let needed = bytes_left(bytes).saturating_add(RESERVE_BYTES);
            let Some(found) = self.tightest() else { return Ok(None) };
            self.looked = Instant::now();
            if let Some(rest) = found.limit.available_bytes.checked_sub(needed) {
                let was_tight = std::mem::replace(&mut self.is_tight, rest < TIGHT_BYTES);
                self.until_look = if self.is_tight { 0 } else { rest >> SHARE_SHIFT };
                if self.is_tight && !was_tight {
                    // Once more, in turn with others.
                    continue;
                }
                return Ok(turn);
            }
            drop(turn);
            if paused >= patience || is_over() {
                return Err(Error::MemoryBudget {
                    needed,
                    available: found.limit.available_bytes,
                    limit_name: format!("by now {}", found.limit.name),
                    fix: "others have taken memory since the load began: run fewer at once, free memory, or raise that limit"
                        .into(),
                });
            }
            thread::sleep(PAUSE);
            // Not what turns take: those who wait for the same one would all give up.
            paused += PAUSE;
        }
    }

    /// The turn under the limit in this file, if it can be had.
    fn turn(&mut self, limit: &Path, is_over: impl Fn() -> bool) -> Option<Turn> {
        let longest = if self.lost_turn { NEXT_TURN_LIMIT } else { TURN_LIMIT };
        let turn = Turn::take(limit, |waited| waited <= longest && !is_over());
        self.lost_turn = turn.is_none();
        turn
    }

    fn tightest(&self) -> Option<Tightest> {
        let found = self.sources.iter().filter_map(|source| Some((source.read()?, source)));
        let (limit, source) = found.min_by_key(|(limit, _)| limit.available_bytes)?;
        Some(Tightest { limit, file: source.file() })
    }
}

/// What loads of this process will touch, at least `bytes`.
fn bytes_left(bytes: u64) -> u64 {
    self::bytes().max(bytes)
}

fn patience() -> Duration {
    let (shortest, longest) = PATIENCE;
    let steps = RandomState::new().build_hasher().finish() % 1024;
    shortest + (longest - shortest) * u32::try_from(steps).unwrap_or(0) / 1024
}

/// The right to touch memory under a limit, which one process has at a time.
struct Turn(File);

impl Turn {
    /// Waits for the turn while `may_wait` says so of the time that has passed. `None` if it cannot be had.
    fn take(limit: &Path, may_wait: impl Fn(Duration) -> bool) -> Option<Self> {
        let file = File::open(limit).ok()?;
        wait_while_taken(may_wait, || try_lock(&file)).then_some(Self(file))
    }
}

/// Calls `lock` until it succeeds. `false` if another process keeps the lock for longer than `may_wait` allows, or if the
/// system has no locks for this file: waiting would help none of the many touches of a load then.
fn wait_while_taken(may_wait: impl Fn(Duration) -> bool, mut lock: impl FnMut() -> io::Result<()>) -> bool {
    let began = Instant::now();
    loop {
        match lock() {
            Ok(()) => return true,
            Err(error) if is_transient(&error) && may_wait(began.elapsed()) => {
                thread::sleep(TURN_PAUSE);
            }
            Err(_) => return false,
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A child of fork has the descriptor too, and would keep the turn.
        unlock(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::ErrorKind, sync::mpsc};

    #[test]
    fn a_turn_is_waited_for_only_while_another_has_it() {
        let mut taken =
            [Err(ErrorKind::WouldBlock.into()), Err(ErrorKind::Interrupted.into()), Ok(())].into_iter();
        assert!(wait_while_taken(|_| true, || taken.next().unwrap()));
        for refused in [ErrorKind::Unsupported, ErrorKind::PermissionDenied, ErrorKind::Other] {
            let mut calls = 0;
            let is_locked = wait_while_taken(
                |_| true,
                || {
                    calls += 1;
                    Err(refused.into())
                },
            );
            assert_eq!((is_locked, calls), (false, 1), "{refused}");
        }
        let limit = Duration::from_millis(50);
        assert!(!wait_while_taken(|waited| waited <= limit, || Err(ErrorKind::WouldBlock.into())));
    }

    #[test]
    fn one_turn_at_a_time_is_had_under_a_limit() {
        let limit = tempfile::NamedTempFile::new().unwrap();
        let take = || Turn::take(limit.path(), |_| false);
        let turn = take().unwrap();
        assert!(take().is_none());
        drop(turn);
        assert!(take().is_some());
    }

    #[test]
    fn a_stopped_process_costs_one_long_wait() {
        let limit = tempfile::NamedTempFile::new().unwrap();
        let taken = Turn::take(limit.path(), |_| false).unwrap();
        let promise = Promise::new(1, Vec::new(), |_| true).unwrap();
        let mut watch = lock(promise.watch.as_ref().unwrap());
        let mut waited = || {
            let began = Instant::now();
            assert!(watch.turn(limit.path(), || false).is_none());
            began.elapsed()
        };
        assert!(waited() >= TURN_LIMIT);
        let rest: Duration = (0..10).map(|_| waited()).min().unwrap();
        assert!(rest < TURN_LIMIT / 2, "{rest:?}");
        drop(taken);
        assert!(watch.turn(limit.path(), || false).is_some());
        assert!(!watch.lost_turn);
    }

    /// One thread touches memory ahead, and another one reads to it.
    #[test]
    fn memory_is_not_touched_while_another_thread_waits_to_be_allowed_to() {
        let promise = Promise::new(2, Vec::new(), |_| true).unwrap();
        lock(promise.watch.as_ref().unwrap()).is_tight = true;
        let (is_allowed, is_touched) = (AtomicBool::new(false), AtomicBool::new(false));
        let (waits, has_waited) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let touch = || {
                    waits.send(()).unwrap();
                    // Time for the other thread to get ahead, if it can.
                    thread::sleep(Duration::from_millis(20));
                    is_touched.store(true, Ordering::SeqCst);
                };
                assert!(promise.touch_once(&is_allowed, 2, || false, touch).unwrap());
            });
            has_waited.recv().unwrap();
            let touch = || panic!("it is touched once");
            assert!(!promise.touch_once(&is_allowed, 2, || false, touch).unwrap());
            assert!(is_touched.load(Ordering::SeqCst));
        });
        assert_eq!(promise.untouched.load(Ordering::Relaxed), 0);
    }
}
