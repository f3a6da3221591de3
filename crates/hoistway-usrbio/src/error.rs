//! Everything that can go wrong between a program and 3FS, sorted by what can be done about it.
#![forbid(unsafe_code)]

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation did not happen, or not as asked.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The process that serves the mount has ended, or the mount is gone.
    #[error(
        "the 3FS daemon of {} is dead ({reason}): mount the file system again and open the file anew",
        mount.display()
    )]
    DaemonDead {
        /// The mount point, or a path on it.
        mount: PathBuf,
        /// How that was seen.
        reason: String,
    },
    /// Another daemon serves the mount now, which does not know this process's memory.
    #[error("the 3FS daemon of {} was restarted and no longer knows this process: open the mount anew", mount.display())]
    DaemonRestarted {
        /// The mount point.
        mount: PathBuf,
    },
    /// The daemon has forgotten a buffer or a ring of this process.
    #[error(
        "the 3FS daemon of {} dropped this process's registration {key}: something listed or cleaned \
         3fs-virt/iovs; open the mount anew",
        mount.display()
    )]
    IovRemoved {
        /// The mount point.
        mount: PathBuf,
        /// The registration's name in `3fs-virt/iovs`.
        key: String,
    },
    /// The daemon cannot see the shared memory of this process.
    #[error(
        "the 3FS daemon of {} cannot see /dev/shm/{name}: this process has another /dev/shm than the daemon; \
         run the container with --ipc=host, or give both the same volume",
        mount.display()
    )]
    SharedMemoryNamespace {
        /// The mount point.
        mount: PathBuf,
        /// What the daemon did not find, or this process did not find of the daemon's.
        name: String,
    },
    /// The mount is read-only, and USRBIO registers memory by making a link in it.
    #[error(
        "{} is mounted read-only, and USRBIO has to write to its 3fs-virt: mount it read-write, or mount \
         3fs-virt separately and writable",
        mount.display()
    )]
    ReadOnlyMount {
        /// The mount point.
        mount: PathBuf,
    },
    /// `/dev/shm` has no room.
    #[error(
        "/dev/shm has no room for {needed_bytes} bytes ({}): enlarge it (docker run --shm-size), or use \
         smaller or fewer buffers",
        free(*free_bytes)
    )]
    SharedMemoryFull {
        /// What was asked for.
        needed_bytes: u64,
        /// The free bytes, if known.
        free_bytes: Option<u64>,
    },
    /// The path is not on a 3FS.
    #[error("{} is not on a mounted 3FS: {}", path.display(), mounts(seen))]
    NotOn3fs {
        /// The path as given.
        path: PathBuf,
        /// The mount points of 3FS that this process sees.
        seen: Vec<PathBuf>,
    },
    /// The vendor's library is nowhere.
    #[error(
        "libhf3fs_api_shared.so was not found: set HF3FS_LIB_DIR to its directory, or use the native client \
         (tried {})",
        listed(tried)
    )]
    NoLibrary {
        /// Where it was looked for.
        tried: Vec<PathBuf>,
    },
    /// The vendor's library is there, but must not or cannot be used.
    #[error("{} cannot be used: {reason}; the native client needs no library", library.display())]
    LibraryUnusable {
        /// The library.
        library: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// 3FS could not carry out one read or write.
    #[error(
        "{}: 3FS could not transfer {len} bytes at offset {offset}: {} ({hint})",
        path.display(), io::Error::from_raw_os_error(*.errno)
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// Where the transfer began.
        offset: u64,
        /// How many bytes it was to be.
        len: usize,
        /// How many of them had come before, by an earlier short transfer.
        got: usize,
        /// What the daemon answered.
        errno: i32,
        /// What this number means on a 3FS.
        hint: &'static str,
    },
    /// Fewer bytes came than the file has there, twice.
    #[error(
        "{}: 3FS transferred {got} of {len} bytes at offset {offset} of a file of {file_len} bytes: it has a hole \
         there, or is being written",
        path.display()
    )]
    ShortTransfer {
        /// The file.
        path: PathBuf,
        /// Where the transfer began.
        offset: u64,
        /// How many bytes it was to be.
        len: usize,
        /// How many came.
        got: usize,
        /// The file's length then.
        file_len: u64,
    },
    /// Nothing happened for too long, though the daemon is not known to be dead.
    #[error("{what} on {} took more than {limit:?}: the 3FS daemon or its network hangs", mount.display())]
    Timeout {
        /// The mount point.
        mount: PathBuf,
        /// What was waited for.
        what: String,
        /// How long it may take.
        limit: Duration,
    },
    /// The process was forked. The daemon knows only the parent.
    #[error(
        "process {child} was forked from {parent}, which opened the mount: open it anew, or spawn instead of fork"
    )]
    Forked {
        /// The process that opened the mount.
        parent: u32,
        /// The process that used it.
        child: u32,
    },
    /// Shared memory holds what no daemon of this protocol writes.
    #[error("the 3FS daemon of {} broke the USRBIO protocol: {detail}", mount.display())]
    Protocol {
        /// The mount point.
        mount: PathBuf,
        /// What was found.
        detail: String,
    },
    /// A first read by USRBIO was not what `pread` reads.
    #[error("{}: the probe of USRBIO failed: {reason}", path.display())]
    ProbeFailed {
        /// The file read.
        path: PathBuf,
        /// What differed.
        reason: String,
    },
    /// The caller asked for what cannot be.
    #[error("{0}")]
    Invalid(String),
    /// The operating system refused something.
    #[error("{}: cannot {action}: {source}", path.display())]
    System {
        /// What was attempted.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: Arc<io::Error>,
    },
}

