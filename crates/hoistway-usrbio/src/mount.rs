//! A mounted 3FS as this process uses it.
#![forbid(unsafe_code)]

use crate::{
    Error, File, Iov, IovOptions, Result, Ring, RingOptions, RingPriority,
    control::Control,
    key::Key,
    liveness::{Watch, look},
    mountinfo::extract_mount_point,
    proto,
    registration::{deregister, register},
    shm::SharedMemory,
    vendor::Library,
};
use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

/// How long the daemon may take to register memory, which begins at once. InfiniBand follows in the background.
const REGISTRATION_LIMIT: Duration = Duration::from_secs(10);

/// Who speaks to the daemon.
#[derive(Clone, Debug)]
pub enum Client {
    /// This crate.
    Native,
    /// The vendor's library.
    Vendor(Arc<Library>),
}

impl Client {
    /// Its short name: `native` or `vendor`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Vendor(_) => "vendor",
        }
    }
}

/// A mounted 3FS, with a thread that registers this process's memory with its daemon.
///
/// Clones are the same mount. Buffers, rings and files hold it; the thread ends with the last of them.
#[derive(Clone, Debug)]
pub struct Mount {
    inner: Arc<Inner>,
}

impl Mount {
    /// Opens the mount that `path`, a file or directory, lies on.
    ///
    /// # Errors
    /// [`Error::NotOn3fs`], and those of the first requests to the daemon: [`Error::SharedMemoryNamespace`],
    /// [`Error::DaemonDead`], [`Error::Timeout`], [`Error::System`].
    pub fn open(path: &Path, client: Client) -> Result<Self> {
        Self::open_at(extract_mount_point(path)?, client, Trust::No)
    }

    pub(crate) fn open_at(point: PathBuf, client: Client, trust: Trust) -> Result<Self> {
        let control = Control::start(&point, REGISTRATION_LIMIT)?;
        let submit_target = submit_target(&control, &point, RingPriority::default())?;
        let watch = Watch::start(&point, &submit_target)?;
        let pid = std::process::id();
        let files = Mutex::default();
        let inner = Inner { point, client, trust, control, watch, submit_target, pid, files };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Its mount point.
    pub fn point(&self) -> &Path {
        &self.inner.point
    }

    /// Who speaks to the daemon.
    pub fn client(&self) -> &Client {
        &self.inner.client
    }

    /// Makes a buffer that the daemon can read and write.
    ///
    /// # Errors
    /// [`Error::SharedMemoryFull`], [`Error::SharedMemoryNamespace`], [`Error::ReadOnlyMount`],
    /// [`Error::DaemonDead`], [`Error::DaemonRestarted`], [`Error::Timeout`], [`Error::Forked`].
    pub fn create_iov(&self, options: &IovOptions) -> Result<Arc<Iov>> {
        Iov::create(&self.inner, options).map(Arc::new)
    }

    /// Makes a ring. It can be moved to the thread that will use it, and is used by one thread at a time.
    ///
    /// # Errors
    /// As [`create_iov`](Self::create_iov).
    pub fn create_ring(&self, options: &RingOptions) -> Result<Ring> {
        Ring::create(&self.inner, options)
    }

    /// Opens a file for reading. A file that is open already is the same again.
    ///
    /// # Errors
    /// [`Error::System`] if it cannot be opened, [`Error::NotOn3fs`] if it lies elsewhere, [`Error::Forked`].
    pub fn open_file(&self, path: &Path) -> Result<Arc<File>> {
        File::open(&self.inner, path, crate::Direction::Read)
    }

    /// Opens a file that exists for reading and writing.
    ///
    /// # Errors
    /// As [`open_file`](Self::open_file).
    pub fn open_file_for_writing(&self, path: &Path) -> Result<Arc<File>> {
        File::open(&self.inner, path, crate::Direction::Write)
    }

    /// Asks the daemon whether it is the one that this mount was opened with.
    ///
    /// # Errors
    /// [`Error::DaemonDead`], [`Error::DaemonRestarted`], [`Error::Timeout`] if it does not answer,
    /// [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        self.inner.check_process()?;
        self.inner.control.run("asking the daemon", self.inner.daemon_check())?
    }

    /// Waits until everything that was dropped is deregistered, and files that were are closed.
    ///
    /// # Errors
    /// [`Error::Timeout`] if the daemon hangs, [`Error::Forked`].
    pub fn settle(&self) -> Result<()> {
        self.inner.check_process()?;
        self.inner.control.run("deregistering memory", || ())
    }

