//! Whether the far store can be used: opened, given up after failures, and opened again with growing pauses.
//!
//! Its directory is never made here. Below a mount point whose file system is missing, the store would land on the disk of
//! the node.
#![forbid(unsafe_code)]

use super::{Behind, TICK, Tier};
use crate::{
    Error, EventKind, Result, Store, StoreOptions, disk::before_call, layout, options::Creation, store::Core,
};
use hoistway_io::parallel::{lock, thread_named};
use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Failures in a row after which the far store is closed, and opened anew.
const MOST_FAILURES: u32 = 3;
/// Time before the first attempt to open it again. It doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Time between looks whether its directory is still the same.
const ROUND: Duration = Duration::from_secs(1);
/// Stores that were given up and have threads that the system does not let go: with so many, none is opened.
const MOST_STUCK: usize = 2;

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
    /// Why no attempt to open it can succeed.
    error: Option<Error>,
    /// Stores that were given up. One lives as long as a thread of it waits for the system.
    given_up: Vec<Weak<Core>>,
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
        if state.failures >= MOST_FAILURES {
            self.give_up(&mut state, reason);
        }
    }

    /// Gives the store up now.
    pub(super) fn note_stuck(&self, reason: impl FnOnce() -> String) {
        self.give_up(&mut lock(&self.state), reason);
    }

    fn give_up(&self, state: &mut State, reason: impl FnOnce() -> String) {
        if self.is_up() {
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
    thread_named("hoistway-far-end").spawn(close).ok().map(|_| ended)
}

impl Tier {
    /// Waits for the first attempt to open the far store, at most for the time of one operation.
    ///
    /// # Errors
    /// That of the attempt, if no later one can succeed.
    pub(super) fn wait_for_link(&self) -> Result<()> {
        let deadline = Instant::now() + self.options.timeout;
        let link = &self.link;
        let mut state = lock(&link.state);
        while !link.is_up() && state.failure.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                self.event("opening it takes long; the near tier goes on without it".into());
                return Ok(());
            }
            state = link.wait(state, left);
        }
        state.error.take().map_or(Ok(()), Err)
    }

    /// Waits until a namespace was tried to be opened in the far store.
    pub(super) fn open_behind(&self, behind: &Behind) {
        let deadline = Instant::now() + self.options.timeout;
        let link = &self.link;
        let mut state = lock(&link.state);
        while link.is_up() && behind.is_new() && Instant::now() < deadline {
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

    /// Opens the far store, or makes it in a directory that is there. Where a store was before, none is made.
    fn open_far(&self) -> Result<Store, NotOpened> {
        let link = &self.link;
        let root = &link.options.root;
        let was_open = {
            let mut state = lock(&link.state);
            state.given_up.retain(|core| core.strong_count() > 0);
            if state.given_up.len() >= MOST_STUCK || self.stuck_threads().is_some() {
                return Err(NotOpened::Stuck);
            }
            state.was_open
        };
        before_call(root);
        match fs::metadata(root) {
            Ok(metadata) if identity(&self.core.root) == Some(identity_of(&metadata)) => {
                let reason = "the far tier is another store than the near one".into();
                let value = root.display().to_string();
                return Err(Error::InvalidOption { option: "far", value, reason }.into());
            }
            Ok(_) if is_below(root, &self.core.root) => {
                let reason =
                    "the capacity of the near tier is that of all files below its directory: choose another directory".into();
                let value = root.display().to_string();
                return Err(Error::InvalidOption { option: "far.root", value, reason }.into());
            }
            Ok(_) if is_below(&self.core.root, root) => {
                let reason =
                    "the capacity of the far tier is that of all files below its directory, and the near tier is there: choose another directory".into();
                let value = root.display().to_string();
                return Err(Error::InvalidOption { option: "far.root", value, reason }.into());
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(NotOpened::NoDirectory),
            Err(source) => {
                let path = root.clone();
                return Err(Error::Io { operation: "looking for", path, source }.into());
            }
        }
        if (was_open || !self.stores()) && layout::existing(&link.options)?.is_none() {
            return Err(NotOpened::NoStore);
        }
        // What was there a moment ago may be unmounted by now.
        let creation = if was_open { Creation::Nothing } else { Creation::Store };
        Ok(Store::open(StoreOptions { creation, ..link.options.clone() }).map_err(of_far)?)
    }

    fn connect(&self) {
        let link = &self.link;
        let opened = self.open_far();
        let mut state = lock(&link.state);
        match opened {
            Ok(store) => {
                if state.is_closed {
                    drop(state);
                    let _ = close_aside(store, Duration::ZERO);
                    return;
                }
                let is_again = state.failure.take().is_some();
                (state.store, state.error) = (Some(store.clone()), None);
                (state.broken, state.failures, state.was_open) = (None, 0, true);
                drop(state);
                self.open_namespaces(&store, Namespaces::All);
                let state = lock(&link.state);
                if state.is_closed {
                    return;
                }
                // Under the lock: no waiter looks between this and the notification.
                link.is_up.store(true, Ordering::Release);
                link.changed.notify_all();
                drop(state);
                if is_again {
                    self.note(EventKind::FarRecovered, "it is open again");
                }
            }
            Err(reason) => {
                if state.failure.replace(reason.to_string()).is_none() {
                    state.outages += 1;
                    self.event(format!("it cannot be opened: {reason}"));
                }
                state.error = reason.lasting();
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
            let is_round = round.elapsed() >= ROUND;
            self.open_namespaces(&store, if is_round { Namespaces::All } else { Namespaces::New });
            if is_round {
                round = Instant::now();
                let now = self::identity(store.root());
                if now.is_none() || now != identity {
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
                state.given_up.push(Arc::downgrade(store.core()));
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

    fn open_namespaces(&self, store: &Store, which: Namespaces) {
        let is_to_open = |behind: &&Arc<Behind>| match which {
            Namespaces::New => behind.is_new(),
            Namespaces::All => behind.is_closed(),
        };
        let closed: Vec<_> = lock(&self.namespaces).values().filter(is_to_open).cloned().collect();
        for behind in closed {
            if let Err(error) = behind.open(store) {
                self.event(format!("the namespace {} cannot be opened: {error}", behind.id()));
            }
        }
    }
}

/// Which of the namespaces that are not open are tried.
#[derive(Clone, Copy)]
enum Namespaces {
    /// Those that were not tried yet.
    New,
    All,
}

/// Why the far store is not open.
enum NotOpened {
    /// Its file system is missing, or its directory has not been made.
    NoDirectory,
    /// There is no store in its directory, and none is made there.
    NoStore,
    /// The system holds on to stores that were given up.
    Stuck,
    Failed(Error),
}

impl NotOpened {
    /// The error, if no later attempt can succeed.
    fn lasting(self) -> Option<Error> {
        match self {
            Self::Failed(
                error @ (Error::InvalidOption { .. }
                | Error::NotAStore { .. }
                | Error::UnknownFormat { .. }
                | Error::RouteUnavailable { .. }),
            ) => Some(error),
            _ => None,
        }
    }
}

impl From<Error> for NotOpened {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl fmt::Display for NotOpened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoDirectory => "its directory is not there: mount its file system, or make the directory",
            Self::NoStore => "its directory has no store: mount its file system",
            Self::Stuck => "reads and writes from before its outage have not ended yet",
            Self::Failed(error) => return error.fmt(f),
        })
    }
}

/// The same error with the option's name among those of the near store.
fn of_far(error: Error) -> Error {
    match error {
        Error::InvalidOption { option, value, reason } => {
            let option = match option {
                "capacity_bytes" => "far.capacity_bytes",
                "layout" => "far.layout",
                "min_free_bytes" => "far.min_free_bytes",
                other => other,
            };
            Error::InvalidOption { option, value, reason }
        }
        other => other,
    }
}

/// Whether a directory lies in another one, as far as that can be said.
fn is_below(directory: &Path, parent: &Path) -> bool {
    let whole = |path: &Path| fs::canonicalize(path).ok();
    whole(directory).zip(whole(parent)).is_some_and(|(directory, parent)| directory.starts_with(parent))
}

/// What tells a directory from another one of the same name.
fn identity(root: &Path) -> Option<(u64, u64)> {
    before_call(root);
    fs::metadata(root).ok().map(|metadata| identity_of(&metadata))
}

fn identity_of(directory: &fs::Metadata) -> (u64, u64) {
    (directory.dev(), directory.ino())
}
