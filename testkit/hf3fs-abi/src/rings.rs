//! Rings: transfers go in, completions come out.

use crate::{
    files::with_file,
    memory::{Made, fill, make, write_point},
    mount_point, negative,
};
use hoistway_usrbio::{
    Direction, RingKey, RingPriority,
    parts::{
        RingClient,
        abi::{Cqe, Ior, Iov},
        wait,
    },
    proto::{self, IoArgs, MAX_ENTRIES, ring_bytes},
};
use std::{
    ffi::{c_char, c_int, c_void},
    fs,
    path::Path,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The vendor's library looks so often.
const JITTER: Duration = Duration::from_millis(1);

type Client = Mutex<RingClient>;

fn create(ior: *mut Ior, mount: &Path, entries: c_int, key: RingKey, numa: c_int) -> Result<(), c_int> {
    let count = usize::try_from(entries).ok().filter(|count| (1..=MAX_ENTRIES).contains(count));
    let (Some(count), false) = (count, ior.is_null()) else { return Err(-libc::EINVAL) };
    let (made, id) = make(mount, ring_bytes(count), 0, Some(key.clone()))?;
    let link = mount.join(proto::IOVS).join(key.priority.submit_link());
    let target = fs::read_link(link).map_err(|error| -error.raw_os_error().unwrap_or(libc::EIO))?;
    // SAFETY: the memory is kept by the struct, which is destroyed after the client.
    let client = unsafe { RingClient::new(mount.to_owned(), made.memory.base(), made.memory.len(), &target) }
        .map_err(|error| negative(&error))?;
    let mut filled = Ior {
        handle: Box::into_raw(Box::new(Client::new(client))).cast(),
        for_read: key.direction == Direction::Read,
        io_depth: key.io_depth,
        timeout: key.timeout_ms.cast_signed(),
        flags: key.flags,
        ..Ior::empty()
    };
    write_point(&mut filled.mount_point, mount);
    // SAFETY: the caller's promise: `ior` is writable.
    unsafe {
        fill(&raw mut filled.iov, made, id, mount, 0, numa);
        ior.write(filled);
    }
    Ok(())
}

/// What all variants come down to.
///
/// # Safety
/// Those of the ABI.
unsafe fn create_any(
    ior: *mut Ior,
    point: *const c_char,
    entries: c_int,
    (for_read, io_depth, priority, timeout): (bool, c_int, c_int, c_int),
    numa: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(mount), Ok(timeout_ms)) = (unsafe { mount_point(point) }, u32::try_from(timeout)) else {
        return -libc::EINVAL;
    };
    let direction = if for_read { Direction::Read } else { Direction::Write };
    let priority = match priority {
        ..0 => RingPriority::High,
        0 => RingPriority::Normal,
        1.. => RingPriority::Low,
    };
    let key = RingKey { direction, io_depth, priority, timeout_ms, flags };
    create(ior, mount, entries, key, numa).err().unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate(
    ior: *mut Ior,
    point: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    numa: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { create_any(ior, point, entries, (for_read, io_depth, 0, 0), numa, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate2(
    ior: *mut Ior,
    point: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    numa: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { create_any(ior, point, entries, (for_read, io_depth, priority, 0), numa, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate3(
    ior: *mut Ior,
    point: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    timeout: c_int,
    numa: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { create_any(ior, point, entries, (for_read, io_depth, priority, timeout), numa, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate4(
    ior: *mut Ior,
    point: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    timeout: c_int,
    numa: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { create_any(ior, point, entries, (for_read, io_depth, 0, timeout), numa, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iordestroy(ior: *mut Ior) {
    if ior.is_null() {
        return;
    }
    // SAFETY: the caller's promise: a struct that was filled here. The client goes before its memory.
    unsafe {
        let client = std::mem::replace(&mut (*ior).handle, std::ptr::null_mut());
        if !client.is_null() {
            drop(Box::from_raw(client.cast::<Client>()));
        }
        let made = std::mem::replace(&mut (*ior).iov.handle, std::ptr::null_mut());
        if !made.is_null() {
            drop(Box::from_raw(made.cast::<Made>()));
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_ior_size(entries: c_int) -> usize {
    usize::try_from(entries).map_or(0, ring_bytes)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_io_entries(ior: *const Ior) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { client(ior) } {
        Some(client) => client.lock().unwrap_or_else(PoisonError::into_inner).entries(),
        None => -libc::EINVAL,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_prep_io(
    ior: *const Ior,
    iov: *const Iov,
    read: bool,
    place: *mut c_void,
    file: c_int,
    offset: usize,
    len: u64,
    user_data: *const c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(client), Some(iov), Some(ior)) =
        (unsafe { client(ior) }, unsafe { iov.as_ref() }, unsafe { ior.as_ref() })
    else {
        return -libc::EINVAL;
    };
    let buffer_offset = place.addr().checked_sub(iov.base.addr());
    let inside = buffer_offset.filter(|start| {
        usize::try_from(len).ok().and_then(|len| start.checked_add(len)).is_some_and(|end| end <= iov.size)
    });
    let (Some(buffer_offset), true, 1..) = (inside, read == ior.for_read, len) else { return -libc::EINVAL };
    let Some((inode, allowed)) =
        with_file(file, |file| (file.inode, if read { file.readable } else { file.writable }))
    else {
        return -libc::EBADF;
    };
    if !allowed {
        return -libc::EACCES;
    }
    let user_data = user_data.addr() as u64;
    let args = IoArgs { buffer: iov.id, buffer_offset, inode, file_offset: offset, len, user_data };
    match client.lock().unwrap_or_else(PoisonError::into_inner).prepare(args) {
        Ok(Some(index)) => index,
        Ok(None) => -libc::EAGAIN,
        Err(error) => negative(&error),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_submit_ios(ior: *const Ior) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { client(ior) } {
        Some(client) => {
            client.lock().unwrap_or_else(PoisonError::into_inner).submit();
            0
        }
        None => -libc::EINVAL,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_wait_for_ios(
    ior: *const Ior,
    cqes: *mut Cqe,
    most: c_int,
    least: c_int,
    until: *const libc::timespec,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(client), false, 1..) = (unsafe { client(ior) }, cqes.is_null(), most) else {
        return -libc::EINVAL;
    };
    // SAFETY: the caller's promise.
    let until = unsafe { until.as_ref() };
    let until = until.map(|until| Duration::new(until.tv_sec.max(0) as u64, until.tv_nsec.max(0) as u32));
    let mut count = 0;
    loop {
        let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
        let before = count;
        while count < most {
            match client.reap() {
                Ok(Some(cqe)) => {
                    let user_data = std::ptr::without_provenance(cqe.user_data as usize);
                    let one = Cqe { index: cqe.index, reserved: 0, result: cqe.result, user_data };
                    // SAFETY: the caller's promise: there are `most` places.
                    unsafe { cqes.add(count as usize).write(one) };
                    count += 1;
                }
                Ok(None) => break,
                Err(error) => return negative(&error),
            }
        }
        if count > before {
            client.submit();
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if count >= least.min(most) || until.is_some_and(|until| now >= until) {
            return count;
        }
        let semaphore = client.layout().semaphore();
        // Another thread may append meanwhile.
        drop(client);
        // SAFETY: the ring stays mapped as long as the caller's struct.
        unsafe { wait(semaphore, JITTER) };
    }
}

/// # Safety
/// `ior` must be null or a struct that was filled here.
unsafe fn client<'a>(ior: *const Ior) -> Option<&'a Client> {
    // SAFETY: the caller's promise.
    unsafe { ior.as_ref()?.handle.cast::<Client>().as_ref() }
}
