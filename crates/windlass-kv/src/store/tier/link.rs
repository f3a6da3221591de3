//! Whether the far store can be used: opened, given up after failures, and opened again with growing pauses.
#![forbid(unsafe_code)]

use super::{Behind, TICK, Tier};
use crate::{Error, EventKind, Result, Store, StoreOptions, layout};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use windlass_io::parallel::{lock, thread_named};

/// Failures in a row after which the far store is closed, and opened anew.
const MOST_FAILURES: u32 = 3;
/// Time before the first attempt to open it again. It doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Time between looks whether its directory is still the same.
const ROUND: Duration = Duration::from_secs(1);

pub(super) struct Link {
    options: StoreOptions,
    state: Mutex<State>,
    changed: Condvar,
    is_up: AtomicBool,
}

#[derive(Default)]
struct State {
    store: Option<Store>,
    /// Why there is none.
    failure: Option<String>,
    /// Of the last attempt to open it.
    error: Option<Error>,
    /// Why it is to be given up.
    broken: Option<String>,
    failures: u32,
    outages: u64,
    was_open: bool,
    pause: Duration,
    is_closed: bool,
}

impl Link {
    pub(super) fn new(options: StoreOptions) -> Self {
        let state = State { pause: FIRST_PAUSE, ..State::default() };
        Self { options, state: Mutex::new(state), changed: Condvar::new(), is_up: AtomicBool::new(false) }
    }

    pub(super) fn is_up(&self) -> bool {
        self.is_up.load(Ordering::Acquire)
    }

    pub(super) fn store(&self) -> Option<Store> {
        lock(&self.state).store.clone()
    }

    pub(super) fn outages(&self) -> u64 {
        lock(&self.state).outages
    }

    pub(super) fn failure(&self) -> Option<String> {
        lock(&self.state).failure.clone()
    }

    /// Gives the store up if it is one failure too many in a row.
    pub(super) fn note_failure(&self, reason: impl FnOnce() -> String) {
        let mut state = lock(&self.state);
        state.failures += 1;
        if state.failures >= MOST_FAILURES && self.is_up() {
            state.broken = Some(reason());
            self.is_up.store(false, Ordering::Release);
            self.changed.notify_all();
        }
    }

