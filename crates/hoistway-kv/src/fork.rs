//! Locks and `fork`: a child has the descriptors of its parent, and so the locks on the files. Should the parent die, the
//! child would keep them. In a child, the descriptors of locked files are those of `/dev/null`.
//!
//! Children that are made by the system call alone, without the C library's `fork`, keep the locks.
#![allow(unsafe_code)]

use hoistway_io::parallel::lock;
use std::{
    fs::File,
    io,
    os::fd::AsRawFd,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicI32, Ordering},
    },
};

/// No descriptor.
const NONE: i32 = -1;

/// Descriptors that children do not keep. Entries are used again, and never freed: a child reads the list without a lock.
struct Entry {
    descriptor: AtomicI32,
    next: OnceLock<Box<Entry>>,
}

impl Entry {
    const fn new() -> Self {
        Self { descriptor: AtomicI32::new(NONE), next: OnceLock::new() }
    }
}

static FIRST: Entry = Entry::new();
static NULL: OnceLock<File> = OnceLock::new();
static IS_REGISTERED: Mutex<bool> = Mutex::new(false);

/// Keeps a descriptor from children of `fork` for as long as it lives. To be dropped before the descriptor is closed.
#[derive(Debug)]
pub(crate) struct NotInChildren {
    entry: &'static AtomicI32,
}

impl NotInChildren {
    /// # Errors
    /// If `/dev/null` cannot be opened, or the C library has no memory.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        register()?;
        let mut entry = &FIRST;
        loop {
            let (free, descriptor) = (NONE, file.as_raw_fd());
            if entry
                .descriptor
                .compare_exchange(free, descriptor, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
            {
                return Ok(Self { entry: &entry.descriptor });
            }
            entry = entry.next.get_or_init(|| Box::new(Entry::new()));
        }
    }
}

impl Drop for NotInChildren {
    fn drop(&mut self) {
        self.entry.store(NONE, Ordering::Release);
    }
}

/// Has [`in_child`] run in children, once in a process.
fn register() -> io::Result<()> {
    let mut is_registered = lock(&IS_REGISTERED);
    if *is_registered {
        return Ok(());
    }
    if NULL.get().is_none() {
        let _ = NULL.set(File::options().read(true).write(true).open("/dev/null")?);
    }
    // SAFETY: the function lives as long as the process, and does in a child only what signal handlers may.
    let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    *is_registered = true;
    Ok(())
}

/// Runs in each child before `fork` returns there.
extern "C" fn in_child() {
    let Some(null) = NULL.get() else { return };
    let mut next = Some(&FIRST);
    while let Some(entry) = next {
        let descriptor = entry.descriptor.load(Ordering::Acquire);
        if descriptor != NONE {
            // SAFETY: both descriptors are open in the parent, and so here: the entry is freed before its file is closed.
            // The number stays in use, so that a later close of it closes nothing else.
            unsafe { libc::dup3(null.as_raw_fd(), descriptor, libc::O_CLOEXEC) };
        }
        next = entry.next.get().map(|next| &**next);
    }
}

#[cfg(test)]
mod tests {
    use crate::disk::{Disk, FileAccess, RealDisk};

    /// A pipe: the descriptors of the end to read from, and of the other.
    fn pipe() -> [i32; 2] {
        let mut ends = [0; 2];
        // SAFETY: there is room for both.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        ends
    }

    /// Waits for a byte, or for the other end to be closed; whether there was one.
    fn read_byte(descriptor: i32) -> bool {
        let mut byte = 0_u8;
        // SAFETY: there is room for the byte.
        unsafe { libc::read(descriptor, (&raw mut byte).cast(), 1) == 1 }
    }

    #[test]
    fn a_child_does_not_keep_the_lock_of_its_dead_parent() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("LEASE");
        RealDisk.open(&path, FileAccess::CreateNew).unwrap();
        let (begun, end) = (pipe(), pipe());
        // SAFETY: the child opens a file, and leaves at once.
        let parent = unsafe { libc::fork() };
        if parent == 0 {
            let lease = RealDisk.open(&path, FileAccess::ReadWrite);
            let is_locked = lease.as_ref().is_ok_and(|lease| lease.try_lock().unwrap_or(false));
            // SAFETY: the descriptors are open, and the child of the child calls the system alone.
            unsafe {
                if libc::fork() == 0 {
                    libc::close(end[1]);
                    libc::write(begun[1], [1_u8].as_ptr().cast(), 1);
                    read_byte(end[0]);
                }
                libc::_exit(i32::from(!is_locked));
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(parent, &mut status, 0) }, parent);
        assert_eq!(status, 0, "the parent had the lock");
        assert!(read_byte(begun[0]), "its child runs");
        let next = RealDisk.open(&path, FileAccess::ReadWrite).unwrap();
        let is_free = next.try_lock().unwrap();
        for descriptor in begun.into_iter().chain(end) {
            // SAFETY: these are the test's, and used no more.
            unsafe { libc::close(descriptor) };
        }
        assert!(is_free, "its child has no lock");
    }
}
