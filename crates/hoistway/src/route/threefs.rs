//! Mounts of 3FS that are open for USRBIO: proven by a read once, and shared by all loads that read from them.
#![forbid(unsafe_code)]

use super::{
    Unavailable, UsrbioClient,
    mounts::{self, Wanted},
    usrbio::Files,
};
use crate::{source::threefs::ThreeFs, sys::files};
use hoistway_usrbio::{
    Client, Error, File, Iov, IovOptions, Library, LibrarySearch, Mount, Ring, RingOptions,
    extract_mount_point,
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A mount whose client has read what `pread` reads.
#[derive(Debug)]
pub(crate) struct OpenMount {
    pub(super) mount: Mount,
    pub(super) wanted: Wanted,
    pub(super) reason: String,
    pub(super) process: u32,
}

impl OpenMount {
    /// The mount that the file at `path` lies on, whose file system has the number `device`, by the client asked for.
    /// `directories` may hold the vendor's library.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(crate) fn of(
        device: u64,
        path: &Path,
        client: UsrbioClient,
        directories: &[PathBuf],
    ) -> Result<Arc<Self>, Unavailable> {
        let wanted = Wanted { device, client, directories: directories.to_vec() };
        mounts::open(path, wanted).map_err(|error| unavailable(&error))
    }

    /// Its mount point.
    pub(crate) fn point(&self) -> &Path {
        self.mount.point()
    }

    /// The client that speaks to the daemon.
    pub(crate) fn client(&self) -> UsrbioClient {
        match self.mount.client() {
            Client::Native => UsrbioClient::Native,
            Client::Vendor(_) => UsrbioClient::Vendor,
        }
    }

    /// Why it is this client.
    pub(crate) fn reason(&self) -> &str {
        &self.reason
    }

    /// Asks something of a file that lies on it, which a daemon that hangs never answers: waited for so long and no longer.
    ///
    /// # Errors
    /// The daemon did not answer.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        what: &str,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        if self.process == std::process::id() {
            self.mount.ask(what, question).map_err(super::usrbio::failed)
        } else {
            // A child of `fork` has no thread that could be waited for.
            Ok(question())
        }
    }

    /// Runs a task some time, and does not wait for it. A child of `fork` drops it.
    pub(crate) fn later(&self, task: impl FnOnce() + Send + 'static) {
        self.mount.later(task);
    }

    /// The error of a system call on a mount that no daemon serves any more.
    pub(crate) fn death(&self, error: &io::Error) -> io::Error {
        let (mount, reason) = (self.point().to_owned(), error.to_string());
        super::usrbio::failed(Error::DaemonDead { mount, reason })
    }

    /// Makes a file known to the daemon's client.
    ///
    /// # Errors
    /// Why that cannot be.
    pub(crate) fn file(&self, source: &ThreeFs) -> Result<Arc<File>, Unavailable> {
        let file = source.file();
        if file.device() != self.wanted.device {
            return Err(Unavailable::new(
                format!("it lies on another 3FS than {}, and a load reads from one", self.point().display()),
                "load from each mount by itself",
            ));
        }
        // Through the first descriptor rather than the path: the same file for certain.
        let open = file.buffered_file().map_err(|error| Unavailable::new(error.to_string(), ""))?;
        self.mount.open_file(&files::link(&open)).map_err(|error| match error {
            // The path would be that of the link.
            Error::System { action, source, .. } => {
                Unavailable::new(format!("3FS refused to {action}: {source}"), "")
            }
            error => unavailable(&error),
        })
    }

    /// Memory that the daemon can write to, near a NUMA node.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn memory(&self, len: usize, numa_node: Option<u32>) -> Result<Arc<Iov>, Unavailable> {
        let mut options = IovOptions::default().len(len);
        options.numa_node = numa_node;
        self.mount.create_iov(&options).map_err(|error| unavailable(&error))
    }

    /// A lane for up to `depth` reads of `files`.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn lane(&self, files: Arc<Files>, depth: usize) -> Result<super::UsrbioLane, Unavailable> {
        let ring = |mount: &Mount| -> Result<Ring, Error> {
            mount.create_ring(&RingOptions::default().depth(depth))
        };
        let ring = ring(&self.mount).map_err(|error| unavailable(&error))?;
        Ok(super::UsrbioLane::new(ring, files, depth))
    }
}

/// Where the 3FS is mounted that `path` lies on.
///
/// # Errors
/// [`Error::NotFound`](crate::Error::NotFound), or [`Error::RouteUnavailable`](crate::Error::RouteUnavailable) if it lies
/// elsewhere.
pub fn mount_point_of_3fs(path: &Path) -> crate::Result<PathBuf> {
    fs::metadata(path).map_err(|error| hoistway_io::Error::opening(path, error))?;
    extract_mount_point(path).map_err(|error| refused(path, &error))
}

/// Where a 3FS is mounted that this process sees.
pub fn mount_points_of_3fs() -> Vec<PathBuf> {
    // Without /proc, none can be seen.
    hoistway_usrbio::mount_points().unwrap_or_default()
}

/// Whether route `usrbio` can read from the 3FS at `path`, a mount point or any directory or file there: that its daemon
/// lives, and takes memory of this process. A first read proves more.
///
/// # Errors
/// [`Error::NotFound`](crate::Error::NotFound), [`Error::RouteUnavailable`](crate::Error::RouteUnavailable).
pub fn probe_3fs(path: &Path, client: UsrbioClient, directories: &[PathBuf]) -> crate::Result<()> {
    let point = mount_point_of_3fs(path)?;
    let probe = || {
        let client = match client {
            UsrbioClient::Vendor => {
                let search = LibrarySearch::default().directories(directories.to_vec());
                Client::Vendor(Library::find(&search)?)
            }
            UsrbioClient::Auto | UsrbioClient::Native => Client::Native,
        };
        let mount = Mount::open(&point, client)?;
        mount.check()?;
        let len = crate::sys::pages::page_size();
        mount.create_iov(&IovOptions::default().len(len)).map(drop)
    };
    probe().map_err(|error| refused(path, &error))
}

fn refused(path: &Path, error: &Error) -> crate::Error {
    let (route, path) = (super::Route::Usrbio, Some(path.to_owned()));
    crate::Error::RouteUnavailable { route, path, why: unavailable(error) }
}

/// A client's error as the reason why there is no route. Its text says what to do, where that is not another option.
fn unavailable(error: &Error) -> Unavailable {
    let fix = match error {
        Error::NotOn3fs { .. } => "choose route auto",
        Error::NoLibrary { .. } | Error::LibraryUnusable { .. } => "choose usrbio=native",
        Error::ProbeFailed { .. } | Error::Protocol { .. } => {
            "choose route threads, and look at the daemon's log"
        }
        _ => "",
    };
    Unavailable::new(error.to_string(), fix)
}