    pub(super) fn note_success(&self) {
        let mut state = lock(&self.state);
        (state.failures, state.pause) = (0, FIRST_PAUSE);
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Closes the store on a thread of its own, which may take as long as the system does.
    pub(super) fn close(&self, timeout: Duration) {
        self.is_up.store(false, Ordering::Release);
        let mut state = lock(&self.state);
        state.is_closed = true;
        let store = state.store.take();
        drop(state);
        self.changed.notify_all();
        if let Some(ended) = store.and_then(|store| close_aside(store, timeout)) {
            let _ = ended.recv_timeout(timeout);
        }
    }
}

/// Closes a store on a thread of its own. What is returned disconnects when it is closed.
fn close_aside(store: Store, timeout: Duration) -> Option<crossbeam_channel::Receiver<()>> {
    let (end, ended) = crossbeam_channel::bounded::<()>(0);
    let close = move || {
        if let Err(error) = store.close(Some(timeout)) {
            tracing::warn!(root = %store.root().display(), "{error}");
        }
        drop(end);
    };
    thread_named("windlass-far-end").spawn(close).ok().map(|_| ended)
}

impl Tier {
    /// Waits for the first attempt to open the far store, at most for the time of one operation.
    pub(super) fn wait_for_link(&self) -> Result<()> {
        let deadline = Instant::now() + self.options.timeout;
        let link = &self.link;
        let mut state = lock(&link.state);
        while !link.is_up() && state.error.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                self.event("opening it takes long; the near tier goes on without it".into());
                return Ok(());
            }
            state = link.wait(state, left);
        }
        match state.error.take() {
            // No later attempt can succeed.
            Some(
                error @ (Error::InvalidOption { .. }
                | Error::NotAStore { .. }
                | Error::UnknownFormat { .. }
                | Error::RouteUnavailable { .. }),
            ) => Err(error),
            _ => Ok(()),
        }
    }

    /// Waits until a namespace is open in the far store.
    pub(super) fn open_behind(&self, behind: &Behind) {
        let deadline = Instant::now() + self.options.timeout;
        let link = &self.link;
        let mut state = lock(&link.state);
        while link.is_up() && behind.is_to_open() && Instant::now() < deadline {
            link.changed.notify_all();
            state = link.wait(state, TICK);
        }
    }

    /// Opens the far store and its namespaces, whenever they are not open, until the tier is closed.
    pub(super) fn keep_link(self: &Arc<Self>) {
        let link = &self.link;
        while !self.is_closing() {
            match link.store() {
                None => self.connect(),
                Some(store) => self.care_for(store),
            }
        }
    }

    /// Makes no second store where the first one was: what lies below a file system that is not mounted.
    fn open_far(&self) -> Result<Store> {
        let options = &self.link.options;
        if lock(&self.link.state).was_open && layout::existing(options)?.is_none() {
            let reason = "the store that was there is gone".to_owned();
            return Err(Error::NotAStore { path: options.root.clone(), reason });
        }
        Store::open(options.clone())
    }

    fn connect(&self) {
        let link = &self.link;
        match self.open_far() {
            Ok(store) => {
                let mut state = lock(&link.state);
                if state.is_closed {
                    drop(state);
                    let _ = close_aside(store, Duration::ZERO);
                    return;
                }
                let is_again = state.outages > 0;
                (state.store, state.failure, state.error) = (Some(store.clone()), None, None);
                (state.broken, state.failures, state.was_open) = (None, 0, true);
                drop(state);
                self.open_namespaces(&store);
                link.is_up.store(true, Ordering::Release);
                link.changed.notify_all();
                if is_again {
                    self.note(EventKind::FarRecovered, "it is open again");
                }
            }
            Err(error) => {
                let mut state = lock(&link.state);
                let is_first = state.failure.is_none();
                if is_first {
                    state.outages += u64::from(state.outages == 0);
                    self.event(format!("it cannot be opened: {error}"));
                }
                state.failure = Some(error.to_string());
                state.error = Some(error);
                link.changed.notify_all();
                self.pause(state);
            }
        }
    }

    /// Waits before the next attempt.
    fn pause<'a>(&'a self, mut state: MutexGuard<'a, State>) {
        let end = Instant::now() + state.pause;
        state.pause = (state.pause * 2).min(LONGEST_PAUSE);
        while !state.is_closed {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.link.wait(state, left);
        }
    }

    /// Opens namespaces until the store is given up: after failures, or when its directory is another one.
    fn care_for(&self, store: Store) {
        let link = &self.link;
        let identity = identity(store.root());
        let mut round = Instant::now();
        let mut reason = None;
        loop {
            self.open_namespaces(&store);
            if round.elapsed() >= ROUND {
                round = Instant::now();
                if self::identity(store.root()) != identity {
                    reason = Some("its directory is gone, or another one".to_owned());
                }
            }
            let mut state = lock(&link.state);
            if state.is_closed {
                return;
            }
            if let Some(reason) = state.broken.take().or(reason.take()) {
                link.is_up.store(false, Ordering::Release);
                state.outages += 1;
                state.failure = Some(reason.clone());
                state.store = None;
                let pause = state.pause;
                drop(state);
                self.event(format!("{reason}; it is opened again in {pause:?}"));
                lock(&self.namespaces).values().for_each(|behind| behind.set(None));
                let _ = close_aside(store, Duration::ZERO);
                return self.pause(lock(&link.state));
            }
            drop(link.wait(state, ROUND));
        }
    }

    fn open_namespaces(&self, store: &Store) {
        let closed: Vec<_> =
            lock(&self.namespaces).values().filter(|behind| behind.is_to_open()).cloned().collect();
        for behind in closed {
            if let Err(error) = behind.open(store) {
                self.event(format!("the namespace {} cannot be opened: {error}", behind.id()));
            }
        }
    }
}

/// What tells a directory from another one of the same name.
fn identity(root: &Path) -> Option<(u64, u64)> {
    fs::metadata(root).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}
