//! The two semaphores of the protocol: one of the daemon's to submit, and one in each ring to wait on.
#![allow(unsafe_code)]

use crate::{Error, Result, mountinfo::c_path, shm};
use rustix::time::{ClockId, clock_gettime};
use std::{
    ffi::{c_int, c_void},
    fs, io,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::LazyLock,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// `sem_clockwait`, as POSIX 2024 has it.
type ClockWait = unsafe extern "C" fn(*mut libc::sem_t, libc::clockid_t, *const libc::timespec) -> c_int;

/// The daemon's semaphore, by which it learns of submissions.
#[derive(Debug)]
pub(crate) struct SubmitSemaphore(NonNull<libc::sem_t>);

// SAFETY: POSIX semaphores may be posted from any thread.
unsafe impl Send for SubmitSemaphore {}

impl SubmitSemaphore {
    /// Opens the semaphore that the link `submit-ios` of `mount` points to.
    pub(crate) fn open(mount: &Path, target: &Path) -> Result<Self> {
        let strange = || Error::Protocol {
            mount: mount.to_owned(),
            detail: format!("submit-ios is {}", target.display()),
        };
        let name = target
            .strip_prefix(shm::DIRECTORY)
            .ok()
            .and_then(Path::to_str)
            .and_then(|name| name.strip_prefix("sem."))
            .filter(|name| !name.is_empty() && !name.contains('/'))
            .ok_or_else(strange)?;
        let invisible =
            || Error::SharedMemoryNamespace { mount: mount.to_owned(), name: format!("sem.{name}") };
        // A shorter file would be mapped all the same, and fault.
        let len = fs::metadata(target).map_err(|_| invisible())?.len();
        if len < size_of::<libc::sem_t>() as u64 {
            return Err(strange());
        }
        let c_name = c_path(&PathBuf::from(format!("/{name}")))?;
        // SAFETY: the name ends in NUL and outlives the call, which takes no more arguments without O_CREAT.
        let semaphore = unsafe { libc::sem_open(c_name.as_ptr(), 0) };
        if semaphore == libc::SEM_FAILED {
            let error = io::Error::last_os_error();
            return Err(match error.kind() {
                io::ErrorKind::NotFound => invisible(),
                _ => Error::system("open the daemon's semaphore", target, error),
            });
        }
        NonNull::new(semaphore).map(Self).ok_or_else(strange)
    }

    pub(crate) fn post(&self) {
        // A count that is at its limit has woken the daemon often enough: no error of `sem_post` matters here.
        // SAFETY: opened by `open`, closed only by `drop`.
        let _ = unsafe { libc::sem_post(self.0.as_ptr()) };
    }
}

impl Drop for SubmitSemaphore {
    fn drop(&mut self) {
        // SAFETY: opened by `open`; no other code has the address.
        let _ = unsafe { libc::sem_close(self.0.as_ptr()) };
    }
}

/// Waits for a post, `limit` at most. Returns early for signals, too: look again at what was waited for.
///
/// # Safety
/// `semaphore` must lie in mapped memory. What it holds does not matter.
pub unsafe fn wait(semaphore: *mut libc::sem_t, limit: Duration) {
    // SAFETY: the caller's promise, here and below. The C library treats the fields as numbers, whatever they are.
    let _ = match *CLOCK_WAIT {
        Some(clock_wait) => {
            let now = clock_gettime(ClockId::Monotonic);
            let now = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32);
            let until = timespec(now.saturating_add(limit));
            // SAFETY: as above.
            unsafe { clock_wait(semaphore, libc::CLOCK_MONOTONIC, &raw const until) }
        }
        // If the clock is set in the meantime, the wait gets longer or shorter.
        None => {
            let until = absolute(limit);
            // SAFETY: as above.
            unsafe { libc::sem_timedwait(semaphore, &raw const until) }
        }
    };
}

/// The wait that a change of the clock does not disturb, where the C library has it: glibc since 2.30, musl not.
static CLOCK_WAIT: LazyLock<Option<ClockWait>> = LazyLock::new(|| {
    // SAFETY: the name ends in NUL.
    let found = NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"sem_clockwait".as_ptr()) });
    // SAFETY: by its name it is POSIX's function of this type. The C library stays as long as the process.
    found.map(|function| unsafe { std::mem::transmute::<NonNull<c_void>, ClockWait>(function) })
});

/// The time in `limit` from now, on the clock that `sem_timedwait` and the vendor's library know.
pub(crate) fn absolute(limit: Duration) -> libc::timespec {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    timespec(now.saturating_add(limit))
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(time.subsec_nanos() as i32),
    }
}
