//! Memory of clients, as the daemon sees it, and its semaphores.
#![allow(unsafe_code)]

use rustix::mm::{MapFlags, ProtFlags};
use std::{
    ffi::CString,
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    ptr::NonNull,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use uuid::Uuid;

/// A client's shared memory.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; the bytes are reached through raw pointers and system calls only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = fs::File::options().read(true).write(true).open(path)?;
        let len = usize::try_from(file.metadata()?.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping touches no other memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                // As registering memory with InfiniBand does: no transfer waits for a page.
                MapFlags::SHARED | MapFlags::POPULATE,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A semaphore with a name, for clients to post.
pub(crate) struct NamedSemaphore {
    name: CString,
    path: PathBuf,
    semaphore: NonNull<libc::sem_t>,
}

// SAFETY: POSIX semaphores are made for many threads.
unsafe impl Send for NamedSemaphore {}
// SAFETY: as above.
unsafe impl Sync for NamedSemaphore {}

impl NamedSemaphore {
    pub(crate) fn create() -> io::Result<Self> {
        let name = format!("hf3fs-submit-ios.{}", Uuid::new_v4().hyphenated());
        let path = Path::new("/dev/shm").join(format!("sem.{name}"));
        let name = CString::new(format!("/{name}"))?;
        // SAFETY: the name ends in NUL; mode and value follow as `O_CREAT` demands.
        let semaphore =
            unsafe { libc::sem_open(name.as_ptr(), libc::O_CREAT | libc::O_EXCL, 0o666 as libc::mode_t, 0) };
        if semaphore == libc::SEM_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Whatever the umask was.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
        let semaphore = NonNull::new(semaphore).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { name, path, semaphore })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn post(&self) {
        // SAFETY: open until dropped.
        let _ = unsafe { libc::sem_post(self.semaphore.as_ptr()) };
    }

    /// Whether it was posted within `limit`.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let until = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + limit;
        let until = libc::timespec {
            tv_sec: until.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(until.subsec_nanos() as i32),
        };
        // SAFETY: open until dropped.
        unsafe { libc::sem_timedwait(self.semaphore.as_ptr(), &raw const until) == 0 }
    }
}

impl Drop for NamedSemaphore {
    fn drop(&mut self) {
        // SAFETY: opened by `create`; the name ends in NUL.
        unsafe {
            libc::sem_close(self.semaphore.as_ptr());
            libc::sem_unlink(self.name.as_ptr());
        }
    }
}
