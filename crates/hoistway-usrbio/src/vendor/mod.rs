//! The vendor's library, loaded at the first use, behind guards: it aborts the process on arguments that it does
//! not like.
#![allow(unsafe_code)]

pub mod abi;
mod find;
mod ring;

pub use find::LibrarySearch;
pub(crate) use ring::VendorRing;

use crate::{Error, Result, file::is_3fs, mountinfo::c_path, shm::SharedMemory};
use abi::Functions;
use find::{Candidate, NAME, in_directory};
use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};
use std::{
    ffi::CString,
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, TryLockError},
};
use uuid::Uuid;

/// When it is loaded, the library fills a table with 8 bytes for each file that the process may ever open: at this many
/// that is 128 MiB. Without a limit it ends the process.
const MOST_FILES: u64 = 16 << 20;

/// The vendor's library, loaded. It is never unloaded: it has threads.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    functions: Functions,
}

impl Library {
    /// Finds and loads the library. A library is loaded once.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] if there is none; [`Error::LibraryUnusable`] if the first that was found cannot be loaded,
    /// lacks functions, or would end this process.
    pub fn find(search: &LibrarySearch) -> Result<Arc<Self>> {
        let mut tried = Vec::new();
        for candidate in search.candidates() {
            match candidate {
                Candidate::File(path) if path.is_file() => return Self::load(&path),
                Candidate::File(path) => tried.push(path),
                Candidate::Directory(directory) => match in_directory(&directory) {
                    Some(path) => return Self::load(&path),
                    None => tried.push(directory),
                },
                Candidate::Linker => match Self::load(Path::new(NAME)) {
                    // The linker does not say whether it found nothing, or something that does not load.
                    Err(Error::LibraryUnusable { .. }) if may_load().is_ok() => tried.push(NAME.into()),
                    other => return other,
                },
            }
        }
        Err(Error::NoLibrary { tried })
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn load(path: &Path) -> Result<Arc<Self>> {
        static LOADED: Mutex<Vec<Arc<Library>>> = Mutex::new(Vec::new());
        let unusable = |reason: String| Error::LibraryUnusable { library: path.to_owned(), reason };
        // A thread that finds another at it loads the library for itself, which the linker then has already: no child of `fork` waits
        // for a thread of its parent.
        let mut loaded = match LOADED.try_lock() {
            Ok(loaded) => Some(loaded),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let known = loaded.as_ref().and_then(|loaded| loaded.iter().find(|library| library.path == path));
        if let Some(library) = known {
            return Ok(library.clone());
        }
        may_load().map_err(unusable)?;
        // Its 3,600 symbols stay its own.
        let flags = RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: this runs the library's initialisers, which the user asked for; what they are known to choke on was
        // ruled out by `may_load`.
        let handle =
            unsafe { Handle::open(Some(path), flags) }.map_err(|error| unusable(error.to_string()))?;
        // SAFETY: it is the vendor's library by its name, and with `RTLD_NODELETE` it stays.
        let functions = unsafe { Functions::find(&handle) }.map_err(unusable)?;
        let library = Arc::new(Self { path: path.to_owned(), functions });
        if let Some(loaded) = &mut loaded {
            loaded.push(library.clone());
        }
        Ok(library)
    }

    /// Describes memory that is registered already.
    pub(crate) fn wrap_iov(
        &self,
        mount: &Path,
        memory: &SharedMemory,
        id: Uuid,
        block_bytes: usize,
    ) -> Result<WrappedIov> {
        let mut iov = Box::new(abi::Iov::empty());
        let point = self.mount_point(mount)?;
        let (base, id) = (memory.base().as_ptr().cast(), id.into_bytes());
        // SAFETY: `iov` is writable, `id` has 16 bytes, `point` ends in NUL and is short enough; the function copies
        // what it is given.
        let result = unsafe {
            let wrap = self.functions.iov_wrap;
            wrap(&raw mut *iov, base, id.as_ptr(), point.as_ptr(), memory.len(), block_bytes, -1)
        };
        match result {
            0 => Ok(WrappedIov(iov)),
            errno => Err(self.refused("hf3fs_iovwrap", errno)),
        }
    }

    /// Makes a file known to the library. An error gives it back with the error's number.
    pub(crate) fn register(self: &Arc<Self>, file: OwnedFd) -> Result<RegisteredFd, (OwnedFd, i32)> {
        // SAFETY: the descriptor is open; success is zero or negative.
        match unsafe { (self.functions.reg_fd)(file.as_raw_fd(), 0) } {
            errno @ 1.. => Err((file, errno)),
            _ => Ok(RegisteredFd { file: ManuallyDrop::new(file), library: self.clone() }),
        }
    }

    /// The mount point as the library takes it.
    fn mount_point(&self, mount: &Path) -> Result<CString> {
        let point = c_path(mount)?;
        if point.as_bytes_with_nul().len() > abi::MOUNT_POINT_BYTES {
            let reason = format!("the mount point {} is too long for it", mount.display());
            return Err(Error::LibraryUnusable { library: self.path.clone(), reason });
        }
        Ok(point)
    }

    fn refused(&self, function: &str, errno: i32) -> Error {
        let error = std::io::Error::from_raw_os_error(errno.saturating_neg());
        Error::LibraryUnusable { library: self.path.clone(), reason: format!("{function} failed: {error}") }
    }
}

/// Whether loading the library would leave this process alive.
fn may_load() -> Result<(), String> {
    match most_files() {
        Ok(Some(files)) if files <= MOST_FILES => Ok(()),
        Err(error) => Err(format!("the system does not tell the hard limit of open files: {error}")),
        Ok(limit) => {
            let limit = limit.map_or("unlimited".into(), |files| files.to_string());
            Err(format!(
                "the hard limit of open files is {limit}, and the library takes 8 bytes for each, or ends the process: \
                 lower it (ulimit -Hn 1048576, docker run --ulimit nofile=1048576)"
            ))
        }
    }
}

/// The hard limit of open files, if there is one. Not by `rustix`, which takes it that the call cannot fail.
fn most_files() -> std::io::Result<Option<u64>> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes to `limit`, which outlives it.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok((limit.rlim_max != libc::RLIM_INFINITY).then_some(limit.rlim_max))
}

/// A buffer as the library's calls take it.
#[derive(Debug)]
pub(crate) struct WrappedIov(Box<abi::Iov>);

// SAFETY: the struct is not written to after it was filled.
unsafe impl Send for WrappedIov {}
// SAFETY: as above.
unsafe impl Sync for WrappedIov {}

impl WrappedIov {
    fn as_ptr(&self) -> *const abi::Iov {
        &raw const *self.0
    }
}

/// A file that the library knows, until this is dropped.
#[derive(Debug)]
pub(crate) struct RegisteredFd {
    file: ManuallyDrop<OwnedFd>,
    library: Arc<Library>,
}

impl AsFd for RegisteredFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for RegisteredFd {
    fn drop(&mut self) {
        // Without a daemon the library does not forget it, and would refuse the next file with this number: it is never
        // used again.
        if !is_3fs(self.file.as_fd()) {
            return;
        }
        // SAFETY: open, and registered by `Library::register`.
        unsafe { (self.library.functions.dereg_fd)(self.file.as_raw_fd()) };
        // SAFETY: taken once, here.
        drop(unsafe { ManuallyDrop::take(&mut self.file) });
    }
}
