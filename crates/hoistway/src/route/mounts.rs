//! The open mounts of 3FS, and the clients that were proven on them. Each mount is known by itself: a daemon that hangs
//! holds up only reads from its own mount, and those for a bounded time.
#![forbid(unsafe_code)]

use super::{UsrbioClient, threefs::OpenMount};
use crate::parallel::{lock, thread_named};
use arc_swap::ArcSwapOption;
use hoistway_usrbio::{
    Chosen, Client, Error, LibrarySearch, Mount, Preference, RingPriority, choose, extract_mount_point, proto,
};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, PoisonError, Weak,
        mpsc::{RecvTimeoutError, channel},
    },
    time::{Duration, Instant},
};

/// How long opening a mount may take: both clients may have to be tried, and each has its own limits.
const OPEN_LIMIT: Duration = Duration::from_secs(30);

/// A request for a client, and its file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) device: u64,
    pub(super) client: UsrbioClient,
    pub(super) directories: Vec<PathBuf>,
}

/// A client that was proven on the daemon with this semaphore. Another daemon has another.
#[derive(Debug)]
struct Proven {
    wanted: Wanted,
    daemon: PathBuf,
    client: Client,
    reason: String,
}

/// The known state of one file system.
#[derive(Debug, Default)]
struct Known {
    state: Mutex<State>,
    opened: Condvar,
}

#[derive(Debug, Default)]
struct State {
    open: Vec<Weak<OpenMount>>,
    proven: Vec<Proven>,
    /// A thread is opening it.
    is_opening: bool,
}

/// The open mount that fits, or a new one.
///
/// # Errors
/// Those of [`choose`]; [`Error::Timeout`] if its daemon hangs.
pub(super) fn open(path: &Path, wanted: Wanted) -> Result<Arc<OpenMount>, Error> {
    let known = lock(&of_process().known).entry(wanted.device).or_default().clone();
    known.mount(path, wanted, OPEN_LIMIT)
}

/// What one process knows of its file systems.
#[derive(Debug)]
struct OfProcess {
    process: u32,
    known: Mutex<BTreeMap<u64, Arc<Known>>>,
}

/// A child of `fork` begins anew: in what it has of its parent, locks may be taken by threads that it lacks.
fn of_process() -> Arc<OfProcess> {
    static LATEST: ArcSwapOption<OfProcess> = ArcSwapOption::const_empty();
    let process = std::process::id();
    loop {
        let latest = LATEST.load_full();
        match latest {
            Some(own) if own.process == process => return own,
            _ => {
                let own = OfProcess { process, known: Mutex::default() };
                LATEST.compare_and_swap(&latest, Some(Arc::new(own)));
            }
        }
    }
}

