//! Transfers at a position, of handles that may have several at once.
//!
//! Windows carries out the transfers of a handle one after the other, whichever threads ask, unless the handle was opened
//! with `FILE_FLAG_OVERLAPPED`. Files are opened with it, and each thread waits for its transfer by an event. The functions
//! of the standard library must not be used on such handles: they end the process if another transfer signals the handle
//! first.
#![allow(unsafe_code)]

use super::{code, files};
use std::{
    fs::File,
    io,
    os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle},
    ptr, thread,
    time::Duration,
};
use windows_sys::{
    Win32::{
        Foundation::{
            ERROR_HANDLE_EOF, ERROR_INVALID_USER_BUFFER, ERROR_IO_PENDING, ERROR_NO_SYSTEM_RESOURCES,
            ERROR_NOT_ENOUGH_QUOTA, ERROR_WORKING_SET_QUOTA, HANDLE, STATUS_PENDING,
        },
        Storage::FileSystem::{ReadFile, WriteFile},
        System::{
            IO::{CancelIoEx, GetOverlappedResult, OVERLAPPED, OVERLAPPED_0, OVERLAPPED_0_0},
            Threading::CreateEventW,
        },
    },
    core::BOOL,
};

/// Bytes of one transfer, at most: a multiple of every sector, and less than the system counts.
const MOST_BYTES: usize = 1 << 30;
/// Sectors of drives are at least this long. Most have these; those of others are multiples.
const SECTOR_BYTES: usize = 512;
/// Pause before a transfer that cannot be waited for is looked at again.
const PAUSE: Duration = Duration::from_millis(1);

/// Reads up to as many bytes as fit, from `offset` on.
///
/// # Errors
/// The system's.
pub(super) fn read(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let len = most(file, bytes.as_ptr(), bytes.len(), offset);
    // SAFETY: `run` returns once the transfer is over, so that the memory is valid and borrowed as long as it is written to.
    let read = |handle, place| unsafe { ReadFile(handle, bytes.as_mut_ptr(), len, ptr::null_mut(), place) };
    run(file, offset, read).or_else(at_end)
}

/// Turns the error of a read at the end of the file into a count of 0.
pub(super) fn at_end(error: io::Error) -> io::Result<usize> {
    if code(&error) == Some(ERROR_HANDLE_EOF) { Ok(0) } else { Err(error) }
}

/// Writes up to all bytes, from `offset` on.
///
/// # Errors
/// The system's.
pub(super) fn write(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    let len = most(file, bytes.as_ptr(), bytes.len(), offset);
    // SAFETY: as above; the memory is read.
    run(file, offset, |handle, place| unsafe {
        WriteFile(handle, bytes.as_ptr(), len, ptr::null_mut(), place)
    })
}

/// Bytes that one transfer takes of `len`.
///
/// Debug builds assert what the system refuses on a handle without a cache. Wine does not refuse it.
pub(super) fn most(file: &File, address: *const u8, len: usize, offset: u64) -> u32 {
    let len = len.min(MOST_BYTES);
    let is_whole = |number: usize| number.is_multiple_of(SECTOR_BYTES);
    debug_assert!(
        [address.addr(), len, offset as usize].into_iter().all(is_whole) || !files::is_direct(file),
        "a direct transfer of {len} bytes at {offset}, memory at {address:p}, is not in whole sectors"
    );
    len as u32
}

/// Starts a transfer at `offset` and waits for it.
pub(super) fn run(
    file: &File,
    offset: u64,
    start: impl FnOnce(HANDLE, *mut OVERLAPPED) -> BOOL,
) -> io::Result<usize> {
    let event = event()?;
    let mut place = at(offset);
    // With this bit, nothing is told to a completion port that the owner of the handle may have.
    place.hEvent = event.as_raw_handle().map_addr(|address| address | 1);
    let handle = file.as_raw_handle();
    if start(handle, &raw mut place) == 0 {
        let error = io::Error::last_os_error();
        if code(&error) != Some(ERROR_IO_PENDING) {
            return Err(retried(error));
        }
    }
    loop {
        let mut count = 0;
        // SAFETY: the handle is open, the structure is that of its transfer, and both outlive the call.
        if unsafe { GetOverlappedResult(handle, &raw const place, &raw mut count, 1) } != 0 {
            return Ok(count as usize);
        }
        let error = io::Error::last_os_error();
        // SAFETY: a number of the structure, which the system may be writing.
        if unsafe { (&raw const place.Internal).read_volatile() } as i32 != STATUS_PENDING {
            return Err(retried(error));
        }
        // It may still write to the memory: there is no way on before it is over.
        // SAFETY: as above.
        unsafe { CancelIoEx(handle, &raw const place) };
        thread::sleep(PAUSE);
    }
}

/// The structure of a transfer at `offset`.
pub(super) fn at(offset: u64) -> OVERLAPPED {
    let place = OVERLAPPED_0_0 { Offset: offset as u32, OffsetHigh: (offset >> 32) as u32 };
    OVERLAPPED { Anonymous: OVERLAPPED_0 { Anonymous: place }, ..Default::default() }
}

/// An error of a transfer: [`WouldBlock`](io::ErrorKind::WouldBlock) where too many are in flight for what the system sets
/// apart for them, which asks for another attempt.
pub(super) fn retried(error: io::Error) -> io::Error {
    const SHORT: [u32; 4] = [
        ERROR_INVALID_USER_BUFFER,
        ERROR_NO_SYSTEM_RESOURCES,
        ERROR_NOT_ENOUGH_QUOTA,
        ERROR_WORKING_SET_QUOTA,
    ];
    match code(&error) {
        Some(number) if SHORT.contains(&number) => io::Error::new(io::ErrorKind::WouldBlock, error),
        _ => error,
    }
}

fn event() -> io::Result<OwnedHandle> {
    // SAFETY: no attributes and no name; it is reset by hand, and not signalled.
    let event = unsafe { CreateEventW(ptr::null(), 1, 0, ptr::null()) };
    if event.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new handle, which has no other owner.
    Ok(unsafe { OwnedHandle::from_raw_handle(event) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn threads_share_a_handle() {
        const PART: usize = 1 << 16;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let content: Vec<u8> = (0..8 * PART).map(|at| (at / 3 % 251) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let (file, barrier) = (files::open_without_waiting(&path).unwrap().0, Barrier::new(8));
        thread::scope(|scope| {
            for (part, expected) in content.chunks(PART).enumerate() {
                let (file, barrier) = (&file, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    for _ in 0..50 {
                        let mut bytes = vec![0; PART];
                        assert_eq!(read(file, &mut bytes, (part * PART) as u64).unwrap(), PART);
                        assert!(bytes == expected);
                    }
                });
            }
        });
        let mut bytes = [0; 8];
        assert_eq!(read(&file, &mut bytes, content.len() as u64).unwrap(), 0);
        assert_eq!(read(&file, &mut bytes, content.len() as u64 - 3).unwrap(), 3);
        let error = write(&file, b"no", 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_lack_of_resources_asks_for_another_attempt() {
        let of = |code: u32| retried(io::Error::from_raw_os_error(code.cast_signed()));
        let error = of(ERROR_NO_SYSTEM_RESOURCES);
        assert!(error.kind() == io::ErrorKind::WouldBlock && error.to_string().contains("1450"), "{error}");
        assert_ne!(of(ERROR_HANDLE_EOF).kind(), io::ErrorKind::WouldBlock);
    }
}