    /// Asks something that the daemon answers, on the mount's own thread: about a file, for instance. Waits ten seconds
    /// at most; an answer that comes later is dropped.
    ///
    /// # Errors
    /// [`Error::Timeout`] if there is no answer in time, [`Error::Forked`].
    pub fn ask<T: Send + 'static>(
        &self,
        what: &str,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        self.inner.check_process()?;
        self.inner.control.run(what, question)
    }

    /// Runs a task on the mount's own thread, and does not wait for it: to close a file, for instance, which asks the
    /// daemon. In a forked process, which has no such thread, the task is dropped.
    pub fn later(&self, task: impl FnOnce() + Send + 'static) {
        self.inner.later(task);
    }
}

/// Where the daemon's semaphore for submissions is.
fn submit_target(control: &Control, point: &Path, priority: RingPriority) -> Result<PathBuf> {
    let link = point.join(proto::IOVS).join(priority.submit_link());
    control.run("reading submit-ios", move || {
        fs::read_link(&link).map_err(|error| Error::system("find the daemon's semaphore", &link, error))
    })?
}

/// The state that buffers, rings and files share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) point: PathBuf,
    pub(crate) client: Client,
    pub(crate) trust: Trust,
    pub(crate) control: Control,
    pub(crate) watch: Watch,
    submit_target: PathBuf,
    pid: u32,
    pub(crate) files: Mutex<HashMap<crate::file::Identity, Weak<File>>>,
}

#[cfg(test)]
pub(crate) type Tell = dyn Fn(&Key, &Path) + Send + Sync;

/// Whether files are believed to be the daemon's without asking the kernel.
#[derive(Clone)]
pub(crate) enum Trust {
    No,
    /// A plain directory stands for the mount, and this is told of each registration while it can be opened.
    #[cfg(test)]
    Peer(Arc<Tell>),
}

impl Inner {
    /// # Errors
    /// [`Error::Forked`] in any process but the one that opened the mount.
    pub(crate) fn check_process(&self) -> Result<()> {
        let child = std::process::id();
        if child == self.pid { Ok(()) } else { Err(Error::Forked { parent: self.pid, child }) }
    }

    pub(crate) fn is_own_process(&self) -> bool {
        std::process::id() == self.pid
    }

    /// Queues a task for the control thread.
    pub(crate) fn later(&self, task: impl FnOnce() + Send + 'static) {
        if self.is_own_process() {
            self.control.post(task);
        }
    }

    /// Where the daemon's semaphore for submissions of this priority is.
    pub(crate) fn submit_target(&self, priority: RingPriority) -> Result<PathBuf> {
        submit_target(&self.control, &self.point, priority)
    }

    /// What tells on the control thread whether the daemon is still the same.
    pub(crate) fn daemon_check(&self) -> impl FnOnce() -> Result<()> + Send + 'static {
        let (point, target) = (self.point.clone(), self.submit_target.clone());
        move || {
            let verdict = look(&point, &target, BTreeSet::new());
            verdict.into_error(&point, std::iter::empty()).map_or(Ok(()), Err)
        }
    }

    /// Registers memory on the control thread.
    pub(crate) fn register(self: &Arc<Self>, mut memory: SharedMemory, key: Key) -> Result<Registered> {
        self.check_process()?;
        let (point, check, trust) = (self.point.clone(), self.daemon_check(), self.trust.clone());
        let name = key.to_string();
        let (memory, link) = self.control.run("registering memory", move || {
            check()?;
            let link = register(&point, &mut memory, &key, |name| trust.tell(&key, name))?;
            Ok((memory, Undo(Some(link))))
        })??;
        self.watch.add(&name);
        Ok(Registered { memory, name, link, mount: self.clone() })
    }
}

impl Trust {
    #[cfg_attr(not(test), allow(unused_variables, clippy::unused_self, reason = "tests have a peer to tell"))]
    fn tell(&self, key: &Key, name: &Path) {
        #[cfg(test)]
        if let Self::Peer(tell) = self {
            tell(key, name);
        }
    }
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Trust")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.is_own_process() {
            self.control.finish();
            self.watch.finish();
        }
    }
}

/// A link that is removed where it is dropped: on the control thread, if the registration was given up.
#[derive(Debug)]
struct Undo(Option<PathBuf>);

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(link) = self.0.take() {
            deregister(&link);
        }
    }
}

/// Memory that the daemon has mapped, until this is dropped.
#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) memory: SharedMemory,
    pub(crate) name: String,
    link: Undo,
    pub(crate) mount: Arc<Inner>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let link = self.link.0.take();
        // In a forked process the link is the parent's.
        if self.mount.is_own_process() {
            self.mount.watch.remove(&self.name);
            self.mount.control.post(move || drop(Undo(link)));
        }
    }
}