impl Error {
    /// What the system answered. Only FUSE says that it is not connected, and means the daemon.
    pub(crate) fn system(action: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        let (path, source) = (path.to_owned(), source.into());
        match source.kind() {
            io::ErrorKind::NotConnected => Self::DaemonDead { mount: path, reason: source.to_string() },
            _ => Self::System { action, path, source: Arc::new(source) },
        }
    }

    /// Whether bytes of a transfer that ended with this may still be on their way: a storage server that was asked for
    /// them can write to the transfer's memory after the daemon has given up on it. Then the memory is not to be used
    /// again.
    pub fn leaves_memory_in_doubt(&self) -> bool {
        // With these the daemon refuses before it asks a storage server: it does not know the buffer or the file.
        matches!(self, Self::Io { errno, .. } if !matches!(*errno, libc::EINVAL | libc::EACCES | libc::EBADF))
    }

    /// The number of the system's error behind this one, if there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { errno, .. } => Some(*errno),
            Self::System { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// What an error number of a transfer means on a 3FS.
pub(crate) fn hint(errno: i32) -> &'static str {
    match errno {
        libc::EREMOTEIO => "the network or a storage server failed; the daemon's log says which",
        libc::EACCES => {
            "the daemon could not register this memory with InfiniBand; check its /dev/shm and memlock limits"
        }
        libc::EINVAL => "the daemon does not know this buffer, or the transfer leaves it",
        libc::EBADF => "the daemon no longer knows this file; open it again",
        libc::ENODATA => "the file has a hole here",
        libc::ENOENT => "the file was removed",
        libc::EINTR => "the daemon cancelled it",
        libc::EROFS => "the daemon serves the file system read-only",
        libc::ENOSPC => "3FS is full",
        libc::ENOMEM => "the daemon is short of memory",
        libc::EMFILE => "the daemon has too many files open",
        _ => "the daemon's log says more",
    }
}

fn free(bytes: Option<u64>) -> String {
    bytes.map_or("how much is free is unknown".into(), |bytes| format!("{bytes} are free"))
}

fn listed(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(", ")
}

fn mounts(seen: &[PathBuf]) -> String {
    match seen {
        [] => "this process sees no mount of type fuse.hf3fs".into(),
        seen => format!("3FS is mounted at {}", listed(seen)),
    }
}
