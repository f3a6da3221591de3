//! Files: which are on a 3FS, and which transfers may use.

use hoistway_usrbio::{extract_mount_point, is_3fs};
use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_int},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A file that was registered.
pub(crate) struct Registered {
    pub(crate) inode: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Keeps the file open for the daemon.
    duplicate: OwnedFd,
}

static FILES: Mutex<Option<HashMap<c_int, Registered>>> = Mutex::new(None);

fn files() -> MutexGuard<'static, Option<HashMap<c_int, Registered>>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks a file up, by its number or by what `hf3fs_reg_fd` returned.
pub(crate) fn with_file<T>(number: c_int, look: impl FnOnce(&Registered) -> T) -> Option<T> {
    let files = files();
    let files = files.as_ref()?;
    let by_duplicate = || files.values().find(|file| -file.duplicate.as_raw_fd() == number);
    files.get(&number).or_else(by_duplicate).map(look)
}

fn borrowed<'a>(number: c_int) -> Option<BorrowedFd<'a>> {
    // SAFETY: used within a call whose caller holds the file; a number that is none leads to errors only.
    (number >= 0).then(|| unsafe { BorrowedFd::borrow_raw(number) })
}

#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_is_hf3fs(file: c_int) -> bool {
    borrowed(file).is_some_and(is_3fs)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_extract_mount_point(
    target: *mut c_char,
    size: c_int,
    path: *const c_char,
) -> c_int {
    if path.is_null() {
        return -1;
    }
    // SAFETY: the caller's promise: it ends in NUL.
    let Ok(path) = (unsafe { CStr::from_ptr(path) }).to_str() else { return -1 };
    let Ok(point) = extract_mount_point(Path::new(path)) else { return -1 };
    let point = point.as_os_str().as_encoded_bytes();
    let Ok(len) = c_int::try_from(point.len()) else { return -1 };
    if len < size && !target.is_null() {
        // SAFETY: the caller's promise: `size` bytes are there, and these are at most as many.
        unsafe {
            target.copy_from_nonoverlapping(point.as_ptr().cast(), point.len());
            target.add(point.len()).write(0);
        }
    }
    len + 1
}

/// Success is not positive.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_reg_fd(file: c_int, _flags: u64) -> c_int {
    let Some(handle) = borrowed(file).filter(|handle| is_3fs(*handle)) else { return libc::EBADF };
    let mut files = files();
    let files = files.get_or_insert_default();
    if files.contains_key(&file) {
        return libc::EINVAL;
    }
    let registered = || -> rustix::io::Result<Registered> {
        let access = rustix::fs::fcntl_getfl(handle)? & rustix::fs::OFlags::RWMODE;
        Ok(Registered {
            inode: rustix::fs::fstat(handle)?.st_ino,
            readable: access != rustix::fs::OFlags::WRONLY,
            writable: access != rustix::fs::OFlags::RDONLY,
            duplicate: rustix::io::fcntl_dupfd_cloexec(handle, 0)?,
        })
    };
    match registered() {
        Ok(registered) => {
            let number = -registered.duplicate.as_fd().as_raw_fd();
            files.insert(file, registered);
            number
        }
        Err(error) => error.raw_os_error(),
    }
}

/// Forgets a file only while it is open and its daemon alive.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_dereg_fd(file: c_int) {
    if hf3fs_is_hf3fs(file)
        && let Some(files) = files().as_mut()
    {
        files.remove(&file);
    }
}