impl Known {
    fn mount(self: Arc<Self>, path: &Path, wanted: Wanted, limit: Duration) -> Result<Arc<OpenMount>, Error> {
        let end = Instant::now() + limit;
        let left = || end.saturating_duration_since(Instant::now());
        let late = || {
            let (mount, what) = (path.to_owned(), "opening USRBIO".into());
            Error::Timeout { mount, what, limit }
        };
        let mut state = lock(&self.state);
        loop {
            let open = state.open.iter().filter_map(Weak::upgrade);
            let open = open.into_iter().find(|open| open.wanted == wanted);
            if let Some(open) = open {
                drop(state);
                match open.mount.check() {
                    Ok(()) => return Ok(open),
                    Err(hangs @ Error::Timeout { .. }) => return Err(hangs),
                    // It was opened with a daemon that is no more.
                    Err(_) => {}
                }
                state = lock(&self.state);
                state.open.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(&open)));
                continue;
            }
            // Two loads at once need one.
            if !state.is_opening {
                break;
            }
            if left().is_zero() {
                return Err(late());
            }
            state = self.opened.wait_timeout(state, left()).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_opening = true;
        drop(state);
        let (opening, own_path) = (Opening(self), path.to_owned());
        let (tell, hear) = channel();
        // By a thread of its own, which may hang with the daemon, for ever.
        let thread = thread_named("hoistway-mount").spawn(move || {
            let _ = tell.send(opening.0.open(&own_path, wanted));
            drop(opening);
        });
        let thread = thread.map_err(|source| Error::System {
            action: "start a thread to open the mount of",
            path: path.to_owned(),
            source: Arc::new(source),
        })?;
        match hear.recv_timeout(left()) {
            Ok(opened) => {
                let _ = thread.join();
                opened
            }
            Err(RecvTimeoutError::Timeout) => Err(late()),
            Err(RecvTimeoutError::Disconnected) => Err(Error::Invalid(format!(
                "the thread that opened the mount of {} panicked",
                path.display()
            ))),
        }
    }

    /// Opens the mount of `path`, with a probe unless its daemon and client have had one.
    fn open(&self, path: &Path, wanted: Wanted) -> Result<Arc<OpenMount>, Error> {
        let point = extract_mount_point(path)?;
        let daemon = fs::read_link(point.join(proto::IOVS).join(RingPriority::default().submit_link())).ok();
        let proven = {
            let state = lock(&self.state);
            let fits = |proven: &&Proven| proven.wanted == wanted && Some(&proven.daemon) == daemon.as_ref();
            state.proven.iter().find(fits).map(|proven| (proven.client.clone(), proven.reason.clone()))
        };
        let (mount, reason) = match proven {
            Some((client, reason)) => (Mount::open(path, client)?, reason),
            None => {
                let search = LibrarySearch::default().directories(wanted.directories.clone());
                let preference = match wanted.client {
                    UsrbioClient::Auto => Preference::Auto,
                    UsrbioClient::Native => Preference::Native,
                    UsrbioClient::Vendor => Preference::Vendor,
                };
                let Chosen { mount, reason } = choose(path, preference, &search)?;
                (mount, reason)
            }
        };
        tracing::debug!(client = mount.client().name(), reason, "opened a mount of 3FS");
        let mut state = lock(&self.state);
        state.proven.retain(|proven| proven.wanted != wanted);
        if let Some(daemon) = daemon {
            let (client, reason) = (mount.client().clone(), reason.clone());
            state.proven.push(Proven { wanted: wanted.clone(), daemon, client, reason });
        }
        let open = Arc::new(OpenMount { mount, wanted, reason, process: std::process::id() });
        // Those that came before it were opened with a daemon that is no more.
        state.open.retain(|old| old.upgrade().is_some_and(|old| old.wanted != open.wanted));
        state.open.push(Arc::downgrade(&open));
        Ok(open)
    }
}

/// A mount that is being opened, until this is dropped.
struct Opening(Arc<Known>);

impl Drop for Opening {
    fn drop(&mut self) {
        lock(&self.0.state).is_opening = false;
        self.0.opened.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::in_child;

    fn wanted() -> Wanted {
        Wanted { device: 0, client: UsrbioClient::Native, directories: Vec::new() }
    }

    #[test]
    fn callers_wait_no_longer_than_the_limit_for_the_opener_of_a_mount() {
        let (known, limit) = (Arc::new(Known::default()), Duration::from_millis(50));
        lock(&known.state).is_opening = true;
        let error = known.mount(Path::new("/mnt/3fs/model"), wanted(), limit).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(error.to_string().contains("/mnt/3fs/model"), "{error}");
    }

    #[test]
    fn a_mount_that_could_not_be_opened_can_be_tried_again() {
        let (known, path) = (Arc::new(Known::default()), Path::new("/proc/self/status"));
        for _ in 0..2 {
            let error = known.clone().mount(path, wanted(), OPEN_LIMIT).unwrap_err();
            assert!(matches!(error, Error::NotOn3fs { .. }), "{error}");
        }
    }

    /// Threads of the parent may have had any of the locks, and may have been opening a mount.
    #[test]
    fn a_child_of_fork_waits_for_no_lock_of_its_parent() {
        let device = wanted().device;
        let parent = of_process();
        let mut known = lock(&parent.known);
        let of_device = known.entry(device).or_default().clone();
        let _state = lock(&of_device.state);
        in_child(|| {
            let error = open(Path::new("/proc/self/status"), wanted()).unwrap_err();
            assert!(matches!(error, Error::NotOn3fs { .. }), "{error}");
        });
    }
}
