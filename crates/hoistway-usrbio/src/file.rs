//! Files of a 3FS that are open for transfers.
#![allow(unsafe_code)]

use crate::{
    Client, Direction, Error, Result,
    mount::{Inner, Trust},
    proto,
    vendor::{Library, RegisteredFd},
};
use rustix::{
    fs::{FileType, Mode, OFlags, Stat},
    io::retry_on_intr,
};
use std::{
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, Weak},
};

/// How many descriptors the vendor's library may refuse before that is an error.
const REGISTRATION_ATTEMPTS: usize = 16;

/// A file and what it was opened for.
pub(crate) type Identity = (u64, Direction);

/// An open file. Held by every transfer until its completion, because the daemon finds it by its inode number, and only
/// as long as it is open.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    /// Taken out by `drop`.
    handle: ManuallyDrop<Handle>,
    inode: u64,
    chunk_bytes: u64,
    direction: Direction,
    mount: Arc<Inner>,
}

#[derive(Debug)]
enum Handle {
    Plain(OwnedFd),
    Registered(RegisteredFd),
}

/// Whether a file descriptor is one of a 3FS, with a daemon that lives.
pub fn is_3fs(file: impl AsFd) -> bool {
    ask(file.as_fd(), proto::GET_MAGIC) == Some(proto::MAGIC)
}

/// The version of the daemon's calls; `None` if it has none, or is dead.
pub fn protocol_version(file: BorrowedFd<'_>) -> Option<u32> {
    ask(file, proto::GET_VERSION)
}

impl File {
    pub(crate) fn open(mount: &Arc<Inner>, path: &Path, direction: Direction) -> Result<Arc<Self>> {
        mount.check_process()?;
        let (handle, stat) = open(mount, path, direction)?;
        let identity = (stat.st_ino, direction);
        let mut files = mount.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|_, file| file.strong_count() > 0);
        if let Some(known) = files.get(&identity).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let handle = match &mount.client {
            Client::Native => Handle::Plain(handle),
            Client::Vendor(library) => Handle::Registered(register(library, handle, path)?),
        };
        let file = Arc::new(Self {
            path: path.to_owned(),
            handle: ManuallyDrop::new(handle),
            inode: stat.st_ino,
            chunk_bytes: u64::try_from(stat.st_blksize).unwrap_or(0),
            direction,
            mount: mount.clone(),
        });
        files.insert(identity, Arc::downgrade(&file));
        Ok(file)
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The length that transfers like best: one chunk of the file on 3FS.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// The file's inode number.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// Returns the file's length now.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn len_now(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(self)
            .map_err(|error| Error::system("ask for the length of", &self.path, error))?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    pub(crate) fn direction(&self) -> Direction {
        self.direction
    }

    pub(crate) fn mount(&self) -> &Arc<Inner> {
        &self.mount
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &*self.handle {
            Handle::Plain(handle) => handle.as_fd(),
            Handle::Registered(handle) => handle.as_fd(),
        }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used after.
        let handle = unsafe { ManuallyDrop::take(&mut self.handle) };
        // A daemon that hangs would be waited for.
        self.mount.later(move || drop(handle));
    }
}

fn open(mount: &Inner, path: &Path, direction: Direction) -> Result<(OwnedFd, Stat)> {
    let mode = match direction {
        Direction::Read => OFlags::RDONLY,
        Direction::Write => OFlags::RDWR,
    };
    let handle = retry_on_intr(|| rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty()))
        .map_err(|error| Error::system("open the file", path, error))?;
    let stat = rustix::fs::fstat(&handle)
        .map_err(|error| Error::system("ask for the attributes of", path, error))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Error::Invalid(format!("{} is not a regular file", path.display())));
    }
    let ours = match mount.trust {
        Trust::No => is_3fs(handle.as_fd()) && stat.st_dev == mount.control.device(),
        #[cfg(test)]
        Trust::Peer(_) => true,
    };
    if ours {
        Ok((handle, stat))
    } else {
        Err(Error::NotOn3fs { path: path.to_owned(), seen: vec![mount.point.clone()] })
    }
}

/// Makes the library know a file. It can remember a number whose file was closed without its knowledge, and refuse it.
fn register(library: &Arc<Library>, mut handle: OwnedFd, path: &Path) -> Result<RegisteredFd> {
    // Kept until the end, so that each attempt has another number.
    let mut refused = Vec::new();
    loop {
        match library.register(handle) {
            Ok(registered) => return Ok(registered),
            Err((again, libc::EINVAL)) if refused.len() < REGISTRATION_ATTEMPTS => {
                handle = rustix::io::fcntl_dupfd_cloexec(&again, 0)
                    .map_err(|error| Error::system("open once more", path, error))?;
                refused.push(again);
            }
            Err((_, errno)) => {
                let error = std::io::Error::from_raw_os_error(errno);
                return Err(Error::system("register the file with the vendor's library", path, error));
            }
        }
    }
}

fn ask(file: BorrowedFd<'_>, request: u32) -> Option<u32> {
    let mut answer = 0u32;
    // SAFETY: both requests write four bytes, to `answer`, which outlives the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(request), &raw mut answer) };
    (result == 0).then_some(answer)
}
