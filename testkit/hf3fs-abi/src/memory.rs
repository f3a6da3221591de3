//! Buffers: made, registered and given back by whichever thread calls.

use crate::{mount_point, negative};
use hoistway_usrbio::{
    Key, RingKey,
    parts::{SharedMemory, abi::Iov, deregister, register},
    proto,
};
use std::{
    collections::HashMap,
    ffi::{c_char, c_int, c_void},
    fs::File,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};
use uuid::Uuid;

/// What a struct of a caller stands for.
pub(crate) struct Made {
    pub(crate) memory: SharedMemory,
    link: PathBuf,
}

/// Makes memory and registers it, as a ring if a key says so.
pub(crate) fn make(
    mount: &Path,
    len: usize,
    block_bytes: usize,
    ring: Option<RingKey>,
) -> Result<(Made, Uuid), c_int> {
    let mut memory = SharedMemory::create(len, None).map_err(|error| negative(&error))?;
    let key = Key { id: Uuid::new_v4(), block_bytes, ring };
    let link = register(mount, &mut memory, &key, |_| ()).map_err(|error| negative(&error))?;
    keep_directory(mount);
    Ok((Made { memory, link }, key.id))
}

impl Drop for Made {
    fn drop(&mut self) {
        deregister(&self.link);
    }
}

/// Fills a caller's struct.
///
/// # Safety
/// `iov` must be writable.
pub(crate) unsafe fn fill(iov: *mut Iov, made: Made, id: Uuid, mount: &Path, block_size: usize, numa: c_int) {
    let (base, size) = (made.memory.base().as_ptr(), made.memory.len());
    let handle = Box::into_raw(Box::new(made)).cast();
    let mut filled = Iov { base, handle, id: id.into_bytes(), size, block_size, numa, ..Iov::empty() };
    write_point(&mut filled.mount_point, mount);
    // SAFETY: the caller's promise.
    unsafe { iov.write(filled) };
}

pub(crate) fn write_point(target: &mut [c_char], mount: &Path) {
    for (target, byte) in target.iter_mut().zip(mount.as_os_str().as_encoded_bytes().iter().chain([&0])) {
        *target = byte.cast_signed() as c_char;
    }
}

/// The daemon frees what this process has when this is closed: at its end.
fn keep_directory(mount: &Path) {
    static OPEN: Mutex<Option<HashMap<PathBuf, File>>> = Mutex::new(None);
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let open = open.get_or_insert_default();
    if !open.contains_key(mount)
        && let Ok(directory) = File::open(mount.join(proto::IOVS))
    {
        open.insert(mount.to_owned(), directory);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovcreate(
    iov: *mut Iov,
    point: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(mount) = (unsafe { mount_point(point) }) else { return -libc::EINVAL };
    if iov.is_null() || size == 0 || block_size > size {
        return -libc::EINVAL;
    }
    match make(mount, size, block_size, None) {
        Ok((made, id)) => {
            // SAFETY: the caller's promise.
            unsafe { fill(iov, made, id, mount, block_size, numa) };
            0
        }
        Err(errno) => errno,
    }
}

/// The memory has lost its name already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovunlink(_iov: *mut Iov) {}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovdestroy(iov: *mut Iov) {
    if iov.is_null() {
        return;
    }
    // SAFETY: the caller's promise: a struct that `hf3fs_iovcreate` has filled.
    unsafe {
        let handle = std::mem::replace(&mut (*iov).handle, std::ptr::null_mut());
        if !handle.is_null() {
            drop(Box::from_raw(handle.cast::<Made>()));
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovwrap(
    iov: *mut Iov,
    base: *mut c_void,
    id: *const u8,
    point: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(mount) = (unsafe { mount_point(point) }) else { return -libc::EINVAL };
    if iov.is_null() || id.is_null() {
        return -libc::EINVAL;
    }
    // SAFETY: the caller's promise: 16 bytes.
    let id = unsafe { id.cast::<[u8; 16]>().read() };
    let mut filled = Iov { base: base.cast(), id, size, block_size, numa, ..Iov::empty() };
    write_point(&mut filled.mount_point, mount);
    // SAFETY: as above.
    unsafe { iov.write(filled) };
    0
}
